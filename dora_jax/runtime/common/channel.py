"""A connection between two processes of a run: mutual TLS over TCP; frames, or bytes without frames, and a deadline.

    encrypted ... `go_plain(key)` on both sides ... plain pieces, each with a checksum under the key

Consumes a socket and a credential; produces bytes from the peer that its certificate names. Laws: what was not sent by
that peer, in that order, is not returned; whatever stands between the two reads nothing that is encrypted, and can only
end the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dora_jax.runtime.common.credentials import Credential, Member

LENGTH = struct.Struct("!Q")  # of a frame
JOINED_BYTES = 1 << 14  # a shorter frame is sent together with its length
PIECE_BYTES = 1 << 20  # of plain bytes, between two checksums
KEY_BYTES, CHECKSUM_BYTES = 32, 16

T = TypeVar("T")


class Channel:
    """One thread may read while another one writes; `until_s`, on the monotonic clock, ends both."""

    peer: Member  # after the handshake

    def __init__(self, raw: socket.socket, credential: Credential, server: bool):
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is small waits for no acknowledgement
        context = credential.server if server else credential.client
        self.socket = context.wrap_socket(raw, server_side=server, do_handshake_on_connect=False)
        self.until_s = math.inf
        self._credential = credential
        self._lock = threading.Lock()  # a TLS connection is for one thread at a time
        self._key: AESGCM | None = None  # of the checksums of plain pieces
        self._pieces = 0  # that were sent or read plain

    def handshake(self) -> None:
        """OSError: the peer does not show that it is of the run."""
        self._call(select.POLLIN, self.socket.do_handshake)
        self.peer = self._credential.member_of(self.socket)

    def send(self, frame: bytes) -> None:
        size = LENGTH.pack(len(frame))
        if len(frame) < JOINED_BYTES:
            return self.write(size + frame)
        self.write(size)
        self.write(frame)

    def receive(self, most: int) -> bytearray:
        """A frame, of no more than so many bytes."""
        (size,) = LENGTH.unpack(self.read(bytearray(LENGTH.size)))
        if size > most:
            raise ConnectionError(f"a frame of {size} bytes has come, where {most} are the most")
        frame = bytearray(size)
        self.read(frame)
        return frame

    def write(self, data: bytes | memoryview) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            piece = memoryview(data)[at : at + PIECE_BYTES]
            for view in (piece, memoryview(self._checksum(piece))):
                while view:
                    view = view[self._call(select.POLLOUT, self.socket.send, view) :]

    def read(self, target: bytearray | memoryview) -> bytearray | memoryview:
        """Fills the target. OSError: it does not come in time, not whole, or not as it was sent."""
        for at in range(0, len(target), PIECE_BYTES):
            piece, checksum = memoryview(target)[at : at + PIECE_BYTES], bytearray(CHECKSUM_BYTES if self._key else 0)
            for view in (piece, memoryview(checksum)):
                while view:
                    if not (count := self._call(select.POLLIN, self.socket.recv_into, view)):
                        raise ConnectionError("the other side has ended it")
                    view = view[count:]
            if not hmac.compare_digest(checksum, self._checksum(piece)):
                raise ConnectionError("a piece has another keyed checksum than it was sent with")
        return target

    def go_plain(self, key: bytes) -> None:
        """Ends the encryption; the same side sends all that follows. The key is of this connection alone."""
        self._call(select.POLLIN, self.socket.unwrap)
        self._key = AESGCM(key)

    def hang_up(self) -> None:
        """Wakes the threads that wait here, where a close would not."""
        hang_up(self.socket)

    # ------------------------------------------------------------ private

    def _checksum(self, piece: memoryview) -> bytes:
        """GMAC (NIST SP 800-38D) of the next piece; empty where TLS sees to it."""
        if self._key is None:
            return b""
        self._pieces += 1
        return self._key.encrypt(self._pieces.to_bytes(12, "big"), b"", piece)

    def _call(self, event: int, function: Callable[..., T], *arguments: memoryview) -> T:
        """Repeats a call that would have to wait. `event`: of a plain socket, that it waits for."""
        while True:
            try:
                with self._lock:
                    return function(*arguments)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except BlockingIOError:
                pass
            left_s = self.until_s - time.monotonic()
            waiter = select.poll()
            waiter.register(self.socket, event)
            if left_s <= 0 or not waiter.poll(None if left_s == math.inf else math.ceil(left_s * 1000)):
                raise TimeoutError("it has not come in time")


def hang_up(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        socket.socket.shutdown(raw, socket.SHUT_RDWR)  # the method of a TLS socket would leave it to plain bytes
