"""A rollout instance that may crash and restart; each start is a new incarnation, as the coordinator sees it; the same
for one here and one elsewhere.

    commands (main thread) -> InstanceProxy -> the worker of its present incarnation -> InstanceProxy -> outbox

`InstanceProxy` is a RolloutWorker (seams.py). It consumes the commands of the coordinator and hands each to the worker
of the present incarnation; it puts that worker's items into the coordinator's outbox, `InstanceDown` where an
incarnation ends and `InstanceReady` where the next one begins. LocalInstance (supervised_worker.py) starts engines in
this process, RemoteInstance (cluster/remote_rollout.py) of gangs. An instance on demand is one of the trainer's
devices: it is up only while they are lent.

Laws: nothing of an incarnation is accepted after its InstanceDown; the answers that the incarnation still owed come
right behind it; commands reach an incarnation only once the orchestrator knows of it; every Lend is answered by
InstanceUp or InstanceDown, and every Return by InstanceDown.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from dora_jax.base.lanes import WAITING, Lane, summed
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import Recipient
from dora_jax.runtime.common.worker import Exported, Finished, Held, InstanceReady, Message, Outbox
from dora_jax.runtime.journal.records import Partial
from dora_jax.types import SampleId, Version

LOST = "its instance is lost"
UP, DOWN = "up", "down"  # what the lane does: an incarnation is there, or none
RETURNED = "its devices are the trainer's again"
MAX_LOGPROB = 0.01  # rounding may lift one over 0
NOT_FINITE = "its log-probs are not finite"


class IncarnationWorker(Recipient, Protocol):
    """The worker of one incarnation: an engine's thread here, or the messages to a gang. The `dst` that it is sent is a
    Destination; the sample that the Destination is given, the worker of `dst` understands."""

    incarnation: int

    def spent(self) -> Mapping[str, float]: ...

    @property
    def state(self) -> str: ...


AnyWorker = TypeVar("AnyWorker", bound=IncarnationWorker)


class InstanceProxy(Generic[AnyWorker]):
    """Called by the main thread, but for `on_message`, which the threads of incarnations call too."""

    def __init__(self, up: ev.InstanceUp, outbox: Outbox, vocab_size: int | None = None, on_demand: bool = False):
        self.instance = up.instance
        self.role = f"rollout {up.instance}"
        self.on_demand = on_demand
        self._event = up
        self._outbox = outbox
        self._lock = threading.RLock()
        self._worker: AnyWorker | None = None  # that the orchestrator knows of, or will
        self.incarnation = up.incarnation  # the latest
        # on their way out, by the attempt of the Move or Resume: both may be asked of one sample, whose turn has ended
        # meanwhile; what is done if it is lost first
        self._leaving: dict[tuple[SampleId, int], Callable[[], object]] = {}
        self._arriving: dict[SampleId, ev.SampleMoved] = {}  # handed over and not yet in; the answer then
        self._earlier: Mapping[str, float] = {}  # seconds of earlier incarnations
        self._vocab_size = vocab_size
        # while there is no incarnation: one on demand waits for the trainer's devices
        self._lane = Lane(WAITING if on_demand else DOWN)

    # ---------------------------------------------------------- as a worker

    def spent(self) -> Mapping[str, float]:
        worker = self._worker
        spent_s = summed(self._earlier, self._lane.read(), worker.spent() if worker else {})
        spent_s.pop(UP, None)  # what it then does is of the incarnation
        return spent_s

    @property
    def state(self) -> str:
        return worker.state if (worker := self._worker) else f"{self.role} is down"

    def send(self, message: Message, payload: Any = None, dst: InstanceProxy[AnyWorker] | None = None) -> None:
        """One to an incarnation that is over reaches nothing: InstanceDown is on its way, and reports what was
        outstanding."""
        if dst is None:
            worker = self._worker
            match message:
                case ev.Lend(version=version) if self.on_demand:
                    self.begin(version)
                case ev.Return() if worker:
                    self.end(worker)
                case _ if worker:
                    worker.send(message, payload)
            return
        lost: dict[tuple[SampleId, int], Callable[[], object]] = {}
        match message:
            case ev.Move(ids=ids, src=src, dst=to, attempt=attempt):
                for id in ids:
                    failed = ev.MoveFailed(id=id, src=src, dst=to, attempt=attempt, reason=LOST)
                    lost[id, attempt] = functools.partial(self._outbox.put, failed)
            case ev.Resume(attempt=attempt):  # an episode goes on there without the KV that is kept here
                lost[payload.id, attempt] = functools.partial(dst.send, message, payload)
        with self._lock:
            if (worker := self._worker) is not None:
                self._leaving |= lost
                target = Destination(self, worker, dst, dst._worker)
        if worker is not None:  # a gang's answers before the call returns
            worker.send(message, payload, target)
            return
        for answer in lost.values():
            answer()

    def begin(self, version: Version) -> None:
        """On demand: begin an incarnation that holds the version. The answer is InstanceUp, or InstanceDown."""
        raise NotImplementedError

    def end(self, worker: AnyWorker) -> None:
        """On demand: end this incarnation, whose samples are handed over; the trainer gets the devices. The answer is
        InstanceDown."""
        raise NotImplementedError

    def mark_unhealthy(self, incarnation: int, reason: str) -> None:
        """See RolloutWorker."""
        if (worker := self._worker) is not None and worker.incarnation == incarnation:
            self.lose(worker, reason, unhealthy=True)
        else:  # what it has left is not believed either
            self._outbox.put(ev.InstanceUnhealthy(instance=self.instance, reason=reason, incarnation=incarnation))

    # ----------------------------------------------- what incarnations send and do

    def on_message(self, worker: AnyWorker, item: Any) -> None:
        """An outbox item of this incarnation."""
        if fault := garbage_in(item, self._vocab_size):
            return self.lose(worker, f"it returned garbage: {fault}", unhealthy=True)
        with self._lock:
            if self._worker is not worker:
                return
            match item:
                case ev.MoveFailed(id=id, attempt=attempt):
                    self._leaving.pop((id, attempt), None)
                case ev.SampleMoved(id=id):
                    self._arriving.pop(id, None)
            self._outbox.put(item)

    def lose(self, worker: AnyWorker, reason: str, error: BaseException | None = None, unhealthy: bool = False) -> None:
        """End an incarnation, whatever it does: nothing of it is accepted from now on. unhealthy: what it sampled is
        not believed."""
        with self._lock:
            if unhealthy:
                event = ev.InstanceUnhealthy(instance=self.instance, reason=reason, incarnation=worker.incarnation)
                self._outbox.put(event)
            if self._worker is not worker:
                return
            self.incarnation_down(worker, worker.incarnation, reason)
        self.lost(worker, reason, error or RuntimeError(reason), unhealthy)

    def lost(self, worker: AnyWorker, reason: str, error: BaseException, unhealthy: bool) -> None:
        """The incarnation has been ended; see `lose`."""
        raise NotImplementedError

    # -------------------------------------------------- for those that start incarnations

    def incarnation_ready(self, worker: AnyWorker) -> None:
        """The next incarnation has begun; `admit` follows when the coordinator hears of it."""
        self.incarnation = worker.incarnation
        up = dataclasses.replace(self._event, incarnation=worker.incarnation)
        self._outbox.put(InstanceReady(event=up, admit=functools.partial(self.admit, worker)))

    def admit(self, worker: AnyWorker) -> Sequence[Held]:
        """Commands reach this incarnation from now on. Returns the samples that it has from before."""
        with self._lock:
            self._worker = worker
            self._lane.turn(UP)
        return ()

    def incarnation_down(
        self, worker: AnyWorker | None, number: int, reason: str, last: Sequence[InFlightSample] = ()
    ) -> None:
        """Ends this incarnation, or one (None) that the orchestrator never knew of. The lock is held. last: of its
        samples."""
        if worker is not None:
            self._earlier = summed(self._earlier, worker.spent())
            self._lane.turn(WAITING if self.on_demand else DOWN)
        self._worker = None
        down = ev.InstanceDown(instance=self.instance, reason=reason, incarnation=number)
        for item in (*last, down, *self._arriving.values()):
            self._outbox.put(item)
        for answer in self._leaving.values():
            answer()
        self._leaving, self._arriving = {}, {}


@dataclass
class Destination(Generic[AnyWorker]):
    """Where a sample goes on, as the incarnation that it leaves sees it."""

    src: InstanceProxy[AnyWorker]
    source: AnyWorker  # the incarnation that it leaves
    dst: InstanceProxy[AnyWorker]
    worker: AnyWorker | None  # the incarnation that a Move is meant for

    def send(self, message: ev.Move | ev.Resume, payload: Any = None, dst: None = None) -> bool:
        """payload: the sample, which has an id, is out of the source's engine. False: it does not arrive as it left,
        for one of the two incarnations is over."""
        with self.src._lock:
            key = payload.id, message.attempt
            if self.src._worker is not self.source or self.src._leaving.pop(key, None) is None:
                return False  # the answer has been given
        if not isinstance(message, ev.Move):
            self.dst.send(message, payload)
            return True
        moved = ev.SampleMoved(id=payload.id, src=message.src, dst=message.dst, attempt=message.attempt)
        with self.dst._lock:
            if self.worker is not None and self.dst._worker is self.worker:
                self.dst._arriving[payload.id] = moved
                self.worker.send(message, payload)
                return True
        self.dst._outbox.put(moved)  # the recorded tokens go on
        return False


def garbage_in(item: Any, vocab_size: int | None = None) -> str | None:
    """What is wrong with the sampled tokens of a record; None: nothing, or it carries none. What an environment
    answered is not looked at: it is no instance's fault. vocab_size: None where it is not known."""
    match item:
        case Finished(sample=sample):
            found = _fault(sample.out_ids, sample.logprobs, sample.mask, vocab_size)
            return found or (NOT_FINITE if sample.finish == "error" else None)
        case Partial():
            return _fault(item.out_ids, item.logprobs, None, vocab_size)
        case Exported(in_flight=held):
            return _fault(held.out_ids, held.logprobs, held.mask, vocab_size)
    return None


def _fault(out_ids: np.ndarray, logprobs: np.ndarray, mask: np.ndarray | None, vocab_size: int | None) -> str | None:
    """mask: bool[U], False where an environment wrote the token; None: all of them were sampled."""
    if len(out_ids) != len(logprobs):
        return f"{len(out_ids)} tokens have {len(logprobs)} log-probs"
    if mask is not None:
        out_ids, logprobs = out_ids[mask], logprobs[mask]
    if not len(out_ids):
        return None
    if out_ids.min() < 0 or (vocab_size is not None and out_ids.max() >= vocab_size):
        return f"token {out_ids.max() if out_ids.min() >= 0 else out_ids.min()} of {vocab_size}"
    if not np.isfinite(logprobs).all():
        return NOT_FINITE
    return f"a log-prob of {logprobs.max()}" if logprobs.max() > MAX_LOGPROB else None
