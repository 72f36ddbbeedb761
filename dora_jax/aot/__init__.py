"""A run's own programs, compiled for its TPU slice or GPUs without one: what each chip holds, computes and sends.

    python -m dora_jax.train --config=... --dry_run --aot

Consumes a resolved configuration that names its slice and a model that is only described; produces `Role`s, the
trainer's and an instance's, from XLA's own compiler for that chip (libtpu, the extra `aot`, or the plugin of the extra
`cuda`; no chip is touched). It estimates no cycles of a GPU.
Laws: every program comes from runtime/assembly/run.py, so that what is compiled here is what the run compiles; what
does not fit is refused with the fields that help; that a program compiles and fits says nothing of its being right or
fast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from dora_jax.aot import roles
from dora_jax.aot.roles import INSTANCE, PROGRAMS, PUBLISH, TRAINER, Compiled, Kernel, Role
from dora_jax.aot.slices import SlicePlacement, place_of, slice_devices
from dora_jax.base import chips
from dora_jax.config import Config, ConfigError, field_context
from dora_jax.costs import update as costs
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.grouped_experts import EVEN_LOAD
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import devices, memory, presets
from dora_jax.runtime.assembly import run
from dora_jax.trainer import flops, hlo, step
from dora_jax.trainer.recipe import abstract_inputs
from dora_jax.types import KV_WRITERS

ALL = sum(PROGRAMS.values(), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted call of the assembly with its abstract arguments."""

    name: str
    call: Any
    arguments: tuple
    static: dict[str, int] = dataclasses.field(default_factory=dict)
    loops: int = 1  # how often a loop runs whose count is only known at run time
    compiled: Any = None  # where the assembly has compiled it, in `compile_s`
    compile_s: float = 0.0
    pool_bytes: float = math.inf  # of the KV pool on a device,
    live_bytes: float = 0.0  # of what one kernel reads of it where samples have their mean length,
    new_bytes: float = 0.0  # and of what one writes
    needed: float = 0.0  # FLOPs of all chips that the model needs for full rows
    splash: float = 1.0  # the share of its blocks that splash attention computes
    # arrays of KV and of recurrent states on a device, by their dimensions, and the layers that share each
    pools: dict[tuple[int, ...], int] = dataclasses.field(default_factory=dict)


def compile_roles(
    config: Config,
    model: ModelConfig,
    *,
    vocab_limit: int = 0,
    eos_ids: tuple[int, ...] = (),
    only: Sequence[str] = ALL,
    done: Callable[[Compiled], None] = lambda one: None,
) -> list[Role]:
    """Trainer and instance of a resolved configuration; a minute or more for each program of a large model.

    vocab_limit: ids that the tokenizer knows; 0: every row of the embedding. only: the programs' first words. `done`
    hears of each. DoesNotFit where a chip has too little memory; ConfigError where the slice is none for this.
    """
    found = []
    for name, programs_of in ((TRAINER, _trainer), (INSTANCE, _instance)):
        if not set(only) & set(PROGRAMS[name]):
            continue
        place, compiled = place_of(config, name), []
        programs, held = programs_of(config, model, place, vocab_limit or model.vocab_size, eos_ids)
        for one in programs:
            if one.name.split()[0] in only:
                compiled.append(_compile(one, config, name, place))
                done(compiled[-1])
        held = {what: size * place.cores for what, size in held.items()}
        copies = memory.published_copies(config)
        held |= {f"{copies} published versions": copies * one.output_bytes for one in compiled if one.name == PUBLISH}
        found.append(dataclasses.replace(place.role(name), held=held, programs=tuple(compiled)))
    both = []
    apart = len(found) < 2 or config.cluster.launcher
    if not apart and devices.plan(len(slice_devices(config.slice)), config).shared:
        trainer, instance = found
        together, every = trainer.held | instance.held, trainer.programs + instance.programs
        both = [dataclasses.replace(trainer, name="trainer and instance", held=together, programs=every)]
    for role in [*found, *both]:
        if role.chip_bytes > role.chip.hbm_bytes:
            raise roles.refusal(config, role, role.chip_bytes)
    return found


# -------------------------------------------------------------- the programs


def _trainer(
    config: Config, model: ModelConfig, place: SlicePlacement, vocab_limit: int, _: tuple[int, ...]
) -> tuple[list[Program], dict[str, float]]:
    """Its programs, and what stays on a device."""
    recipe = run.trainer_recipe(config, model, place.mesh, vocab_limit)
    shape = run.batch_layout(config, sharding.row_shards(place.mesh))
    arguments = abstract_inputs(recipe, shape.rows, shape.tokens)
    publish = Program(
        name=PUBLISH,
        call=run.publishing_copy(config, model, place.mesh),
        arguments=(run.publishing_inputs(model, place.mesh, config.lora),),
    )
    splash = config.trainer.attention == "splash"
    update = Program(
        name="train",
        call=step.jitted_update(recipe),
        arguments=arguments,
        loops=config.trainer.micro_batches,
        needed=costs.model_flops(model, [shape.tokens] * shape.rows, frozen=config.lora.on),
        splash=costs.splash_share(shape.tokens, config.trainer.context, model.head_dim) if splash else 1.0,
    )
    state, arrays, *frozen = arguments
    held = {"masters": _held(state.params), "moments": _held(state.opt_state), "batch": _held(arrays)}
    held |= {"the base, which stays as it is": _held(frozen)} if frozen else {}
    return [update, publish], held


def _instance(
    config: Config, model: ModelConfig, place: SlicePlacement, vocab_limit: int, eos_ids: tuple[int, ...]
) -> tuple[list[Program], dict[str, float]]:
    calls, began = run.engine_calls(config, model, place.mesh, eos_ids, vocab_limit), time.monotonic()
    chosen: dict[str, Any] = {}
    if calls.chooses:  # the other calls take weights that lie as the decode call likes them best
        with roles.in_words(config, place.role(INSTANCE), "decode"):
            chosen["compiled"] = calls.decode_chosen
        chosen["compile_s"] = time.monotonic() - began
    programs = [
        Program(
            name=name,
            call=call,
            arguments=arguments,
            static=static,
            loops=config.rollout.decode_steps,
            **(chosen if name.startswith("decode") else {}),
        )
        for name, (call, arguments, static) in calls.programs().items()
    ]
    at = functools.partial(jax.tree.map, lambda x, where: x.update(sharding=where))
    laid_out = functools.partial(decoder.serving_layout, layout=calls.shapes.layout)
    published = jax.eval_shape(laid_out, run.published(config, model))
    placed = at(calls.abstract_pool, calls.pool_sharding)
    pages, states = (placed["pages"], placed["states"]) if calls.shapes.states else (placed, {})
    pools = {x.sharding.shard_shape(x.shape): model.linear_layers for x in states.values()}
    for row, x in enumerate(jax.tree.leaves(pages)):  # for a kernel, all layers with such rows share one array
        pools[x.sharding.shard_shape(x.shape)] = len(calls.kv.layers_of(row)) if calls.shapes.paged else 1
    # What a kernel of one layer reads, the mean over layers: rows that all hold a prompt of half its limit, and where
    # they decode, half of an answer of half its limit
    rollout, shapes = config.rollout, calls.shapes
    windows = memory.window_share(model, rollout) if model.windows else 0.0
    for i, one in enumerate(programs):
        kind, *sizes = one.name.split()
        rows = {"prefill": shapes.prefill_rows, "verify": shapes.verify_control(1)[0]}.get(kind, shapes.rows)
        rows = int(sizes[0]) if kind == "narrow" else rows
        context = rollout.max_prompt_tokens / 2 + (0 if kind == "prefill" else rollout.max_new_tokens / 4)
        seen = context - windows * max(context - max(model.windows, default=0), 0)
        new = rows * memory.token_bytes(model, rollout, config.model.dtype) / model.kv_layers
        programs[i] = dataclasses.replace(
            one, pool_bytes=_held(pages), live_bytes=seen * new, new_bytes=new, pools=pools
        )
    residents = config.rollout.residents
    versions = f"{residents} resident version{'s' if residents > 1 else ''}"
    held = {versions: residents * _held(calls.abstract_params)}
    if calls.adapters:
        base, adapters = map(_held, calls.abstract_params)
        held = {"base weights": base, versions: adapters}
    return programs, held | {"the incoming one": _held(at(published, calls.param_shardings)), "KV pool": _held(placed)}


def _held(tree: Any) -> float:
    """Bytes of the tree on one device, without what rests in host memory."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
            if x.sharding.memory_kind != "pinned_host"
        )
    )


def _compile(program: Program, config: Config, role: str, place: SlicePlacement) -> Compiled:
    began = time.monotonic()
    traced = program.call.trace(*program.arguments, **program.static)
    with roles.in_words(config, place.role(role), program.name):
        compiled = program.compiled or traced.lower(lowering_platforms=(place.platform,)).compile()
    compile_s = program.compile_s or time.monotonic() - began
    memory, text = compiled.memory_analysis(), hlo.CompiledText(compiled.as_text(), program.loops, EVEN_LOAD)
    per_chip = functools.partial(int.__mul__, place.cores)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # XLA's own sum of temporaries counts some twice where there are loops; what it holds against the chip is the peak
    temporary = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - outputs
    return Compiled(
        name=program.name,
        compile_s=compile_s,
        host_bytes=per_chip(memory.host_argument_size_in_bytes),
        argument_bytes=per_chip(memory.argument_size_in_bytes),
        temporary_bytes=per_chip(temporary + memory.generated_code_size_in_bytes),
        output_bytes=per_chip(outputs),
        flops=flops.traced_flops(traced.jaxpr.jaxpr, program.loops) / place.chips,
        sent={kind: hlo.Traffic(one.runs, per_chip(one.bytes)) for kind, one in text.collectives().items()},
        copied=text.copies(program.pools) if program.pools else None,
        model_s=text.cycles() / clock_hz if (clock_hz := roles.chip_of(place.slice_name).clock_hz) else 0.0,
        kernels=tuple(_kernels(program, text, flops.kernel_flops(traced.jaxpr.jaxpr), place)),
        chip=roles.chip_of(place.slice_name),
        links_bytes_per_s=chips.ici_bytes_per_s(chips.parse(place.slice_name)[0], place.chips),
        small_ops=sum(text.small_ops().values()) if program.name.startswith("decode") else 0.0,
        needed=program.needed / place.chips,
    )


def _kernels(
    program: Program, text: hlo.CompiledText, flops_of: dict[str, float], place: SlicePlacement
) -> Iterator[Kernel]:
    """Yield the kernels of a program. One that gets the pool of all layers reads its rows' pages of one layer, or
    writes their newest rows there."""
    chip = roles.chip_of(place.slice_name)
    for one in text.kernels():
        touched = program.new_bytes if one.name in KV_WRITERS else program.live_bytes
        unread = program.pool_bytes - touched if one.bytes >= one.runs * program.pool_bytes else 0.0
        done = place.cores * one.runs * flops_of.get(one.name, 0.0)
        done *= program.splash if one.name.startswith("splash") else 1.0
        moved = place.cores * (one.bytes - one.runs * unread)
        floor_s = max(done / chip.flops, moved / chip.hbm_bytes_per_s)
        yield Kernel(name=one.name, runs=one.runs, flops=done, bytes=moved, floor_s=floor_s)


# --------------------------------------------------------------- messages


def report(config: Config) -> None:
    """Prints what --aot adds to a dry run of a configuration as asked; ConfigError where the run would not fit."""
    with field_context("model.path"):
        model = presets.model_of(config)
    if model is None:
        raise ConfigError(f"model.path: {config.model.path!r} has no config.json; --aot needs it, or model.size")
    planned = presets.plan(config, presets.machines(config), model)
    known = Tokenizer.load(config.model.path) if (Path(config.model.path) / "tokenizer.json").is_file() else None
    print(
        "compiled from the run's assembly; a program that compiles and fits has been neither run nor timed:", flush=True
    )
    of_plan: dict[str, float] = {}
    if plan := planned.memory:
        with_pages = memory.total(plan.instance) + plan.pages_bytes
        of_plan = {TRAINER: memory.total(plan.trainer), INSTANCE: with_pages}
    for role in compile_roles(
        planned.config,
        model,
        vocab_limit=known.vocab_size if known else 0,
        eos_ids=known.eos_ids if known else (),
        done=lambda one: print(*roles.describe(one), sep="\n", flush=True),
    ):
        cores = chips.DEVICES_A_CHIP[chips.parse(role.slice_name)[0]]
        planned_gib = cores * of_plan[role.name] / roles.GIB if role.name in of_plan else 0.0
        print(roles.describe_role(role) + (f"; the plan has {planned_gib:.2f}" if planned_gib else ""), flush=True)
