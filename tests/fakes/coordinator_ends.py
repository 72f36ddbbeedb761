"""What the coordinator's adversary holds against a run at any time: the ends of samples and groups, what is
retained."""

from __future__ import annotations

import collections

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.types import EARLIER, Incarnation, SampleId


class Store(MemoryGroupStore):
    """It says which groups it holds."""

    def __init__(self):
        super().__init__()
        self.ids: set[int] = set()

    def put(self, group):
        super().put(group)
        self.ids.add(group.group_id)

    def take(self, group_ids):
        self.ids -= set(group_ids)
        return super().take(group_ids)

    def discard(self, group_id):
        super().discard(group_id)
        self.ids.discard(group_id)


class Ends:
    """What must be so at any time: the ends of samples and groups, and what is retained of them."""

    def __init__(self, size: int):
        self._size = size
        self.open: set[int] = set()  # groups that have begun and not ended
        self.unended: set[SampleId] = set()  # samples that have started and not ended
        self.ran: dict[SampleId, set[Incarnation]] = collections.defaultdict(set)  # since it began
        self.tainted: set[SampleId] = set()
        self.trained: set[int] = set()

    def begin(self, brain: Orchestrator) -> None:
        """Another process: what the one before had not written down has not been."""
        state = brain.state
        self.open = set(state.groups) | {g for g, (how, _) in state.ledger.live.items() if how == "ready"}
        self.unended = {u.id for group in state.groups.values() for u in group.units if u is not None and u.started}
        for ran in self.ran.values():
            earlier = {(i, EARLIER) for i, _ in ran}
            ran.clear()
            ran.update(earlier)
        for unit in (u for group in state.groups.values() for u in group.units if u is not None):
            self.ran[unit.id] &= set(
                unit.ran
            )  # where it went on last was perhaps not written down, and no token either

    def hear(self, brain: Orchestrator, event: ev.Event) -> None:
        """A fact, before it is committed."""
        if not brain.counts(event):
            return
        match event:
            case (
                ev.SampleStarted(id=id, instance=i, incarnation=incarnation)
                | ev.SampleResumed(id=id, instance=i, incarnation=incarnation)
            ):
                self.unended.add(id)
                self.ran[id].add((i, incarnation))
            case ev.SampleMoved(id=id, dst=i):
                if brain.state.unit(id).dst is (there := brain.state.fleet.instances.get(i)):
                    self.ran[id].add((i, there.incarnation))
            case ev.InstanceUnhealthy(instance=i, incarnation=incarnation):
                found = {id for id, ran in self.ran.items() if any(each == i and n <= incarnation for each, n in ran)}
                self.tainted |= {id for id in found if id.group_id not in self.trained}
            case ev.SampleDone(id=id) | ev.SampleCancelled(id=id):
                self.unended.discard(id)
            case ev.GroupScored(group_id=group_id, trainable=trainable) if not trainable:
                self.end(group_id)

    def follow(self, command: ev.Command) -> None:
        match command:
            case ev.Start(ids=ids):
                self.open |= {id.group_id for id in ids}
                for id in ids:
                    self.ran[id] = set()
                    self.tainted.discard(id)
            case ev.Train(group_ids=group_ids):
                for group_id in group_ids:
                    self.end(group_id)
                ids = {SampleId(g, i) for g in group_ids for i in range(self._size)}
                assert not ids & self.tainted, f"{sorted(ids & self.tainted)} have tokens of an instance in quarantine"
                self.trained |= set(group_ids)
            case ev.Discard(group_id=group_id):
                self.end(group_id)

    def end(self, group_id: int) -> None:
        assert group_id in self.open, f"group {group_id} ends, and has not begun or has ended"
        self.open.remove(group_id)
        left = [id for id in self.unended if id.group_id == group_id]
        assert not left, f"group {group_id} ends before {left}"

    def check_retained(self, brain: Orchestrator, world: Coordinator, payloads: PayloadState, store: Store) -> None:
        """Nothing of a group that has ended."""
        running = (id.group_id for id in payloads.partial)
        retained = {*world.retained(), *store.ids, *payloads.samples, *payloads.scored, *running}
        left = retained - set(brain.state.groups) - set(brain.state.ledger.live)
        assert not left, f"groups {sorted(left)} have ended, and are retained"
