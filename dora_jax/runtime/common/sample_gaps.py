"""How far a trainer's log-probs are from an engine's, sample by sample, at the same version.

    a step's groups -> SampleGaps (the trainer's thread) -> gaps(version) -> Agreement (agreement.py)

Consumes the groups of a step before it changes the weights; produces the mean gap of each sample of a few of them. Law:
only equal weights compare: those of the step's base, and those of the version before, which are kept for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.runtime.common.sample_log import Batches, Pack, place_of
from dora_jax.types import SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.trainer.step import Probe, Trainer

Tree = Any  # seams.Tree, whose module knows this one
MakeProbe = Callable[[ScoredGroup, Version, Tree], "Probe"]  # seams.MakeProbe
LOOKED_AT = 16  # one group in so many, and one at least: a forward pass over them is 2 % of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGap:
    id: SampleId
    version: Version
    gap: float  # mean |log-prob of the trainer - of the engine|, nats a token, both of this version
    tokens: int


# What a trainer, of this process or of a gang, has measured of the step that made this version; what was measured
# before it is forgotten.
SeenGaps = Callable[[Version], Sequence[SampleGap]]


class SampleGaps:
    """`pack` packs as the one given, and measures a few of a step's groups before the step changes the weights.

    The trainer's thread packs; any thread asks for `gaps`.
    """

    def __init__(self, trainer: Trainer, probe: MakeProbe, published: Callable[[Version], Tree | None], pack: Pack):
        """published: the weights of the version that a step starts from, where they are at hand."""
        self._trainer, self._probe, self._published, self._pack = trainer, probe, published, pack
        self._weights: dict[Version, Tree | None] = {}  # of the base and of the version before; None: the trainer's
        self._base: Version | None = None
        self._seen: dict[Version, tuple[SampleGap, ...]] = {}
        self._lock = threading.Lock()

    def pack(self, groups: Sequence[ScoredGroup], base: Version) -> Batches:
        if base != self._base:  # a later part of a step meets other weights
            self._base = base
            before = self._weights.get(base - 1)
            self._weights = {base: self._published(base)} | ({base - 1: before} if before is not None else {})
            known = []  # groups with tokens of a version whose weights are here, and the newest such version
            for group in groups:
                spans = {span.version for sample in group.samples for span in sample.spans}
                if comparable := spans & self._weights.keys():
                    known.append((group, max(comparable)))
            n = min(len(known), max(1, len(groups) // LOOKED_AT))
            turns = [known[(base * n + i) % len(known)] for i in range(n)]
            found = tuple(gap for group, version in turns for gap in self._of(group, version))
            with self._lock:
                self._seen[base + 1] = found
        return self._pack(groups, base)

    def gaps(self, version: Version) -> tuple[SampleGap, ...]:
        with self._lock:
            found = self._seen.get(version, ())
            self._seen = {v: gaps for v, gaps in self._seen.items() if v > version}
        return found

    # ------------------------------------------------------------ private

    def _of(self, group: ScoredGroup, version: Version) -> list[SampleGap]:
        probe = self._probe(group, version, self._weights[version])
        gaps = np.abs(self._trainer.probed(probe) - probe.batch.behavior_logprobs)
        comparable, found = probe.tokens(), []
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            if (place := place_of(probe.batch, sample, float(reward))) is not None:
                own = gaps[place][comparable[place]]
                if len(own) and np.isfinite(own).all():
                    found.append(SampleGap(id=sample.id, version=version, gap=float(own.mean()), tokens=len(own)))
        return found
