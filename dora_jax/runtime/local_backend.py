"""A run in one process: its context (tokenizer, task, scorer, outbox), and the backend whose stages share its devices.

Consumes a resolved configuration; produces the coordinator and its workers. The folders of a run (tokenizer, weights,
checkpoints) are read here. cluster_backend.py is the other backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dora_jax import tasks
from dora_jax.base.digest import digest
from dora_jax.config import Config, ConfigError, field_context
from dora_jax.models import sharding
from dora_jax.models.hf_config import read_config
from dora_jax.orchestrate.events import InstanceUp
from dora_jax.plan import devices, presets
from dora_jax.publish import DeviceWeights
from dora_jax.rollout.migrate import HostKV
from dora_jax.runtime.assembly.run import (
    batch_layout,
    instance_up,
    new_engine,
    new_trainer,
    packer,
    partial_s,
    prober,
    updates_apart,
)
from dora_jax.runtime.common.sample_gaps import SampleGaps
from dora_jax.runtime.common.sample_log import TokenViews
from dora_jax.runtime.common.seams import (
    Environments,
    GroupStore,
    Notify,
    Prompts,
    PublishedWeights,
    RolloutWorker,
    Scorer,
    TrainerSide,
    Tree,
    WeightStore,
)
from dora_jax.runtime.common.worker import Outbox, Worker
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.episodes import EpisodeScorer, PromptsAhead, RunPrompts
from dora_jax.runtime.instances.shared_devices import SharedDevices
from dora_jax.runtime.instances.supervised_worker import LocalInstance, RestartPolicy
from dora_jax.runtime.live_sessions import POSTED, LiveSessions, SessionPrompts
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker, TrainerWorker
from dora_jax.tasks import solved
from dora_jax.tasks.environment import PolicyFacts
from dora_jax.tasks.environments import EnvironmentPool, rewrites
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.tasks.environments.renderer_bridge import RendererBridge
from dora_jax.tasks.gym import GymSource
from dora_jax.tasks.pool import ScorerPool
from dora_jax.tasks.prompts import Task
from dora_jax.tasks.rows import RowsSource
from dora_jax.tasks.trial import try_rewards
from dora_jax.trainer.step import Trainer
from dora_jax.types import InstanceId, Prompt, Sampling, ScoredGroup, Version


class RunContext:
    """What every run has in its own process: tokenizer, task, scorer, the outbox of its workers, the world.

    remarks: sentences on its data, for the console. solved: the rule of held-out accuracy; None: there is none."""

    def __init__(self, config: Config, workdir: Path):
        from dora_jax.models.tokenizer import Tokenizer

        self.config = config
        self.workdir = workdir
        with field_context("model.path"):
            self.tokenizer = Tokenizer.load(config.model.path)
        self.outbox: queue.SimpleQueue = queue.SimpleQueue()
        pool = (
            ScorerPool(config.task, self.tokenizer.decode)
            if config.task.rewards and not config.environment.name
            else None
        )  # starts in the background
        with contextlib.ExitStack() as undo:
            if pool:
                undo.callback(pool.close)
            self.task = self._task()
            prompt, self.remarks = self.task.survey()
            for name in config.task.template_kwargs:
                if not re.search(rf"\b{re.escape(name)}\b", self.tokenizer.template):
                    self.remarks.append(f"task.template_kwargs: the chat template of the model has no variable {name}")
            alone = "serving.train" if config.serving.train else ""
            terms = try_rewards(pool, prompt, self.tokenizer.encode, alone) if pool else ()
            self.sessions = self._sessions(pool) if config.serving.train else None
            if config.serving.reward_s:
                if POSTED in terms:
                    raise ConfigError(f"task.rewards: a term is named {POSTED}, which is what clients post")
                terms = (*terms, POSTED)
            self.environments: Environments | None = self.sessions
            if config.environment.name:
                # in processes that start in the background
                section = self.config.environment
                observation = "" if self.config.task.template == "chat" else section.observation
                variables, at = config.task.template_kwargs, self.task.messages_at
                bridge: Bridge | RendererBridge = Bridge(self.tokenizer, observation, at, variables)
                if section.renderer:
                    bridge = RendererBridge(self.tokenizer, section.renderer, at, variables)
                self.config = config = self._with_branches(config, bridge, prompt)
                section = config.environment
                rollout = self.config.rollout
                policy = PolicyFacts(
                    path=str(self.tokenizer.path.resolve()),
                    context=rollout.max_prompt_tokens + rollout.max_new_tokens,
                    vocab=self.tokenizer.vocab_size,
                    turn_tokens=section.turn_tokens or rollout.max_new_tokens,
                    stop_ids=self.tokenizer.eos_ids,
                    rollout=dataclasses.asdict(rollout),
                )
                self.environments = environments = EnvironmentPool(section, bridge, self.config.seed, policy)
                undo.callback(environments.close)
                environments.wait_ready()
                terms = environments.try_episodes(prompt, self.tokenizer.encode)
            with field_context("eval.solved"):
                self.solved = solved.among(config.eval.solved, terms)
            if not self.sessions and self.task.n_heldout < config.eval.prompts:
                self.remarks.append(
                    f"eval.prompts = {config.eval.prompts}, and {self.task.n_heldout} held-out prompts are left: they "
                    "are evaluated more than once each"
                )
            if not self.sessions and self.solved:
                self.remarks.append(f"held-out accuracy is the share of samples with {self.solved} (eval.solved)")
            scorer = _judge(config, pool, terms) if config.reward_model.path else pool
            if self.environments:
                scorer = EpisodeScorer(terms)
            if scorer is None:
                raise ConfigError("task.rewards: no reward is named, and reward_model.path names no model")
            self.scorer: Scorer = scorer
            undo.pop_all()

    def _with_branches(self, config: Config, bridge: Bridge | RendererBridge, prompt: Prompt) -> Config:
        """The configuration with as many branches as the chat template makes, where it leaves them open: one at every
        message of the environment but the last, or none. A micro-batch is as large as without: there are more."""
        most = config.environment.max_turns - 1
        if config.environment.branches >= 0 or not config.takes_branches:
            return config
        end = list(self.tokenizer.eos_ids[:1])
        turns = (
            np.array([*self.tokenizer.encode(text), *end], np.int32) for text in ("<think>\na\n</think>\n\nb", "b")
        )
        if not most or not rewrites(bridge, prompt, tuple(turns)):
            return config
        trainer = config.trainer
        if not trainer.rows:
            trainer = dataclasses.replace(trainer, micro_batches=(1 + most) * trainer.micro_batches)
        self.remarks.append(
            f"environment.branches={most}: the chat template rewrites earlier turns, and each time begins a branch; "
            f"trainer.micro_batches={trainer.micro_batches}, of which those that hold no token are not computed"
        )
        environment = dataclasses.replace(config.environment, branches=most)
        config = dataclasses.replace(config, environment=environment, trainer=trainer)
        if found := presets.problems(presets.plan(config, presets.here(config), presets.model_of(config))):
            raise ConfigError([*found, f"environment.branches: -1 is {most} here; 0 ends episodes at the first"])
        return config

    @property
    def prompts(self) -> Prompts:
        """The prompts of the task."""
        heldout, turn_tokens = self.config.eval, 0
        if self.environments:
            turn_tokens = self.config.environment.turn_tokens or self.config.rollout.max_new_tokens
        own = Sampling(
            temperature=heldout.temperature if heldout.temperature >= 0 else None, top_p=heldout.top_p or None
        )
        ahead = None  # a source of the user's is asked by this thread alone
        if isinstance(self.task, Task) and isinstance(self.task.source, GymSource | RowsSource):
            ahead = PromptsAhead(self.task.prompt_at)
        return RunPrompts(self.task, turn_tokens, None if own == Sampling() else own, ahead)

    def world(
        self,
        instances: Sequence[RolloutWorker],
        trainer: TrainerWorker | None,
        groups: GroupStore,
        weights: WeightStore,
        prompts: Prompts | None = None,
    ) -> Coordinator:
        """prompts: those of the task and others; None: `self.prompts`."""
        section, rollout = self.config.orchestrator, self.config.rollout
        return Coordinator(
            instances=instances,
            trainer=trainer,
            task=prompts or self.prompts,
            scorer=self.scorer,
            groups=groups,
            weights=weights,
            outbox=self.outbox,
            group_size=section.group_size,
            eval_samples=self.config.eval.samples,
            trainable=nonzero_variance if section.filter_zero_variance else lambda group: True,
            environments=self.environments,
            max_context=rollout.max_prompt_tokens + rollout.max_new_tokens,
            of_users=self.config.serving.train,
            record_tokens=partial_s(self.config) > 0,
        )

    def _task(self) -> tasks.Task | SessionPrompts:
        config = self.config
        if config.serving.train:
            with field_context("serving.train"):
                return SessionPrompts(self.tokenizer, config.rollout.max_new_tokens)
        with field_context("task.path"):
            return tasks.open_task(
                config.task,
                self.tokenizer,
                seed=config.seed,
                max_prompt_tokens=config.rollout.max_prompt_tokens,
                max_new_tokens=config.rollout.max_new_tokens,
                heldout=config.task.heldout,
                quarantine_path=self.workdir / "quarantine.jsonl",
            )

    def _sessions(self, pool: ScorerPool | None) -> LiveSessions:
        section, rollout = self.config.environment, self.config.rollout
        return LiveSessions(
            self.tokenizer,
            pool,
            turn_tokens=section.turn_tokens or rollout.max_new_tokens,
            max_turns=section.max_turns,
            idle_s=self.config.serving.session_idle_s,
            reward_s=self.config.serving.reward_s,
            context=rollout.max_prompt_tokens + rollout.max_new_tokens,
        )


def _judge(config: Config, pool: ScorerPool | None, terms: tuple[str, ...]) -> Scorer:
    """The reward model behind the task's own rewards, on its mesh."""
    from dora_jax.tasks import reward_model  # most runs have none

    section, rollout = config.reward_model, config.rollout
    if reward_model.TERM in terms:
        raise ConfigError(
            f"task.rewards: a term is named {reward_model.TERM}, which is the name of the reward model's score"
        )
    indices = devices.plan(len(jax.devices()), config).reward_model
    mesh = sharding.make_mesh([jax.devices()[i] for i in indices], section.data, section.fsdp, section.tensor)
    with field_context("reward_model.path"):
        reward_model.check(section.path, config.model.path, rollout.max_prompt_tokens + rollout.max_new_tokens)
        model = reward_model.RewardModel(section, mesh, config.model.dtype)
    return reward_model.ModelScorer(model, section.weight, pool)


class LocalBackend:
    """`Backend` of a run in one process: instances and trainer on sub-meshes of `jax.devices()`."""

    def __init__(self, parts: RunContext, notify: Notify):
        self._parts, self._notify = parts, notify
        self._trainer: Trainer | None = None
        self._shared = SharedDevices(None)
        self._plan = devices.plan(len(jax.devices()), parts.config)
        self.weights: PublishedWeights = DeviceWeights(parts.config.model.dtype)

    def trainer_side(self) -> TrainerSide:
        from dora_jax.trainer.checkpoint import Checkpoints

        config, workdir = self._parts.config, self._parts.workdir
        mesh = sharding.make_mesh([jax.devices()[i] for i in self._plan.trainer], *self._plan.trainer_mesh)
        trainer = self._trainer = new_trainer(config, self._parts.tokenizer, mesh, workdir)
        if moves := config.trainer.lent_memory == "host":
            self._shared = SharedDevices(trainer, lambda engine: engine.device.free())
        views, probe = TokenViews(trainer, config.trainer.show_every, packer(config, trainer)), prober(config, trainer)
        gaps = SampleGaps(trainer, probe, self._published, views.pack) if config.trainer.max_instance_mismatch else None
        return TrainerSide(
            trainer=trainer,
            checkpoints=Checkpoints(workdir / "checkpoints", config.checkpoint, self._notify, adopts=True),
            pack=gaps.pack if gaps else views.pack,
            digest=digest,
            probe=probe,
            views=views.take,
            gaps=gaps.gaps if gaps else None,
            reload=self._shared.reload if moves else lambda: None,
        )

    def instances(self) -> list[LocalInstance]:
        parts, config = self._parts, self._parts.config
        model = read_config(config.model.path)
        pool: dict[InstanceId, LocalInstance] = {}
        workers: list[LocalInstance] = []
        host = HostKV(config.rollout.host_kv_bytes, self._notify)
        for instance, indices in enumerate((*self._plan.instances, *self._plan.lent)):
            mesh = sharding.make_mesh([jax.devices()[i] for i in indices], 1, 1, len(indices))
            new = functools.partial(new_engine, config, parts.tokenizer, model, mesh, host)
            spare = RestartPolicy(
                new_engine=new, vocab_size=parts.tokenizer.vocab_size, hung_s=config.cluster.stall_timeout_s
            )
            common = self.weights, parts.outbox, partial_s(config), spare, pool, self._notify
            up = instance_up(instance, config)
            if instance < len(self._plan.instances):  # without these there is no run, whatever is lent
                pool[instance] = worker = LocalInstance(up, new(), *common)
            else:
                self._shared.acquire(instance)  # until it is compiled
                worker = LocalInstance(up, new(), *common, self._shared)
            workers.append(worker)
        return workers

    def ready(self, instances: Sequence[LocalInstance], trainer: Worker | None) -> list[InstanceUp]:
        """Compiles; all instances are up on return."""
        config = self._parts.config
        lent = [worker for worker in instances if worker.on_demand and config.trainer.lent_memory == "host"]
        side_by_side([worker.engine.warmup for worker in lent])
        for worker in lent:
            worker.free()
        warmups = [worker.engine.warmup for worker in instances if worker not in lent]
        if (compiled := self._trainer) is not None:
            shape = batch_layout(config, compiled.shards)
            warmups.append(lambda: compiled.warmup(shape.rows, shape.tokens))
        side_by_side(warmups)
        return [instance_up(worker.instance, config) for worker in instances if worker.worker is not None]

    def close(self) -> None:
        """Everything ends with the process."""

    def _published(self, version: Version) -> Tree | None:
        return self.weights.get(version, None) if version in self.weights.versions else None


def trainer_worker(
    config: Config,
    side: TrainerSide,
    groups: GroupStore,
    weights: PublishedWeights,
    max_lag: int | None,
    outbox: Outbox,
) -> TrainerWorker:
    common = side.trainer, side.pack, groups, weights, max_lag, outbox
    also: dict[str, Any] = {"digest": side.digest, "probe": side.probe, "reload": side.reload}
    if updates_apart(config) > 1:
        per_step, says = config.orchestrator.groups_per_step, config.orchestrator.elastic
        return StreamingTrainerWorker(*common, groups_per_step=per_step, says_parts=says, **also)
    return TrainerWorker(*common, **also)


def nonzero_variance(group: ScoredGroup) -> bool:
    """DAPO's dynamic sampling: a group whose samples all score alike teaches nothing."""
    return bool(np.ptp(group.rewards) > 0)


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Runs the calls (compilations) on threads of their own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised below, on the caller's thread
            errors.append(error)

    # no daemons: an interpreter that ends while one compiles would abort
    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
