"""What drafts from siblings save a decoding instance (rollout/drafts.py): a model of two numbers. Values in, values
out.

Consumes the costs of a decode step and `draft` of the configuration: the share `a` of guessed tokens that hold, each by
itself, and the tokens k that one call verifies. Such a call draws E = (1 - a^(k+1)) / (1 - a) tokens of a sample in the
mean, in the time of a decode step of k + 1 times as many rows; KV is read once. k is what gives a token in the least
time, 0 allowed, as an engine chooses it from what it measures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dora_jax.base.config_tree import field
from dora_jax.costs import Costs
from dora_jax.orchestrate.events import Drafted


@dataclass(frozen=True, kw_only=True)
class DraftSection:
    tokens: int = field(0, "that one call verifies of a sample, at most; 0: no drafts")
    rows: int = field(32, "of a version on an instance, at most: with more of them no draft is tried")
    acceptance: float = field(0.6, "share of guessed tokens that hold")
    cost: float = field(0.0, "of a call that verifies `tokens`, over a decode step's time; 0: from the costs")


class DecodeTimes:
    """Seconds and reads of KV that a token of every sample of a batch takes."""

    def __init__(self, costs: Costs, draft: DraftSection):
        self._costs, self._draft = costs, draft
        self.token = functools.cache(self._token)

    def drafts(self, batches: Iterable[int]) -> tuple[float, float]:
        """(tokens guessed, up to the first of each draft that does not hold; those that hold) while each sample of
        these batches draws a token; (0, 0): no call verifies."""
        held = sum(batch * (1 - self.token(batch)[1]) for batch in batches) if self._draft.tokens else 0.0
        return (held / self._draft.acceptance if held else 0.0), held

    def _token(self, batch: int) -> tuple[float, float]:
        """(seconds beside the reading of KV, times that the batch's KV is read)."""
        draft, step_s = self._draft, self._costs.decode_base_s
        found = [(step_s(batch), 1.0)]
        for k in range(1, draft.tokens + 1) if batch <= draft.rows else ():
            drawn = sum(draft.acceptance**i for i in range(k + 1))
            took_s = step_s(batch * (k + 1))
            if draft.cost:
                took_s = step_s(batch) * (1 + (draft.cost - 1) * k / draft.tokens)
            found.append((took_s / drawn, 1 / drawn))
        return min(found)


class SimDecoding:
    """What an instance's decoding took since its last report, as an engine says it: with drafts and without."""

    def __init__(self) -> None:
        self._plain, self._drafted = [0.0] * 3, [0.0] * 5

    def add(self, ticks: float, rows: int, elapsed_s: float, drafts: tuple[float, float]) -> None:
        """drafts: tokens guessed in a tick, and those that hold (`DecodeTimes.drafts`)."""
        guesses, held = drafts
        took = (ticks * rows, elapsed_s, elapsed_s * rows)
        if guesses:
            more = (*took, ticks * guesses, ticks * held)
            self._drafted = [a + b for a, b in zip(self._drafted, more, strict=True)]
        else:
            self._plain = [a + b for a, b in zip(self._plain, took, strict=True)]

    def measured(self) -> dict[str, Any]:
        """For InstanceReported; what it reports is not reported again."""
        (sampled, busy_s, row_s), drafted = self._plain, self._drafted
        self._plain, self._drafted = [0.0] * 3, [0.0] * 5
        fields: dict[str, Any] = {"sampled": round(sampled), "busy_s": busy_s, "row_s": row_s}
        if drafted[0]:
            tokens, guesses, held = (round(drafted[i]) for i in (0, 3, 4))
            fields["drafted"] = Drafted(sampled=tokens, busy_s=drafted[1], row_s=drafted[2], guesses=guesses, held=held)
        return fields
