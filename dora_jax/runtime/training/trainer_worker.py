"""The thread of the trainer: it takes the groups of a `Train` command, makes one step of them, publishes the version.

Consumes group ids from the coordinator and groups from the group store; produces a version in the weight store, then
`StepDone` in the outbox. Law: a group that exceeds the staleness bound raises where it is taken.

`StreamingTrainerWorker` makes a step whose groups come in parts: each `Train` brings the groups of some of its updates,
and the version follows the last one. `MismatchProbe` chooses what the engine-trainer gap is measured on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora_jax.base.lanes import doing
from dora_jax.orchestrate.events import PartTrained
from dora_jax.runtime.common.seams import (
    Batches,
    Digest,
    GroupStore,
    MakeProbe,
    Pack,
    PolicyTrainer,
    PublishedWeights,
    Tree,
)
from dora_jax.runtime.common.worker import Outbox, StepDone, Worker
from dora_jax.types import ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.trainer.step import Probe


class TrainerWorker(Worker):
    """Takes the named groups, checks the staleness bound (None: the mode has none), makes one step, publishes it.

    probe: see MismatchProbe. reload: see TrainerSide.
    """

    def __init__(
        self,
        trainer: PolicyTrainer,
        pack: Pack,
        groups: GroupStore,
        weights: PublishedWeights,
        max_lag: int | None,
        outbox: Outbox,
        digest: Digest = lambda params: 0,
        probe: MakeProbe | None = None,
        reload: Callable[[], None] = lambda: None,
    ):
        super().__init__("trainer", outbox)
        self._reload = reload
        self._digest = digest
        self._mismatch = MismatchProbe(probe if max_lag != 0 else None)
        self.trainer = trainer
        self.pack = pack
        self._groups = groups
        self.weights = weights
        self._max_lag = max_lag
        self._reported_wait_s = 0.0

    def train(self, group_ids: tuple[int, ...], base: Version) -> None:
        began = time.monotonic()
        wait_s, self._reported_wait_s = self.wait_s - self._reported_wait_s, self.wait_s
        groups = self.take_groups(group_ids, base)
        metrics = self.trainer.step(self.pack(groups, base), **self._mismatch.among(groups, base))
        self.publish(base, groups, metrics, wait_s, began)

    def take_groups(self, group_ids: tuple[int, ...], base: Version) -> tuple[ScoredGroup, ...]:
        with doing("load"):
            self._reload()
        groups = tuple(self._groups.take(group_ids))
        for group in groups:
            if self._max_lag is not None and not 0 <= base - group.version <= self._max_lag:
                raise RuntimeError(
                    f"group {group.group_id} of version {group.version} was taken at base {base}: "
                    f"its lag exceeds the bound of {self._max_lag}"
                )
        return groups

    def publish(
        self, base: Version, groups: tuple[ScoredGroup, ...], metrics: Mapping[str, float], wait_s: float, began: float
    ) -> None:
        """Publishes the new version, whose step began then. The store keeps base, which is the newest version until the
        coordinator hears StepDone."""
        with doing("publish"):
            digest = self._digest(self.trainer.params)
            copy = self.weights.put(base + 1, self.trainer.params, digest=digest)
        if self._mismatch.wanted:
            self._mismatch.keep(base, self.weights.get(base, None))
        step_s = time.monotonic() - began
        self.outbox.put(
            StepDone(
                version=base + 1, groups=groups, metrics=metrics, wait_s=wait_s, step_s=step_s, digest=digest, copy=copy
            )
        )


class StreamingTrainerWorker(TrainerWorker):
    """`pack` turns the groups of one part into an iterable of batches."""

    def __init__(self, *common: Any, groups_per_step: int, says_parts: bool = False, **options: Any):
        """says_parts: PartTrained is sent when the trainer waits for another part."""
        super().__init__(*common, **options)
        self.groups_per_step = groups_per_step
        self._says_parts = says_parts

    def train(self, group_ids: tuple[int, ...], base: Version) -> None:
        began = time.monotonic()
        before_s, self._reported_wait_s = self._reported_wait_s, self.wait_s
        taken: list[ScoredGroup] = []
        first = self.take_groups(group_ids, base)
        metrics = self.trainer.step(self.batches(first, base, taken), **self._mismatch.among(first, base))
        waited_s = self.wait_s - self._reported_wait_s  # for later parts of this step
        self.publish(base, tuple(taken), metrics, self._reported_wait_s - before_s + waited_s, began + waited_s)
        self._reported_wait_s = self.wait_s

    def batches(self, part: tuple[ScoredGroup, ...], base: Version, taken: list[ScoredGroup]) -> Iterator[Batches]:
        while True:
            taken += part
            yield from self.pack(part, base)
            if len(taken) >= self.groups_per_step:
                return
            if self._says_parts:
                self.outbox.put(PartTrained(base_version=base, groups=len(taken)))
            while (job := self._next()) is not None and job[0] != self.train:
                job[0](*job[1])  # a remote trainer may have to catch up after a gang was lost
            if job is None:
                raise RuntimeError(f"the run ended when {len(taken)} of {self.groups_per_step} groups were trained")
            group_ids, next_base = job[1]
            if next_base != base:
                raise RuntimeError(f"a part of base {next_base} came before the step at base {base} was whole")
            part = self.take_groups(group_ids, base)


class MismatchProbe:
    """The group that the engine-trainer gap is measured on, where a step has no group of its base version.

    Law: only equal weights compare, so the weights of the version before are kept; without them nothing is measured.
    probe: what `Trainer.step` measures the gap on; None: nothing is measured.
    """

    def __init__(self, probe: MakeProbe | None):
        self._probe = probe
        self.wanted = probe is not None
        self._before: tuple[Version, Tree] | None = None

    def keep(self, version: Version, weights: Tree) -> None:
        """Keeps the weights of this version; the base of the next step is the version after it."""
        self._before = version, weights

    def among(self, groups: Sequence[ScoredGroup], base: Version) -> dict[str, Probe]:
        """The keyword of `Trainer.step`, if a group of the version before is among these groups."""
        if self._probe is None or self._before is None or self._before[0] != base - 1:
            return {}
        if any(group.version == base for group in groups):
            return {}
        version, weights = self._before
        for group in groups:
            if any(span.version == version for sample in group.samples for span in sample.spans):
                return {"probe": self._probe(group, version, weights)}
        return {}
