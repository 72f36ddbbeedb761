"""What a platform chooses where the configuration leaves a field open: types, kernels, sizes, options. No JAX.

Consumes a `config.Config` as asked, the machines of the trainer and of the instances, and the model's sizes where they
are known; produces a `Plan`: a Config in which nothing is open, and a `Choice` with its reason for each field that it
filled in. A command line makes one plan: `validate.read` without the model, for the rules between fields, then
`with_model` adds the pages and the memory; a run makes its own, of the devices that JAX finds (`validate.settle`).
Every stage gets the resolved Config. Trainer fields follow the trainer's machine, rollout fields the instances'.
Laws: what the user sets is kept; the same configuration, machines and model give the same choices, in every process of
a run; a CPU keeps what is tuned for it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dora_jax import config as configs
from dora_jax.base import chips
from dora_jax.base.chips import Machine
from dora_jax.config import (
    Config,
    ConfigError,
    ModelSection,
    OrchestratorSection,
    RolloutSection,
    SftSection,
    TrainerKernel,
    TrainerSection,
)
from dora_jax.models import families
from dora_jax.models.families.config import Experts, Latent, ModelConfig
from dora_jax.models.hf_config import read_config
from dora_jax.plan import budget, devices, memory
from dora_jax.plan.budget import Budget, Machines
from dora_jax.trainer import objective

OPEN: tuple[Any, ...] = ("auto", "", 0, {})  # the values that leave a field to the platform
MIB = 2**20
MAX_LOGITS_BYTES = 1024 * MIB
WARM_START_BYTES = 16  # of each parameter: weight, gradient and two moments in float32
LOGITS_SHARE = 16  # an array of logits takes at most 1/16 of a device's memory
SCAN = "of a mixture: on a CPU, gradients of gathers cost more than products of no use"
BLOCKS = "of a mixture: a CPU multiplies a few tokens by a matrix as it reads it"
RAGGED_DOT = "of a mixture: one grouped product of the tokens in the order of their experts"
MEGABLOX = "of a mixture: XLA's gradient of ragged_dot multiplies every expert with every token on a TPU"
# Fields of trainers that take less and less memory, for configurations that look for one that fits. None rests moments
# in host memory: of Gemma 3 27B on v5p-32 XLA:TPU holds all of them on the device through the micro-batches
LEAN = tuple({"moments": moments, "tensor": tensor} for moments in ("float32", "bfloat16") for tensor in (1, 2))
PAGE_SIZES = (64, 128, 256, 512)  # tokens, on accelerators
# kernel -> platforms
SINKS = ("reference", "gpu")  # kernels with a place for them, as ops/attention.py has it
KERNELS = {"reference": ("cpu", "tpu", "gpu"), "tpu": ("tpu",), "tokamax": ("tpu",), "gpu": ("gpu",)}
TRAINER_OPTIONS = {  # platform -> XLA's options of the update
    "tpu": (
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
        "weights are gathered whole: windowed einsums send partial sums, twice the bytes",
    )
}
ROLLOUT_OPTIONS = {  # chip -> XLA's options of the engine's calls
    "tpu7x": (
        {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0},
        "weights keep the tiles that they come in, where each call would tile them anew",
    )
}
NONE: tuple[dict[str, Any], str] = ({}, "")
UNKNOWN = Machines(Machine(), Machine())
LADDER_ROWS = 16  # of a decode dispatch, from which on narrower ones are worth a compilation
SLOTS = 32  # of an instance on a CPU, and the fewest that are chosen elsewhere
SLOTS_MULTIPLE = 8  # rows of a TPU's tile
ALONE = 0.25  # orchestrator.inflight on one device
ROW, ROW_MULTIPLE = 1024, 512  # tokens of a packed row: the fewest, and what divides them
CPU_ROW, CPU_ROW_MULTIPLE = 256, 128
ROW_SPLITS, SHORT_ROW = (2, 4, 8), 4096  # of a row of short samples: into so many, of at least so many tokens
NARROW_PARAMETERS = 32 << 20  # of a model whose projections a CPU multiplies in bfloat16: smaller ones lie in caches
OF_MODEL = (  # what a model decides, where it is open
    "rollout.weights",
    "trainer.matmul",
    "rollout.slots",
    "rollout.pages",
    "rollout.window_pages",
    "trainer.share_prompts",
    "trainer.row_splits",
)

Presets = dict[str, tuple[Any, str]]  # field of a section -> value, reason
Section = TypeVar("Section", ModelSection, OrchestratorSection, RolloutSection, TrainerSection)
Role = TypeVar("Role", RolloutSection, TrainerSection)


class Choice(NamedTuple):
    field: str
    value: Any
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration as asked, and as its machines and its model complete it."""

    asked: Config
    machines: Machines
    config: Config  # nothing is open
    choices: tuple[Choice, ...]  # what was filled in and why, and what rollout.exact does with it
    model: ModelConfig | None = None  # None: not known yet

    @functools.cached_property
    def memory(self) -> Budget | None:
        """None where the machine or the model is not known yet. ConfigError where the meshes do not fit the devices."""
        return budget.of(self.config, self.machines, self.model)


def machines(config: Config) -> Machines:
    """The machines that the configuration names; CPUs where it names none. ValueError where a name is unknown.

    The controller of a cluster asks here too, so that it reports the pages that its instances have.
    """
    cluster, virtual = config.cluster, config.cluster.devices_per_host
    if cluster.launcher:
        return Machines(
            _named("cluster.trainer_slice", cluster.trainer_slice, virtual * cluster.trainer_hosts),
            _named("cluster.instance_slice", cluster.instance_slice, virtual * cluster.hosts_per_instance),
        )
    found = _named("slice", config.slice, 0 if config.slice else config.cpu_devices)
    if found.platform == "cpu" and config.slice and config.cpu_devices:
        # The same memory as so many virtual devices
        count, memory_bytes = config.cpu_devices, found.memory_bytes * found.devices / config.cpu_devices
        found = dataclasses.replace(found, devices=count, host_devices=count, memory_bytes=memory_bytes)
    return Machines(found, found)


def here(config: Config) -> Machines:
    """`machines` for this process; where the configuration names none, the devices that JAX finds.

    ConfigError where the devices are not those of the slice that it names.
    """
    if config.cluster.launcher:
        return machines(config)
    if config.slice:
        devices.check_slice("slice", config.slice)
        return machines(config)
    return Machines(found := devices.found(), found)


def model_of(config: Config) -> ModelConfig | None:
    """The sizes of the model that will run, from its folder or from model.size; None: not known yet.

    ValueError in a sentence where the folder's config.json is not one that the decoder computes.
    """
    if (Path(config.model.path) / "config.json").is_file():
        return read_config(config.model.path)
    return families.KNOWN.get(config.model.size)


def plan(config: Config, found: Machines, model: ModelConfig | None = None) -> Plan:
    """The configuration with every open field filled in."""
    asked, choices = config, list[Choice]()
    rollout = _filled("rollout", config.rollout, _rollout(config.rollout, found.instances), choices)
    residents: Presets = {"residents": (1, "each is a copy of all weights")}
    if config.lora.on:
        versions = config.orchestrator.max_versions + 1
        why = "adapters take little: all live versions are on every instance, and the next one"
        residents = {"residents": (versions, why)}
    elif not config.rollout.instances and found.instances.devices <= 1:
        residents = {"residents": (2, "the only device reads the weights once a step for all samples: one instance")}
    rollout = _filled("rollout", rollout, residents, choices if residents["residents"][0] != 1 else [])
    rollout = _filled("rollout", rollout, _ladder(config, found.instances), choices)
    if rollout.exact:
        rungs = rollout.ladder == "on" or rollout.narrow_rows
        by = "a dispatch of as many rows as drew it" if rungs else "a dispatch of the shape that drew all"
        choices.append(Choice("rollout.exact", True, f"the trainer scores each token by {by}"))
    dtype = "bfloat16", "matrix units take it, and weights and KV take half the memory"
    if all(machine.platform == "cpu" for machine in found):
        dtype = "float32", "a CPU is no faster in bfloat16, but for projections (trainer.matmul)"
    model_section = _filled("model", config.model, {"dtype": dtype}, choices)
    trainer = _filled("trainer", config.trainer, {"pack_tokens": _row(config, found.trainer)}, choices)
    trainer = _filled("trainer", trainer, _trainer(trainer, found.trainer, model_section.dtype), choices)
    load = OrchestratorSection().inflight, "trainer and rollouts seldom wait for each other"
    whole_steps = config.task.mix or config.orchestrator.mode == "dora_paper"
    if found.trainer.devices <= 1 and not (config.cluster.launcher or whole_steps):
        least = 1 / config.orchestrator.groups_per_step
        load = max(ALONE, least), "the only device is busy without more, and few samples are of earlier versions"
    orchestrator = _filled("orchestrator", config.orchestrator, {"inflight": load}, choices)
    config = dataclasses.replace(
        config, orchestrator=orchestrator, rollout=rollout, model=model_section, trainer=trainer
    )
    done = Plan(asked=asked, machines=found, config=config, choices=tuple(choices), model=model)
    return with_model(done, model)


def is_recurrent(config: Config, model: ModelConfig | None) -> bool:
    """Whether the run's model has linear layers; where it is not known, whether a warm start would make one."""
    if model is not None:
        return model.linear_layers > 0
    family = next((each for each in families.FAMILIES if each.model_type == config.sft.family), None)
    return bool(config.sft.out and family and any(kind.linear for kind in family.further.get("kinds", ())))


def with_model(planned: Plan, model: ModelConfig | None) -> Plan:
    """The plan for this model: with prompts shared in rows where it can share them, with slots, and with KV pages:
    those that were asked for, those that fit beside the model, or where that is not known those that the slots need."""
    asked = {name: getattr(planned.asked.rollout, name) for name in ("slots", "pages", "window_pages", "weights")}
    choices = [choice for choice in planned.choices if choice.field not in OF_MODEL]
    open_again = {name: getattr(planned.asked.trainer, name) for name in ("share_prompts", "matmul", "row_splits")}
    trainer = dataclasses.replace(planned.config.trainer, **open_again)
    shared = _share_prompts(trainer, is_recurrent(planned.config, model))
    narrow = {role: _narrow(planned.config, machine, model) for role, machine in planned.machines._asdict().items()}
    trainer = _filled("trainer", trainer, {"share_prompts": shared, "matmul": narrow["trainer"]}, choices)
    splits = _row_splits(trainer, planned.machines.trainer)
    trainer = _filled("trainer", trainer, {"row_splits": splits}, choices if splits[0] > 1 else [])
    rollout, on_cpu = planned.config.rollout, planned.machines.instances.platform == "cpu"
    config = dataclasses.replace(planned.config, trainer=trainer, rollout=dataclasses.replace(rollout, **asked))
    slots = SLOTS, "a CPU takes as long for more"
    if not on_cpu and not asked["slots"] and (room := budget.of(config, planned.machines, model)):
        count = room.slots_for(SLOTS, rollout.decode_rows or SLOTS_MULTIPLE)
        slots = count, f"{room.demand} are in flight, as far as pages hold them, and {SLOTS} at least"
    rollout = _filled("rollout", config.rollout, {"slots": slots, "weights": narrow["instances"]}, choices)
    planned = dataclasses.replace(planned, config=dataclasses.replace(config, rollout=rollout), model=model)
    pages, why, local = memory.enough_pages(rollout), "every slot can hold a longest sample", 0
    if not asked["pages"] and not on_cpu and planned.memory:
        why = f"{rollout.memory_share:.0%} of what weights and programs leave of a device's memory"
        pages, local = planned.memory.pools
        pages = max(pages, 1)
    if planned.model and not local:
        local = memory.window_pages(planned.model, dataclasses.replace(rollout, pages=asked["pages"] or pages))
    found = {"pages": (pages, why), "window_pages": (local, "what a window has passed is given back")}
    rollout = _filled("rollout", rollout, found, choices)
    return dataclasses.replace(
        planned, config=dataclasses.replace(planned.config, rollout=rollout), choices=tuple(choices)
    )


def resolve(config: Config, found: Machines, model: ModelConfig | None = None) -> tuple[Config, tuple[Choice, ...]]:
    """(the configuration with every open field filled in, what was filled in and why)."""
    planned = plan(config, found, model)
    return planned.config, planned.choices


def problems(planned: Plan) -> list[str]:
    """One sentence for each thing that a plan asks and its machines lack; it names the field.

    ConfigError where the meshes do not fit the devices.
    """
    return [*_refusals(planned)] or (budget.problems(planned.memory) if planned.memory else [])


def fresh_model(sft: SftSection, vocab_size: int) -> ModelConfig:
    """The model that a warm start without `sft.init` makes. ValueError where the sizes make no model."""
    known, sizes = families.family(sft.family), ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff")
    parts: dict[str, Any] = {name: getattr(sft, name) for name in sizes}
    for name, asked, has in (
        ("experts", sft.experts, known.mixture is not None),
        ("kv_rank", sft.kv_rank, known.latent),
        ("window", sft.window, known.windowed is not None),
    ):
        if bool(asked) != has:
            wrong = f"is {asked}, and {sft.family} has none" if asked else f"is 0, and {sft.family} needs it"
            raise ValueError(f"sft.{name} {wrong}")
    if known.mixture is not None:
        parts["experts"] = Experts(
            count=sft.experts,
            per_token=sft.experts_per_token,
            width=sft.expert_width,
            shared=sft.shared_experts,
            zero=sft.zero_experts,
            first_dense=sft.dense_layers,
            **known.mixture,
        )
    if known.latent:
        nope = sft.head_dim - sft.rope_dim
        parts["latent"] = Latent(
            kv_rank=sft.kv_rank,
            q_rank=sft.q_rank,
            rope_dim=sft.rope_dim,
            nope_dim=nope,
            v_dim=nope,
            scaled=known.shortcut,
        )
    if known.windowed is not None:
        parts |= known.windowed(parts, sft.window)
    if known.fresh is not None:
        parts |= known.fresh(parts)
    return families.new_config(sft.family, vocab_size=vocab_size, **parts)


def warm_start_problems(config: Config, found: Machines) -> list[str]:
    """Why the new model of a warm start does not fit one device, since every device holds the whole model.

    Where the machine is not known yet, the largest known device counts.
    """
    sft = config.sft
    if sft.init or not sft.out:
        return []
    try:
        model = fresh_model(sft, sft.vocab_size or 1)
    except ValueError as error:
        return [f"sft: {str(error).removeprefix('sft.')}"]
    params = model.matrix_params + model.gain_params
    memory_bytes = found.trainer.memory_bytes or max(
        *(chip.hbm_bytes for chip in chips.CHIPS.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if WARM_START_BYTES * params <= memory_bytes:
        return []
    where = f"a device of {found.trainer}" if found.trainer.memory_bytes else "the largest device"
    return [
        (
            f"sft: a new model of {params:.1e} parameters, of sft.d_model, n_layers, n_heads, head_dim and d_ff, takes "
            f"{WARM_START_BYTES * params / memory.GIB:,.0f} GiB to train, and {where} has "
            f"{memory_bytes / memory.GIB:,.0f}"
        )
    ]


def filled(config: Config) -> Config:
    """The configuration with nothing left open, for the devices that this process computes on; starts JAX."""
    return plan(config, here(config), model_of(config)).config


def micro_batches(tree: Any) -> int:
    """For config files: the fewest micro-batches with which the ConfigDict `tree` fits its slices and its model.

    The pages have room for its slots then. 0: no number of micro-batches fits.
    """
    return _micro_batches(tree)[0]


def shortfall(tree: object) -> str:
    """For config files: what the ConfigDict `tree` lacks where `micro_batches` finds none, with its bytes."""
    return _micro_batches(tree)[1]


def _micro_batches(tree: object) -> tuple[int, str]:
    config = configs.from_tree(tree)
    found, model = machines(config), families.KNOWN.get(config.model.size)
    try:
        planned = plan(config, found, model).memory
    except ConfigError as error:  # the meshes do not take these devices
        return 0, str(error)
    if planned is None:
        raise ValueError("model.size and the slices have to be named for a memory plan")
    count = planned.micro_batches
    planned = planned.with_trainer(micro_batches=count or planned.rows)
    if wrong := budget.problems(planned):
        return 0, "; ".join(line.partition(": ")[2].partition("; ")[0] for line in wrong)
    if not count:
        needed, has = memory.total(planned.trainer) / memory.GIB, planned.machines.trainer.memory_bytes / memory.GIB
        return 0, f"an update needs {needed:.1f} GiB of the {has:.1f} of a device, and less than a tenth is spare"
    if planned.slots < (slots := config.rollout.slots or SLOTS):
        return 0, f"the pages hold {planned.slots} samples, and rollout.slots are {slots}"
    return count, ""


def table(choices: tuple[Choice, ...]) -> list[str]:
    """One line of text a choice: field, value, reason."""
    return [f"  {f'{choice.field}={choice.value}':38s}  {choice.reason}" for choice in choices]


def on_cpu(section: Role) -> Role:
    """Fill in a section that belongs to no Config, as for a CPU."""
    if isinstance(section, TrainerSection):
        return _filled("", section, _trainer(section, Machine(), "float32"), [])
    section = _filled("", section, {**_rollout(section, Machine()), "slots": (SLOTS, "")}, [])
    return _filled("", section, {"pages": (memory.enough_pages(section), ""), "residents": (1, "")}, [])


# ---------------------------------------------------------------- private


def _named(field: str, name: str, virtual_devices: int) -> Machine:
    if virtual_devices:  # CPU devices; the slice of a cluster only places its processes then
        return Machine(devices=virtual_devices)
    try:
        return chips.machine(name) if name else Machine()
    except ValueError as error:
        raise ValueError(f"{field}: {str(error).removeprefix('slice ')}") from error


def _filled(prefix: str, section: Section, presets: Presets, choices: list[Choice]) -> Section:
    filled = {name: found for name, found in presets.items() if getattr(section, name) in OPEN and found[0] not in OPEN}
    choices += [Choice(f"{prefix}.{name}", value, reason) for name, (value, reason) in filled.items()]
    return dataclasses.replace(section, **{name: value for name, (value, _) in filled.items()})


def _row(config: Config, machine: Machine) -> tuple[int, str]:
    """Tokens of a packed row that holds a longest sample."""
    least, multiple, why = ROW, ROW_MULTIPLE, "longer rows cost no more"
    if machine.platform == "cpu":
        least, multiple, why = CPU_ROW, CPU_ROW_MULTIPLE, "scores grow with the square of a row, other samples' too"
    multiple *= config.trainer.context
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens - 1  # the last is only a target
    return -(-max(longest, least) // multiple) * multiple, why


def _narrow(config: Config, machine: Machine, model: ModelConfig | None) -> tuple[str, str]:
    """The type in which a CPU multiplies projections, where it is not the model's."""
    pays = model is not None and machine.bfloat16 and model.matrix_params >= NARROW_PARAMETERS
    if not pays or config.model.dtype != "float32" or config.trainer.context > 1:
        return "", ""
    return "bfloat16", "this CPU has instructions that multiply it; sums are float32"


def _ladder(config: Config, machine: Machine) -> Presets:
    """Whether few samples take narrower decode dispatches, by `auto`."""
    rollout, on, why = config.rollout, False, "few samples take a narrower dispatch where its measured time pays"
    if machine.platform != "cpu":
        why = "a narrower dispatch reads the same weights"
    elif config.orchestrator.mode == "sync" or config.cluster.hosts_per_instance > 1:
        why = "mode sync and instances of several processes take every token by dispatches of one shape"
    elif rollout.narrow_rows or (rollout.decode_rows or rollout.slots or SLOTS) < LADDER_ROWS:
        why = f"rollout.narrow_rows, or fewer than {LADDER_ROWS} rows"
    elif rollout.exact:
        why = "rollout.exact scores many tails at once at full rows: narrower dispatches would score each by itself"
    else:
        on = True
    return {"ladder": ("on" if on else "off", why)}


def _rollout(section: RolloutSection, machine: Machine) -> Presets:
    kernel = {"cpu": "reference", "tpu": "tpu", "gpu": "gpu"}[machine.platform]
    kernel = section.attention if section.attention not in OPEN else kernel
    if machine.platform == "cpu":
        return {
            "attention": (kernel, "the one that XLA compiles for a CPU"),
            "expert_matmul": ("blocks", BLOCKS),
            "page_size": (16, "small pages waste little"),
            "prefill_chunk": (64, "prompts share their prefixes in chunks of it"),
            "prefill_tokens": (2048, "a dispatch costs the same with few samples: slots are filled before they decode"),
            "prefill_call_tokens": (
                128 if kernel == "reference" else section.prefill_tokens or 256,
                "products of so many run at speed; more is padding when few prompts wait",
            ),
            "decode_steps": (8, "a dispatch costs the host its time, whose cores decode"),
            "late_results": ("off", "host and device are the same cores"),
        }
    size, why = PAGE_SIZES[0], "a page is one read of the kernel"
    if kernel in ("tpu", "tokamax"):
        size, why = PAGE_SIZES[-1], "the largest that there is"
        if fitting := [each for each in PAGE_SIZES if memory.table_fits(section, each)]:
            size, why = fitting[0], "the page table fits the chip's scalar memory, 1 MiB"
    return {
        "attention": (kernel, f"the paged kernel for {machine}"),
        "expert_matmul": ("ragged_dot", RAGGED_DOT),
        "page_size": (size, why),
        "prefill_chunk": (512, "one pass over the weights serves so many tokens of a prompt"),
        "prefill_call_tokens": (section.prefill_tokens or 1024, "one pass over the weights serves all of a tick's"),
        "prefill_tokens": (1024, "matrix products of so many tokens are bound by compute, not by the weights"),
        "decode_steps": (2, "a row whose sample has stopped decodes to the end of the dispatch behind it"),
        "late_results": ("on", "the device decodes while the host plans the next call"),
        "compiler_options": ROLLOUT_OPTIONS.get(machine.chip, NONE),
    }


def _trainer(section: TrainerSection, machine: Machine, dtype: str) -> Presets:
    if machine.platform == "cpu":
        return {
            "attention": ("reference", "the one that XLA compiles for a CPU"),
            "expert_matmul": ("scan", SCAN),
            "logits_bytes": (256 * MIB, "smaller chunks are computed twice"),
        }
    kernel: TrainerKernel = "splash" if machine.platform == "tpu" else "cudnn"
    why = "scores never reach the memory"
    tried = dataclasses.replace(section, attention=kernel)
    if wrong := next(objective.attention_problems(tried, machine.platform, dtype), None):
        kernel, why = "reference", wrong
    # Each chunk reads the head, and reads and writes its whole gradient, however few tokens it has
    logits_bytes = min(MAX_LOGITS_BYTES, int(machine.memory_bytes / LOGITS_SHARE) // MIB * MIB or MAX_LOGITS_BYTES)
    return {
        "attention": (kernel, why),
        "expert_matmul": ("megablox", MEGABLOX) if machine.platform == "tpu" else ("ragged_dot", RAGGED_DOT),
        "logits_bytes": (logits_bytes, "the head is read once for so many logits"),
        "compiler_options": TRAINER_OPTIONS.get(machine.platform, NONE),
    }


def _share_prompts(section: TrainerSection, recurrent: bool) -> tuple[str, str]:
    if recurrent:
        return "off", "the recurrent state of a prompt is not handed on to its answers"
    if section.attention == "splash":
        return "off", "splash compares segment ids alone"
    if section.row_splits > 1:
        return "off", "a prompt would have to stand in each short row of trainer.row_splits"
    if section.advantage in objective.ALONE:
        return "off", f"the advantage {section.advantage} takes the gradient of each trajectory alone"
    return "on", "a group's prompt is computed once a row"


def _row_splits(section: TrainerSection, machine: Machine) -> tuple[int, str]:
    """How many short rows a packed row of short samples is split into."""
    tokens, whole = section.pack_tokens, section.context > 1 or section.share_prompts == "on"
    fit = [n for n in ROW_SPLITS if tokens >= n * SHORT_ROW and tokens % (n * ROW_MULTIPLE) == 0]
    splits = 1 if machine.platform == "cpu" or whole else max(fit, default=1)
    return splits, "scores grow with the square of a row, and short samples need no long one"


def _refusals(planned: Plan) -> Iterator[str]:
    config, (trainer, instance), model = planned.config, planned.machines, planned.model
    expected = families.KNOWN.get(config.model.size)
    if model and expected and (model.n_layers, model.d_model) != (expected.n_layers, expected.d_model):
        yield (
            f"model.path: {config.model.path} has {model.n_layers} layers of width {model.d_model}, and model.size "
            f"{config.model.size} has {expected.n_layers} of {expected.d_model}"
        )
    if model and planned.asked.rollout.window_pages and not model.local_window:
        yield f"rollout.window_pages: no layers of this {model.family} attend within a window beside others in full"
    kernel, span = config.rollout.attention, config.cluster.hosts_per_instance
    if config.rollout.weights == "bfloat16" and instance.platform != "cpu":
        yield f"rollout.weights: bfloat16 is for a CPU, and this is {instance}; model.dtype=bfloat16 is for all"
    if instance.platform not in KERNELS[kernel]:
        yield f"rollout.attention: the kernel {kernel!r} is for {', '.join(KERNELS[kernel])}, and this is {instance}"
    for heads, width in model.kv_rows if model and not model.latent else ():
        if kernel == "tpu" and width > 128 and heads > config.rollout.tensor:
            yield (
                f"rollout.tensor: the kernel 'tpu' reads one KV head of {width} numbers a device, and {heads} of them "
                f"are on {config.rollout.tensor} devices"
            )
        if config.trainer.attention == "cudnn" and width > 256:
            yield f"trainer.attention: the kernel 'cudnn' takes heads of 256 numbers at most, and {width} are asked"
    if model and model.sinks and kernel not in SINKS:
        yield (
            f"rollout.attention: the kernel {kernel!r} computes no attention sinks, which this {model.family} has; "
            "reference does"
        )
    if model and kernel == "tokamax" and model.kv_owners < model.n_layers:
        yield (
            f"rollout.attention: the kernel 'tokamax' writes the keys that it reads, and layers of this {model.family} "
            "read those of others"
        )
    for name, section, role in (("rollout", config.rollout, instance), ("trainer", config.trainer, trainer)):
        if section.expert_matmul == "megablox" and role.platform != "tpu":
            yield f"{name}.expert_matmul: the kernel 'megablox' is for tpu, and this is {role}"
    if config.trainer.expert_dispatch == "all_to_all" and config.trainer.expert_matmul != "megablox":
        yield (
            f"trainer.expert_dispatch: all_to_all goes with trainer.expert_matmul=megablox, and it is "
            f"{config.trainer.expert_matmul}"
        )
    yield from objective.attention_problems(config.trainer, trainer.platform, config.model.dtype)
    if config.rollout.exact and trainer.chip != instance.chip:
        yield (
            f"rollout.exact: the trainer scores with the instances' own calls, whose last bits differ on {trainer} and "
            f"on {instance}"
        )
    if config.rollout.exact and config.cluster.launcher:
        own, wanted = config.cluster.trainer_hosts, max(config.rollout.tensor // span, 1)
        each = trainer.devices // own or wanted  # not known: as those of an instance
        if own % span or (each % wanted if span == 1 else each != wanted):
            yield (
                f"rollout.exact: the trainer scores with the instances' own calls, and its {own} processes of {each} "
                f"devices (cluster.trainer_hosts) do not make up instances of {span} processes of {wanted} "
                "(cluster.hosts_per_instance)"
            )
    # Of a cluster: processes of the trainer's gang are an instance while they are lent
    if config.cluster.launcher and config.orchestrator.elastic and trainer.devices and instance.devices:
        lent = span * (trainer.devices // config.cluster.trainer_hosts)
        if trainer.chip != instance.chip or lent != config.rollout.tensor:
            yield (
                f"orchestrator.elastic: {span} of the trainer's processes have {lent} devices of {trainer}, and an "
                f"instance is of {config.rollout.tensor} of {instance} (cluster.hosts_per_instance, rollout.tensor)"
            )
