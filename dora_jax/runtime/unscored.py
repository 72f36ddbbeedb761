"""Groups that are not trained on because they have no score, or because their prompt is too long.

Consumes what became of every group; produces their shares, a console line for the first failure of each kind, with the
sample, and the end of a run whose rewards fail too often. Law: a failed group is counted and never scored 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dora_jax.config import RunError
from dora_jax.tasks.identity import shorten
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import GroupId

MIN_GROUPS_FOR_FAILED_SHARE = 100  # below this one failure says nothing about a share
MIN_GROUPS_ALL_FAILED = 10  # nothing was scored so far: a hanging reward takes minutes for each of these
MAX_KINDS = 20  # of failures that are printed
WIDTH = 100  # columns of a printed text


class Unscored:
    def __init__(self, max_failed_share: float, prompt_of: Callable[[GroupId], Any], notify: Callable[[str], None]):
        self._max_failed_share, self._prompt_of, self._notify = max_failed_share, prompt_of, notify
        self._kinds: set[str] = set()
        self._lengths: list[int] = []
        self._scored = self._failed = self._skipped = 0

    def scored(self) -> None:
        self._scored += 1

    def skipped(self) -> None:
        """Its prompt is too long."""
        self._skipped += 1

    def failed(self, failure: GroupFailure) -> None:
        """RunError where more groups fail than task.max_failed_share allows."""
        self._failed += 1
        self._lengths.extend(failure.lengths)
        kind = failure.kind or failure.reason
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            self._notify(self._described(failure))
        total = self._failed + self._scored
        enough = total >= MIN_GROUPS_FOR_FAILED_SHARE or self._failed == total >= MIN_GROUPS_ALL_FAILED
        if enough and self._failed > self._max_failed_share * total:
            lengths = np.quantile(self._lengths or [0], [0.5, 0.9])
            raise RunError(
                f"{self._failed} of {total} groups could not be scored (task.max_failed_share = {self._max_failed_share:.1%}); "
                f"response length p50 {lengths[0]:.0f}, p90 {lengths[1]:.0f}; last reason: {failure.reason}"
            )

    def metrics(self) -> dict[str, float]:
        """Since this process began."""
        groups = self._failed + self._scored
        lengths = np.quantile(self._lengths or [0], [0.5, 0.9])
        return {
            "groups/failed_share": self._failed / max(1, groups),
            "groups/failed_length_p50": float(lengths[0]),
            "groups/failed_length_p90": float(lengths[1]),
            "prompts/skipped": self._skipped,
            "prompts/skipped_share": self._skipped / max(1, groups + self._skipped),
        }

    def _described(self, failure: GroupFailure) -> str:
        prompt = self._prompt_of(failure.group_id)
        said = [
            f"a group cannot be scored: {failure.reason}; others like it are only counted, in groups/failed_share",
            f"  prompt   {shorten(repr(prompt.text), WIDTH)}",
            f"  answer   {shorten(repr(prompt.answer), WIDTH)}",
        ]
        return "\n".join(said + [f"  response {shorten(repr(failure.response), WIDTH)}"])
