"""All modes, run for real at the pace of a chip, beside the simulator's prediction of the same work.

    python -m tests.soak.end_to_end [--modes=sync,dora] [--speedup=30] [--steps=24] [--split=predicted|half]
    [--small] python -m tests.soak.end_to_end --environments [--speedup=40] [--steps=6] [--warmup=3] [--config=FILE]
    python -m tests.soak.end_to_end --recorded=DIRECTORY [--modes=sync,dora] [--warmup=2, as the recorder's]

Real are threads, queues, `Coordinator`, workers, orchestrator, migrations, publications and the engine's tokens, which
prove the version that made them; PACED are ticks, train steps and transfers: each lasts what the cost model says for an
H800, divided by the speed-up, because nothing here has one. Not measured here: decoding and training as such.

The work is the published experiment made small: log-normal lengths (sigma 1) cut at 12.5 x the mean, K = 3, a 7.6B
model on 16 chips of unequal speed in place of 32.8B on 64 to 128, 2,048 samples a step in place of 8,192, and one token
stands for 64, so that a tick lasts 64 times as long. Prediction and run share lengths (a function of seed, group and
index), costs and the orchestrator's configuration, and nothing else. Each mode runs at the split of the chips that the
simulator finds best for it; `partial` and `evict` also colocated, as `partial` was published. --small is a fraction of
that, for a machine of few cores or one with other work: 64 samples a step of at most 200 tokens. --lent holds lending
of the trainer's chips against its prediction instead, where a decode step takes longer the more rows it has.

A step of `dora` or `staleflow` waits for the longest sample of the version whose deadline is due, so that its time
varies: in the small setting between 67 and 197 s, 107 s in the mean. Of few steps the mean depends on which of these
they are, and prediction and run may differ by 20 % although both are right; of 24 steps no mode differed by more than
2.6 %.

--environments: two environments of 0.1 s and 60 s at K = 3, the rows of configs/sim/environments.py: a sample that
waits for its environment frees its slot, or holds it. Environments are paced as well.

--recorded: a recorded run beside the simulator's prediction of it from its own measured costs, and other modes on its
work. DIRECTORY is what runtime/observe/recorder.py wrote: WORKDIR/recorded of a run with --config.journal.record=True.
The journal must replay to the same commands first. Nothing is paced: costs are those of the machine that ran it.
Evaluations are not simulated: record a run that has none in its middle. The last K steps are left out of the recorded
average: nothing new is admitted for them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import json
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from dora_jax.bench import harness
from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import ConfigError, RolloutSection
from dora_jax.config.files import load_file
from dora_jax.costs import Costs, open_costs, recording
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each
from dora_jax.orchestrate.core import run as run_loop
from dora_jax.orchestrate.modes import MODES
from dora_jax.plan import presets
from dora_jax.rollout.migrate import InFlightSample, SampledTokens, ended, observed
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.common.seams import Recipient, WeightStore
from dora_jax.runtime.common.worker import Message, Outbox
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.observe.emulated_timing import PacedEngine, PacedTrainer, PacedWeights
from dora_jax.runtime.observe.recorder import COSTS, JOURNAL
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker
from dora_jax.sim import config as sims
from dora_jax.sim import replay
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.meter import IDLE_CAPPED, IDLE_TAIL, Result
from dora_jax.sim.run import orchestrator_config, simulate
from dora_jax.sim.table import grid
from dora_jax.sim.workload import Turn, Workload
from dora_jax.types import EpisodeEnded, EpisodeSoFar, Observed, Prompt, Sample, SampleId, ScoredGroup, TokenTable
from tests.fakes.coordinator_world import Weights
from tests.fakes.oracle import OracleEngine

TOKEN = 64  # tokens of the published experiment that one token here stands for
CHIPS = 16
COLOCATED = "colocated"
LENT = {"orchestrator.elastic": True}
# Chips are lent where more instances are faster: a decode step of --lent takes as long as its rows' KV, and training is
# short.
KV_READS = 32
BY_ROWS = {"cost.decode_overhead_s": 0.05, "cost.train_fixed_s": 20.0}
SMALL = {"orchestrator.groups_per_step": 16, "orchestrator.group_size": 4, "orchestrator.updates": 4,
         "workload.max_new_tokens": 200, "cost.train_fixed_s": 60.0, "hardware.rollout_chips": 4}  # fmt: skip
# What the run is held against: tokens/s of `dora` over those of other modes, and its rollout-only share over sync's.
AIMS = (("sync", 2.0, 2.5), ("partial", 1.0, 1.15))


def setting(steps: int, warmup: int) -> SimConfig:
    """The published experiment made small; overheads are those of the fit in sim/paper.py."""
    return sims.replace(SimConfig(), {
        "steps": warmup + steps, "warmup_steps": warmup, "report_tokens": 1,
        "model.params": 7.6e9, "model.n_layers": 28, "model.d_model": 3584, "model.n_heads": 28,
        "model.head_dim": 128, "model.kv_bytes_per_token": 57344.0 * TOKEN,
        "hardware.chip": "h800", "hardware.chips": CHIPS, "hardware.rollout_chips": CHIPS // 2, "hardware.tensor": 1,
        "hardware.slots": 512, "hardware.speeds": (1.1, 1.0, 0.9, 1.0), "cost.publish_s": 2.0,
        "cost.decode_overhead_s": 0.0195 * TOKEN, "cost.hbm_efficiency": 0.8 / TOKEN,
        "cost.flops_efficiency": 0.5 / TOKEN, "cost.train_utilisation": 0.21 / TOKEN, "cost.train_fixed_s": 165.0,
        "workload.mean_tokens": 2400 / TOKEN, "workload.max_new_tokens": 30000 // TOKEN,
        "workload.prompt_tokens": 160 / TOKEN, "workload.max_prompt_tokens": 512 // TOKEN,
        "orchestrator.groups_per_step": 128, "orchestrator.group_size": 16, "orchestrator.inflight": 1.15,
        "orchestrator.updates": 16,
        "orchestrator.rebalance_period_s": 20.0, "orchestrator.peer_weights": False})  # fmt: skip


def best_split(config: SimConfig, mode: str) -> int:
    """The rollout chips of the split at which a mode is fastest, everything else as configured; 0: colocated."""
    unit = config.hardware.instance_chips
    total = config.hardware.chips // unit

    @functools.cache
    def step_s(instances: int) -> float:
        split = sims.replace(config, {"hardware.rollout_chips": instances * unit})
        return simulate(Row(label=mode, mode=mode, config=split, published={})).step_s

    here, stride = max(1, total // 2), max(1, total // 4)
    while True:
        better = min((here, *(n for n in (here - stride, here + stride) if 1 <= n < total)), key=step_s)
        if better == here and stride == 1:
            return min((0, here), key=step_s) * unit
        stride = stride if better != here else stride // 2
        here = better


def rows(config: SimConfig, modes: Sequence[str], split: str) -> list[Row]:
    """Each mode at its split; its label says which."""
    found = []
    for mode in modes:
        chips = best_split(config, mode) if split == "predicted" else CHIPS // 2
        found.append(row_at(config, mode, chips))
        if mode in ("partial", "evict") and chips:
            found.append(row_at(config, mode, 0))
    return found


def lent_rows(config: SimConfig) -> list[Row]:
    """`dora` where a quarter of the chips is the rollouts', and with the trainer's chips lent to them."""
    config = sims.replace(config, BY_ROWS | {"model.kv_bytes_per_token": KV_READS * config.model.kv_bytes_per_token})
    split = row_at(config, "dora", CHIPS // 4)
    return [split, dataclasses.replace(split, label=f"{split.label} lent", config=sims.replace(split.config, LENT))]


def row_at(config: SimConfig, mode: str, rollout_chips: int) -> Row:
    where = f"{rollout_chips}+{CHIPS - rollout_chips}" if rollout_chips else COLOCATED
    config = sims.replace(config, {"hardware.rollout_chips": rollout_chips})
    return Row(label=f"{mode} {where}", mode=mode, config=config, published={})


def environment_rows(config: SimConfig, steps: int, warmup: int) -> list[Row]:
    """The rows of the file with tokens that stand for 64."""
    model, cost, work = config.model, config.cost, config.workload
    return sims.rows(sims.replace(config, {
        "steps": warmup + steps, "warmup_steps": warmup, "report_tokens": 1, "seeds": 1,
        "model.kv_bytes_per_token": model.kv_bytes_per_token * TOKEN,
        "cost.decode_overhead_s": cost.decode_overhead_s * TOKEN,
        **{f"cost.{name}": getattr(cost, name) / TOKEN
           for name in ("hbm_efficiency", "flops_efficiency", "train_utilisation")},
        **{f"workload.{name}": getattr(work, name) / TOKEN for name in ("mean_tokens", "prompt_tokens")},
        **{f"workload.{name}": getattr(work, name) // TOKEN
           for name in ("max_new_tokens", "max_prompt_tokens", "observation_tokens")}}))  # fmt: skip


# ---------------------------------------------------------------- paced
#
# One paced run of a simulator's row: the same configuration, work and costs in the one-process world, on real threads.
# The engine is the oracle's (every token proves its version), the trainer computes nothing, rewards are constants after
# `score_s`: what is real is all that lies between.


class PacedWorker(EngineWorker):
    """Says how long it stood still beside a trainer on its chips."""

    _stood_s = 0.0
    _stands_since: float | None = None

    @property
    def paused_s(self) -> float:
        since = self._stands_since
        return self._stood_s + (time.monotonic() - since if since is not None else 0.0)

    def execute(self, message: Message, payload: Any = None, dst: Recipient | None = None) -> None:
        match message:
            case ev.Pause():
                self._stands_since = time.monotonic()
            case ev.Unpause():
                self._stood_s, self._stands_since = self.paused_s, None
                cast(PacedEngine, self.engine).rest()
        super().execute(message, payload, dst)


class TurnsOf:
    """Where each turn of a sample begins, and what follows it."""

    def __init__(self, work: Workload):
        self._work = work

    def length(self, id: SampleId, start: int) -> int:
        """Tokens of the turn that begins behind `start` tokens of the response."""
        turns, before = self._work.turns(id), 0
        for turn in turns[:-1]:
            before += turn.tokens + turn.observation_tokens
            if start < before:
                return turn.tokens
        return turns[-1].tokens

    def behind(self, id: SampleId, tokens: int) -> Turn | None:
        """The turn whose end these tokens of the response are, with its wait; None: the last one."""
        before = 0
        for turn in self._work.turns(id)[:-1]:
            before += turn.tokens
            if tokens <= before:
                return turn
            before += turn.observation_tokens
        return None


class PacedEnvironments:
    """`Environments`: an answer of zeros after the modelled wait."""

    def __init__(self, turns: TurnsOf, pace: float):
        self._turns, self._pace = turns, pace
        self._due: list[tuple[float, int, SampleId]] = []
        self._asked: dict[SampleId, tuple[int, Observed | EpisodeEnded]] = {}
        self._numbers = 0

    def open(self, id: SampleId, prompt: Prompt) -> None:
        self._answer(id, Observed(id=id, token_ids=np.zeros(0, np.int32)), 0.0)

    def turn(self, prompt: Prompt, so_far: EpisodeSoFar) -> None:
        turn = self._turns.behind(so_far.id, len(so_far.mask))
        if turn is None:
            self._answer(so_far.id, EpisodeEnded(id=so_far.id, terms={}), 0.0)
        else:
            observed = Observed(id=so_far.id, token_ids=np.zeros(turn.observation_tokens, np.int32))
            self._answer(so_far.id, observed, turn.environment_s * self._pace)

    def drop(self, id: SampleId) -> dict[str, float]:
        self._asked.pop(id, None)
        return {}

    def poll(self) -> Sequence[Observed | EpisodeEnded]:
        found, now = [], time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, number, id = heapq.heappop(self._due)
            if self._asked.get(id, (0, None))[0] == number:
                found.append(self._asked.pop(id)[1])
        return found

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._asked.clear()

    def _answer(self, id: SampleId, answer: Observed | EpisodeEnded, seconds: float) -> None:
        self._numbers += 1
        self._asked[id] = self._numbers, answer
        heapq.heappush(self._due, (time.monotonic() + seconds, self._numbers, id))


class HoldingEngine:
    """The Engine seam around an oracle whose samples wait in their slots. due_s: of every engine of the run, when each
    wait is over, so that a sample that moves waits no longer."""

    def __init__(self, engine: OracleEngine, turns: TurnsOf, pace: float, due_s: dict[tuple[SampleId, int], float]):
        self.engine = engine
        self._turns, self._pace, self._due_s = turns, pace, due_s
        self._held: dict[SampleId, InFlightSample] = {}
        self._slots = engine.section.slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def idle(self) -> bool:
        return self.engine.idle and not self._held

    def tick(self) -> TickResult:
        now, over = time.monotonic(), []
        for id, held in list(self._held.items()):
            if self._due(held) <= now:
                del self._held[id]
                turn = self._turns.behind(id, len(held.out_ids))
                if turn is None:
                    over.append(ended(held, "stop"))
                else:
                    self.engine.import_(observed(held, np.zeros(turn.observation_tokens, np.int32)))
        free = max(0, self._slots - len(self._held))
        self.engine.section = dataclasses.replace(self.engine.section, slots=free)
        if self.engine.idle and not over and self._held:
            time.sleep(max(0.0, min(map(self._due, self._held.values())) - now))
        result = self.engine.tick()
        self._held |= {held.id: held for held in result.waiting}
        return dataclasses.replace(result, waiting=(), finished=(*result.finished, *over))

    @property
    def samples(self) -> tuple[SampleId, ...]:
        return (*self.engine.samples, *self._held)

    def holds(self, id: SampleId) -> bool:
        return id in self._held or self.engine.holds(id)

    def version_of(self, id: SampleId) -> int:
        return self._held[id].version if id in self._held else self.engine.version_of(id)

    def sampled(self, id: SampleId, start: int = 0, row: int = 0) -> SampledTokens:
        if id not in self._held:
            return self.engine.sampled(id, start, row)
        held = self._held[id]
        return SampledTokens(held.out_ids[start:], held.logprobs[start:], TokenTable())

    def export(self, id: SampleId) -> InFlightSample:
        return self._held.pop(id) if id in self._held else self.engine.export(id)

    def cancel(self, id: SampleId) -> bool:
        return self._held.pop(id, None) is not None or self.engine.cancel(id)

    def _due(self, held: InFlightSample) -> float:
        turn = self._turns.behind(held.id, len(held.out_ids))
        wait_s = turn.environment_s * self._pace if turn else 0.0
        return self._due_s.setdefault((held.id, len(held.out_ids)), time.monotonic() + wait_s)


class LentPacedWorker(PacedWorker):
    def __init__(
        self, up: ev.InstanceUp, engine: PacedEngine, weights: WeightStore, outbox: Outbox, costs: Costs, pace: float
    ):
        self._paced: Any = engine  # what it does not define is the engine's own
        super().__init__(up.instance, self._paced, weights, outbox)
        self._up, self._costs, self._pace = up, costs, pace
        self._lent = False

    def execute(self, message: Message, payload: Any = None, dst: Recipient | None = None) -> None:
        match message:
            case ev.Lend(version=version):
                time.sleep(self._pace * self._costs.lend_s())
                self.engine.load(version, version)
                self._paced.rest()
                self.incarnation, self._lent = self.incarnation + 1, True
                self._here["incarnation"] = self.incarnation
                self.outbox.put(dataclasses.replace(self._up, versions=(version,), incarnation=self.incarnation))
            case ev.Return():
                began = time.monotonic()
                with self._paced.all_at_once() as handed_over:
                    self.hand_over()
                for version in self.engine.versions:
                    self.engine.drop(version)
                time.sleep(max(0.0, began - time.monotonic() + self._pace * self._costs.return_s(*handed_over)))
                self._lent = False
                self.outbox.put(ev.InstanceDown(instance=message.instance, reason="", incarnation=self.incarnation))
            case ev.Move(src=src, attempt=attempt) if dst is None and not self._lent:
                # what comes after the chips were returned is recorded
                self.outbox.put(payload)
                self.outbox.put(ev.SampleMoved(id=payload.id, src=src, dst=self.instance, attempt=attempt))
            case _:
                super().execute(message, payload, dst)


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


def run(row: Row, pace: float, environments: Callable[[TurnsOf], Any] | None = None) -> PacedResult:
    """`pace`: real seconds a modelled second. environments: of episodes, in place of paced ones."""
    parts = _PacedRun(row, pace, environments)
    parts.world.listen(parts.policy)
    try:
        parts.world.start(parts.ups)
        halt = run_loop(parts.brain, parts.world, [each(parts)])
    except EndOfPacedRun:
        return parts.result()
    finally:
        parts.world.close()
    raise RuntimeError(f"{row.label} stopped early: {halt.reason}")


class EndOfPacedRun(Exception):
    """The last step to be measured is published."""


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
    """The one-process world of a row, and what is measured of it: observer of the loop and listener of the world, with
    counters at the end of the warm-up and at the end."""

    def __init__(self, row: Row, pace: float, environments: Callable[[TurnsOf], Any] | None):
        config, hardware, work = row.config, row.config.hardware, Workload(row.config.workload)
        costs = open_costs(config.model, hardware, config.cost)
        policy = orchestrator_config(config, row.mode)
        parts = ({}, *config.workload.mix.values())
        episodes = any(part.get("turns", config.workload.turns) > 1 for part in parts)
        section = presets.on_cpu(RolloutSection(
            slots=hardware.slots, pages=costs.pages, page_size=hardware.page_size, residents=hardware.residents,
            max_prompt_tokens=policy.max_prompt_tokens + OBSERVED_TOKENS * episodes,
            max_new_tokens=policy.max_new_tokens, decode_steps=1))  # fmt: skip
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
                   for _ in range(hardware.instances + len(policy.lendable))]  # fmt: skip
        inner: list[Any] = [HoldingEngine(each, turns, pace, due_s) for each in oracles] if hold else oracles
        self.engines = [PacedEngine(each, costs, pace, report_ticks=config.report_tokens, speed=hardware.speed(i))
                        for i, each in enumerate(inner)]  # fmt: skip
        ups = [
            ev.InstanceUp(instance=i, slots=hardware.slots, pages=costs.pages, page_size=hardware.page_size,
                          residents=hardware.residents, versions=(0,), speed=hardware.speed(i))
            for i in range(len(self.engines))]  # fmt: skip
        own = hardware.instances  # the others are the trainer's chips
        self.workers = [PacedWorker(i, engine, weights, outbox) for i, engine in enumerate(self.engines[:own])]
        lent = [LentPacedWorker(up, engine, weights, outbox, costs, pace)
                for up, engine in zip(ups[own:], self.engines[own:], strict=True)]  # fmt: skip
        self.ups = ups[:own]
        for engine in self.engines[:own]:
            engine.load(0, 0)
        model: Any = IdleTrainer()
        packed = lambda groups, base: [len(groups)]
        trainer = self.trainer = PacedTrainer(model, packed, costs, pace, policy.groups_per_step)
        self.world = Coordinator(
            instances=[*self.workers, *lent],
            trainer=StreamingTrainerWorker(
                trainer, trainer.pack, store, weights, policy.decisions.max_lag, outbox,
                groups_per_step=policy.groups_per_step, says_parts=bool(policy.lendable)),
            task=PacedPrompts(work, policy.max_new_tokens, episodes),
            scorer=PacedScorer(costs.score_s * pace),
            groups=store,
            weights=weights,
            outbox=outbox,
            group_size=policy.group_size,
            eval_samples=1,
            environments=(environments(turns) if environments else PacedEnvironments(turns, pace)) if episodes and not hold else None,
            max_context=section.max_prompt_tokens + section.max_new_tokens,
        )  # fmt: skip
        # the orchestrator's periods are modelled seconds; its clock is the world's
        policy = dataclasses.replace(
            policy, rebalance_period_s=policy.rebalance_period_s * pace, switch_s=policy.switch_s * pace
        )
        self.brain = TimedOrchestrator(policy, evaluate_start=False)
        self._row, self._pace, self._work = row, pace, work
        self._idle_before, self._waits = 0.0, True  # from a publication to the first Train after it
        self._tail_s = 0.0  # instance-seconds idle while the trainer waited
        self._counts: collections.Counter[str] = collections.Counter()  # of the whole run
        self._tasks: collections.Counter[str] = collections.Counter()  # groups trained, of the whole run and before
        self._tasks_before = self._tasks.copy()
        self._lag_max = 0
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}

    def policy(self, record: Any) -> None:
        """Payload records; a finished step says what it trained on."""
        for group in getattr(record, "groups", ()):
            lag = record.version - 1 - group.version
            self._counts.update(groups=1, lags=lag)
            self._lag_max = max(self._lag_max, lag)
            self._tasks[self._work.task(group.group_id)] += 1
            for sample in group.samples:
                tokens = len(sample.prompt_ids) + len(sample.out_ids)
                self._counts.update(tokens=tokens, mixed=len(sample.spans) > 1)

    def __call__(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        now = time.monotonic()
        self._counts["moves"] += isinstance(event, ev.SampleMoved)
        if isinstance(event, ev.StepPublished):
            self._idle_before, self._waits = self._idle_now(), True
            if event.version == self._row.config.warmup_steps:
                self._start, self._tasks_before = self._counters(now), self._tasks.copy()
            if event.version == self._row.config.steps:
                self._end = self._counters(now)
                raise EndOfPacedRun
        if any(isinstance(command, ev.Train) for command in commands):
            self._tail_s += self._idle_now() - self._idle_before if self._waits else 0.0
            self._waits = False

    def result(self) -> PacedResult:
        d = {name: value - self._start[name] for name, value in self._end.items()}
        steps = self._row.config.steps - self._row.config.warmup_steps
        every_s = d["now"] * len(self.workers)
        return PacedResult(
            step_s=d["now"] / steps / self._pace, rollout_only=1 - d["train"] / d["now"],
            tokens_per_s=d["tokens"] / d["now"] * self._pace,
            rollout={IDLE_TAIL: d["tail"] / every_s, IDLE_CAPPED: (d["idle"] - d["tail"]) / every_s},
            load_share=d["load"] / every_s, move_share=d["move"] / every_s, brain_share=d["brain"] / d["now"],
            lag_mean=d["lags"] / d["groups"], lag_max=self._lag_max,
            tasks={name: n / d["groups"] for name, n in sorted((self._tasks - self._tasks_before).items())}, moves=d["moves"] / steps, mixed=self._counts["mixed"],
            lends=self.brain.state.roles.lends_total)  # fmt: skip

    def _idle_now(self) -> float:
        """A pause is no idleness."""
        return sum(worker.wait_s - worker.paused_s for worker in self.workers)

    def _counters(self, now: float) -> dict[str, float]:
        counts = {name: float(self._counts[name]) for name in ("tokens", "lags", "groups", "moves")}
        move_s = sum(engine.move_s for engine in self.engines)
        return counts | {"now": now, "train": self.trainer.train_s, "tail": self._tail_s, "idle": self._idle_now(),
                         "move": move_s, "load": self.weights.load_s, "brain": self.brain.seconds}  # fmt: skip


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


# ---------------------------------------------------------------- pages


class ResultLine(NamedTuple):
    """One mode at one split: predicted and run."""

    row: Row
    predicted: Result
    ran: PacedResult
    off: float  # of the step's seconds


def predicted_and_run(row: Row, speedup: float) -> ResultLine:
    """speedup: modelled seconds a real second."""
    predicted = simulate(row)
    print(f"{row.label}: {predicted.step_s:.1f} s a step predicted", file=sys.stderr, flush=True)
    ran = run(row, pace=1 / speedup)
    print(f"{row.label}: {ran.step_s:.1f} s a step run", file=sys.stderr, flush=True)
    return ResultLine(row, predicted, ran, ran.step_s / predicted.step_s - 1)


def table(lines: list[ResultLine]) -> str:
    sync = next((line for line in lines if line.row.mode == "sync"), lines[0])
    head = ["paced, not measured hardware", "s/step predicted", "run", "off by", "rollout only predicted", "run",
            "tokens/s run", f"x {sync.row.label}", "idle: tail", "idle: capped", "loads", "moves", "lag",
            "orchestrator"]  # fmt: skip
    return grid(head, [[
        row.label, f"{p.step_s:.1f}", f"{r.step_s:.1f}", f"{off:+.1%}", f"{p.rollout_only:.1%}",
        f"{r.rollout_only:.1%}", f"{r.tokens_per_s * TOKEN:,.0f}", f"{r.tokens_per_s / sync.ran.tokens_per_s:.2f}",
        f"{r.rollout[IDLE_TAIL]:.1%}", f"{r.rollout[IDLE_CAPPED]:.1%}", f"{r.load_share:.2%}",
        f"{r.move_share:.2%}", f"{r.lag_mean:.2f}", f"{r.brain_share:.2%}"] for row, p, r, off in lines])  # fmt: skip


def verdicts(lines: list[ResultLine]) -> list[str]:
    """The aims, one sentence each."""
    by_label = {line.row.label.replace(f" {COLOCATED}", ""): line for line in lines}
    verdicts = []
    worst = max(lines, key=lambda line: abs(line.off))
    verdicts.append(f"prediction: at most {abs(worst.off):.1%} off ({worst.row.label}); aim 10 %")
    order = [sorted(lines, key=key) for key in (lambda n: n.predicted.step_s, lambda n: n.ran.step_s)]
    labels = [", ".join(line.row.label for line in lines) for lines in order]
    same = "as predicted" if labels[0] == labels[1] else f"predicted was {labels[0]}"
    verdicts.append(f"order, fastest first: {labels[1]} ({same})")
    dora = next((line for line in lines if line.row.mode == "dora"), None)
    if dora is None:
        return verdicts
    for mode, least, goal in AIMS:
        for line in (by_label.get(mode), *(n for n in lines if n.row.mode == mode and n is not by_label.get(mode))):
            if line is not None:
                ratio = dora.ran.tokens_per_s / line.ran.tokens_per_s
                verdicts.append(f"dora / {line.row.label}: {ratio:.2f} x tokens/s; aim {least:g}, goal {goal:g}")
    if sync := by_label.get("sync"):
        share = dora.ran.rollout_only / sync.ran.rollout_only
        verdicts.append(f"rollout only, dora / sync: {share:.2f}; aim at most 0.33")
    verdicts.append(
        f"orchestration {dora.ran.brain_share:.2%}, moves {dora.ran.move_share:.2%} of dora's time; aim under 2 %"
    )
    return verdicts


def environment_table(lines: list[ResultLine]) -> str:
    shares = lambda tasks: ", ".join(f"{name} {share:.1%}" for name, share in sorted(tasks.items()))
    head = ["paced, not measured hardware", "s/step predicted", "run", "rollout only predicted", "run",
            "trained of each predicted", "run", "lag mean", "max"]  # fmt: skip
    return grid(head, [[
        row.label, f"{p.step_s:.1f}", f"{r.step_s:.1f}", f"{p.rollout_only:.1%}", f"{r.rollout_only:.1%}",
        shares(p.tasks), shares(r.tasks), f"{r.lag_mean:.2f}", str(r.lag_max)] for row, p, r, _ in lines])  # fmt: skip


def recorded_setting(directory: Path, warmup: int) -> tuple[SimConfig, str]:
    """The recorded run as a simulation, and its mode."""
    recorded, _, events = recording.read(directory / JOURNAL)
    start = itertools.takewhile(lambda event: isinstance(event, ev.InstanceUp | ev.TimePassed), (e for e, _ in events))
    ups = [event for event in start if isinstance(event, ev.InstanceUp)]
    if not ups:
        raise ConfigError(f"recording: {directory / JOURNAL} does not begin with an instance")
    costs = json.loads((directory / COSTS).read_text())
    first = ups[0]
    config = sims.replace(SimConfig(), {
        "steps": recorded.total_steps, "warmup_steps": warmup, "report_tokens": 16, "cost.path": str(directory / COSTS),
        "hardware.chips": len(ups) + 1, "hardware.rollout_chips": len(ups), "hardware.tensor": 1,
        "hardware.slots": first.slots, "hardware.page_size": first.page_size, "hardware.residents": first.residents,
        "workload.distribution": "journal", "workload.path": str(directory / JOURNAL),
        "workload.prompt_tokens": costs["prompt_tokens"], "workload.prompt_sigma": 0.1,
        "workload.max_prompt_tokens": recorded.max_prompt_tokens, "workload.max_new_tokens": recorded.max_new_tokens,
        "orchestrator.max_versions": recorded.max_versions, "orchestrator.groups_per_step": recorded.groups_per_step,
        "orchestrator.group_size": recorded.group_size, "orchestrator.inflight": recorded.inflight,
        "orchestrator.updates": recorded.updates, "orchestrator.peer_weights": False,
        "orchestrator.rebalance_period_s": recorded.rebalance_period_s})  # fmt: skip
    return config, recorded.mode


def recorded_table(directory: Path, modes: Sequence[str], warmup: int) -> str:
    for name in (JOURNAL, COSTS):
        if not (directory / name).is_file():
            raise SystemExit(
                f"error: {directory} holds no {name}: it is no recorded run, or one that ended before its warm-up"
            )
    config, recorded = recorded_setting(directory, warmup)
    ran = replay.replay(directory / JOURNAL, warmup, config.orchestrator.max_versions)
    print(replay.render(ran), "\n")
    rows = []
    for mode in dict.fromkeys([recorded, *modes]):
        result = simulate(Row(label=mode, mode=mode, config=config, published={}))
        own = [f"{ran.step_s:.3f}", f"{result.step_s / ran.step_s - 1:+.1%}", f"{ran.rollout_only:.1%}"]
        rows.append([mode, f"{result.step_s:.3f}", *(own if mode == recorded else ["", "", ""]),
                     f"{result.rollout_only:.1%}", f"{result.tokens_per_s:,.0f}", f"{result.lag_mean:.2f}"])  # fmt: skip
    head = ["mode", "s/step predicted", "recorded", "off by", "rollout only recorded", "predicted", "tokens/s predicted",
            "mean lag"]  # fmt: skip
    return grid(head, rows)


def end_to_end(
    modes=(), speedup=0.0, steps=0, warmup=0, split: Literal["predicted", "half"] = "predicted", lent=False, small=False,
    environments=False, config="configs/sim/environments.py", recorded="",
) -> Iterator[str]:  # fmt: skip
    """What is 0 is taken from the kind of run: --modes=all or five of them, --speedup=30 or 40, --steps=24 or 6, --warmup=6, 3 or 2."""
    if recorded:
        modes = modes or ("sync", "one_step", "partial", "dora_paper", "dora")
        yield recorded_table(Path(recorded), modes, warmup or 2)
        return
    default = (40.0, 6, 3) if environments else (30.0, 24, 6)
    speedup, steps, warmup = speedup or default[0], steps or default[1], warmup or default[2]
    if environments:
        chosen = environment_rows(sims.from_config_dict(load_file(config, SimConfig)), steps, warmup)
    else:
        work = sims.replace(setting(steps, warmup), SMALL if small else {})
        chosen = lent_rows(work) if lent else rows(work, modes or MODES, split)
    lines = [predicted_and_run(row, speedup) for row in chosen]
    yield f"paced at {speedup:g} modelled seconds a second, {steps} steps after {warmup}; times are modelled\n"
    if environments:
        yield environment_table(lines)
    else:
        yield "\n".join([table(lines), "", *verdicts(lines)])


if __name__ == "__main__":
    harness.run(end_to_end)
