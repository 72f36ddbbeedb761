"""The environments of the orchestrator's adversary: samples whose turn has ended, until an answer arrives."""

from __future__ import annotations

import collections
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.types import SampleId, is_eval
from tests.fakes.orchestrator_timeline import InFlightSample, InstanceIncarnation

KEPT, RESET = (
    0.3,
    0.3,
)  # shares of waits with their KV left on the instance, and of starts that ask the environment first
GOES_ON, ENDS, FAILS = 0.55, 0.35, 0.05  # the rest: the body has lost the sample, which begins again


class Environments:
    """`turns`: how likely it is that a sample waits instead of ending."""

    def __init__(self, body: Any, turns: float):
        self._body, self._turns = body, turns
        self._tokens: dict[SampleId, int] = {}
        self.asked: dict[SampleId, int] = {}  # sample -> its version
        self.attempts: dict[SampleId, int] = {}  # that had placed what waits; 0: under an earlier process

    def ends_turn(self) -> bool:
        return self._body.draw.random() < self._turns

    def wait(self, incarnation: InstanceIncarnation, id: SampleId) -> None:
        body = self._body
        self._tokens[id] = self._tokens.get(id, 0) + body.draw.randrange(1, 4)
        body.recorded[id] = incarnation.runs.pop(id)
        incarnation.sent.append(self._waiting(id, incarnation))

    def resets(self, incarnation: InstanceIncarnation | None, id: SampleId, start: ev.Start) -> bool:
        """Whether the sample begins with a question to its environment, before any instance hears of it."""
        body = self._body
        if incarnation is None or not self._turns or body.draw.random() >= RESET:
            return False
        body.recorded[id], incarnation.attempts[id] = start.version, start.attempt
        placed = {"instance": incarnation.instance, "incarnation": incarnation.number, "attempt": start.attempt}
        begun = ev.SampleStarted(id=id, version=start.version, **placed)
        body.says["controller"] += [begun, self._waiting(id, incarnation)]
        return True

    def _waiting(self, id: SampleId, incarnation: InstanceIncarnation) -> ev.SampleWaiting:
        kept = self._body.draw.random() < KEPT
        tokens = self._tokens.get(id, 0)
        placed = {
            "instance": incarnation.instance,
            "incarnation": incarnation.number,
            "attempt": incarnation.attempts[id],
        }
        return ev.SampleWaiting(id=id, tokens=tokens, kept=kept, **placed)

    def ask(self, id: SampleId, attempt: int) -> None:
        if id.group_id not in self._body.given_up:
            self.asked[id], self.attempts[id] = self._body.recorded[id], attempt

    def forget(self, id: SampleId) -> None:
        """The sample begins again from its prompt; a late answer is no answer."""
        self._tokens.pop(id, None)
        self.asked.pop(id, None)
        sent = self._body.says["controller"]
        for event in [e for e in sent if isinstance(e, ev.SampleReady | ev.SampleDone) and e.id == id]:
            sent.remove(event)

    def answer(self) -> None:
        body = self._body
        id = body.draw.choice(sorted(self.asked))
        del self.asked[id]
        sent, kind = body.says["controller"], body.draw.random()
        if kind < GOES_ON:
            self._tokens[id] = self._tokens.get(id, 0) + body.draw.randrange(3)
            sent.append(ev.SampleReady(id=id, tokens=self._tokens[id], attempt=self.attempts[id]))
        elif kind < GOES_ON + ENDS or body.moves > body.calm_after:
            sent.append(ev.SampleDone(id=id, instance=None, tokens=self._tokens.get(id, 0), finish="stop"))
        elif kind < GOES_ON + ENDS + FAILS:
            sent.append(ev.GroupFailed(group_id=id.group_id, reason="the environment broke"))
        else:
            self._tokens[id] = 0
            sent.append(ev.SampleReady(id=id, tokens=0, attempt=self.attempts[id]))

    def check(self) -> None:
        """A sample that waits holds no slot, is counted, and its version is alive."""
        state = self._body.brain.state
        units = [u for g in state.groups.values() for u in g.units if u is not None and u.state == "waiting"]
        counts: dict[int, int] = {}
        for unit in units:
            counts[unit.version] = counts.get(unit.version, 0) + 1
            assert unit.instance is None and unit.version in state.alive, f"{unit.id}"
        assert counts == state.queue.in_environment
        assert not {unit.id for unit in units} & {id for host in state.fleet.instances.values() for id in host.units}


class OtherSources:
    """The adversary's scorer, clock and network; the network carries commands too."""

    def score(self) -> None:
        group_id = self.scoring.pop(self.draw.randrange(len(self.scoring)))
        if group_id in self.given_up:
            return
        if self.draw.random() < 0.1 and self.moves < self.calm_after:
            self.says["scorer"].append(ev.GroupFailed(group_id=group_id, reason="the reward raised"))
            return
        trainable = not is_eval(group_id) and self.draw.random() > 0.1
        self.says["scorer"].append(ev.GroupScored(group_id=group_id, trainable=trainable))

    def tick(self) -> None:
        self.now_s += self.draw.random()
        self.hear(ev.TimePassed(now_s=self.now_s))

    def arrive(self, request: InFlightSample) -> None:
        self.requests.remove(request)
        way = {"id": request.id, "src": request.move.src, "dst": request.move.dst, "attempt": request.move.attempt}
        fails = self.moves <= self.calm_after and self.draw.random() < 0.2
        lost = request.dst is None or request.dst.over
        if lost or (fails and request.src.over):
            self.recorded[request.id] = request.version
            self.says["controller"].append(ev.SampleMoved(**way) if lost else ev.MoveFailed(**way, reason="cut off"))
        elif fails:
            request.src.runs[request.id] = request.version
            request.src.sent.append(ev.MoveFailed(**way, reason="cut off"))
        else:
            self.take_in(request.dst, request.id, request.version, request.move.attempt)
            request.dst.begun.add(request.id)
            request.dst.sent.append(ev.SampleMoved(**way))

    def post(self, instance: int, command: object) -> None:
        """To the incarnation that the orchestrator means, or to nobody: it hears of an incarnation before it sends it
        anything."""
        incarnation = self.known(instance)
        if incarnation is not None:
            incarnation.inbox.append(command)
            if isinstance(command, ev.Move):
                incarnation.destinations.append(self.known(command.dst))
        elif isinstance(command, ev.Move):
            self.move_failed(self.says["supervisor", instance], command)

    def known(self, instance: int) -> InstanceIncarnation | None:
        """The incarnation that the orchestrator knows of, while it lasts."""
        incarnation, host = self.incarnations.get(instance), self.brain.state.fleet.instances.get(instance)
        return (
            incarnation
            if incarnation is not None and host is not None and host.incarnation == incarnation.number
            else None
        )

    def move_failed(self, sent: collections.deque, command: ev.Move) -> None:
        sent.extend(
            ev.MoveFailed(id=id, src=command.src, dst=command.dst, attempt=command.attempt, reason="gone")
            for id in command.ids
        )
