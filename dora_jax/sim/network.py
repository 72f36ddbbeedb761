"""Links in virtual time: a transfer takes its turn at both ends.

Every instance has one link in and one out; the trainer has as many lanes out as instances could be fed at once.
"""

from __future__ import annotations

import heapq

from dora_jax.sim.cost import Costs
from dora_jax.types import InstanceId


class Network:
    def __init__(self, costs: Costs, lanes: int):
        self._costs = costs
        self._trainer = [0.0] * max(1, lanes)  # when each lane is free
        self._out: dict[InstanceId, float] = {}
        self._in: dict[InstanceId, float] = {}

    def load(self, now: float, src: InstanceId | None, dst: InstanceId, speed: float = 1.0) -> float:
        """When the weights have arrived; `src` None: from the trainer."""
        seconds = self._costs.load_s() / speed
        if src is not None:
            return self._transfer(now, src, dst, seconds)
        begin = max(now, self._in.get(dst, 0.0), self._trainer[0])
        heapq.heapreplace(self._trainer, begin + seconds)
        self._in[dst] = begin + seconds
        return begin + seconds

    def move(self, now: float, src: InstanceId, dst: InstanceId, tokens: int) -> float:
        """When the KV of one sample has arrived."""
        return self._transfer(now, src, dst, self._costs.move_s(tokens))

    def _transfer(self, now: float, src: InstanceId, dst: InstanceId, seconds: float) -> float:
        end = max(now, self._out.get(src, 0.0), self._in.get(dst, 0.0)) + seconds
        self._out[src] = self._in[dst] = end
        return end
