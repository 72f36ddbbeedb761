"""Threads of the one-process world: one per rollout instance, one for the trainer.

A worker owns its stage; others reach it only by posting calls to its inbox. Results go to one shared
outbox as events, or as payload records that `LocalWorld` turns into events. An exception in a worker
travels to the main thread as `Crashed` and ends the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.fault_injection import point
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.durability.payload_state import Partial
from dora_jax.runtime.idle_timer import Waits
from dora_jax.runtime.mismatch_probe import GapProbe
from dora_jax.runtime.shutdown import STAGE_END_S
from dora_jax.types import InstanceId, Prompt, Sample, SampleId, ScoredGroup, Version

REPORT_PERIOD_S = 0.1  # of an instance: often enough to decide on, rare enough to ignore
FLEET_REPORTS_PER_S = 10_000  # of all instances: what a controller hears beside everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    sample: Sample
    instance: InstanceId
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A sample that left its engine for host memory (`Park`)."""

    id: SampleId
    instance: InstanceId
    parcel: InFlightSample
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """A sample that has begun, of an instance that leaves, or was left alone: what it has goes on anywhere."""

    parcel: InFlightSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A sample that finished while nobody listened; it is told once somebody asks for the sample again."""

    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReady:
    """An instance elsewhere is there; `admit` lets commands reach it, from the moment that this is heard, and gives the
    samples that it has from before."""

    event: ev.InstanceUp
    admit: Callable[[], Sequence[HandedOver | Ended]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    version: Version
    groups: tuple[ScoredGroup, ...]
    metrics: Mapping[str, float]
    wait_s: float  # the trainer had no batch
    step_s: float
    digest: int = 0  # of the version's weights, where somebody asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    role: str
    error: BaseException


class Worker:
    """A thread that runs posted calls in order, and `work` between them while `busy`."""

    def __init__(self, role: str, outbox: queue.SimpleQueue):
        self.role = role
        self.outbox = outbox
        self._waits = Waits()
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=role, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self._inbox.put((call, args))

    def stop(self, timeout_s: float = STAGE_END_S) -> None:
        """Ends the thread after what is posted; waits for it."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def wait_s(self) -> float:
        """Time with nothing to do since the start, the present wait included; any thread may ask."""
        return self._waits.total_s

    @property
    def state(self) -> str:
        """In a few words, for a diagnosis."""
        waited_s = self._waits.present_s
        if not self._thread.is_alive():
            return f"{self.role} is dead"
        return f"{self.role} works" if waited_s is None else f"{self.role} waits for work since {waited_s:.0f} s"

    @property
    def busy(self) -> bool:
        return False

    def work(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while True:
                if self._inbox.empty() and self.busy:
                    self.work()
                    continue
                job = self._next()
                if job is None:
                    return
                call, args = job
                call(*args)
        except BaseException as error:  # handed to the main thread, which raises it there
            self.outbox.put(Crashed(role=self.role, error=error))

    def _next(self) -> tuple[Callable[..., None], tuple] | None:
        with self._waits:
            return self._inbox.get()


def report_period_s(instances: int) -> float:
    """Of each instance of a fleet: a larger fleet's are heard less often, so that all together stay in bounds."""
    return max(REPORT_PERIOD_S, instances / FLEET_REPORTS_PER_S)


class InstanceWorker(Worker):
    """One life of one engine: starts, ticks, moves and loads on its own thread.

    `partial_s`: how often the tokens of running samples are reported, so that they outlive this process; 0: never."""

    def __init__(
        self,
        instance: InstanceId,
        engine: Any,
        weights: Any,
        outbox: queue.SimpleQueue,
        partial_s: float = 0.0,
        life: int = 0,
        report_s: float = REPORT_PERIOD_S,
    ):
        super().__init__(f"rollout {instance}", outbox)
        self.instance, self.life = instance, life
        self.engine = engine
        self.tokens = 0  # sampled since start
        self._paused = False
        self._weights = weights
        self._versions: dict[SampleId, Version] = {}  # of samples submitted and not yet started
        self._progress: dict[SampleId, int] = {}  # tokens of what runs here
        self._grew = False  # since the last report
        self._report_s = report_s
        self._reported_s = 0.0
        self._partial_s = partial_s
        self._partials_s = time.monotonic()
        self._grown: dict[SampleId, None] = {}  # run here and have more tokens than were reported
        self._told: dict[SampleId, int] = {}  # tokens reported
        self._begun: dict[SampleId, None] = {}  # here and not ended

    def load(self, version: Version, drop: Version | None) -> None:
        if drop is not None:
            self.engine.drop(drop)
        self.take_into_use(version, self._weights.get(version, self.engine.param_shardings))

    def take_into_use(self, version: Version, weights: Any) -> None:
        self.engine.load(version, weights)
        self.outbox.put(ev.WeightsLoaded(instance=self.instance, version=version, life=self.life))

    def submit(self, sample: SampleId, prompt: Prompt, version: Version) -> None:
        self._versions[sample] = version
        self.engine.submit(sample, prompt.token_ids, version, prompt.max_new_tokens)

    def cancel(self, sample: SampleId, reason: str) -> None:
        """Answered whether or not it is here: behind its end, where it has ended."""
        self._forget(sample)
        self._versions.pop(sample, None)
        self.engine.cancel(sample)
        self.outbox.put(ev.SampleCancelled(id=sample, reason=reason))

    def move(self, sample: SampleId, dst: InstanceWorker, attempt: int) -> None:
        if not self.engine.holds(sample):
            self.outbox.put(
                ev.MoveFailed(id=sample, src=self.instance, dst=dst.instance, attempt=attempt, reason="finished")
            )
            return
        dst.post(dst.receive, self._export(sample), self.instance, attempt)

    def receive(self, parcel: Any, src: InstanceId, attempt: int) -> None:
        self._import(parcel)
        self.outbox.put(ev.SampleMoved(id=parcel.id, src=src, dst=self.instance, attempt=attempt))

    def park(self, sample: SampleId) -> None:
        if self.engine.holds(sample):
            parcel = self._export(sample)
            self.outbox.put(Exported(id=sample, instance=self.instance, parcel=parcel, life=self.life))

    def resume(self, parcel: Any) -> None:
        self._import(parcel)
        self.outbox.put(ev.SampleResumed(id=parcel.id, instance=self.instance, life=self.life))

    def hand_over(self) -> None:
        """It leaves: what has begun goes on elsewhere from its last token, what has not is asked for again."""
        for sample in self._versions:
            self.engine.cancel(sample)
        self._versions.clear()
        for sample in list(self._begun):
            if self.engine.holds(sample):  # others go on while one is copied
                self.outbox.put(HandedOver(parcel=self._export(sample)))
        if not self.engine.idle:
            self.work()  # hands out what finished meanwhile

    def pause(self) -> None:
        """The trainer has the devices: no tick until `unpause`, while calls are answered as ever."""
        self._paused = True

    def unpause(self) -> None:
        self._paused = False

    @property
    def busy(self) -> bool:
        return not self._paused and not self.engine.idle

    def work(self) -> None:
        result = self.engine.tick()
        self.tokens += result.tokens
        for sample in result.started:
            version = self._versions.pop(sample, None)
            self._begun[sample] = None
            if version is not None:  # None: it started on another instance and moved here
                self.outbox.put(ev.SampleStarted(id=sample, instance=self.instance, version=version, life=self.life))
        self._progress.update(result.progress)
        self._grew |= bool(result.progress)
        self._grown.update(dict.fromkeys(result.progress))
        for sample in result.finished:
            self._forget(sample.id)
            self.outbox.put(Finished(sample=sample, instance=self.instance, life=self.life))
        now = time.monotonic()
        if now - self._reported_s >= self._report_s:
            self._reported_s = now
            progress, self._grew = self._progress if self._grew else {}, False
            self.outbox.put(ev.InstanceReported.of(self.instance, result.free_pages, progress, self.life))
        if self._partial_s and now - self._partials_s >= self._partial_s:
            self._partials_s = now
            for sample_id in self._grown:
                new = self.engine.sampled(sample_id, self._told.get(sample_id, 0))
                self._report(sample_id, self.engine.version_of(sample_id), *new)
            self._grown.clear()

    def _import(self, parcel: Any) -> None:
        self.engine.import_(parcel)
        self._begun[parcel.id] = None
        self._progress[parcel.id] = len(parcel.out_ids)
        self._told[parcel.id] = len(parcel.out_ids)

    def _export(self, sample: SampleId) -> Any:
        """Out of the engine; what it had sampled is reported first, because its version may change on the way."""
        parcel = self.engine.export(sample)
        if self._partial_s:
            start = self._told.get(sample, 0)
            self._report(sample, parcel.version, parcel.out_ids[start:], parcel.logprobs[start:])
        self._forget(sample)
        return parcel

    def _report(self, sample: SampleId, version: Version, out_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """What it has sampled since the last report."""
        if len(out_ids):
            start = self._told.get(sample, 0)
            self._told[sample] = start + len(out_ids)
            self.outbox.put(Partial(id=sample, version=version, start=start, out_ids=out_ids, logprobs=logprobs))

    def _forget(self, sample: SampleId) -> None:
        self._begun.pop(sample, None)
        self._progress.pop(sample, None)
        self._grown.pop(sample, None)
        self._told.pop(sample, None)


class TrainerWorker(Worker):
    """Takes the named groups, checks the staleness bound (None: the mode has none), makes one step, publishes it.

    probe: see mismatch_probe.py.
    """

    def __init__(
        self,
        trainer: Any,
        pack: Callable,
        groups: Any,
        weights: Any,
        max_lag: int | None,
        outbox: queue.SimpleQueue,
        digest: Callable[[Any], int] = lambda params: 0,
        probe: Callable[[ScoredGroup, Version, Any], Any] | None = None,
    ):
        super().__init__("trainer", outbox)
        self._digest = digest
        self._gap = GapProbe(probe if max_lag != 0 else None)
        self.trainer = trainer
        self._pack = pack
        self._groups = groups
        self._weights = weights
        self._max_lag = max_lag
        self._reported_wait_s = 0.0

    def train(self, group_ids: tuple[int, ...], base: Version) -> None:
        began = time.monotonic()
        wait_s, self._reported_wait_s = self.wait_s - self._reported_wait_s, self.wait_s
        groups = self._take(group_ids, base)
        point("trainer.before_step")
        metrics = self.trainer.step(self._pack(groups, base), **self._gap.among(groups, base))
        point("trainer.after_step")
        self._publish(base)
        self.outbox.put(
            StepDone(
                version=base + 1,
                groups=groups,
                metrics=metrics,
                wait_s=wait_s,
                step_s=time.monotonic() - began,
                digest=self._digest(self.trainer.params),
            )
        )

    def _take(self, group_ids: tuple[int, ...], base: Version) -> tuple[ScoredGroup, ...]:
        groups = tuple(self._groups.take(group_ids))
        for group in groups:
            if self._max_lag is not None and not 0 <= base - group.version <= self._max_lag:
                raise RuntimeError(
                    f"group {group.group_id} of version {group.version} was taken at base {base}: "
                    f"its lag exceeds the bound of {self._max_lag}"
                )
        return groups

    def _publish(self, base: Version) -> None:
        """Until StepDone is heard, base is the newest version, which the store keeps."""
        self._weights.put(base + 1, self.trainer.params)
        point("trainer.after_put")
        if self._gap.wanted:
            self._gap.keep(base, self._weights.get(base, None))
