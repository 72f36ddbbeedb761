"""How a run ends when it is told to, or when nothing moves any more: in time, with a reason, and an exit code.

    0 done    1 it cannot go on    2 wrong input (flags.py)    42 start me again: told to stop, or stuck

Consumes signals and facts; raises `Stop` between two batches of facts, so that nothing is cut in half. Laws: 14 s after
the first signal the process is gone, whatever hangs; what was acknowledged is in the journal by then.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.loop import World

RETRY = 42  # what JobSet and XPK take for "restart"
GRACE_S = 14.0  # spot machines give 15 s between the notice and the end
HUNG_S = 60.0  # the main thread itself stands still so much longer than the limit
IDLE_FACTS = (ev.TimePassed, ev.PagesReported)  # said whether or not anything moves


class Stop(Exception):
    """The run ends now and can be started again; the message says why."""


class Guard:
    """Signals and the watchdog of one run. Use as a context on the main thread. `limit_s` 0: no watchdog."""

    def __init__(self, limit_s: float, diagnose: Callable[[], str] = lambda: ""):
        self.diagnose = diagnose
        self.looping = False  # signals wait for the loop, which looks in between facts
        self._limit_s = limit_s
        self._signal: str | None = None
        self._looked_s = self._moved_s = time.monotonic()
        self._done = threading.Event()
        self._old: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Guard:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old[number] = signal.signal(number, self._told)
        if self._limit_s:
            self._begin(self._watch, "watchdog")
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for thread in self._threads:  # one that wakes while the interpreter ends would abort the process
            thread.join()
        for number, old in self._old.items():
            signal.signal(number, old)

    def look(self) -> None:
        """Raises Stop where the run has been told to end, or nothing has moved for the limit."""
        self.looping = True
        self._looked_s = now = time.monotonic()
        if self._signal:
            raise Stop(f"{self._signal}: stopped; the same command goes on from here")
        if self._limit_s and now - self._moved_s > self._limit_s:
            raise Stop(f"nothing has moved for {now - self._moved_s:.0f} s: {self.diagnose()}")

    def moved(self) -> None:
        self._moved_s = time.monotonic()

    # ------------------------------------------------------------ private

    def _begin(self, call: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=call, name=name, daemon=True))
        self._threads[-1].start()

    def _told(self, number: int, frame: Any) -> None:
        again = self._signal is not None
        self._signal = signal.Signals(number).name
        if not again:
            self._begin(self._end_in_time, "deadline")
        if again or not self.looping:  # nothing runs yet that could be cut in half
            raise Stop(f"{self._signal}: stopped")

    def _end_in_time(self) -> None:
        if not self._done.wait(GRACE_S):
            print(f"{self._signal}: {GRACE_S:.0f} s are over; what is unfinished is abandoned", file=sys.stderr, flush=True)
            os._exit(RETRY)

    def _watch(self) -> None:
        """The last resort: the main thread is stuck inside a call."""
        while not self._done.wait(min(self._limit_s, HUNG_S) / 4):
            if self.looping and time.monotonic() - self._looked_s > self._limit_s + HUNG_S:
                print(f"the main thread has stood still for {self._limit_s + HUNG_S:.0f} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(RETRY)


class GuardedWorld:
    """`World` in front of another: the guard looks before every batch of facts."""

    def __init__(self, world: World, guard: Guard):
        self._world = world
        self._guard = guard

    def events(self) -> Iterator[ev.Event]:
        self._guard.look()
        for event in self._world.events():
            if not isinstance(event, IDLE_FACTS):
                self._guard.moved()
            yield event

    def execute(self, command: ev.Command) -> None:
        self._world.execute(command)
