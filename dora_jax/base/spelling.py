"""Suggests the known name that a user probably meant by an unknown one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher


def nearest(name: str, known: Iterable[str]) -> str:
    """The known dotted name most like this one: in its last word or that word's initials, then as a whole."""
    known = list(known)
    name = name[: 2 * max(map(len, known))]  # the comparison is quadratic, and a name may be a file put in its place
    word = name.rpartition(".")[2]

    def likeness(other: str, ratio: Callable[[SequenceMatcher], float]) -> float:
        leaf = other.rpartition(".")[2]
        initials = "".join(part[0] for part in leaf.split("_") if part)  # lr is learning_rate
        of_leaf, of_initials, of_all = (
            ratio(SequenceMatcher(None, a, b)) for a, b in ((word, leaf), (word, initials), (name, other))
        )
        return max(of_leaf, of_initials - 0.1) + 0.5 * of_all

    best, most = known[0], -1.0
    for other in known:  # quick_ratio is a cheap upper bound; it skips most candidates
        if likeness(other, SequenceMatcher.quick_ratio) > most:
            best, most = max((best, most), (other, likeness(other, SequenceMatcher.ratio)), key=lambda pair: pair[1])
    return best
