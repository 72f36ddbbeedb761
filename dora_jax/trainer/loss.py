"""Stage 5, train: per-token policy losses, KL, value loss and aggregation. Pure; plain arrays in and out.

Names used here: `l` log-prob under the policy being trained, `anchor` the log-prob that the ratio divides by
(behaviour or proximal), A advantage, m mask of sampled tokens, r = exp(l - anchor), sg stop gradient.
A *sequence* is one trajectory: a row where `segment_ids` is None, else one segment of a packed row.

Laws: what lies under the mask (even -inf or nan) reaches neither value nor gradient; nothing here averages:
denominators belong to the whole step and live in `token_weights`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models.families.config import Experts
from dora_jax.models.moe import Routed
from dora_jax.trainer import objective


def segment_sum(values_BxL: Any, segment_ids_BxL: Any, n_segments: int | None = None) -> Any:
    """Each token gets the sum over its own sequence, f32[B, L]. segment_ids None: one sequence a row.

    Ids count from 0 within a row and stay below n_segments (default L + 1, more than a row can hold).
    """
    if segment_ids_BxL is None:
        shape = values_BxL.shape
        total = values_BxL.sum(axis=-1, keepdims=True)
        return np.broadcast_to(total, shape) if isinstance(values_BxL, np.ndarray) else jnp.broadcast_to(total, shape)
    rows, length = values_BxL.shape
    n = n_segments or length + 1
    if isinstance(values_BxL, np.ndarray):
        keys = (np.asarray(segment_ids_BxL) + n * np.arange(rows)[:, None]).reshape(-1)
        sums = np.bincount(keys, weights=values_BxL.reshape(-1), minlength=rows * n)
        return sums[keys].reshape(rows, length).astype(values_BxL.dtype)
    return jax.vmap(lambda v, ids: jax.ops.segment_sum(v, ids, num_segments=n)[ids])(
        values_BxL, jnp.asarray(segment_ids_BxL)
    )


def segment_max(values_BxL: jax.Array, segment_ids_BxL: Any) -> jax.Array:
    """Each token gets the largest value of its own sequence."""
    if segment_ids_BxL is None:
        return jnp.broadcast_to(values_BxL.max(axis=-1, keepdims=True), values_BxL.shape)
    n = values_BxL.shape[1] + 1
    return jax.vmap(lambda v, ids: jax.ops.segment_max(v, ids, num_segments=n)[ids])(
        values_BxL, jnp.asarray(segment_ids_BxL)
    )


LOG_RATIO_LIMIT = 20.0  # |l - anchor| beyond this overflows nothing but says nothing either
DPPO_RATIO_CAP = 20.0  # the importance weight of a token that passed the divergence mask


def policy_loss(
    name: str,
    logprobs: Any,
    anchor_logprobs: Any,
    advantages: Any,
    mask: Any,
    *,
    behavior_logprobs: Any = None,
    rewards: Any = None,
    segment_ids: Any = None,
    **params: Any,
) -> jax.Array:
    """Per-token loss f32[B, T], zero where `mask` is false, before any weight or aggregation.

    name: of POLICY_LOSSES, or the import path of a function of the same form (objective.plugin)."""
    function = POLICY_LOSSES.get(name) or objective.plugin("policy_loss", name)
    mask = jnp.asarray(mask, bool)
    l, anchor, adv = (clean(x, mask) for x in (logprobs, anchor_logprobs, advantages))
    if name == "topr" and rewards is None:
        raise ValueError("policy loss 'topr' needs rewards: it treats positive and other trajectories apart")
    offered = {
        "behavior": None if behavior_logprobs is None else clean(behavior_logprobs, mask),
        "rewards": None if rewards is None else clean(rewards, mask),
        "mask": mask,
        "segment_ids": segment_ids,
    }
    return jnp.where(mask, function(l, anchor, adv, **objective.offered(function, offered), **params), 0.0)


def ppo(
    l: jax.Array,
    anchor: jax.Array,
    adv: jax.Array,
    *,
    eps_lo: float = 0.2,
    eps_hi: float = 0.2,
    dual_clip: float | None = None,
) -> jax.Array:
    """max(-A r, -A clip(r)); dual clip bounds the loss of A < 0 by -c A (arXiv 1707.06347, 1912.09729)."""
    return _clipped(_ratio(l, anchor), adv, eps_lo, eps_hi, dual_clip)


def gspo(
    l: jax.Array,
    anchor: jax.Array,
    adv: jax.Array,
    *,
    mask: jax.Array,
    segment_ids: Any,
    eps_lo: float = 3e-4,
    eps_hi: float = 4e-4,
) -> jax.Array:
    """Clip on the sequence's geometric-mean ratio, in its token form (arXiv 2507.18071)."""
    gap = jnp.where(mask, l - anchor, 0.0)
    length = jnp.maximum(segment_sum(mask.astype(jnp.float32), segment_ids), 1.0)
    mean_gap = jnp.clip(segment_sum(gap, segment_ids) / length, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jax.lax.stop_gradient(jnp.exp(mean_gap)) * jnp.exp(l - jax.lax.stop_gradient(l))
    return _clipped(ratio, adv, eps_lo, eps_hi, None)


def cispo(l: jax.Array, anchor: jax.Array, adv: jax.Array, *, eps_lo: float = 1.0, eps_hi: float = 4.0) -> jax.Array:
    """-sg(clip(r)) A l: a clipped weight never silences a token (arXiv 2506.13585); eps_lo >= 1: no lower clip."""
    weight = jnp.clip(_ratio(l, anchor), 1.0 - eps_lo, 1.0 + eps_hi)
    return -jax.lax.stop_gradient(weight) * adv * l


def sapo(l: jax.Array, anchor: jax.Array, adv: jax.Array, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> jax.Array:
    """A soft gate instead of the clip: -(4 / tau) sigmoid(tau (r - 1)) A (arXiv 2511.20347)."""
    tau = jnp.where(adv > 0, tau_pos, tau_neg)
    return -(4.0 / tau) * jax.nn.sigmoid(tau * (_ratio(l, anchor) - 1.0)) * adv


def topr(
    l: jax.Array, anchor: jax.Array, adv: jax.Array, *, rewards: jax.Array, w_pos: float = 1.0, w_neg: float = 1.0
) -> jax.Array:
    """Positive trajectories unweighted, the others with a truncated ratio (arXiv 2503.14286)."""
    tapered = jax.lax.stop_gradient(jnp.clip(_ratio(l, anchor), 0.0, 1.0))
    return -jnp.where(rewards > 0, w_pos, w_neg * tapered) * adv * l


def reinforce(l: jax.Array, anchor: jax.Array, adv: jax.Array) -> jax.Array:
    """-A l; the importance weight, if any, is the correction's."""
    del anchor
    return -adv * l


def dppo_tv(
    l: jax.Array,
    anchor: jax.Array,
    adv: jax.Array,
    *,
    behavior: jax.Array | None = None,
    d_lo: float = 0.2,
    d_hi: float = 0.2,
) -> jax.Array:
    """Drops tokens whose probability already moved too far the way A pushes it (arXiv 2602.04879)."""
    pi, mu = jnp.exp(jax.lax.stop_gradient(l)), jnp.exp(anchor if behavior is None else behavior)
    return _divergence_masked(l, anchor, adv, up=pi - mu > d_hi, down=mu - pi > d_lo)


def dppo_kl(
    l: jax.Array,
    anchor: jax.Array,
    adv: jax.Array,
    *,
    behavior: jax.Array | None = None,
    d_lo: float = 0.05,
    d_hi: float = 0.05,
) -> jax.Array:
    """The same with the Bernoulli KL(mu || pi) of "this token or another" as distance."""
    pi, mu = jnp.exp(jax.lax.stop_gradient(l)), jnp.exp(anchor if behavior is None else behavior)
    tiny = jnp.finfo(jnp.float32).tiny
    others = (1.0 - mu) * (jnp.log1p(-jnp.minimum(mu, 1 - 1e-7)) - jnp.log1p(-jnp.minimum(pi, 1 - 1e-7)))
    distance = mu * (jnp.log(mu + tiny) - jnp.log(pi + tiny)) + others
    return _divergence_masked(l, anchor, adv, up=(pi > mu) & (distance > d_hi), down=(pi < mu) & (distance > d_lo))


def longcat(
    l: jax.Array,
    anchor: jax.Array,
    adv: jax.Array,
    *,
    behavior: jax.Array | None = None,
    eps_neg_lo: float = 0.2,
    eps_pos_hi: float = 0.2,
    eps_neg_hi: float = 5.0,
    C: float = 2.0,
) -> jax.Array:
    """Triplet clip times truncated importance weights of the engine gap (arXiv 2509.18883).

    `anchor` is the proximal policy; without `behavior` there is no gap to correct and the weight is 1.
    """
    ratio = _ratio(l, anchor)
    gain = jnp.minimum(ratio * adv, jnp.clip(ratio, 1.0 - eps_neg_lo, 1.0 + eps_pos_hi) * adv)
    gain = jnp.where(adv < 0, jnp.maximum(gain, eps_neg_hi * adv), gain)
    if behavior is None:
        return -gain
    return -gain * jax.lax.stop_gradient(jnp.minimum(_ratio(anchor, behavior), C))


POLICY_LOSSES = {f.__name__: f for f in (ppo, gspo, cispo, sapo, topr, reinforce, dppo_tv, dppo_kl, longcat)}


def clipped(name: str, logprobs: Any, anchor_logprobs: Any, advantages: Any, params: dict[str, Any]) -> jax.Array:
    """bool[B, T]: tokens whose gradient the token-level clip of `name` removes (False for losses without one)."""
    if name not in ("ppo", "longcat"):
        return jnp.zeros(jnp.shape(logprobs), bool)
    lo, hi = ("eps_lo", "eps_hi") if name == "ppo" else ("eps_neg_lo", "eps_pos_hi")
    ratio = _ratio(jnp.asarray(logprobs), jnp.asarray(anchor_logprobs))
    above, below = ratio > 1.0 + params.get(hi, 0.2), ratio < 1.0 - params.get(lo, 0.2)
    return jnp.where(jnp.asarray(advantages) > 0, above, below & (jnp.asarray(advantages) < 0))


def kl(
    name: str, logprobs: Any, ref_logprobs: Any, *, input_clamp: float | None = 20.0, output_clamp: float | None = 10.0
) -> jax.Array:
    """Estimators of KL(pi || ref) per token from D = l - l_ref (Schulman, "Approximating KL divergence")."""
    d = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(ref_logprobs, jnp.float32)
    if input_clamp is not None:
        d = jnp.clip(d, -input_clamp, input_clamp)
    # expm1: exp(-D) - 1 + D cancels to nothing in f32 for |D| below 1e-3
    values = {"k1": d, "k2": 0.5 * d * d, "k3": jnp.expm1(-d) + d}
    if name not in values:
        raise ValueError(f"unknown KL estimator {name!r}: known are {', '.join(values)}")
    return values[name] if output_clamp is None else jnp.clip(values[name], -output_clamp, output_clamp)


def value_loss(values: Any, old_values: Any, returns: Any, *, e: float | None = 0.2) -> jax.Array:
    """0.5 max((V - ret)^2, (V_old + clip(V - V_old, +-e) - ret)^2) per token; e None: not clipped."""
    values, returns = jnp.asarray(values, jnp.float32), jnp.asarray(returns, jnp.float32)
    error = jnp.square(values - returns)
    if e is None:
        return 0.5 * error
    old = jnp.asarray(old_values, jnp.float32)
    near = old + jnp.clip(values - old, -e, e)
    return 0.5 * jnp.maximum(error, jnp.square(near - returns))


def load_balance_loss(e: Experts, routed: Routed) -> jax.Array:
    """The load-balancing loss of a mixture's routers (arXiv 2101.03961): the mean over layers of E sum_e load_e
    score_e, both as shares: 1 where the load is even."""
    load_MxE = jax.lax.stop_gradient(routed.load)
    load_MxE = load_MxE / jnp.maximum(load_MxE.sum(-1, keepdims=True), 1.0)
    score_MxE = routed.scores / jnp.maximum(jax.lax.stop_gradient(routed.scores).sum(-1, keepdims=True), 1.0)
    return e.choices * jnp.mean(jnp.sum(load_MxE * score_MxE, axis=-1))


# ----------------------------------------------------------- aggregation

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean")


def token_weights(
    aggregation: str, mask: Any, segment_ids: Any = None, group_ids: Any = None, max_len: int | None = None
) -> Any:
    """f32[B, T] whose weighted sum of per-token losses is the aggregate over the whole step.

    group_ids: [B], or [B, T] in packed rows (prompt_mean only). Sequences of `seq_mean_token_sum_norm` are all rows,
    or all segments with an id above 0 (0 marks padding) or with a sampled token, the fully masked ones included.
    numpy in, numpy out.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}: known are {', '.join(AGGREGATIONS)}")
    xp = np if isinstance(mask, np.ndarray) else jnp
    m = xp.asarray(mask, bool).astype(xp.float32)
    if aggregation == "token_mean":
        return m / xp.maximum(m.sum(), 1.0)
    if aggregation == "seq_mean_token_sum_norm":
        if not max_len:
            raise ValueError("aggregation 'seq_mean_token_sum_norm' needs max_len, the longest response allowed")
        if segment_ids is None:
            return m / (m.shape[0] * max_len)
        ids = xp.asarray(segment_ids)
        exists = ((ids > 0) | (segment_sum(m, ids) > 0)).astype(xp.float32)
        size = xp.maximum(segment_sum(xp.ones_like(m), ids), 1.0)
        return m / (xp.maximum((exists / size).sum(), 1.0) * max_len)
    if aggregation == "prompt_mean":
        if group_ids is None:
            raise ValueError("aggregation 'prompt_mean' needs group_ids")
        ids = xp.asarray(group_ids)
        ids = xp.broadcast_to(ids[:, None], m.shape) if ids.ndim == 1 else ids
        room = {} if xp is np else {"size": m.size, "fill_value": ids.reshape(-1)[0]}
        _, dense = xp.unique(ids.reshape(-1), return_inverse=True, **room)
        length = segment_sum(m.reshape(1, -1), dense.reshape(1, -1), n_segments=m.size).reshape(m.shape)
    else:
        length = segment_sum(m, segment_ids)
    per_token = m / xp.maximum(length, 1.0)  # 1 / length of the token's sequence, or of its group
    non_empty = xp.maximum(per_token.sum(), 1.0)
    return (m if aggregation == "seq_mean_token_sum" else per_token) / non_empty


# ---------------------------------------------------------------- private


def clean(x: Any, mask: jax.Array) -> jax.Array:
    """f32 of the mask's shape, 0 under the mask; [B] is spread over the row's tokens."""
    x = jnp.asarray(x, jnp.float32)
    x = jnp.broadcast_to(x[:, None], mask.shape) if x.ndim == 1 and mask.ndim == 2 else x
    return jnp.where(mask, x, 0.0)


def _ratio(l: jax.Array, anchor: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(l - anchor, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _clipped(ratio: jax.Array, adv: jax.Array, eps_lo: float, eps_hi: float, dual_clip: float | None) -> jax.Array:
    loss = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 1.0 - eps_lo, 1.0 + eps_hi))
    if dual_clip is None:
        return loss
    return jnp.where(adv < 0, jnp.minimum(loss, -dual_clip * adv), loss)


def _divergence_masked(l: jax.Array, anchor: jax.Array, adv: jax.Array, *, up: jax.Array, down: jax.Array) -> jax.Array:
    weight = jax.lax.stop_gradient(jnp.minimum(_ratio(l, anchor), DPPO_RATIO_CAP))
    dropped = ((adv > 0) & up) | ((adv < 0) & down)
    return jnp.where(dropped, 0.0, -adv * weight * l)
