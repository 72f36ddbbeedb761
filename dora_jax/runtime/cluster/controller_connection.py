"""A process's way to its controller, and to the next one where that was killed.

    joined ... the connection ends -> alone: looks for the next controller -> found -> Again -> `rejoin` -> joined

Consumes the roster of the run; produces records in `inbox`, whichever process sends them. Laws: alone, and until the role has
settled what the earlier controller had asked for, nothing of it is said; this process ends where the run has ended,
where nobody comes in time, and where it is not wanted any more.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from typing import Any

from dora_jax.runtime.cluster.connection import Link
from dora_jax.runtime.cluster.messages import Beat, Failed, Hello, Notice
from dora_jax.runtime.cluster.run_registry import address_in
from dora_jax.runtime.listener import dial

LOOK_S = 0.5


class Uplink:
    """Any thread may use it. `end`: of the process; does not return."""

    def __init__(self, address: str, token: bytes, end: Callable[[], None] = lambda: os._exit(0)):
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.token, self._end = token, end
        self._hello: Hello | None = None
        self._place = ""
        self._patience_s = 0.0
        self.alone = False  # nobody listens: what could be said is of an earlier controller's time
        self._link = self._linked(address)

    @property
    def own_ip(self) -> str:
        return self._link.own_ip

    def hello(self, hello: Hello) -> None:
        self._hello = hello
        self.send(hello)

    def wait_for_another(self, place: str, rank: int, patience_s: float) -> None:
        """From now on, where the controller goes: so long. 0: this process ends with it. `place`: the workdir."""
        self._place, self._patience_s = place, patience_s
        self._hello = dataclasses.replace(self._hello, rank=rank)

    def send(self, record: Any) -> None:
        if not self.alone or isinstance(record, (Beat, Failed, Notice)):
            self._link.send(record)

    def rejoin(self) -> None:
        """What is sent from now on is meant for the controller that said Again."""
        self.alone = False

    def part(self) -> None:
        """This process has done its last; it ends with its controller, or now."""
        self._patience_s = 0.0
        if self.alone:
            self._end()

    def flush(self, timeout_s: float) -> None:
        self._link.flush(timeout_s)

    # ------------------------------------------------------------ private

    def _linked(self, address: str) -> Link:
        link = Link(dial(address, self.token), lambda _, item: self.inbox.put(item), self._lost)
        link.start()
        return link

    def _lost(self, link: Link, reason: str) -> None:
        if not self._patience_s or self.alone:  # the second: it said Hello, and is not wanted
            return self._end()
        self.alone = True
        threading.Thread(target=self._look, name="uplink", daemon=True).start()

    def _look(self) -> None:
        print("the controller is gone; this process goes on and waits for the next", file=sys.stderr, flush=True)
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            try:
                if (address := address_in(self._place)) is None:
                    break
                link = self._linked(address)
            except (OSError, EOFError, AuthenticationError, ValueError):  # nobody is there yet
                time.sleep(LOOK_S)
                continue
            link.send(self._hello)  # before anything else is
            self._link = link
            return
        self._end()
