"""Device arrays between processes of different worlds: a guard round `jax.experimental.transfer`, which alone hangs,
aborts or reinterprets bytes where the two sides do not agree.

    sender    offer(key, tree, wanted) -> Manifest    what is offered, shard by shard; it travels over the control plane
    receiver  pull(manifests, like, key) -> tree      checked against `like` and `key` first, then pulled to a deadline
    sender    release(key)                            once the receiver has said that it holds them, or never will

Consumes and produces pytrees of arrays, bit for bit. Laws: a receiver pulls exactly the shards that it expects, or
nothing; a key is offered once; every pull ends by its deadline; after a pull that failed the next one finds a new
connection. Offer only to a receiver that has said that it will pull: the transfer server holds an offer that nobody
pulls for ever, unless its arrays are deleted. The server has no authentication: bind it to loopback or to the private
network of the cluster; the number of an offer is random.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

from dora_jax.runtime.shards import (TRANSPORTS, Key, Manifest, Shard, WireError, check, deadline_s, empty, refused,
                                     words)

POLL_S = 5e-4

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dimension


class Wire:
    """One process's end; any thread may use it. `ip`: the interface that other hosts reach. `platform`: whose devices
    hold what is sent and received; None: the default one's."""

    def __init__(self, ip: str = "127.0.0.1", platform: str | None = None):
        client = jax.local_devices(backend=platform)[0].client
        self._server = transfer.start_transfer_server(client, f"{ip}:0", [f"{ip}:0"] * TRANSPORTS)
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}
        self._offered: dict[Key, list[_Piece]] = {}
        self._last: dict[str, int] = {}  # receiver -> the last sequence number offered to it
        self._lock = threading.Lock()

    def offer(self, key: Key, tree: Any, wanted: Sequence[Shard] | None = None, private: bool = False) -> Manifest:
        """Offers the shards of `tree` that are `wanted` (None: all) and that this process is the one to send.

        A wanted shard may be cut out of a larger one; WireError where none of the processes holds it in one piece.
        `private`: nobody else has these arrays."""
        wanted = shards_of(tree) if wanted is None else wanted
        if fault := empty(wanted):
            raise WireError(f"{words(key)}: {fault}")
        pieces = _pieces(dict(_named(tree)), wanted, private)
        with self._lock:
            last = self._last.get(key.receiver)
            if last is not None and key.sequence <= last:
                raise WireError(f"{words(key)} is not offered again: the last transfer to it was {last}")
            self._last[key.receiver] = key.sequence
            self._offered[key] = pieces
        number = secrets.randbits(62) + 1
        if pieces:
            self._server.await_pull(number, [piece.array for piece in pieces])
        return Manifest(key=key, address=self.address, transports=TRANSPORTS, number=number,
                        shards=tuple(piece.shard for piece in pieces))

    def release(self, key: Key, pulled: bool = True) -> None:
        """Forgets an offer, made or still to come. Where it may not have been pulled, what is private or was cut for it
        is deleted; the rest stays in the transfer server until its owner deletes it."""
        with self._lock:
            self._last[key.receiver] = max(key.sequence, self._last.get(key.receiver, key.sequence))
            pieces = self._offered.pop(key, [])
        for piece in pieces:
            if piece.private and not pulled:
                piece.array.delete()

    def pull(self, manifests: Manifest | Sequence[Manifest], like: Any, key: Key,
             timeout_s: float | None = None) -> Any:
        """The tree that `like` describes (ShapeDtypeStructs with shardings), from all the sender's processes.

        `key` is the transfer that this process has agreed to. timeout_s None: by size. Raises WireError."""
        manifests = (manifests,) if isinstance(manifests, Manifest) else tuple(manifests)
        places = _places(like)
        check(manifests, tuple(places), key)
        timeout_s = deadline_s(sum(shard.bytes for shard in places)) if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        pulls = [(manifest, self._begin(manifest, places)) for manifest in manifests if manifest.shards]
        for manifest, arrays in pulls:
            self._finish(manifest, arrays, until, timeout_s)
        got = {shard: array for manifest, arrays in pulls for shard, array in zip(manifest.shards, arrays, strict=True)}
        return _assembled(like, places, got)

    # ------------------------------------------------------------ private

    def _begin(self, manifest: Manifest, places: dict[Shard, list[jax.Device]]) -> list[jax.Array]:
        """Arrays that become ready, or never."""
        specs = [jax.ShapeDtypeStruct([b - a for a, b in zip(s.start, s.stop, strict=True)], s.dtype,
                                      sharding=jax.sharding.SingleDeviceSharding(places[s][0]))
                 for s in manifest.shards]
        with self._lock:
            try:
                if manifest.address not in self._connections:
                    self._connections[manifest.address] = self._server.connect(manifest.address)
            except jax.errors.JaxRuntimeError as error:
                raise WireError(f"{words(manifest.key)}: {manifest.address[:60]!r} is no address: {error}") from error
            connection = self._connections[manifest.address]
        return connection.pull(manifest.number, specs)

    def _finish(self, manifest: Manifest, arrays: list[jax.Array], until: float, timeout_s: float) -> None:
        """The deadline is kept here: the one that the transfer library takes has no effect."""
        what = f"{words(manifest.key)} from {manifest.address}"
        while not all(array.is_ready() for array in arrays):
            if time.monotonic() > until:
                self._drop(manifest.address)
                raise WireError(f"{what} has not come within {timeout_s:.1f} s")
            time.sleep(POLL_S)
        try:
            jax.block_until_ready(arrays)  # what failed is ready too
        except jax.errors.JaxRuntimeError as error:
            self._drop(manifest.address)
            raise WireError(f"{what} failed: {' '.join(str(error).split())[:200]}") from error

    def _drop(self, address: str) -> None:
        with self._lock:
            self._connections.pop(address, None)


def shards_of(like: Any) -> tuple[Shard, ...]:
    """What this process holds, or must be sent, of `like` (arrays, or ShapeDtypeStructs with shardings); each once."""
    return tuple(_places(like))


# ---------------------------------------------------------------- private


class _Piece:
    """A shard on its way out."""

    def __init__(self, shard: Shard, array: jax.Array, private: bool):
        self.shard, self.array, self.private = shard, array, private


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _, _ in spans), tuple(b for _, b, _ in spans)


def _places(like: Any) -> dict[Shard, list[jax.Device]]:
    """Every distinct shard of this process, and its devices that hold it."""
    places: dict[Shard, list[jax.Device]] = {}
    for path, leaf in _named(like):
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            start, stop = _box(index, leaf.shape)
            size = math.prod(b - a for a, b in zip(start, stop, strict=True)) * leaf.dtype.itemsize
            shard = Shard(path=path, shape=tuple(leaf.shape), dtype=leaf.dtype.name, start=start, stop=stop, bytes=size)
            places.setdefault(shard, []).append(device)
    return places


def _pieces(leaves: dict[str, jax.Array], wanted: Sequence[Shard], private: bool) -> list[_Piece]:
    """The wanted shards that this process sends. Processes that hold the same one take turns."""
    pieces = []
    for number, shard in enumerate(wanted):
        leaf = leaves.get(shard.path)
        if leaf is None:
            raise refused(shard, "and nothing of that name is there")
        if tuple(leaf.shape) != shard.shape or leaf.dtype.name != shard.dtype:
            raise refused(shard, f"and it is {leaf.dtype.name}{list(leaf.shape)} here")
        if not _sound(shard, leaf.dtype.itemsize):
            raise refused(shard, "and is no part of it")
        holders = {device.process_index for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
                   if _inside(shard, _box(index, leaf.shape))}
        if not holders:
            raise refused(shard, "and no device holds it in one piece: bring it into the receiver's layout first")
        if sorted(holders)[number % len(holders)] == jax.process_index():
            pieces.append(_piece(leaf, shard, private))
    return pieces


def _piece(leaf: jax.Array, shard: Shard, private: bool) -> _Piece:
    boxes = {_box(local.index, leaf.shape): local.data for local in leaf.addressable_shards}
    whole = boxes.get((shard.start, shard.stop))
    if whole is not None:
        return _Piece(shard, whole, private)
    (start, _), data = next(item for item in boxes.items() if _inside(shard, item[0]))
    part = tuple(slice(a - at, b - at) for a, b, at in zip(shard.start, shard.stop, start, strict=True))
    return _Piece(shard, data[part], private=True)


def _sound(shard: Shard, itemsize: int) -> bool:
    """It came from another process: its box must be one, of as many bytes as it says."""
    if not len(shard.start) == len(shard.stop) == len(shard.shape):
        return False
    sizes = [b - a for a, b in zip(shard.start, shard.stop, strict=True)]
    return all(size > 0 for size in sizes) and shard.bytes == math.prod(sizes) * itemsize


def _inside(shard: Shard, box: Box) -> bool:
    return all(a >= low and b <= high for a, b, low, high in zip(shard.start, shard.stop, *box, strict=True))


def _assembled(like: Any, places: dict[Shard, list[jax.Device]], got: dict[Shard, jax.Array]) -> Any:
    by_path: dict[str, list[jax.Array]] = {}
    for shard, devices in places.items():
        copies = [got[shard], *(jax.device_put(got[shard], device) for device in devices[1:])]
        by_path.setdefault(shard.path, []).extend(copies)
    arrays = [jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, by_path.get(path, []))
              for path, leaf in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
