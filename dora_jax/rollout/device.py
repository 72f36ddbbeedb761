"""Stage 2, device side: the arrays of one engine and their way to and from the host.

Consumes compiled calls (device_calls.py) and host arrays; owns the KV pool and the state of the slots.
Laws: every call donates the pool and the state, so calls run in the order they are made; only `np.asarray` of a result
waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from dora_jax.rollout.device_calls import Calls
from dora_jax.rollout.shapes import SLOT, Shapes

HEADS_AXIS = 2  # of a copy of pages: [layers, pages, K, ...]


class Device:
    """Pool and per-slot state. Methods launch; only `np.asarray` of a result waits."""

    def __init__(self, calls: Calls, shapes: Shapes):
        self.shapes = shapes
        self.compiled = calls.compiled
        self._calls = calls
        self.pool, self.state = calls.empty()

    def prefill(self, params: Any, control: np.ndarray, blocks: int) -> None:
        control = _put(control, self._calls.replicated)
        self.pool = self._calls.prefill(params, self.pool, control, blocks=blocks)

    def generate(self, params: Any, control: np.ndarray, blocks: int) -> jax.Array:
        """i32[rows, shapes.result]: tokens, log-prob bits, how many of them count, keep sets."""
        control = _put(control, self._calls.replicated)
        call = (
            self._calls.decode_chosen if self._calls.chooses else functools.partial(self._calls.decode, blocks=blocks)
        )
        self.pool, self.state, result = call(params, self.pool, self.state, control)
        result.copy_to_host_async()
        return result

    def copy_pages(self, pages: list[int]) -> PagesCopy:
        return PagesCopy(
            lambda ids: self._calls.read(self.pool, _put(ids, self._calls.replicated)), pages, self.shapes.copy_call
        )

    def read_pages(self, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
        copy = self.copy_pages(pages)
        while copy.launch(len(pages)):
            copy.land()
        return copy.arrays

    def write_pages(self, pages: list[int], k_pages: np.ndarray, v_pages: np.ndarray) -> None:
        start = 0
        while start < len(pages):
            size = self.shapes.copy_call(len(pages) - start)
            ids = _ids(pages[start : start + size], size)
            k, v = (_padded(x[:, start : start + size], size) for x in (k_pages, v_pages))
            start += size
            k, v = _put(k, self._calls.pages_sharding), _put(v, self._calls.pages_sharding)
            self.pool = self._calls.write(self.pool, _put(ids, self._calls.replicated), k, v)

    def warmup(self, params: Any) -> None:
        """Compiles every call by making it once with padding rows only."""
        s = self.shapes
        for blocks in s.prefill_buckets:
            self.prefill(params, np.zeros(s.prefill_control(blocks), np.int32), blocks)
        for blocks in s.decode_buckets:
            control = np.zeros(s.decode_control(blocks), np.int32)
            control[:, SLOT] = s.slots
            self.generate(params, control, blocks).block_until_ready()
        for size in (s.copy_pages, s.alone_pages):
            self.write_pages([0] * size, *self.read_pages([0] * size))


class PagesCopy:
    """Pages on their way to the host, a piece at a time: between `launch` and `land` the device goes on with others.

    arrays: K [layers, pages, K, D, page_size] and V [layers, pages, K, page_size, D], of which what has landed is
    there; of several processes each gets the heads that it holds.
    """

    def __init__(
        self, read: Callable[[np.ndarray], tuple[jax.Array, jax.Array]], pages: list[int], call: Callable[[int], int]
    ):
        self._read, self._pages, self._call = read, pages, call
        self._launched: tuple[jax.Array, jax.Array] | None = None
        self._start = self._stop = 0  # of the piece that was launched last
        self.arrays: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def more(self) -> bool:
        """Whether pieces follow the one launched last."""
        return self._stop < len(self._pages)

    def launch(self, most: int) -> bool:
        """Starts the next piece, of so many pages at most; False where none is left."""
        piece = self._pages[self._stop :][:most]
        size = self._call(len(piece))
        self._start, self._stop = self._stop, self._stop + min(len(piece), size)
        self._launched = self._read(_ids(piece[:size], size)) if piece else None
        return bool(piece)

    def land(self) -> None:
        piece = tuple(map(_local, self._launched))
        if self.arrays is None:
            self.arrays = tuple(np.empty((x.shape[0], len(self._pages), *x.shape[2:]), x.dtype) for x in piece)
        for whole, part in zip(self.arrays, piece, strict=True):
            whole[:, self._start : self._stop] = part[:, : self._stop - self._start]


def _put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Of several processes each gives what its own devices get: all of it, or its heads."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, x)


def _local(x: jax.Array) -> np.ndarray:
    """This process's part of pages; what it holds lies side by side on the axis of heads."""
    if x.is_fully_addressable:
        return np.asarray(x)
    parts = {shard.index[HEADS_AXIS].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=HEADS_AXIS)


def _ids(pages: list[int], size: int) -> np.ndarray:
    """i32[size], padded with the dummy page."""
    ids = np.zeros(size, np.int32)
    ids[: len(pages)] = pages
    return ids


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    """To `size` pages on axis 1, contiguous."""
    if x.shape[1] == size:
        return np.ascontiguousarray(x)
    out = np.zeros((x.shape[0], size, *x.shape[2:]), x.dtype)
    out[:, : x.shape[1]] = x
    return out
