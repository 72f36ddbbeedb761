"""Whether a fact counts: before anything changes, and the same while a run works and when its journal is replayed.

`counts(state, event)` is True for a fact that answers what the orchestrator has asked for; False for one that is late or
said twice (of an earlier life of its instance, of an earlier attempt to place or to move, of a sample or a group that
has ended):
it is dropped. A fact that no order of delivery can explain raises ImpossibleFact.
"""

from __future__ import annotations

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate import roles
from dora_jax.orchestrate.state import State
from dora_jax.types import is_served


def counts(s: State, event: ev.Event) -> bool:
    return _COUNTS[type(event)](s, event)


def _up(s: State, event: ev.InstanceUp) -> bool:
    if event.life <= s.fleet.lives.get(event.instance, -1):
        return False
    if event.instance in s.roles.lendable and s.roles.lent.get(event.instance) != roles.ASKED:
        raise ev.ImpossibleFact(f"instance {event.instance} came up, but the trainer's chips were not lent")
    return True


def _down(s: State, event: ev.InstanceDown) -> bool:
    instance = s.fleet.instances.get(event.instance)
    return event.life > s.fleet.lives.get(event.instance, -1) or (instance is not None and event.life == instance.life)


def _unhealthy(s: State, event: ev.InstanceUnhealthy) -> bool:
    """Of an incarnation that has come up, over or not, which is believed so far."""
    fleet = s.fleet
    return fleet.unhealthy.get(event.instance, -1) < event.life <= fleet.lives.get(event.instance, -1)


def _lives(s: State, event: ev.InstanceReported | ev.WeightsLoaded) -> bool:
    """Said by the present life of its instance."""
    instance = s.fleet.instances.get(event.instance)
    return instance is not None and instance.life == event.life


def _reported(s: State, event: ev.InstanceReported) -> bool:
    if not len(event.groups) == len(event.indices) == len(event.tokens):
        raise ev.ImpossibleFact(
            f"instance {event.instance} reports columns of {len(event.groups)}, {len(event.indices)} and "
            f"{len(event.tokens)} rows"
        )
    return _lives(s, event)


def _loaded(s: State, event: ev.WeightsLoaded) -> bool:
    if event.version > s.ledger.base:
        raise ev.ImpossibleFact(f"instance {event.instance} loaded version {event.version}, which is not published")
    if not _lives(s, event):
        return False
    instance = s.fleet.instances[event.instance]
    return instance.phase == fl.LOADING and instance.coming == event.version


def _of_unit(*states: str):
    """Said by the instance that has the sample, in one of these states, of what placed it there. An end needs no attempt:
    no sample has two."""

    def said(
        s: State, event: ev.SampleStarted | ev.SampleDone | ev.SampleParked | ev.SampleResumed | ev.SampleWaiting
    ) -> bool:
        id = event.id
        group = s.groups.get(id.group_id)
        unit = None if group is None else group.units[id.index]
        if unit is None or unit.instance is None or unit.instance != event.instance or unit.state not in states:
            return False
        if not isinstance(event, ev.SampleDone) and event.attempt not in (None, unit.placed):
            return False
        instance = s.fleet.instances.get(unit.instance)
        return instance is not None and instance.life == event.life

    return said


_starting = _of_unit(fl.STARTING)


def _started(s: State, event: ev.SampleStarted) -> bool:
    if not _starting(s, event):
        return False
    if (version := s.live_unit(event.id).version) != event.version:
        raise ev.ImpossibleFact(f"sample {tuple(event.id)} started at version {event.version}, not {version}")
    return True


_ended = _of_unit(fl.STARTING, fl.RUNNING, fl.MOVING, fl.PARKING, fl.RESUMING, fl.CANCELLING)


def _done(s: State, event: ev.SampleDone) -> bool:
    """Of a sample that waits there is no instance to say it; its group may have been given up meanwhile."""
    if event.instance is not None:
        return _ended(s, event)
    unit = s.unit(event.id)
    return unit is not None and unit.instance is None and unit.state in (fl.WAITING, fl.CANCELLING)


def _ready(s: State, event: ev.SampleReady) -> bool:
    """What a sample has only grows: where no wait is named, fewer tokens than it waits with answer an earlier one."""
    unit = s.unit(event.id)
    if unit is None or unit.state != fl.WAITING or event.attempt not in (None, unit.placed):
        return False
    return event.tokens >= unit.tokens or not event.tokens


def _cancelled(s: State, event: ev.SampleCancelled) -> bool:
    unit = s.unit(event.id)
    if unit is not None and unit.state != fl.CANCELLING:
        raise ev.ImpossibleFact(f"sample {tuple(event.id)} was cancelled without a command: {event.reason}")
    return unit is not None


def _answered(s: State, event: ev.SampleMoved | ev.MoveFailed) -> bool:
    unit = s.unit(event.id)
    return unit is not None and unit.state == fl.MOVING and unit.attempt == event.attempt


def _scored(s: State, event: ev.GroupScored) -> bool:
    group = s.groups.get(event.group_id)
    if group is not None and group.left:
        if group.begins_again:
            return False
        raise ev.ImpossibleFact(f"group {event.group_id} is scored, but {group.left} of its samples have not ended")
    return group is not None


def _failed(s: State, event: ev.GroupFailed) -> bool:
    group = s.groups.get(event.group_id)
    return group is not None and not (group.abandoned is not None and group.left)


def _came(s: State, event: ev.RequestCame) -> bool:
    if not is_served(event.group_id) or event.version > s.ledger.base:
        raise ev.ImpossibleFact(f"a request came as group {event.group_id}, for version {event.version}")
    return event.group_id not in s.groups and (event.attempt is None or event.attempt > s.requests)


def _published(s: State, event: ev.StepPublished) -> bool:
    ledger = s.ledger
    if event.version > ledger.base and (ledger.missing or event.version != ledger.base + 1):
        raise ev.ImpossibleFact(
            f"version {event.version} is published, but the trainer has {len(ledger.batch)} of "
            f"{ledger.groups_per_step} groups of base {ledger.base}"
        )
    return event.version > ledger.base


def _trained(s: State, event: ev.PartTrained) -> bool:
    if event.base_version == s.ledger.base and event.groups > len(s.ledger.batch):
        raise ev.ImpossibleFact(
            f"{event.groups} groups of base {event.base_version} are trained, but the trainer has {len(s.ledger.batch)}"
        )
    return event.base_version == s.ledger.base and event.groups > s.roles.trained


def _passed(s: State, event: ev.TimePassed) -> bool:
    return event.now_s >= s.now_s


_COUNTS = {
    ev.InstanceUp: _up,
    ev.InstanceDown: _down,
    ev.InstanceUnhealthy: _unhealthy,
    ev.WeightsLoaded: _loaded,
    ev.InstanceReported: _reported,
    ev.TimePassed: _passed,
    ev.SampleStarted: _started,
    ev.SampleDone: _done,
    ev.SampleCancelled: _cancelled,
    ev.SampleMoved: _answered,
    ev.MoveFailed: _answered,
    ev.SampleParked: _of_unit(fl.PARKING),
    ev.SampleResumed: _of_unit(fl.RESUMING),
    ev.SampleWaiting: _of_unit(fl.RUNNING, fl.MOVING, fl.PARKING),
    ev.SampleReady: _ready,
    ev.GroupScored: _scored,
    ev.GroupFailed: _failed,
    ev.RequestCame: _came,
    ev.StepPublished: _published,
    ev.PartTrained: _trained,
}
