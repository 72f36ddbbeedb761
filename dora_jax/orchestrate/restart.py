"""The brain outlives its body: after the whole job was killed, what a new body owes it.

Consumes an orchestrator as the last fact left it; commits the loss of every instance and names the work that was
promised and is nowhere now. Laws: samples that had started go on at their own version; nothing that ended is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.fleet import Unit
from dora_jax.orchestrate.state import State
from dora_jax.types import EARLIER, GroupId, Incarnation, SampleId, Version, is_served

LOST = "the job was killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Debts:
    """What the brain waits for. A body takes these on before its first event, then says InstanceUp."""

    train: ev.Train | None  # a batch that was taken and not published
    score: tuple[GroupId, ...]  # whole groups without rewards
    cancel: ev.Cancel | None  # samples that must not go on, to be answered one by one
    groups: tuple[GroupId, ...]  # admitted and not scored
    recorded: dict[SampleId, Version]  # started and not ended: a Resume will ask for their tokens
    waiting: dict[SampleId, Version]  # for their environments, which are asked again: they owe SampleReady, or an end
    versions: tuple[Version, ...]  # whose weights are needed, oldest first


def restart(orchestrator: Orchestrator) -> Debts:
    """Takes every instance away, then lists what is owed. The commands that this causes are in the list, or void.

    A run that had halted looks again: it goes on where more steps are asked for now, else it halts once more."""
    s = orchestrator.state
    for group_id in [g for g in s.groups if is_served(g)]:  # no client waits any more
        _commit(orchestrator, ev.GroupFailed(group_id=group_id, reason=LOST))
    s.asked_s.clear()
    s.requests = 0
    for instance in list(s.fleet.instances.values()):
        _commit(orchestrator, ev.InstanceDown(instance=instance.id, life=instance.life, reason=LOST))
    s.fleet.lives.clear()  # the next body counts anew
    s.fleet.unhealthy.clear()
    _rename_incarnations(s)
    for unit, dst in [(u, u.dst) for u in _units(orchestrator) if u.state == fl.MOVING and u.dst is not None]:
        failed = ev.MoveFailed(id=unit.id, src=_NOWHERE, dst=dst.id, attempt=unit.attempt, reason=LOST)
        _commit(orchestrator, failed)
    s.roles.all_home()  # also what was asked for meanwhile: nobody hears that
    for unit in (u for u in _units(orchestrator) if u.state == fl.WAITING):
        unit.tokens = 0  # whatever is left of it may go on
        unit.placed = 0  # the wait that the next process answers
    s.halted = False
    s.due.rebalance = True
    s.wake_all()
    ledger = s.ledger
    units = list(_units(orchestrator))
    abandoned = tuple(u.id for u in units if u.state == fl.CANCELLING)
    return Debts(
        train=ev.Train(group_ids=ledger.batch, base_version=ledger.base) if ledger.batch else None,
        score=tuple(group.id for group in s.groups.values() if not group.left),
        cancel=ev.Cancel(ids=abandoned, instance=None, reason=LOST) if abandoned else None,
        groups=tuple(s.groups),
        recorded={u.id: u.version for u in units if u.state == fl.PARKED},
        waiting={u.id: u.version for u in units if u.state == fl.WAITING},
        versions=tuple(sorted(s.alive)),
    )


_NOWHERE = -1  # the source of a failed move is not looked at


def _commit(orchestrator: Orchestrator, event: ev.Event) -> None:
    orchestrator.state.halted = False  # a halted brain hears nothing
    orchestrator.step(event)


def _rename_incarnations(s: State) -> None:
    """What has sampled so far is of an earlier process: a new incarnation of the same number is another one."""

    def earlier(ran: tuple[Incarnation, ...]) -> tuple[Incarnation, ...]:
        return tuple(dict.fromkeys((instance, EARLIER) for instance, _ in ran))

    for group in s.groups.values():
        group.ran = earlier(group.ran)
        for unit in group.units:
            if unit is not None:
                unit.ran = earlier(unit.ran)
    for groups in (s.sampled_by, *s.trained_by.values()):
        groups.update({group_id: earlier(ran) for group_id, ran in groups.items()})


def _units(orchestrator: Orchestrator) -> Iterator[Unit]:
    for group in orchestrator.state.groups.values():
        yield from (unit for unit in group.units if unit is not None)
