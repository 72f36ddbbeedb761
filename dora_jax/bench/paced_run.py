"""One paced run of a simulator's row: the same configuration, work and costs in the one-process world, on real threads.

Consumes a `Row` and a pace, produces `PacedResult` in modelled seconds. The engine is the oracle's (every token proves its
version), the trainer computes nothing, rewards are constants after `score_s`: what is real is all that lies between.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.bench.paced_environments import HoldingEngine, PacedEnvironments, TurnsOf
from dora_jax.bench.paced_lending import LentPacedWorker
from dora_jax.bench.paced_worker import PacedWorker
from dora_jax.buffer.store import MemoryGroupStore
from dora_jax.config import RolloutSection
from dora_jax.costs import Costs, open_costs
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.loop import each
from dora_jax.orchestrate.loop import run as run_loop
from dora_jax.plan import presets
from dora_jax.rollout.oracle import OracleEngine
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.observe.emulated_timing import PacedEngine, PacedTrainer, PacedWeights
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker
from dora_jax.sim.config import Row
from dora_jax.sim.meter import IDLE_CAPPED, IDLE_TAIL
from dora_jax.sim.run import orchestrator_config
from dora_jax.sim.workload import Workload
from dora_jax.types import Prompt, Sample, SampleId, ScoredGroup, Version

OBSERVED_TOKENS = 1 << 10  # of an episode: room for them beside what is sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class PacedResult:
    """Averages over the measured steps; seconds are modelled ones, shares are of the time."""

    step_s: float
    rollout_only: float
    tokens_per_s: float
    rollout: Mapping[str, float]  # idle shares by cause
    load_share: float  # of the instances' time
    move_share: float
    brain_share: float  # of the real time: what `Orchestrator.step` computed
    lag_mean: float
    lag_max: int
    tasks: Mapping[str, float]  # share of the trained groups
    moves: float  # a step
    mixed: int  # samples whose tokens came from more than one version
    lends: int = 0  # instances made of the trainer's chips, in the whole run


class EndOfPacedRun(Exception):
    """The last step to be measured is published."""


def run(row: Row, pace: float) -> PacedResult:
    """`pace`: real seconds a modelled second."""
    costs = open_costs(row.config.model, row.config.hardware, row.config.cost)
    parts = _PacedRun(row, costs, pace)
    meter = _PacedMeter(row, parts, pace)
    parts.world.listen(meter.told)
    try:
        parts.world.start(parts.ups)
        halt = run_loop(parts.brain, parts.world, [each(meter)])
    except EndOfPacedRun:
        return meter.result()
    finally:
        parts.world.close()
    raise RuntimeError(f"{row.label} stopped early: {halt.reason}")


class TimedOrchestrator(Orchestrator):
    """Says how long it computed."""

    seconds = 0.0

    def commit(self, event: ev.Event) -> None:
        began = time.thread_time()
        super().commit(event)
        self.seconds += time.thread_time() - began

    def decide(self) -> tuple[ev.Command, ...]:
        began = time.thread_time()
        commands = super().decide()
        self.seconds += time.thread_time() - began
        return commands


class _PacedRun:
    """The one-process world of a row."""

    def __init__(self, row: Row, costs: Costs, pace: float):
        config, hardware, work = row.config, row.config.hardware, Workload(row.config.workload)
        told = orchestrator_config(config, row.mode)
        section = presets.on_cpu(
            RolloutSection(
                slots=hardware.slots,
                pages=costs.pages,
                page_size=hardware.page_size,
                residents=hardware.residents,
                max_prompt_tokens=told.max_prompt_tokens,
                max_new_tokens=told.max_new_tokens,
                decode_steps=1,
            )
        )
        if episodes := any(
            part.get("turns", config.workload.turns) > 1 for part in ({}, *config.workload.mix.values())
        ):
            section = dataclasses.replace(section, max_prompt_tokens=told.max_prompt_tokens + OBSERVED_TOKENS)
        turns = TurnsOf(work)
        due_s: dict[tuple[SampleId, int], float] = {}
        outbox: queue.SimpleQueue = queue.SimpleQueue()
        store = MemoryGroupStore()
        stored: Any = Weights()  # the verbs of a store that this world needs
        self.weights = weights = PacedWeights(
            stored, costs, pace, hardware.trainer_chips // hardware.instance_chips, config.cost.publish_s
        )
        hold = config.orchestrator.hold_slots
        oracles = [OracleEngine(section, eos_ids=(0,), turn_length=turns.length, version_in=int)
                   for _ in range(hardware.instances + len(told.lendable))]  # fmt: skip
        inner: list[Any] = [HoldingEngine(each, turns, pace, due_s) for each in oracles] if hold else oracles
        self.engines = [PacedEngine(each, costs, pace, report_ticks=config.report_tokens, speed=hardware.speed(i))
                        for i, each in enumerate(inner)]  # fmt: skip
        ups = [
            ev.InstanceUp(instance=i, slots=hardware.slots, pages=costs.pages, page_size=hardware.page_size,
                          residents=hardware.residents, versions=(0,), speed=hardware.speed(i))
            for i in range(len(self.engines))]  # fmt: skip
        own = hardware.instances  # the others are the trainer's chips
        self.workers = [PacedWorker(i, engine, weights, outbox) for i, engine in enumerate(self.engines[:own])]
        self.lent = [LentPacedWorker(up, engine, weights, outbox, costs, pace)
                     for up, engine in zip(ups[own:], self.engines[own:], strict=True)]  # fmt: skip
        self.ups = ups[:own]
        for engine in self.engines[:own]:
            engine.load(0, 0)
        model: Any = IdleTrainer()
        trainer = self.trainer = PacedTrainer(
            model, lambda groups, base: [len(groups)], costs, pace, told.groups_per_step
        )
        self.world = Coordinator(
            instances=[*self.workers, *self.lent],
            trainer=StreamingTrainerWorker(
                trainer,
                trainer.pack,
                store,
                weights,
                told.decisions.max_lag,
                outbox,
                told.groups_per_step,
                says_parts=bool(told.lendable),
            ),
            task=PacedPrompts(work, told.max_new_tokens, episodes),
            scorer=PacedScorer(costs.score_s * pace),
            groups=store,
            weights=weights,
            outbox=outbox,
            group_size=told.group_size,
            eval_samples=1,
            environments=PacedEnvironments(turns, pace) if episodes and not hold else None,
            max_context=section.max_prompt_tokens + section.max_new_tokens,
        )
        # the orchestrator's periods are modelled seconds; its clock is the world's
        told = dataclasses.replace(
            told, rebalance_period_s=told.rebalance_period_s * pace, switch_s=told.switch_s * pace
        )
        self.brain = TimedOrchestrator(told, evaluate_start=False)


# ---------------------------------------------------------------- stand-ins


class PacedPrompts:
    def __init__(self, work: Workload, max_new_tokens: int, episodes: bool):
        self._work, self._max_new_tokens = work, max_new_tokens
        self._turn_tokens = max_new_tokens if episodes else 0

    def prompt_at(self, group_id: int) -> Prompt:
        ids = np.zeros(self._work.prompt_tokens(group_id), np.int32)
        return Prompt(
            group_id=group_id,
            task=self._work.task(group_id),
            uid=str(group_id),
            text="",
            token_ids=ids,
            answer=None,
            max_new_tokens=self._max_new_tokens,
            turn_tokens=self._turn_tokens,
        )


class PacedScorer:
    """Every group is trainable, `score_s` after its last sample."""

    def __init__(self, score_s: float):
        self._score_s = score_s
        self._due: list[tuple[float, ScoredGroup]] = []

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None:
        version = min(s.version for s in samples)
        group = ScoredGroup(
            group_id=prompt.group_id,
            version=version,
            samples=samples,
            rewards=np.zeros(len(samples), np.float32),
            parts={},
        )
        self._due.append((time.monotonic() + self._score_s, group))

    def poll(self) -> list[ScoredGroup]:
        now = time.monotonic()
        done = [group for due, group in self._due if due <= now]
        self._due = self._due[len(done) :]  # in the order in which they are due
        return done

    def close(self) -> None:
        self._due.clear()


class IdleTrainer:
    params = None

    def step(self, batches: Iterable[int]) -> dict[str, float]:
        """Counts groups."""
        return {"groups": float(sum(batches))}


class Weights:
    """The weights of version v are the number v."""

    def __init__(self):
        self.held = {0}

    def put(self, version: Version, params: Any, digest: int = 0, copy: int = 0) -> int:
        self.held.add(version)
        return 0

    def get(self, version: Version, shardings: Any) -> Version:
        if version not in self.held:
            raise RuntimeError(f"version {version} is not in the store: it holds {sorted(self.held)}")
        return version

    def drop(self, version: Version) -> None:
        self.held.remove(version)


# ---------------------------------------------------------------- what is measured


class _PacedMeter:
    """Observer of the loop and listener of the world: counters at the end of the warm-up and at the end."""

    def __init__(self, row: Row, parts: _PacedRun, pace: float):
        self._row, self._parts, self._pace = row, parts, pace
        self._idle_before, self._waits = 0.0, True  # from a publication to the first Train after it
        self._tail_s = self._idle_s = 0.0  # instance-seconds idle: while the trainer waited, in all
        self._tokens = self._groups = self._lags = self._moves = self._mixed = self._lag_max = 0
        self._work, self._tasks = Workload(row.config.workload), collections.Counter[str]()
        self._tasks_before: collections.Counter[str] = collections.Counter()
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}

    def told(self, record: Any) -> None:
        """Payload records; a finished step says what it trained on."""
        groups = getattr(record, "groups", ())
        for group in groups:
            lag = record.version - 1 - group.version
            self._lags, self._lag_max = self._lags + lag, max(self._lag_max, lag)
            self._groups += 1
            self._tasks[self._work.task(group.group_id)] += 1
            for sample in group.samples:
                self._tokens += len(sample.prompt_ids) + len(sample.out_ids)
                self._mixed += len(sample.spans) > 1

    def __call__(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        now = time.monotonic()
        if isinstance(event, ev.SampleMoved):
            self._moves += 1
        if isinstance(event, ev.StepPublished):
            self._idle_before, self._waits = self._idle_now(), True
            self._published(now, event.version)
        if any(isinstance(command, ev.Train) for command in commands):
            self._tail_s += self._idle_now() - self._idle_before if self._waits else 0.0
            self._waits = False

    def result(self) -> PacedResult:
        d = {name: value - self._start[name] for name, value in self._end.items()}
        steps = self._row.config.steps - self._row.config.warmup_steps
        every_s = d["now"] * len(self._parts.workers)
        return PacedResult(
            step_s=d["now"] / steps / self._pace, rollout_only=1 - d["train"] / d["now"],
            tokens_per_s=d["tokens"] / d["now"] * self._pace,
            rollout={IDLE_TAIL: d["tail"] / every_s, IDLE_CAPPED: (d["idle"] - d["tail"]) / every_s},
            load_share=d["load"] / every_s, move_share=d["move"] / every_s, brain_share=d["brain"] / d["now"],
            lag_mean=d["lags"] / d["groups"], lag_max=self._lag_max,
            tasks={name: n / d["groups"] for name, n in sorted((self._tasks - self._tasks_before).items())}, moves=d["moves"] / steps, mixed=self._mixed,
            lends=self._parts.brain.state.roles.lends_total)  # fmt: skip

    # ------------------------------------------------------------ private

    def _published(self, now: float, version: Version) -> None:
        config = self._row.config
        if version == config.warmup_steps:
            self._start, self._tasks_before = self._counters(now), self._tasks.copy()
        if version == config.steps:
            self._end = self._counters(now)
            raise EndOfPacedRun

    def _idle_now(self) -> float:
        """A pause is no idleness."""
        return sum(worker.wait_s - worker.paused_s for worker in self._parts.workers)

    def _counters(self, now: float) -> dict[str, float]:
        engines = self._parts.engines
        return {
            "now": now, "train": self._parts.trainer.train_s, "tokens": self._tokens, "lags": self._lags, "groups": self._groups,
            "tail": self._tail_s, "idle": self._idle_now(), "moves": self._moves,
            "move": sum(engine.move_s for engine in engines), "load": self._parts.weights.load_s,
            "brain": self._parts.brain.seconds}  # fmt: skip
