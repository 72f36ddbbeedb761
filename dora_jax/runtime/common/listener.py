"""Where a process of a run listens: one port, and only what knows the token of the run is let in.

Consumes connections from anywhere; produces authenticated ones, for `welcome`. Laws: nothing that an unverified peer
sends is decoded; it has ANSWER_S to answer the challenge, however slowly its bytes come; so many of them are served at
a time, and where more come the oldest give way: what they hold of this process is bounded, and members of the run come
through between them. The bytes are not encrypted: the port belongs on loopback or on the private network of the run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError, connection

CALLERS = 1024  # that come at once; a connection for which the kernel has no room may wait for ever
MAX_UNVERIFIED = 128  # at a time; two file numbers and a thread each
ANSWER_S = 10.0  # for either side to show that it knows the token
YIELD_S = 0.5  # an unverified peer that is older than this gives way where there are too many
LOOK_S = 0.1


class Listener:
    """`welcome` is called on a thread of the connection's own."""

    def __init__(self, ip: str, token: bytes, welcome: Callable[[connection.Connection], None]):
        self._listener = socket.create_server((ip, 0), backlog=CALLERS)
        self._listener.settimeout(LOOK_S)
        self._token, self._welcome = token, welcome
        self._unverified: dict[socket.socket, float] = {}  # since when, the oldest first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.address = f"{ip}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        hang_up(self._listener)

    # ------------------------------------------------------------ private

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                with self._lock:
                    # unverified peers whose time is over are turned away
                    patience_s = ANSWER_S if len(self._unverified) < MAX_UNVERIFIED else YIELD_S
                    for raw, since_s in tuple(self._unverified.items()):
                        if time.monotonic() - since_s > patience_s:
                            del self._unverified[raw]
                            hang_up(raw)
                    full = len(self._unverified) >= MAX_UNVERIFIED
                if full:
                    time.sleep(LOOK_S / 10)
                    continue
                try:
                    raw, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # it is closed, or the machine has no file number left
                    self._closed.wait(LOOK_S)
                    continue
                with self._lock:
                    self._unverified[raw] = time.monotonic()
                threading.Thread(target=self._let_in, args=(raw,), name="listener", daemon=True).start()

    def _let_in(self, raw: socket.socket) -> None:
        with raw:
            _send_at_once(raw)
            end = connection.Connection(os.dup(raw.fileno()))
            try:
                connection.deliver_challenge(end, self._token)
                connection.answer_challenge(end, self._token)
                known = True
            except (AuthenticationError, EOFError, OSError):
                known = False
            with self._lock:
                known = self._unverified.pop(raw, None) is not None and known
        if known:
            self._welcome(end)
        else:
            end.close()


def dial(address: str, token: bytes, patience_s: float | None = None) -> connection.Connection:
    """patience_s None: ANSWER_S. OSError: nothing is there, or nothing that speaks; AuthenticationError: it belongs to
    another run."""
    ip, _, port = address.rpartition(":")
    patience_s = max(ANSWER_S if patience_s is None else patience_s, LOOK_S)  # 0 would be without an end
    with socket.create_connection((ip, int(port)), timeout=patience_s) as raw:
        raw.setblocking(True)
        _send_at_once(raw)
        _read_within(raw, patience_s)
        end = connection.Connection(os.dup(raw.fileno()))
        try:
            connection.answer_challenge(end, token)
            connection.deliver_challenge(end, token)
        except BlockingIOError:
            end.close()
            raise TimeoutError(f"{address} has not sent anything within {patience_s:.1f} s") from None
        except AssertionError as error:  # what Python 3.11 says of a first word that it does not know
            end.close()
            raise AuthenticationError(f"{address} is no process of a run: {error}") from error
        except BaseException:
            end.close()
            raise
        _read_within(raw, 0)
    return end


def _send_at_once(raw: socket.socket) -> None:
    """What is small waits for no acknowledgement, which would cost 40 ms."""
    with contextlib.suppress(OSError):  # it has gone already
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read_within(raw: socket.socket, seconds: float) -> None:
    """Set the timeout of every read on this connection, whatever file number it goes by; 0: without an end."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def hang_up(raw: socket.socket) -> None:
    """Wakes the thread that reads from a socket, writes to it or waits on it, where a close would not."""
    with contextlib.suppress(OSError):  # the other side was faster
        raw.shutdown(socket.SHUT_RDWR)
