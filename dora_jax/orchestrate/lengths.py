"""Lengths: what the samples that have ended say about those that run. Values in, values out.

Two questions of a sample that has n tokens, answered from the share S(l) of the ended samples that are longer than l:

    held(n)   KV tokens that it takes at the worst moment to come, on average over many like it: the largest
              l * S(l) / S(n), l >= n. Most of them have ended by the time that the few long ones are long
    left(n)   tokens that it is expected to add

The first samples to end are short ones: what runs is then longer than they say, and its own tokens are the least that
`held` answers.
"""

from __future__ import annotations

import functools
import math

# Lengths are told apart by quarters of an octave: 19 % is less than what one instance's samples scatter.
BUCKETS_AN_OCTAVE = 4
# Answers are renewed after so many ended samples, and as rarely as a 32nd to a 64th of all that have ended says more.
RENEWED_EVERY = 32


class Lengths:
    def __init__(self) -> None:
        self.ended = 0
        self.counts: list[int] = []  # ended samples by bucket of their length
        self.sums: list[int] = []  # their tokens
        self.held_by: list[float] = []  # held, of a sample in each bucket, as of the last renewal
        self.left_by: list[float] = []

    def observe(self, tokens: int) -> bool:
        """A sample ended; True where that has renewed the answers."""
        bucket = _bucket(tokens)
        if missing := max(0, bucket + 1 - len(self.counts)):
            self.counts += [0] * missing
            self.sums += [0] * missing
        self.counts[bucket] += 1
        self.sums[bucket] += tokens
        self.ended += 1
        every = RENEWED_EVERY << max(0, (self.ended // (32 * RENEWED_EVERY)).bit_length() - 1)
        if self.ended % every:
            return False
        self._renew()
        return True

    def held(self, tokens: int) -> float:
        bucket = _bucket(tokens)
        return max(tokens, self.held_by[bucket]) if bucket < len(self.held_by) else tokens

    def left(self, tokens: int) -> float:
        """Under a long tail, what is longer than any before goes on for as long again."""
        bucket = _bucket(tokens)
        return self.left_by[bucket] if bucket < len(self.left_by) else tokens

    def _renew(self) -> None:
        self.held_by, self.left_by = [0.0] * len(self.counts), [0.0] * len(self.counts)
        longer, beyond, most = 0, 0, 0.0  # samples from this bucket on, their tokens, and the largest l * S(l)
        above = _edge(len(self.counts))
        for bucket in reversed(range(len(self.counts))):
            edge = _edge(bucket)
            longer += self.counts[bucket]
            beyond += self.sums[bucket]
            most = max(most, above * longer)
            self.held_by[bucket] = most / longer
            self.left_by[bucket] = max(1.0, beyond / longer - edge)
            above = edge


def _bucket(tokens: int) -> int:
    return int(BUCKETS_AN_OCTAVE * math.log2(tokens + 1))


@functools.cache
def _edge(bucket: int) -> float:
    """The least length in a bucket."""
    return 2 ** (bucket / BUCKETS_AN_OCTAVE) - 1
