"""Assembles a run from its configuration: devices, model, task, engines, trainer, world.

The only place that knows every stage.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dora_jax import devices, tasks
from dora_jax.buffer.pack import Layout, layout, pack_step
from dora_jax.config import Config, blame
from dora_jax.models import sharding
from dora_jax.orchestrate.events import InstanceUp
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.publish import WeightStore
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.local import LocalWorld
from dora_jax.runtime.workers import InstanceWorker, TrainerWorker
from dora_jax.tasks.pool import ScorerPool
from dora_jax.tokenizer import Tokenizer
from dora_jax.trainer.objective import needs_scores
from dora_jax.trainer.prepare import Prepare
from dora_jax.trainer.step import Trainer
from dora_jax.types import ScoredGroup, Version


class Parts:
    """What training and evaluation share: tokenizer, task, scorer, weight store, device plan, engines."""

    def __init__(self, config: Config, workdir: Path):
        self.config = config
        self.workdir = workdir
        with blame("model.path"):
            self.tokenizer = Tokenizer.load(config.model.path)
        self.scorer = ScorerPool(config.task, self.tokenizer.decode)  # its processes start while we compile
        with blame("task.path"):
            self.task = tasks.open_task(
                config.task, self.tokenizer, seed=config.seed, max_prompt_tokens=config.rollout.max_prompt_tokens,
                max_new_tokens=config.rollout.max_new_tokens, heldout=config.task.heldout,
                quarantine_path=workdir / "quarantine.jsonl")
        self.scorer.wait_ready()  # a reward that cannot be imported is named before anything is compiled
        self.plan = devices.plan(len(jax.devices()), config)
        self.weights = WeightStore(config.model.dtype)
        self.outbox: queue.SimpleQueue = queue.SimpleQueue()

    def trainer_mesh(self) -> jax.sharding.Mesh:
        chosen = [jax.devices()[i] for i in self.plan.trainer]
        return sharding.make_mesh(chosen, *self.plan.trainer_mesh)

    def instances(self, model: Any) -> list[InstanceWorker]:
        # A sample that goes on from its tokens may differ in the last bits from one that was never cut: not in mode
        # sync, whose runs are the same bit for bit however often they are killed.
        partial_s = self.config.journal.partial_s if self.config.orchestrator.mode != "sync" else 0.0
        workers = []
        for instance, indices in enumerate(self.plan.instances):
            mesh = sharding.make_mesh([jax.devices()[i] for i in indices], 1, 1, len(indices))
            engine = Engine(model, self.config.rollout, mesh, seed=self.config.seed,
                            eos_ids=self.tokenizer.eos_ids, vocab_limit=self.tokenizer.vocab_size)
            workers.append(InstanceWorker(instance, engine, self.weights, self.outbox, partial_s))
        return workers

    def world(self, instances: Sequence[InstanceWorker], trainer: TrainerWorker | None, groups: Any) -> LocalWorld:
        section = self.config.orchestrator
        return LocalWorld(
            instances=instances, trainer=trainer, task=self.task, scorer=self.scorer, groups=groups,
            weights=self.weights, outbox=self.outbox, group_size=section.group_size,
            eval_samples=self.config.eval.samples,
            trainable=nonzero_variance if section.filter_zero_variance else lambda group: True)


def orchestrator_config(config: Config) -> OrchestratorConfig:
    section, rollout = config.orchestrator, config.rollout
    return OrchestratorConfig(
        mode=section.mode, max_versions=section.max_versions, groups_per_step=section.groups_per_step,
        group_size=section.group_size, inflight=section.inflight, total_steps=config.steps,
        rebalance_period_s=section.rebalance_period_s, max_filtered_rounds=section.max_filtered_rounds,
        max_prompt_tokens=rollout.max_prompt_tokens, max_new_tokens=rollout.max_new_tokens,
        eval_every=config.eval.every, eval_groups=config.eval.prompts, eval_samples=config.eval.samples)


def instance_up(worker: InstanceWorker, config: Config) -> InstanceUp:
    rollout = config.rollout
    return InstanceUp(instance=worker.instance, slots=rollout.slots, pages=rollout.pages,
                      page_size=rollout.page_size, residents=rollout.residents)


def batch_layout(config: Config, trainer: Trainer) -> Layout:
    """The static shape of one optimizer update's batch."""
    section, rollout = config.trainer, config.rollout
    samples = -(-config.orchestrator.groups_per_step // section.updates) * config.orchestrator.group_size
    return layout(pack_tokens=section.pack_tokens, rows=section.rows, micro_batches=section.micro_batches,
                  samples=samples, shards=trainer.shards, max_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens)


def packer(config: Config, trainer: Trainer) -> Callable[[Sequence[ScoredGroup], Version], Any]:
    """(groups, base) -> the step's batches, one per optimizer update, all of one static shape."""
    shape, updates = batch_layout(config, trainer), config.trainer.updates
    prepare = Prepare(config.trainer, config.rollout.max_new_tokens)

    def pack_step(groups: Sequence[ScoredGroup], base: Version) -> Any:
        if config.task.shuffle_rewards:
            groups = shuffled(groups, config.seed, base)
        score = trainer.score if needs_scores(config.trainer) else None
        return pack_step([groups[i::updates] for i in range(updates)], shape, prepare, score)

    return pack_step


def nonzero_variance(group: ScoredGroup) -> bool:
    """DAPO's dynamic sampling: a group whose samples all score alike teaches nothing."""
    return bool(np.ptp(group.rewards) > 0)


def shuffled(groups: Sequence[ScoredGroup], seed: int, base: Version) -> list[ScoredGroup]:
    """Control experiment: the step's rewards, permuted among all its samples."""
    rewards = np.concatenate([g.rewards for g in groups])
    rewards = np.random.default_rng((seed, base)).permutation(rewards)
    split = np.split(rewards, np.cumsum([len(g.rewards) for g in groups])[:-1])
    return [dataclasses.replace(g, rewards=r) for g, r in zip(groups, split, strict=True)]


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Runs the calls (compilations) on threads of their own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised below, on the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
