"""A run's own programs, compiled for its TPU slice without one: what each chip holds, computes and sends.

    python -m dora_jax.train --config=... --dry_run --aot

Consumes a resolved configuration that names its slice and a model that is only described; produces `Role`s, the
trainer's and an instance's, from XLA's own compiler for that chip (libtpu, the extra `aot`; no TPU is touched).
Laws: every program comes from runtime/run.py, so that what is compiled here is what the run compiles; what does not
fit is refused with the fields that help; that a program compiles and fits says nothing of its being right or fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dora_jax import chips, devices, memory, presets, validate
from dora_jax.config import Config, ConfigError, blame
from dora_jax.models import decoder, sharding
from dora_jax.models.config import ModelConfig
from dora_jax.runtime import run
from dora_jax.tokenizer import Tokenizer
from dora_jax.trainer import flops, hlo, step

QUIET = {  # libtpu would ask a metadata server and lock the machine's chips; there are none
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
KERNEL_MARGIN = 2  # a kernel is charged so many times its floor: XLA does not know how long it takes
TRAINER, INSTANCE = "trainer", "instance"
PUBLISH = "publish"
PROGRAMS = {TRAINER: ("train", PUBLISH), INSTANCE: ("decode", "prefill", "read", "write")}
ALL = sum(PROGRAMS.values(), ())
GIB = 2**30


class DoesNotFit(ConfigError):
    """More memory than a chip has: a sentence with the fields that help."""


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
    pool: tuple[float, int] = (math.inf, 1)  # bytes of the KV pool on a device, and the layers that share it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom call on one chip, which XLA's estimate of the time leaves out; all its runs together."""

    name: str
    runs: int
    flops: float
    bytes: float
    floor_s: float  # the larger of FLOPs at the chip's peak and bytes at its memory's bandwidth

    @property
    def seconds(self) -> float:
        return KERNEL_MARGIN * self.floor_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program; bytes and FLOPs of one chip."""

    name: str
    argument_bytes: int  # also of those that are donated
    temporary_bytes: int  # with the program's code
    output_bytes: int  # that take no argument's place
    host_bytes: int
    flops: float  # of matrix products, kernels included
    sent: dict[str, hlo.Traffic]
    model_s: float  # XLA's estimate of the cycles at the chip's clock; neither kernels nor what is sent
    kernels: tuple[Kernel, ...]
    compile_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What stays on each chip of a trainer or an instance, and the programs that need room beside it."""

    name: str
    slice_name: str
    chips: int
    held: dict[str, float]  # bytes a chip, by what they are
    programs: tuple[Compiled, ...]

    @property
    def chip(self) -> chips.Chip:
        return _chip(self.slice_name)

    @property
    def work_bytes(self) -> int:
        """Of the neediest program, beside what is held."""
        return max(
            (one.temporary_bytes + (one.output_bytes if one.name != PUBLISH else 0) for one in self.programs), default=0
        )

    @property
    def chip_bytes(self) -> float:
        return sum(self.held.values()) + self.work_bytes


def installed() -> bool:
    """Whether libtpu is here."""
    return importlib.util.find_spec("libtpu") is not None


def slice_devices(name: str, field: str = "slice") -> list[Any]:
    """Descriptions of the slice's devices, in the order in which JAX would list them; ConfigError says why not."""
    if name in ("", "laptop"):
        raise ConfigError(f"{field}: {name or 'empty'}; --aot compiles for a TPU slice such as v5e-8")
    try:
        chip, _ = chips.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if chip in chips.GPUS:
        raise ConfigError(
            f"{field}: XLA compiles programs for {name} only where there is such a GPU; --aot is for TPUs"
        )
    if not installed():
        raise ConfigError(f"{field}: compiling for {name} needs libtpu: pip install 'dora_jax[aot]'")
    os.environ.update(QUIET)
    jax.config.update("jax_platforms", "cpu")  # libtpu only compiles here: it must not look for chips
    return list(topologies.get_topology_desc(topology_name=topology(name), platform="tpu").devices)


def topology(name: str) -> str:
    """v5e-64 -> v5e:8x8, v5p-16 -> v5p:2x2x2: dimensions as equal as powers of two can be, the longest last."""
    kind, number = chips.parse(name)
    dimensions = [1] * (2 if kind in chips.FLAT else 3)
    while number > 1:
        dimensions[dimensions.index(min(dimensions))] *= 2
        number //= 2
    dimensions.sort(reverse=kind not in chips.FLAT and dimensions[2] == 1)  # of three dimensions the least is 2x2x1
    return f"{kind}:{'x'.join(map(str, dimensions))}"


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
        place, compiled = _place(config, name), []
        programs, held = programs_of(config, model, place, vocab_limit or model.vocab_size, eos_ids)
        for one in programs:
            if one.name.split()[0] in only:
                compiled.append(_compile(one, config, name, place))
                done(compiled[-1])
        found.append(_role(config, name, place, held, compiled))
    for role in [*found, *_shared(config, found)]:
        if role.chip_bytes > role.chip.hbm_bytes:
            raise _refusal(config, role, role.chip_bytes)
    return found


# -------------------------------------------------------------- the programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the run would put a role."""

    slice_name: str
    mesh: jax.sharding.Mesh

    @property
    def cores(self) -> int:
        """Devices a chip."""
        return chips.DEVICES_A_CHIP[chips.parse(self.slice_name)[0]]

    @property
    def chips(self) -> int:
        return max(self.mesh.size // self.cores, 1)


def _chip(slice_name: str) -> chips.Chip:
    return chips.CHIPS[chips.parse(slice_name)[0]]


def _place(config: Config, role: str) -> _Place:
    cluster = config.cluster
    field = {TRAINER: "cluster.trainer_slice", INSTANCE: "cluster.replica_slice"}[role] if cluster.launcher else "slice"
    name = validate.get(config, field)
    found = slice_devices(name, field)
    if cluster.launcher:
        mine, shape = found, devices.trainer_mesh(len(found), config) if role == TRAINER else ()
        if role == INSTANCE:
            mine = found[: config.rollout.tensor]
    else:
        plan = devices.plan(len(found), config)
        mine, shape = [found[i] for i in (plan.trainer if role == TRAINER else plan.instances[0])], plan.trainer_mesh
    mesh = sharding.make_mesh(mine, *shape) if role == TRAINER else sharding.make_mesh(mine, 1, 1, len(mine))
    return _Place(slice_name=name, mesh=mesh)


def _trainer(
    config: Config, model: ModelConfig, place: _Place, vocab_limit: int, _: tuple[int, ...]
) -> tuple[list[Program], dict[str, float]]:
    """Its programs, and what stays on a device."""
    recipe = run.trainer_recipe(config, model, place.mesh, vocab_limit)
    shape = run.batch_layout(config, place.mesh.shape["data"] * place.mesh.shape["fsdp"])
    state, arrays = step.abstract_inputs(recipe, shape.rows, shape.tokens)
    publish = Program(
        name=PUBLISH,
        call=run.publishing_copy(config, model, place.mesh),
        arguments=(run.publishing_inputs(model, place.mesh),),
    )
    update = Program(
        name="train", call=step.jitted_update(recipe), arguments=(state, arrays), loops=config.trainer.micro_batches
    )
    held = {"masters": _held(state.params), "moments": _held(state.opt_state), "batch": _held(arrays)}
    return [update, publish], held


def _instance(
    config: Config, model: ModelConfig, place: _Place, vocab_limit: int, eos_ids: tuple[int, ...]
) -> tuple[list[Program], dict[str, float]]:
    calls, began = run.engine_calls(config, model, place.mesh, eos_ids, vocab_limit), time.monotonic()
    chosen: dict[str, Any] = {}
    if calls.chooses:  # the other calls take weights that lie as the decode call likes them best
        with _in_words(config, INSTANCE, "decode", place):
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
    published = jax.eval_shape(
        functools.partial(decoder.serving_layout, layout=calls.shapes.layout),
        decoder.abstract_params(model, jnp.dtype(config.model.dtype)),
    )
    pool = _held(at(calls.abstract_pool, calls.pool_sharding))
    programs = [dataclasses.replace(one, pool=(pool, model.n_layers)) for one in programs]
    residents = config.rollout.residents
    held = {
        f"{residents} resident version{'s' if residents > 1 else ''}": residents * _held(calls.abstract_params),
        "the incoming one": _held(at(published, calls.param_shardings)),
        "KV pool": pool,
    }
    return programs, held


def _role(config: Config, name: str, place: _Place, held: dict[str, float], compiled: list[Compiled]) -> Role:
    held = {what: size * place.cores for what, size in held.items()}
    copies = memory.published_copies(config)
    held |= {f"{copies} published versions": copies * one.output_bytes for one in compiled if one.name == PUBLISH}
    return Role(name=name, slice_name=place.slice_name, chips=place.chips, held=held, programs=tuple(compiled))


def _shared(config: Config, found: list[Role]) -> Iterator[Role]:
    """Trainer and instance together, where they share chips."""
    apart = len(found) < 2 or config.cluster.launcher
    if not apart and devices.plan(len(slice_devices(config.slice)), config).shared:
        yield dataclasses.replace(
            found[0],
            name="trainer and instance",
            held=found[0].held | found[1].held,
            programs=found[0].programs + found[1].programs,
        )


def _held(tree: Any) -> float:
    """Bytes of the tree on one device, without what rests in host memory."""
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
            if x.sharding.memory_kind != "pinned_host"
        )
    )


def _compile(program: Program, config: Config, role: str, place: _Place) -> Compiled:
    began = time.monotonic()
    traced = program.call.trace(*program.arguments, **program.static)
    with _in_words(config, role, program.name, place):
        compiled = program.compiled or traced.lower(lowering_platforms=("tpu",)).compile()
    compile_s = program.compile_s or time.monotonic() - began
    memory, text = compiled.memory_analysis(), hlo.Program(compiled.as_text(), program.loops)
    per_chip = functools.partial(int.__mul__, place.cores)
    return Compiled(
        name=program.name,
        compile_s=compile_s,
        host_bytes=per_chip(memory.host_argument_size_in_bytes),
        argument_bytes=per_chip(memory.argument_size_in_bytes),
        temporary_bytes=per_chip(memory.temp_size_in_bytes + memory.generated_code_size_in_bytes),
        output_bytes=per_chip(memory.output_size_in_bytes - memory.alias_size_in_bytes),
        flops=flops.traced_flops(traced.jaxpr.jaxpr, program.loops) / place.chips,
        sent={kind: hlo.Traffic(one.runs, per_chip(one.bytes)) for kind, one in text.collectives().items()},
        model_s=text.cycles() / _chip(place.slice_name).clock_hz,
        kernels=tuple(_kernels(program, text, flops.kernel_flops(traced.jaxpr.jaxpr), place)),
    )


def _kernels(program: Program, text: hlo.Program, flops_of: dict[str, float], place: _Place) -> Iterator[Kernel]:
    """A kernel that is handed the pool of all layers reads the pages of one, all of them at most."""
    chip, (pool, layers) = _chip(place.slice_name), program.pool
    for one in text.kernels():
        other_layers = pool * (1 - 1 / layers) if one.bytes >= one.runs * pool else 0.0
        done = place.cores * one.runs * flops_of.get(one.name, 0.0)
        moved = place.cores * (one.bytes - one.runs * other_layers)
        floor_s = max(done / chip.flops, moved / chip.hbm_bytes_per_s)
        yield Kernel(name=one.name, runs=one.runs, flops=done, bytes=moved, floor_s=floor_s)


# -------------------------------------------------------------- the verdict


OUT_OF_MEMORY = (  # XLA:TPU's two ways to say it: what is needed, what there is
    re.compile(r"HLO temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)"),
    re.compile(r"[Uu]sed ([\d.]+)G of ([\d.]+)G hbm"),
)


@contextlib.contextmanager
def _in_words(config: Config, role: str, program: str, place: _Place) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise _verdict(error, config, role, program, place) from error


def _verdict(error: Exception, config: Config, role: str, program: str, place: _Place) -> Exception:
    """XLA's lack of memory as one sentence; anything else is no matter of size and stays as it is."""
    said = str(error)
    if "RESOURCE_EXHAUSTED" in said and re.search(r"space[ =]smem", said):
        rollout = config.rollout
        return DoesNotFit(
            f"rollout.page_size: the page table of {program}, for {rollout.slots} slots, is larger "
            f"than the scalar memory of {place.slice_name}: raise rollout.page_size (now "
            f"{rollout.page_size}), or lower rollout.slots or rollout.decode_rows"
        )
    used = next(filter(None, (pattern.search(said) for pattern in OUT_OF_MEMORY)), None)
    if used is None:
        return error
    empty = Role(name=role, slice_name=place.slice_name, chips=place.chips, held={}, programs=())
    return _refusal(config, empty, place.cores * float(used[1]) * GIB, program)


def _refusal(config: Config, role: Role, needed: float, program: str = "") -> DoesNotFit:
    """What is too large, and the fields that make it smaller, those of the largest part first."""
    parts = dict(sorted({**role.held, "the programs' work": role.work_bytes}.items(), key=lambda part: -part[1]))
    listed = ", ".join(f"{what} {size / GIB:.1f}" for what, size in parts.items() if size >= 0.05 * GIB)
    advice = _trainer_advice(config, parts) if role.name == TRAINER else _instance_advice(config, parts)
    return DoesNotFit(
        f"{role.name}: {program or 'all together'} needs {needed / GIB:.1f} GiB a chip on {role.slice_name}, which has "
        f"{role.chip.hbm_bytes / GIB:.1f}{f' ({listed})' if listed and not program else ''}: {', or '.join(advice)}"
    )


def _trainer_advice(config: Config, parts: dict[str, float]) -> list[str]:
    t = config.trainer
    work = [f"raise trainer.micro_batches (now {t.micro_batches})"]
    work += ["set trainer.remat=full"] if t.remat != "full" else []
    state = ["set trainer.moments=bfloat16"] if t.moments == "float32" else []
    state += ["set trainer.optimizer_memory=host"] if t.optimizer_memory == "device" else []
    state += ["raise trainer.fsdp or trainer.tensor with a larger slice"]
    return work + state if next(iter(parts)) == "the programs' work" else state + work


def _instance_advice(config: Config, parts: dict[str, float]) -> list[str]:
    rollout, largest = config.rollout, next(iter(parts))
    pool = [f"lower rollout.pages (now {rollout.pages})"]
    weights = [f"raise rollout.tensor (now {rollout.tensor})"]
    weights += [f"lower rollout.residents (now {rollout.residents})"] if rollout.residents > 1 else []
    work = [f"lower rollout.slots (now {rollout.slots}) or rollout.prefill_tokens (now {rollout.prefill_tokens})"]
    order = {"KV pool": pool + weights + work, "the programs' work": work + weights + pool}
    return order.get(largest, weights + pool + work)


# --------------------------------------------------------------- what is said


def report(config: Config) -> None:
    """Prints what --aot adds to a dry run of a configuration as asked; ConfigError where the run would not fit."""
    with blame("model.path"):
        model = presets.model_of(config)
    if model is None:
        raise ConfigError(f"model.path: {config.model.path!r} has no config.json; --aot needs it, or model.size")
    config, _ = presets.resolve(config, presets.machines(config), model)
    known = Tokenizer.load(config.model.path) if (Path(config.model.path) / "tokenizer.json").is_file() else None
    print(
        "compiled from the run's assembly; a program that compiles and fits has been neither run nor timed:", flush=True
    )
    for role in compile_roles(
        config,
        model,
        vocab_limit=known.vocab_size if known else 0,
        eos_ids=known.eos_ids if known else (),
        done=lambda one: print(*describe(one), sep="\n", flush=True),
    ):
        print(describe_role(role), flush=True)


def describe(one: Compiled) -> list[str]:
    """Lines of a dry run."""
    sent = ", ".join(f"{kind} {t.bytes / 1e9:.2f} GB in {t.runs}" for kind, t in sorted(one.sent.items()))
    host = f", {one.host_bytes / GIB:.2f} in host memory" if one.host_bytes else ""
    return [
        (
            f"  {one.name:12s} arguments {one.argument_bytes / GIB:.2f}, temporaries {one.temporary_bytes / GIB:.3f}, "
            f"outputs {one.output_bytes / GIB:.2f} GiB{host}; {one.flops / 1e12:.2f} TFLOP; sends {sent or 'nothing'}; "
            f"model {one.model_s:.4g} s; compiled in {one.compile_s:.0f} s"
        ),
        *(
            f"    kernel {k.name} x {k.runs}: {k.flops / 1e12:.2f} TFLOP, {k.bytes / 1e9:.2f} GB, charged "
            f"{k.seconds:.4g} s"
            for k in one.kernels
        ),
    ]


def describe_role(role: Role) -> str:
    parts = ", ".join(f"{what} {size / GIB:.2f}" for what, size in role.held.items())
    return (
        f"  {role.name} on {role.chips} chips of {role.slice_name}: {role.chip_bytes / GIB:.2f} of "
        f"{role.chip.hbm_bytes / GIB:.2f} GiB a chip ({parts}, the programs' work {role.work_bytes / GIB:.2f})"
    )
