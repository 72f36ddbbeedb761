"""What a process of the trainer has made, for a new controller that asks for all steps since a checkpoint again.

    distrust -> RestoreCheckpoint(5) -> TrainGroups, FinishStep(5) -> TrainGroups, FinishStep(6) -> TrainGroups ...

Consumes calls and their answers; gives the same answers to the same calls without touching the weights, and of the
groups of a call those that are new. Law: a step, or its beginning, is recalled only where the very same groups are
asked for, however calls share them out; any other call for an earlier step ends the trainer, and its gang begins again
from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from dora_jax.runtime.cluster.messages import CODEC, StepFinished
from dora_jax.types import ScoredGroup, Version

STEPS = 256  # remembered; a checkpoint is not so far behind

INITIAL = 0


class StepCache:
    def __init__(self) -> None:
        self.digests: dict[Version, int] = {}
        self._steps: dict[Version, tuple[list[bytes], StepFinished]] = {}  # base -> its groups in order, what came out
        self.begun: list[bytes] = []  # groups of the step under way, in order: the weights are no version's
        self._asked: list[bytes] = []  # groups of a step that this controller has asked for, in order
        self._at: Version | None = None  # where the controller has it; None: where it is

    def at(self, version: Version) -> Version:
        """The version that the controller speaks of, where the weights are at `version`."""
        if self._at == version:
            self._at = None
        return version if self._at is None else self._at

    def new_controller(self) -> None:
        """Begin anew with a controller that has come, which takes this for a new trainer."""
        self._at, self._asked = INITIAL, []

    def new(self, base: Version, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """The groups of a part that were not learned from, and are marked so; RuntimeError: others
        were."""
        known, answer = self._known(base)
        before = len(self._asked)
        self._asked += [hashlib.sha256(CODEC.encode(group)).digest() for group in groups]
        shared = min(len(known), len(self._asked))
        if self._asked[:shared] != known[:shared] or (answer is not None and len(self._asked) > shared):
            raise RuntimeError(f"the step from version {base} is asked for again with other groups")
        if answer is None:
            self.begun = known + self._asked[shared:]
        return groups[max(0, shared - before) :]

    def made(self, base: Version, answer: StepFinished) -> None:
        self._steps.pop(base - STEPS, None)
        self._steps[base] = self.begun, answer
        self.begun, self._asked = [], []
        self.digests[base + 1] = answer.digest

    def rewind(self, step: Version, version: Version) -> bool:
        """To a checkpoint; False: it must be read."""
        known = step in self.digests and all(base in self._steps for base in range(step, version))
        if self._at is None or not known:
            return False
        self._at, self._asked = step, []
        return True

    def recall(self, base: Version) -> StepFinished | None:
        """A step that has been made; None: its groups are learned from. RuntimeError: it was another one."""
        known, answer = self._known(base)
        if self._asked != known:
            raise RuntimeError(f"the step from version {base} is asked for again with other groups")
        if answer is None:
            return None
        self._at, self._asked = base + 1, []
        return dataclasses.replace(answer, recalled=True)

    def _known(self, base: Version) -> tuple[list[bytes], StepFinished | None]:
        if self._at is None:
            return self.begun, None
        if base != self._at or base not in self._steps:
            raise RuntimeError(f"the step from version {base} is asked for again, and is not remembered")
        return self._steps[base]
