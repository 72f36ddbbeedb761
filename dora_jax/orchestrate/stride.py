"""Stride: which versions the rollouts take. Every s-th one; those between are published for checkpoints and evaluation,
and no instance loads them for training.

A version costs the rollouts time of its own: each instance loads it, and at its end it holds whole instances for a few
long samples. Of every s-th version alone they pay a share 1 / s, for groups that are (s - 1) / 2 versions older on
average. K stays the bound, by the ledger's rule: a group is meant for the newest version that is taken, so that a
stride up to K leaves room for the groups of the next batch.

With `stride` = 0 the stride follows what the last steps have shown:

    step_s      from one publication to the next (median)
    train_s     that the trainer works: from the last groups that it took to the publication, for each of these, times
                P. Where it has more than one part before it, this is too long: a trainer that never waits
    version_s   instance-seconds that a version costs: N loads, and the unused parts of the instances that its last
                samples hold (sim/bound.py, "fragments"), by the lengths of the samples that have ended

    raised      while the trainer waits, to the least stride of which one more would gain less than WORTH of a step
    lowered     by one where the mean lag is over its budget, or where the trainer has not waited for REVIEW steps:
                what was gained may be gone
    at most     K less the steps that the longest sample takes, which may begin just before the version is replaced; and
                what the budget of the mean lag leaves beside the lag that the load makes

Consumes facts that the journal holds, so that a replay takes the same versions. Law: base - taken < K.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from dora_jax.orchestrate.fleet import Fleet
from dora_jax.orchestrate.ledger import Ledger
from dora_jax.orchestrate.modes import OrchestratorConfig

WINDOW = 10  # steps that are looked at, and that lie between two changes
REVIEW = 5 * WINDOW  # steps without a wait of the trainer, after which a smaller stride is tried
BELOW = 0.95  # of the budget: a mean of few steps scatters
WORTH = 0.02  # of a step: less is not seen beside what steps differ by


@dataclass
class Strides:
    stride: int = 1  # versions from one that the rollouts take to the next
    unchanged: int = 0  # steps since it changed
    steps: list[tuple[float, float, float]] = field(default_factory=list)  # the last: step_s, train_s, mean lag
    published_s: float = 0.0
    lags: int = 0  # of all groups taken until then, summed
    took_s: float = 0.0  # when the trainer took groups last
    took: int = 0  # and how many

    @property
    def mean_lag(self) -> float:
        """The mean over the groups that the last steps trained."""
        return statistics.fmean(lag for _, _, lag in self.steps) if self.steps else 0.0

    def adapt(self, config: OrchestratorConfig, ledger: Ledger, fleet: Fleet, now_s: float) -> int:
        """The stride from the version on that is published now."""
        lags, groups = sum(lag * n for lag, n in ledger.lags.items()), config.groups_per_step
        train_s = (now_s - self.took_s) * groups / max(1, self.took)
        self.steps = [*self.steps, (now_s - self.published_s, train_s, (lags - self.lags) / groups)][-WINDOW:]
        self.published_s, self.lags = now_s, lags
        stride, self.unchanged = config.stride or self._measured(config, fleet), self.unchanged + 1
        if stride != self.stride:
            self.stride, self.unchanged = stride, 0
        return stride

    def _measured(self, config: OrchestratorConfig, fleet: Fleet) -> int:
        measured, budget, instances, stride = fleet.measured, config.max_mean_lag, len(fleet.instances), self.stride
        if budget and self.mean_lag > budget and stride > 1:
            return stride - 1
        if self.unchanged + 1 < WINDOW or not measured.lengths.ended or not instances:
            return stride
        step_s = statistics.median(step_s for step_s, _, _ in self.steps)
        wait_s = step_s - statistics.median(train_s for _, train_s, _ in self.steps)
        tail_s, version_s = (tokens * measured.token_s() for tokens in measured.lengths.tail(instances))
        most = config.max_versions - math.ceil(tail_s / max(step_s, 1e-9))
        if budget:
            # Without a stride the lag is that which the load makes, once the trainer is the slower one
            others = max(config.inflight, self.mean_lag - (stride - 1) / 2)
            most = min(most, math.floor(1 + 2 * (BELOW * budget - others)))
        if wait_s <= WORTH * step_s:
            stride -= self.unchanged + 1 >= REVIEW
        else:
            each_s = version_s / instances + measured.load_s
            while stride < most and each_s / (stride * (stride + 1)) > WORTH * step_s:
                stride += 1
        return max(1, min(most, stride))
