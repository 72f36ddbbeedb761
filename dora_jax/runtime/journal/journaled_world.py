"""A world whose facts outlive the process: it writes them to the journal before the orchestrator sees them.

    world.events() -> [append the batch with its payload, one write] -> orchestrator commits, decides -> world.execute

Consumes the facts and payload records of any `World` that tells listeners; produces the same facts. Laws: a sample, a
group or a step that the orchestrator knows of is written, which no death of a process undoes; the groups of a step are
on the disk before the step is reported, and so is any fact after journal.sync_s, so that no power cut undoes more than
can be made again, a step bit for bit; a replay decides where the run decided; soft facts (progress, pages, time) wait
for the next write, because losing the last of them costs nothing; a segment begins between two batches of facts. On
object storage a batch is what was reported in journal.sync_s, and no fact is reported before the object that holds it
is there.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dora_jax.base.lanes import doing
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, World
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC, Batch, Entry, Fact, Partial, Published, Saved, batches
from dora_jax.runtime.journal.recovery import head_records
from dora_jax.types import GroupId, Sample, SampleId, ScoredGroup, Version, is_served

HARD = (
    ev.SampleDone,
    ev.GroupScored,
    ev.GroupFailed,
    ev.StepPublished,
    ev.SampleCancelled,
    ev.InstanceUnhealthy,  # after a restart nobody would report it again
)
SOFT_PERIOD_S = 1.0  # how long soft facts may wait for a commit
LARGE_SAMPLES = 20_000  # unfinished ones of which a snapshot takes a tenth of a second: a forked child makes it


class TellingWorld(World, Protocol):
    def listen(self, listener: Callable[[Any], None]) -> None:
        """Calls `listener` with each payload before the event that it belongs to."""


class JournaledWorld:
    """A `World` in front of another: the orchestrator's only source of facts."""

    def __init__(
        self,
        world: TellingWorld,
        journal: EventLog,
        orchestrator: Orchestrator,
        payloads: PayloadState,
        epoch: int = 0,
        segments: dict[int, Version] | None = None,
    ):
        self.payloads = payloads
        self.segments = dict(segments or {})  # number -> version at which it begins
        self._own = 0  # segments of this run
        self._world = world
        self._journal = journal
        self._orchestrator = orchestrator
        self._epoch = epoch
        self._payload: dict[SampleId | GroupId, Sample | ScoredGroup] = {}
        self._digests: dict[Version, tuple[int, int]] = {}  # of a version's params and of the copy that travels
        self._entries: list[Entry] = []
        self._held: collections.deque[list[Entry]] = collections.deque()  # batches that were appended, not reported
        self._committed_s = time.monotonic()
        self.rotate_due = True  # a new segment is wanted before the next facts: a checkpoint has been started
        self._rotation_base = 0  # at which the segment on its way begins
        world.listen(self._hear)

    def events(self) -> Iterator[ev.Event]:
        with doing("journal"):
            if self._journal.rotating:
                number = self._journal.rotated()
                if number is not None:
                    self.payloads.prune_groups(self._orchestrator.state)
                    self._own += 1
                    self.segments[number] = self._rotation_base
            elif self.rotate_due and not self._held:
                self.rotate()
        if self._journal.holds or not self._held:
            # takes one batch of the world's facts into the journal
            try:
                for event in self._world.events():
                    payload: Sample | ScoredGroup | Published | None = None
                    match event:
                        case ev.SampleDone(id=key) | ev.GroupScored(group_id=key):
                            payload = self._payload.pop(key, None)
                        case ev.StepPublished(version=version) if version in self._digests:  # else it is a repetition
                            digest, copy = self._digests.pop(version)
                            payload = Published(epoch=self._epoch, digest=digest, copy=copy)
                    self._entries.append(Fact(event=event, payload=payload))
            finally:  # what a stage reported before another one raised
                entries, self._entries = self._entries, []
                with doing("journal"):
                    for batch in batches(entries):
                        self._journal.append(CODEC.encode(batch))
                    kinds = {type(entry.event) for entry in entries if isinstance(entry, Fact)}
                    now = time.monotonic()
                    if not kinds.isdisjoint(HARD) or now - self._committed_s > SOFT_PERIOD_S or self._journal.sync_due:
                        self._committed_s = now
                        if ev.StepPublished in kinds:
                            self._journal.wait_synced()
                        self._journal.commit(urgent=ev.StepPublished in kinds)
                    if entries:
                        self._held.append(entries)
        if self._journal.holds or not self._held:
            return
        for entry in self._held.popleft():
            if not isinstance(entry, Fact) or self._orchestrator.counts(entry.event):
                self.payloads.apply(entry, self._orchestrator.state)
            if isinstance(entry, Fact):
                yield entry.event

    def execute(self, command: ev.Command) -> None:
        self.payloads.follow(command)
        self._world.execute(command)
        if isinstance(command, ev.Train):  # its groups: while the trainer works
            with doing("journal"):
                self._journal.sync_soon()

    def rotate(self) -> None:
        """Begins a segment with the state as it is. A full disk leaves the old one in use, and this is tried again."""
        state = self._orchestrator.state
        make = functools.partial(head_records, self._orchestrator, self.payloads, self._epoch)
        try:
            if self._own and sum(state.queue.unfinished.values()) >= LARGE_SAMPLES:
                self._journal.rotate_behind(make)
                self._rotation_base, self.rotate_due = state.ledger.base, False
                return
            number = self._journal.rotate(make())
        except OSError:
            if not self._own:
                raise
            return  # the journal has raised the alarm, or will at the next commit
        self.rotate_due = False
        self._own += 1
        self.segments[number] = state.ledger.base

    def record_saved(self, saved: Saved) -> None:
        """Writes the digests of a checkpoint that is being saved. They belong to no batch of facts, so that a replay
        decides on nothing here."""
        self.payloads.apply(saved, self._orchestrator.state)
        self._journal.append(CODEC.encode(Batch(entries=(saved,), last=False)))
        self._journal.commit()

    def forget_before(self, version: Version) -> None:
        """Drops what only a start older than this version would need: segments, and digests of checkpoints."""
        self.payloads.forget_saved(version)
        number = max((n for n, base in self.segments.items() if base <= version), default=None)
        if number is not None:
            self._journal.drop_before(number)
            self.segments = {n: base for n, base in self.segments.items() if n >= number}

    def close(self) -> None:
        """Makes everything durable that was reported."""
        self._journal.close()

    # ------------------------------------------------------------ private

    def _hear(self, item: Any) -> None:
        match item:
            case Partial(id=id) if not is_served(id.group_id):  # after a restart no client waits for it
                self._entries.append(item)
            case Finished(sample=sample) if not is_served(sample.id.group_id):
                self._payload[sample.id] = sample
            case StepDone(version=version, digest=digest, copy=copy):
                self._digests[version] = digest, copy
            case ScoredGroup(group_id=group_id):
                self._payload[group_id] = dataclasses.replace(item, samples=())
