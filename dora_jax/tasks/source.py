"""Stage 1: a question as it stands in a source, what a source of questions does, and randomness by identity.

Standard library only. Laws: the same words give the same draw in every process, Python version and machine; nothing
here keeps a state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from dora_jax.types import Columns

Question = str | list[dict[str, str]]  # text, or messages with role and content


def uid_of(question: Question) -> str:
    """Hash the content without its white space, so that prompts which differ in layout only never cross the split."""
    if not isinstance(question, str) and [m["role"] for m in question] == ["user"]:
        question = question[0]["content"]  # what the chat template makes of a text
    content = question if isinstance(question, str) else json.dumps([[m["role"], m["content"]] for m in question])
    return hashlib.blake2b(" ".join(content.split()).encode(), digest_size=16).hexdigest()


def identity_hash(*identity: str | int) -> int:
    """64 bits decided by an identity alone: the randomness of draws, shuffles and slips."""
    words = "/".join(map(str, identity)).encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


def share_hash(*identity: str | int) -> float:
    """Uniform in [0, 1), decided by an identity alone."""
    return identity_hash(*identity) / 2**64


def shorten(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


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
    columns: Columns = field(default_factory=dict)


class Source(Protocol):
    """One of the user's is made by `task.name(heldout=, exclude=, **task.params)`: how many distinct prompts it holds
    out, and uids that it never draws."""

    name: str
    heldout: list[TaskRow]  # of distinct uids
    heldout_uids: frozenset[str]

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        """Number i of an endless stream, pure in its arguments; never a held-out uid."""

    def exclude(self, uids: AbstractSet[str]) -> None:
        """Never draw these: another source holds them out."""
