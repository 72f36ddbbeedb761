"""Stage 2: what one engine tick hands out. No JAX, so that the oracle engine needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_jax.types import Sample, SampleId

if TYPE_CHECKING:
    import numpy as np

    from dora_jax.rollout.migrate import InFlightSample


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    started: tuple[SampleId, ...]  # got a slot this tick
    finished: tuple[Sample, ...]
    progress: Mapping[SampleId, int]  # samples that grew: tokens so far, finished and waiting ones included
    tokens: int  # sampled this tick, over all samples
    free_pages: int  # free now, evictable prefixes included
    rows: int = 0  # samples that were decoded, where the tick did nothing else; else 0
    drafted: bool = False  # a call of it verified drafts: its tokens do not tell a decode step's time
    guesses: int = 0  # tokens of these drafts, up to the first of each that did not hold
    held: int = 0  # those of them that held
    # with rollout.keep_set, of each finished sample: i32[U, top_k], the ids each token was drawn from, -1 beyond them
    kept: Mapping[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    waiting: tuple[InFlightSample, ...] = ()  # episodes whose turn ended: they are no longer in a slot


@dataclass
class GrowingResult:
    """What the next tick result will say, as far as it has happened."""

    started: list[SampleId] = dataclasses.field(default_factory=list)
    finished: list[Sample] = dataclasses.field(default_factory=list)
    progress: dict[SampleId, int] = dataclasses.field(default_factory=dict)
    kept: dict[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    waiting: list[InFlightSample] = dataclasses.field(default_factory=list)
    tokens: int = 0
    decodes_only: bool = True
    drafted: bool = False
    guesses: int = 0
    held: int = 0

    def guessed(self, guesses: int, held: int) -> None:
        self.guesses, self.held = self.guesses + guesses, self.held + held

    def result(self, free_pages: int) -> TickResult:
        return TickResult(
            started=tuple(self.started),
            finished=tuple(self.finished),
            progress=self.progress,
            tokens=self.tokens,
            free_pages=free_pages,
            kept=self.kept,
            waiting=tuple(self.waiting),
            rows=len(self.progress) if self.decodes_only else 0,
            drafted=self.drafted,
            guesses=self.guesses,
            held=self.held,
        )
