"""What the orchestrator's adversary holds against the ends of samples and groups, and facts that it repeats later."""

from __future__ import annotations

import collections

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.snapshot import Outstanding
from dora_jax.types import SampleId

REMEMBERED = 500  # facts of which one may be repeated
ONCE = (
    ev.InstanceUp,
    ev.InstanceDown,
    ev.InstanceUnhealthy,
    ev.SampleStarted,
    ev.SampleDone,
    ev.SampleCancelled,
    ev.SampleMoved,
    ev.MoveFailed,
    ev.SampleParked,
    ev.SampleResumed,
    ev.SampleWaiting,
    ev.SampleReady,
    ev.GroupScored,
    ev.GroupFailed,
    ev.StepPublished,
)


class Ends:
    def __init__(self) -> None:
        self.past: collections.deque[ev.Event] = collections.deque(maxlen=REMEMBERED)  # facts that counted
        self.open: set[int] = set()  # groups that have begun and not ended
        self._unended: set[SampleId] = set()  # samples that have started and not ended
        self._trains_again: set[int] = set()  # groups of a step that the end of a process cut off

    def again(self, brain: Orchestrator, event: ev.Event) -> ev.Event:
        """What arrived some time ago is repeated: it counts no more."""
        assert not isinstance(event, ONCE) or not brain.counts(event), f"{event} counts twice"
        return event

    def keep(self, event: ev.Event) -> None:
        """A fact that counts."""
        self.past.append(event)
        match event:
            case ev.SampleStarted(id=id):
                self._unended.add(id)
            case ev.SampleDone(id=id) | ev.SampleCancelled(id=id):
                self._unended.discard(id)  # of one that is cancelled meanwhile the start no longer counts
            case ev.GroupScored(group_id=group_id, trainable=trainable) if not trainable:
                self.end(group_id)

    def train(self, command: ev.Train) -> None:
        for group_id in command.group_ids:
            if group_id not in self._trains_again:
                self.end(group_id)

    def end(self, group_id: int) -> None:
        """A group ends once, behind its samples."""
        assert group_id in self.open, f"group {group_id} ends, and has not begun or has ended"
        self.open.remove(group_id)
        left = [id for id in self._unended if id.group_id == group_id]
        assert not left, f"group {group_id} ends before {left}"

    def kill(self, brain: Orchestrator, outstanding: Outstanding) -> None:
        """The first Start of a group was perhaps not carried out, nor its Discard."""
        self.past.clear()
        self.open = set(brain.state.groups) | self.open & set(brain.state.ledger.live)
        if outstanding.train is not None:
            self._trains_again = set(outstanding.train.group_ids) - self.open

    def audit(self, brain: Orchestrator) -> None:
        assert not self._unended, f"{self._unended} have started, and have no end"
        assert not self.open, f"groups {self.open} have begun, and have no end"
        redo = brain.state.redo
        assert not brain.state.groups and not redo, f"prompts {redo} were given up, and are not issued again"
