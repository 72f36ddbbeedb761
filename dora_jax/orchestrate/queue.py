"""The queue: samples that hold no slot and want one, by version; how many samples of each version are unfinished, and how
many of those wait for their environment and want none.

Order within a version: samples with recorded tokens first, then requests, evaluation, and groups as they were admitted.
"""

from __future__ import annotations

import itertools
from collections import deque

from dora_jax.orchestrate.fleet import PARKED, PENDING, WAITING, Group, Unit, add
from dora_jax.types import Version, is_served, is_training


class Queue:
    def __init__(self):
        self.lines: dict[Version, tuple[deque[Unit], ...]] = {}  # with recorded tokens, requests, evaluation, training
        self.unfinished: dict[Version, int] = {}  # every sample that has not ended, wherever it is
        self.untrained_unfinished: dict[Version, int] = {}  # those of evaluation, and requests
        self.in_environment: dict[Version, int] = {}  # of the unfinished, those that wait for their environment

    @property
    def training_unfinished(self) -> int:
        return sum(self.unfinished.values()) - sum(self.untrained_unfinished.values())

    def wanting(self, version: Version) -> int:
        """Samples of a version that hold a slot or want one."""
        return self.unfinished.get(version, 0) - self.in_environment.get(version, 0)

    def add(self, group: Group) -> None:
        """All samples of a new group wait for their first slot."""
        units = [unit for unit in group.units if unit is not None]
        self._line(units[0]).extend(units)
        self._count(group, group.version, len(group.units))

    def park(self, unit: Unit) -> None:
        unit.state = PARKED
        self._line(unit).append(unit)

    def wait(self, unit: Unit) -> None:
        unit.state = WAITING
        add(self.in_environment, unit.version, 1)

    def end_wait(self, unit: Unit, state: str) -> None:
        unit.state = state
        add(self.in_environment, unit.version, -1)

    def put_back(self, units: list[Unit]) -> None:
        """Samples that never started go before those that wait for their first time."""
        for unit in sorted(units, key=lambda u: (u.group.id, u.index), reverse=True):
            unit.state = PENDING
            self._line(unit).appendleft(unit)

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

    def pop(self, unit: Unit) -> None:
        """Take what `first` returned."""
        self._line(unit).popleft()

    def ended(self, unit: Unit) -> None:
        """Count a sample out."""
        add(self.unfinished, unit.version, -1)
        if not is_training(unit.group.id):
            add(self.untrained_unfinished, unit.version, -1)

    def retag(self, unit: Unit, version: Version) -> None:
        """The training sample goes on under other weights (mode `partial`)."""
        self._count(unit.group, unit.version, -1)
        if unit.state == WAITING:
            add(self.in_environment, unit.version, -1)
            add(self.in_environment, version, 1)
        unit.version = version
        self._count(unit.group, version, 1)

    def retag_waiting(self, version: Version) -> None:
        """Every waiting training sample goes to `version`, oldest first."""
        for old in sorted(v for v in self.lines if v < version):
            for unit in itertools.chain(*self.lines.pop(old)):
                if unit.state in (PARKED, PENDING):
                    if is_training(unit.group.id):
                        self.retag(unit, version)
                    self._line(unit).append(unit)

    def _line(self, unit: Unit) -> deque[Unit]:
        """Where it waits."""
        lines = self.lines.get(unit.version)
        if lines is None:
            lines = self.lines[unit.version] = (deque(), deque(), deque(), deque())
        if unit.state == PARKED:
            return lines[0]
        return lines[3 if is_training(unit.group.id) else 1 if is_served(unit.group.id) else 2]

    def _count(self, group: Group, version: Version, by: int) -> None:
        add(self.unfinished, version, by)
        if not is_training(group.id):
            add(self.untrained_unfinished, version, by)
