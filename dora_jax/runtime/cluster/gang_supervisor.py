"""The supervisor of a gang: it starts the gang, watches it, and starts it again.

    start -> up ... down -> start                a gang that an earlier controller has left is taken over first

Consumes a launcher, and what the gang's processes say; produces `up` and `down` of each epoch. Laws: a gang has ended
before the next one starts; restarts that come to nothing are counted; a gang that leaves with notice does not count,
nor does a gang that was found and does not come back. One on demand is started once for each time that it is wanted,
and `down` answers also where it did not come up; none of an earlier controller is taken over; after so many in a row
that were started and lost as may come to nothing, no other starts: each may have cost the trainer its gang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dora_jax.config import RunError
from dora_jax.runtime.cluster.gang import Gang, GangLimits, GangListener
from dora_jax.runtime.cluster.launch_process import Launcher, StartedGang, Ticket
from dora_jax.runtime.cluster.messages import Begin

LOOK_S = 0.1  # how often a supervisor looks after its gang
ROOM_S = 20.0  # a gang that has no place by then is reported as waiting


class GangSupervisor:
    """Keeps a gang of this name running, on a thread of its own, until `close`; on demand, from `want` on."""

    def __init__(
        self,
        listener: GangListener,
        launcher: Launcher,
        name: str,
        hosts: int,
        slice_type: str,
        *,
        begin: Callable[[int, str, str], Begin],
        on_message: Callable[[Any], None],
        up: Callable[[Gang], None],
        down: Callable[[Gang], None],
        failed: Callable[[RunError], None],
        notify: Callable[[str], None],
        limits: GangLimits,
        on_demand: bool = False,
    ):
        self.name, self._on_demand = name, on_demand
        self._listener, self._registry, self._limits = listener, listener.registry, limits
        self._launcher, self._hosts, self._slice_type = launcher, hosts, slice_type
        self._begin, self._on_message, self._up, self._down = begin, on_message, up, down
        self._failed, self._notify = failed, notify
        self._closed, self._wanted = threading.Event(), threading.Event()
        self.want(not on_demand)
        self._gang: Gang | None = None
        self._left = None if on_demand else self._registry.left.get(name)
        self._fruitless = 0  # gangs in a row
        if self._left is not None:  # it may come as soon as the address is announced
            self._gang = Gang(name, self._left.epoch, hosts, on_message, notify, limits, again=True)
            if self._registry.fits:
                listener.expect(self._gang)
        self._thread = threading.Thread(target=self._run, name=f"supervisor {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def want(self, wanted: bool) -> None:
        """Says whether there is to be a gang at all; a gang that is not wanted any more leaves with notice. On demand:
        there is to be one, once."""
        (self._wanted.set if wanted else self._wanted.clear)()

    def close(self) -> None:
        """Ends the gang; returns when its processes are gone."""
        self._closed.set()
        if self._gang is not None:
            self._gang.down = None
            self._gang.die("the run is over")
        self._thread.join()

    # ------------------------------------------------------------ private

    def _run(self) -> None:
        lost_s, was_up = None, False
        while not self._closed.is_set():
            gang, before = self._next(), self._fruitless
            if gang is None:
                continue
            came = self._one_incarnation(gang, lost_s)
            if self._closed.is_set():
                return
            if self._on_demand:
                if not came:
                    self._down(gang)
                if gang.leaving is not None:
                    self._fruitless = 0
                elif self._fruitless > before:
                    stays = ", and it stays away" if (self._fruitless > self._limits.restarts) else ""
                    self._notify(f"{self.name} (epoch {gang.epoch}) is lost: {gang.reason}{stays}")
                continue
            was_up, lost_s = was_up or came, time.monotonic()
            if gang.leaving is not None:
                self._notify(f"{self.name} (epoch {gang.epoch}) has left: {gang.reason}")
                continue
            if gang.again and not came:
                self._notify(f"{self.name} (epoch {gang.epoch}) is not taken over: {gang.reason}")
                continue
            self._fruitless = 0 if any(process.beat.progress for process in gang.processes) else before + 1
            if (gang.final and not was_up) or self._fruitless > self._limits.restarts:
                again = f", {self._fruitless} times in a row" if self._fruitless > 1 else ""
                self._failed(RunError(f"{self.name} cannot be kept up{again}: {gang.reason}"))
                return
            self._notify(f"{self.name} (epoch {gang.epoch}) is lost: {gang.reason}")

    def _next(self) -> Gang | None:
        """The gang of the earlier controller first, then a new one each time; None: none is wanted now."""
        if self._left is not None:
            self._left = None
            return self._gang
        if not self._wanted.wait(LOOK_S):
            return None
        if self._on_demand:
            self._wanted.clear()
        epoch = self._gang.epoch + 1 if self._gang else 1
        self._gang = Gang(self.name, epoch, self._hosts, self._on_message, self._notify, self._limits)
        self._listener.expect(self._gang)
        return self._gang

    def _one_incarnation(self, gang: Gang, lost_s: float | None) -> bool:
        """Runs one gang from its start to its death; True where it came up."""
        started = self._started(gang, self._listener.ticket(gang.name, gang.epoch))
        try:
            if started is None:
                return False
            gang.form(self._begin)
            self._watch(gang, started, until=gang.ready)
            with gang.lock:
                if gang.dead.is_set():
                    return False
                self._up(gang)
                gang.down = lambda: self._down(gang)
            if not self._on_demand:  # whose devices change sides every few seconds
                how = ", taken over" if gang.again else ""
                after = f", {time.monotonic() - lost_s:.1f} s after the loss was seen" if lost_s else ""
                pids = ", ".join(str(process.hello.pid) for process in gang.processes)
                self._notify(f"{self.name} (epoch {gang.epoch}) is up{how}{after}: pids {pids}")
            self._watch(gang, started, until=gang.dead)
            return True
        finally:
            self._listener.expected.pop((gang.name, gang.epoch), None)
            if started is not None:
                started.kill()
            self._registry.strike(gang.name)

    def _started(self, gang: Gang, ticket: Ticket) -> StartedGang | None:
        """The processes of the gang; None: there are none, and the gang is dead."""
        if self._on_demand:
            try:
                if self._fruitless > self._limits.restarts:
                    raise RunError(f"{self._fruitless} incarnations in a row were lost")
                started = self._launcher.start(ticket, self._hosts, self._slice_type)
            except RunError as error:
                gang.die(str(error))
                return None
            self._fruitless += 1
            return started
        if not gang.again:
            started = self._launcher.start(ticket, self._hosts, self._slice_type)
            self._registry.enter(gang.name, gang.epoch, started.pids)
            return started
        left = self._registry.left[gang.name]
        found = self._launcher.find(ticket, self._hosts, self._slice_type, left.pids)
        if found is None:
            gang.die("it has ended")
        elif not self._registry.fits:
            gang.die("it was begun with another configuration, or by other code")
        return found

    def _watch(self, gang: Gang, started: StartedGang, until: threading.Event) -> None:
        began_s = looked_s = time.monotonic()
        warned = False
        while not until.wait(LOOK_S) and not gang.dead.is_set():
            now = time.monotonic()
            if now - looked_s > 10 * LOOK_S:
                gang.excuse(now - looked_s)
            looked_s = now
            if not started.placed:
                if self._limits.elastic:
                    gang.began_s = now  # the limit on its start begins when it has a place
                if not warned and now - began_s > ROOM_S:
                    warned = True
                    needs = f": {needs}" if (needs := started.needs()) else "; the others go on"
                    self._notify(f"{self.name} waits for a place{needs}")
            if not self._wanted.is_set() and not self._on_demand:
                gang.leave("it is not wanted any more")
            if notice := started.notice():
                gang.leave(f"preempted: {notice}")
            fault = started.ended() or gang.fault()
            if fault:
                gang.die(fault)
            if self._closed.is_set():
                gang.die("the run is over")
