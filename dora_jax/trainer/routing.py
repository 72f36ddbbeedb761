"""Stage 5, train: what the routers of a mixture of experts did in a step, and what keeps their load even.

Two ways, both off by default: a loss on load times score (arXiv 2101.03961), and a bias an expert that only selects,
moved after each update against its load (arXiv 2408.15664), for models whose router has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models import decoder
from dora_jax.models.families.config import Experts

BIAS = "router_bias"


def sums(routed: decoder.Routed, counted_BxL: jax.Array) -> dict[str, jax.Array]:
    """Of the tokens of a micro-batch that count; no gradient."""
    k = routed.ids.shape[-1]
    found = {
        "expert_load": routed.load,
        "expert_entropy": routed.entropy * k,  # once a choice, as the other sums
        "expert_changed": routed.changed,
        "expert_choices": counted_BxL.sum(dtype=jnp.float32) * k,
    }
    return jax.lax.stop_gradient(found)


def load_balance_loss(e: Experts, routed: decoder.Routed) -> jax.Array:
    """Mean over layers of E sum_e load_e score_e, both as shares: 1 where the load is even."""
    load_MxE = jax.lax.stop_gradient(routed.load)
    load_MxE = load_MxE / jnp.maximum(load_MxE.sum(-1, keepdims=True), 1.0)
    score_MxE = routed.scores / jnp.maximum(jax.lax.stop_gradient(routed.scores).sum(-1, keepdims=True), 1.0)
    return e.choices * jnp.mean(jnp.sum(load_MxE * score_MxE, axis=-1))


def rebalanced(params: Any, load_MxE: jax.Array, rate: float) -> Any:
    """The params with each router's bias moved by `rate`: up for experts below the mean load, down for those above."""
    layers = params[decoder.LAYERS]
    mean_Mx1 = load_MxE.mean(-1, keepdims=True)
    moved = layers[BIAS] + rate * jnp.sign(mean_Mx1 - load_MxE).astype(layers[BIAS].dtype)
    return {**params, decoder.LAYERS: {**layers, BIAS: moved}}


def metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a step, from the sums of its updates; empty without experts."""
    if "expert_load" not in updates[0]:
        return {}
    load_MxE = np.sum([np.asarray(u["expert_load"], np.float64) for u in updates], axis=0)
    layers, choices = load_MxE.shape
    asked = max(sum(float(u["expert_choices"]) for u in updates) * layers, 1.0)
    share_MxE = load_MxE / np.maximum(load_MxE.sum(-1, keepdims=True), 1.0)
    mean = {n: sum(float(np.sum(u[n])) for u in updates) / asked for n in ("expert_entropy", "expert_changed")}
    return {
        "moe/load_max": float(share_MxE.max() * choices),  # the busiest expert's load, in units of the mean
        "moe/load_min": float(share_MxE.min() * choices),
        "moe/entropy": mean["expert_entropy"],  # nats, of a router's scores
        "moe/dropped_share": 1.0 - float(load_MxE.sum()) / asked,
        "moe/replay_changed": mean["expert_changed"],  # of the replayed choices, those that the router would not make
    }
