"""Stage 4, buffer: group id -> payload, from scoring to training. Holds no rules: what is taken is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dora_jax.types import GroupId, ScoredGroup


class GroupStore(Protocol):
    def put(self, group: ScoredGroup) -> None:
        """Keep a scored group; an id that is already there is an error."""

    def take(self, group_ids: Iterable[GroupId]) -> tuple[ScoredGroup, ...]:
        """Remove and return these groups, in this order; an unknown id is an error and removes nothing."""

    def discard(self, group_id: GroupId) -> None:
        """Forget a group, if it is there."""


class MemoryGroupStore:
    """One process; called from several threads, each call touches the dict once per group."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, ScoredGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: ScoredGroup) -> None:
        if self._groups.setdefault(group.group_id, group) is not group:
            raise ValueError(f"group {group.group_id} is already in the store")

    def take(self, group_ids: Iterable[GroupId]) -> tuple[ScoredGroup, ...]:
        group_ids = tuple(group_ids)
        missing = sorted(set(group_ids) - self._groups.keys())
        if missing or len(set(group_ids)) != len(group_ids):
            raise ValueError(f"cannot take groups {group_ids}: not in the store {missing}, or named twice")
        return tuple(self._groups.pop(group_id) for group_id in group_ids)

    def discard(self, group_id: GroupId) -> None:
        self._groups.pop(group_id, None)
