"""Arrays in host memory between processes of different worlds: weights and KV, shard by shard, over TCP.

    sender    give(key, pieces) -> Manifest           offers arrays, shard by shard; the control plane carries it
    receiver  take(manifests, wanted, key) -> arrays  checks them against `wanted` and `key`, then reads to a deadline
    sender    release(key)                            once the receiver has confirmed that it holds them, or never will

Consumes and produces NumPy arrays, bit for bit; the owner of an array brings it from its devices to the host. Laws: a
receiver takes exactly the shards that it expects, or nothing; a key is offered once; every transfer ends by its
deadline, on both sides; a shard whose checksum is not the one that was offered is read again, then refused; an offer is
served to the incarnation that its key names, and taken from the one that its manifest names; bytes of an unverified
peer end its connection and nothing else. What is sent is encrypted, or, where a network is faster than that, plain with
checksums under a key that was sent encrypted. `jax.experimental.transfer` is not used: it has no authentication, and a
few bytes of garbage on one of its ports abort the process.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax.numpy as jnp
import numpy as np

from dora_jax.base.box_digest import within
from dora_jax.runtime.common.channel import KEY_BYTES, Channel
from dora_jax.runtime.common.credentials import Credential, Member
from dora_jax.runtime.common.listener import ANSWER_S, Listener, dial
from dora_jax.runtime.transfer.transfer_manifest import (
    Key,
    Manifest,
    Shard,
    WireError,
    box_words,
    check,
    deadline_s,
    empty,
    inside,
    words,
)

STREAMS = 4  # connections over which an offer is read; one alone does not fill a fast network
STREAM_BYTES = 8 << 20  # an offer of less than two such parts is read over one
REREADS = 1  # of a shard that has not arrived as it was offered; what is damaged again is damaged at its sender
READERS = 16  # connections that a receiver reads at a time
ASK = struct.Struct("!QQQ")  # number of an offer; first byte and end of a part of its pieces, laid end to end
HAS, HAS_PLAIN, HAS_NOT = b"\1", b"\2", b"\0"  # the second: behind the key of its checksums


class Wire:
    """The end of one process; any thread may use it. `ip`: the interface that other machines reach. `encrypted`: what
    it sends."""

    def __init__(self, ip: str, credential: Credential, encrypted: bool = True):
        self._credential, self._encrypted = credential, encrypted
        self.offers: dict[Key, int] = {}  # that are not released -> their numbers
        self._pieces: dict[int, tuple[Key, list[np.ndarray]]] = {}  # by the number of their offer
        self._last: dict[str, int] = {}  # receiver -> the last sequence number offered to it
        self._lock = threading.Lock()
        self._listener = Listener(ip, credential, None, self._serve)
        self.address = self._listener.address

    def give(self, key: Key, pieces: Mapping[Shard, np.ndarray]) -> Manifest:
        """Offers these arrays until `release`; they must not change meanwhile. WireError: a shard is empty, or the key
        was offered before."""
        if fault := empty(tuple(pieces)):
            raise WireError(f"{words(key)}: {fault}")
        number = secrets.randbits(62) + 1
        with self._lock:
            last = self._last.get(key.receiver)
            if last is not None and key.sequence <= last:
                raise WireError(f"{words(key)} is not offered again: the last transfer to it was {last}")
            self._last[key.receiver] = key.sequence
            self.offers[key] = number
            arrays = [_bytes(np.ascontiguousarray(piece)) for piece in pieces.values()]
            self._pieces[number] = key, arrays
        own = self._credential.member
        return Manifest(
            key=key,
            sender=own.role,
            incarnation=own.incarnation,
            address=self.address,
            number=number,
            shards=tuple(pieces),
            crc32=tuple(zlib.crc32(array.data) for array in arrays),
        )

    def release(self, key: Key) -> None:
        """Forgets an offer, made or still to come. One that is being read stays until its reader has ended."""
        with self._lock:
            self._last[key.receiver] = max(key.sequence, self._last.get(key.receiver, key.sequence))
            self._pieces.pop(self.offers.pop(key, 0), None)

    def take(
        self,
        manifests: Manifest | Sequence[Manifest],
        wanted: Sequence[Shard],
        key: Key,
        timeout_s: float | None = None,
    ) -> dict[Shard, np.ndarray]:
        """The wanted shards, each put together from the pieces that all processes of the sender gave.

        key: the transfer that this process has agreed to. timeout_s None: by size. WireError: nothing was taken."""
        manifests = (manifests,) if isinstance(manifests, Manifest) else tuple(manifests)
        check(manifests, wanted, key)
        timeout_s = deadline_s(sum(shard.bytes for shard in wanted)) if timeout_s is None else timeout_s
        until_s = time.monotonic() + timeout_s
        by_path: dict[str, list[Shard]] = {}
        for shard in wanted:
            by_path.setdefault(shard.path, []).append(shard)
        got: dict[Shard, list[tuple[Shard, np.ndarray]]] = {shard: [] for shard in wanted}
        jobs: list[Job] = []
        unproven: list[tuple[Manifest, list[np.ndarray], int]] = []  # shards by their numbers in a manifest
        for manifest in manifests:
            pieces = {piece: np.empty(_extent(piece), jnp.dtype(piece.dtype)) for piece in manifest.shards}
            for piece, array in pieces.items():
                home = next(shard for shard in by_path[piece.path] if inside(piece, shard))
                got[home].append((piece, array))
            into = [_bytes(array) for array in pieces.values()]
            size = _size(into)
            count = min(STREAMS, max(1, size // STREAM_BYTES)) if size else 0
            jobs += [(manifest, into, size * i // count, size * (i + 1) // count) for i in range(count)]
            unproven += [(manifest, into, i) for i in range(len(into))]
        for _ in range(1 + REREADS):
            pool = ThreadPoolExecutor(READERS, "wire")
            try:
                for done in as_completed([pool.submit(self._read, job, until_s, timeout_s) for job in jobs]):
                    done.result()
            finally:  # the first failure ends the transfer; the other reads end by themselves
                pool.shutdown(wait=False, cancel_futures=True)
            unproven = [each for each in unproven if zlib.crc32(each[1][each[2]].data) != each[0].crc32[each[2]]]
            jobs = [(offer, into, _size(into[:i]), _size(into[: i + 1])) for offer, into, i in unproven]
        for manifest, _, i in unproven:
            raise WireError(
                f"{words(key)}: {box_words(manifest.shards[i])} from {manifest.address} has another checksum than was "
                f"offered, {1 + REREADS} times"
            )
        taken: dict[Shard, np.ndarray] = {}
        for shard, parts in got.items():
            if len(parts) > 1:
                whole = np.empty(_extent(shard), jnp.dtype(shard.dtype))
                while parts:  # a piece is freed once it is copied
                    piece, array = parts.pop()
                    whole[within((piece.start, piece.stop), (shard.start, shard.stop))] = array
                taken[shard] = whole
            else:
                taken[shard] = parts[0][1]
        return taken

    def close(self) -> None:
        self._listener.close()

    # ------------------------------------------------------------ private

    def _serve(self, channel: Channel) -> None:
        """Sends one part of one offer to the process that it is for."""
        with channel.socket, contextlib.suppress(OSError):  # the reader reports the failure
            channel.until_s = time.monotonic() + ANSWER_S
            number, start, stop = ASK.unpack(channel.read(bytearray(ASK.size)))
            key, pieces = self._pieces.get(number, (None, []))
            if key is None or channel.peer != (key.receiver.partition("/")[0], key.epoch):
                return channel.write(HAS_NOT)
            stop = min(stop, _size(pieces))
            channel.until_s = time.monotonic() + deadline_s(max(stop - start, 0))
            if self._encrypted:
                channel.write(HAS)
            else:
                channel.write(HAS_PLAIN + (secret := secrets.token_bytes(KEY_BYTES)))
                channel.go_plain(secret)
            for part in _parts(pieces, start, stop):
                channel.write(part)

    def _read(self, job: Job, until_s: float, timeout_s: float) -> None:
        manifest, targets, start, stop = job
        what, left_s = f"{words(manifest.key)} from {manifest.address}", max(until_s - time.monotonic(), 0.0)
        sender = Member(manifest.sender, manifest.incarnation)
        try:
            channel = dial(manifest.address, self._credential, sender.__eq__, left_s)
            with channel.socket:
                channel.until_s = until_s
                channel.write(ASK.pack(manifest.number, start, stop))
                answer = channel.read(bytearray(len(HAS)))
                if answer == HAS_PLAIN:
                    channel.go_plain(bytes(channel.read(bytearray(KEY_BYTES))))
                elif answer != HAS:
                    raise WireError(f"{what} is not offered there any more")
                for part in _parts(targets, start, stop):
                    channel.read(part)
        except TimeoutError as error:
            raise WireError(f"{what} has not come within {timeout_s:.1f} s") from error
        except OSError as error:
            raise WireError(f"{what} failed: {type(error).__name__} {error}") from error
        except (OverflowError, ValueError) as error:
            raise WireError(f"{words(manifest.key)}: {manifest.address[:60]!r} is no address: {error}") from error


# ---------------------------------------------------------------- private

Job = tuple[Manifest, list[np.ndarray], int, int]  # an offer, the bytes that its shards are read into; first byte, end


def _bytes(array: np.ndarray) -> np.ndarray:
    """u8[nbytes] of a contiguous array, the same memory."""
    return array.reshape(-1).view(np.uint8)


def _size(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def _parts(pieces: Iterable[np.ndarray], start: int, stop: int) -> Iterator[memoryview]:
    """The bytes [start, stop) of the pieces laid end to end."""
    at = 0
    for piece in pieces:
        low, high = max(start - at, 0), min(stop - at, piece.nbytes)
        if low < high:
            yield piece.data[low:high]
        at += piece.nbytes


def _extent(shard: Shard) -> list[int]:
    return [b - a for a, b in zip(shard.start, shard.stop, strict=True)]
