"""Boxes of arrays, and the digest of weights in host memory, box by box: the number that `digest.digest` gives for
the whole arrays.

    box_sums of each box, on whichever process holds it -> added up for each leaf -> combined: the digest

Consumes NumPy arrays, each a box of one leaf of a pytree; produces sums over the bits of its elements, mixed with their
places. Sums over disjoint boxes add up to those of the leaf, so every process computes its own part and no process
needs all of it. NumPy alone, which is as fast as a compiled digest on one core and compiles nothing.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

GOLDEN, MIX_1, MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # of digest.py
MASK = 2**32 - 1
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BLOCK = 1 << 14  # elements at a time: the buffers stay in the cache
TASKS = 16  # into which a box is cut for the threads
THREADS = 8

Sums = tuple[int, int]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dimension


def box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """The box of an index of an array; None: all of it."""
    spans = [part.indices(size) for part, size in zip(index or (slice(None),) * len(shape), shape, strict=True)]
    return tuple(a for a, _, _ in spans), tuple(b for _, b, _ in spans)


def volume(box: Box) -> int:
    return math.prod(b - a for a, b in zip(*box, strict=True))


def common(a: Box, b: Box) -> Box | None:
    """The box that is in both; None: they have no element in common."""
    start, stop = tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))
    return (start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None


def within(box: Box, outer: Box) -> tuple[slice | types.EllipsisType, ...]:
    """The index of `box` in an array of the outer box."""
    return (*(slice(a - at, b - at) for a, b, at in zip(*box, outer[0], strict=True)), ...)


@dataclass(frozen=True, slots=True)
class LeafBox:
    """A box of a leaf of a pytree. number: of the leaf; start: of the box in the leaf, which is of this shape."""

    array: np.ndarray
    number: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def sums_of(boxes: Sequence[LeafBox]) -> list[Sums]:
    """The sums of each box. Several threads share the work."""
    parts: list[tuple[int, LeafBox]] = []  # along the first axis
    for i, box in enumerate(boxes):
        rows = len(box.array) if box.array.ndim else 0
        step = max(1, -(-rows // TASKS))
        if rows <= step:
            parts.append((i, box))
            continue
        for at in range(0, rows, step):
            start = (box.start[0] + at, *box.start[1:])
            parts.append((i, LeafBox(box.array[at : at + step], box.number, start, box.shape)))
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "digest") as pool:
        done = list(pool.map(lambda item: box_sums(item[1]), parts))
    sums: list[list[Sums]] = [[] for _ in boxes]
    for (i, _), part in zip(parts, done, strict=True):
        sums[i].append(part)
    return [added(each) for each in sums]


def added(sums: Iterable[Sums]) -> Sums:
    first, second = 0, 0
    for a, b in sums:
        first, second = (first + a) & MASK, (second + b) & MASK
    return first, second


def combined(leaves: Iterable[Sums]) -> int:
    """The digest of a pytree from the sums of its leaves, in their order."""
    high, low = 0, 0
    for first, second in leaves:
        high = ((high ^ high >> 15) * MIX_1 + first) & MASK
        low = ((low ^ low >> 15) * MIX_1 + second) & MASK
    return high << 32 | low


def box_sums(box: LeafBox) -> Sums:
    words, places = _rows(box)
    n_rows, n_run = words.shape
    width = min(n_run, BLOCK)
    height = max(1, BLOCK // max(1, width))
    bits, mixed, shifted = (np.empty((height, width), np.uint32) for _ in range(3))
    steps = np.arange(width, dtype=np.uint32)
    strides = [(factor, steps * np.uint32(factor)) for factor in (GOLDEN, MIX_1)]
    found = [0, 0]
    for row in range(0, n_rows, height):
        for column in range(0, n_run, width):
            part = words[row : row + height, column : column + width]
            h, w = part.shape
            bits[:h, :w] = part
            first = places[row : row + h, None] + np.uint32(column & MASK)
            for i, (factor, stride) in enumerate(strides):
                hashes = np.add(first * np.uint32(factor), stride[None, :w], out=mixed[:h, :w])
                (np.add if i else np.bitwise_xor)(hashes, bits[:h, :w], out=hashes)
                for shift, mixer in ((16, MIX_1), (13, MIX_2), (16, None)):
                    np.bitwise_xor(hashes, np.right_shift(hashes, shift, out=shifted[:h, :w]), out=hashes)
                    if mixer is not None:
                        np.multiply(hashes, np.uint32(mixer), out=hashes)
                found[i] += int(hashes.sum(dtype=np.uint32))
    return found[0] & MASK, found[1] & MASK


# ---------------------------------------------------------------- private


def _rows(box: LeafBox) -> tuple[np.ndarray, np.ndarray]:
    """(bits of the elements, by runs that lie end to end in the leaf; u32: the place of each run's first element)"""
    array, shape = box.array, box.shape
    axis = len(shape) - 1
    while axis > 0 and array.shape[axis] == shape[axis]:
        axis -= 1
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = (box.number + 1) * MIX_2 + sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    places = np.array([base & MASK], np.uint32)
    for i in range(max(axis, 0)):
        along = np.arange(array.shape[i], dtype=np.uint32) * np.uint32(strides[i] & MASK)
        places = (places[:, None] + along[None, :]).reshape(-1)
    words: Any = np.ascontiguousarray(array).reshape(-1).view(WORDS[array.dtype.itemsize])
    return words.reshape(len(places), -1), places
