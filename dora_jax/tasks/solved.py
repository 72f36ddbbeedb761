"""What counts as solved on held-out prompts: `eval.solved`, read. Standard library only.

`right` is the term of that name at 1 or more, `right >= 0.5` at 0.5 or more; the word `total` is the whole reward where
no term has that name. Empty: the first term of task.rewards at 1 or more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_jax.types import ScoredGroup

if TYPE_CHECKING:
    import numpy as np

TOTAL = "total"
FORM = re.compile(r"\s*(?P<term>\S.*?)\s*(?:>=\s*(?P<least>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    term: str
    least: float = 1.0

    def __str__(self) -> str:
        return f"{self.term} >= {self.least:g}"

    def of(self, group: ScoredGroup) -> np.ndarray:
        """bool[G]: the samples that count as solved; ValueError where the group's reward has no such term."""
        if self.term not in (*group.parts, TOTAL):
            raise ValueError(
                f"the reward of group {group.group_id} has no term {self.term!r}; it has {', '.join(group.parts)}"
            )
        return group.parts.get(self.term, group.rewards) >= self.least


def read(text: str) -> Solved | None:
    """None: left to the task. ValueError: it is not of the form TERM or TERM >= NUMBER."""
    if not text:
        return None
    match = FORM.fullmatch(text)
    try:
        least = float(match["least"] or 1.0) if match and not set("<>=") & set(match["term"]) else None
    except ValueError:
        least = None
    if match is None or least is None:
        raise ValueError(f"{text!r} is not of the form TERM or TERM >= NUMBER")
    return Solved(term=match["term"], least=least)


def among(text: str, terms: Sequence[str]) -> Solved | None:
    """The rule of a run whose reward has these terms; None: nothing defines what counts. ValueError names the
    terms."""
    rule = read(text)
    if rule is None:
        return Solved(term=terms[0]) if terms else None
    if terms and rule.term not in (*terms, TOTAL):
        raise ValueError(f"the reward has no term {rule.term!r}; it has {', '.join(terms)}, and {TOTAL} is their sum")
    return rule
