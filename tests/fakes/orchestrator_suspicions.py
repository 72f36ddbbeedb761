"""Instances of the orchestrator's adversary that turn out unhealthy, and what must not be trained then."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.types import EARLIER, GroupId, Incarnation, InstanceId, SampleId
from tests.fakes.orchestrator_timeline import InstanceIncarnation


class Suspicions:
    def __init__(self, body: Any):
        self._body = body
        self.ran: dict[SampleId, set[Incarnation]] = collections.defaultdict(set)  # since it began
        self.sent: list[Incarnation] = []  # that they are unhealthy
        self._tainted: set[SampleId] = set()
        self._trained: dict[GroupId, set[Incarnation]] = {}

    def say(self, incarnation: InstanceIncarnation) -> None:
        """It works on until it hears of it, unless it is over."""
        self.sent.append(incarnation)
        incarnation.sent.append(
            ev.InstanceUnhealthy(instance=incarnation.instance, reason="NaN", incarnation=incarnation.number)
        )

    def hear(self, event: ev.Event) -> None:
        """A fact that counts. Of a sample that goes on, no tokens arrive before it is known where."""
        match event:
            case (
                ev.SampleStarted(id=id, instance=i, incarnation=incarnation)
                | ev.SampleResumed(id=id, instance=i, incarnation=incarnation)
            ):
                self.ran[id].add((i, incarnation))
            case ev.SampleMoved(id=id, dst=i):
                state = self._body.brain.state
                if state.unit(id).dst is state.fleet.instances.get(i):  # else it was lost on arrival
                    self.ran[id].add((i, state.fleet.instances[i].incarnation))
            case ev.InstanceUnhealthy(instance=i, incarnation=incarnation):
                self._unhealthy(i, incarnation)

    def _unhealthy(self, instance: InstanceId, incarnation: int) -> None:
        """Nothing that it has sampled a part of is to be trained from now on."""
        tainted = {id for id, ran in self.ran.items() if any(i == instance and n <= incarnation for i, n in ran)}
        self._tainted |= {id for id in tainted if id.group_id not in self._trained}

    def kill(self) -> None:
        """The next process counts incarnations anew."""
        for ran in (*self.ran.values(), *self._trained.values()):
            earlier = {(i, EARLIER) for i, _ in ran}
            ran.clear()
            ran.update(earlier)

    def start(self, id: SampleId) -> None:
        """A sample that had begun begins again: all that the body has of it is forgotten."""
        body, group_id = self._body, id.group_id
        if id in self._tainted and id in body.started:
            body.started.discard(id)
            body.recorded.pop(id, None)
            body.environments.forget(id)
        self.ran[id] = set()
        self._tainted.discard(id)
        assert id.index not in body.done[group_id], f"{id} has ended, and starts again"

    def train(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in group_ids:
            ids = [SampleId(group_id, i) for i in range(self._body.config.group_size)]
            assert not self._tainted & set(ids), f"group {group_id} has tokens of an instance in quarantine"
            self._trained[group_id] = set().union(*(self.ran[id] for id in ids))

    def check(self, command: ev.Quarantine) -> None:
        """Every group that was trained with tokens of the instance is named, and no other that was trained lately."""
        i, incarnation = command.instance, self._body.brain.state.fleet.unhealthy[command.instance]
        named = set(command.group_ids)
        mine = {g for g, ran in self._trained.items() if any(each == i and n <= incarnation for each, n in ran)}
        assert mine <= named, f"{command} does not name {mine - named}"
