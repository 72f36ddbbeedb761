"""A rollout instance that may crash and restart; each start is a new incarnation, as the coordinator sees it; the same
for one here and one elsewhere.

    commands (main thread) -> InstanceProxy -> the worker of its present incarnation -> InstanceProxy -> outbox

`InstanceProxy` is a RolloutWorker (seams.py). It consumes the commands of the coordinator and hands each to the worker
of the present incarnation; it puts that worker's items into the coordinator's outbox, `InstanceDown` where an
incarnation ends and `InstanceReady` where the next one begins. LocalInstance (supervised_worker.py) starts engines in
this process, RemoteInstance (cluster/remote_rollout.py) of gangs.

Laws: nothing of an incarnation is accepted after its InstanceDown; the answers that the incarnation still owed come
right behind it; commands reach an incarnation only once the orchestrator knows of it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import Outbox, SampleWorker
from dora_jax.runtime.common.worker import CalledHere, Finished, HandedOver, InstanceReady, OwnDevices, Parked, Waiting
from dora_jax.runtime.journal.records import Partial
from dora_jax.types import InstanceId, SampleId

LOST = "its instance is lost"
MAX_LOGPROB = 0.01  # rounding may lift one over 0
NOT_FINITE = "its log-probs are not finite"


class IncarnationWorker(SampleWorker, Protocol):
    """The worker of one incarnation: an engine's thread here, or the messages to a gang. `move` takes the Destination
    of the move, `forward` the ForwardTarget of the episode."""

    def receive(self, in_flight: Any, src: InstanceId, attempt: int) -> None:
        """in_flight: what `move` of the source's incarnation gave to the Destination."""


AnyWorker = TypeVar("AnyWorker", bound=IncarnationWorker)


def _handed_on(name: str) -> Callable[..., None]:
    """A command that the worker of the present incarnation executes. One to an incarnation that is over reaches
    nothing: InstanceDown is on its way, and reports what was outstanding."""

    def command(self: InstanceProxy, *args: Any) -> None:
        if worker := self._worker:
            worker.post(getattr(worker, name), *args)

    return command


class InstanceProxy(CalledHere, OwnDevices, Generic[AnyWorker]):
    """Called by the main thread, but for `on_message`, which the threads of incarnations call too."""

    def __init__(self, up: ev.InstanceUp, outbox: Outbox):
        self.instance = up.instance
        self.role = f"rollout {up.instance}"
        self._event = up
        self._outbox = outbox
        self._lock = threading.Lock()
        self._worker: AnyWorker | None = None  # that the orchestrator knows of, or will
        self.incarnation = up.incarnation  # the latest
        self._leaving: dict[SampleId, ev.MoveFailed] = {}  # asked to move, not out; the answer if it is lost first
        self._arriving: dict[SampleId, ev.SampleMoved] = {}  # handed over and not yet in; the answer then
        self._forwarding: dict[SampleId, Callable[[], None]] = {}  # on their way out; how each goes on without its KV
        self._waited_s = 0.0  # of earlier incarnations

    # ---------------------------------------------------------- as a worker

    @property
    def wait_s(self) -> float:
        return self._waited_s + (worker.wait_s if (worker := self._worker) else 0.0)

    @property
    def state(self) -> str:
        return worker.state if (worker := self._worker) else f"{self.role} is down"

    load = _handed_on("load")
    submit = _handed_on("submit")
    cancel = _handed_on("cancel")
    park = _handed_on("park")
    resume = _handed_on("resume")
    forget = _handed_on("forget")
    know = _handed_on("know")
    pause = _handed_on("pause")
    unpause = _handed_on("unpause")

    def forward(self, in_flight: InFlightSample, dst: InstanceProxy[AnyWorker], attempt: int) -> None:
        with self._lock:
            if (worker := self._worker) is not None:
                self._forwarding[in_flight.id] = functools.partial(dst.resume, in_flight, attempt)
        if worker is None:
            dst.resume(in_flight, attempt)
        else:  # a gang's answers before the call returns
            worker.post(worker.forward, in_flight, ForwardTarget(self, dst), attempt)

    def move(self, sample: SampleId, dst: InstanceProxy[AnyWorker], attempt: int) -> None:
        failed = ev.MoveFailed(id=sample, src=self.instance, dst=dst.instance, attempt=attempt, reason=LOST)
        with self._lock:
            if (worker := self._worker) is not None:
                target = Destination(self, worker, dst, dst._worker, dst.instance)
                self._leaving[sample] = failed
                worker.post(worker.move, sample, target, attempt)
                return
        self._outbox.put(failed)

    # ----------------------------------------------- what incarnations send and do

    def on_message(self, worker: AnyWorker, item: Any) -> None:
        """An outbox item of this incarnation."""
        with self._lock:
            if self._worker is not worker:
                return
            match item:
                case ev.MoveFailed(id=id):
                    self._leaving.pop(id, None)
                case ev.SampleMoved(id=id):
                    self._arriving.pop(id, None)
            self._outbox.put(item)

    # -------------------------------------------------- for those that start incarnations

    def incarnation_ready(self, worker: AnyWorker, admit: Callable[[], Sequence[Any]]) -> None:
        """The next incarnation has begun; `admit` follows when the coordinator hears of it."""
        self.incarnation = worker.incarnation
        self._outbox.put(
            InstanceReady(event=dataclasses.replace(self._event, incarnation=worker.incarnation), admit=admit)
        )

    def incarnation_down(
        self, worker: AnyWorker | None, number: int, reason: str, last: Sequence[HandedOver] = ()
    ) -> None:
        """Ends this incarnation, or one (None) that the orchestrator never knew of. The lock is held. last: of its
        samples."""
        if worker is not None:
            self._waited_s += worker.wait_s
        self._worker = None
        down = ev.InstanceDown(instance=self.instance, reason=reason, incarnation=number)
        for item in (*last, down, *self._leaving.values(), *self._arriving.values()):
            self._outbox.put(item)
        for resume in self._forwarding.values():
            resume()
        self._leaving, self._arriving, self._forwarding = {}, {}, {}


@dataclass
class ForwardTarget(CalledHere, Generic[AnyWorker]):
    """Where an episode goes on, as the incarnation that has its KV sees it."""

    src: InstanceProxy[AnyWorker]
    dst: InstanceProxy[AnyWorker]

    def resume(self, in_flight: InFlightSample, attempt: int) -> None:
        """It is out of the source's engine, unless that incarnation was over before."""
        with self.src._lock:
            if self.src._forwarding.pop(in_flight.id, None) is None:
                return
        self.dst.resume(in_flight, attempt)


@dataclass
class Destination(CalledHere, Generic[AnyWorker]):
    """The destination of a move, as the incarnation that gives the sample away sees it."""

    src: InstanceProxy[AnyWorker]
    source: AnyWorker  # the incarnation that gives it away
    dst: InstanceProxy[AnyWorker]
    worker: AnyWorker | None  # the incarnation that it is meant for
    instance: InstanceId

    def receive(self, in_flight: Any, src: InstanceId, attempt: int) -> None:
        self.deliver(in_flight.id, in_flight, src, attempt)

    def deliver(self, id: SampleId, in_flight: Any, src: InstanceId, attempt: int) -> bool:
        """False: the sample does not arrive as it left: one of the two incarnations is over."""
        with self.src._lock:
            if self.src._worker is not self.source or self.src._leaving.pop(id, None) is None:
                return False  # the move has been answered
        moved = ev.SampleMoved(id=id, src=src, dst=self.instance, attempt=attempt)
        with self.dst._lock:
            if self.worker is not None and self.dst._worker is self.worker:
                self.dst._arriving[id] = moved
                self.worker.post(self.worker.receive, in_flight, src, attempt)
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
        case Waiting(in_flight=held) | Parked(in_flight=held):
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
