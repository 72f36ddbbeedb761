"""Stage 2: what one engine tick hands out. No JAX, so that the oracle engine needs none."""

from __future__ import annotations

from collections.abc import Mapping

from dora_jax.types import Sample, SampleId, record


@record
class TickResult:
    started: tuple[SampleId, ...]  # got a slot this tick
    finished: tuple[Sample, ...]
    progress: Mapping[SampleId, int]  # samples that grew: tokens sampled so far, finished ones included
    tokens: int  # sampled this tick, over all samples
    free_pages: int  # free now, evictable prefixes included
