"""What ended samples and reports have said so far: lengths, times, and the pages that follow from them.

A reservation is a prompt and as much of a response as samples of such a length hold at the worst moment to come. Of both
the configuration knows bounds only, and an instance that reserved bounds would stand two thirds empty: they hold until
enough samples have ended, and until reports say what a sample holds beside its response.
"""

from __future__ import annotations

import math

from dora_jax.orchestrate.drafts import DraftGain
from dora_jax.orchestrate.lengths import Lengths
from dora_jax.orchestrate.line import Line

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
            self._forget_pages()

    def left(self, tokens: int) -> float:
        """Tokens that a sample which has `tokens` is expected to add."""
        if self.lengths.ended < LENGTHS_KNOWN:
            expected = max(self.mean_tokens - tokens, tokens)
        else:
            expected = self.lengths.left(tokens)
        return max(1.0, min(expected, self.new_bound - tokens))

    def moved(self, elapsed_s: float) -> None:
        self.move_s += (elapsed_s - self.move_s) * (0.1 if self.move_s else 1.0)

    def held(self, samples: int, tokens: int, page_tokens: int, page_size: int) -> None:
        """An instance's `samples` with `tokens` of responses fill pages of `page_tokens`: the rest is their prompts,
        which siblings share, and the ends of their last pages."""
        beside = min(max(0.0, (page_tokens - tokens) / samples), self.prompt_bound + page_size)
        before = self.prompt_tokens
        self.prompt_tokens += REPORT_SHARE * (beside - before)
        if int(self.prompt_tokens) != int(before):
            self._forget_pages()

    def _forget_pages(self) -> None:
        self.fresh_pages.clear()
        self.outgrown_pages.clear()

    def pages(self, page_size: int, tokens: int = 0) -> int:
        """To reserve for a sample that has `tokens`; of a started page, for all of it."""
        if not tokens:
            pages = self.fresh_pages.get(page_size)
            if pages is None:
                pages = self.fresh_pages[page_size] = self._pages(page_size, 0)
            return pages
        key = page_size, -(-tokens // page_size)
        pages = self.outgrown_pages.get(key)
        if pages is None:
            pages = self.outgrown_pages[key] = self._pages(page_size, key[1] * page_size)
        return pages

    def _pages(self, page_size: int, tokens: int) -> int:
        return -(-(int(self.prompt_tokens) + self.response_tokens(tokens)) // page_size)

    def response_tokens(self, tokens: int = 0) -> int:
        """To reserve for the response of a sample that has `tokens`."""
        if not tokens:
            likely = self.new_tokens
        elif self.lengths.ended < LENGTHS_KNOWN:
            likely = max(self.new_tokens, OUTGROWN * tokens)
        else:
            likely = self.lengths.held(tokens)
        return min(self.new_bound, int(likely) + 1)
