"""How processes of a run connect: one port of each, and only members of the run whom it admits are let in.

    dial(address) -> Channel   handshake -> the peer is who is expected there -> it says welcome
    Listener(welcome)          handshake -> the peer is admitted -> `welcome(Channel)`

Consumes connections from anywhere; produces channels (channel.py). Laws: nothing that an unverified peer sends is
decoded; it has ANSWER_S to show who it is, however slowly its bytes come; so many of them are served at a time, and
where more come the oldest give way: what they hold of this process is bounded, and members of the run come through
between them.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from dora_jax.runtime.common.channel import Channel, hang_up
from dora_jax.runtime.common.credentials import Credential, Member

CALLERS = 1024  # that come at once; a connection for which the kernel has no room may wait for ever
MAX_UNVERIFIED = 128  # at a time; a file number and a thread each
ANSWER_S = 10.0  # for either side to show who it is
YIELD_S = 0.5  # an unverified peer that is older than this gives way where there are too many
LOOK_S = 0.1
WELCOME = b"\1"  # by TLS 1.3 a client's handshake is over before the other side has seen its certificate

Admits = Callable[[Member], bool]  # of a member of the run


class Listener:
    """`welcome` is called on a thread of the connection's own. `admits` None: every member of the run."""

    def __init__(self, ip: str, credential: Credential, admits: Admits | None, welcome: Callable[[Channel], None]):
        self._listener = socket.create_server((ip, 0), backlog=CALLERS)
        self._listener.settimeout(LOOK_S)
        self._credential, self._admits, self._welcome = credential, admits, welcome
        self._unverified: dict[Channel, float] = {}  # since when, the oldest first
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
                    for channel, since_s in tuple(self._unverified.items()):
                        if time.monotonic() - since_s > patience_s:
                            del self._unverified[channel]
                            channel.hang_up()
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
                try:
                    channel = Channel(raw, self._credential, server=True)
                except OSError:  # the peer has gone already
                    continue
                with self._lock:
                    self._unverified[channel] = time.monotonic()
                threading.Thread(target=self._let_in, args=(channel,), name="listener", daemon=True).start()

    def _let_in(self, channel: Channel) -> None:
        try:
            channel.handshake()
            known = self._admits is None or self._admits(channel.peer)
        except (OSError, ValueError):  # the second: of a certificate that is none of ours
            known = False
        with self._lock:
            known = self._unverified.pop(channel, None) is not None and known
        if known:
            try:
                channel.write(WELCOME)
            except OSError:
                known = False
        if known:
            self._welcome(channel)
        else:
            channel.socket.close()


def dial(address: str, credential: Credential, expects: Admits, patience_s: float | None = None) -> Channel:
    """patience_s None: ANSWER_S. OSError: nothing is there in time, or it is not who is expected, or it does not let
    this process in."""
    ip, _, port = address.rpartition(":")
    patience_s = max(ANSWER_S if patience_s is None else patience_s, LOOK_S)
    until_s = time.monotonic() + patience_s
    channel = Channel(socket.create_connection((ip, int(port)), timeout=patience_s), credential, server=False)
    channel.until_s = until_s
    try:
        channel.handshake()
        if not expects(channel.peer):
            raise ConnectionError(f"{address} is incarnation {channel.peer.incarnation} of {channel.peer.role}")
        channel.read(bytearray(WELCOME))
    except TimeoutError:
        channel.socket.close()
        raise TimeoutError(f"{address} has not sent anything within {patience_s:.1f} s") from None
    except BaseException:
        channel.socket.close()
        raise
    channel.until_s = float("inf")
    return channel
