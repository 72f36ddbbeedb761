"""What travels ahead of arrays: the shards that a receiver needs, those that are offered, and whether the two agree.

Consumes and produces records (`CODEC` writes and reads them); knows neither JAX nor the wire. Law: `check` passes
exactly those manifests whose shards give every element of the expected shards once, and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.codec import Codec
from dora_jax.types import Version

EXPECTED_BYTES_PER_S = 0.4 * 2**30  # two busy cores reach it; links are faster
GRACE_S = 30.0  # for a first connection, or a sender whose cores are busy


class WireError(RuntimeError):
    """Nothing was taken. The message says what did not agree, or how the transfer ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Names one transfer to one receiver. `epoch`: of the receiver's world. `sequence` rises and is never used
    again."""

    epoch: int
    version: Version
    receiver: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of one array."""

    path: str
    shape: tuple[int, ...]  # of the whole array
    dtype: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The shards that one process offers under a key, in the order in which it sends them."""

    key: Key
    sender: str  # the role and the incarnation of the process at
    incarnation: int
    address: str
    number: int  # of the offer at that address
    shards: tuple[Shard, ...]
    crc32: tuple[int, ...]  # of the bytes of each shard


@dataclass(frozen=True, slots=True, kw_only=True)
class KVOffer:
    """A running sample on its way to another engine. `manifest` None: it has no pages, or `in_flight` carries them."""

    in_flight: InFlightSample  # without pages where the manifest offers them
    kv_len: int
    page_size: int
    manifest: Manifest | None


CODEC = Codec(Key, Shard, Manifest)


def check(manifests: Sequence[Manifest], expected: Sequence[Shard], key: Key) -> None:
    """WireError where the manifests are not exactly the expected shards under this key."""
    offered: dict[Shard, None] = {}
    there: dict[str, list[Shard]] = {}
    for manifest in manifests:
        if manifest.key != key:
            raise WireError(f"{words(manifest.key)} is offered where {words(key)} is expected")
        if not 0 < manifest.number < 1 << 63:
            raise WireError(f"{manifest.number} cannot be the number of an offer")
        if len(manifest.crc32) != len(manifest.shards):
            raise WireError(f"{words(key)}: {len(manifest.shards)} shards come with {len(manifest.crc32)} checksums")
        for shard in manifest.shards:
            if shard in offered:
                raise WireError(f"{words(key)}: {box_words(shard)} is offered twice")
            offered[shard] = None
            there.setdefault(shard.path, []).append(shard)
    if fault := empty(expected):
        raise WireError(f"{words(key)}: {fault}")
    asked: set[Shard] = set()
    for shard in expected:
        near = there.get(shard.path, [])
        parts = [
            part for part in near if inside(part, shard) and part.bytes * _volume(shard) == shard.bytes * _volume(part)
        ]
        if not _tiled(shard, parts):
            text = (
                f"{box_words(near[0])} with {near[0].bytes} bytes is offered" if near else f"no {shard.path} is offered"
            )
            more = f" among {len(near)} pieces" if len(near) > 1 else ""
            raise WireError(f"{words(key)}: {text}{more} where {box_words(shard)} with {shard.bytes} bytes is expected")
        asked.update(parts)
    if extra := [shard for shard in offered if shard not in asked]:
        raise WireError(f"{words(key)}: {box_words(extra[0])} is offered and was not asked for")


def turns(sizes: Sequence[int], holders: Sequence[Collection[int]]) -> list[int]:
    """For each box of so many bytes, the one of its holders that gives it to others. All give about as many bytes.

    Boxes with few holders are dealt out first, then the largest. Equal arguments give equal results in every
    process."""
    given: dict[int, int] = {}
    takers = [-1] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (len(holders[i]), -sizes[i], i)):
        takers[i] = min(holders[i], key=lambda holder: (given.get(holder, 0), holder))
        given[takers[i]] = given.get(takers[i], 0) + sizes[i]
    return takers


def inside(part: Shard, whole: Shard) -> bool:
    """Whether `part` is a box of the same array and lies in `whole`."""
    return (
        (part.path, part.shape, part.dtype) == (whole.path, whole.shape, whole.dtype)
        and len(part.start) == len(part.stop) == len(whole.start)
        and all(
            low <= a < b <= high for a, b, low, high in zip(part.start, part.stop, whole.start, whole.stop, strict=True)
        )
    )


def sound(shard: Shard, itemsize: int) -> bool:
    """Whether the box lies in its array and has as many bytes as it says. Another process sent it."""
    whole = dataclasses.replace(shard, start=(0,) * len(shard.shape), stop=shard.shape)
    return inside(shard, whole) and shard.bytes == _volume(shard) * itemsize


def deadline_s(size: int, grace_s: float = GRACE_S) -> float:
    """Seconds that a pull of so many bytes may take."""
    return grace_s + size / (0.5 * EXPECTED_BYTES_PER_S)


def words(key: Key) -> str:
    return f"version {key.version} for {key.receiver} (epoch {key.epoch}, transfer {key.sequence})"


def empty(shards: Sequence[Shard]) -> str | None:
    """A sentence about the first shard that has no elements; None: every shard has some."""
    paths = [shard.path for shard in shards if shard.bytes <= 0]
    return f"{paths[0]} has no elements: it cannot be sent, and both sides can make it" if paths else None


def refused(shard: Shard, why: str) -> WireError:
    return WireError(f"{box_words(shard)} is wanted, {why}")


def box_words(shard: Shard) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(shard.start, shard.stop, strict=False))
    return f"{shard.path}[{box}] of {shard.dtype}{list(shard.shape)}"


# ---------------------------------------------------------------- private


def _tiled(whole: Shard, parts: Sequence[Shard]) -> bool:
    """Whether the parts cover every element of the shard once."""
    if len(parts) == 1:
        return parts[0] == whole
    cuts = [sorted({x for part in parts for x in (part.start[i], part.stop[i])}) for i in range(len(whole.shape))]
    if any(not cut or (cut[0], cut[-1]) != (a, b) for cut, a, b in zip(cuts, whole.start, whole.stop, strict=True)):
        return False
    covered = np.zeros([len(cut) - 1 for cut in cuts], np.int32)  # cells of the grid that the edges of all parts make
    for part in parts:
        covered[tuple(slice(cut.index(a), cut.index(b)) for cut, a, b in zip(cuts, part.start, part.stop))] += 1
    return bool(parts) and bool((covered == 1).all())


def _volume(shard: Shard) -> int:
    return math.prod(b - a for a, b in zip(shard.start, shard.stop, strict=True))
