"""One connection between two processes: records in, records out, in order.

Consumes and produces records of calls.py; authenticated connections (runtime/listener.py) carry their bytes, many records a
frame. Laws: nothing is unpickled; `send` never blocks, so a peer that has stopped reading stops nobody; `ended` is
called once.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import msgpack

from dora_jax.runtime.cluster.messages import CODEC
from dora_jax.runtime.codec import CodecError

MAX_FRAME_BYTES = 1 << 31
BATCH_RECORDS = 256  # records that wait are sent together, so many at most
BATCH_BYTES = 1 << 20  # and none are added to so much: records with KV are large


class Link:
    """Use `start` once `receive` may be called; it runs on the link's own thread, as does `ended`."""

    def __init__(
        self, end: connection.Connection, receive: Callable[[Link, Any], None], ended: Callable[[Link, str], None]
    ):
        self._end = end
        self._receive = receive
        self._ended = ended
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = threading.Lock()  # held for ever by the first to end it
        self._writer = threading.Thread(target=self._write, name="link writer", daemon=True)

    def start(self) -> None:
        self._writer.start()
        threading.Thread(target=self._read, name="link reader", daemon=True).start()

    @property
    def own_ip(self) -> str:
        """Of this machine, as the other side sees it."""
        with socket.socket(fileno=os.dup(self._end.fileno())) as raw:
            return raw.getsockname()[0]

    def adopt(self, receive: Callable[[Link, Any], None], ended: Callable[[Link, str], None]) -> None:
        """Somebody else goes on with this link; called from its `receive`, or before `start`."""
        self._receive, self._ended = receive, ended

    def send(self, record: Any) -> None:
        """Encoded here, so that a record that cannot be written is its sender's error."""
        self._out.put(CODEC.encode(record))

    def flush(self, timeout_s: float) -> None:
        """Sends what waits, then closes: the last thing a process does."""
        self._out.put(None)
        self._writer.join(timeout_s)

    def close(self, reason: str = "closed") -> None:
        if not self._closed.acquire(blocking=False):
            return
        self._out.put(None)
        try:  # a shutdown wakes a thread that reads, where a close would not
            with socket.socket(fileno=os.dup(self._end.fileno())) as raw:
                raw.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self._ended(self, reason)

    # ------------------------------------------------------------ private

    def _read(self) -> None:
        try:
            while True:
                frame = msgpack.unpackb(self._end.recv_bytes(MAX_FRAME_BYTES))
                if not isinstance(frame, list):
                    raise CodecError(f"a {type(frame).__name__} stands where records are expected")
                for data in frame:
                    self._receive(self, CODEC.decode(data))
        except (EOFError, OSError) as error:
            self.close(f"the connection ended: {type(error).__name__}")
        except BaseException as error:  # of this peer's bytes, or of what they led to: it is the link that ends
            self.close(f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        try:
            while (data := self._out.get()) is not None:
                batch, size = [data], len(data)
                while len(batch) < BATCH_RECORDS and size < BATCH_BYTES and not self._out.empty():
                    if (data := self._out.get()) is None:
                        self._end.send_bytes(msgpack.packb(batch))
                        return
                    batch.append(data)
                    size += len(data)
                self._end.send_bytes(msgpack.packb(batch))
        except OSError as error:
            self.close(f"the connection ended: {type(error).__name__}")
