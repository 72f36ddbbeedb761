"""Lending: the trainer's chips decode while the trainer waits. Issues Lend, Return, Pause and Unpause.

The cost model is in roles.py. Laws: the trainer takes no batch before its chips are back; chips are asked back as soon as
all that the step still lacks may be taken, so that the trainer is late by one switch at most, and a step costs one switch: a
part of it would be trained at the price of a switch of its own. A lent instance that is lost gives its chips back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from dora_jax.orchestrate import admission, speeds
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.ledger import READY, SCORING
from dora_jax.orchestrate.roles import LENT, fleet_rate, worth_lending
from dora_jax.orchestrate.state import State
from dora_jax.types import InstanceId, is_training

UNKNOWN = (1.0, 1.0)  # rates while nothing is known


def lend(s: State) -> None:
    """Lends the trainer's chips, if the trainer waits and the wait is expected to be long enough."""
    roles = s.roles
    if roles.lent or not roles.lendable or not trainer_waits(s):
        return
    if not worth_lending(expected_idle_s(s), *_rates(s), roles.switch_s):
        return
    for instance in roles.lendable:
        roles.ask(instance, s.now_s)
        s.out.append(ev.Lend(instance=instance, version=s.ledger.base))


def call_back(s: State) -> None:
    """Asks for the chips that are lent: the trainer has something to do. Chips that are on their way are asked for when they
    are there."""
    for id, state in s.roles.lent.items():
        if state == LENT:
            s.roles.give_back(id, s.now_s)
            s.fleet.instances[id].returning = True
            s.out.append(ev.Return(instance=id))


def trainer_takes(s: State) -> None:
    """A whole batch is with the trainer: colocated instances stand still."""
    if s.paused:
        s.out += [ev.Pause(instance=id) for id in s.fleet.instances]


def trainer_ends(s: State) -> None:
    """The batch is published: colocated instances go on."""
    s.roles.trained = 0
    if s.config.colocated:
        s.out += [ev.Unpause(instance=id) for id in s.fleet.instances]


# ---------------------------------------------------------------- what is expected


def trainer_waits(s: State) -> bool:
    """The trainer is done with all groups that it was given, and needs more."""
    ledger = s.ledger
    return ledger.base < s.config.total_steps and ledger.missing > 0 and s.roles.trained == len(ledger.batch)


def expected_idle_s(s: State) -> float:
    """Time until the trainer has its next groups: until so many of those that run have ended. A group ends with the sample
    that has most tokens left. Groups that are ready and may not be taken wait for an older version: the lent instances, which
    hold the newest, do not help it, so that this is no idle time."""
    ledger, measured = s.ledger, s.fleet.measured
    missing = ledger.part - ledger.counts[READY] - ledger.counts[SCORING]
    if missing <= 0:
        return 0.0
    ends_s = heapq.nsmallest(missing, _seconds_left(s))
    return ends_s[-1] if len(ends_s) == missing else measured.left(0) * measured.token_s()


def _seconds_left(s: State) -> Iterator[float]:
    """Of each training group that runs."""
    measured = s.fleet.measured
    token_s: dict[InstanceId | None, float] = {None: measured.token_s()}  # by where a sample is
    for instance in s.fleet.instances.values():
        s.fleet.settle(instance)
        token_s[instance.id] = measured.token_s(len(instance.units))
    for group in s.groups.values():
        if group.left and group.abandoned is None and is_training(group.id):
            units = (unit for unit in group.units if unit is not None)
            yield max(measured.left(unit.tokens) * token_s[unit.instance] for unit in units)


def _rates(s: State) -> tuple[float, float]:
    """Tokens/s of the instances without and with the lent ones; equal while nothing is known of their speed."""
    line, instances = s.fleet.measured.line, s.fleet.instances.values()
    if line.reports < speeds.LINE_REPORTS or not instances or not s.fleet.measured.finished_tokens:
        return UNKNOWN
    rows = sum(len(instance.units) for instance in instances)
    context = sum(max(0, i.pages - i.free_reported) * i.page_size for i in instances) / max(1, rows)
    credit = admission.credit(s.decisions, s.ledger, s.ledger.base, s.config.total_steps, s.budget)
    samples = sum(map(s.queue.wanting, s.queue.unfinished)) + credit * s.config.group_size
    if not samples:
        return UNKNOWN
    slots = sum(instance.slots for instance in instances) / len(instances)

    def step_s(batch: float) -> float:
        return max(line.step_s((1.0, batch, batch * context)), 1e-9) / s.fleet.measured.drafts.gain(batch)

    own = len(instances)
    rate = fleet_rate(own, slots, samples, step_s)
    return rate, max(rate, fleet_rate(own + len(s.roles.lendable), slots, samples, step_s))
