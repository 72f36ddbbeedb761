"""Mixture of experts: one router, for engine and trainer, and the product of tokens with their experts.

    hidden -> scores -> ids (top k of scores + bias, within the best groups) -> weights (scores at those ids)

`route` chooses, or is told (`forced`), which experts a token goes to; the weights always come from the gate's own
scores, so that its gradient flows where the choice is replayed. COMPUTES multiply, by name:
  scan        one expert after another over all tokens: the fastest on CPUs, where gathers and small products cost
  ragged_dot  tokens sorted by expert, one grouped product (jax.lax.ragged_dot): what GPUs and engines on TPUs take
  megablox    the same in blocks, with gradients of their own (grouped_experts.py): what trainers on TPUs take
expert_parallel.py runs each over a mesh.
Laws: a correction bias selects and never weighs; router and weights are computed in f32; ids follow from the hidden
states alone, whatever computes the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dora_jax.models import grouped_experts
from dora_jax.models.attention import Products, Spec, Weights
from dora_jax.models.config import Experts, ModelConfig

WIDE, BACK = ("expert", "expert_embed", "expert_mlp"), ("expert", "expert_mlp", "expert_embed")  # axes of the matrices
MISSING = -1  # as a forced id: the router chooses
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
    """Of one router and its experts."""
    e, d = cfg.moe, cfg.d_model
    found = {
        "router": Spec((d, e.choices), ("embed", "router"), d**-0.5),
        "experts_gate": Spec((e.count, d, e.width), WIDE, d**-0.5),
        "experts_up": Spec((e.count, d, e.width), WIDE, d**-0.5),
        "experts_down": Spec((e.count, e.width, d), BACK, residual * e.width**-0.5),
    }
    if e.corrected:
        found["router_bias"] = Spec((e.choices,), ("router",), 0.0)
    if e.shared:
        found |= dense_specs(d, e.shared * e.width, residual, "shared_{}")
    return found


def dense_specs(d: int, f: int, residual: float, name: str) -> dict[str, Spec]:
    """Of one SwiGLU; `name` has a place for gate, up, down."""
    return {
        name.format("gate"): Spec((d, f), ("embed", "mlp"), d**-0.5),
        name.format("up"): Spec((d, f), ("embed", "mlp"), d**-0.5),
        name.format("down"): Spec((f, d), ("mlp", "embed"), residual * f**-0.5),
    }


def dense(weights: Weights, h_BxLxD: jax.Array, products: Products, name: str) -> jax.Array:
    """SwiGLU."""
    gate_BxLxF = jax.nn.silu(products(weights, h_BxLxD, name.format("gate")))
    return products(weights, gate_BxLxF * products(weights, h_BxLxD, name.format("up")), name.format("down"))


def run(
    cfg: ModelConfig,
    weights: Weights,
    h_BxLxD: jax.Array,
    products: Products,
    compute: Compute,
    forced_BxLxk: jax.Array | None,
    counted_BxL: jax.Array | None,
) -> tuple[jax.Array, Routed]:
    """(what normed hidden states add to the residual stream, what the router did)."""
    e = cfg.moe
    with jax.named_scope("router"):
        weights_BxLxk, routed = route(
            e, h_BxLxD, weights["router"], weights.get("router_bias"), forced_BxLxk, counted_BxL
        )
    with jax.named_scope("experts"):
        y_BxLxD = compute(
            h_BxLxD,
            weights_BxLxk,
            routed.ids,
            *(weights[f"experts_{x}"].astype(h_BxLxD.dtype) for x in ("gate", "up", "down")),
        )
        if e.zero:
            kept_BxL = jnp.sum(jnp.where(routed.ids >= e.count, weights_BxLxk, 0.0), axis=-1)
            y_BxLxD = y_BxLxD + (kept_BxL[..., None] * h_BxLxD.astype(jnp.float32)).astype(h_BxLxD.dtype)
    if e.shared:
        with jax.named_scope("shared"):
            y_BxLxD = y_BxLxD + dense(weights, h_BxLxD, products, "shared_{}")
    return y_BxLxD, routed


def route(
    e: Experts,
    h_BxLxD: jax.Array,
    router_DxE: jax.Array,
    bias_E: jax.Array | None = None,
    forced_BxLxk: jax.Array | None = None,
    counted_BxL: jax.Array | None = None,
) -> tuple[jax.Array, Routed]:
    """(weights f32[B, L, k], what was chosen). A row of `forced` that is MISSING is chosen here, the rest is taken.

    counted_BxL: the tokens that load and scores are sums over; None: all.
    """
    logits_BxLxE = jnp.einsum("bld,de->ble", *(x.astype(jnp.float32) for x in (h_BxLxD, router_DxE)))
    scores_BxLxE = jax.nn.softmax(logits_BxLxE) if e.router == "softmax" else jax.nn.sigmoid(logits_BxLxE)
    ids_BxLxk = own_BxLxk = _chosen(e, jax.lax.stop_gradient(scores_BxLxE), bias_E)
    if forced_BxLxk is not None:
        forced_BxLxk = forced_BxLxk.astype(jnp.int32)
        ids_BxLxk = jnp.where(forced_BxLxk == MISSING, own_BxLxk, forced_BxLxk)
    weights_BxLxk = jnp.take_along_axis(scores_BxLxE, ids_BxLxk, axis=-1)
    if e.renormalize:
        weights_BxLxk = weights_BxLxk / (jnp.sum(weights_BxLxk, axis=-1, keepdims=True) + 1e-20)
    counted_BxL = jnp.ones(h_BxLxD.shape[:2]) if counted_BxL is None else counted_BxL.astype(jnp.float32)
    return e.scale * weights_BxLxk, _routed(scores_BxLxE, ids_BxLxk, own_BxLxk, counted_BxL)


def scan(h_BxLxD, weights_BxLxk, ids_BxLxk, gate_ExDxF, up_ExDxF, down_ExFxD, first: int | jax.Array = 0):
    """`first`: the id of the first expert that is here; what goes to others adds nothing."""
    h_TxD = h_BxLxD.reshape(-1, h_BxLxD.shape[-1])
    weights_Txk, ids_Txk = (x.reshape(-1, x.shape[-1]) for x in (weights_BxLxk, ids_BxLxk))

    @jax.checkpoint  # every expert's products of every token would be kept else
    def add(y_TxD, expert):
        e, gate_DxF, up_DxF, down_FxD = expert
        weight_T = jnp.sum(jnp.where(ids_Txk == first + e, weights_Txk, 0.0), axis=-1)
        out_TxD = (jax.nn.silu(h_TxD @ gate_DxF) * (h_TxD @ up_DxF)) @ down_FxD
        return y_TxD + weight_T[:, None] * out_TxD.astype(jnp.float32), None

    each = jnp.arange(gate_ExDxF.shape[0]), gate_ExDxF, up_ExDxF, down_ExFxD
    y_TxD, _ = jax.lax.scan(add, jnp.zeros_like(h_TxD, jnp.float32), each)
    return y_TxD.astype(h_BxLxD.dtype).reshape(h_BxLxD.shape)


def ragged_dot(h_BxLxD, weights_BxLxk, ids_BxLxk, gate_ExDxF, up_ExDxF, down_ExFxD, first: int | jax.Array = 0):
    """As `scan`; tokens of experts that are elsewhere are sorted to the end, where no group holds them."""
    h_TxD = h_BxLxD.reshape(-1, h_BxLxD.shape[-1])
    count, k = gate_ExDxF.shape[0], ids_BxLxk.shape[-1]
    local_N = ids_BxLxk.reshape(-1) - first
    here_N = (local_N >= 0) & (local_N < count)
    local_N = jnp.where(here_N, local_N, count)
    order_N = grouped_experts.order_of(local_N)
    sizes_E = jnp.sum(local_N[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    x_NxD = jnp.where(here_N[order_N, None], h_TxD[order_N // k], 0)
    inner_NxF = jax.nn.silu(jax.lax.ragged_dot(x_NxD, gate_ExDxF, sizes_E)) * jax.lax.ragged_dot(
        x_NxD, up_ExDxF, sizes_E
    )
    out_NxD = jnp.where(here_N[order_N, None], jax.lax.ragged_dot(inner_NxF, down_ExFxD, sizes_E), 0)
    out_NxD = weights_BxLxk.reshape(-1)[order_N, None] * out_NxD.astype(jnp.float32)
    y_TxD = jnp.zeros(h_TxD.shape, jnp.float32).at[order_N // k].add(out_NxD)
    return y_TxD.astype(h_BxLxD.dtype).reshape(h_BxLxD.shape)


def megablox(
    h_BxLxD, weights_BxLxk, ids_BxLxk, gate_ExDxF, up_ExDxF, down_ExFxD, first: int | jax.Array = 0, **options
):
    """As `scan`, on a TPU. options: of grouped_experts.experts."""
    h_TxD, weights_Txk, ids_Txk = (x.reshape(-1, x.shape[-1]) for x in (h_BxLxD, weights_BxLxk, ids_BxLxk))
    y_TxD = grouped_experts.experts(h_TxD, weights_Txk, ids_Txk, gate_ExDxF, up_ExDxF, down_ExFxD, first, **options)
    return y_TxD.reshape(h_BxLxD.shape)


COMPUTES = {"scan": scan, "ragged_dot": ragged_dot, "megablox": megablox}


# ---------------------------------------------------------------- private


def _chosen(e: Experts, scores_BxLxE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    """i32[B, L, k], best first."""
    if bias_E is not None:
        scores_BxLxE = scores_BxLxE + jax.lax.stop_gradient(bias_E).astype(jnp.float32)[None, None]
    if e.groups > 1:
        grouped = scores_BxLxE.reshape(*scores_BxLxE.shape[:2], e.groups, -1)
        best_BxLxG = jax.lax.top_k(grouped, 2)[0].sum(-1) if grouped.shape[-1] > 1 else grouped[..., 0]
        kept_BxLxT = jax.lax.top_k(best_BxLxG, e.top_groups)[1]
        kept_BxLxG = (kept_BxLxT[..., None] == jnp.arange(e.groups)[None, None, None]).any(-2)
        scores_BxLxE = jnp.where(kept_BxLxG[..., None], grouped, -jnp.inf).reshape(scores_BxLxE.shape)
    return jax.lax.top_k(scores_BxLxE, e.per_token)[1]


def _routed(scores_BxLxE: jax.Array, ids_BxLxk: jax.Array, own_BxLxk: jax.Array, counted_BxL: jax.Array) -> Routed:
    """No router learns from the counts; it does from the sums of scores."""
    choices = scores_BxLxE.shape[-1]
    hits_BxLxkxE = ids_BxLxk[..., None] == jnp.arange(choices)[None, None, None]
    share_BxLxE = scores_BxLxE / (jnp.sum(scores_BxLxE, axis=-1, keepdims=True) + 1e-20)
    entropy_BxL = -jnp.sum(share_BxLxE * jnp.log(jnp.maximum(share_BxLxE, 1e-20)), axis=-1)
    same_BxLxk = (ids_BxLxk[..., None] == own_BxLxk[..., None, :]).any(-1)
    return Routed(
        ids=ids_BxLxk,
        load=jnp.sum(jnp.where(hits_BxLxkxE, counted_BxL[..., None, None], 0.0), axis=(0, 1, 2)),
        scores=jnp.sum(share_BxLxE * counted_BxL[..., None], axis=(0, 1)),
        entropy=jax.lax.stop_gradient(jnp.sum(entropy_BxL * counted_BxL)),
        changed=jnp.sum(jnp.where(same_BxLxk, 0.0, counted_BxL[..., None])),
    )
