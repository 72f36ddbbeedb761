"""Stage 2: what one engine tick hands out. Standard library and `dora_jax.types` only, so that the oracle needs no JAX."""

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
