"""Prefill on instances of its own, in virtual time: a pool computes the KV of prompts and observations for those that
decode.

The assumptions favour the pool: a sample takes the first of its instances that is free, prefills at the rate of any
other instance, and then all its KV crosses a link that nobody else uses; KV that was in host memory is there read once.
"""

from __future__ import annotations

import heapq
from typing import Any

from dora_jax.costs import Costs
from dora_jax.sim.instance import ENTERED, IDLE, WAIT, Job, SimInstance
from dora_jax.types import SampleId


class PrefillPool:
    """So many instances prefill one sample at a time each, in the order in which samples come."""

    def __init__(self, costs: Costs, instances: int):
        self._costs, self._free_s = costs, [0.0] * instances

    def arrives_s(self, now: float, job: Job) -> float:
        """When the KV of all its tokens is where the sample will decode."""
        end = max(now, self._free_s[0]) + self._costs.prefill_s(job.tokens - job.cached, job.cached)
        heapq.heapreplace(self._free_s, end)
        return end + self._costs.move_s(job.tokens)


class DecodingInstance(SimInstance):
    """An instance that decodes while `pool` prefills its samples. Their slots and pages are theirs meanwhile."""

    def __init__(self, pool: PrefillPool, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._pool = pool
        self._coming: list[tuple[float, SampleId, Job]] = []  # when their KV arrives

    @property
    def activity(self) -> str:
        activity = super().activity
        return WAIT if activity == IDLE and self._coming else activity

    def next_time(self) -> float:
        return min([super().next_time(), *(due_s for due_s, _, _ in self._coming[:1])])

    def happen(self) -> list[tuple[str, Any]]:
        found = super().happen()
        while self._coming and self._coming[0][0] <= self.time:
            _, _, job = heapq.heappop(self._coming)
            self._held -= job.tokens
            self._join(job)
            found.append((ENTERED, job))
        return found

    def clear(self, keeps_kv: bool = False) -> list[Job]:
        self._entering, self._coming = [job for _, _, job in self._coming], []
        return super().clear(keeps_kv)

    # ------------------------------------------------------------------ private

    def _prefill(self) -> None:
        super()._prefill()
        for job in self._entering:
            heapq.heappush(self._coming, (self._pool.arrives_s(self.time, job), job.id, job))
        self._entering, self._prefill_left_s = [], 0.0

    def _unqueue(self, id: SampleId) -> Job | None:
        for place in self._coming:
            if place[1] == id:
                self._coming.remove(place)
                heapq.heapify(self._coming)
                self._held -= place[2].tokens
                return place[2]
        return super()._unqueue(id)
