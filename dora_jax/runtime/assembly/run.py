"""Assembles a run from its configuration: devices, model, task, engines, trainer, world.

The only place that knows every stage. What reads folders (tokenizer, weights, checkpoints) is imported where it is
needed: engine and trainer of weights in memory do without it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from dora_jax.base.lanes import doing
from dora_jax.buffer.layout import BatchShape, layout
from dora_jax.buffer.pack import TrainBatch, pack_step
from dora_jax.config import Config, RolloutSection, field_context
from dora_jax.models import decoder, lora, sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.grammar import Matcher
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.models.routes import RouteShape
from dora_jax.orchestrate.events import InstanceUp
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import devices
from dora_jax.publish import offered_copy
from dora_jax.rollout.device_calls import Calls
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import HostKV, observed
from dora_jax.rollout.shapes import shapes_of
from dora_jax.runtime.common.seams import Batches, MakeProbe, Pack, Tree
from dora_jax.tasks.mixture import cycle_of
from dora_jax.trainer.advantage import Prepare, ZeroWeights
from dora_jax.trainer.objective import may_start_early, needs_scores
from dora_jax.trainer.recipe import Recipe, new_recipe
from dora_jax.trainer.score import Answer, Masks, Rungs
from dora_jax.trainer.step import Probe, Trainer
from dora_jax.types import InstanceId, SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.models.tokenizer import Tokenizer


class EngineReplay:
    """Scores the trainer's samples with an engine's calls, for `rollout.exact`: `trainer.score.Replay`. The processes
    of the trainer make up replicas of an instance (plan/presets.py refuses what does not), each of which scores its
    share of the answers with an engine on as many devices. The weights are those of a published version: a copy in the
    engines' dtype in the serving layout, which all processes make in one call.

    Law: where the weights are those that drew an answer, its log-probs are the ones that sampling reported, bit for
    bit: the same compiled calls take the same positions at the same places, and a forced token enters as a drawn one;
    an adapter stands in the place among the others that its version had there; a token is scored by a call of as many
    rows as the one that drew it; an episode leaves its slot where a turn ended, and comes back with what was observed.
    """

    def __init__(
        self, model: ModelConfig, section: RolloutSection, mesh: jax.sharding.Mesh, base: Tree = None, **options: Any
    ):
        """base: the weights beside adapters, where versions are adapters. options: those of the engines."""
        if not section.exact:
            raise ValueError("an engine without rollout.exact takes no tokens to score")
        shapes = shapes_of(section)
        pages = shapes.slots * shapes.worst_pages(section.max_prompt_tokens, section.max_new_tokens)
        residents = 1 if base is None else section.residents
        held = dataclasses.replace(section, pages=min(section.pages, pages), residents=residents)
        here = mesh.local_devices
        self._span = max(section.tensor // len(here), 1)  # processes of a replica
        # within a replica the order of the devices is that of an instance, whose world its processes are
        devices = sorted(mesh.devices.flat, key=lambda device: device.process_index // self._span)
        self._replicas = len({device.process_index // self._span for device in devices})
        self._replica = here[0].process_index // self._span % self._replicas
        self._devices = np.reshape(np.array(devices, dtype=object), (-1, section.tensor))
        own = next(devices for devices in self._devices.tolist() if here[0] in devices)
        self._engine = Engine(model, held, sharding.make_mesh(own, 1, 1, section.tensor), **options)
        self.warmup = self._engine.warmup
        self._copied = offered_copy(str(np.dtype(options["dtype"])))
        self._laid_out: dict[jax.tree_util.PyTreeDef, Callable[[Tree], Tree]] = {}  # of versions, and of their base
        if base is not None:
            self._engine.residents.take_base(self._placed(base, self._engine.base_shardings))

    def _placed(self, masters: Tree, shardings: Tree) -> Tree:
        """Stacked masters, on the trainer's devices, on these shardings of the engine; every replica has a copy."""
        if (tree := jax.tree.structure(shardings)) not in self._laid_out:
            one = jax.tree.leaves(shardings)[0].mesh  # its first axis, "data", is 1, and counts the replicas here
            grid = self._devices.reshape(-1, *one.devices.shape[1:])
            every = Mesh(grid, one.axis_names, axis_types=one.axis_types)
            self._laid_out[tree] = jax.jit(
                functools.partial(decoder.serving_layout, layout=self._engine.shapes.layout),
                out_shardings=jax.tree.map(lambda where: NamedSharding(every, where.spec), shardings),
            )
        made = self._laid_out[tree](self._copied(masters))
        leaves = [
            jax.make_array_from_single_device_arrays(
                x.shape, where, [shard.data for shard in x.addressable_shards if shard.device in where.device_set]
            )
            for x, where in zip(jax.tree.leaves(made), jax.tree.leaves(shardings), strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)

    def __call__(
        self,
        params: Any,
        answers: Sequence[Answer],
        masks: Masks | None = None,
        version: Version = 0,
        rungs: Rungs | None = None,
    ) -> list[np.ndarray]:
        engine, everyone = self._engine, answers
        engine.load(version, self._placed(params, engine.param_shardings))
        masks = [np.ones(len(out_ids), bool) for _, out_ids in answers] if masks is None else masks
        rungs = [np.zeros(len(mask), np.int32) for mask in masks] if rungs is None else rungs
        mine = slice(self._replica, None, self._replicas)
        answers, masks, rungs = answers[mine], masks[mine], rungs[mine]
        # where each answer's runs of sampled tokens begin and end
        edges = [np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist() for mask in masks]
        drawn = [np.asarray(out_ids[mask], np.int32) for (_, out_ids), mask in zip(answers, masks, strict=True)]
        rungs = [of_answer[mask] for of_answer, mask in zip(rungs, masks, strict=True)]
        for i, (prompt_ids, _) in enumerate(answers):
            id, turn_tokens = SampleId(group_id=i, index=0), edges[i][1] if edges[i][2:] else 0
            engine.submit(id, prompt_ids, version, len(drawn[i]), turn_tokens)
            seq = engine.scheduler.seqs[id]
            seq.forced, seq.forced_rungs = drawn[i], rungs[i]
        reported: list[np.ndarray] = [np.zeros(0, np.float32)] * len(answers)
        while not engine.idle:
            result = engine.tick()
            for sample in result.finished:
                reported[sample.id.group_id] = sample.logprobs
            for turn in result.waiting:
                i, done = turn.id.group_id, len(turn.out_ids)
                if done not in edges[i][1:-1:2]:  # the last turn is over, or one that was longer there
                    reported[i] = turn.logprobs
                    engine.forget(turn.id)
                    continue
                start, stop = edges[i][edges[i].index(done) + 1 :][:2]
                engine.import_(dataclasses.replace(observed(turn, answers[i][1][done:start]), turn_tokens=stop - start))
                seq = engine.scheduler.seqs[turn.id]
                seq.forced, seq.forced_rungs = drawn[i], rungs[i]
        engine.drop(version)
        for i, (scored, of_turns) in enumerate(zip(reported, edges, strict=True)):
            if len(scored) != of_turns[-1]:
                raise RuntimeError(
                    f"{len(scored)} tokens of an answer of {of_turns[-1]} were scored: it ends earlier here"
                )
            reported[i] = np.pad(scored, (0, len(answers[i][1]) - len(scored)))  # what was observed at its end has none
        if self._replicas == 1:
            return reported
        # as integers, which no collective rounds
        bits = np.zeros((-(-len(everyone) // self._replicas), max(len(out_ids) for _, out_ids in everyone)), np.int32)
        for i, scored in enumerate(reported):
            bits[i, : len(scored)] = scored.view(np.int32)
        of_replicas = multihost_utils.process_allgather(bits)[:: self._span].view(np.float32)
        return [of_replicas[i % self._replicas, i // self._replicas, : len(out)] for i, (_, out) in enumerate(everyone)]


def new_engine(
    config: Config, tokenizer: Tokenizer, model: ModelConfig, mesh: Mesh, host: HostKV | None = None
) -> Engine:
    """It holds the weights of model.path, where versions are adapters of them. host: where KV without pages is, of
    all engines of the process."""
    engine = engine_of(
        config,
        model,
        mesh,
        eos_ids=tokenizer.eos_ids,
        vocab_limit=tokenizer.vocab_size,
        decode=tokenizer.decode,
        matcher=functools.partial(Matcher, tokenizer.path, tokenizer.eos_ids),
        host=host,
    )
    if config.lora.on:
        # the weights of model.path as they are published, for this engine
        from dora_jax.models import hf

        with field_context("model.path"):
            _, params = hf.load(config.model.path, engine.mesh, jnp.dtype(config.model.dtype))
        laid_out = functools.partial(decoder.serving_layout, layout=engine.shapes.layout)
        engine.residents.take_base(jax.jit(laid_out, out_shardings=engine.base_shardings)(params))
    return engine


def engine_of(
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    *,
    eos_ids: tuple[int, ...] = (),
    vocab_limit: int = 0,
    decode: Callable[[Sequence[int]], str] | None = None,
    matcher: Callable[[str], Matcher] | None = None,
    host: HostKV | None = None,
) -> Engine:
    """The engine of a resolved configuration. vocab_limit: ids that the tokenizer knows; 0: every row of the
    embedding."""
    return Engine(
        model,
        config.rollout,
        mesh,
        decode=decode,
        matcher=matcher,
        host=host,
        **engine_options(config, model, eos_ids, vocab_limit or model.vocab_size),
    )


def engine_calls(config: Config, model: ModelConfig, mesh: Mesh, eos_ids: tuple[int, ...], vocab_limit: int) -> Calls:
    """The calls of `engine_of`; the devices of the mesh may be descriptions."""
    return Calls(model, config.rollout, mesh, **engine_options(config, model, eos_ids, vocab_limit))


def engine_options(config: Config, model: ModelConfig, eos_ids: tuple[int, ...], vocab_limit: int) -> dict[str, Any]:
    """Keyword arguments of an engine, shared with its ahead-of-time compilation."""
    return {
        "routes": RouteShape.of(model) if config.trainer.routing_replay == "rollout" else None,
        "seed": config.seed,
        "eos_ids": tuple(eos_ids),
        "vocab_limit": vocab_limit,
        "dtype": jnp.dtype(config.model.dtype),
        "lora": config.lora,
    }


def new_trainer(config: Config, tokenizer: Tokenizer, mesh: Mesh, dump_dir: Path) -> Trainer:
    """It holds the weights of model.path, and the adapter of lora.path; dump_dir: the workdir."""
    from dora_jax.models import hf, peft
    from dora_jax.runtime.assembly.checkpoint_weights import check_base

    with field_context("model.path"):
        model, params = hf.load(config.model.path, mesh)
        hf.check_finite(config.model.path, params)
    adapter = None
    if config.lora.on:
        check_base(config, dump_dir / "checkpoints", params)
    if config.lora.path:
        with field_context("lora.path"):
            adapter = peft.load(config.lora.path, model, config.lora, config.seed)
    options: dict[str, Any] = {
        "vocab_limit": tokenizer.vocab_size,
        "eos_ids": tokenizer.eos_ids,
        "dump_dir": str(dump_dir),
    }
    return trainer_of(config, model, mesh, params, adapter=adapter, **options)


def trainer_of(
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    params: Tree,
    *,
    eos_ids: tuple[int, ...] = (),
    vocab_limit: int = 0,
    dump_dir: str | None = None,
    adapter: Tree | None = None,
) -> Trainer:
    """The trainer of a resolved configuration and of these weights (stacked), which it copies; see `engine_of`.
    adapter: the first one, where one is trained; None: a fresh one."""
    replay = None
    if config.rollout.exact:
        options = engine_options(config, model, eos_ids, vocab_limit or model.vocab_size)
        replay = EngineReplay(model, config.rollout, mesh, params if config.lora.on else None, **options)
    return Trainer(
        model,
        config.trainer,
        mesh,
        params,
        dump_dir=dump_dir,
        adapter=adapter,
        seed=config.seed,
        replay=replay,
        **_trainer_options(config, vocab_limit or model.vocab_size),
    )


def trainer_recipe(config: Config, model: ModelConfig, mesh: Mesh, vocab_limit: int) -> Recipe:
    """The recipe of `new_trainer`; the devices of the mesh may be descriptions."""
    return new_recipe(model, config.trainer, mesh, exact=config.rollout.exact, **_trainer_options(config, vocab_limit))


def _trainer_options(config: Config, vocab_limit: int) -> dict[str, Any]:
    return {
        "total_steps": config.steps,
        "dtype": config.model.dtype,
        "vocab_limit": vocab_limit,
        "temperature": config.rollout.temperature,
        "lora": config.lora,
        "tempered": config.serving.train,  # agents choose the temperature of a turn
    }


def published(config: Config, model: ModelConfig) -> Tree:
    """ShapeDtypeStructs of a version, stacked, in the engines' type."""
    dtype = jnp.dtype(config.model.dtype)
    return lora.abstract(model, config.lora, dtype) if config.lora.on else decoder.abstract_params(model, dtype)


def publishing_copy(config: Config, model: ModelConfig, mesh: Mesh) -> Callable[[Tree], Tree]:
    """The jit that copies the trainer's masters (`publishing_inputs` says where they lie) into what is offered."""
    masters = publishing_inputs(model, mesh, config.lora)
    return offered_copy(config.model.dtype, jax.tree.map(lambda x: x.sharding, masters))


def publishing_inputs(model: ModelConfig, mesh: Mesh, adapted: Lora = OFF) -> Tree:
    """What is trained, and so published: all weights, or an adapter."""
    shapes, specs = decoder.abstract_params(model), sharding.param_specs(model, mesh)
    if adapted.on:
        shapes, specs = lora.abstract(model, adapted), lora.specs(model, adapted, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, specs)


def partial_s(config: Config) -> float:
    """How often running samples report their tokens. A sample that goes on from its tokens may differ in the last bits
    from one that was never cut: not in mode sync, whose runs are the same bit for bit however often they are killed,
    and not with rollout.exact."""
    return 0.0 if config.orchestrator.synchronous or config.rollout.exact else config.journal.partial_s


def orchestrator_config(config: Config) -> OrchestratorConfig:
    limits = tuple((name, part.limit) for name, part in sorted(config.task.mix.items()))
    return OrchestratorConfig.of(
        config.orchestrator,
        config.rollout,
        total_steps=config.steps,
        updates=updates_apart(config),
        eval_every=config.eval.every,
        eval_groups=0 if config.serving.train else config.eval.prompts,  # users are nowhere held out
        eval_samples=config.eval.samples,
        task_cycle=cycle_of(config.task.mix),
        task_ratios=limits if any(limit != 1 for _, limit in limits) else (),
        task_lead=config.task.lead,
        task_adaptive=config.task.adaptive,
        lendable=devices.lendable(config),
        hold_versions=config.serving.hold_versions,
        hold_s=config.serving.hold_s,
    )


def instance_up(instance: InstanceId, config: Config) -> InstanceUp:
    rollout = config.rollout
    return InstanceUp(
        instance=instance,
        slots=rollout.slots,
        pages=rollout.pages,
        page_size=rollout.page_size,
        residents=rollout.residents,
    )


def updates_apart(config: Config) -> int:
    """Updates of a step that take their groups each for itself, as soon as they are there; 1: the step is one whole.

    Shuffled rewards are shuffled over all of it.
    """
    updates = config.trainer.updates
    divides = config.orchestrator.groups_per_step % updates == 0
    return updates if may_start_early(config.trainer) and divides and not config.task.shuffle_rewards else 1


def batch_layout(config: Config, shards: int) -> BatchShape:
    """The static shape of one optimizer update's batch, for so many data-parallel shards."""
    section, rollout = config.trainer, config.rollout
    samples = -(-config.orchestrator.groups_per_step // section.updates) * config.orchestrator.group_size
    samples *= 1 + config.environment.most_branches
    return layout(
        pack_tokens=section.pack_tokens,
        rows=section.rows,
        micro_batches=section.micro_batches,
        samples=samples,
        shards=shards,
        max_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        splits=max(section.row_splits, 1),
        share_prompts=section.share_prompts == "on",
        skip_zero_advantage=section.skip_zero_advantage,
    )


def packer(config: Config, trainer: Trainer, whole: bool = False) -> Pack:
    """(groups, base) -> the step's batches, one per optimizer update, all of one static shape, with the rows that this
    process holds; whole: with all rows.

    Where updates take their groups apart, as many batches as there are groups for, each packed when it is asked for.
    """
    shape = _with_columns(batch_layout(config, trainer.shards), config, trainer)
    shape = dataclasses.replace(shape, held=None if whole else trainer.held)
    updates = config.trainer.updates
    apart = config.orchestrator.groups_per_step // updates if updates_apart(config) > 1 else 0
    prepare = Prepare(config.trainer, config.rollout.max_new_tokens)

    def pack(groups: Sequence[ScoredGroup], base: Version) -> Batches:
        if config.task.shuffle_rewards:
            groups = shuffled(groups, config.seed, base)

        def packed(*taken: Sequence[ScoredGroup]) -> tuple[TrainBatch, ...]:
            with doing("pack"):
                return pack_step(taken, shape, prepare, trainer.score if needs_scores(config.trainer) else None)

        if apart:
            return (packed(groups[i : i + apart])[0] for i in range(0, len(groups), apart))
        return packed(*(groups[i::updates] for i in range(updates)))

    return pack


def _with_columns(shape: BatchShape, config: Config, trainer: Trainer) -> BatchShape:
    """The shape with the optional columns of the run's batches."""
    temperature = config.rollout.temperature if config.serving.train else None
    return dataclasses.replace(shape, routes=trainer.routes, temperature=temperature)


def prober(config: Config, trainer: Trainer) -> MakeProbe:
    """(group, version, its weights) -> what `trainer.step` takes as a probe."""
    rollout = config.rollout
    shape = layout(
        pack_tokens=config.trainer.pack_tokens,
        rows=0,
        micro_batches=1,
        shards=trainer.shards,
        samples=config.orchestrator.group_size * (1 + config.environment.most_branches),
        max_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        share_prompts=config.trainer.share_prompts == "on",
    )
    shape = _with_columns(shape, config, trainer)

    def probe(group: ScoredGroup, version: Version, weights: Tree) -> Probe:
        return Probe(pack_step([[group]], shape, ZeroWeights())[0], version, weights)

    return probe


def shuffled(groups: Sequence[ScoredGroup], seed: int, base: Version) -> list[ScoredGroup]:
    """Control experiment: the step's rewards, permuted among all its samples."""
    rewards = np.concatenate([g.rewards for g in groups])
    rewards = np.random.default_rng((seed, base)).permutation(rewards)
    split = np.split(rewards, np.cumsum([len(g.rewards) for g in groups])[:-1])
    return [dataclasses.replace(g, rewards=r) for g, r in zip(groups, split, strict=True)]
