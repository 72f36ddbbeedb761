"""What the orchestrator knows, and the few changes that facts and decisions share.

`transitions.py` commits events into it, `core.py` decides from it, `view.py` shows it, `snapshot.py` writes it down.
`Due` is where to look for decisions that would cost too much to look for everywhere: nothing is due between batches but
what one decision could not do, and moves that wait for enough free slots.

Roles: where the trainer's chips are, and what it is worth to lend them. Values in, values out.

One policy covers the three ways in which trainer and rollouts share chips; they differ in what a switch costs:

    split       no instance is lendable: the chips are the trainer's, whatever it waits for
    colocated   the chips hold the memory of both sides, and a switch costs nothing: the instances stand still from a
                whole batch to its version
    elastic     a switch moves the trainer's state: while the trainer waits, its chips decode as instances of their own
                (`lendable`), if `worth_lending` says so

The cost model: in the time `idle_s` until the trainer has its next groups, more chips decode faster by lent_rate /
rate. The groups are then ready earlier by idle_s * (1 - rate / lent_rate), and the trainer begins later by one switch.
lending.py decides by it.

The queue: samples that hold no slot and want one, by version; how many samples of each version are unfinished, and how
many of those wait for their environment and want none.

Order within a version: samples with recorded tokens first, then requests, evaluation, and groups as they were admitted.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import PARKED, PENDING, WAITING, Fleet, Group, Instance, Unit, add
from dora_jax.orchestrate.ledger import Ledger
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.stride import Strides
from dora_jax.types import (
    MAX_RENEWALS,
    RENEWAL,
    GroupId,
    Incarnation,
    InstanceId,
    SampleId,
    Version,
    is_eval,
    is_served,
    is_training,
    issued_first_as,
)

# Chips that are held delay the training of what becomes ready meanwhile: more instances must be so much faster, at
# least.
LEAST_GAIN = 1.2

ASKED, LENT, RETURNING = "asked", "lent", "returning"


def worth_lending(idle_s: float, rate: float, lent_rate: float, switch_s: float) -> bool:
    """Whether the trainer begins earlier by lending its chips. Rates: tokens/s of all instances, without and with the
    lent ones; switch_s: to the rollouts and back."""
    return lent_rate >= LEAST_GAIN * rate and idle_s > switch_s and idle_s * (1 - rate / lent_rate) > switch_s


def fleet_rate(instances: int, slots: float, samples: float, step_s: Callable[[float], float]) -> float:
    """Tokens/s of so many equal instances, where so many samples want a slot. step_s: seconds of a decode step of a
    batch."""
    batch = min(slots, samples / instances)
    return instances * batch / step_s(batch)


class Roles:
    """Where the trainer's chips are. `switch_s` is expected of a switch to the rollouts and back; what switches have
    taken replaces it."""

    CONFIGURED = ("lendable",)

    def __init__(self, lendable: tuple[InstanceId, ...], switch_s: float):
        self.lendable = lendable
        self.lent: dict[InstanceId, str] = {}  # ASKED, LENT or RETURNING; the chips of the others are the trainer's
        self.asked_s: dict[InstanceId, float] = {}  # when the present switch was asked for
        self.trained = 0  # groups of the step in progress that the trainer is done with
        self.out_s = self.back_s = switch_s / 2
        self.lends_total = 0

    @property
    def switch_s(self) -> float:
        return self.out_s + self.back_s

    def restart(self) -> None:
        """The process that lent the chips is over, with what was asked for meanwhile."""
        self.lent.clear()
        self.asked_s.clear()
        self.trained = 0

    def came_home(self, id: InstanceId, now_s: float) -> None:
        """Take note that a lent instance has ended, whatever ended it."""
        if self.lent.pop(id, None) == RETURNING:
            self.back_s += (now_s - self.asked_s[id] - self.back_s) / 4
        self.asked_s.pop(id, None)


@dataclass
class Queue:
    # with recorded tokens, requests, evaluation, training
    lines: dict[Version, tuple[deque[Unit], ...]] = field(default_factory=dict)
    unfinished: dict[Version, int] = field(default_factory=dict)  # every sample that has not ended, wherever it is
    untrained_unfinished: dict[Version, int] = field(default_factory=dict)  # those of evaluation, and requests
    in_environment: dict[Version, int] = field(default_factory=dict)  # of the unfinished, that wait for theirs

    @property
    def training_unfinished(self) -> int:
        return sum(self.unfinished.values()) - sum(self.untrained_unfinished.values())

    def wanting(self, version: Version) -> int:
        """Samples of a version that hold a slot or want one."""
        return self.unfinished.get(version, 0) - self.in_environment.get(version, 0)

    def add(self, group: Group) -> None:
        """All samples of a new group wait for their first slot."""
        units = [unit for unit in group.units if unit is not None]
        self.line(units[0]).extend(units)
        self.count(group, group.version, len(group.units))

    def park(self, unit: Unit) -> None:
        unit.state = PARKED
        self.line(unit).append(unit)

    def end_wait(self, unit: Unit, state: str) -> None:
        unit.state = state
        add(self.in_environment, unit.version, -1)

    def put_back(self, units: list[Unit]) -> None:
        """Samples that never started go before those that wait for their first time."""
        for unit in sorted(units, key=lambda u: u.id, reverse=True):
            unit.state = PENDING
            self.line(unit).appendleft(unit)

    def first(self, version: Version) -> Unit | None:
        """The sample to place next; those that were cancelled while they waited are dropped here."""
        state = PARKED
        for line in self.lines.get(version, ()):
            while line:
                if line[0].state == state:
                    return line[0]
                line.popleft()
            state = PENDING
        self.lines.pop(version, None)
        return None

    def retag(self, unit: Unit, version: Version) -> None:
        """The training sample goes on under other weights (mode `partial`)."""
        self.count(unit.group, unit.version, -1)
        if unit.state == WAITING:
            add(self.in_environment, unit.version, -1)
            add(self.in_environment, version, 1)
        unit.version = version
        self.count(unit.group, version, 1)

    def retag_waiting(self, version: Version) -> None:
        """Every waiting training sample goes to `version`, oldest first."""
        for old in sorted(v for v in self.lines if v < version):
            for unit in itertools.chain(*self.lines.pop(old)):
                if unit.state in (PARKED, PENDING):
                    if is_training(unit.group.id):
                        self.retag(unit, version)
                    self.line(unit).append(unit)

    def line(self, unit: Unit) -> deque[Unit]:
        """Where it waits."""
        lines = self.lines.get(unit.version)
        if lines is None:
            lines = self.lines[unit.version] = (deque(), deque(), deque(), deque())
        if unit.state == PARKED:
            return lines[0]
        return lines[3 if is_training(unit.group.id) else 1 if is_served(unit.group.id) else 2]

    def count(self, group: Group, version: Version, by: int) -> None:
        """So many samples of the group that have not ended are of this version, more."""
        add(self.unfinished, version, by)
        if not is_training(group.id):
            add(self.untrained_unfinished, version, by)


# Groups over which a task's share of trainable groups is averaged: a few steps' worth of one task.
RATE_GROUPS = 64


# Numbers of Start and Resume begin here, apart from those of moves, which journals of older formats name.
PLACEMENTS = 1 << 32


@dataclass(slots=True)
class Due:
    CONFIGURED = ("received", "pressed")  # empty between two batches, when a snapshot is taken

    drained: dict[Version, int] = field(default_factory=dict)  # slots freed since its moves were last planned
    emptied: dict[InstanceId, None] = field(default_factory=dict)  # instances that may take other weights now
    pressed: dict[InstanceId, None] = field(default_factory=dict)  # instances that report now that pages run out
    rebalance: bool = False  # at every instance
    received: dict[type, int] = field(default_factory=dict)  # facts of this batch by kind
    versions_to_fill: dict[Version, None] = field(default_factory=dict)  # whose queue or free slots have changed


class State:
    CONFIGURED = ("config", "decisions", "groups", "task_limits", "out")  # no part of a snapshot, or one of their own

    def __init__(self, config: OrchestratorConfig, start_version: Version, next_group_id: GroupId):
        self.config = config
        self.decisions = config.decisions
        d = self.decisions
        self.ledger = Ledger(config.groups_per_step, d.max_lag, start_version, capped=d.capped, parts=d.parts)
        self.fleet = Fleet(config.max_prompt_tokens, config.max_new_tokens, config.expected_new_tokens)
        self.queue = Queue()
        self.roles = Roles(config.lendable, config.switch_s)
        self.strides = Strides()
        self.groups: dict[GroupId, Group] = {}  # admitted and not scored, or given up and not yet gone
        # task -> its lowest group id never issued
        self.cursors: dict[str, GroupId] = {t: config.next_of_task(t, next_group_id) for t in config.tasks}
        self.task_open: dict[str, int] = {}  # outstanding groups by task, where tasks have limits
        self.task_rates = dict.fromkeys(config.tasks, 1.0)  # running share of a task's groups that can be trained on
        self.task_limits = config.task_limits
        self.sampled_by: dict[GroupId, tuple[Incarnation, ...]] = {}  # groups that are ready or in training
        self.trained_by: dict[
            Version, dict[GroupId, tuple[Incarnation, ...]]
        ] = {}  # of the last steps, by what they made
        self.redo: list[GroupId] = []  # issued again before new ones
        self.evaluating: dict[Version, int] = {}  # groups whose evaluation has not finished
        self.alive: dict[Version, None] = {start_version: None}  # not retired
        self.asked_s: dict[Version, float] = {}  # live versions that requests came for -> when the last one did
        self.superseded_s: dict[Version, float] = {}  # live versions -> when a newer one was published
        self.budget: int | None = None  # groups left to inject, where a mode admits only at the end of a step
        self.now_s = 0.0
        self.rebalanced_s = 0.0
        self.halted = False
        self.dropped: dict[str, int] = {}  # facts that came late, by kind
        self.attempts = 0  # moves that were asked for, in groups
        self.placements = PLACEMENTS  # the number of the last Start or Resume
        self.requests = 0  # the attempt of the last request that came
        self.moves_total = 0
        self.reloads_total = 0
        self.due = Due()
        self.out: list[ev.Command] = []

    @property
    def paused(self) -> bool:
        """Whether colocated instances stand still: the trainer has a whole batch."""
        return self.config.colocated and not self.ledger.missing

    def short_of_pages(self, instance: Instance, times: int = 1) -> bool:
        return instance.free_reported < times * self.config.kv_pressure * instance.pages

    def unit(self, id: SampleId) -> Unit | None:
        """The sample; None once it has ended."""
        group = self.groups.get(id.group_id)
        return None if group is None else group.units[id.index]

    def live_unit(self, id: SampleId) -> Unit:
        """The sample, where `verdict` or a decision has made sure that it has not ended."""
        unit = self.groups[id.group_id].units[id.index]
        assert unit is not None, id
        return unit

    @property
    def held(self) -> tuple[Version, ...]:
        """Superseded versions that are kept for the sessions that requests have begun with them: those asked for last,
        each for `hold_s`."""
        old = {v: self.now_s - since_s for v, since_s in self.superseded_s.items() if v in self.asked_s}
        young = [v for v, age_s in old.items() if age_s < self.config.hold_s]
        return tuple(sorted(young, key=self.asked_s.__getitem__, reverse=True)[: self.config.hold_versions])

    def open_group(self, group_id: GroupId, version: Version) -> None:
        samples = self.config.eval_samples if is_eval(group_id) else self.config.group_size
        group = Group(group_id, version, 1 if is_served(group_id) else samples)
        self.groups[group_id] = group
        self.queue.add(group)
        self.due.versions_to_fill[version] = None

    def freed(self, instance: Instance | None, version: Version) -> None:
        """Take note that a slot of `instance` that served `version` is free."""
        if instance is not None:
            self.due.versions_to_fill[version] = None
            if version in self.fleet.drains:
                self.due.drained[version] = self.due.drained.get(version, 0) + 1
            if not instance.counts.get(version):
                self.due.emptied[instance.id] = None

    def units(self) -> Iterator[Unit]:
        """Every sample that has not ended."""
        return (unit for group in self.groups.values() for unit in group.units if unit is not None)

    @property
    def returning(self) -> int:
        """Prompts that were given up and are issued again, once the last samples of their groups have ended."""
        return sum(group.abandoned == "evicted" for group in self.groups.values())

    def end_unit(self, unit: Unit) -> None:
        """The sample is done, cancelled, or will never start."""
        group = unit.group
        group.units[unit.id.index] = None
        group.left -= 1
        if unit.state == fl.WAITING:
            self.queue.end_wait(unit, fl.ENDED)
        unit.state = fl.ENDED
        self.freed(self.fleet.release(unit), unit.version)
        self.queue.count(group, unit.version, -1)
        if group.left == 0 and group.abandoned is not None:
            # The last sample of a group that was given up has ended
            self.discard(group.id, "its last sample has ended")
            if group.abandoned == "evicted":
                self.renew(group.id)

    def recorded(self, unit: Unit) -> None:
        """Queue a sample that runs nowhere and whose tokens are recorded, until a slot of its version is free."""
        if unit.group.abandoned is not None:
            self.cancel(unit)
            return
        if self.decisions.mixes_versions and is_training(unit.group.id):
            self.queue.retag(unit, self.ledger.base)
        if unit.restarts:
            unit.tokens, unit.ran, unit.home, unit.restarts = 0, (), None, False
            unit.group.begins_again = True
            self.queue.put_back([unit])
        else:
            self.queue.park(unit)
        self.due.versions_to_fill[unit.version] = None
        if unit.version not in self.fleet.holders and unit.version not in self.fleet.promised:
            self.due.rebalance = True

    def retag_waiting(self) -> None:
        """Modes `partial` and `staleflow`: what runs nowhere goes on under the newest weights."""
        self.queue.retag_waiting(self.ledger.base)
        if self.queue.in_environment:
            for unit in self.units():
                if unit.state == fl.WAITING and is_training(unit.group.id):
                    self.queue.retag(unit, self.ledger.base)

    def cancel(self, unit: Unit) -> None:
        unit.state = fl.CANCELLING
        reason = f"its group {unit.group.abandoned}"
        self.out.append(ev.Cancel(ids=(unit.id,), instance=unit.instance, reason=reason))

    def give_up(self, group_id: GroupId, reason: str) -> None:
        """No step will take the group: its samples are discarded, and its prompt is issued again."""
        self.ledger.evicted(group_id)
        self.count_tasks((group_id,), -1)
        self.sampled_by.pop(group_id, None)
        if self.budget is not None:
            self.budget += 1
        group = self.groups.get(group_id)
        if group is None or not group.left:  # only its payload is left
            self.discard(group_id, reason)
            self.renew(group_id)
        else:
            self.abandon(group, "evicted", reason)

    def discard(self, group_id: GroupId, reason: str) -> None:
        """End a group that is not trained; none of its samples is left."""
        self.groups.pop(group_id, None)
        self.out.append(ev.Discard(group_id=group_id, reason=reason))

    def abandon(self, group: Group, how: str, reason: str) -> None:
        """Give up a group: its samples that have never started end at once, the others by Cancel."""
        group.abandoned = how
        by_instance: dict[InstanceId | None, list[SampleId]] = {}
        for unit in [u for u in group.units if u is not None]:
            if unit.state == fl.PENDING and not unit.started:
                self.end_unit(unit)
            elif unit.state in (fl.PENDING, fl.STARTING, fl.RUNNING, fl.RESUMING, fl.PARKED, fl.WAITING):
                if unit.state == fl.WAITING:
                    self.queue.end_wait(unit, fl.CANCELLING)
                by_instance.setdefault(unit.instance, []).append(unit.id)
                unit.state = fl.CANCELLING
        for instance, ids in by_instance.items():
            self.out.append(ev.Cancel(ids=tuple(ids), instance=instance, reason=reason))

    def renew(self, group_id: GroupId) -> None:
        """Issue the prompt of a group that was given up again, under an id of its own."""
        renewed = group_id + RENEWAL
        if renewed >= MAX_RENEWALS * RENEWAL:
            self.halt(
                False,
                f"prompt {issued_first_as(group_id)} was given up {MAX_RENEWALS} times: no step could take "
                f"its answers in time",
            )
        self.redo.append(renewed)
        self.due.versions_to_fill[self.ledger.taken] = None

    def evaluated(self, version: Version) -> None:
        """A group of the version's evaluation has ended."""
        self.evaluating[version] -= 1
        if not self.evaluating[version]:
            del self.evaluating[version]

    def count_tasks(self, group_ids: Iterable[GroupId], by: int) -> None:
        if self.config.task_cycle:
            for group_id in group_ids:
                task = self.config.task(group_id)
                self.task_open[task] = self.task_open.get(task, 0) + by

    def group_lost(self, group_id: GroupId) -> None:
        """A training group ended untrained: its credit returns, and a batch that it held back may be taken."""
        self.count_tasks((group_id,), -1)
        if self.budget is not None:
            self.budget += 1
        self.wake_all()

    def wake_all(self) -> None:
        """Groups may be admitted, or samples placed, that could not before: look at every version."""
        self.due.versions_to_fill.update(dict.fromkeys(self.alive))

    def halt(self, ok: bool, reason: str) -> None:
        self.halted = True
        self.out.append(ev.Halt(ok=ok, reason=reason))
