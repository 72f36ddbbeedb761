"""The trainer's chips in virtual time: lent to the rollouts as instances, and given back.

Consumes Lend and Return as the world hears them; produces how long each takes. Law: the trainer begins nothing while an
instance has its chips.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_jax.costs import Costs, Hardware
from dora_jax.sim.agenda import Agenda
from dora_jax.sim.instance import Instance, Job
from dora_jax.sim.meter import Meter
from dora_jax.types import InstanceId, Version

Up = Callable[[InstanceId, tuple[Version, ...]], None]  # an instance that holds these versions begins a life
Ends = Callable[[Instance, list[Job], str], None]  # a life is over: its samples, and why


class TrainerChips:
    def __init__(self, hardware: Hardware, costs: Costs, meter: Meter, agenda: Agenda, up: Up, ends: Ends):
        self._lendable = frozenset(hardware.lendable)
        self._costs, self._meter, self._agenda, self._up, self._ends = costs, meter, agenda, up, ends
        self._out: dict[InstanceId, float] = {}  # lent instances, since when their chips are not the trainer's
        self._returning: set[InstanceId] = set()
        self._wanted_s: float | None = None  # since when the trainer waits for its chips

    def lend(self, id: InstanceId, version: Version) -> None:
        if id in self._out:
            raise RuntimeError(f"instance {id} is lent twice")
        self._out[id] = now = self._agenda.now
        self._agenda.at(now + self._costs.lend_s(), self._up, id, (version,))

    def give_back(self, instance: Instance) -> None:
        """The KV of its samples goes to host memory before the instance is down."""
        now, jobs = self._agenda.now, instance.clear(keeps_kv=True)
        self._returning.add(instance.id)
        instance.paused = True
        if self._wanted_s is None:
            self._wanted_s = now
        self._agenda.at(now + self._costs.return_s(sum(job.cached for job in jobs)), self._returned, instance, jobs)

    def _returned(self, instance: Instance, jobs: list[Job]) -> None:
        """`jobs` have left it before; what has come to it meanwhile leaves it now."""
        instance.advance(self._agenda.now)
        self._ends(instance, [*jobs, *instance.clear(keeps_kv=True)], "returned")

    def returns(self, id: InstanceId) -> bool:
        return id in self._returning

    def home(self, id: InstanceId) -> bool:
        """The instance is down; False: its chips were never the trainer's."""
        if id not in self._lendable:
            return False
        self._returning.discard(id)
        self._meter.lent(self._agenda.now - self._out.pop(id))
        return True

    def train(self) -> None:
        """The trainer begins."""
        if self._out:
            raise RuntimeError(f"the trainer begins while instances {sorted(self._out)} have its chips")
        if self._wanted_s is not None:
            self._meter.late(self._agenda.now - self._wanted_s)
            self._wanted_s = None
