"""Mixture of experts: one router, for engine and trainer, and the product of tokens with their experts.

    hidden -> scores -> ids (top k of scores + bias, within the best groups) -> weights (scores at those ids)

`route` chooses, or takes from `forced`, which experts a token goes to; the weights always come from the gate's own
scores, so that its gradient flows where the choice is replayed. COMPUTES multiply, by name:
  scan        one expert after another over all tokens: what trainers on CPUs take, where gradients of gathers cost
  blocks      tokens sorted by expert, a few of one expert's after another: what engines on CPUs take; no gradient
  ragged_dot  tokens sorted by expert, one grouped product (jax.lax.ragged_dot): what GPUs and engines on TPUs take
  megablox    the same in blocks, with gradients of their own (grouped_experts.py): what trainers on TPUs take
expert_parallel.py runs each over a mesh.
Laws: a correction bias selects and never weighs, a bias of the logits does both; router and weights are computed in
f32; ids follow from the hidden states alone, whatever computes the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dora_jax.models import grouped_experts
from dora_jax.models.attention import ADAPTERS, Products, Spec, Weights, adapter_of, narrowed, rms_norm
from dora_jax.models.families.config import Experts, ModelConfig
from dora_jax.models.grouped_experts import gated

WIDE, BACK = ("expert", "expert_embed", "expert_mlp"), ("expert", "expert_mlp", "expert_embed")  # axes of the matrices
MISSING = -1  # as a forced id: the router chooses
BLOCK = 8  # tokens of one expert in a product: XLA's products of more rows on a CPU copy the matrix first
# (hidden [B, L, D], weights f32[B, L, k], ids i32[B, L, k], gate [E, D, F], up, down [E, F, D]) -> [B, L, D]
Compute = Callable[..., jax.Array]


class Routed(NamedTuple):
    """What the routers of a forward pass did; a leading axis counts the layers that have one."""

    ids: jax.Array  # i32[..., B, L, k]
    load: jax.Array  # f32[..., E] how often each was chosen, by tokens that count
    scores: jax.Array  # f32[..., E] sums of the same tokens' scores, each token's adding up to 1
    entropy: jax.Array  # f32[...] sum of the entropies of those scores
    changed: jax.Array  # f32[...] of the forced ids of those tokens, how many the router would not have chosen


def specs(cfg: ModelConfig, residual: float) -> dict[str, Spec]:
    """Parameters of one router and its experts."""
    e, d = cfg.moe, cfg.d_model
    found = {
        "router": Spec((d, e.choices), ("embed", "router"), d**-0.5),
        "experts_gate": Spec((e.count, d, e.width), WIDE, d**-0.5),
        "experts_up": Spec((e.count, d, e.width), WIDE, d**-0.5),
        "experts_down": Spec((e.count, e.width, d), BACK, residual * e.width**-0.5),
    }
    if e.corrected:
        found["router_bias"] = Spec((e.choices,), ("router",), 0.0)
    if e.biased:
        found |= {f"experts_{x}_bias": Spec((e.count, e.width), WIDE[::2], 0.0) for x in ("gate", "up")}
        found["experts_down_bias"] = Spec((e.count, d), ("router", "norm"), 0.0)
        found["router_logit_bias"] = Spec((e.choices,), ("router",), 0.0)
    if e.shared:
        found |= dense_specs(d, e.shared * e.width, residual, "shared_{}")
    if e.shared_gate:
        found["router_shared"] = Spec((d, 1), ("embed", "router"), d**-0.5)
    if e.beside:
        found |= {f"{x}_norm": Spec((d,), ("norm",), None) for x in ("mlp_inner", "mixture", "mixture_post")}
        found |= {"router_scale": Spec((d,), ("norm",), None), "router_gain": Spec((e.choices,), ("router",), None)}
    return found


def dense_specs(d: int, f: int, residual: float, name: str) -> dict[str, Spec]:
    """Parameters of one SwiGLU; `name` has a place for gate, up, down."""
    return {
        name.format("gate"): Spec((d, f), ("embed", "mlp"), d**-0.5),
        name.format("up"): Spec((d, f), ("embed", "mlp"), d**-0.5),
        name.format("down"): Spec((f, d), ("mlp", "embed"), residual * f**-0.5),
    }


def dense(weights: Weights, h_BxLxD: jax.Array, products: Products, name: str, gate: str = "silu") -> jax.Array:
    """SwiGLU, or the same with another activation."""
    names = [name.format(x) for x in ("gate", "up")]
    inner = products.each(weights, h_BxLxD, names, name.format("gate_up"))
    return products(weights, gated(gate, *inner), name.format("down"))


def run(
    cfg: ModelConfig,
    weights: Weights,
    h_BxLxD: jax.Array,
    products: Products,
    compute: Compute,
    forced_BxLxk: jax.Array | None,
    counted_BxL: jax.Array | None,
    x_BxLxD: jax.Array,
) -> tuple[jax.Array, Routed]:
    """(what normed hidden states add to the residual stream, what the router did). x: the residual stream, which a
    router beside a dense feed-forward norms by itself."""
    e = cfg.moe
    with jax.named_scope("router"):
        routed_BxLxD = h_BxLxD
        if e.beside:
            gain = weights["router_scale"].astype(jnp.float32) * cfg.d_model**-0.5
            routed_BxLxD = rms_norm(x_BxLxD.astype(jnp.float32), gain, cfg.norm_eps)
        of_router = weights["router"], weights.get("router_bias"), forced_BxLxk, counted_BxL
        offset_E = weights.get("router_logit_bias")
        weights_BxLxk, routed = route(e, routed_BxLxD, *of_router, weights.get("router_gain"), offset_E)
    with jax.named_scope("experts"):
        matrices: list[jax.Array | Several | Biased] = []  # [E, in, out]
        for name in ("experts_gate", "experts_up", "experts_down"):
            matrix, adapter = weights[name].astype(h_BxLxD.dtype), adapter_of(weights, name, h_BxLxD.dtype)
            if adapter is not None:
                # One adapter is added up into it: rank / tokens of what the tokens' products cost, and every compute
                # takes it; of several, each token's own is computed beside it
                a, b = products.gain * adapter[0], adapter[1]
                if products.rows is None:
                    matrix = matrix + jnp.einsum("eir,ero->eio", a, b)
                else:
                    matrix = Several(matrix, a.swapaxes(0, 1), b.swapaxes(0, 1))
            matrices.append(matrix)
        own = {"rows_B": products.rows} if any(isinstance(matrix, Several) for matrix in matrices) else {}
        if e.biased:
            biases = (weights[f"experts_{x}_bias"].astype(h_BxLxD.dtype) for x in ("gate", "up"))
            matrices[:2] = map(Biased, matrices[:2], biases)
        gate = {"gate": cfg.activation} if cfg.activation != "silu" else {}
        y_BxLxD = compute(h_BxLxD, weights_BxLxk, routed.ids, *matrices, **own, **gate)
        if e.biased:  # of the second product, once for all devices that share out an expert
            hits_BxLxkxE = routed.ids[..., None] == jnp.arange(e.count)[None, None, None]
            shares_BxLxE = jnp.sum(jnp.where(hits_BxLxkxE, weights_BxLxk[..., None], 0.0), axis=2)
            of_down = shares_BxLxE, narrowed(weights["experts_down_bias"], h_BxLxD.dtype)
            added_BxLxD = jnp.einsum("ble,ed->bld", *of_down, precision=jax.lax.Precision.HIGHEST)
            y_BxLxD = y_BxLxD + added_BxLxD.astype(y_BxLxD.dtype)
        if e.zero:
            kept_BxL = jnp.sum(jnp.where(routed.ids >= e.count, weights_BxLxk, 0.0), axis=-1)
            y_BxLxD = y_BxLxD + (kept_BxL[..., None] * h_BxLxD.astype(jnp.float32)).astype(h_BxLxD.dtype)
    if e.shared:
        with jax.named_scope("shared"):
            shared_BxLxD = dense(weights, h_BxLxD, products, "shared_{}")
            if e.shared_gate:
                shared_BxLxD = shared_BxLxD * jax.nn.sigmoid(products(weights, h_BxLxD, "router_shared"))
            y_BxLxD = y_BxLxD + shared_BxLxD
    return y_BxLxD, routed


class Several(NamedTuple):
    """Matrices of experts and several adapters of each; the axis of experts is the first of all."""

    matrix: jax.Array  # [E, in, out]
    a: jax.Array  # [E, A, in, rank]
    b: jax.Array  # [E, A, rank, out]


class Biased(NamedTuple):
    """Matrices of experts, and what is added to their products."""

    matrix: jax.Array | Several
    bias: jax.Array  # [E, out]


def times(x_NxI: jax.Array, matrix: jax.Array | Several | Biased, rows_N: jax.Array | None) -> jax.Array:
    """Tokens with one expert's matrix [in, out], and each with its own adapter, of number rows_N, of that matrix."""
    if isinstance(matrix, Biased):
        return times(x_NxI, matrix.matrix, rows_N) + matrix.bias[None]
    if not isinstance(matrix, Several):
        return x_NxI @ matrix
    beside = {"expert": matrix.matrix, ADAPTERS: {"expert": {"a": matrix.a, "b": matrix.b}}}
    return Products(True, rows=rows_N)(beside, x_NxI[:, None], "expert")[:, 0]


def grouped_times(
    x_NxI: jax.Array, matrices: jax.Array | Several | Biased, sizes_E, rows_N: jax.Array | None
) -> jax.Array:
    """`times` of tokens sorted by their expert, so many of each."""
    if isinstance(matrices, Biased):
        expert_N = jnp.sum(jnp.arange(len(x_NxI))[:, None] >= jnp.cumsum(sizes_E)[None], axis=1)
        bias_NxO = matrices.bias[jnp.minimum(expert_N, len(sizes_E) - 1)]
        return grouped_times(x_NxI, matrices.matrix, sizes_E, rows_N) + bias_NxO
    if not isinstance(matrices, Several):
        return jax.lax.ragged_dot(x_NxI, matrices, sizes_E)
    assert rows_N is not None
    low = own_of(x_NxI, matrices.a, sizes_E, rows_N)
    return jax.lax.ragged_dot(x_NxI, matrices.matrix, sizes_E) + own_of(low, matrices.b, sizes_E, rows_N)


def own_of(x_NxI: jax.Array, factor_ExAxIxO: jax.Array, sizes_E, rows_N: jax.Array) -> jax.Array:
    """Products with one factor of all adapters, of which each token keeps its own."""
    experts, count, inner, outer = factor_ExAxIxO.shape
    every = factor_ExAxIxO.transpose(0, 2, 1, 3).reshape(experts, inner, count * outer)
    own, *others = jnp.split(jax.lax.ragged_dot(x_NxI, every, sizes_E), count, axis=-1)
    for i, other in enumerate(others, 1):
        own = jnp.where(rows_N[:, None] == i, other, own)
    return own


def route(
    e: Experts,
    h_BxLxD: jax.Array,
    router_DxE: jax.Array,
    bias_E: jax.Array | None = None,
    forced_BxLxk: jax.Array | None = None,
    counted_BxL: jax.Array | None = None,
    gain_E: jax.Array | None = None,
    offset_E: jax.Array | None = None,
) -> tuple[jax.Array, Routed]:
    """(weights f32[B, L, k], what was chosen). A row of `forced` that is MISSING is chosen here, the rest is taken.

    gain_E: what each expert's weight is multiplied by. offset_E: what is added to the logits. counted_BxL: the tokens
    that load and scores are sums over; None: all.
    """
    wide = (x.astype(jnp.float32) for x in (h_BxLxD, router_DxE))
    logits_BxLxE = jnp.einsum("bld,de->ble", *wide, precision=jax.lax.Precision.HIGHEST)
    if offset_E is not None:
        logits_BxLxE = logits_BxLxE + offset_E.astype(jnp.float32)[None, None]
    scores_BxLxE = jax.nn.softmax(logits_BxLxE) if e.router == "softmax" else jax.nn.sigmoid(logits_BxLxE)
    ranks_BxLxE = jax.lax.stop_gradient(scores_BxLxE)
    if bias_E is not None:
        ranks_BxLxE = ranks_BxLxE + jax.lax.stop_gradient(bias_E).astype(jnp.float32)[None, None]
    if e.groups > 1:
        grouped = ranks_BxLxE.reshape(*ranks_BxLxE.shape[:2], e.groups, -1)
        best_BxLxG = jax.lax.top_k(grouped, 2)[0].sum(-1) if grouped.shape[-1] > 1 else grouped[..., 0]
        kept_BxLxT = jax.lax.top_k(best_BxLxG, e.top_groups)[1]
        kept_BxLxG = (kept_BxLxT[..., None] == jnp.arange(e.groups)[None, None, None]).any(-2)
        ranks_BxLxE = jnp.where(kept_BxLxG[..., None], grouped, -jnp.inf).reshape(ranks_BxLxE.shape)
    ids_BxLxk = own_BxLxk = jax.lax.top_k(ranks_BxLxE, e.per_token)[1]  # best first
    if forced_BxLxk is not None:
        forced_BxLxk = forced_BxLxk.astype(jnp.int32)
        ids_BxLxk = jnp.where(forced_BxLxk == MISSING, own_BxLxk, forced_BxLxk)
    weights_BxLxk = jnp.take_along_axis(scores_BxLxE, ids_BxLxk, axis=-1)
    if e.renormalize:
        weights_BxLxk = weights_BxLxk / (jnp.sum(weights_BxLxk, axis=-1, keepdims=True) + 1e-20)
    counted_BxL = jnp.ones(h_BxLxD.shape[:2]) if counted_BxL is None else counted_BxL.astype(jnp.float32)
    weights_BxLxk = e.scale * weights_BxLxk
    if gain_E is not None:
        weights_BxLxk = weights_BxLxk * gain_E.astype(jnp.float32)[ids_BxLxk]
    # No router learns from the counts; it does from the sums of scores
    choices = scores_BxLxE.shape[-1]
    hits_BxLxkxE = ids_BxLxk[..., None] == jnp.arange(choices)[None, None, None]
    share_BxLxE = scores_BxLxE / (jnp.sum(scores_BxLxE, axis=-1, keepdims=True) + 1e-20)
    entropy_BxL = -jnp.sum(share_BxLxE * jnp.log(jnp.maximum(share_BxLxE, 1e-20)), axis=-1)
    same_BxLxk = (ids_BxLxk[..., None] == own_BxLxk[..., None, :]).any(-1)
    return weights_BxLxk, Routed(
        ids=ids_BxLxk,
        load=jnp.sum(jnp.where(hits_BxLxkxE, counted_BxL[..., None, None], 0.0), axis=(0, 1, 2)),
        scores=jnp.sum(share_BxLxE * counted_BxL[..., None], axis=(0, 1)),
        entropy=jax.lax.stop_gradient(jnp.sum(entropy_BxL * counted_BxL)),
        changed=jnp.sum(jnp.where(same_BxLxk, 0.0, counted_BxL[..., None])),
    )


def scan(
    h_BxLxD,
    weights_BxLxk,
    ids_BxLxk,
    gate_ExDxF,
    up_ExDxF,
    down_ExFxD,
    first: int | jax.Array = 0,
    rows_B=None,
    gate: str = "silu",
):
    """`first`: the id of the first expert that is here; what goes to others adds nothing. rows_B: of matrices that are
    Several, the adapter of each row. gate: the activation."""
    rows_T = None if rows_B is None else jnp.repeat(rows_B, h_BxLxD.shape[1])
    h_TxD = h_BxLxD.reshape(-1, h_BxLxD.shape[-1])
    weights_Txk, ids_Txk = (x.reshape(-1, x.shape[-1]) for x in (weights_BxLxk, ids_BxLxk))

    @jax.checkpoint  # every expert's products of every token would be kept else
    def add(y_TxD, expert):
        e, gate_DxF, up_DxF, down_FxD = expert
        weight_T = jnp.sum(jnp.where(ids_Txk == first + e, weights_Txk, 0.0), axis=-1)
        inner_TxF = gated(gate, times(h_TxD, gate_DxF, rows_T), times(h_TxD, up_DxF, rows_T))
        out_TxD = times(inner_TxF, down_FxD, rows_T)
        return y_TxD + weight_T[:, None] * out_TxD.astype(jnp.float32), None

    each = jnp.arange(jax.tree.leaves(gate_ExDxF)[0].shape[0]), gate_ExDxF, up_ExDxF, down_ExFxD
    y_TxD, _ = jax.lax.scan(add, jnp.zeros_like(h_TxD, jnp.float32), each)
    return y_TxD.astype(h_BxLxD.dtype).reshape(h_BxLxD.shape)


def blocks(
    h_BxLxD,
    weights_BxLxk,
    ids_BxLxk,
    gate_ExDxF,
    up_ExDxF,
    down_ExFxD,
    first: int | jax.Array = 0,
    rows_B=None,
    gate: str = "silu",
):
    """Like `scan`, without gradients. What an expert's last block writes behind its own tokens is overwritten by the
    next experts, or left out."""
    h_TxD, k = h_BxLxD.reshape(-1, h_BxLxD.shape[-1]), ids_BxLxk.shape[-1]
    order_N, sizes_E, here_N = _by_expert(ids_BxLxk, first, gate_ExDxF)
    starts_E, ends_E = jnp.cumsum(sizes_E) - sizes_E, jnp.cumsum(-(-sizes_E // BLOCK))  # in tokens; in blocks
    token_N = jnp.pad(order_N // k, (0, BLOCK))
    x_NxD, rows_N = h_TxD[token_N], None if rows_B is None else rows_B[token_N // h_BxLxD.shape[1]]

    def multiply(block, out_NxD):
        e = jnp.sum(ends_E <= block)
        start = starts_E[e] + (block - jnp.where(e > 0, ends_E[e - 1], 0)) * BLOCK
        x_CxD = jax.lax.dynamic_slice_in_dim(x_NxD, start, BLOCK)
        rows_C = None if rows_N is None else jax.lax.dynamic_slice_in_dim(rows_N, start, BLOCK)
        gate_DxF, up_DxF, down_FxD = jax.tree.map(lambda w: w[e], (gate_ExDxF, up_ExDxF, down_ExFxD))
        inner_CxF = gated(gate, times(x_CxD, gate_DxF, rows_C), times(x_CxD, up_DxF, rows_C))
        y_CxD = times(inner_CxF, down_FxD, rows_C)
        return jax.lax.dynamic_update_slice_in_dim(out_NxD, y_CxD, start, 0)

    out_NxD = jax.lax.fori_loop(0, ends_E[-1], multiply, jnp.zeros_like(x_NxD))[:-BLOCK]
    return _added(h_BxLxD, weights_BxLxk, order_N, jnp.where(here_N[:, None], out_NxD, 0))


def ragged_dot(
    h_BxLxD,
    weights_BxLxk,
    ids_BxLxk,
    gate_ExDxF,
    up_ExDxF,
    down_ExFxD,
    first: int | jax.Array = 0,
    rows_B=None,
    gate: str = "silu",
):
    """Like `scan`; tokens of experts that are elsewhere are sorted to the end, where no group holds them."""
    h_TxD, k = h_BxLxD.reshape(-1, h_BxLxD.shape[-1]), ids_BxLxk.shape[-1]
    order_N, sizes_E, here_N = _by_expert(ids_BxLxk, first, gate_ExDxF)
    rows_N = None if rows_B is None else rows_B[order_N // k // h_BxLxD.shape[1]]
    x_NxD = jnp.where(here_N[:, None], h_TxD[order_N // k], 0)
    gate_NxF, up_NxF = (grouped_times(x_NxD, w, sizes_E, rows_N) for w in (gate_ExDxF, up_ExDxF))
    out_NxD = grouped_times(gated(gate, gate_NxF, up_NxF), down_ExFxD, sizes_E, rows_N)
    return _added(h_BxLxD, weights_BxLxk, order_N, jnp.where(here_N[:, None], out_NxD, 0))


def megablox(
    h_BxLxD, weights_BxLxk, ids_BxLxk, gate_ExDxF, up_ExDxF, down_ExFxD, first: int | jax.Array = 0, **options
):
    """Like `scan`, on a TPU. options: of grouped_experts.experts."""
    h_TxD, weights_Txk, ids_Txk = (x.reshape(-1, x.shape[-1]) for x in (h_BxLxD, weights_BxLxk, ids_BxLxk))
    (gate_ExDxF, up_ExDxF), options["biases"] = unbiased(gate_ExDxF, up_ExDxF)
    y_TxD = grouped_experts.experts(h_TxD, weights_Txk, ids_Txk, gate_ExDxF, up_ExDxF, down_ExFxD, first, **options)
    return y_TxD.reshape(h_BxLxD.shape)


def unbiased(*matrices: jax.Array | Biased) -> tuple[list[jax.Array], list[jax.Array]]:
    """(the matrices alone, their biases where they have any)."""
    biases = [x.bias for x in matrices if isinstance(x, Biased)]
    return [x.matrix if isinstance(x, Biased) else x for x in matrices], biases


COMPUTES: dict[str, Compute] = {"scan": scan, "blocks": blocks, "ragged_dot": ragged_dot, "megablox": megablox}


# ---------------------------------------------------------------- private


def _by_expert(ids_BxLxk: jax.Array, first: int | jax.Array, matrices) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the choices in the order of the experts that are here, those of others last; choices of each; whether each of
    the sorted ones is of an expert that is here)."""
    count = jax.tree.leaves(matrices)[0].shape[0]
    local_N = ids_BxLxk.reshape(-1) - first
    local_N = jnp.where((local_N >= 0) & (local_N < count), local_N, count)
    order_N = grouped_experts.order_of(local_N)
    sizes_E = jnp.sum(local_N[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    return order_N, sizes_E, jnp.arange(len(order_N)) < jnp.sum(sizes_E)


def _added(h_BxLxD: jax.Array, weights_BxLxk: jax.Array, order_N: jax.Array, out_NxD: jax.Array) -> jax.Array:
    """The weighted sum of what each token's experts gave, of the sorted choices."""
    out_NxD = weights_BxLxk.reshape(-1)[order_N, None] * out_NxD.astype(jnp.float32)
    y_TxD = jnp.zeros((h_BxLxD.size // h_BxLxD.shape[-1], h_BxLxD.shape[-1]), jnp.float32)
    y_TxD = y_TxD.at[order_N // weights_BxLxk.shape[-1]].add(out_NxD)
    return y_TxD.astype(h_BxLxD.dtype).reshape(h_BxLxD.shape)
