"""Device arrays between processes of different worlds: a guard round `jax.experimental.transfer`, which alone hangs,
aborts or reinterprets bytes where the two sides do not agree.

    sender    offer(key, tree, wanted) -> Manifest    what is offered, shard by shard; it travels over the control plane
    receiver  pull(manifests, like, key) -> tree      checked against `like` and `key` first, then pulled to a deadline
    sender    release(key)                            once the receiver has said that it holds them

Consumes and produces pytrees of arrays, bit for bit; the codec of manifests is `CODEC`, nothing is ever unpickled.
Laws: a receiver pulls exactly the shards that it expects or nothing; a key is offered once; every pull ends by its
deadline; after a pull that failed the next one finds a new connection. Offer only to a receiver that has said that it
will pull: the transfer server holds an offer that nobody pulls for ever, unless its arrays are deleted.
The server has no authentication: bind it to loopback or to the cluster's private network. An offer's number is random.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

from dora_jax.runtime.codec import Codec
from dora_jax.types import Version, record

TRANSPORTS = 4  # sockets a connection: two sides that differ abort, so it is nowhere a setting
EXPECTED_BYTES_PER_S = 0.4 * 2**30  # what two busy cores reach; links are faster
GRACE_S = 30.0  # a first connection, a sender whose host is busy
POLL_S = 5e-4

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dimension


class WireError(RuntimeError):
    """Nothing was taken: what did not agree, or how the pull ended."""


@record
class Key:
    """One transfer. `epoch` is of the sender's world; `sequence` rises with every transfer to the same receiver."""

    epoch: int
    version: Version
    receiver: str
    sequence: int


@record
class Shard:
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


CODEC = Codec(Key, Shard, Manifest)


class Wire:
    """One process's end; any thread may use it. `ip`: the interface that other hosts reach."""

    def __init__(self, ip: str = "127.0.0.1"):
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{ip}:0", [f"{ip}:0"] * TRANSPORTS)
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}
        self._offered: dict[Key, list[jax.Array]] = {}
        self._last: dict[str, int] = {}  # receiver -> the last sequence number offered to it
        self._lock = threading.Lock()

    def offer(self, key: Key, tree: Any, wanted: Sequence[Shard] | None = None) -> Manifest:
        """Offers the shards of `tree` that are `wanted` (None: all) and that this process is the one to send.

        A wanted shard may be cut out of a larger one. WireError where no process holds one in one piece."""
        sent = [(shard, array) for shard, array in _cut(tree, wanted) if array is not None]
        if empty := next((shard for shard, _ in sent if not shard.bytes), None):
            raise WireError(f"{empty.path} has no elements: it cannot be sent, and both sides can make it")
        with self._lock:
            last = self._last.get(key.receiver)
            if last is not None and key.sequence <= last:
                raise WireError(f"{_words(key)} is not offered again: the last to {key.receiver} was {last}")
            self._last[key.receiver] = key.sequence
            self._offered[key] = arrays = [array for _, array in sent]
        number = secrets.randbits(62)
        if arrays:
            self._server.await_pull(number, arrays)
        return Manifest(key=key, address=self.address, transports=TRANSPORTS, number=number,
                        shards=tuple(shard for shard, _ in sent))

    def release(self, key: Key, delete: bool = False) -> None:
        """Forgets an offer. `delete`: frees its arrays even where nobody has pulled; for those of nobody else."""
        with self._lock:
            arrays = self._offered.pop(key, [])
        if delete:
            for array in arrays:
                array.delete()

    def pull(self, manifests: Manifest | Sequence[Manifest], like: Any, key: Key,
             timeout_s: float | None = None) -> Any:
        """The tree that `like` describes (ShapeDtypeStructs with shardings), from all the sender's processes.

        `key` is the transfer that this process has agreed to. timeout_s None: by size. Raises WireError."""
        manifests = (manifests,) if isinstance(manifests, Manifest) else tuple(manifests)
        leaves, treedef = jax.tree.flatten(like)
        places = _places(like)
        check(manifests, tuple(places), key)
        timeout_s = deadline_s(sum(shard.bytes for shard in places)) if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        pulled = [self._begin(manifest, places) for manifest in manifests if manifest.shards]
        for manifest, arrays in pulled:
            self._finish(manifest, arrays, until, timeout_s)
        got = {shard: array for manifest, arrays in pulled
               for shard, array in zip(manifest.shards, arrays, strict=True)}
        by_path: dict[str, list[jax.Array]] = {}
        for shard, devices in places.items():
            by_path.setdefault(shard.path, []).extend(_on(got[shard], devices))
        arrays = [jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, by_path[path])
                  for path, leaf in zip(by_path, leaves, strict=True)]
        return treedef.unflatten(arrays)

    # ------------------------------------------------------------ private

    def _begin(self, manifest: Manifest, places: dict[Shard, list[jax.Device]]) -> tuple[Manifest, list[jax.Array]]:
        specs = [jax.ShapeDtypeStruct([b - a for a, b in zip(s.start, s.stop, strict=True)], s.dtype,
                                      sharding=jax.sharding.SingleDeviceSharding(places[s][0]))
                 for s in manifest.shards]
        with self._lock:
            if manifest.address not in self._connections:
                self._connections[manifest.address] = self._server.connect(manifest.address)
            connection = self._connections[manifest.address]
        return manifest, connection.pull(manifest.number, specs)

    def _finish(self, manifest: Manifest, arrays: list[jax.Array], until: float, timeout_s: float) -> None:
        """The deadline is kept here: the one that `pull` takes has no effect."""
        what = f"{_words(manifest.key)} from {manifest.address}"
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


def wanted(like: Any) -> tuple[Shard, ...]:
    """What this process must be sent to make `like` (arrays, or ShapeDtypeStructs with shardings): each piece once."""
    return tuple(_places(like))


def check(manifests: Sequence[Manifest], expected: Sequence[Shard], key: Key) -> None:
    """Refuses manifests that are not exactly the expected shards under this key: pulled, they would hang or lie."""
    offered: dict[Shard, None] = {}
    for manifest in manifests:
        if manifest.key != key:
            raise WireError(f"{_words(manifest.key)} was offered where {_words(key)} is expected")
        if manifest.transports != TRANSPORTS:
            raise WireError(f"{manifest.address} uses {manifest.transports} transports, not {TRANSPORTS}: both sides "
                            f"must run the same release")
        if not 0 < manifest.number < 1 << 63:
            raise WireError(f"{manifest.number} cannot be the number of an offer")
        for shard in manifest.shards:
            if shard in offered:
                raise WireError(f"{_words(key)}: {_shard(shard)} is offered twice")
            offered[shard] = None
    have, want = set(offered), set(expected)
    if have != want or any(shard.bytes <= 0 for shard in expected):
        raise WireError(f"{_words(key)}: {_difference(offered, expected)}")


def deadline_s(size: int) -> float:
    return GRACE_S + size / (0.5 * EXPECTED_BYTES_PER_S)


# ---------------------------------------------------------------- private


def _words(key: Key) -> str:
    return f"version {key.version} for {key.receiver} (epoch {key.epoch}, transfer {key.sequence})"


def _shard(shard: Shard) -> str:
    box = ", ".join(f"{a}:{b}" for a, b in zip(shard.start, shard.stop, strict=False))
    return f"{shard.path}[{box}] of {shard.dtype}{list(shard.shape)}"


def _difference(offered: Sequence[Shard], expected: Sequence[Shard]) -> str:
    """The first expected shard that is not offered as it is expected, or the first that nobody asked for."""
    for shard in expected:
        if shard.bytes <= 0:
            return f"{shard.path} has no elements: it cannot be sent, and both sides can make it"
        if shard not in offered:
            near = next((other for other in offered if other.path == shard.path), None)
            said = f"{_shard(near)} with {near.bytes} bytes is offered" if near else f"no {shard.path} is offered"
            return f"{said} where {_shard(shard)} with {shard.bytes} bytes is expected"
    return f"{_shard(next(s for s in offered if s not in set(expected)))} is offered and was not asked for"


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
            places.setdefault(_new_shard(path, leaf, _box(index, leaf.shape)), []).append(device)
    return places


def _new_shard(path: str, leaf: Any, box: Box) -> Shard:
    start, stop = box
    size = leaf.dtype.itemsize
    for a, b in zip(start, stop, strict=True):
        size *= b - a
    return Shard(path=path, shape=tuple(leaf.shape), dtype=leaf.dtype.name, start=start, stop=stop, bytes=size)


def _cut(tree: Any, shards: Sequence[Shard] | None) -> list[tuple[Shard, jax.Array | None]]:
    """Each wanted shard with its array; None where another process of this world sends it."""
    leaves = dict(_named(tree))
    if shards is None:
        shards = wanted(tree)
    cut = []
    for number, shard in enumerate(shards):
        leaf = leaves.get(shard.path)
        if leaf is None or tuple(leaf.shape) != shard.shape or leaf.dtype.name != shard.dtype:
            what = "nothing" if leaf is None else f"{leaf.dtype.name}{list(leaf.shape)}"
            raise WireError(f"{_shard(shard)} is wanted, and {what} is there")
        cut.append((shard, _piece(leaf, shard, number)))
    return cut


def _piece(leaf: jax.Array, shard: Shard, number: int) -> jax.Array | None:
    """The shard out of a local piece that contains it. Processes that hold it as well take turns, by its number."""
    holders: dict[int, None] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        if _inside(shard, _box(index, leaf.shape)):
            holders[device.process_index] = None
    if not holders:
        raise WireError(f"{_shard(shard)} is wanted, and lies on no device in one piece: its sender must first bring "
                        f"it into the receiver's layout")
    if sorted(holders)[number % len(holders)] != jax.process_index():
        return None
    for piece in leaf.addressable_shards:
        box = _box(piece.index, leaf.shape)
        if _inside(shard, box):
            if box == (shard.start, shard.stop):
                return piece.data
            return piece.data[tuple(slice(a - at, b - at) for a, b, at in
                                    zip(shard.start, shard.stop, box[0], strict=True))]
    raise AssertionError(f"{_shard(shard)} is addressable and was not found")


def _inside(shard: Shard, box: Box) -> bool:
    return all(a >= lo and b <= hi for a, b, lo, hi in zip(shard.start, shard.stop, *box, strict=True))


def _on(array: jax.Array, devices: list[jax.Device]) -> list[jax.Array]:
    """One array a device; the first already has it."""
    return [array, *(jax.device_put(array, device) for device in devices[1:])]
