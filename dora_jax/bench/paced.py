"""One paced run of a simulator's row: the same configuration, work and costs in the one-process world, on real threads.

Consumes a `Row` and a pace, produces `PacedResult` in modelled seconds. The engine is the oracle's (every token proves
its version), the trainer computes nothing, rewards are constants after `score_s`: what is real is all that lies
between.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import RolloutSection
from dora_jax.costs import Costs, open_costs
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each
from dora_jax.orchestrate.core import run as run_loop
from dora_jax.plan import presets
from dora_jax.rollout.migrate import InFlightSample, SampledTokens, ended, observed
from dora_jax.rollout.oracle import OracleEngine
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.common.seams import Outbox, WeightStore
from dora_jax.runtime.common.worker import HandedOver
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.observe.emulated_timing import PacedEngine, PacedTrainer, PacedWeights
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker
from dora_jax.sim.config import Row
from dora_jax.sim.meter import IDLE_CAPPED, IDLE_TAIL
from dora_jax.sim.run import orchestrator_config
from dora_jax.sim.workload import Turn, Workload
from dora_jax.types import (
    EpisodeEnded,
    EpisodeSoFar,
    InstanceId,
    Observed,
    Prompt,
    Sample,
    SampleId,
    ScoredGroup,
    TokenTable,
    Version,
)


class PacedWorker(EngineWorker):
    """Says how long it stood still beside a trainer on its chips."""

    _stood_s = 0.0
    _stands_since: float | None = None

    @property
    def paused_s(self) -> float:
        since = self._stands_since
        return self._stood_s + (time.monotonic() - since if since is not None else 0.0)

    def pause(self) -> None:
        super().pause()
        self._stands_since = time.monotonic()

    def unpause(self) -> None:
        self._stood_s, self._stands_since = self.paused_s, None
        engine: Any = self.engine  # a PacedEngine
        engine.rest()
        super().unpause()


class TurnsOf:
    """Where each turn of a sample begins, and what follows it."""

    def __init__(self, work: Workload):
        self._work = work

    def length(self, id: SampleId, start: int) -> int:
        """Tokens of the turn that begins behind `start` tokens of the response."""
        return self._at(id, start)[1].tokens

    def behind(self, id: SampleId, tokens: int) -> Turn | None:
        """The turn whose end these tokens of the response are, with its wait; None: the last one."""
        turns = self._work.turns(id)
        before = 0
        for turn in turns[:-1]:
            before += turn.tokens
            if tokens <= before:
                return turn
            before += turn.observation_tokens
        return None

    def _at(self, id: SampleId, start: int) -> tuple[int, Turn]:
        turns, before = self._work.turns(id), 0
        for turn in turns[:-1]:
            if start < before + turn.tokens + turn.observation_tokens:
                return before, turn
            before += turn.tokens + turn.observation_tokens
        return before, turns[-1]


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

    def lend(self, version: Version) -> None:
        time.sleep(self._pace * self._costs.lend_s())
        self.engine.load(version, version)
        self._paced.rest()
        self.incarnation, self._lent = self.incarnation + 1, True
        self.outbox.put(dataclasses.replace(self._up, versions=(version,), incarnation=self.incarnation))

    def reclaim(self) -> None:
        began = time.monotonic()
        with self._paced.all_at_once() as handed_over:
            self.hand_over()
        for version in self.engine.versions:
            self.engine.drop(version)
        seconds = self._pace * self._costs.return_s(sum(handed_over))
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        self._lent = False
        self.outbox.put(ev.InstanceDown(instance=self.instance, reason="returned", incarnation=self.incarnation))

    def receive(self, in_flight: InFlightSample, src: InstanceId, attempt: int) -> None:
        """What comes after the chips were returned is recorded."""
        if self._lent:
            super().receive(in_flight, src, attempt)
            return
        self.outbox.put(HandedOver(in_flight=in_flight))
        self.outbox.put(ev.SampleMoved(id=in_flight.id, src=src, dst=self.instance, attempt=attempt))


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
    parts.world.listen(meter.policy)
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
        policy = orchestrator_config(config, row.mode)
        section = presets.on_cpu(
            RolloutSection(
                slots=hardware.slots,
                pages=costs.pages,
                page_size=hardware.page_size,
                residents=hardware.residents,
                max_prompt_tokens=policy.max_prompt_tokens,
                max_new_tokens=policy.max_new_tokens,
                decode_steps=1,
            )
        )
        if episodes := any(
            part.get("turns", config.workload.turns) > 1 for part in ({}, *config.workload.mix.values())
        ):
            section = dataclasses.replace(section, max_prompt_tokens=policy.max_prompt_tokens + OBSERVED_TOKENS)
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
        self.lent = [LentPacedWorker(up, engine, weights, outbox, costs, pace)
                     for up, engine in zip(ups[own:], self.engines[own:], strict=True)]  # fmt: skip
        self.ups = ups[:own]
        for engine in self.engines[:own]:
            engine.load(0, 0)
        model: Any = IdleTrainer()
        trainer = self.trainer = PacedTrainer(
            model, lambda groups, base: [len(groups)], costs, pace, policy.groups_per_step
        )
        self.world = Coordinator(
            instances=[*self.workers, *self.lent],
            trainer=StreamingTrainerWorker(
                trainer,
                trainer.pack,
                store,
                weights,
                policy.decisions.max_lag,
                outbox,
                groups_per_step=policy.groups_per_step,
                says_parts=bool(policy.lendable),
            ),
            task=PacedPrompts(work, policy.max_new_tokens, episodes),
            scorer=PacedScorer(costs.score_s * pace),
            groups=store,
            weights=weights,
            outbox=outbox,
            group_size=policy.group_size,
            eval_samples=1,
            environments=PacedEnvironments(turns, pace) if episodes and not hold else None,
            max_context=section.max_prompt_tokens + section.max_new_tokens,
        )
        # the orchestrator's periods are modelled seconds; its clock is the world's
        policy = dataclasses.replace(
            policy, rebalance_period_s=policy.rebalance_period_s * pace, switch_s=policy.switch_s * pace
        )
        self.brain = TimedOrchestrator(policy, evaluate_start=False)


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

    def policy(self, record: Any) -> None:
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
