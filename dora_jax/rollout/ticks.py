"""Stage 2: what one engine tick hands out. No JAX, so that the oracle engine needs none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_jax.types import Sample, SampleId

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    started: tuple[SampleId, ...]  # got a slot this tick
    finished: tuple[Sample, ...]
    progress: Mapping[SampleId, int]  # samples that grew: tokens sampled so far, finished ones included
    tokens: int  # sampled this tick, over all samples
    free_pages: int  # free now, evictable prefixes included
    rows: int = 0  # samples that were decoded, where the tick did nothing else; else 0
    # with rollout.keep_set, of each finished sample: i32[U, top_k], the ids each token was drawn from, -1 beyond them
    kept: Mapping[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
