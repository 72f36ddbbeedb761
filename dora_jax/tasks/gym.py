"""Stage 1, source of prompts: datasets of reasoning-gym, by name.

Consumes a dataset's name and parameters; produces `TaskRow`s. Training indices are drawn by counter from (seed, group),
held-out indices from a stream of their own.
Laws: the held-out set is the first n distinct uids of its stream; a training draw that meets one is drawn again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from dora_jax.config import ConfigError
from dora_jax.tasks.datasets import open_dataset
from dora_jax.tasks.prompts import Wording
from dora_jax.tasks.source import TaskRow, identity_hash, uid_of

MAX_REDRAWS = 1000  # draws in a row that meet nothing new before a dataset counts as exhausted
MIN_TRAINING_SHARE = 0.1  # of draws that must stay outside the held-out set
SLOW_S = 3.0  # held-out prompts that take longer are worth a line on the console

_log = logging.getLogger(__name__)


class GymSource:
    """Source of one dataset's prompts."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        wording: Wording,
        *,
        heldout: int,
        exclude: AbstractSet[str],
        scored_by_dataset: bool,
    ):
        self.name = f"reasoning_gym:{name}"
        self._dataset = open_dataset(name, params)
        self._item = {"reasoning_gym": name, "params": dict(params)}
        self._scored_by_dataset = scored_by_dataset
        self._wording = wording
        self.heldout: list[TaskRow] = []
        self._excluded = set(exclude)
        # Fills `heldout` with the first n distinct uids of the held-out stream.
        began_s, warned, draws, met = time.monotonic(), False, 0, 0
        while len(self.heldout) < heldout:
            row = self._row("heldout", 0, draws, 0)
            draws, met = draws + 1, met + 1
            if row.uid not in self._excluded:
                self.heldout.append(row)
                self._excluded.add(row.uid)
                met = 0
            elif met == MAX_REDRAWS:
                raise ConfigError(
                    f"task.heldout: {self.name} gave only {len(self.heldout)} distinct prompts for the "
                    f"{heldout} to hold out; widen task.params or lower it"
                )
            if not warned and time.monotonic() - began_s > SLOW_S:
                warned = True
                _log.warning(
                    "%s is slow: %d of %d held-out prompts made in %.0f s (task.heldout sets how many)",
                    self.name,
                    len(self.heldout),
                    heldout,
                    SLOW_S,
                )
        if draws > heldout:  # repeats: the dataset is small enough for the held-out set to matter
            free = sum(self._row("train", 0, i, 0).uid not in self._excluded for i in range(64))
            if free < MIN_TRAINING_SHARE * 64:
                raise ConfigError(
                    f"task.heldout: {len(self.heldout)} prompts are nearly all that {self.name} has with "
                    "these task.params; widen them or lower it"
                )
        self.heldout_uids = frozenset(row.uid for row in self.heldout)

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        for attempt in range(MAX_REDRAWS):
            row = self._row(stream, seed, i, attempt)
            if row.uid not in self._excluded:
                return row
        raise ValueError(f"{self.name}: {MAX_REDRAWS} draws for number {i} were all held out; lower task.heldout")

    def exclude(self, uids: AbstractSet[str]) -> None:
        self._excluded |= uids

    def _row(self, stream: str, seed: int, i: int, attempt: int) -> TaskRow:
        index = identity_hash(stream, seed, i, attempt) % self._dataset.size
        entry = self._dataset.entry(index)
        question = self._wording.question(entry["question"])
        answer = entry["answer"]
        if self._scored_by_dataset:  # names the item, which the reward worker makes again
            answer = {**self._item, "index": index, "answer": answer}
        return TaskRow(
            uid=uid_of(question),
            task=entry["metadata"]["source_dataset"],
            question=question,
            answer=answer,
            entry=entry,
        )
