"""Environments in virtual time: a turn ends, the environment answers after a while, the sample goes on with what it said.

Consumes samples whose turn has stopped; produces SampleWaiting and SampleReady. A sample that waits holds no slot, and its
KV is in host memory until a Resume brings it back. With `orchestrator.hold_slots` nobody hears of the wait: the sample
keeps slot and KV where it is, as in an engine that knows no waiting.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_jax.orchestrate import events as ev
from dora_jax.sim.agenda import Agenda
from dora_jax.sim.instance import Instance, Job
from dora_jax.sim.meter import Meter
from dora_jax.types import SampleId


class Environments:
    """`away`: the world's samples outside any instance; `schedule` an instance whose state has changed."""

    def __init__(self, agenda: Agenda, meter: Meter, away: dict[SampleId, Job], notify: Callable[[ev.Event], None],
                 schedule: Callable[[Instance], None], hold_slots: bool):  # fmt: skip
        self._agenda, self._meter, self._away = agenda, meter, away
        self._notify, self._schedule, self._hold_slots = notify, schedule, hold_slots

    def ask(self, instance: Instance, job: Job) -> None:
        """The sample's turn has stopped at this instance, and has left its batch."""
        due_s = self._agenda.now + job.turns[job.turn].environment_s
        if self._hold_slots:
            instance.wait_for_environment(job)
            self._agenda.at(due_s, self._answered_in_place, instance, job)
            return
        self._away[job.id] = job
        self._meter.waits(self._agenda.now, 1)
        self._notify(
            ev.SampleWaiting(
                id=job.id, instance=instance.id, tokens=job.response, life=instance.life, attempt=job.attempt
            )
        )
        self._agenda.at(due_s, self._answered, job)

    def _answered(self, job: Job) -> None:
        self._meter.waits(self._agenda.now, -1)
        if self._away.get(job.id) is job:  # else its group was given up
            job.observe()
            self._notify(ev.SampleReady(id=job.id, tokens=job.response, attempt=job.attempt))

    def _answered_in_place(self, instance: Instance, job: Job) -> None:
        if instance.waits(job):
            instance.advance(self._agenda.now)
            instance.answered(job)
            self._schedule(instance)
