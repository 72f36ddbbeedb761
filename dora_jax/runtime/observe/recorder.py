"""A run's journal and what things cost in it: what the simulator needs to run it again, under this mode or another.

    python -m dora_jax.train ... --config.journal.record=True       writes them to WORKDIR/recorded

    recorder = Recorder(directory, config)              config: the OrchestratorConfig of the run
    recorder.engine(engine)                             stands for the engine of every instance, from its start
    run(orchestrator, world, [recorder, ...])           then recorder.close()

Produces journal.jsonl (recording.py) and costs.json (costs/) in `directory`, read by `tests.soak.end_to_end`. Costs are
times of the wall clock between command and answer, so they hold whatever else went on on the machine at that time.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from dora_jax.config import Config, ConfigError
from dora_jax.costs.recording import Recording
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.common.seams import Notify, PublishedWeights, RolloutEngine, RolloutWorker, RunPlugin, TrainerSide
from dora_jax.runtime.instances.supervised_worker import LocalInstance
from dora_jax.runtime.observe.emulated_timing import CountedEngine, PacedEngine, PacedTrainer, PacedWeights, costs_of
from dora_jax.types import GroupId, InstanceId, SampleId, Version

ROUNDS = 8  # of the fit; the ratio settles in three
RECORDED = "recorded"  # its folder in the workdir
JOURNAL, COSTS = "journal.jsonl", "costs.json"


def instrument(
    config: Config,
    workdir: Path,
    instances: Sequence[RolloutWorker],
    weights: PublishedWeights,
    side: TrainerSide | None,
    orchestrator: Orchestrator,
    notify: Notify,
) -> tuple[TrainerSide | None, Recorder | None]:
    """Wraps engines and trainer in what the config asks for: a chip's pace (emulated_timing.py), a recorder.

    Returns (the trainer's side that the run uses, the recorder or None). `pace` and `journal.record` are for a run
    in one
    process, so the instances are LocalInstances; their results stay what they are."""
    recorder: Recorder | None = None
    costs = costs_of(config.pace, len(instances)) if config.pace else None
    if costs:
        notify(f"PACED: ticks, steps and transfers last as long as on {config.pace}; times are not this machine's")
        weights = PacedWeights(weights, costs, 1.0, len(instances))
        if side is not None:
            trainer = PacedTrainer(side.trainer, side.pack, costs, 1.0, config.orchestrator.groups_per_step)
            side = dataclasses.replace(side, trainer=trainer, pack=trainer.pack)
    if config.journal.record and side is not None:
        if orchestrator.state.ledger.admitted or orchestrator.state.ledger.base:
            raise ConfigError(
                f"journal.record: the run in {workdir} has begun already, and a recording begins with its run"
            )
        recorder = Recorder(workdir / RECORDED, orchestrator.state.config)

    def wrapped(engine: RolloutEngine) -> RolloutEngine:
        paced = PacedEngine(engine, costs, 1.0) if costs else engine
        return recorder.engine(paced) if recorder else paced

    if config.pace or recorder:
        for instance in instances:
            cast(LocalInstance, instance).wrap_engine(wrapped, weights)
    return side, recorder


class TimedEngine(CountedEngine):
    """The Engine seam around another engine: what each tick did and how long it took, the way to it included."""

    def __init__(self, engine: RolloutEngine, training: Callable[[], bool] = lambda: False):
        super().__init__(engine)
        self.ticks: list[tuple[float, ...]] = []  # steps, batch, tokens of prefill, whether the trainer worked, seconds
        self.prompts: list[int] = []
        self._training = training
        self._ended: float | None = None  # when the last tick did; None: the engine had nothing to do since

    def tick(self) -> TickResult:
        began = time.monotonic() if self._ended is None else self._ended
        result = self.engine.tick()
        now = time.monotonic()
        work = self._account.of(result)
        self.ticks.append((work.steps, sum(work.batches), sum(work.prefills), self._training(), now - began))
        self._ended = None if self.engine.idle else now
        return result

    def submit(self, id: SampleId, prompt_ids: np.ndarray, version: Version, *more: Any, **named: Any) -> None:
        super().submit(id, prompt_ids, version, *more, **named)
        self.prompts.append(len(prompt_ids))

    def export(self, id: SampleId) -> InFlightSample:
        self._account.leave(id)
        return self.engine.export(id)


class Recorder(RunPlugin):
    """Observer of the loop; see the page. What the steps of the warm-up cost is forgotten."""

    def __init__(self, directory: str | Path, config: OrchestratorConfig, start: dict[str, Any] | None = None, *,
                 warmup_steps: int = 2):  # fmt: skip
        self._warmup_steps = warmup_steps
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._journal = Recording(self._directory / JOURNAL, config, start)
        self._engines: list[TimedEngine] = []
        self._asked: dict[tuple, float] = {}  # what was asked for and not answered, since when
        self.took: dict[str, list[float]] = collections.defaultdict(list)
        self._left: dict[InstanceId, float] = {}  # when the last sample that moved had left an instance
        self._pages = 0

    def engine(self, engine: RolloutEngine) -> TimedEngine:
        self._engines.append(TimedEngine(engine, lambda: ("train", 0) in self._asked))
        return self._engines[-1]

    def observe(self, events: Sequence[ev.Event], commands: Sequence[ev.Command]) -> None:
        self._journal(events, commands)
        now = time.monotonic()
        for event in events:
            match event:
                case ev.InstanceUp(pages=pages):
                    self._pages = pages
                case ev.WeightsLoaded(instance=instance):
                    self._answered("load", instance, now)
                case ev.SampleMoved(id=id, src=src):
                    self._left_at(id, src, now)
                case ev.SampleParked(id=id, instance=instance):
                    self._left_at(id, instance, now)
                case ev.SampleDone(id=id):
                    self._asked["score", id.group_id] = now  # of a group, the last one stays
                case ev.GroupScored(group_id=group_id):
                    self._answered("score", group_id, now)
                case ev.StepPublished(version=version):
                    self._answered("train", 0, now)
                    if version == self._warmup_steps:
                        self.took.clear()
                        for engine in self._engines:
                            engine.ticks = []  # not cleared: its thread may be adding to the old one
        for command in commands:
            match command:
                case ev.LoadWeights(instance=instance):
                    self._asked["load", instance] = now
                case ev.Move(ids=ids) | ev.Park(ids=ids):
                    self._asked |= {("move", id): now for id in ids}
                case ev.Train():
                    self._asked["train", 0] = now

    def close(self) -> None:
        self._journal.close()
        rows = [row for engine in self._engines for row in engine.ticks]
        if not rows or not self.took["train"]:
            return
        took, moves = self.took, self.took["move"] or self.took["first move"]
        costs = fit_ticks(np.array(rows)) | {
            "train_fixed_s": statistics.fmean(took["train"]), "train_s_per_token": 0.0,
            "load_s": statistics.median(took["load"]) if took["load"] else 0.0, "move_s_per_token": 0.0,
            "move_fixed_s": statistics.fmean(moves) if moves else 0.0,
            "score_s": statistics.fmean(took["score"]), "pages": self._pages,
            "prompt_tokens": statistics.fmean(n for engine in self._engines for n in engine.prompts)}  # fmt: skip
        (self._directory / COSTS).write_text(json.dumps(costs, indent=1))

    # ------------------------------------------------------------ private

    def _left_at(self, id: SampleId, src: InstanceId, now: float) -> None:
        """Samples leave an instance one after the other, to another or to be moved aside: each costs what it adds
        behind the one before. The first goes on decoding until the present tick is over, which costs it nothing."""
        since, before = self._asked.pop(("move", id), None), self._left.get(src, 0.0)
        if since is not None:
            self.took["move" if before > since else "first move"].append(now - max(since, before))
        self._left[src] = now

    def _answered(self, what: str, key: GroupId | SampleId, now: float) -> None:
        since = self._asked.pop((what, key), None)
        if since is not None:
            self.took[what].append(now - since)


def fit_ticks(rows: np.ndarray) -> dict[str, Any]:
    """Least squares over all ticks, nothing below zero: seconds of a decode step by batch and of a token of prefill
    while the trainer waits, and by how much they are longer while it works (roles on one machine share its cores).

    rows: (steps, batch, prefill tokens, whether the trainer worked, seconds). Batches are taken together by powers of
    two, but for those whose ticks their prefill explains without them; the KV that is read is part of that, since
    context and batch grow together.
    """
    from scipy.optimize import nnls  # the import takes as long as that of JAX, and a program's start does not need it

    steps, batch, prefill, works, seconds = rows.astype(float).T
    bucket = np.ceil(np.log2(np.maximum(batch, 1.0))).astype(int)
    kinds = np.unique(bucket)
    columns = np.stack([*(steps * (bucket == kind) for kind in kinds), prefill, prefill > 0], 1).astype(float)
    contention, beside = 1.0, works > 0
    for _ in range(ROUNDS):
        found = nnls(columns, seconds / np.where(works, contention, 1.0))[0].round(12)  # 1e-20 becomes 0
        if beside.any() and not beside.all():
            ratio = [seconds[part].sum() / (columns @ found)[part].sum() for part in (beside, ~beside)]
            contention = float(ratio[0] / ratio[1])  # times as long as without a trainer that works
    # a tick that prefills costs so much for each token and so much once: both, a token
    tokens, ticks = float(prefill.sum()), int((prefill > 0).sum())
    per_token = float(found[-2] + found[-1] * ticks / tokens) if tokens else 0.0
    decode = [[round(batch[bucket == kind].mean()), float(s)] for kind, s in zip(kinds, found, strict=False) if s > 0]
    decode = decode or [[1, float(seconds.sum() / steps.sum())]]  # no prefill explains all of them
    return {"decode": decode, "decode_kv_s": 0.0, "prefill_fixed_s": 0.0, "contention": contention,
            "prefill_s_per_token": per_token}  # fmt: skip
