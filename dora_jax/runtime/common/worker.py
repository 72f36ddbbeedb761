"""The thread that owns a stage, what an instance is sent beside commands, and the records that a stage puts into the
outbox.

Other threads reach a stage only by posting calls to its worker's inbox. Results go to one outbox, as events or as the
payload records below, which the coordinator turns into events. An exception in a worker reaches the main thread as
`Crashed` and ends the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dora_jax.base.lanes import WAITING, Lane
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.shutdown import STAGE_END_S
from dora_jax.types import InstanceId, Sample, SampleId, ScoredGroup, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensElsewhere:
    """To an instance: the response, so far, of a sample of a group of which others run here. There is no answer."""

    id: SampleId
    tokens: np.ndarray  # i32[U]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetSample:
    """A message to an instance: an episode that waited has ended, so its KV is dropped. It has no answer."""

    id: SampleId


Message = ev.SampleCommand | ev.InstanceCommand | TokensElsewhere | ForgetSample  # what an instance is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    sample: Sample
    instance: InstanceId | None  # None: an episode that its environment ended while it waited
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The most likely tokens at tokens [start, start + n) of a sample that wants them, sent before the tokens.
    They are for its client: no journal keeps them."""

    id: SampleId
    start: int
    rows: np.ndarray  # i32[n, 2K]: their ids, then the bits of their log-probs; -1 where they are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A sample that left its engine for host memory: parked, or an episode whose turn is over."""

    in_flight: InFlightSample
    instance: InstanceId
    incarnation: int = 0
    attempt: int = 0  # that placed it there
    waits: bool = False  # for its environment


# What an instance hands over when it leaves, or has from an earlier controller's time, and may go on anywhere: a sample
# that has begun; or one that finished while no controller listened, which is reported once the orchestrator resumes it.
Held = InFlightSample | Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady:
    """An instance elsewhere is there; `admit` lets commands reach it, from the moment that this is received, and gives
    the samples that it has from before."""

    event: ev.InstanceUp
    admit: Callable[[], Sequence[Held]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    version: Version
    groups: tuple[ScoredGroup, ...]
    metrics: Mapping[str, float]
    wait_s: float  # the trainer had no batch
    step_s: float
    digest: int = 0  # of the version's weights, where somebody asked for it
    copy: int = 0  # digest of the copy of them that was published; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    role: str
    error: BaseException


Job = tuple[Callable[..., None], tuple]


class Outbox(Protocol):
    """Where a worker puts events and payload records; a queue.SimpleQueue, or what stands for one."""

    def put(self, item: Any) -> None: ...


class Worker:
    """A thread that runs posted calls in order, and `work` between them while `busy`."""

    def __init__(self, role: str, outbox: Outbox):
        self.role = role
        self.outbox = outbox
        self.lane = Lane()  # of this thread
        self._called_s: float | None = None  # when the present call began; None: it waits for one
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=role, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self._inbox.put((call, args))

    def stop(self, timeout_s: float = STAGE_END_S) -> None:
        """Ends the thread after what is posted; waits so long for it."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def spent(self) -> Mapping[str, float]:
        """Seconds by what the thread did since its start, the present moment included; any thread may ask."""
        return self.lane.read()

    @property
    def wait_s(self) -> float:
        """Time with nothing to do since the start."""
        return self.spent().get(WAITING, 0.0)

    @property
    def state(self) -> str:
        """In a few words, for a diagnosis."""
        waited_s = self.lane.present_s(WAITING)
        if not self._thread.is_alive():
            return f"{self.role} is dead"
        return f"{self.role} works" if waited_s is None else f"{self.role} waits for work since {waited_s:.0f} s"

    @property
    def busy(self) -> bool:
        return False

    @property
    def idle(self) -> bool:
        """Nothing is posted, and there is no work."""
        return self._inbox.empty() and not self.busy

    def work(self) -> None:
        raise NotImplementedError

    def turn(self) -> bool:
        """Runs one posted call, or `work` where none is posted; waits where there is neither. False: it is to stop."""
        if self._inbox.empty() and self.busy:
            self.work()
            return True
        job = self._next()
        if job is None:
            return False
        call, args = job
        call(*args)
        return True

    def _run(self) -> None:
        self.lane.bind()
        try:
            while self.turn():
                pass
        except BaseException as error:  # handed to the main thread, which raises it there
            self.outbox.put(Crashed(role=self.role, error=error))

    def _next(self) -> Job | None:
        self._called_s = None
        self.lane.turn(WAITING)
        job = self._inbox.get()
        self._called_s = time.monotonic()
        self.lane.turn("commands", self._called_s)
        return job
