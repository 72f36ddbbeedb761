"""Stage 1: a question as it stands in a source, and what a source of questions does."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from dora_jax.tasks.identity import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One question of a source, before the template."""

    uid: str
    task: str
    question: Question
    answer: Any
    solution: str | None = None  # what a teacher wrote (rows: `completion`)
    entry: dict[str, Any] | None = None  # reasoning-gym's own, for worked solutions
    part: str = ""  # of a mix: the name of its entry


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def heldout(self) -> Sequence[TaskRow]:
        """Rows of distinct uids."""

    @property
    def heldout_uids(self) -> frozenset[str]: ...

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        """Number i of an endless stream, pure in its arguments; never a held-out uid."""

    def exclude(self, uids: AbstractSet[str]) -> None:
        """Never draw these: another source holds them out."""
