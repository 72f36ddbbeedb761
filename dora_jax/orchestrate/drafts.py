"""What drafts from siblings are worth: by how much sooner few rows have their tokens. Values in, values out.

    gain(rows)   seconds of a token by decode calls alone / seconds that it takes, of a sample among so many rows

Consumes what instances report of ticks in which a call verified drafts, and what the fleet's line (line.py) says of decode
calls at the same load. Fewer rows gain more: a number of rows that no report had gains as much as the next greater one
that reports had, and nothing beyond the greatest. Without a report every gain is 1.
"""

from __future__ import annotations

import math

from dora_jax.orchestrate.line import Line

OCTAVES = 16  # of rows: 1, 2, 3 to 4, 5 to 8, ...
KNOWN_TOKENS = 256  # that were drawn with drafts before their gain counts
KEPT = 1 - 1 / 128  # of the sums, at each report of so many rows


class DraftGain:
    def __init__(self) -> None:
        self.line = Line()  # of a median instance's ticks with drafts: a token's time at a load
        self.tokens = [0] * OCTAVES  # drawn with drafts, by octave of rows
        self.plain_s = [0.0] * OCTAVES  # seconds of each sample that decode calls alone would have taken
        self.took_s = [0.0] * OCTAVES
        self.guesses = self.held = 0.0  # the older ones forgotten
        self.saved_s = 0.0  # of each sample, summed over the run

    @property
    def acceptance(self) -> float:
        """Share of guessed tokens that hold, each by itself; 0: none was guessed."""
        return self.held / self.guesses if self.guesses else 0.0

    def gain(self, rows: float) -> float:
        for octave in range(_octave(rows), OCTAVES):
            if self.tokens[octave] >= KNOWN_TOKENS:
                return self.plain_s[octave] / self.took_s[octave]
        return 1.0

    def facts(self) -> dict[str, float]:
        """For a person; nothing where no token was guessed."""
        return {"acceptance": self.acceptance, "gain": self.gain(1)} if self.guesses else {}

    def guessed(self, guesses: int, held: int) -> None:
        self.guesses, self.held = KEPT * self.guesses + guesses, KEPT * self.held + held

    def drafted(self, rows: float, tokens: int, plain_s: float, took_s: float) -> None:
        """Ticks in which a call verified drafts. plain_s, took_s: of each of the rows, summed."""
        octave = _octave(rows)
        if octave < OCTAVES:
            self.tokens[octave] += tokens
            self.saved_s += plain_s - took_s
            self._add(octave, plain_s, took_s)

    def decoded(self, rows: float, took_s: float) -> None:
        """Ticks without drafts: where these come and go, the rows gain less."""
        octave = _octave(rows)
        if octave < OCTAVES and self.tokens[octave]:
            self._add(octave, took_s, took_s)

    def _add(self, octave: int, plain_s: float, took_s: float) -> None:
        self.plain_s[octave] = KEPT * self.plain_s[octave] + plain_s
        self.took_s[octave] = KEPT * self.took_s[octave] + took_s


def _octave(rows: float) -> int:
    return OCTAVES if rows == math.inf else max(0, math.ceil(math.log2(max(1.0, rows))))
