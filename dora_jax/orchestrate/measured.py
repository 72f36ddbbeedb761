"""What ended samples and reports have shown so far: lengths, times, and the pages that follow from them.

A reservation is a prompt and as much of a response as samples of such a length hold at the worst moment to come. Of
both the configuration knows bounds only, and an instance that reserved bounds would stand two thirds empty: they hold
until enough samples have ended, and until reports say what a sample holds beside its response.

The line through loads and step times: how long a decode step takes. Values in, values out.

step_s = weights . load,   by least squares of the relative error, the older reports forgotten

Lengths: what the samples that have ended say about those that run. Values in, values out.

Two questions of a sample that has n tokens, answered from the share S(l) of the ended samples that are longer than l:

    held(n)   KV tokens that it takes at the worst moment to come, on average over many like it: the largest
              l * S(l) / S(n), l >= n. Most of them have ended by the time that the few long ones are long
    left(n)   tokens that it is expected to add

The first samples to end are short ones: what runs is then longer than they say, and its own tokens are the least that
`held` answers.

What drafts from siblings are worth: by how much sooner few rows have their tokens. Values in, values out.

    gain(rows)   seconds of a token by decode calls alone / seconds that it takes, of a sample among so many rows

Consumes what instances report of ticks in which a call verified drafts, and what the fleet's line (`Line`) says of
decode calls at the same load. Fewer rows gain more: a number of rows that no report had gains as much as the next
greater one that reports had, and nothing beyond the greatest. Without a report every gain is 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LOADS = 3
LINE_KEPT = 1 - 1 / 4096  # of the sums, at each report
LINE_RENEWED_EVERY = 16  # reports after which the weights are solved for again
RIDGE = 1e-3  # where all loads are alike, the line is through what was seen


@dataclass
class Line:
    reports: int = 0
    products: list[float] = field(default_factory=([0.0] * LOADS**2).copy)  # load_i * load_j / step_s**2, summed
    sums: list[float] = field(default_factory=([0.0] * LOADS).copy)  # load_i / step_s, summed
    weights: list[float] = field(default_factory=([0.0] * LOADS).copy)

    def step_s(self, load: Sequence[float]) -> float:
        return sum(weight * each for weight, each in zip(self.weights, load, strict=True))

    def add(self, load: Sequence[float], step_s: float) -> None:
        scaled = [each / step_s for each in load]
        for i, a in enumerate(scaled):
            self.sums[i] = LINE_KEPT * self.sums[i] + a
            for j, b in enumerate(scaled):
                at = LOADS * i + j
                self.products[at] = LINE_KEPT * self.products[at] + a * b
        self.reports += 1
        if self.reports < LINE_RENEWED_EVERY or not self.reports % LINE_RENEWED_EVERY:
            # By elimination; the ridge keeps every pivot positive
            rows = [[*self.products[LOADS * i : LOADS * (i + 1)], self.sums[i]] for i in range(LOADS)]
            for i, row in enumerate(rows):
                row[i] = row[i] * (1 + RIDGE) or 1.0
            for i, pivot in enumerate(rows):
                for j, row in enumerate(rows):
                    if j != i:
                        factor = row[i] / pivot[i]
                        rows[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
            self.weights = [row[-1] / row[i] for i, row in enumerate(rows)]


# Lengths are distinguished by quarters of an octave: 19 % is less than what one instance's samples scatter.
BUCKETS_AN_OCTAVE = 4
# Answers are renewed after so many ended samples, and as rarely as a 32nd to a 64th of all that have ended says more.
RENEWED_EVERY = 32


@dataclass
class Lengths:
    ended: int = 0
    counts: list[int] = field(default_factory=list)  # ended samples by bucket of their length
    sums: list[int] = field(default_factory=list)  # their tokens
    held_by: list[float] = field(default_factory=list)  # held, of a sample in each bucket, as of the last renewal
    left_by: list[float] = field(default_factory=list)

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
        return True

    def held(self, tokens: int) -> float:
        bucket = _bucket(tokens)
        return max(tokens, self.held_by[bucket]) if bucket < len(self.held_by) else tokens

    def left(self, tokens: int) -> float:
        """Under a long tail, what is longer than any before goes on for as long again."""
        bucket = _bucket(tokens)
        return self.left_by[bucket] if bucket < len(self.left_by) else tokens

    def tail(self, instances: int) -> tuple[float, float]:
        """(tokens of the longest sample that has ended, tokens' time for which the last samples of a version leave
        instances unused that they hold). Of N - 1 instances (one holds the tail before) these hold the share that their
        KV has of all (sim/bound.py, "fragments"); in both, what a bucket holds is as long as its end."""
        left, longer, unused = 0.0, 0, 0.0
        held: list[tuple[float, float]] = []
        for bucket in reversed(range(len(self.counts))):
            longer += self.counts[bucket]
            edge, above = _edge(bucket), _edge(bucket + 1)
            left += longer * (above**2 - edge**2) / 2
            held.append((above - edge, left))
        for width, kv in held:
            share = (instances - 1) * kv / left
            unused += width * (math.ceil(share - 1e-9) - share)
        return _edge(len(self.counts)), unused


def _bucket(tokens: int) -> int:
    return int(BUCKETS_AN_OCTAVE * math.log2(tokens + 1))


@functools.cache
def _edge(bucket: int) -> float:
    """The least length in a bucket."""
    return 2 ** (bucket / BUCKETS_AN_OCTAVE) - 1


OCTAVES = 16  # of rows: 1, 2, 3 to 4, 5 to 8, ...
KNOWN_TOKENS = 256  # that were drawn with drafts before their gain counts
DRAFTS_KEPT = 1 - 1 / 128  # of the sums, at each report of so many rows


@dataclass
class DraftGain:
    line: Line = field(default_factory=Line)  # of a median instance's ticks with drafts: a token's time at a load
    tokens: list[int] = field(default_factory=([0] * OCTAVES).copy)  # drawn with drafts, by octave of rows
    # seconds of each sample that decode calls alone would have taken
    plain_s: list[float] = field(default_factory=([0.0] * OCTAVES).copy)
    took_s: list[float] = field(default_factory=([0.0] * OCTAVES).copy)
    guesses: float = 0.0  # the older ones forgotten
    held: float = 0.0
    saved_s: float = 0.0  # of each sample, summed over the run

    @property
    def acceptance(self) -> float:
        """Share of guessed tokens that hold, each by itself; 0: none was guessed."""
        return self.held / self.guesses if self.guesses else 0.0

    def gain(self, rows: float) -> float:
        for octave in range(_octave(rows), OCTAVES):
            if self.tokens[octave] >= KNOWN_TOKENS:
                return self.plain_s[octave] / self.took_s[octave]
        return 1.0

    def drafted(self, rows: float, tokens: int, plain_s: float, took_s: float) -> None:
        """Ticks in which a call verified drafts. plain_s, took_s: of each of the rows, summed."""
        octave = _octave(rows)
        if octave < OCTAVES:
            self.tokens[octave] += tokens
            self.saved_s += plain_s - took_s
            self.plain_s[octave] = DRAFTS_KEPT * self.plain_s[octave] + plain_s
            self.took_s[octave] = DRAFTS_KEPT * self.took_s[octave] + took_s

    def decoded(self, rows: float, took_s: float) -> None:
        """Ticks without drafts: where these come and go, the rows gain less."""
        octave = _octave(rows)
        if octave < OCTAVES and self.tokens[octave]:
            self.drafted(rows, 0, took_s, took_s)


def _octave(rows: float) -> int:
    return OCTAVES if rows == math.inf else max(0, math.ceil(math.log2(max(1.0, rows))))


# Samples that must have ended before their lengths replace the guess in reservations.
LENGTHS_KNOWN = 32
# Until then, so much of what a sample has by now.
OUTGROWN = 1.5
# Share of one report in the running mean of what samples hold beside their responses.
REPORT_SHARE = 1 / 64


class Measured:
    CONFIGURED = ("prompt_bound", "new_bound")
    DERIVED = ("outgrown_pages",)  # whatever it holds follows from the rest

    def __init__(self, prompt_bound: int, new_bound: int, expected_tokens: int):
        self.prompt_bound = prompt_bound  # of a prompt, in tokens
        self.new_bound = new_bound  # of a response
        self.prompt_tokens: float = prompt_bound  # to reserve for a prompt
        self.new_tokens: float = expected_tokens or new_bound  # to reserve for a response without a token
        self.fresh_pages: dict[int, int] = {}  # page size -> pages of such a sample
        self.outgrown_pages: dict[tuple[int, int], int] = {}  # page size, pages of responses -> pages to reserve
        self.lengths = Lengths()
        self.line = Line()  # of a median instance's decode steps
        self.drafts = DraftGain()
        self.finished_tokens = 0
        self.finished_s = 0.0  # from start to end, summed
        self.move_s = 0.0  # running mean of the time a move takes; 0: none measured
        self.load_s = 0.0  # and of a load of weights

    @property
    def mean_tokens(self) -> float:
        return self.finished_tokens / max(1, self.lengths.ended)

    def token_s(self, rows: float = math.inf) -> float:
        """Seconds a token of one sample, among so many rows of its instance: few have theirs sooner by drafts."""
        plain_s = (self.finished_s + self.drafts.saved_s) / max(1, self.finished_tokens)
        return plain_s / self.drafts.gain(rows)

    def ended(self, tokens: int, elapsed_s: float) -> None:
        """A sample ended."""
        self.finished_tokens += tokens
        self.finished_s += elapsed_s
        if self.lengths.observe(tokens) and self.lengths.ended >= LENGTHS_KNOWN:
            self.new_tokens = self.lengths.held(0)
            self.fresh_pages.clear()
            self.outgrown_pages.clear()

    def left(self, tokens: int) -> float:
        """Tokens that a sample which has `tokens` is expected to add."""
        if self.lengths.ended < LENGTHS_KNOWN:
            expected = max(self.mean_tokens - tokens, tokens)
        else:
            expected = self.lengths.left(tokens)
        return max(1.0, min(expected, self.new_bound - tokens))

    def moved(self, elapsed_s: float) -> None:
        self.move_s += (elapsed_s - self.move_s) * (0.1 if self.move_s else 1.0)

    def loaded(self, elapsed_s: float) -> None:
        self.load_s += (elapsed_s - self.load_s) * (0.1 if self.load_s else 1.0)

    def held(self, samples: int, tokens: int, page_tokens: int, page_size: int) -> None:
        """An instance's `samples` with `tokens` of responses fill pages of `page_tokens`: the rest is their prompts,
        which siblings share, and the ends of their last pages."""
        beside = min(max(0.0, (page_tokens - tokens) / samples), self.prompt_bound + page_size)
        before = self.prompt_tokens
        self.prompt_tokens += REPORT_SHARE * (beside - before)
        if int(self.prompt_tokens) != int(before):
            self.fresh_pages.clear()
            self.outgrown_pages.clear()

    def pages(self, page_size: int, tokens: int = 0) -> int:
        """Pages to reserve for a sample that has `tokens`; a page that was started counts whole."""
        if not tokens:
            pages = self.fresh_pages.get(page_size)
            if pages is None:
                most = int(self.prompt_tokens) + self.response_tokens()
                pages = self.fresh_pages[page_size] = -(-most // page_size)
            return pages
        key = page_size, -(-tokens // page_size)
        pages = self.outgrown_pages.get(key)
        if pages is None:
            most = int(self.prompt_tokens) + self.response_tokens(key[1] * page_size)
            pages = self.outgrown_pages[key] = -(-most // page_size)
        return pages

    def response_tokens(self, tokens: int = 0) -> int:
        """To reserve for the response of a sample that has `tokens`."""
        if not tokens:
            likely = self.new_tokens
        elif self.lengths.ended < LENGTHS_KNOWN:
            likely = max(self.new_tokens, OUTGROWN * tokens)
        else:
            likely = self.lengths.held(tokens)
        return min(self.new_bound, int(likely) + 1)
