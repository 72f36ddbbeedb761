"""The thread of one rollout engine: it starts, cancels, moves, parks and resumes samples, loads weights, and ticks.

Consumes the messages that it is sent; puts events, what it hands over, and `Finished`, `Exported`, `TopTokens` and
`Partial` records into the outbox. Law: every command for a sample is answered by one event, whether or not the
sample is still here.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, SampledTokens, count_rows, sampled_from
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.common.seams import Recipient, RolloutEngine, WeightStore
from dora_jax.runtime.common.worker import (
    Crashed,
    Exported,
    Finished,
    ForgetSample,
    Message,
    Outbox,
    TokensElsewhere,
    TopTokens,
    Worker,
)
from dora_jax.runtime.journal.records import Partial
from dora_jax.types import InstanceId, SampleId, Version, is_served

REPORT_PERIOD_S = 0.1  # of an instance: often enough to decide on, rare enough to ignore
FLEET_SAMPLES_PER_S = 100_000  # of all instances: the samples that reports list
FLEET_REPORTS_PER_S = 10_000  # of all instances: what a controller hears beside everything else
DOES = {ev.LoadWeights: "load", ev.Move: "sample transfer", ev.Park: "sample transfer", ev.Resume: "sample transfer"}


def report_period_s(instances: int) -> float:
    """Seconds between two reports of an instance: a large fleet reports less often, so that all of its reports together
    stay below FLEET_REPORTS_PER_S."""
    return max(REPORT_PERIOD_S, instances / FLEET_REPORTS_PER_S)


def progress_period_s(instances: int, slots: int) -> float:
    """Seconds between two reports that also list how far each sample is: decisions can wait for that longer than for
    pages, and a report of a hundred samples costs ten times one without."""
    return instances * slots / FLEET_SAMPLES_PER_S


@dataclasses.dataclass
class _Took:
    sampled: int = 0  # tokens
    busy_s: float = 0.0
    row_s: float = 0.0  # of each sample, summed
    guesses: int = 0
    held: int = 0

    def add(self, result: TickResult, seconds: float) -> None:
        self.sampled += result.tokens
        self.busy_s += seconds
        self.row_s += result.rows * seconds
        self.guesses += result.guesses
        self.held += result.held


class EngineWorker(Worker):
    """One incarnation of one engine: starts, ticks, moves and loads on its own thread.

    `partial_s`: how often the tokens of running samples are reported, so that they outlive this process; 0: never."""

    def __init__(
        self,
        instance: InstanceId,
        engine: RolloutEngine,
        weights: WeightStore,
        outbox: Outbox,
        partial_s: float = 0.0,
        incarnation: int = 0,
        report_s: float = REPORT_PERIOD_S,
        progress_s: float = 0.0,
    ):
        super().__init__(f"rollout {instance}", outbox)
        self.instance, self.incarnation = instance, incarnation
        self._here = {"instance": instance, "incarnation": incarnation}  # of every event
        self.engine = engine
        self.tokens = 0  # sampled since start
        self._paused = False
        self._weights = weights
        self._versions: dict[SampleId, Version] = {}  # of samples submitted and not yet started
        # that placed the samples that are here; none of what an earlier incarnation has left in the engine, or was
        # cancelled
        self._attempts: dict[SampleId, int] = {}
        self._progress: dict[SampleId, int] = {}  # tokens of what runs here
        self._grew = False  # since the last report
        self._report_s = report_s
        self._reported_s = 0.0
        self._progress_s = progress_s
        self._progressed_s = 0.0
        self._partial_s = partial_s
        self._partials_s = time.monotonic()
        self._grown: dict[SampleId, int] = {}  # run here and have more tokens than were reported
        self._reported: dict[SampleId, tuple[int, int]] = {}  # tokens and rows of the table reported
        self._begun: dict[SampleId, None] = {}  # here and not ended
        self._took = (_Took(), _Took())  # by the ticks since the last report that only decoded: without drafts, with

    def send(self, message: Message, payload: Any = None, dst: Recipient | None = None) -> None:
        self.post(self.execute, message, payload, dst)

    def execute(self, message: Message, payload: Any = None, dst: Recipient | None = None) -> None:
        """Carry out a command; see Recipient. Each sample that it names is answered by one event, whether or not the
        sample is still here; a Cancel behind the sample's end, where it has ended."""
        self.lane.turn(DOES.get(type(message), "commands"))
        match message:
            case ev.Start(ids=ids, version=version, attempt=attempt):
                for id in ids:
                    self._versions[id], self._attempts[id] = version, attempt
                    self.engine.submit(
                        id, payload.token_ids, version, payload.max_new_tokens, payload.turn_tokens, payload.sampling
                    )
            case ev.LoadWeights(version=version, drop=drop, attempt=attempt):
                if payload is None:
                    self.fetch(version, drop, attempt)
                else:
                    self.engine.load(version, payload)
                    self.outbox.put(ev.WeightsLoaded(version=version, attempt=attempt, **self._here))
            case ev.Move(ids=ids, src=src, dst=to, attempt=attempt) if dst is not None:
                for id in ids:
                    if self.engine.holds(id):
                        dst.send(message, self._export(id))
                    else:
                        reason = "it has ended, or its turn has"
                        self.outbox.put(ev.MoveFailed(id=id, src=src, dst=to, attempt=attempt, reason=reason))
            case ev.Move(src=src, attempt=attempt):  # the sample arrives
                self._import(payload, attempt)
                self.outbox.put(ev.SampleMoved(id=payload.id, src=src, dst=self.instance, attempt=attempt))
            case ev.Park(ids=ids):
                for id in filter(self.engine.holds, ids):
                    attempt = self._attempts.get(id, 0)
                    self.outbox.put(Exported(in_flight=self._export(id), attempt=attempt, waits=False, **self._here))
            case ev.Resume() if dst is not None:  # an episode whose KV is here goes on at another instance
                dst.send(message, self.engine.with_kept(payload))
            case ev.Resume(attempt=attempt):
                self._import(payload, attempt)
                self.outbox.put(ev.SampleResumed(id=payload.id, attempt=attempt, **self._here))
            case ev.Cancel(ids=ids, reason=reason):
                for id in ids:
                    self._forget(id)
                    self._versions.pop(id, None)
                    self.engine.cancel(id)
                    self.outbox.put(ev.SampleCancelled(id=id, reason=reason))
            case ev.Pause() | ev.Unpause():  # the trainer has the devices: no tick, but messages are answered meanwhile
                self._paused = isinstance(message, ev.Pause)
            case TokensElsewhere(id=id, tokens=tokens):
                self.engine.know(id, tokens)
            case ForgetSample(id=id):
                self.engine.forget(id)
            case _:
                raise NotImplementedError(f"{self.role} cannot carry out {type(message).__name__}")

    def fetch(self, version: Version, drop: Version | None, attempt: int | None = None) -> None:
        """Take the version from the store into use, in the place of `drop`."""
        if drop is not None:
            self.engine.drop(drop)
        message = ev.LoadWeights(instance=self.instance, version=version, attempt=attempt)
        self.execute(message, self._weights.get(version, self.engine.param_shardings))

    def hand_over(self) -> None:
        """The instance leaves: samples that have begun go on elsewhere from their last token, the others start
        again."""
        for sample in self._versions:
            self.engine.cancel(sample)
            self._attempts.pop(sample, None)
        self._versions.clear()
        for sample in list(self._begun):
            if self.engine.holds(sample):  # others go on while one is copied
                self.outbox.put(self._export(sample))
        if not self.engine.idle:
            self.work()  # hands out what finished meanwhile

    def mark_unhealthy(self, incarnation: int, reason: str) -> None:
        """It has no other incarnation: the run ends."""
        self.outbox.put(Crashed(role=self.role, error=RuntimeError(reason)))

    @property
    def busy(self) -> bool:
        return not self._paused and not self.engine.idle

    def work(self) -> None:
        began = self._called_s = time.monotonic()
        self.lane.turn("decode", began)
        result = self.engine.tick()
        ended = time.monotonic()
        self.lane.turn("reports", ended, "prefill" if not result.rows else "verify" if result.drafted else "decode")
        if result.rows:
            self._took[result.drafted].add(result, ended - began)
        self.tokens += result.tokens
        for id in result.started:
            version = self._versions.pop(id, None)
            self._begun[id] = None
            if version is not None:  # None: it started on another instance and moved here
                self.outbox.put(ev.SampleStarted(id=id, version=version, attempt=self._attempts[id], **self._here))
        self._progress.update(result.progress)
        self._grew |= bool(result.progress)
        self._grown.update(result.progress)
        for sample in result.finished:
            if sample.id in result.tops:
                start, _ = self._reported.get(sample.id, (0, 0))
                self.outbox.put(TopTokens(id=sample.id, start=start, rows=result.tops[sample.id][start:]))
            self._forget(sample.id)
            self.outbox.put(Finished(sample=sample, **self._here))
        for in_flight in result.waiting:
            attempt = self._attempts.get(in_flight.id, 0)
            self._report_rest(in_flight)
            self._forget(in_flight.id)
            self.outbox.put(Exported(in_flight=in_flight, attempt=attempt, waits=True, **self._here))
        for id in [id for id in result.progress if is_served(id.group_id) and id in self._grown]:
            self._grow(id)  # its client reads along
        now = time.monotonic()
        if now - self._reported_s >= self._report_s:
            self._reported_s = now
            progress, plain, drafted = {}, _Took(), _Took()
            if self._grew and now - self._progressed_s >= self._progress_s:
                self._progressed_s, self._grew = now, False
                progress = self._progress
                (plain, drafted), self._took = self._took, (plain, drafted)
            report = ev.InstanceReported.of(
                self.instance,
                result.free_pages,
                progress,
                self.incarnation,
                sampled=plain.sampled,
                busy_s=plain.busy_s,
                row_s=plain.row_s,
                drafted=ev.Drafted(**dataclasses.asdict(drafted)) if drafted.sampled else None,
            )
            self.outbox.put(report)
        if self._partial_s and now - self._partials_s >= self._partial_s:
            self._partials_s = now
            for sample_id in self._grown:
                self._grow(sample_id)
            self._grown.clear()

    def _import(self, in_flight: InFlightSample, attempt: int) -> None:
        self.engine.import_(in_flight)
        self._attempts[in_flight.id] = attempt
        self._begun[in_flight.id] = None
        self._progress[in_flight.id] = len(in_flight.out_ids)
        self._reported[in_flight.id] = len(in_flight.out_ids), count_rows(in_flight.table)

    def _export(self, sample: SampleId) -> InFlightSample:
        """Takes the sample out of the engine. Its tokens are reported first: its version may change before it goes
        on."""
        in_flight = self.engine.export(sample)
        self._report_rest(in_flight)
        self._forget(sample)
        return in_flight

    def _grow(self, sample: SampleId) -> None:
        """Reports what a sample that runs here has sampled since its last report."""
        new = self.engine.sampled(sample, *self._reported.get(sample, (0, 0)))
        self._report(sample, self.engine.version_of(sample), new)

    def _report_rest(self, in_flight: InFlightSample) -> None:
        """Reports the tokens of a sample that has left the engine."""
        if self._partial_s or is_served(in_flight.id.group_id):
            new = sampled_from(in_flight, *self._reported.get(in_flight.id, (0, 0)))
            self._report(in_flight.id, in_flight.version, new)

    def _report(self, sample: SampleId, version: Version, new: SampledTokens) -> None:
        """Reports the tokens sampled since the last report."""
        if len(new.out_ids):
            start, row = self._reported.get(sample, (0, 0))
            self._reported[sample] = start + len(new.out_ids), row + count_rows(new.table)
            if new.top is not None:
                self.outbox.put(TopTokens(id=sample, start=start, rows=new.top))
            out_ids, logprobs, table, _ = new
            self.outbox.put(
                Partial(
                    id=sample, version=version, start=start, row=row, out_ids=out_ids, logprobs=logprobs, table=table
                )
            )

    def _forget(self, sample: SampleId) -> None:
        self._attempts.pop(sample, None)
        self._begun.pop(sample, None)
        self._progress.pop(sample, None)
        self._grown.pop(sample, None)
        self._reported.pop(sample, None)
