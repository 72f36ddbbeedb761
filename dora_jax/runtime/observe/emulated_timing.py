"""Paced parts of a run: an engine, a trainer and a weight store that take as long as a cost model says.

Each wraps the real thing behind the same seam. The thing computes what it always does, and its thread then sleeps until
the modelled time is over, so that orchestrator, queues, moves and publications of a *real* run show how they behave in
wall-clock time on hardware that is not there. `pace` is real seconds a modelled second; costs are those of costs/.

Laws: results are the wrapped part's own, token for token. An engine that is busy keeps one timeline: a thread that
wakes
late does not fall behind, and what the host computes counts towards the modelled tick. Nothing paced may be reported
without saying so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.config import ConfigError
from dora_jax.costs import CostOptions, Costs, Hardware, ModelSizes, Roofline
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.common.seams import Batches, Pack, PolicyTrainer, PublishedWeights, RolloutEngine, Tree
from dora_jax.types import SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.trainer.step import Probe


def costs_of(chip: str, instances: int) -> Costs:
    """The costs of the cost model's default model on `instances` of its default size, and as many chips again for the
    trainer."""
    rollout = instances * Hardware().instance_chips
    try:
        return Roofline(ModelSizes(), Hardware(chip=chip, chips=2 * rollout, rollout_chips=rollout), CostOptions())
    except ConfigError as error:
        raise ConfigError(f"pace: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TickWork:
    steps: int  # decode steps
    batches: tuple[float, ...]  # mean samples in a step, of each version: the engine decodes them in a call each
    context: float  # token-steps: tokens of KV that the steps read, summed
    prefills: tuple[int, ...]  # tokens of each sample that was prefilled


class TickStats:
    def __init__(self) -> None:
        self._prompts: dict[SampleId, int] = {}
        self._versions: dict[SampleId, Version] = {}
        self._tokens: dict[SampleId, int] = {}  # sampled so far
        self._to_prefill: dict[SampleId, int] = {}
        self._kept: dict[SampleId, int] = {}  # positions whose KV the engine keeps, of episodes that wait

    def enter(self, id: SampleId, version: Version, prompt: int, tokens: int = 0, cached: int = 0) -> None:
        cached = cached or self._kept.pop(id, 0)
        self._prompts[id], self._versions[id], self._tokens[id] = prompt, version, tokens
        if not cached or prompt + tokens - cached > 1:  # the last token is fed by the first step
            self._to_prefill[id] = prompt + tokens - cached

    def leave(self, id: SampleId) -> None:
        for known in (self._prompts, self._versions, self._tokens, self._to_prefill, self._kept):
            known.pop(id, None)

    def of(self, result: TickResult) -> TickWork:
        """Samples that grew for the first time since they came without KV were prefilled in this tick."""
        prefills = tuple(self._to_prefill.pop(id) for id in result.progress if id in self._to_prefill)
        steps, context = 0, 0.0
        grown: dict[Version, int] = {}
        for id, tokens in result.progress.items():
            new = tokens - self._tokens[id]
            self._tokens[id] = tokens
            version = self._versions[id]
            steps, grown[version] = max(steps, new), grown.get(version, 0) + new
            context += new * (self._prompts[id] + tokens - new / 2)
        for sample in result.finished:
            self.leave(sample.id)
        for in_flight in result.waiting:
            self.leave(in_flight.id)
            if not in_flight.n_pages:
                self._kept[in_flight.id] = len(in_flight.prompt_ids) + len(in_flight.out_ids) - 1
        batches = tuple(tokens / steps for tokens in grown.values() if tokens)
        return TickWork(steps=steps, batches=batches, context=context, prefills=prefills)


class Wrapper:
    """Around a part of a run; what is not defined here is the part's own."""

    _wrapped: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class CountedEngine(Wrapper):
    """The Engine seam around another engine whose ticks are counted."""

    def __init__(self, engine: RolloutEngine):
        self.engine = self._wrapped = engine
        self._account = TickStats()

    def submit(self, id: SampleId, prompt_ids: np.ndarray, version: Version, *more: Any, **named: Any) -> None:
        self.engine.submit(id, prompt_ids, version, *more, **named)
        self._account.enter(id, version, len(prompt_ids))

    def import_(self, in_flight: InFlightSample) -> None:
        self.engine.import_(in_flight)
        self._account.enter(
            in_flight.id, in_flight.version, len(in_flight.prompt_ids), len(in_flight.out_ids), in_flight.kv_len
        )

    def cancel(self, id: SampleId) -> bool:
        self._account.leave(id)
        return self.engine.cancel(id)


class PacedEngine(CountedEngine):
    """The Engine seam around another engine, whose work lasts as long as `costs` say.

    `report_ticks`: progress is handed on every so many ticks, as an instance of the modelled size would in its time.
    `speed`: of this instance, in that of the cost model.
    """

    def __init__(self, engine: RolloutEngine, costs: Costs, pace: float, *, report_ticks: int = 1, speed: float = 1.0):
        super().__init__(engine)
        self.decode_s = self.prefill_s = self.move_s = 0.0  # real seconds, by their use
        self._costs, self._pace = costs, pace
        self._report_ticks, self._speed = report_ticks, speed
        self._ticks = 0
        self._due = 0.0  # when the modelled time of everything so far is over
        self._rested = True  # the engine had nothing to do since: its timeline begins anew
        self._handed_over: list[int] | None = None

    # ------------------------------------------------------------------ what takes time

    def tick(self) -> TickResult:
        began = time.monotonic()
        result = self.engine.tick()
        work = self._account.of(result)
        step_s = sum(self._costs.decode_base_s(max(1, round(batch))) for batch in work.batches)
        decode_s = (work.steps * step_s + work.context * self._costs.decode_kv_s) / self._speed
        prefill_s = sum(self._costs.prefill_s(tokens, 0) for tokens in work.prefills) / self._speed
        self.decode_s += self._pace * decode_s
        self.prefill_s += self._pace * prefill_s
        self._spend(began, decode_s + prefill_s)
        self._ticks += 1
        if work.prefills:
            result = dataclasses.replace(result, rows=0)
        if self._ticks % self._report_ticks:
            result = dataclasses.replace(result, progress={})
        return result

    def rest(self) -> None:
        """It stood still: its timeline begins anew."""
        self._rested = True

    @contextlib.contextmanager
    def all_at_once(self) -> Iterator[list[int]]:
        """Exports take no time of their own: the tokens of KV of each are in the list."""
        self._handed_over = []
        try:
            yield self._handed_over
        finally:
            self._handed_over = None

    def export(self, id: SampleId) -> InFlightSample:
        """The transfer's time is spent here, at the end that the sample leaves."""
        began = time.monotonic()
        in_flight = self.engine.export(id)
        self._account.leave(id)
        if self._handed_over is not None:
            self._handed_over.append(in_flight.kv_len)
            return in_flight
        seconds = self._costs.move_s(in_flight.kv_len)
        self.move_s += self._pace * seconds
        self._spend(began, seconds)
        return in_flight

    # ------------------------------------------------------------------ private

    def _spend(self, began: float, seconds: float) -> None:
        """Sleep until the modelled time is over. It counts from where the last one ended while the engine was busy."""
        self._due = (began if self._rested else self._due) + self._pace * seconds
        delay = self._due - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        self._rested = self.engine.idle


class PacedTrainer(Wrapper):
    """The trainer of a `TrainerWorker`, and its `pack`: what was packed lasts as long as `train_s` says. A step's fixed
    time is spread over its parts."""

    def __init__(self, trainer: PolicyTrainer, pack: Pack, costs: Costs, pace: float, groups_per_step: int):
        self.trainer = self._wrapped = trainer
        self.train_s = 0.0  # real seconds, waits for a part aside
        self._pack, self._costs, self._pace = pack, costs, pace
        self._groups_per_step = groups_per_step
        self._began = self._due = 0.0

    def pack(self, groups: Sequence[ScoredGroup], base: Version) -> Batches:
        self._began = time.monotonic()
        lengths = [len(s.prompt_ids) + len(s.out_ids) for group in groups for s in group.samples]
        squares = float(sum(n * n for n in lengths))
        later = 1 - len(groups) / self._groups_per_step
        seconds = self._costs.train_s(len(lengths), sum(lengths), squares) - later * self._costs.train_s(0, 0, 0.0)
        self._due = max(self._due, self._began) + self._pace * seconds
        return self._pack(groups, base)

    def step(self, batch: Batches, probe: Probe | None = None) -> Mapping[str, float]:
        """The trainer's own step. batch: an iterator may wait for the next batch."""
        metrics = self.trainer.step(
            self._one_by_one(batch) if isinstance(batch, Iterator) else batch, **({"probe": probe} if probe else {})
        )
        self._sleep()
        return metrics

    def _one_by_one(self, batches: Iterator[Batches]) -> Iterator[Batches]:
        for batch in batches:
            yield batch
            self._sleep()

    def _sleep(self) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))
        now = time.monotonic()
        self.train_s += now - self._began
        self._began = now


class PacedWeights(Wrapper):
    """The weight store: `get` lasts one transfer of weights, of which `lanes` run at a time; `put` lasts
    `publish_s`."""

    def __init__(self, weights: PublishedWeights, costs: Costs, pace: float, lanes: int, publish_s: float = 0.0):
        self.weights = self._wrapped = weights
        self.load_s = 0.0  # real seconds of all transfers, and of the wait for a lane
        self._costs, self._pace, self._publish_s = costs, pace, publish_s
        self._lanes = threading.BoundedSemaphore(max(1, lanes))
        self._lock = threading.Lock()

    def put(self, version: Version, weights: Tree, digest: int = 0, copy: int = 0) -> int:
        time.sleep(self._pace * self._publish_s)
        return self.weights.put(version, weights, digest, copy)

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        asked = time.monotonic()
        with self._lanes:
            began = time.monotonic()
            params = self.weights.get(version, shardings)
            time.sleep(max(0.0, began + self._pace * self._costs.load_s() - time.monotonic()))
        with self._lock:
            self.load_s += time.monotonic() - asked
        return params
