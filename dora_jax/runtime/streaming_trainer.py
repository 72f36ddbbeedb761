"""A trainer whose step comes in parts: each `Train` brings the groups of some of its updates, the version follows the last.

The orchestrator takes a part as soon as its groups may be trained (`updates` in its configuration), so that the first
updates run while the step's last groups are still being sampled. `Trainer.step` takes an iterable of batches and asks
for one after the other; here the wait for the next part is inside that iterable.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from dora_jax.fault_injection import point
from dora_jax.runtime.workers import StepDone, TrainerWorker
from dora_jax.types import ScoredGroup, Version


class PartwiseTrainer(TrainerWorker):
    """`pack` turns the groups of one part into an iterable of batches."""

    def __init__(
        self,
        trainer: Any,
        pack: Callable,
        groups: Any,
        weights: Any,
        max_lag: int | None,
        outbox: queue.SimpleQueue,
        groups_per_step: int,
        digest: Callable[[Any], int] = lambda params: 0,
        probe: Callable[[ScoredGroup, Version, Any], Any] | None = None,
    ):
        super().__init__(trainer, pack, groups, weights, max_lag, outbox, digest, probe)
        self._groups_per_step = groups_per_step

    def train(self, group_ids: tuple[int, ...], base: Version) -> None:
        began = time.monotonic()
        before_s, self._reported_wait_s = self._reported_wait_s, self.wait_s
        taken: list[ScoredGroup] = []
        first = self._take(group_ids, base)
        point("trainer.before_step")
        metrics = self.trainer.step(self._batches(first, base, taken), **self._gap.among(first, base))
        point("trainer.after_step")
        waited_s = self.wait_s - self._reported_wait_s  # for later parts of this step
        self._publish(base)
        self.outbox.put(
            StepDone(
                version=base + 1,
                groups=tuple(taken),
                metrics=metrics,
                wait_s=self._reported_wait_s - before_s + waited_s,
                step_s=time.monotonic() - began - waited_s,
                digest=self._digest(self.trainer.params),
            )
        )
        self._reported_wait_s = self.wait_s

    def _batches(self, part: tuple[ScoredGroup, ...], base: Version, taken: list[ScoredGroup]) -> Iterator[Any]:
        while True:
            taken += part
            yield from self._pack(part, base)
            if len(taken) >= self._groups_per_step:
                return
            point("trainer.in_step")
            job = self._next_part()
            if job is None:
                raise RuntimeError(f"the run ended when {len(taken)} of {self._groups_per_step} groups were trained")
            group_ids, next_base = job
            if next_base != base:
                raise RuntimeError(f"a part of base {next_base} came before the step at base {base} was whole")
            part = self._take(group_ids, base)

    def _next_part(self) -> tuple[tuple[int, ...], Version] | None:
        """Other calls are run meanwhile: a trainer elsewhere may have to be brought to where a lost one was."""
        while (job := self._next()) is not None:
            call, args = job
            if call == self.train:
                return args
            call(*args)
        return None
