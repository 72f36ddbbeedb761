"""Stage 5, train: the figures that say whether a step is healthy, and the bounds that stop a run.

Inside the jit everything is a sum (or a largest value, named `*_max`) over tokens, so micro-batches just add up; on
the host `reduce` divides once. Healthy ranges:
  mismatch/mean   |trainer - engine| log-prob of lag-0 tokens: below 1e-3 in f32, below 2e-2 in bf16
  trainer/ratio_mean  0.9 to 1.1          trainer/clip_fraction  below 0.2
  trainer/entropy     falls slowly; near 0 the policy no longer explores
  trainer/ess_share   above 0.5; a fall to 0.1 comes before a collapse (arXiv 2602.17616)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.config import RunError

MAX_SKIPPED_IN_A_ROW = 3  # a third non-finite update is no accident
BINS_PER_DECADE = 8
LOWEST_DECADE, HIGHEST_DECADE = -7, 2  # of |trainer - engine|
_BINS = BINS_PER_DECADE * (HIGHEST_DECADE - LOWEST_DECADE)
TOKEN_MEANS = ("entropy", "clipped", "ratio", "kl_anchor", "kept", "kl_ref", "value_loss")


def token_sums(
    l: jax.Array,
    anchor: jax.Array,
    old: jax.Array,
    behavior: jax.Array,
    entropy: jax.Array,
    mask: jax.Array,
    lag: jax.Array,
    clipped: jax.Array,
) -> dict[str, jax.Array]:
    """Sums over the sampled tokens of a micro-batch; no gradient."""
    l, anchor, old, behavior, entropy = jax.lax.stop_gradient((l, anchor, old, behavior, entropy))
    log_ratio = jnp.clip(jnp.where(mask, l - anchor, 0.0), -20.0, 20.0)
    fresh = mask & (lag == 0)
    gap = jnp.where(fresh, old - behavior, 0.0)  # the trainer at the engine's own weights, whatever the anchor

    # Counts f32[bins] of log-spaced |d|; below the lowest decade counts in the first bin
    place = BINS_PER_DECADE * (jnp.log10(jnp.maximum(jnp.abs(gap), 10.0**LOWEST_DECADE)) - LOWEST_DECADE)
    bins = jnp.clip(jnp.nan_to_num(place, nan=_BINS - 1).astype(jnp.int32), 0, _BINS - 1).reshape(-1)

    def total(x: jax.Array, where: jax.Array = mask) -> jax.Array:
        return jnp.sum(jnp.where(where, x, 0.0), dtype=jnp.float32)

    return {
        "tokens": total(jnp.ones_like(l)),
        "entropy": total(entropy),
        "ratio": total(jnp.exp(log_ratio)),
        "clipped": total(clipped.astype(jnp.float32)),
        "kl_anchor": total(jnp.expm1(log_ratio) - log_ratio),
        "ratio_max": jnp.max(jnp.where(mask, jnp.exp(log_ratio), 0.0)),
        "fresh": total(jnp.ones_like(l), fresh),
        "mismatch": total(jnp.abs(gap), fresh),
        "mismatch_kl": total(jnp.expm1(gap) - gap, fresh),
        "mismatch_max": jnp.max(jnp.abs(gap)),
        "mismatch_bins": jax.ops.segment_sum(fresh.astype(jnp.float32).reshape(-1), bins, num_segments=_BINS),
    }


def reduce(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Host metrics of a step from the sums of its updates."""
    tokens = sum(float(u["tokens"]) for u in updates)
    first = updates[0]
    mean = {name: sum(float(u[name]) for u in updates) / max(tokens, 1.0) for name in TOKEN_MEANS if name in first}
    ess = float(first["w"]) ** 2 / max(float(first["w_sq"]), 1e-30)
    metrics = {
        "trainer/loss": float(np.mean([u["loss"] for u in updates])),
        "trainer/grad_norm": float(np.mean([u["grad_norm"] for u in updates])),
        "trainer/entropy": mean["entropy"],
        "trainer/clip_fraction": mean["clipped"],
        "trainer/ratio_mean": mean["ratio"],
        "trainer/ratio_max": max(float(u["ratio_max"]) for u in updates),
        "trainer/kl_anchor": mean["kl_anchor"],
        "trainer/rejected_share": 1.0 - mean["kept"] if tokens else 0.0,
        "trainer/ess_share": ess / max(float(first["trajectories"]), 1.0),
        "trainer/effective_batch": ess,
        "trainer/tokens": tokens,
        "trainer/updates_skipped": sum(float(u["skipped"]) for u in updates),
        "trainer/learning_rate": float(updates[-1]["learning_rate"]),
    }
    for name in ("kl_ref", "value_loss"):
        if name in mean:
            metrics[f"trainer/{name}"] = mean[name]
    for name in ("lr_scale", "value_grad_norm"):
        if name in first:
            metrics[f"trainer/{name}"] = float(np.mean([u[name] for u in updates]))
    metrics |= expert_metrics(updates) if "expert_load" in first else {}
    if fresh := float(first["fresh"]):  # the engine-trainer gap at equal weights, of tokens of lag 0
        # Upper edge of the bin that holds the quantile
        counts = np.asarray(first["mismatch_bins"])
        index = int(np.searchsorted(np.cumsum(counts), 0.99 * counts.sum()))
        metrics |= {
            "mismatch/mean": float(first["mismatch"]) / fresh,
            "mismatch/max": float(first["mismatch_max"]),
            "mismatch/p99": math.pow(10.0, LOWEST_DECADE + (index + 1) / BINS_PER_DECADE),
            "mismatch/kl": float(first["mismatch_kl"]) / fresh,
            "mismatch/tokens": fresh,
        }
    return metrics


def expert_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the routers of a mixture did in a step, from the sums of its updates."""
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


def gap(logprobs: np.ndarray, behavior_logprobs: np.ndarray) -> dict[str, float]:
    """The mismatch figures of `reduce` from the log-probs themselves, [n] tokens that both sides saw at equal
    weights."""
    d = logprobs.astype(np.float64) - behavior_logprobs
    return {
        "mismatch/mean": float(np.abs(d).mean()),
        "mismatch/max": float(np.abs(d).max()),
        "mismatch/p99": float(np.quantile(np.abs(d), 0.99)),
        "mismatch/kl": float((np.expm1(d) - d).mean()),
        "mismatch/tokens": float(d.size),
    }


class HealthBounds:
    """Stops the run where its bounds are passed."""

    def __init__(self, max_mismatch: float, dump_dir: str | None):
        self.max_mismatch = max_mismatch
        self.dump_dir = dump_dir
        self.skipped = 0  # in a row

    def check(self, sums: Mapping[str, Any], batch: Any, step: int) -> None:
        """Raises at the third non-finite update in a row, with the batch on disk."""
        self.skipped = self.skipped + 1 if sums["skipped"] else 0
        if self.skipped < MAX_SKIPPED_IN_A_ROW:
            return
        where = ""
        if self.dump_dir is not None:
            part = f"_{jax.process_index()}" if jax.process_count() > 1 else ""  # each process has its own rows
            path = Path(self.dump_dir) / f"bad_batch_{step}{part}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, group_ids=batch.group_ids, **batch.arrays())
            where = f"; the last batch is in {path}"
        raise RunError(
            f"{self.skipped} updates in a row were not finite (loss {float(sums['loss'])}, "
            f"gradient norm {float(sums['grad_norm'])}) at step {step}{where}"
        )

    def check_mismatch(self, metrics: Mapping[str, float]) -> None:
        gap = metrics.get("mismatch/mean", 0.0)
        if self.max_mismatch and not gap <= self.max_mismatch:
            raise RunError(
                f"trainer and engine disagree by {gap:.3g} nats a token at equal weights, above "
                f"trainer.max_mismatch={self.max_mismatch}: what is trained on is not what was sampled"
            )
