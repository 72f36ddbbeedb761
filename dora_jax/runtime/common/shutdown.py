"""How a run ends when it is asked to, or when nothing moves any more: in time, with a reason and an exit code
(exits.py).

Consumes signals and facts; raises `Stop` between two batches of facts, so that nothing is cut in half. Laws: 14 s after
the first signal a program of ours is gone, whatever hangs; what was acknowledged is in the journal by then; the process
of a caller of `dora_jax.fit` is never ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from dora_jax.base.exits import RETRY, SIGNALS, Stop, leave, never_print
from dora_jax.base.lanes import doing
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import World

GRACE_S = 13.0  # spot machines give 15 s between the notice and the end; freeing what a process holds takes some of it
HUNG_S = 60.0  # the main thread itself stands still so much longer than the limit
STAGE_END_S = 30.0  # a stage that is asked to end is waited for so long

never_print(
    lambda error: isinstance(error, Stop)
)  # raised inside a callback, which drops it: the next look raises it again


class Guard:
    """Signals and the watchdog of one run; use as a context.

    `limit_s` 0: no watchdog. `owner`: the process is there for this run alone, and is ended where the run hangs.
    On another thread than the main one, where Python takes no handlers, signals stay as they are.
    """

    def __init__(self, limit_s: float, diagnose: Callable[[], str] = lambda: "", *, owner: bool = False):
        self.diagnose = diagnose
        self.looping = False  # signals wait for the loop, which looks in between facts
        self._limit_s = limit_s
        self._owner = owner
        # seconds for which a stopped run waits for a stage; what the stage does not finish is made again on resume
        self.patience_s = 0.0 if owner else STAGE_END_S
        self._signal: str | None = None
        self._looked_s = self._moved_s = time.monotonic()
        self._done = threading.Event()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._owner:
                # the deadline is kept by a thread, which hears of a signal at once: a handler waits until the main
                # thread is out of XLA
                receiver, sender = socket.socketpair()
                sender.setblocking(False)
                self._undo.callback(receiver.close)
                self._begin(functools.partial(self._keep_deadline, receiver), "deadline")
                self._undo.callback(sender.close)
                wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
                self._undo.callback(signal.set_wakeup_fd, wakeup)
            for number in SIGNALS:
                self._undo.callback(signal.signal, number, signal.signal(number, self._on_signal))
        if self._limit_s:
            self._begin(self._watch, "watchdog")
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._undo.close()

    def look(self) -> None:
        """Raises Stop where the run was asked to end, or where nothing has moved for the limit."""
        self.looping = True
        self._looked_s = now = time.monotonic()
        if self._signal:
            raise Stop(f"{self._signal}: stopped; the same command goes on from here")
        if self._limit_s and now - self._moved_s > self._limit_s:
            raise Stop(f"nothing has moved for {now - self._moved_s:.0f} s: {self.diagnose()}")

    def moved(self) -> None:
        self._moved_s = time.monotonic()

    def stepped(self) -> None:
        """For a loop without facts: once a step."""
        self.moved()
        self.look()

    # ------------------------------------------------------------ private

    def _begin(self, call: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=call, name=name, daemon=True)
        self._undo.callback(thread.join)  # one that wakes while the interpreter ends would abort the process
        thread.start()

    def _on_signal(self, number: int, frame: Any) -> None:
        """Interrupts what runs before the loop; a second signal interrupts the loop too."""
        again, self._signal = self._signal is not None, signal.Signals(number).name
        if not self._owner if again else not self.looping:
            raise Stop(f"{self._signal}: stopped; the same command goes on from here")

    def _keep_deadline(self, receiver: socket.socket) -> None:
        while (received := receiver.recv(1)) and received[0] not in SIGNALS:
            pass
        if received and not self._done.wait(GRACE_S):
            leave(
                RETRY,
                f"{signal.Signals(received[0]).name}: {GRACE_S:.0f} s are over; what is unfinished is abandoned, "
                f"and the same command makes it again (exit code {RETRY})",
            )

    def _watch(self) -> None:
        """The last resort: the main thread is stuck inside a call."""
        while not self._done.wait(min(self._limit_s, HUNG_S) / 4):
            if self.looping and time.monotonic() - self._looked_s > self._limit_s + HUNG_S:
                print(
                    f"the main thread has stood still for {self._limit_s + HUNG_S:.0f} s", file=sys.stderr, flush=True
                )
                faulthandler.dump_traceback(all_threads=True)
                if self._owner:
                    leave(RETRY)
                return


class GuardedWorld:
    """`World` in front of another: the guard looks before every batch of facts."""

    def __init__(self, world: World, guard: Guard):
        self._world = world
        self._guard = guard
        guard.moved()  # it was made before the run was compiled

    def execute(self, command: ev.Command) -> None:
        with doing("commands"):
            self._world.execute(command)

    def events(self) -> Iterator[ev.Event]:
        self._guard.look()
        for event in self._world.events():
            if not isinstance(event, ev.TimePassed) and not (
                isinstance(event, ev.InstanceReported) and not event.tokens
            ):
                self._guard.moved()
            yield event
