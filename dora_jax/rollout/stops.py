"""Stage 2, pure: where a sample's text first contains a stop string. Standard library only.

Consumes a sample's tokens, old and new; produces how many of the new ones count. The tokens that complete the string
stay, as a stop token does.
Law: the answer depends on the sample's tokens alone, not on how they were cut into calls: a token completes a stop
string where the text of the last few tokens up to it contains one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dora_jax.rollout.migrate import InFlightSample

SLACK = 8  # tokens without text of their own (parts of a character, special ones) that may stand in a stop string


class StopStrings:
    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str] | None):
        if strings and decode is None:
            raise ValueError("rollout.stop_strings needs a tokenizer: the engine was given no `decode`")
        self._strings = tuple(strings)
        self._decode = decode or (lambda tokens: "")  # without strings nothing is decoded
        # a token is at least one byte of text, but for SLACK of them
        self._window = max((len(text.encode()) for text in strings), default=0) + SLACK

    def __bool__(self) -> bool:
        return bool(self._strings)

    def end(self, old: Sequence[int] | np.ndarray, new: Sequence[int] | np.ndarray) -> tuple[int, bool]:
        """(how many of the new tokens count, whether the last of them completes a stop string)."""
        if not self._strings or not len(new):
            return len(new), False
        tokens = [*map(int, old[-self._window :]), *map(int, new)]
        if not self._contains(tokens):  # most calls: one look at all of it
            return len(new), False
        first = len(tokens) - len(new)
        for n in range(1, len(new) + 1):
            if self._contains(tokens[max(0, first + n - self._window) : first + n]):
                return n, True
        return len(new), False

    def ends_turn(self, parcel: InFlightSample, stop_ids: Sequence[int]) -> bool:
        """Whether the last turn of this episode is over, and nothing has been observed since."""
        turn = parcel.out_ids[parcel.turn_start :].tolist()
        if not turn:
            return False
        full = len(turn) == parcel.turn_tokens and parcel.sampled < parcel.max_new_tokens
        return full or turn[-1] in stop_ids or self.end((), turn)[1]

    def _contains(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._strings)
