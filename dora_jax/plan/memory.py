"""What a device has to hold, line by line: arithmetic without JAX.

Consumes a model's sizes and a resolved configuration; produces `PlanLine`s of bytes a device, for the trainer and for a
rollout instance. State (masters, moments, weights, KV pages) is exact; what a compiled program needs beside it is an
estimate, which `python -m dora_jax.bench.device aot` holds against XLA's own.
Law: every line is a closed formula in the sizes below, so that a dry run prints what a refusal is made of.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from dora_jax.buffer.layout import BatchShape, layout
from dora_jax.models.families.config import EXPERT_SLACK, SMALL, ModelConfig
from dora_jax.models.lora_config import adapter_params
from dora_jax.rollout import shapes
from dora_jax.trainer import objective

if TYPE_CHECKING:
    from dora_jax.config import Config, RolloutSection, TrainerSection

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
REFERENCE_KV = 2.2  # the reference kernel's copies of the KV that a decode call reads
# Fitted to the peaks of compiled updates, times what the backward pass of one layer finds again without remat:
LAYER_WORK = 1.2  # what it allocates itself,
ADAPTED_WORK = 1.6  # what it does where adapters are trained, and
ADAPTED_KEPT = 0.65  # what each other layer of a scan's step keeps until the step ends, for gradients of its adapters
LINEAR_WORK = 26  # arrays of all chunks, in float32, that linear attention has at once,
ADAPTED_LINEAR = 17  # and where adapters are trained
LINEAR_STATES = 6  # arrays of one layer's states, of all rows, that a decode call has at once
GATHERED = 6  # layers whose weights, or gradients, are whole at once; of mixtures a scan step's, with adapters 2
BETWEEN = 0.03  # of an update's bytes, lost between arrays
BOUND_WORK = 4.6  # in the place of the first two where no peak is known: other attention than splash of grouped queries
PUBLISHED, BASE, MOMENTS = "published versions", "base weights", "moments"  # lines that others look for
TABLE_BYTES = shapes.SMEM_BYTES - shapes.SMEM_SPARE_BYTES  # of a page table that a TPU's kernel takes
LOGITS_COPIES = 3  # logits, their probabilities, their gradient or noise


class PlanLine(NamedTuple):
    what: str
    bytes: float
    note: str = ""


class Mesh(NamedTuple):
    """Sizes of the trainer's mesh axes."""

    data: int
    fsdp: int
    tensor: int
    context: int
    expert: int = 1

    @property
    def shards(self) -> int:
        """Pieces of a weight matrix."""
        return self.fsdp * self.tensor * self.expert

    @property
    def rows(self) -> int:
        """Shards of a batch's rows."""
        return self.data * self.fsdp * self.expert


def total(lines: list[PlanLine]) -> float:
    return sum(line.bytes for line in lines)


def table(lines: list[PlanLine]) -> list[str]:
    """One line of text each, in GiB a device."""
    return [f"  {line.bytes / GIB:9.3f} GiB  {line.what}{f': {line.note}' if line.note else ''}" for line in lines]


# ---------------------------------------------------------------- trainer


def batch_layout(config: Config, mesh: Mesh) -> BatchShape:
    """The static shape of one optimizer update's batch."""
    t, rollout, section = config.trainer, config.rollout, config.orchestrator
    samples = -(-section.groups_per_step // t.updates) * section.group_size * (1 + config.environment.most_branches)
    return layout(
        pack_tokens=t.pack_tokens,
        rows=t.rows,
        micro_batches=t.micro_batches,
        samples=samples,
        shards=mesh.rows,
        max_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
    )


def trainer_state(model: ModelConfig, config: Config, mesh: Mesh) -> list[PlanLine]:
    """Bytes that a device holds before an update computes anything."""
    t, dtype = config.trainer, config.model.dtype
    weights = model.matrix_params / mesh.shards + model.gain_params  # gains are replicated
    trained = trained_params(model, config, mesh)
    # also where they rest in host memory: at the peak of an update XLA:TPU has nearly all of them on the device
    note = f"{t.moments}, also with trainer.optimizer_memory=host, which frees them between updates alone"
    lines = [
        PlanLine("masters", 4 * trained, "float32"),
        PlanLine(MOMENTS, 2 * BYTES[t.moments] * trained, note if t.optimizer_memory == "host" else t.moments),
    ]
    if config.lora.on:
        base = BYTES[dtype] * weights + wide_bytes(model, dtype)
        lines.append(PlanLine("the base", base, f"in {dtype}: adapters are trained, lora.rank"))
    if t.kl != "none":
        lines.append(PlanLine("reference model", 4 * trained, "float32, trainer.kl"))
    if objective.needs_value(t):
        value = (4 + 2 * BYTES[t.moments]) * weights
        lines.append(PlanLine("value model", value, "float32 and its moments, trainer.advantage"))
    copies, copy = published_copies(config), BYTES[dtype] * trained
    copy += 0 if config.lora.on else wide_bytes(model, dtype)
    lines.append(PlanLine(PUBLISHED, copies * copy, f"{copies} in {dtype}, until they are read"))
    return lines


def trained_params(model: ModelConfig, config: Config, mesh: Mesh) -> float:
    """Parameters that a device trains: all weights, or those of the adapters; each has a master, a gradient and two
    moments."""
    if config.lora.on:
        return adapter_params(model, config.lora, fsdp=mesh.fsdp, tensor=mesh.tensor, expert=mesh.expert)
    return model.matrix_params / mesh.shards + model.gain_params


def wide_bytes(model: ModelConfig, dtype: str) -> float:
    """Bytes that a copy in this type has beyond that type's, for what it keeps in float32."""
    return (BYTES["float32"] - BYTES[dtype]) * model.wide_params


def published_copies(config: Config) -> int:
    """Versions that the trainer's devices hold for others: all that may live; in a cluster, which sends them to host
    memory, the newest, and the one that the engine-trainer gap is measured on."""
    if config.cluster.launcher:
        return 1 if config.orchestrator.synchronous else 2
    return config.orchestrator.max_versions


def trainer_work(model: ModelConfig, config: Config, mesh: Mesh) -> list[PlanLine]:
    """Bytes that an update needs beside the state: what stays allocated through all of it, and its largest phase."""
    t, size, alone = config.trainer, BYTES[config.model.dtype], mesh.shards == 1
    shape = batch_layout(config, mesh)
    rows = shape.rows // (t.micro_batches * mesh.rows)  # of a device and micro-batch
    tokens = rows * shape.tokens // mesh.context
    gradients = 4 * trained_params(model, config, mesh)
    ends = 0.0 if alone else size * model.vocab_size * model.d_model / mesh.tensor  # a gathered embedding, or head
    learned = 0.0 if config.lora.on else ends  # gathered once for all micro-batches, and a gradient of its size
    layers = model.matrix_params - model.end_params
    layer = (model.layer_params() - model.expert_layer_params * (1 - 1 / mesh.expert)) / mesh.tensor
    fitted = t.attention == "splash" and not (model.latent or model.per_layer)
    step = 1 if config.lora.on else model.repeat  # layers whose gradients are whole until a step of the scan ends
    few = config.lora.on or (fitted and model.experts)
    gathered = 0.0 if alone else (max(step, 2) if few else GATHERED) * size * layer
    finds = saved_activations(model, "none", tokens, mesh.tensor, size)
    beside = expert_activations(model, t.expert_matmul, t.expert_dispatch, tokens, mesh, size, step)
    work = BOUND_WORK * finds + beside
    if fitted:
        work = max((ADAPTED_WORK if config.lora.on else LAYER_WORK) * finds, finds + beside)
    if model.delta:
        arrays = ADAPTED_LINEAR if config.lora.on else LINEAR_WORK
        work = max(work, arrays * 4 * tokens * model.delta.widths[2] / mesh.tensor)
    if config.lora.on and fitted:
        work += ADAPTED_KEPT * (model.repeat - 1) * finds
    if t.attention == "reference":  # scores exist, float32, of one block of queries, and their gradient
        block = max(128, shape.tokens // 8)
        work += 2 * 4 * rows * model.n_heads / mesh.tensor * block * shape.tokens / mesh.context
    logits = min(t.logits_bytes, 4 * tokens * model.vocab_size / mesh.tensor)
    own = gradients * (1 if fitted or model.experts else 2)
    if not fitted:  # whole, and in float32
        learned *= 8 / size
    elif model.experts and learned and t.micro_batches > 1:  # of the compute type until they are added
        own *= size / 4
        learned += 0 if model.tie_embeddings else 4 / size * ends  # to a sum in float32, which of a head is whole
    phases = {
        "the head": ends + learned + (LOGITS_COPIES if t.entropy_coef else 2) * logits,  # and their gradient
        "layers, and a micro-batch's gradients": own + learned + gathered + work,
    }
    largest = max(phases, key=phases.__getitem__)
    # a base is kept in the type that it is computed with; of steps of several layers, a scan keeps each layer's apart
    copies = 0 if config.lora.on else (size < 4) + (model.repeat > 1)
    lines = [
        PlanLine("gradients", gradients if t.micro_batches > 1 else 0.0, "float32, the sum over micro-batches"),
        PlanLine(
            "layers to compute with", copies * size * layers / mesh.shards, f"{config.model.dtype}, {copies} times"
        ),
        PlanLine("gathered embedding", 0.0 if config.lora.on else ends, "once for all micro-batches"),
        PlanLine(
            "saved activations",
            model.n_layers * saved_activations(model, t.remat, tokens, mesh.tensor, size)
            + kernel_results(model, t, tokens, mesh.tensor, size),
            f"{tokens} tokens, remat {t.remat}",
        ),
        PlanLine("the largest phase", phases[largest], largest),
    ]
    return [*lines, PlanLine("between arrays", BETWEEN * total(lines))]


def saved_activations(model: ModelConfig, remat: str, tokens: int, tensor: int, size: int) -> float:
    """Bytes of one layer that the backward pass finds again."""
    if remat == "full":
        return tokens * model.d_model * size
    heads = model.head_widths // model.n_layers
    dots = tokens * size * (3 * model.d_model + 2 * (heads + model.ff_width) / tensor)
    if remat == "dots":
        return dots
    return dots + tokens * size * (2 * model.d_model + (heads + 2 * model.ff_width) / tensor)


def kernel_results(model: ModelConfig, section: TrainerSection, tokens: int, tensor: int, size: int) -> float:
    """Bytes of what attention kernels gave, and of their sums in float32, which remat does not compute again where they
    are small (models/attention.py); without remat they are among the saved activations."""
    widest = max(map(model.q_width, model.kinds))
    if section.attention == "reference" or section.remat == "none" or widest > SMALL * model.d_model:
        return 0.0
    kinds = [kind for kind in model.every_kind if not kind.linear]  # linear attention is computed again
    numbers = size * sum(map(model.q_width, kinds)) + 4 * len(kinds) * model.n_heads
    return model.sublayers * tokens * numbers / tensor


def expert_activations(
    model: ModelConfig, kind: str, dispatch: str, tokens: int, mesh: Mesh, size: int, learn: int
) -> float:
    """Bytes beside them of the experts, forward and backward, with the tokens that come over the axis `expert`; learn:
    layers whose experts' gradients are there at once.

    ragged_dot has room for all choices of its row's tokens, for none is dropped; megablox for those of an even load and
    the sums of all blocks' gradients; scan for one expert's."""
    if model.experts is None:
        return 0.0
    gathered, sums = tokens * mesh.expert, 0.0
    choices: float = tokens * model.experts.per_token
    if kind == "megablox":
        sums = 2 * 4 * gathered * model.d_model  # of hidden states and of their gradients, float32
        if dispatch == "all_to_all":  # instead of them rows that are sent and come back
            sums = 4 * size * choices * model.d_model
        if mesh.expert > 1:
            choices *= EXPERT_SLACK
            sums += learn * 4 * model.expert_layer_params / (mesh.expert * mesh.tensor)
    else:
        choices *= mesh.expert if kind == "ragged_dot" else mesh.expert / model.experts.per_token
    return sums + 2 * choices * ((size + 4) * model.d_model + 3 * size * model.experts.width / mesh.tensor)


# --------------------------------------------------------------- instance


def weights_type(config: Config) -> str:
    """In which an engine holds projections; one that is not in BYTES has 8 bits."""
    weights = config.rollout.weights
    return config.model.dtype if weights in ("", "published") else weights


def instance_weights(model: ModelConfig, config: Config) -> list[PlanLine]:
    """Bytes of the resident versions, and of the version that arrives while they run; where versions are adapters, of
    one base and of the adapters beside it."""
    rollout = config.rollout
    whole = BYTES[config.model.dtype] * serving_params(model, rollout.tensor) + wide_bytes(model, config.model.dtype)
    stored = whole
    held, size = weights_type(config), BYTES[config.model.dtype]
    stored -= (size - BYTES.get(held, 1)) * model.n_layers * model.layer_params() / rollout.tensor  # not of the ends
    if held == "bfloat16" != config.model.dtype:  # but for the head, which an embedding is kept beside
        narrow = BYTES[held] * model.vocab_size * model.d_model / rollout.tensor
        stored += narrow if model.tie_embeddings else -narrow
    kept, detail, here = stored, f"{rollout.residents} in {held}", []
    if config.lora.on:
        here = [PlanLine(BASE, stored, f"in {held}")]
        kept = whole = BYTES[config.model.dtype] * adapter_params(model, config.lora, tensor=rollout.tensor)
        detail = f"{rollout.residents} adapters in {config.model.dtype}"
    resident = PlanLine("resident versions", rollout.residents * kept, detail)
    return [*here, resident, PlanLine("incoming version", whole, f"in {config.model.dtype}")]


def serving_params(model: ModelConfig, tensor: int) -> float:
    """Parameters on one device of an instance; KV heads are replicated where there are more devices than heads."""
    if model.latent:
        low = model.kv_layers * model.d_model * (model.latent.cache_dim + model.latent.q_rank)  # on every device
        return (model.matrix_params - low) / tensor + low + model.gain_params
    replicated = model.d_model * (model.cache_numbers_on(tensor) - model.cache_numbers_on(1) / tensor)
    return model.matrix_params / tensor + model.gain_params + replicated


def instance_work(model: ModelConfig, config: Config) -> list[PlanLine]:
    """Bytes that the compiled calls need beside weights and pages."""
    rollout, size = config.rollout, BYTES[config.model.dtype]
    rows = rollout.decode_rows or rollout.slots
    call = max(rollout.prefill_call_tokens, rollout.prefill_chunk)
    tokens = max(rows, min(call, rollout.prefill_tokens))
    lines = [
        PlanLine("logits and noise", LOGITS_COPIES * 4 * rows * model.vocab_size / rollout.tensor, f"{rows} rows"),
        PlanLine("one layer", 2 * saved_activations(model, "none", tokens, rollout.tensor, size), f"{tokens} tokens"),
    ]
    if config.lora.on:
        widest = max(model.q_width(), model.ff_width) / rollout.tensor
        every = rollout.residents * tokens * size * widest
        lines.append(PlanLine("products with adapters", every, f"{tokens} tokens with each of {rollout.residents}"))
    if model.delta:
        each = model.state_bytes_on(rollout.tensor, size) / model.linear_layers
        lines.append(
            PlanLine("states of one layer", LINEAR_STATES * rows * each, f"{rows} rows, {LINEAR_STATES} times")
        )
    if rollout.attention == "reference":
        past = rows * (rollout.max_prompt_tokens + rollout.max_new_tokens)
        lines.append(
            PlanLine(
                "gathered KV",
                REFERENCE_KV * past * token_bytes(model, rollout, config.model.dtype),
                f"{rows} rows, by the reference kernel",
            )
        )
    return lines


def token_bytes(model: ModelConfig, rollout: RolloutSection, dtype: str, windows: bool | None = None) -> float:
    """Bytes of one token's KV on one device; windows: of layers with one, or of the others."""
    size, numbers = 1 if rollout.kv else BYTES[dtype], model.cache_numbers_on(rollout.tensor, windows)
    if model.latent and rollout.attention != "reference":  # a kernel's rows are whole vectors
        numbers = model.kv_layers * -(-model.latent.cache_dim // shapes.SMEM_LANES) * shapes.SMEM_LANES
    return numbers * size


def window_share(model: ModelConfig, rollout: RolloutSection) -> float:
    """The share of a token's KV that the layers with a window have."""
    return model.cache_numbers_on(rollout.tensor, True) / model.cache_numbers_on(rollout.tensor)


def page_bytes(model: ModelConfig, rollout: RolloutSection, dtype: str) -> float:
    return rollout.page_size * token_bytes(model, rollout, dtype)


def window_pages(model: ModelConfig, rollout: RolloutSection) -> int:
    """Pages of the layers with a window; 0: all layers' lie in one pool, for it is large enough to keep what is behind
    windows, or those of the layers with a window would be no fewer."""
    if not model.local_window or rollout.pages >= enough_pages(rollout):
        return 0
    pages = rollout.window_pages or shapes.local_pages(rollout, model.local_window)
    return pages if pages < rollout.pages else 0


def enough_pages(rollout: RolloutSection) -> int:
    """Pages with which every slot can hold a longest sample."""
    each = -(-(rollout.max_prompt_tokens + rollout.max_new_tokens) // rollout.page_size)
    return max(rollout.slots * each, each + 1)


def pages_bytes(model: ModelConfig, rollout: RolloutSection, dtype: str) -> float:
    """Bytes of an instance's pages on one device; one page of each pool takes what belongs to no row."""
    share = window_share(model, rollout) if 0 < rollout.window_pages < rollout.pages else 0.0
    pages = (1 - share) * (rollout.pages + 1) + share * (rollout.window_pages + 1)
    return page_bytes(model, rollout, dtype) * pages + states_bytes(model, rollout, dtype)


def states_bytes(model: ModelConfig, rollout: RolloutSection, dtype: str) -> float:
    """Bytes of an instance's recurrent states on one device; one place takes what belongs to no row."""
    return model.state_bytes_on(rollout.tensor, BYTES[dtype]) * (shapes.state_places(rollout) + 1)


def pages_within(model: ModelConfig, rollout: RolloutSection, dtype: str, free_bytes: float) -> tuple[int, int]:
    """(pages, those of the layers with a window) whose bytes are no more than these."""
    room = (free_bytes - states_bytes(model, rollout, dtype)) / page_bytes(model, rollout, dtype)
    pages = max(int(room) - 1, 0)
    local = window_pages(model, dataclasses.replace(rollout, pages=pages))
    if not local:
        return pages, 0
    share, enough = window_share(model, rollout), enough_pages(rollout)
    pages = int((room - share * (local + 1)) / (1 - share)) - 1
    if pages > enough and not rollout.window_pages:  # prefixes keep more of what the windows have passed
        pages, local = enough, int((room - (1 - share) * (enough + 1)) / share) - 1
    return pages, local


def table_fits(rollout: RolloutSection, page_size: int) -> bool:
    return table_bytes(rollout, page_size) <= TABLE_BYTES


def table_bytes(rollout: RolloutSection, page_size: int) -> int:
    """Page table of a decode call: 32 bits a page of the longest context, for every row."""
    context = rollout.max_prompt_tokens + rollout.max_new_tokens
    return shapes.table_bytes(rollout.decode_rows or rollout.slots, context - 1, rollout.decode_steps, page_size)
