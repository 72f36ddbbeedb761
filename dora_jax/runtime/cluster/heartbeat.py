"""What a process tells its controller every second: that it lives, and how far it is. Standard library only."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from dora_jax.runtime.common.idle_time import IdleTimer

if TYPE_CHECKING:
    from dora_jax.runtime.cluster.connection import ControllerConnection

BEAT_S = 1.0


class ProcessStatus(Protocol):
    """What a role tells of its progress, once a second."""

    waits: IdleTimer  # of the role's thread
    busy: bool
    progress: int


class HeartbeatSender:
    """`ProcessStatus` that is sent."""

    def __init__(self, link: ControllerConnection):
        self.progress = 0
        self.busy = False
        self.waits = IdleTimer()
        self._link = link
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="status", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        from dora_jax.runtime.cluster.messages import Heartbeat

        while not self._ended.is_set():
            self._link.send(Heartbeat(progress=self.progress, busy=self.busy, waited_s=self.waits.total_s))
            self._ended.wait(BEAT_S)
