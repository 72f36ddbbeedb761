"""Placement: free slots go to waiting samples, then to new groups. Issues Start and Resume.

Waiting samples of a version are placed on its least loaded instances, those with recorded tokens first. A new group is
admitted only when its first sample gets a slot at once: that moment is its version tag.

Rounds of mode `rollpacker`: a step is a short round or a long one, and no other mode has any.

    short   P and `over_issued` groups are issued, and the first P that are ready train. The others are given up: their
            prompts wait, in the order in which they were given up
    long    once P prompts wait, the next step issues these, and trains them all

So no step waits for the longest answers but a long one, where all are long. Laws: every group trains on the version
that sampled it; a round gives a prompt up once at the most; what was given up trains in a long round, which the last
step is where any prompt waits.
Source: arXiv 2509.21009 (tail batching); `Decisions` says what is assumed.
"""

from __future__ import annotations

import math

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate import ledger
from dora_jax.orchestrate.fleet import Instance, Unit
from dora_jax.orchestrate.ledger import OUTSTANDING
from dora_jax.orchestrate.state import State
from dora_jax.types import GroupId, InstanceId, SampleId, Version

GIVEN_UP = "it is not among the first {} of its round: its prompt waits for a long round"
# A mass start is spread over several decisions: each sample costs a few microseconds. What a large batch has ended is
# replaced at once.
PLACED_A_DECISION, PLACED_A_FACT = 1024, 2


def begin_round(s: State) -> None:
    """A step begins: its round is a long one where enough prompts wait."""
    if s.decisions.over_issued:
        s.ledger.long_round = len(s.redo) + s.returning >= s.config.groups_per_step or _overdue(s)


def end_round(s: State) -> None:
    """The step has its batch: what else is outstanding is given up."""
    reason = GIVEN_UP.format(s.config.groups_per_step)
    for group_id in [g for g, (state, _) in s.ledger.live.items() if state in OUTSTANDING]:
        s.give_up(group_id, reason)


def _overdue(s: State) -> bool:
    """More prompts wait than the steps after this one train."""
    later = s.config.total_steps - s.ledger.base - 1
    return len(s.redo) + s.returning > later * s.config.groups_per_step


def fill_woken(s: State) -> None:
    """Waiting samples first, the oldest version first; then new groups, at the version that they are meant for."""
    fill, versions = _Fill(s), sorted(s.due.versions_to_fill)
    for version in versions:
        fill.place_waiting(version)
    meant = ledger.admission_version(s.decisions, s.ledger)
    if meant in versions:
        fill.admit(meant)
    if fill.resumes or fill.starts:
        s.placements = fill.attempt
    for command, by_place in ((ev.Resume, fill.resumes), (ev.Start, fill.starts)):
        for (instance, version), ids in by_place.items():
            s.out.append(command(ids=tuple(ids), instance=instance, version=version, attempt=fill.attempt))
    if fill.left > 0:
        s.due.versions_to_fill.clear()


class _Fill:
    """The starts and resumes of one decision; `left` may still be placed in it."""

    def __init__(self, s: State):
        self.s = s
        self.attempt = s.placements + 1
        self.starts: dict[tuple[InstanceId, Version], list[SampleId]] = {}
        self.resumes: dict[tuple[InstanceId, Version], list[SampleId]] = {}
        self.left = PLACED_A_DECISION + PLACED_A_FACT * sum(s.due.received.values())
        self._density: dict[Version, float] = {}  # samples a unit of weight, once all that load a version have it

    def place_waiting(self, version: Version) -> bool:
        """Give slots to the waiting samples of a version; True when none waits any more."""
        s = self.s
        while (unit := s.queue.first(version)) is not None:
            instance = s.fleet.place(unit) if self.left > 0 else None
            if instance is None or instance.used >= (limit := self._fair(version, instance)):
                return False
            if unit.state == fl.PARKED:
                s.queue.line(unit).popleft()
                s.fleet.reserve(unit, instance, fl.RESUMING, self.attempt)
                self.resumes.setdefault((instance.id, version), []).append(unit.id)
                self.left -= 1
            else:
                # As many samples of its group as fit up to `limit` samples: they share the prompt's pages
                group = unit.group
                sibling: Unit | None = unit
                ids = self.starts.setdefault((instance.id, version), [])
                while sibling is not None and sibling.group is group and sibling.state == fl.PENDING:
                    s.queue.line(sibling).popleft()
                    s.fleet.reserve(sibling, instance, fl.STARTING, self.attempt)
                    ids.append(sibling.id)
                    self.left -= 1
                    if not s.fleet.has_room(instance) or instance.used >= limit:
                        break
                    sibling = s.queue.first(version)
            s.fleet.offer(instance)
        return True

    def _fair(self, version: Version, instance: Instance) -> float:
        """Samples that `instance` may hold while others still load the version: they come one by one, and the first
        would else take all the work."""
        s = self.s
        arriving = s.fleet.arriving.get(version)
        if not arriving:
            return instance.slots
        if version not in self._density:
            credit = ledger.credit(s.decisions, s.ledger, version, s.config.total_steps, s.budget)
            samples = s.queue.wanting(version) + credit * s.config.group_size
            self._density[version] = samples / (s.fleet.capacity[version] + arriving)
        groups = math.ceil(self._density[version] * instance.weight / s.config.group_size)
        return groups * s.config.group_size

    def admit(self, version: Version) -> None:
        """Admit groups while the rule, the load target and a free slot allow."""
        s = self.s
        if s.queue.first(version) is not None:
            return
        while ledger.credit(s.decisions, s.ledger, version, s.config.total_steps, s.budget):
            instance = s.fleet.best(version) if self.left > 0 else None  # that has room for a sample without tokens
            if instance is None or instance.used >= self._fair(version, instance):
                return
            group_id = _next_group(s)
            if group_id is None:
                return
            s.ledger.admit(group_id, version)
            s.count_tasks((group_id,), 1)
            if s.budget is not None:
                s.budget -= 1
            s.open_group(group_id, version)
            if not self.place_waiting(version):
                return


def _next_group(s: State) -> GroupId | None:
    """Groups to redo first, then the prompt stream in order, while the remaining steps train more groups than there are
    prompts that were given up: each prompt that was issued ends before the run does. A task at its own limit is passed
    over for a while: until the others are so far ahead of it as they may be, and enough for a batch are outstanding."""
    # Whether a prompt that was issued before is issued now: in a long round, and in modes without rounds
    if s.redo and (s.ledger.long_round or not s.decisions.over_issued or _overdue(s)):
        return s.redo.pop(0)
    left = ledger.groups_to_issue(s.ledger, s.config.total_steps)
    # A prompt of this long round is not free yet: samples of its first issue are still being cancelled
    if (s.ledger.long_round and s.returning > 0) or (
        left <= len(s.redo) + len(s.groups) and left <= len(s.redo) + s.returning
    ):
        return None
    limits, furthest = s.task_limits, math.inf
    if s.config.task_lead and s.ledger.total_outstanding >= s.ledger.missing:
        furthest = min(s.cursors.values()) + s.config.task_lead * s.config.groups_per_step
    open_tasks = [
        task
        for task, cursor in s.cursors.items()
        if not limits or (s.task_open.get(task, 0) < limits[task] and cursor <= furthest)
    ]
    if not open_tasks:
        return None
    task = min(open_tasks, key=s.cursors.__getitem__)
    group_id = s.cursors[task]
    s.cursors[task] = s.config.next_of_task(task, group_id + 1)
    return group_id
