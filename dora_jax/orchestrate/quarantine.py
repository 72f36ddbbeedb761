"""Quarantine: what follows when an instance says what cannot be believed.

Consumes InstanceUnhealthy, of an incarnation that is up or is over; produces Quarantine, which names the groups that
were trained with tokens of that incarnation or of an earlier one of the instance. A sample that has not ended and has
such tokens begins again from its prompt, elsewhere and at its version; where it runs
now, it is parked first. A group of which such a sample has ended is given up before it is trained, and its prompt is
issued again: no sample ends twice. Law: no Train after an InstanceUnhealthy names a group with such tokens, wherever
its samples have moved since.
"""

from __future__ import annotations

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import Group, Unit
from dora_jax.orchestrate.ledger import READY
from dora_jax.orchestrate.state import State
from dora_jax.types import Incarnation, Version, is_eval, is_training

# Steps back to which trained groups are named.
REMEMBERED_STEPS = 16


def remember(s: State, version: Version) -> None:
    """The batch of the step that made this version was trained."""
    s.trained_by[version] = {group_id: s.sampled_by.pop(group_id, ()) for group_id in s.ledger.batch}
    s.trained_by.pop(version - REMEMBERED_STEPS, None)


def name(s: State, event: ev.InstanceUnhealthy) -> None:
    """Says Quarantine, with the groups that its tokens were trained in, or are being."""
    in_training = {group_id: s.sampled_by.get(group_id, ()) for group_id in s.ledger.batch}
    steps = {**s.trained_by, s.ledger.base + 1: in_training}
    named = [(g, step) for step, groups in steps.items() for g, ran in groups.items() if _suspect(ran, event)]
    group_ids, versions = tuple(g for g, _ in named), tuple(step for _, step in named)
    s.out.append(ev.Quarantine(instance=event.instance, reason=event.reason, group_ids=group_ids, steps=versions))


def begin_again(s: State, event: ev.InstanceUnhealthy, reason: str) -> None:
    """The incarnation is lost already: no sample holds a slot there."""
    for group_id in [g for g, ran in s.sampled_by.items() if _suspect(ran, event) and s.ledger.live[g][0] == READY]:
        s.give_up(group_id, reason)
    for group in list(s.groups.values()):
        if group.abandoned is None and _suspect(group.ran, event):
            give_up(s, group, reason)
    for unit in s.units():
        if _suspect(unit.ran, event) and unit.state != fl.CANCELLING:
            unit.restarts = True
            if unit.state == fl.WAITING:
                s.queue.end_wait(unit, fl.PARKED)
            if unit.state == fl.PARKED:
                s.recorded(unit)
            elif unit.state == fl.RUNNING:
                set_aside(s, unit)


def give_up(s: State, group: Group, reason: str) -> None:
    """A sample of the group has ended with tokens that cannot be believed."""
    if group.abandoned is not None:
        return
    if is_training(group.id):
        s.give_up(group.id, reason)
        return
    if is_eval(group.id):
        s.evaluated(group.version)
    if group.left:
        s.abandon(group, "failed", reason)
    else:
        s.discard(group.id, reason)


def _suspect(ran: tuple[Incarnation, ...], event: ev.InstanceUnhealthy) -> bool:
    return any(instance == event.instance and incarnation <= event.incarnation for instance, incarnation in ran)


def set_aside(s: State, unit: Unit) -> None:
    """The sample leaves its slot as soon as its instance knows of it."""
    assert unit.instance is not None
    unit.state = fl.PARKING
    s.out.append(ev.Park(ids=(unit.id,), instance=unit.instance))
