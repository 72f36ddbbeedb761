"""What travels ahead of arrays: which shards somebody needs, which are offered, and whether the two are the same.

Consumes and produces records (`CODEC` writes and reads them); knows neither JAX nor the wire. Law: `check` passes
exactly those manifests that, pulled, give every expected shard once and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora_jax.rollout.migrate import Parcel
from dora_jax.runtime.codec import Codec
from dora_jax.types import Version, record

TRANSPORTS = 4  # sockets a connection: two sides that differ abort, so it is nowhere a setting
EXPECTED_BYTES_PER_S = 0.4 * 2**30  # what two busy cores reach; links are faster
GRACE_S = 30.0  # a first connection, a sender whose host is busy


class WireError(RuntimeError):
    """Nothing was taken: what did not agree, or how the transfer ended."""


@record
class Key:
    """One transfer to one receiver. `epoch` is of the receiver's world; `sequence` rises and is never used again."""

    epoch: int
    version: Version
    receiver: str
    sequence: int


@record
class Shard:
    """A box of one array."""

    path: str
    shape: tuple[int, ...]  # of the whole array
    dtype: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    bytes: int


@record
class Manifest:
    """What one process offers under a key, in the order in which it must be pulled."""

    key: Key
    address: str
    transports: int
    number: int  # of the offer at that address
    shards: tuple[Shard, ...]


@record
class Lent:
    """A running sample on its way to another engine. `manifest` None: nothing is offered, all there is is here."""

    parcel: Parcel  # without pages, where they are offered
    kv_len: int
    page_size: int
    manifest: Manifest | None


CODEC = Codec(Key, Shard, Manifest)


def check(manifests: Sequence[Manifest], expected: Sequence[Shard], key: Key) -> None:
    """WireError where the manifests are not exactly the expected shards under this key: pulled, they hang or lie."""
    offered: dict[Shard, None] = {}
    for manifest in manifests:
        if manifest.key != key:
            raise WireError(f"{words(manifest.key)} is offered where {words(key)} is expected")
        if manifest.transports != TRANSPORTS:
            raise WireError(f"{manifest.address} uses {manifest.transports} transports, not {TRANSPORTS}: both sides "
                            f"must run the same release")
        if not 0 < manifest.number < 1 << 63:
            raise WireError(f"{manifest.number} cannot be the number of an offer")
        for shard in manifest.shards:
            if shard in offered:
                raise WireError(f"{words(key)}: {_box(shard)} is offered twice")
            offered[shard] = None
    if fault := _difference(tuple(offered), expected):
        raise WireError(f"{words(key)}: {fault}")


def deadline_s(size: int) -> float:
    """For a pull of so many bytes."""
    return GRACE_S + size / (0.5 * EXPECTED_BYTES_PER_S)


def words(key: Key) -> str:
    return f"version {key.version} for {key.receiver} (epoch {key.epoch}, transfer {key.sequence})"


def empty(shards: Sequence[Shard]) -> str | None:
    """The sentence about the first shard that has no elements: one of those makes a pull wait for ever."""
    paths = [shard.path for shard in shards if shard.bytes <= 0]
    return f"{paths[0]} has no elements: it cannot be sent, and both sides can make it" if paths else None


def refused(shard: Shard, why: str) -> WireError:
    return WireError(f"{_box(shard)} is wanted, {why}")


# ---------------------------------------------------------------- private


def _box(shard: Shard) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(shard.start, shard.stop, strict=False))
    return f"{shard.path}[{box}] of {shard.dtype}{list(shard.shape)}"


def _difference(offered: tuple[Shard, ...], expected: Sequence[Shard]) -> str | None:
    """About the first expected shard that is not offered as it is expected, else the first that nobody asked for."""
    if fault := empty(expected):
        return fault
    have, want = set(offered), set(expected)
    for shard in expected:
        if shard not in have:
            near = next((other for other in offered if other.path == shard.path), None)
            said = f"{_box(near)} with {near.bytes} bytes is offered" if near else f"no {shard.path} is offered"
            return f"{said} where {_box(shard)} with {shard.bytes} bytes is expected"
    extra = next((shard for shard in offered if shard not in want), None)
    return f"{_box(extra)} is offered and was not asked for" if extra else None
