"""Lending: the trainer's chips decode while the trainer waits. Issues Lend, Return, Pause and Unpause.

The cost model is in state.py (`Roles`). Laws: the trainer takes no batch before its chips are back; chips are asked
back as soon as all that the step still lacks may be taken, so that the trainer is late by one switch at most, and a
step costs one switch: a part of it would be trained at the price of a switch of its own. A lent instance that is lost
gives its chips back.

The trainer waits for groups, or, where these are ready, for the last ones of an old version (the deadline rule): the
chips go to the version that is waited for. They are not lent for groups where some that must be in this step take
longer than the rollouts to sample what it lacks: the step lasts until those have ended, and what is ready before is
trained meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet, ledger
from dora_jax.orchestrate.state import ASKED, LENT, RETURNING, State, fleet_rate, worth_lending
from dora_jax.types import InstanceId, Version, is_training

UNKNOWN = (1.0, 1.0)  # rates while nothing is known


def lend(s: State) -> None:
    """Lends the trainer's chips, if the trainer waits and the wait is expected to be long enough: to what it waits
    for."""
    roles, ledger = s.roles, s.ledger
    if roles.lent or not roles.lendable:
        return
    if ledger.base >= s.config.total_steps or ledger.missing <= 0 or roles.trained != len(ledger.batch):
        return  # the trainer has groups that it is not done with, or needs no more
    wait = expected_wait(s)
    rate, lent_rate = _rates(s, wait.version)
    if not worth_lending(wait.seconds, rate, lent_rate, roles.switch_s):
        return
    group_tokens = s.config.group_size * s.fleet.measured.mean_tokens
    if wait.version == ledger.base and (lag := ledger.max_lag):
        oldest_s = max(_seconds_left(s, ledger.base - lag), default=0.0)  # until the last has ended of those due now
        if oldest_s > ledger.missing * group_tokens / rate:
            return
    running = [v for v in s.queue.unfinished if v <= wait.version < ledger.base]
    version = max(running, default=ledger.taken)
    for instance in roles.lendable:
        roles.lent[instance], roles.asked_s[instance] = ASKED, s.now_s
        roles.lends_total += 1
        s.out.append(ev.Lend(instance=instance, version=version))


def call_back(s: State) -> None:
    """Asks for the chips that are lent: the trainer has something to do. Chips that are on their way are asked for when
    they are there."""
    for id, state in s.roles.lent.items():
        if state == LENT:
            s.roles.lent[id], s.roles.asked_s[id] = RETURNING, s.now_s
            s.fleet.instances[id].returning = True
            s.out.append(ev.Return(instance=id))


# ---------------------------------------------------------------- what is expected


class Wait(NamedTuple):
    """What the trainer waits for before it may have the rest of the step."""

    seconds: float
    version: Version  # groups of versions up to this one


def expected_wait(s: State) -> Wait:
    """Until so many of the groups that run have ended. A group ends with the sample that takes longest."""
    measured = s.fleet.measured
    version, groups = s.ledger.awaited()
    if groups <= 0:
        return Wait(0.0, version)
    ends_s = heapq.nsmallest(groups, _seconds_left(s, version))
    return Wait(ends_s[-1] if len(ends_s) == groups else measured.left(0) * measured.token_s(), version)


def _seconds_left(s: State, version: Version) -> Iterator[float]:
    """Seconds left of each training group of versions up to this one that runs."""
    measured = s.fleet.measured
    token_s: dict[InstanceId | None, float] = {None: measured.token_s()}  # by where a sample is
    for instance in s.fleet.instances.values():
        s.fleet.settle(instance)
        token_s[instance.id] = measured.token_s(len(instance.units))
    for group in s.groups.values():
        if group.left and group.version <= version and group.abandoned is None and is_training(group.id):
            units = (unit for unit in group.units if unit is not None)
            yield max(measured.left(unit.tokens) * token_s[unit.instance] for unit in units)


def _rates(s: State, version: Version) -> tuple[float, float]:
    """Tokens/s at versions up to this one, of the instances that hold them without and with the lent ones; equal while
    nothing is known of their speed."""
    line, instances = s.fleet.measured.line, list(s.fleet.instances.values())
    if version < s.ledger.base:
        instances = [i for i in instances if any(v <= version for v in i.versions)]
    if line.reports < fleet.LINE_REPORTS or not instances or not s.fleet.measured.finished_tokens:
        return UNKNOWN
    rows = sum(len(instance.units) for instance in instances)
    context = sum(max(0, i.pages - i.free_reported) * i.page_size for i in instances) / max(1, rows)
    samples = sum(s.queue.wanting(v) for v in s.queue.unfinished if v <= version)
    if version == s.ledger.base:
        credit = ledger.credit(s.decisions, s.ledger, s.ledger.taken, s.config.total_steps, s.budget)
        samples += credit * s.config.group_size
    if not samples:
        return UNKNOWN
    slots = sum(instance.slots for instance in instances) / len(instances)

    def step_s(batch: float) -> float:
        return max(line.step_s((1.0, batch, batch * context)), 1e-9) / s.fleet.measured.drafts.gain(batch)

    own = len(instances)
    rate = fleet_rate(own, slots, samples, step_s)
    return rate, max(rate, fleet_rate(own + len(s.roles.lendable), slots, samples, step_s))
