"""What an update of the trainer needs and how long it should take, by arithmetic. No JAX: a dry run prints it.

Consumes a model's sizes, the trainer's section, its mesh and a row of the hardware table; produces `Expected`: seconds
of a device by part, and the MFU that they come to.
Laws: the parts are closed formulas in FLOPs and bytes over the chip's published speeds; the shares and passes below are
those of XLA's own estimates for models of 0.6B on v5e, 8B and 32B on v5p, with splash attention (`--dry_run --aot` of
configs/qwen3.py), which they come to within 3 %; nothing here was measured on a chip.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dora_jax.base.chips import CHIPS, DEVICES_A_CHIP, ici_bytes_per_s, splash_blocks
from dora_jax.config import TrainerSection
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import OFF, Lora, adapter_params

BACKWARD = 2  # gradients of weights and of inputs: two products for each of the forward pass
PRODUCTS = 0.78  # of the peak that matrix products reach
# Forward and backward, over a layer's [tokens, D] and its [tokens, heads, head_dim] in 2 bytes, and [tokens, V] in 4:
PASSES, HEAD_PASSES, LOGIT_PASSES = 180, 145, 10  # norms, rotations, gates, casts, copies; normalisers and entropy
KERNEL = 2.0  # times its floor that a kernel takes: XLA does not know how long
KERNEL_BACKWARD = 2.5  # five products for the forward's two: it computes the scores again
SCORE_PASSES = 10  # over float32 scores, where they are not in a kernel
ALL_REDUCE = 2  # times its result that the links carry: it is scattered as it is summed, and gathered
UPDATE_BYTES = 28  # a parameter: masters, two moments and gradient read, three written, all float32
ADD_BYTES = 12  # a parameter and micro-batch: its gradient added to the sum


class UpdateCost(NamedTuple):
    what: str
    seconds: float
    note: str


class Expected(NamedTuple):
    """The expected time of one optimizer update."""

    parts: tuple[UpdateCost, ...]  # one after another
    sent: UpdateCost  # between devices, beside the parts
    mfu: float

    @property
    def seconds(self) -> float:
        return max(sum(part.seconds for part in self.parts), self.sent.seconds)

    def __str__(self) -> str:
        parts = ", ".join(f"{part.what} {part.seconds:.3g} s ({part.note})" for part in self.parts)
        return (
            f"{self.seconds:.3g} s an update, MFU {self.mfu:.0%}: {parts}; meanwhile {self.sent.what} "
            f"{self.sent.seconds:.3g} s ({self.sent.note})"
        )


def matmul_params(cfg: ModelConfig) -> int:
    """Parameters in matrix products with a token: all but the embeddings' lookups, the gains and the biases."""
    looked_up = (0 if cfg.tie_embeddings else cfg.d_model) + cfg.n_layers * cfg.per_layer
    return cfg.active_params - looked_up * cfg.vocab_size


def score_products(cfg: ModelConfig, lengths: ArrayLike, before: ArrayLike = 0.0) -> np.ndarray:
    """FLOPs of q k and p v of every pair of tokens that may look at each other, in all layers, of sequences of these
    lengths behind so many tokens: the causal half, of layers with a window as far as it reaches; and of every token
    with the states of linear layers."""
    n, seen = np.asarray(lengths, np.float64), np.asarray(before, np.float64)
    total = np.zeros(np.broadcast_shapes(n.shape, seen.shape))
    for kind, layers in Counter(cfg.every_kind).items():
        if kind.linear:  # a state is decayed, corrected and read, whatever lies before
            total = total + layers * 3 * 2 * cfg.rule.state_numbers * n
            continue
        width = cfg.q_width(kind) + (cfg.n_heads * cfg.latent.v_dim if cfg.latent else cfg.q_width(kind))
        pairs = n * (n + 1) / 2 + n * seen
        if kind.window:  # without what lies behind it: of the token at place i, all but the last `window` of them
            first = np.clip(kind.window - seen, 0, n)  # tokens of each that see all before them
            beyond = seen + first - kind.window  # of the token behind those, the places that it does not see, less one
            pairs = pairs - ((n - first) * beyond + (n - first) * (n - first + 1) / 2)
        total = total + layers * 2 * width * pairs
    return total * cfg.sublayers


def model_flops(cfg: ModelConfig, lengths: Iterable[int], before: Iterable[int] = (0,), frozen: bool = False) -> float:
    """FLOPs of one training pass over sequences of these lengths: the numerator of MFU (arXiv 2204.02311), with the
    causal half of attention only, and nothing for recomputation, padding or masked scores. before: tokens of a shared
    prompt that each of them sees besides. frozen: the matrices have no gradient of their own, for adapters are trained,
    whose few products are left out."""
    n, seen = (np.asarray(list(x), np.float64) for x in (lengths, before))
    products = (1 + (1 if frozen else BACKWARD)) * 2 * matmul_params(cfg) * n.sum()
    return float(products + (1 + BACKWARD) * score_products(cfg, n, seen).sum())


def splash_share(tokens: int, context: int, width: int) -> float:
    """The share of its blocks that splash attention computes of a causal row, in the shard of `context` that sees the
    most keys; it skips the others."""
    own = tokens // context
    queries, keys = splash_blocks(own, tokens, width)
    seen = [-(-(tokens - own + last) // keys) for last in range(queries, own + 1, queries)]
    return sum(seen) / (len(seen) * (tokens // keys))


def expected(
    cfg: ModelConfig, section: TrainerSection, mesh: Any, chip: str, rows: int, tokens: int, lora: Lora = OFF
) -> Expected:
    """The cost of an update of `rows` full rows, each one sequence of `tokens`, in bfloat16; `mesh` is a memory.Mesh.
    lora: where it is on, gradients of weights and optimizer are of adapters, whose few products are left out."""
    devices = mesh.rows * mesh.tensor * mesh.context
    each = DEVICES_A_CHIP.get(chip, 1)
    peak, bandwidth = CHIPS[chip].flops / each, CHIPS[chip].hbm_bytes_per_s / each
    local = rows * tokens / (mesh.rows * mesh.context)  # tokens of a device; tensor shards share them
    params = cfg.matrix_params / mesh.shards
    if lora.on:
        params = adapter_params(cfg, lora, fsdp=mesh.fsdp, tensor=mesh.tensor, expert=mesh.expert)
    moved = 2 * local * cfg.n_layers * (PASSES * cfg.d_model + HEAD_PASSES * cfg.q_width()) / mesh.tensor
    moved += LOGIT_PASSES * 4 * local * cfg.vocab_size / mesh.tensor
    state = (UPDATE_BYTES + ADD_BYTES * (section.micro_batches if section.micro_batches > 1 else 0)) * params
    # Of a device, without attention's own; remat=full repeats all of a layer but its two output projections.
    backward = 1 if lora.on else BACKWARD
    kept = cfg.d_model * (cfg.q_width() + cfg.ff_width) / cfg.layer_params(active=True)
    again = 1 - kept if section.remat == "full" else 0.0
    chunked = 4 * local / section.micro_batches * cfg.vocab_size / mesh.tensor > section.logits_bytes
    layers = (1 + backward + again) * cfg.n_layers * cfg.layer_params(active=True)
    head = (1 + backward + chunked) * cfg.d_model * cfg.vocab_size
    products_s = (2 * local * (layers + head) / mesh.tensor) / (PRODUCTS * peak)
    parts = (
        UpdateCost("matrix products", products_s, f"at {PRODUCTS:.0%} of the peak"),
        _attention(cfg, section, mesh, rows, tokens, peak, bandwidth),
        UpdateCost("passes over activations", moved / bandwidth, f"{moved / 1e9:.0f} GB"),
        UpdateCost("gradients and optimizer", state / bandwidth, f"{state / 1e9:.0f} GB"),
    )
    sent, carried = _sent_bytes(cfg, section, mesh, local, lora.on)
    sends = UpdateCost("it sends", carried * each / ici_bytes_per_s(chip, devices // each), f"{sent / 1e9:.0f} GB")
    result = Expected(parts, sends, 0.0)
    needed = model_flops(cfg, [tokens] * rows, frozen=lora.on)
    return result._replace(mfu=needed / (devices * peak * result.seconds))


# ---------------------------------------------------------------- private


def _attention(
    cfg: ModelConfig, section: TrainerSection, mesh: Any, rows: int, tokens: int, peak: float, bandwidth: float
) -> UpdateCost:
    """The causal half; over context the last shard, which sees the most keys, is waited for."""
    forward = float(score_products(cfg, tokens)) * rows / (mesh.rows * mesh.tensor * mesh.context)
    causal = 2 - 1 / mesh.context
    if section.attention == "splash":  # whole blocks
        causal = 2 * tokens / (tokens + 1) * splash_share(tokens, mesh.context, cfg.head_dim)
    forward *= causal
    if cfg.latent:  # values come as wide as keys
        forward *= 2 * cfg.head_dim / (cfg.head_dim + cfg.latent.v_dim)
    if section.attention == "reference":
        again = 1 if section.remat in ("full", "dots") else 0
        pairs = cfg.kv_layers * rows * tokens**2 / 2 / (mesh.rows * mesh.tensor * mesh.context) * (2 - 1 / mesh.context)
        scores = 4 * SCORE_PASSES * cfg.n_heads * pairs  # masked ones too
        seconds = max((1 + again + BACKWARD) * forward / (PRODUCTS * peak), scores / bandwidth)
        return UpdateCost("attention", seconds, f"reference: its scores pass memory {SCORE_PASSES} times")
    return UpdateCost(
        "attention", KERNEL * (1 + KERNEL_BACKWARD) * forward / peak, f"{section.attention}, {KERNEL:.0f}x its floor"
    )


def _sent_bytes(
    cfg: ModelConfig, section: TrainerSection, mesh: Any, local: float, frozen: bool
) -> tuple[float, float]:
    """(bytes of results on one device, those that its links carry), in 2 bytes a number: weights gathered forward and
    backward, their gradients summed, a micro-batch; activations summed over tensor twice a layer each way, and once
    more under remat; keys and values over context. Sums are all-reduces, which XLA:TPU slices afterwards: a
    reduce-scatter would carry half of it."""
    experts = cfg.expert_layers * cfg.expert_layer_params
    weights = 0.0
    if mesh.fsdp * mesh.expert > 1:
        weights += 2 * (cfg.matrix_params - experts) / mesh.tensor * section.micro_batches
    if mesh.fsdp > 1:
        weights += 2 * experts / (mesh.tensor * mesh.expert) * section.micro_batches
    gathered, summed = 2 * weights, 0.0 if frozen else weights  # a frozen base has no gradient to sum
    if mesh.expert > 1:  # tokens gathered or sent, and their sums, each way
        copies = mesh.expert
        if section.expert_dispatch == "all_to_all":
            copies = cfg.moe.per_token * cfg.moe.count / cfg.moe.choices
        gathered += 4 * 2 * local * copies * cfg.d_model * cfg.expert_layers
    if mesh.tensor > 1:
        summed += (4 + (section.remat == "full")) * 2 * local * cfg.d_model * cfg.n_layers
    if mesh.context > 1:
        passes, shards = 2 + (section.remat != "none"), math.gcd(cfg.n_kv_heads, mesh.tensor)
        widths = sum(map(cfg.kv_width, cfg.every_kind))
        gathered += passes * 2 * 2 * local * mesh.context * widths / shards
    return gathered + summed, gathered + ALL_REDUCE * summed
