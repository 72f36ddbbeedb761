"""Stage 5, train: advantages of one whole step, on the host (numpy, f64 inside, f32 out). Pure.

One sequence a row: rewards f32[n] (or [n, T] for the per-token ones), group_ids int[n], mask bool[n, T] True where
the policy sampled the token. *Next* always means the next sampled token: observations are transparent.

Stage 5, train: the trainer's part in packing a step: trajectories -> advantages, loss mask, denominators. Host only.

`Prepare` is what `buffer.pack` takes as its objective. Law: everything here sees the whole step at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dora_jax.config import TrainerSection
from dora_jax.trainer import loss, objective
from dora_jax.types import Estimate

GRPO_EPS = 1e-6
WHITEN_EPS = 1e-8  # under the root: a batch without variance whitens to 0


def estimate(name: str, rewards: Any, group_ids: Any, **params: Any) -> np.ndarray:
    """Advantages by name or import path: f32[n] per trajectory, or f32[n, T] where the method is per token."""
    rewards = np.asarray(rewards, np.float64)
    function = ESTIMATORS.get(name) or objective.plugin("advantage", name)
    return np.asarray(function(rewards, np.asarray(group_ids), **params), np.float32)


def grpo(rewards: np.ndarray, group_ids: np.ndarray, *, eps: float = GRPO_EPS) -> np.ndarray:
    """(R - mean_g) / (std_g + eps), ddof 1; a singleton group has mean 0 and std 1 (arXiv 2402.03300)."""
    group, count = _groups(group_ids)
    mean = np.where(count > 1, _mean(rewards, group), 0.0)
    square = np.bincount(group, weights=(rewards - mean[group]) ** 2)
    std = np.where(count > 1, np.sqrt(square / np.maximum(count - 1, 1)), 1.0)
    return (rewards - mean[group]) / (std[group] + eps)


def dr_grpo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """R - mean_g, not divided by the spread (arXiv 2503.20783)."""
    group, _ = _groups(group_ids)
    return rewards - _mean(rewards, group)[group]


def rloo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """R minus the mean of the *others*: (G R_i - sum_g R) / (G - 1); G = 1 gives 0 (arXiv 2402.14740)."""
    group, count = _groups(group_ids)
    size = count[group]
    total = np.bincount(group, weights=rewards)[group]
    return np.where(size > 1, (size * rewards - total) / np.maximum(size - 1, 1), 0.0)


def reinforce_pp(rewards: np.ndarray, group_ids: np.ndarray, *, mask: Any, gamma: float = 1.0) -> np.ndarray:
    """Discounted return per sampled token, whitened over the global batch (arXiv 2501.03262)."""
    del group_ids
    mask = np.asarray(mask, bool)
    reward = token_rewards(rewards, mask)
    returns, ahead = np.zeros(mask.shape), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):  # an observed token neither discounts nor stops the return
        ahead = np.where(mask[:, t], reward[:, t] + gamma * ahead, ahead)
        returns[:, t] = ahead
    return _whiten(returns, mask)


def reinforce_pp_baseline(rewards: np.ndarray, group_ids: np.ndarray, *, mask: Any = None) -> np.ndarray:
    """R - mean_g, whitened over all sampled tokens; without a mask over trajectories."""
    centred = dr_grpo(rewards, group_ids)
    if mask is None:
        return _whiten(centred, np.ones(len(centred), bool))
    mask = np.asarray(mask, bool)
    return _whiten(np.broadcast_to(centred[:, None], mask.shape), mask)


def max_rl(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(R - mean_g) / mean_g, 0 where the mean is 0 (arXiv 2602.02710)."""
    group, _ = _groups(group_ids)
    mean = _mean(rewards, group)[group]
    return np.where(mean != 0, (rewards - mean) / np.where(mean != 0, mean, 1.0), 0.0)


def opo(rewards: np.ndarray, group_ids: np.ndarray, *, lengths: Any = None, mask: Any = None) -> np.ndarray:
    """R minus the length-weighted group mean (arXiv 2505.23585); lengths [n], or counted from the mask."""
    if lengths is None and mask is None:
        raise ValueError("advantage 'opo' needs lengths, or the mask to count them from")
    group, _ = _groups(group_ids)
    weight = np.asarray(mask, bool).sum(-1) if lengths is None else np.asarray(lengths)
    return rewards - _mean(rewards, group, weight.astype(np.float64))[group]


def vcpo(rewards: np.ndarray, group_ids: np.ndarray, *, w: Any, g_sq: Any) -> np.ndarray:
    """R minus the minimum-variance off-policy baseline sum w^2 |g|^2 R / sum w^2 |g|^2 of its group.

    w [n]: trajectory importance weights exp(sum m (l_old - l_mu)); g_sq [n]: squared norm of grad log pi.
    """
    group, _ = _groups(group_ids)
    weight = np.asarray(w, np.float64) ** 2 * np.asarray(g_sq, np.float64)
    return rewards - _mean(rewards, group, weight)[group]


ESTIMATORS = {f.__name__: f for f in (grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, max_rl, opo, vcpo)}


# ------------------------------------------------------- with a value model


def gae(
    rewards: Any, values: Any, mask: Any, gamma: float = 1.0, lam: float = 0.95, bootstrap: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """(whitened advantages, returns = A + V) f32[n, T] over sampled tokens (arXiv 1506.02438).

    rewards [n] (on the last sampled token) or [n, T]; bootstrap [n]: the value after the last sampled token
    of a truncated trajectory, else 0.
    """
    mask, values = np.asarray(mask, bool), np.asarray(values, np.float64)
    reward = token_rewards(np.asarray(rewards, np.float64), mask)
    adv, returns = _gae_plain(reward, np.where(mask, values, 0.0), mask, gamma, lam, bootstrap)
    return _whiten(adv, mask).astype(np.float32), returns.astype(np.float32)


def gae_turn(
    rewards: Any, values: Any, mask: Any, gamma: float = 1.0, lam: float = 0.95, bootstrap: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """GAE with turns as states: V of a turn is V of its first sampled token, one lambda step a turn.

    A turn is a run of sampled tokens; its tokens share its advantage and its return.
    """
    mask, values = np.asarray(mask, bool), np.asarray(values, np.float64)
    first = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    turn = np.cumsum(first, axis=1) - 1  # index of the turn that a sampled token belongs to
    shape = (len(mask), max(int(first.sum(1).max(initial=0)), 1))
    row = np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)
    turn_rewards, turn_values, exists = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    np.add.at(turn_rewards, (row[mask], turn[mask]), token_rewards(np.asarray(rewards, np.float64), mask)[mask])
    turn_values[row[first], turn[first]] = values[first]
    exists[row[first], turn[first]] = True
    adv, returns = _gae_plain(turn_rewards, turn_values, exists, gamma, lam, bootstrap)
    spread, spread_returns = np.zeros(mask.shape), np.zeros(mask.shape)
    spread[mask], spread_returns[mask] = adv[row[mask], turn[mask]], returns[row[mask], turn[mask]]
    return _whiten(spread, mask).astype(np.float32), spread_returns.astype(np.float32)


def overlong_penalty(lengths: Any, limit: int, cache: int) -> np.ndarray:
    """0 up to limit - cache, then linearly down to -1 at limit, -1 beyond (DAPO, arXiv 2503.14476)."""
    lengths = np.asarray(lengths, np.float64)
    slope = (limit - cache - lengths) / max(cache, 1)
    return np.where(lengths > limit, -1.0, np.minimum(slope, 0.0)).astype(np.float32)


# ---------------------------------------------------------------- private


def _groups(group_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dense group index of each trajectory, and the size of each group."""
    _, group, count = np.unique(group_ids, return_inverse=True, return_counts=True)
    return group.reshape(-1), count


def _mean(rewards: np.ndarray, group: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Per group; a group whose weights are all 0 takes the plain mean."""
    plain = np.bincount(group, weights=rewards) / np.bincount(group)
    if weight is None:
        return plain
    total = np.bincount(group, weights=weight)
    weighted = np.bincount(group, weights=weight * rewards)
    return np.where(total > 0, weighted / np.where(total > 0, total, 1.0), plain)


def token_rewards(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """f64[n, T]: [n] rewards go to the last sampled token; [n, T] stay, each on the sampled token before or at it."""
    spread = np.zeros(mask.shape)
    if rewards.ndim == 1:
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
        rows = np.flatnonzero(mask.any(axis=1))
        spread[rows, last[rows]] = rewards[rows]
        return spread
    owner = np.maximum.accumulate(np.where(mask, np.arange(mask.shape[1])[None, :], -1), axis=1)
    row, column = np.nonzero(owner >= 0)
    np.add.at(spread, (row, owner[row, column]), rewards[row, column])
    return spread


def _gae_plain(
    rewards: np.ndarray, values: np.ndarray, exists: np.ndarray, gamma: float, lam: float, bootstrap: Any
) -> tuple[np.ndarray, np.ndarray]:
    following = np.zeros(len(exists)) if bootstrap is None else np.asarray(bootstrap, np.float64)
    ahead, adv = np.zeros(len(exists)), np.zeros(exists.shape)
    for t in reversed(range(exists.shape[1])):
        here = exists[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        ahead = np.where(here, delta + gamma * lam * ahead, ahead)
        following = np.where(here, values[:, t], following)
        adv[:, t] = np.where(here, ahead, 0.0)
    return adv, np.where(exists, adv + values, 0.0)


def _whiten(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Zero mean, unit variance over the masked entries (Bessel), 0 elsewhere; one entry is only centred."""
    chosen = x[mask]
    if not chosen.size:
        return np.zeros(x.shape)
    variance = chosen.var(ddof=1) if chosen.size > 1 else 0.0
    return np.where(mask, (x - chosen.mean()) / np.sqrt(variance + WHITEN_EPS), 0.0)


class ZeroWeights:
    """The objective of groups that are only looked at: no advantage, no weight."""

    def estimate(self, sequences: Any) -> Estimate:
        mask = np.asarray(sequences.mask, bool)
        return Estimate(np.zeros(len(mask)), mask)

    def token_weights(self, mask: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        return np.zeros(mask.shape)


class Prepare:
    """Advantages and loss weights as a TrainerSection asks for them; max_len is the response limit."""

    def __init__(self, section: TrainerSection, max_len: int):
        self._section = section
        self._max_len = max_len

    def estimate(self, sequences: Any) -> Estimate:
        """`sequences`: one trajectory a row (see buffer.pack.Sequences)."""
        section, rewards = self._section, sequences.rewards
        if section.overlong_cache:
            rewards = rewards + overlong_penalty(sequences.lengths, self._max_len, section.overlong_cache)
        if section.kl_in == "reward" and section.kl != "none":
            per_token = np.asarray(loss.kl(section.kl, sequences.old_logprobs, sequences.ref_logprobs))
            per_token = np.where(sequences.mask, section.kl_coef * per_token, 0.0)
            # costs stay on their tokens where the estimator credits tokens, else they add up per trajectory
            on_tokens = section.advantage in ("gae", "gae_turn", "reinforce_pp")
            credited = token_rewards(rewards, sequences.mask) if on_tokens else rewards
            rewards = credited - (per_token if on_tokens else per_token.sum(-1))
        mask, returns = np.asarray(sequences.mask, bool), None
        name, params = section.advantage, dict(section.advantage_params)
        if name in ("reinforce_pp", "reinforce_pp_baseline", "opo"):
            params["mask"] = mask
        elif name == "vcpo":
            gap = np.where(mask, sequences.old_logprobs - sequences.behavior_logprobs, 0.0).sum(-1)
            params |= {"w": np.exp(np.clip(gap, -20.0, 20.0)), "g_sq": sequences.grad_sq[:, 0]}
        if name in ("gae", "gae_turn"):
            # a truncated trajectory would have gone on: its last value stands for the rest
            last = np.where(mask.any(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1), 0)
            bootstrap = np.where(sequences.truncated, sequences.values[np.arange(len(last)), last], 0.0)
            estimator = gae if name == "gae" else gae_turn
            advantages, returns = estimator(rewards, sequences.values, mask, bootstrap=bootstrap, **params)
        else:
            if name not in ESTIMATORS:
                offered = {"mask": mask, "lengths": sequences.lengths, "truncated": sequences.truncated}
                params |= objective.offered(objective.plugin("advantage", name), offered)
            advantages = estimate(name, rewards, sequences.group_ids, **params)
        if advantages.shape not in (mask.shape[:1], mask.shape):
            raise ValueError(
                f"trainer.advantage: {name} returned an array of shape {advantages.shape} for {len(mask)} trajectories "
                f"of {mask.shape[1]} positions; it has one number a trajectory, or one a position"
            )
        if section.overlong_filter:  # after the estimate: these trajectories count in the group statistics
            mask = mask & ~sequences.truncated[:, None]
        return Estimate(advantages, mask, returns)

    def token_weights(self, mask: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        return loss.token_weights(self._section.aggregation, mask, None, group_ids, self._max_len)
