"""Stage 5, train: the trainer's part in packing a step: trajectories -> advantages, loss mask, denominators. Host only.

`Prepare` is what `buffer.pack` takes as its objective. Law: everything here sees the whole step at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dora_jax.config import TrainerSection
from dora_jax.trainer import advantage, loss


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Advantages f32[n] or [n, T], the mask that takes part in the loss, and the value model's targets if any."""

    advantages: np.ndarray
    mask: np.ndarray
    returns: np.ndarray | None = None


class Unjudged:
    """The objective of groups that are only looked at: no advantage, no weight."""

    def estimate(self, sequences: Any) -> Estimate:
        mask = np.asarray(sequences.mask, bool)
        return Estimate(np.zeros(len(mask)), mask)

    def token_weights(self, mask: np.ndarray, segment_ids: np.ndarray | None, group_ids: np.ndarray) -> np.ndarray:
        return np.zeros(mask.shape)


class Prepare:
    """Advantages and loss weights as a TrainerSection asks for them; max_len is the response limit."""

    def __init__(self, section: TrainerSection, max_len: int):
        self._section = section
        self._max_len = max_len

    def estimate(self, sequences: Any) -> Estimate:
        """`sequences`: one trajectory a row (see buffer.pack.Sequences)."""
        rewards = self._rewards(sequences)
        mask = np.asarray(sequences.mask, bool)
        advantages, returns = self._advantages(sequences, rewards, mask)
        if self._section.overlong_filter:  # after the estimate: these trajectories count in the group statistics
            mask = mask & ~sequences.truncated[:, None]
        return Estimate(advantages, mask, returns)

    def token_weights(self, mask: np.ndarray, segment_ids: np.ndarray | None, group_ids: np.ndarray) -> np.ndarray:
        return loss.token_weights(self._section.aggregation, mask, segment_ids, group_ids, self._max_len)

    def _rewards(self, sequences: Any) -> np.ndarray:
        section, rewards = self._section, sequences.rewards
        if section.overlong_cache:
            rewards = rewards + advantage.overlong_penalty(sequences.lengths, self._max_len, section.overlong_cache)
        if section.kl_in == "reward" and section.kl != "none":
            per_token = np.asarray(loss.kl(section.kl, sequences.old_logprobs, sequences.ref_logprobs))
            per_token = np.where(sequences.mask, section.kl_coef * per_token, 0.0)
            rewards = self._minus_tokens(rewards, per_token, sequences.mask)
        return rewards

    def _minus_tokens(self, rewards: np.ndarray, cost: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Token costs stay on their tokens where the estimator credits tokens, else they add up per trajectory."""
        if self._section.advantage in ("gae", "gae_turn", "reinforce_pp"):
            return advantage.token_rewards(rewards, mask) - cost
        return rewards - cost.sum(-1)

    def _advantages(
        self, sequences: Any, rewards: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        name, params = self._section.advantage, dict(self._section.advantage_params)
        if name in ("gae", "gae_turn"):
            # a truncated trajectory would have gone on: its last value stands for the rest
            last = np.where(mask.any(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1), 0)
            bootstrap = np.where(sequences.truncated, sequences.values[np.arange(len(last)), last], 0.0)
            estimator = advantage.gae if name == "gae" else advantage.gae_turn
            return estimator(rewards, sequences.values, mask, bootstrap=bootstrap, **params)
        if name in ("reinforce_pp", "reinforce_pp_baseline", "opo"):
            params["mask"] = mask
        if name == "vcpo":
            gap = np.where(mask, sequences.old_logprobs - sequences.behavior_logprobs, 0.0).sum(-1)
            params |= {"w": np.exp(np.clip(gap, -20.0, 20.0)), "g_sq": sequences.grad_sq[:, 0]}
        return advantage.estimate(name, rewards, sequences.group_ids, **params), None
