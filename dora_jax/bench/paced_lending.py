"""An instance of the trainer's chips in a paced run: it lives while they are lent.

Consumes Lend and Return; each lasts what the cost model says. Laws: as LentInstance (runtime/lent_instance.py), in one worker
whose lives follow one another.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dora_jax.bench.paced_worker import PacedWorker
from dora_jax.costs import Costs
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import Outbox, WeightStore
from dora_jax.runtime.common.worker import HandedOver
from dora_jax.runtime.observe.emulated_timing import PacedEngine
from dora_jax.types import InstanceId, Version


class LentPacedWorker(PacedWorker):
    def __init__(
        self, up: ev.InstanceUp, engine: PacedEngine, weights: WeightStore, outbox: Outbox, costs: Costs, pace: float
    ):
        self._paced: Any = engine  # what it does not define is the engine's own
        super().__init__(up.instance, self._paced, weights, outbox)
        self._up, self._costs, self._pace = up, costs, pace
        self._lent = False

    def lend(self, version: Version) -> None:
        time.sleep(self._pace * self._costs.lend_s())
        self.engine.load(version, version)
        self._paced.rest()
        self.life, self._lent = self.life + 1, True
        self.outbox.put(dataclasses.replace(self._up, versions=(version,), life=self.life))

    def give_back(self) -> None:
        began = time.monotonic()
        with self._paced.all_at_once() as handed_over:
            self.hand_over()
        for version in self.engine.versions:
            self.engine.drop(version)
        seconds = self._pace * self._costs.return_s(sum(handed_over))
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        self._lent = False
        self.outbox.put(ev.InstanceDown(instance=self.instance, reason="returned", life=self.life))

    def receive(self, in_flight: InFlightSample, src: InstanceId, attempt: int) -> None:
        """What comes after the chips were given back is recorded."""
        if self._lent:
            super().receive(in_flight, src, attempt)
            return
        self.outbox.put(HandedOver(in_flight=in_flight))
        self.outbox.put(ev.SampleMoved(id=in_flight.id, src=src, dst=self.instance, attempt=attempt))
