"""Where a step has no group of its base: one group of the version before, to measure the engine-trainer gap on.

Consumes published versions and a step's groups; produces the keyword that `Trainer.step` takes. Law: only equal weights
compare, so the weights of the version before are kept for that; without them the step is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dora_jax.types import ScoredGroup, Version


class GapProbe:
    """probe(group, version, weights): what `Trainer.step` measures the gap on; None: nothing is measured."""

    def __init__(self, probe: Callable[[ScoredGroup, Version, Any], Any] | None):
        self._probe = probe
        self.wanted = probe is not None
        self._before: tuple[Version, Any] | None = None

    def keep(self, version: Version, weights: Any) -> None:
        """The next step's base is the version after this one."""
        self._before = version, weights

    def among(self, groups: Sequence[ScoredGroup], base: Version) -> dict[str, Any]:
        """The keyword, if any."""
        if self._before is None or self._before[0] != base - 1 or any(group.version == base for group in groups):
            return {}
        version, weights = self._before
        for group in groups:
            if any(span.version == version for sample in group.samples for span in sample.spans):
                return {"probe": self._probe(group, version, weights)}
        return {}
