"""N processes that live and die together, as the controller sees them; and what keeps a gang there.

    start -> every Hello -> Begin to each -> every Ready -> up ... first death, silence or standstill -> down -> start
                                                               ... notice -> HandOver -> Left -> down -> start

Consumes what its processes send; produces facts for `heard`, answers for `call`. Laws: the first sign of death ends the
whole gang, for a world without one member only hangs; `down` comes after everything that was heard of this epoch and
nothing comes after it; a call is answered by all processes or by none; restarts that come to nothing are counted; who
leaves with notice hands over first, and counts for nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from dora_jax.config import RunError
from dora_jax.runtime.cluster.calls import Answer, Beat, Begin, Call, Done, Failed, HandOver, Hello
from dora_jax.runtime.cluster.calls import Left, Made, Note, Notice, Ready, Refused
from dora_jax.runtime.cluster.launcher import Launcher, Started, Ticket
from dora_jax.runtime.cluster.link import Door, Link
from dora_jax.types import record

LOOK_S = 0.1  # how often a keeper looks after its gang
ROOM_S = 20.0  # a gang that has no place by then is said to wait
LEAVE_S = 12.0  # to hand over in; spot machines give 15 s between the notice and the end


class GangDied(Exception):
    """The call was not answered and never will be; what it asked for may or may not have been done."""


class CallRefused(Exception):
    """A process could not do what was asked, and lives on."""


@record
class Limits:
    silence_s: float  # a process says something every second
    stall_s: float  # it has work, and gets nowhere
    start_s: float  # from the launcher to Ready
    restarts: int  # in a row that come to nothing
    elastic: bool = False  # while there is no room for it, it is waited for without an end


class Hub:
    """The controller's door, and who is expected there."""

    def __init__(self, ip: str):
        self.token = secrets.token_bytes(32)
        self._expected: dict[tuple[str, int], Gang] = {}
        self._door = Door(ip, self.token, self._welcome)
        self.address = self._door.address

    def expect(self, gang: Gang) -> None:
        self._expected[gang.name, gang.epoch] = gang

    def forget(self, gang: Gang) -> None:
        self._expected.pop((gang.name, gang.epoch), None)

    def close(self) -> None:
        self._door.close()

    def _welcome(self, end: connection.Connection) -> None:
        Link(end, self._first, lambda link, reason: None).start()

    def _first(self, link: Link, item: Any) -> None:
        gang = self._expected.get((item.gang, item.epoch)) if isinstance(item, Hello) else None
        if gang is None:
            link.close("nobody of this epoch is expected")
        else:
            gang.join(link, item)


class Host:
    """One process of a gang."""

    def __init__(self, hello: Hello, link: Link):
        self.hello, self.link = hello, link
        self.ready: Ready | None = None
        self.beat = Beat(progress=0, busy=False, waited_s=0.0)
        self.heard_s = self.moved_s = time.monotonic()

    def heard(self, item: Any) -> None:
        self.heard_s = time.monotonic()
        if isinstance(item, Beat):
            if item.progress != self.beat.progress or not item.busy:
                self.moved_s = self.heard_s
            self.beat = item


class Gang:
    def __init__(self, name: str, epoch: int, hosts: int, heard: Callable[[Any], None],
                 say: Callable[[str], None], limits: Limits):
        self.name, self.epoch, self.hosts = name, epoch, hosts
        self.reason = ""
        self.leaving: str | None = None  # why
        self.dead, self.ready = threading.Event(), threading.Event()
        self.down: Callable[[], None] | None = None  # set once the gang is up
        self.lock = threading.RLock()
        self._heard = heard
        self._say = say
        self._limits = limits
        self._joined: list[Host] = []
        self._ranks: list[Host] = []
        self._begin: Callable[[int, str, str], Begin] | None = None
        self._number = 0
        self._calls: dict[int, _Pending] = {}
        self._began_s = time.monotonic()
        self._leaves_s = 0.0

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(host.hello.pid for host in self._ranks)

    @property
    def progress(self) -> int:
        return max((host.beat.progress for host in self._ranks), default=0)

    @property
    def waited_s(self) -> float:
        return self._ranks[0].beat.waited_s if self._ranks else 0.0

    def seat(self, begin: Callable[[int, str, str], Begin]) -> None:
        """`begin(rank, coordinator, leader)`: what each process is told once all have come."""
        with self.lock:
            self._begin = begin
            self._seat_if_complete()

    def join(self, link: Link, hello: Hello) -> None:
        host = Host(hello, link)
        with self.lock:
            if self.dead.is_set() or len(self._joined) >= self.hosts:
                link.close("this gang is complete")
                return
            link.adopt(lambda _, item: self._hear(host, item),
                       lambda _, reason: self.die(f"{self._who(host)}: {reason}"))
            self._joined.append(host)
            self._seat_if_complete()

    def post(self, what: Any) -> None:
        """To the first process; whether it arrives, only later facts tell."""
        self._ranks[0].link.send(what)

    def tell_all(self, what: Any) -> None:
        """As `post`, to every process."""
        for host in self._ranks:
            host.link.send(what)

    def call(self, what: Any, timeout_s: float | None = None) -> list[Any]:
        """What every process answered, by rank."""
        return self.cast(what).wait(timeout_s)

    def cast(self, what: Any, then: Callable[[], None] = lambda: None) -> _Pending:
        """As `call`, without waiting; `then`, where all of them did it."""
        with self.lock:
            if self.dead.is_set():
                raise GangDied(self.reason)
            self._number += 1
            pending = self._calls[self._number] = _Pending(self, type(what).__name__, then)
            for host in self._ranks:
                host.link.send(Call(number=self._number, what=what))
            return pending

    def die(self, reason: str) -> None:
        """At the first sign; the keeper kills what is left."""
        with self.lock:
            if self.dead.is_set():
                return
            self.reason = reason if self.leaving in (None, reason) else f"{self.leaving}; {reason}"
            self.dead.set()
            self.ready.set()
            for pending in self._calls.values():
                pending.done.set()
            if self.down is not None:
                self.down()
        for host in self._joined:
            host.link.close(reason)

    def leave(self, why: str) -> None:
        """Hands over what it holds, then ends; one that is not up ends at once."""
        with self.lock:
            if self.leaving is not None or self.dead.is_set():
                return
            self.leaving, self._leaves_s = why, time.monotonic()
            if self.down is None:
                self.die(why)
            else:
                self.post(HandOver())

    def fault(self) -> str | None:
        """What is wrong with it, judged by its silence or its standstill."""
        now, limits = time.monotonic(), self._limits
        if not self.ready.is_set() and now - self._began_s > limits.start_s:
            return f"it was not ready within {limits.start_s:.0f} s: {len(self._joined)} of {self.hosts} processes came"
        if self.leaving is not None and now - self._leaves_s > LEAVE_S:
            return f"it has not handed over within {LEAVE_S:.0f} s"
        for host in self._joined:
            if now - host.heard_s > limits.silence_s:
                return f"{self._who(host)} has not been heard for {limits.silence_s:.0f} s"
            if self.ready.is_set() and now - host.moved_s > limits.stall_s:
                return f"{self._who(host)} has work and has not moved for {limits.stall_s:.0f} s"
        return None

    def excuse(self, seconds: float) -> None:
        """The controller itself was asleep for so long: nobody could be heard."""
        for host in self._joined:
            host.heard_s += seconds
            host.moved_s += seconds

    def waits_for_room(self) -> None:
        """Its time to start begins when it has a place."""
        self._began_s = time.monotonic()

    # ------------------------------------------------------------ private

    def _seat_if_complete(self) -> None:
        if self._begin is None or self._ranks or len(self._joined) < self.hosts:
            return
        workers = [host.hello.worker for host in self._joined]
        if len(set(workers)) == len(workers):  # on a TPU slice ranks follow the chips, not the order of arrival
            self._joined.sort(key=lambda host: host.hello.worker)
        self._ranks = list(self._joined)
        first = self._ranks[0].hello
        for rank, host in enumerate(self._ranks):
            host.link.send(self._begin(rank, first.coordinator, first.leader))

    def _hear(self, host: Host, item: Any) -> None:
        with self.lock:
            if self.dead.is_set():
                return
            host.heard(item)
            match item:
                case Beat():
                    pass
                case Ready():
                    host.ready = item
                    if all(other.ready for other in self._ranks):
                        self.ready.set()
                case Answer(number=number, what=what):
                    if self._calls[number].answer(self._ranks.index(host), what):
                        del self._calls[number]
                case Failed(error=error):
                    self.die(f"{self._who(host)}: {error}")
                case Notice(reason=reason):
                    self.leave(f"preempted: {self._who(host)} was told {reason}")
                case Left():
                    self.die(self.leaving)
                case Note(text=text):
                    self._say(f"{self.name}: {text}")
                case _:
                    self._heard(item)

    def _who(self, host: Host) -> str:
        where = f" {self._ranks.index(host)}" if host in self._ranks else ""
        return f"process{where} (pid {host.hello.pid})"


class _Pending:
    """A call under way."""

    def __init__(self, gang: Gang, name: str, then: Callable[[], None]):
        self.done = threading.Event()
        self._gang, self._name, self._then = gang, name, then
        self._answers: dict[int, Made | Done | Refused] = {}

    def answer(self, rank: int, what: Made | Done | Refused) -> bool:
        """True where all have answered."""
        self._answers[rank] = what
        if len(self._answers) < self._gang.hosts:
            return False
        if not any(isinstance(each, Refused) for each in self._answers.values()):
            self._then()
        self.done.set()
        return True

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        if not self.done.wait(timeout_s):
            self._gang.die(f"{self._name} was not answered within {timeout_s:.0f} s")
        if len(self._answers) < self._gang.hosts:
            raise GangDied(self._gang.reason)
        answers = [self._answers[rank] for rank in range(self._gang.hosts)]
        for answer in answers:
            if isinstance(answer, Refused):
                raise CallRefused(answer.error)
        return answers


class Keeper:
    """Has a gang of this name there: on a thread of its own, until `close`."""

    def __init__(self, hub: Hub, launcher: Launcher, name: str, hosts: int, slice_type: str, *,
                 begin: Callable[[int, str, str], Begin], heard: Callable[[Any], None], up: Callable[[Gang], None],
                 down: Callable[[Gang], None], failed: Callable[[RunError], None], say: Callable[[str], None],
                 limits: Limits):
        self.name = name
        self._hub, self._limits = hub, limits
        self._launcher, self._hosts, self._slice_type = launcher, hosts, slice_type
        self._begin, self._heard, self._up, self._down = begin, heard, up, down
        self._failed, self._say = failed, say
        self._closed, self._wanted = threading.Event(), threading.Event()
        self._wanted.set()
        self._gang: Gang | None = None
        self._thread = threading.Thread(target=self._run, name=f"keeper {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def want(self, wanted: bool) -> None:
        """Whether there is to be a gang at all; one that is not wanted any more leaves with notice."""
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
        epoch, fruitless, lost_s, was_up = 0, 0, None, False
        while not self._closed.is_set():
            if not self._wanted.wait(LOOK_S):
                continue
            epoch += 1
            gang = self._gang = Gang(self.name, epoch, self._hosts, self._heard, self._say, self._limits)
            came = self._one_life(gang, lost_s)
            if self._closed.is_set():
                return
            was_up, lost_s = was_up or came, time.monotonic()
            if gang.leaving is not None:
                self._say(f"{self.name} (epoch {epoch}) has left: {gang.reason}")
                continue
            fruitless = 0 if gang.progress else fruitless + 1
            if not was_up or fruitless > self._limits.restarts:
                again = f", {fruitless} times in a row" if fruitless > 1 else ""
                self._failed(RunError(f"{self.name} cannot be kept up{again}: {gang.reason}"))
                return
            self._say(f"{self.name} (epoch {epoch}) is lost: {gang.reason}")

    def _one_life(self, gang: Gang, lost_s: float | None) -> bool:
        """From start to death; True where it was up."""
        self._hub.expect(gang)
        ticket = Ticket(controller=self._hub.address, gang=gang.name, epoch=gang.epoch)
        started = self._launcher.start(ticket, self._hub.token, self._hosts, self._slice_type)
        try:
            gang.seat(self._begin)
            self._watch(gang, started, until=gang.ready)
            if gang.dead.is_set():
                return False
            with gang.lock:
                if gang.dead.is_set():
                    return False
                self._up(gang)
                gang.down = lambda: self._down(gang)
            after = f", {time.monotonic() - lost_s:.1f} s after the loss was seen" if lost_s else ""
            self._say(f"{self.name} (epoch {gang.epoch}) is up{after}: pids {', '.join(map(str, gang.pids))}")
            self._watch(gang, started, until=gang.dead)
            return True
        finally:
            self._hub.forget(gang)
            started.kill()

    def _watch(self, gang: Gang, started: Started, until: threading.Event) -> None:
        began_s = looked_s = time.monotonic()
        said = False
        while not until.wait(LOOK_S) and not gang.dead.is_set():
            now = time.monotonic()
            if now - looked_s > 10 * LOOK_S:
                gang.excuse(now - looked_s)
            looked_s = now
            if self._limits.elastic and not started.placed:
                gang.waits_for_room()
                if not said and now - began_s > ROOM_S:
                    said = True
                    self._say(f"{self.name} waits for a place; the others go on")
            if not self._wanted.is_set():
                gang.leave("it is not wanted any more")
            fault = started.ended() or gang.fault()
            if fault:
                gang.die(fault)
            if self._closed.is_set():
                gang.die("the run is over")
