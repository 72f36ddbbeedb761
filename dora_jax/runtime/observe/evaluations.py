"""Held-out groups as they are scored -> one record an evaluated version: accuracy, the reward and each of its terms.

Consumes scored held-out groups and those that failed; produces metrics when the last group of a version has ended.
Law: a version's record comes once all of its groups have ended, whether or not some have no score, and says how many.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dora_jax.base.metrics import of_prompts, wilson
from dora_jax.config import RunError
from dora_jax.orchestrate.state import State
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.solved import Solved
from dora_jax.types import Sample, ScoredGroup, Version

Metrics = dict[str, float]


class Evaluations:
    """`state`: the orchestrator's, as it is before the end of an evaluated group reaches it; `on_evaluated` gets
    (version, metrics)."""

    def __init__(
        self,
        state: State,
        solved: Solved | None,
        on_evaluated: Callable[[Version, Metrics], None],
        notify: Callable[[str], None],
        noisy: bool = False,
    ):
        """noisy: samples with an odd index met noise."""
        self._noisy = noisy
        self._state, self._solved, self._on_evaluated, self._notify = state, solved, on_evaluated, notify
        self._scored: dict[Version, list[ScoredGroup]] = collections.defaultdict(list)
        self._left: dict[Version, int] = {}  # groups that have not ended
        self._failed: collections.Counter[Version] = collections.Counter()

    def scored(self, group: ScoredGroup) -> None:
        self._scored[group.version].append(group)
        if group.group_id in self._state.groups:  # else an earlier process scored it, and counted it
            self._ended(group.version)

    def failed(self, failure: GroupFailure) -> None:
        version = self._state.groups[failure.group_id].version
        self._failed[version] += 1
        self._ended(version)

    def _ended(self, version: Version) -> None:
        self._left[version] = self._left.get(version, self._state.evaluating[version]) - 1
        if self._left[version]:
            return
        del self._left[version]
        groups, failed = self._scored.pop(version, []), self._failed.pop(version, 0)
        if not groups:
            self._notify(f"version {version} is not evaluated: none of its {failed} groups has a score")
            return
        metrics = evaluation(groups, self._solved, self._noisy)
        self._on_evaluated(version, metrics | ({"eval/failed": failed} if failed else {}))


def evaluation(groups: Sequence[ScoredGroup], solved: Solved | None, noisy: bool = False) -> Metrics:
    """The record of one version: eval/reward/mean and /std, eval/reward/term/NAME; where it is defined what counts as
    solved, eval/accuracy (avg@k) and eval/pass_at_k of k samples a prompt, and _low and _high of both: the 95 %
    interval.

    Source: Chen et al. 2021, arXiv 2107.03374; with all k samples used, pass@k is the share of groups with one that is
    solved."""
    metrics = {f"eval/{name}": value for name, value in reward_metrics(groups).items()}
    metrics |= {
        "eval/k": len(groups[0].rewards),
        "eval/prompts": len(groups),
        "eval/response_length": float(np.mean([sampled_tokens(s) for g in groups for s in g.samples])),
    }
    if solved is None:
        return metrics
    try:
        passed = [solved.of(group) for group in groups]
    except ValueError as error:
        raise RunError(f"eval.solved: {error}") from error
    shares, some = [float(p.mean()) for p in passed], float(np.mean([p.any() for p in passed]))
    ends = of_prompts(shares, len(passed[0])), wilson(some, len(passed))
    if noisy and len(groups[0].rewards) > 1:
        for name, first in (("clean", 0), ("noisy", 1)):
            metrics[f"eval/accuracy_{name}"] = float(np.mean([p[first::2].mean() for p in passed]))
    found: Metrics = {}
    for name, value, (low, high) in zip(("accuracy", "pass_at_k"), (float(np.mean(shares)), some), ends, strict=True):
        found |= {f"eval/{name}": value, f"eval/{name}_low": low, f"eval/{name}_high": high}
    return found | metrics


def sampled_tokens(sample: Sample) -> int:
    """Sampled tokens of all turns and branches; what was observed does not count."""
    masks = [*(branch.mask for branch in sample.branches), sample.mask]
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def reward_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """reward/mean and /std of the samples, reward/term/NAME: the mean of a term over the samples that have it."""
    rewards = np.concatenate([group.rewards for group in groups])
    terms: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for group in groups:
        for name, values in group.parts.items():
            terms[name].append(values)
    return {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())} | {
        f"reward/term/{name}": float(np.concatenate(values).mean()) for name, values in terms.items()
    }


def closing(evaluations: Mapping[Version, Mapping[str, float]]) -> str:
    """What the last line of a run says of them: accuracy, or the mean reward where nothing says what counts as
    solved."""
    known = sorted(evaluations.items())
    if not known:
        return "held-out accuracy: not measured"
    if not all("eval/accuracy" in metrics for _, metrics in known):
        return "held-out reward: " + ", ".join(f"{m['eval/reward/mean']:.3f} at version {v}" for v, m in known)
    shares = []
    for version, metrics in known:
        ends = [metrics.get(f"eval/accuracy_{end}") for end in ("low", "high")]  # which a record of an older run lacks
        interval = " to ".join(f"{end:.0%}" for end in ends if end is not None)
        shares.append(f"{metrics['eval/accuracy']:.1%}{f' ({interval})' if interval else ''} at version {version}")
    return "held-out accuracy: " + ", ".join(shares)
