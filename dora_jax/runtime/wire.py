"""Device arrays between processes of different worlds: a guard round `jax.experimental.transfer`, which alone hangs,
aborts or reinterprets bytes where the two sides do not agree.

    sender    offer(key, tree) -> Manifest            what is offered, shard by shard; it travels over the control plane
    receiver  pull(manifests, like, key) -> tree      checked against `like` and `key` first, then pulled to a deadline
    sender    release(key)                            once the receiver has said that it holds them, or never will

    give and take are the same for shards that several processes hold in other pieces than the receiver wants them.

Consumes and produces pytrees of arrays, bit for bit. Laws: a receiver pulls exactly the shards that it expects, or
nothing; a key is offered once; every pull ends by its deadline; after a pull that failed the next one finds a new
connection. Offer only to a receiver that has said that it will pull: the transfer server holds an offer that nobody
pulls for ever, unless its arrays are deleted. The server has no authentication: bind it to loopback or to the private
network of the cluster; the number of an offer is random.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

from dora_jax.publish import Box, box_of, name_of, volume, within
from dora_jax.runtime.shards import TRANSPORTS, Key, Manifest, Shard, WireError, check, deadline_s, empty, inside, words

POLL_S = 5e-4


class Wire:
    """One process's end; any thread may use it. `ip`: the interface that other hosts reach. `platform`: whose devices
    hold what is sent and received; None: the default one's."""

    def __init__(self, ip: str = "127.0.0.1", platform: str | None = None):
        self._device = jax.local_devices(backend=platform)[0]
        self._server = transfer.start_transfer_server(self._device.client, f"{ip}:0", [f"{ip}:0"] * TRANSPORTS)
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}
        self._offered: dict[Key, tuple[list[jax.Array], bool]] = {}
        self._last: dict[str, int] = {}  # receiver -> the last sequence number offered to it
        self._lock = threading.Lock()

    def offer(self, key: Key, tree: Any, private: bool = False) -> Manifest:
        """Offers all shards of `tree` that this process holds. `private`: nobody else has these arrays."""
        pieces = {shard_of(path, leaf, box_of(local.index, leaf.shape)): local.data
                  for path, leaf in _named(tree) for local in leaf.addressable_shards}
        return self.give(key, pieces, private)

    def give(self, key: Key, pieces: Mapping[Shard, Any], private: bool = True) -> Manifest:
        """Offers these arrays, which may be NumPy's."""
        if fault := empty(tuple(pieces)):
            raise WireError(f"{words(key)}: {fault}")
        arrays = [x if isinstance(x, jax.Array) else jax.device_put(x, self._device) for x in pieces.values()]
        with self._lock:
            last = self._last.get(key.receiver)
            if last is not None and key.sequence <= last:
                raise WireError(f"{words(key)} is not offered again: the last transfer to it was {last}")
            self._last[key.receiver] = key.sequence
            self._offered[key] = arrays, private
        number = secrets.randbits(62) + 1
        if pieces:
            self._server.await_pull(number, arrays)
        return Manifest(key=key, address=self.address, transports=TRANSPORTS, number=number, shards=tuple(pieces))

    def release(self, key: Key, pulled: bool = True) -> None:
        """Forgets an offer, made or still to come. Where it may not have been pulled, what is private is deleted; the
        rest stays in the transfer server until its owner deletes it."""
        with self._lock:
            self._last[key.receiver] = max(key.sequence, self._last.get(key.receiver, key.sequence))
            arrays, private = self._offered.pop(key, ((), False))
        for array in arrays if private and not pulled else ():
            array.delete()

    def pull(self, manifests: Manifest | Sequence[Manifest], like: Any, key: Key,
             timeout_s: float | None = None) -> Any:
        """The tree that `like` describes (ShapeDtypeStructs with shardings), from all the sender's processes.

        `key` is the transfer that this process has agreed to. timeout_s None: by size. Raises WireError."""
        places = _places(like)
        got = self._take(manifests, {shard: devices[0] for shard, devices in places.items()}, key, timeout_s)
        return _assembled(like, places, {
            shard: pieces[0][1] if len(pieces) == 1 else jax.device_put(_joined(shard, pieces), places[shard][0])
            for shard, pieces in got.items()})

    def take(self, manifests: Manifest | Sequence[Manifest], wanted: Sequence[Shard], key: Key,
             timeout_s: float | None = None) -> dict[Shard, np.ndarray]:
        """The wanted shards in host memory, each put together from the pieces that were given."""
        got = self._take(manifests, dict.fromkeys(wanted, self._device), key, timeout_s)
        return {shard: _joined(shard, pieces) for shard, pieces in got.items()}

    # ------------------------------------------------------------ private

    def _take(self, manifests: Manifest | Sequence[Manifest], places: Mapping[Shard, jax.Device], key: Key,
              timeout_s: float | None) -> dict[Shard, list[tuple[Shard, jax.Array]]]:
        """Of every shard the pieces that came."""
        manifests = (manifests,) if isinstance(manifests, Manifest) else tuple(manifests)
        check(manifests, tuple(places), key)
        timeout_s = deadline_s(sum(shard.bytes for shard in places)) if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        homes = _homes(manifests, places)
        pulls = [(manifest, self._begin(manifest, [places[homes[piece]] for piece in manifest.shards]))
                 for manifest in manifests if manifest.shards]
        got: dict[Shard, list[tuple[Shard, jax.Array]]] = {shard: [] for shard in places}
        for manifest, arrays in pulls:
            self._finish(manifest, arrays, until, timeout_s)
            for piece, array in zip(manifest.shards, arrays, strict=True):
                got[homes[piece]].append((piece, array))
        return got

    def _begin(self, manifest: Manifest, devices: list[jax.Device]) -> list[jax.Array]:
        """Arrays that become ready, or never."""
        specs = [jax.ShapeDtypeStruct([b - a for a, b in zip(s.start, s.stop, strict=True)], s.dtype,
                                      sharding=jax.sharding.SingleDeviceSharding(device))
                 for s, device in zip(manifest.shards, devices, strict=True)]
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


def shard_of(path: str, leaf: Any, box: Box) -> Shard:
    return Shard(path=path, shape=tuple(leaf.shape), dtype=leaf.dtype.name, start=box[0], stop=box[1],
                 bytes=volume(box) * leaf.dtype.itemsize)


# ---------------------------------------------------------------- private


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _places(like: Any) -> dict[Shard, list[jax.Device]]:
    """Every distinct shard of this process, and its devices that hold it."""
    places: dict[Shard, list[jax.Device]] = {}
    for path, leaf in _named(like):
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            places.setdefault(shard_of(path, leaf, box_of(index, leaf.shape)), []).append(device)
    return places


def _homes(manifests: Sequence[Manifest], wanted: Iterable[Shard]) -> dict[Shard, Shard]:
    """Of each piece the wanted shard in which it lies."""
    by_path: dict[str, list[Shard]] = {}
    for shard in wanted:
        by_path.setdefault(shard.path, []).append(shard)
    return {piece: next(shard for shard in by_path[piece.path] if inside(piece, shard))
            for manifest in manifests for piece in manifest.shards}


def _joined(shard: Shard, pieces: list[tuple[Shard, jax.Array]]) -> np.ndarray:
    if len(pieces) == 1:
        return np.asarray(pieces[0][1])
    whole = np.empty([b - a for a, b in zip(shard.start, shard.stop, strict=True)], jnp.dtype(shard.dtype))
    while pieces:  # each is let go of once it is copied
        piece, array = pieces.pop()
        whole[within((piece.start, piece.stop), (shard.start, shard.stop))] = np.asarray(array)
    return whole


def _assembled(like: Any, places: dict[Shard, list[jax.Device]], got: dict[Shard, jax.Array]) -> Any:
    by_path: dict[str, list[jax.Array]] = {}
    for shard, devices in places.items():
        copies = [got[shard], *(jax.device_put(got[shard], device) for device in devices[1:])]
        by_path.setdefault(shard.path, []).extend(copies)
    arrays = [jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, by_path.get(path, []))
              for path, leaf in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)
