"""The queue: samples that hold no slot, by version, and how many samples of each version are unfinished.

Order within a version: samples with recorded tokens first, then evaluation, then groups as they were admitted.
"""

from __future__ import annotations

from collections import deque

from dora_jax.orchestrate.fleet import PARKED, PENDING, Group, Unit
from dora_jax.types import Version, is_eval


class Queue:
    def __init__(self):
        self.parked: dict[Version, deque[Unit]] = {}
        self.evaluation: dict[Version, deque[Unit]] = {}
        self.pending: dict[Version, deque[Unit]] = {}
        self.unfinished: dict[Version, int] = {}  # every sample that has not ended, wherever it is
        self.evaluation_unfinished: dict[Version, int] = {}
        self.training_unfinished = 0

    def add(self, group: Group) -> None:
        """All samples of a new group wait for their first slot."""
        line = self.evaluation if is_eval(group.id) else self.pending
        line.setdefault(group.version, deque()).extend(group.units)
        _count(self.unfinished, group.version, len(group.units))
        if is_eval(group.id):
            _count(self.evaluation_unfinished, group.version, len(group.units))
        else:
            self.training_unfinished += len(group.units)

    def park(self, unit: Unit) -> None:
        unit.state = PARKED
        self.parked.setdefault(unit.version, deque()).append(unit)

    def put_back(self, units: list[Unit]) -> None:
        """Samples that never started go before those that wait for their first time."""
        for unit in sorted(units, key=lambda u: (u.group.id, u.index), reverse=True):
            unit.state = PENDING
            line = self.evaluation if is_eval(unit.group.id) else self.pending
            line.setdefault(unit.version, deque()).appendleft(unit)

    def first(self, version: Version) -> Unit | None:
        """The sample to place next; those that were cancelled while they waited are dropped here."""
        for lines, state in ((self.parked, PARKED), (self.evaluation, PENDING), (self.pending, PENDING)):
            line = lines.get(version)
            while line:
                if line[0].state == state:
                    return line[0]
                line.popleft()
            if line is not None:
                del lines[version]
        return None

    def pop(self, unit: Unit) -> None:
        """Take what `first` returned."""
        if unit.state == PARKED:
            self.parked[unit.version].popleft()
        elif is_eval(unit.group.id):
            self.evaluation[unit.version].popleft()
        else:
            self.pending[unit.version].popleft()

    def ended(self, unit: Unit) -> bool:
        """Count a sample out; True when it was the last unfinished one of its version."""
        if is_eval(unit.group.id):
            _count(self.evaluation_unfinished, unit.version, -1)
        else:
            self.training_unfinished -= 1
        return _count(self.unfinished, unit.version, -1)

    def retag(self, unit: Unit, version: Version) -> None:
        """The sample goes on under other weights (mode `partial`)."""
        _count(self.unfinished, unit.version, -1)
        unit.version = version
        _count(self.unfinished, version, 1)

    def retag_waiting(self, version: Version) -> None:
        """Every waiting training sample goes to `version`, oldest first."""
        for lines in (self.parked, self.pending):
            for old in sorted(v for v in lines if v < version):
                kept = deque()
                for unit in lines.pop(old):
                    if is_eval(unit.group.id):
                        kept.append(unit)
                    elif unit.state in (PARKED, PENDING):
                        self.retag(unit, version)
                        lines.setdefault(version, deque()).append(unit)
                if kept:
                    lines[old] = kept


def _count(counts: dict[Version, int], version: Version, by: int) -> bool:
    """Add; True when nothing is left."""
    left = counts.get(version, 0) + by
    if left:
        counts[version] = left
        return False
    counts.pop(version, None)
    return True
