"""A gang: N processes that live and die together, as the controller sees them.

    start -> every Hello -> Begin to each -> every Ready -> up ... first death, silence or standstill -> down
    found -> every Hello -> Rejoin to each -> every Ready -> up ... notice -> HandOver -> HandOverDone -> down

Consumes what its processes send; produces facts for `on_message`, answers for `call`. Laws: the first sign of death
ends the whole gang, because a jax.distributed world without one member only hangs; `down` comes after everything that
was received of this epoch, and nothing comes after it; all processes answer a call, or none; a process that leaves with
notice hands its samples over first; a gang that an earlier controller has left is taken over whole, or ended.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import RecordConnection
from dora_jax.runtime.cluster.launch_process import Ticket
from dora_jax.runtime.cluster.run_registry import RunRegistry
from dora_jax.runtime.common.channel import Channel
from dora_jax.runtime.common.listener import Listener
from dora_jax.runtime.transfer.transfer_manifest import Shard
from dora_jax.types import Version

LEAVE_S = 12.0  # to hand over in; spot machines give 15 s between the notice and the end
RETURN_S = 30.0  # for all processes of a gang to find the new controller, on a file system that is slow to tell
NO_BEAT = messages.Heartbeat(progress=0, busy=False, spent_s={})


class GangDied(Exception):
    """The call was not answered and never will be; what it asked for may or may not have been done."""


class CallRefused(Exception):
    """A process could not do what a call asked; it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLimits:
    heartbeat_timeout_s: float  # a process says something every second
    stall_timeout_s: float  # it has work, and gets nowhere
    start_s: float  # from the launcher to Ready
    restarts: int  # in a row that come to nothing
    elastic: bool = False  # while there is no room for it, it is waited for without an end


class GangListener(Listener):
    """The port of the controller, and the gangs that it expects there."""

    def __init__(self, ip: str, registry: RunRegistry):
        self.registry = registry
        self.expected: dict[tuple[str, int], Gang] = {}  # by name and epoch, as a certificate names them
        super().__init__(ip, registry.credential, self.expected.__contains__, self._connected)

    def expect(self, gang: Gang) -> None:
        self.expected[gang.name, gang.epoch] = gang

    def ticket(self, name: str, epoch: int) -> Ticket:
        """What a process of this gang needs to come in."""
        authority = self.registry.authority
        credential = authority.issue(name, epoch)
        return Ticket(run=authority.run, controller=self.address, gang=name, epoch=epoch, credential=credential)

    # ------------------------------------------------------------ private

    def _connected(self, channel: Channel) -> None:
        RecordConnection(channel, self._first, lambda link, reason: None).start()

    def _first(self, link: RecordConnection, item: Any) -> None:
        gang = self.expected.get(link.channel.peer) if isinstance(item, messages.Hello) else None
        if gang is None:
            link.close("nobody of this epoch is expected")
        else:
            gang.join(link, item)


@dataclass(eq=False)
class GangProcess:
    """One process of a gang."""

    hello: messages.Hello
    link: RecordConnection
    before_s: Mapping[str, float] | None  # what it did under an earlier controller; None: not known yet
    ready: messages.Ready | None = None
    beat: messages.Heartbeat = NO_BEAT  # the newest
    received_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)


class Gang:
    """`again`: it has begun under an earlier controller."""

    def __init__(
        self,
        name: str,
        epoch: int,
        hosts: int,
        on_message: Callable[[Any], None],
        notify: Callable[[str], None],
        limits: GangLimits,
        again: bool = False,
    ):
        self.name, self.epoch, self.hosts, self.again = name, epoch, hosts, again
        self.reason = ""
        self.leaving: str | None = None  # why
        self.final = False  # a first start that another one would end as
        self.dead, self.ready = threading.Event(), threading.Event()
        self.down: Callable[[], None] | None = None  # set once the gang is up
        self.lock = threading.RLock()
        self._on_message = on_message
        self._notify = notify
        self._limits = limits
        self._joined: list[GangProcess] = []
        self._ranks: list[GangProcess] = []
        self._begin: Callable[[int, str, str], messages.Begin] | None = None
        self._number = 0
        self._calls: dict[int, PendingCall] = {}
        self.began_s = time.monotonic()
        self._leaves_s = 0.0
        self._left = 0  # processes that have handed over

    @property
    def holds(self) -> tuple[Version, ...]:
        """Versions that all processes of the gang hold from an earlier controller's time."""
        held = [set(process.ready.holds if process.ready else ()) for process in self._ranks]
        return tuple(sorted(set.intersection(*held)))

    @property
    def wanted(self) -> tuple[tuple[Shard, ...], ...]:
        """The shards of a version that each process is sent, by rank."""
        return tuple(process.ready.wanted if process.ready else () for process in self._ranks)

    def spent(self) -> dict[str, float]:
        """Seconds by what the first process did, under this controller; of its newest heartbeat."""
        first = self._ranks[0] if self._ranks else None
        if first is None:
            return {}
        before = first.before_s or {}
        return {does: s - before.get(does, 0.0) for does, s in first.beat.spent_s.items()}

    def form(self, begin: Callable[[int, str, str], messages.Begin]) -> None:
        """`begin(rank, coordinator, leader)`: what each process receives once all have come."""
        with self.lock:
            self._begin = begin
            self._form_if_complete()

    def join(self, link: RecordConnection, hello: messages.Hello) -> None:
        process = GangProcess(hello, link, before_s={} if hello.rank < 0 else None)
        with self.lock:
            if self.dead.is_set() or len(self._joined) >= self.hosts:
                link.close("this gang is complete")
                return
            link.adopt(
                lambda _, item: self._hear(process, item), lambda _, reason: self.die(f"{self._who(process)}: {reason}")
            )
            self._joined.append(process)
            self._form_if_complete()

    def post(self, what: Any) -> None:
        """Sends a command to the first process; only later facts tell whether it has arrived."""
        self._ranks[0].link.send(what)

    def tell_all(self, what: Any) -> None:
        """Sends a command to every process."""
        for process in self._ranks:
            process.link.send(what)

    def tell_each(self, what: Sequence[Any]) -> None:
        """Sends each process its own command, by rank."""
        for process, each in zip(self._ranks, what, strict=True):
            process.link.send(each)

    def call(self, what: Any, timeout_s: float | None = None) -> list[Any]:
        """Waits for the answers of all processes and returns them by rank. GangDied, CallRefused: see there."""
        return self.cast(what).wait(timeout_s)

    def cast(self, what: Any, then: Callable[[], None] = lambda: None) -> PendingCall:
        """Like `call`, without waiting; `then`, where all of them did it.

        The first process shares it with the others: they all get it, or none, wherever a controller that is killed
        has stopped."""
        with self.lock:
            if self.dead.is_set():
                raise GangDied(self.reason)
            self._number += 1
            pending = self._calls[self._number] = PendingCall(self, type(what).__name__, then)
            # the other calls are done by all processes together, in one order
            alone = isinstance(what, messages.WriteWeights)
            for process in self._ranks if alone else self._ranks[:1]:
                process.link.send(messages.Call(number=self._number, what=what))
            return pending

    def die(self, reason: str) -> None:
        """Marks the gang as dead, at the first sign of it; the supervisor kills the processes that are left."""
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
        for process in self._joined:
            process.link.close(reason)

    @property
    def processes(self) -> tuple[GangProcess, ...]:
        """The processes that have joined: by rank once all have, before that in the order of their arrival."""
        return tuple(self._ranks or self._joined)

    def leave(self, why: str) -> None:
        """Tells the gang to hand over its samples and to end; a gang that is not up ends at once."""
        with self.lock:
            if self.leaving is not None or self.dead.is_set():
                return
            self.leaving, self._leaves_s = why, time.monotonic()
            if self.down is None:
                self.die(why)
            else:
                self.post(messages.HandOver())

    def fault(self) -> str | None:
        """What is wrong with the gang, judged by its silence or its standstill; None: nothing."""
        now, limits = time.monotonic(), self._limits
        start_s = limits.start_s
        if self.again:  # the processes of a gang that is taken over may have to finish a step first
            at_work = self._ranks and not any(process.ready for process in self._ranks)
            start_s = limits.stall_timeout_s if at_work else RETURN_S
        if not self.ready.is_set() and now - self.began_s > start_s:
            self.final = True
            ready = sum(process.ready is not None for process in self._ranks)
            return (
                f"it was not ready within {start_s:.0f} s: {len(self._joined)} of {self.hosts} processes came, "
                f"{ready} were ready"
            )
        if self.leaving is not None and now - self._leaves_s > LEAVE_S:
            return f"it has not handed over within {LEAVE_S:.0f} s"
        for process in self._joined:
            if now - process.received_s > limits.heartbeat_timeout_s:
                return f"{self._who(process)} has sent nothing for {limits.heartbeat_timeout_s:.0f} s"
            if self.ready.is_set() and now - process.moved_s > limits.stall_timeout_s:
                return f"{self._who(process)} has work and has not moved for {limits.stall_timeout_s:.0f} s"
        return None

    def excuse(self, seconds: float) -> None:
        """Extends all limits by the time for which the controller itself was suspended."""
        for process in self._joined:
            process.received_s += seconds
            process.moved_s += seconds

    # ------------------------------------------------------------ private

    def _form_if_complete(self) -> None:
        if self._begin is None or self._ranks or len(self._joined) < self.hosts:
            return
        workers = [process.hello.worker for process in self._joined]
        if self.again:
            self._joined.sort(key=lambda process: process.hello.rank)
        elif len(set(workers)) == len(workers):  # on a TPU slice ranks follow the chips, not the order of arrival
            self._joined.sort(key=lambda process: process.hello.worker)
        self._ranks = list(self._joined)
        first = self._ranks[0].hello
        for rank, process in enumerate(self._ranks):
            begin = self._begin(rank, first.coordinator, first.leader)
            process.link.send(messages.Rejoin() if self.again else dataclasses.replace(begin, epoch=self.epoch))

    def _hear(self, process: GangProcess, item: Any) -> None:
        with self.lock:
            if self.dead.is_set():
                return
            process.received_s = time.monotonic()
            match item:
                case messages.Heartbeat():
                    if process.before_s is None:
                        process.before_s = item.spent_s
                    if item.progress != process.beat.progress or not item.busy:
                        process.moved_s = process.received_s
                    process.beat = item
                case messages.Ready():
                    process.ready = item
                    if self.again:
                        self.began_s = time.monotonic()
                    if all(other.ready for other in self._ranks):
                        self.ready.set()
                case messages.CallAnswer(number=number, what=what):
                    pending = self._calls[number]
                    pending.answers[self._ranks.index(process)] = what
                    if len(pending.answers) == self.hosts:
                        if not any(isinstance(each, messages.CallDeclined) for each in pending.answers.values()):
                            pending.then()
                        pending.done.set()
                        del self._calls[number]
                case messages.ProcessFailed(error=error, final=final):
                    self.final = final
                    self.die(f"{self._who(process)}: {error}")
                case messages.PreemptionNotice(reason=reason):
                    self.leave(f"preempted: {self._who(process)} received {reason}")
                case messages.HandOverDone(hosts=hosts):
                    self._left += 1
                    if self._left == hosts:
                        self.leaving = self.leaving or "it has handed over"
                        self.die(self.leaving)
                case messages.Note(text=text):
                    self._notify(f"{self.name}: {text}")
                case _:
                    self._on_message(item)

    def _who(self, process: GangProcess) -> str:
        where = f" {self._ranks.index(process)}" if process in self._ranks else ""
        return f"process{where} (pid {process.hello.pid})"


@dataclass(eq=False)
class PendingCall:
    """A call that not all processes of the gang have answered."""

    gang: Gang
    name: str
    then: Callable[[], None]  # called where none has declined it
    done: threading.Event = field(default_factory=threading.Event)
    answers: dict[int, messages.CallResult] = field(default_factory=dict)  # by rank

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        if not self.done.wait(timeout_s):
            self.gang.die(f"{self.name} was not answered within {timeout_s:.0f} s")
        if len(self.answers) < self.gang.hosts:
            raise GangDied(self.gang.reason)
        answers = [self.answers[rank] for rank in range(self.gang.hosts)]
        for answer in answers:
            if isinstance(answer, messages.CallDeclined):
                raise CallRefused(answer.error)
        return answers
