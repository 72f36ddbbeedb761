"""What a process of the trainer has made, for a controller that comes anew and asks for all since a checkpoint again.

    doubt -> Restore(5) -> Make(5) -> Make(6) -> here it is        without touching the weights

Consumes calls and their answers; produces the same answers to the same calls. Law: a step is recalled only where the
very same groups are asked for; whatever else is asked of a trainer that is further on ends it, and its gang is begun
anew from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib

from dora_jax.runtime.cluster.calls import CODEC, Made, Make
from dora_jax.types import Version

STEPS = 256  # remembered; a checkpoint is not so far behind

INITIAL = 0


class Memory:
    def __init__(self) -> None:
        self.digests: dict[Version, int] = {}
        self._steps: dict[Version, tuple[bytes, Made]] = {}  # base -> what was asked for, what came out
        self._at: Version | None = None  # where the controller has it; None: where it is

    def at(self, version: Version) -> Version:
        """The version that the controller speaks of, where the weights are at `version`."""
        if self._at == version:
            self._at = None
        return version if self._at is None else self._at

    def doubt(self) -> None:
        """A controller that comes anew takes it for a new trainer."""
        self._at = INITIAL

    def made(self, make: Make, answer: Made) -> None:
        self._steps.pop(make.base - STEPS, None)
        self._steps[make.base] = _fingerprint(make), answer
        self.digests[make.base + 1] = answer.digest

    def restored(self) -> None:
        self.digests, self._steps, self._at = {}, {}, None

    def rewind(self, step: Version, version: Version) -> bool:
        """To a checkpoint; False: it must be read."""
        known = step in self.digests and all(base in self._steps for base in range(step, version))
        if self._at is None or not known:
            return False
        self._at = step
        return True

    def recall(self, make: Make) -> Made:
        """A step that has been made; RuntimeError: it was another one."""
        asked, answer = self._steps.get(make.base, (b"", None))
        if make.base != self._at or asked != _fingerprint(make):
            raise RuntimeError(f"the step from version {make.base} is asked for again with other groups")
        self._at += 1
        return dataclasses.replace(answer, recalled=True)


def _fingerprint(make: Make) -> bytes:
    return hashlib.sha256(CODEC.encode(make)).digest()
