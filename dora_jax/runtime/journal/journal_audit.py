"""What became of every group that was ever issued, from the journal of a run alone.

    issued = trained once + filtered + failed (with reasons) + in flight

Consumes the segments of a workdir's journal, which must reach back to its first (journal.keep_all);
produces an `Audit`. Law: it counts facts, not what the orchestrator believes, and then compares the two.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore, LogStore, ObjectLogStore
from dora_jax.runtime.journal.object_storage import opened
from dora_jax.runtime.journal.records import Batch, Entry, Fact, reader
from dora_jax.runtime.journal.recovery import replay
from dora_jax.types import GroupId, SampleId, is_training, issued_first_as


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    segments: int
    issued: int
    trained: int
    filtered: int
    failed: int
    in_flight: int
    reasons: dict[str, int]  # why groups failed
    lost: tuple[GroupId, ...]  # issued and nowhere
    trained_twice: tuple[GroupId, ...]
    generated_again: tuple[SampleId, ...]  # finished more than once
    epochs: int  # more than one: a step that was made again came out with other weights
    weights: int  # different ones that were published

    @property
    def ok(self) -> bool:
        return not (self.lost or self.trained_twice or self.generated_again)

    def __str__(self) -> str:
        return (
            f"issued {self.issued} = trained {self.trained} + filtered {self.filtered} + failed {self.failed} + in "
            f"flight {self.in_flight}; lost {len(self.lost)}, trained twice {len(self.trained_twice)}, finished "
            f"samples generated again {len(self.generated_again)}, epochs {self.epochs}, weights {self.weights}"
        )


def reading(place: Path | str) -> LogStore:
    """The segments of WORKDIR/journal, which may be a URL, for a reader beside the run."""
    if "://" in str(place):
        return ObjectLogStore(opened(str(place)), read_only=True)
    return FileLogStore(place, read_only=True)


def audit(folder: Path | str) -> Audit:
    """Audits WORKDIR/journal, which may be a URL. ValueError: the first facts of the run are gone."""
    journal = EventLog(reading(folder))
    numbers = journal.segments()
    if not numbers or numbers[0] != 1:
        raise ValueError(f"{folder} begins at segment {numbers[:1]}: the first facts of the run are gone")
    end = replay(journal, numbers, lambda sentence: None)
    finished: collections.Counter[SampleId] = collections.Counter()
    ends: dict[GroupId, str] = {}
    for number in numbers:
        for fact in facts(journal.read(number).records):
            match fact.event:
                case ev.SampleDone(id=id) if is_training(id.group_id):
                    finished[id] += 1
                case ev.GroupScored(group_id=group_id, trainable=False) if is_training(group_id):
                    ends[group_id] = "filtered"
                case ev.GroupFailed(group_id=group_id, reason=reason) if is_training(group_id):
                    ends[group_id] = reason
    state = end.orchestrator.state
    trained = collections.Counter(group.group_id for step in end.steps for group in step.groups)
    live = set(state.ledger.live) | set(state.redo)
    issued = {g for g in range(max(state.cursors.values())) if g < state.cursors[state.config.task(g)]}
    reasons = collections.Counter(reason for reason in ends.values() if reason != "filtered")
    return Audit(
        segments=len(numbers),
        issued=len(issued),
        trained=len(trained),
        filtered=sum(reason == "filtered" for reason in ends.values()),
        failed=reasons.total(),
        in_flight=len(live),
        reasons=dict(reasons),
        lost=tuple(sorted(issued - {issued_first_as(g) for g in (*trained, *ends, *live)})),
        trained_twice=tuple(g for g, times in trained.items() if times > 1 or g in ends or g in live),
        generated_again=tuple(id for id, times in finished.items() if times > 1),
        epochs=end.epoch + 1,
        weights=len({step.published.digest for step in end.steps}),
    )


def entries(records: Sequence[bytes]) -> list[Entry]:
    """What a segment's batches hold, in order."""
    read = reader(records[0])
    batches = [record for record in map(read, records) if isinstance(record, Batch)]
    return [entry for batch in batches for entry in batch.entries]


def facts(records: Sequence[bytes]) -> list[Fact]:
    return [entry for entry in entries(records) if isinstance(entry, Fact)]
