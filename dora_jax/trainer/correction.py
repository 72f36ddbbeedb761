"""Stage 5, train: correction of the engine-trainer gap and of staleness. Pure; plain arrays in and out.

d = l_old - l_mu: what the trainer says of a token under the step's starting weights, less what the engine returned when
it sampled it. Laws: no gradient flows through a correction; a rejection shrinks the mask but never the denominators
(`loss.token_weights` was computed before it); what lies under the mask reaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.trainer import objective
from dora_jax.trainer.loss import clean, segment_max, segment_sum

LOG_WEIGHT_LIMIT = 20.0  # a sequence's summed gap is clamped here before exp

Result = tuple[jax.Array, jax.Array, dict[str, jax.Array]]


def weights(
    name: str,
    old_logprobs: Any,
    behavior_logprobs: Any,
    mask: Any,
    *,
    logprobs: Any = None,
    advantages: Any = None,
    segment_ids: Any = None,
    **params: Any,
) -> Result:
    """(weights f32[B, T], mask bool[B, T], metrics): the loss is multiplied by the first and kept where the second.

    name: of CORRECTIONS, or the import path of a function of the same form (objective.plugin)."""
    function = CORRECTIONS.get(name) or objective.plugin("correction", name)
    mask = jnp.asarray(mask, bool)
    gap = clean(old_logprobs, mask) - clean(behavior_logprobs, mask)
    if name == "opsm" and (logprobs is None or advantages is None):
        raise ValueError("correction 'opsm' needs logprobs and advantages")
    offered = {
        "drift": None if logprobs is None else clean(old_logprobs, mask) - clean(logprobs, mask),
        "adv": None if advantages is None else clean(advantages, mask),
    }
    w, keep, metrics = function(gap, mask, segment_ids, **objective.offered(function, offered), **params)
    metrics["rejected_share"] = 1.0 - jnp.sum(keep) / jnp.maximum(jnp.sum(mask), 1)
    return jax.lax.stop_gradient((w, keep, metrics))


def none(gap: jax.Array, mask: jax.Array, segment_ids: Any) -> Result:
    return jnp.ones_like(gap), mask, {}


def tis(gap: jax.Array, mask: jax.Array, segment_ids: Any, *, C: float = 2.0, level: str = "token") -> Result:
    """Truncated importance weights min(exp(d), C), of a token or of its whole sequence."""
    log_w = {"token": gap, "sequence": segment_sum(gap, segment_ids)}
    if level not in log_w:
        raise ValueError(f"correction 'tis': unknown level {level!r}: known are {', '.join(log_w)}")
    raw = jnp.exp(jnp.clip(log_w[level], -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
    w = jnp.where(mask, jnp.minimum(raw, C), 1.0)
    return w, mask, {"truncated_share": jnp.sum((raw > C) & mask) / jnp.maximum(jnp.sum(mask), 1)}


def icepop(gap: jax.Array, mask: jax.Array, segment_ids: Any, *, lo: float = 0.5, hi: float = 5.0) -> Result:
    """exp(d) where it lies inside [lo, hi], else 0 (arXiv 2510.18855)."""
    raw = jnp.exp(jnp.clip(gap, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
    inside = (raw >= lo) & (raw <= hi)
    w = jnp.where(mask, jnp.where(inside, raw, 0.0), 1.0)
    return w, mask, {"zeroed_share": jnp.sum(~inside & mask) / jnp.maximum(jnp.sum(mask), 1)}


def reject(
    gap: jax.Array,
    mask: jax.Array,
    segment_ids: Any,
    *,
    lo: float = 0.5,
    hi: float = 2.0,
    level: str = "token",
    metric: str = "ratio",
) -> Result:
    """Name `mask`: drops tokens or sequences whose quantity leaves [lo, hi]; weights stay 1.

    metric: ratio exp(d), or a KL(mu || old) estimate k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d of each token.
    level: token; seq_sum, seq_mean, seq_max of the tokens' metric; geometric = exp(mean d). For a ratio seq_sum adds
    the logs: it is the ratio of the whole sequence.
    """
    d = jnp.clip(gap, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    metrics = {"ratio": jnp.exp(d), "k1": -d, "k2": 0.5 * d * d, "k3": jnp.expm1(d) - d}
    if metric not in metrics:
        raise ValueError(f"correction 'mask': unknown metric {metric!r}: known are {', '.join(metrics)}")
    inside, length = jnp.where(mask, metrics[metric], 0.0), segment_sum(mask.astype(jnp.float32), segment_ids)
    levels = {
        "token": metrics[metric],
        "seq_sum": segment_sum(inside, segment_ids),
        "seq_mean": segment_sum(inside, segment_ids) / jnp.maximum(length, 1.0),
        "seq_max": segment_max(jnp.where(mask, metrics[metric], -jnp.inf), segment_ids),
    }
    if metric == "ratio":
        summed = segment_sum(gap, segment_ids)
        levels["seq_sum"] = jnp.exp(jnp.clip(summed, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
        levels["geometric"] = jnp.exp(summed / jnp.maximum(length, 1.0))
    if level not in levels:
        raise ValueError(
            f"correction 'mask': level {level!r} with metric {metric!r}: levels are token, seq_sum, seq_mean, "
            f"seq_max, and geometric for the ratio"
        )
    return jnp.ones_like(gap), mask & (levels[level] >= lo) & (levels[level] <= hi), {}


def opsm(
    gap: jax.Array, mask: jax.Array, segment_ids: Any, *, drift: jax.Array, adv: jax.Array, delta: float = 0.1
) -> Result:
    """Off-policy sequence masking: drops sequences with A < 0 whose mean(l_old - l) > delta (arXiv 2512.02556)."""
    length = jnp.maximum(segment_sum(mask.astype(jnp.float32), segment_ids), 1.0)
    dropped = (segment_sum(adv, segment_ids) < 0) & (segment_sum(drift, segment_ids) / length > delta)
    return jnp.ones_like(gap), mask & ~dropped, {}


def vcpo_lr(gap: jax.Array, mask: jax.Array, segment_ids: Any, *, rho_base: float = 1.0) -> Result:
    """Scales the step, not the loss: metrics ess, rho = ess / n, lr_scale (arXiv 2602.17616)."""
    n, first, second = trajectory_moments(gap, mask, segment_ids)
    ess, rho, scale = effective_samples(n, first, second, rho_base)
    return jnp.ones_like(gap), mask, {"ess": ess, "rho": rho, "lr_scale": scale}


CORRECTIONS: dict[str, Callable] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "mask": reject,
    "opsm": opsm,
    "vcpo_lr": vcpo_lr,
}


def trajectory_moments(gap: jax.Array, mask: jax.Array, segment_ids: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(n, sum w, sum w^2) over trajectories with sampled tokens, w = exp(sum d): these add up over micro-batches."""
    m = mask.astype(jnp.float32)
    share = m / jnp.maximum(segment_sum(m, segment_ids), 1.0)  # adds up to 1 over each trajectory
    log_w = segment_sum(jnp.where(mask, gap, 0.0), segment_ids)
    w = jnp.exp(jnp.clip(log_w, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT))
    return share.sum(), jnp.sum(share * w), jnp.sum(share * w * w)


def effective_samples(n: Any, first: Any, second: Any, rho_base: float) -> tuple[Any, Any, Any]:
    """(ESS = (sum w)^2 / sum w^2, rho = ESS / n, sqrt(min(1, rho / rho_base)))."""
    ess = first * first / jnp.maximum(second, jnp.finfo(jnp.float32).tiny)
    rho = ess / jnp.maximum(n, 1.0)
    return ess, rho, jnp.sqrt(jnp.minimum(1.0, rho / rho_base))
