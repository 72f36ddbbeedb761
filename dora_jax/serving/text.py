"""Tokens -> text as it grows, and where a stop string ends it. Pure.

Laws: the pieces of a text, joined, do not depend on how its tokens were cut into ticks; no piece holds half a character
or the beginning of a stop string that may still be completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
CONTEXT = 5  # prompt tokens before the first sampled one: some tokenizers drop the blank before a first word
INCOMPLETE = "\ufffd"  # what a decoder says for half a character


class Detokenizer:
    """The text of one growing token sequence."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._start, self._told = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self._grown(final=False)

    def rest(self) -> str:
        """What is left when no token follows."""
        return self._grown(final=True)

    def _grown(self, final: bool) -> str:
        before, now = self._decode(self._ids[self._start : self._told]), self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not final):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]


class StopText:
    """Lets a text through up to the first stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """include: the stop string itself is part of the text."""
        self._stops, self._include = tuple(stops), include
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(what may be told now, whether a stop string is complete: then nothing follows)."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            return self._held[: at + len(stop) * self._include], True
        keep = held_back(self._held, self._stops)
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told, False

    def rest(self) -> str:
        """What was held back, when no text follows."""
        told, self._held = self._held, ""
        return told


def held_back(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of the marks."""
    longest = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
