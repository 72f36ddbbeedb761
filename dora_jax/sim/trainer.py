"""The trainer in virtual time: the parts of a step one after the other, a version behind the last.

Consumes whole groups as they were taken; produces times. What a step costs whatever its tokens is spread over its
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dora_jax.costs import Costs
from dora_jax.sim.config import SimOrchestratorSection
from dora_jax.sim.instance import Job
from dora_jax.types import Version


@dataclass(slots=True, eq=False)
class SimGroup:
    """What the world knows of a group: its tag, and what its finished samples add up to."""

    version: Version
    task: str
    done: int = 0
    tokens: int = 0
    squares: float = 0.0
    mixed: int = 0  # samples with tokens of more than one version

    def ended(self, job: Job) -> None:
        self.done += 1
        self.tokens += job.tokens
        self.squares += float(job.tokens) ** 2
        self.mixed += job.mixed


class SimTrainer:
    """`busy` from the first part that finds it idle until `ends` says that it is idle again."""

    def __init__(self, section: SimOrchestratorSection, costs: Costs):
        self.busy = False
        self._section, self._costs = section, costs
        self._missing = section.groups_per_step  # groups that the step in progress still lacks
        self._free_s = 0.0  # when the last part so far is done

    @property
    def trained(self) -> int:
        """Groups of the step in progress that an idle trainer is done with."""
        return self._section.groups_per_step - self._missing

    def begins(self, now: float, groups: Sequence[SimGroup]) -> tuple[float, float, bool]:
        """(when this part begins, when it ends, whether it is the step's last)."""
        begin = max(now, self._free_s)
        share = len(groups) / self._section.groups_per_step
        tokens, squares = sum(g.tokens for g in groups), sum(g.squares for g in groups)
        samples = len(groups) * self._section.group_size
        self._free_s = begin + (
            self._costs.train_s(samples, tokens, squares) - (1 - share) * self._costs.train_s(0, 0, 0.0)
        )
        self._missing -= len(groups)
        last = self._missing == 0
        if last:
            self._missing = self._section.groups_per_step
        self.busy = True
        return begin, self._free_s, last

    def ends(self, now: float) -> bool:
        """A part has ended; False: another one has come meanwhile."""
        self.busy = now < self._free_s
        return not self.busy
