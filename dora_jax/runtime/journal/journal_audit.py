"""What became of every group that was ever issued, and what is known of a checkpoint's params: from a journal alone.

    issued = trained once + filtered + failed (with reasons) + in flight

Consumes the segments of a workdir's journal, which must reach back to its first (journal.keep_all);
produces an `Audit`. `params_digest` reads them newest first, without following them. Laws: an audit counts facts, not
what the orchestrator believes, and then compares the two; nothing is written here, and nobody waited for.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dora_jax.config import changes
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.codec import CodecError
from dora_jax.runtime.journal.event_log import EventLog, unheard
from dora_jax.runtime.journal.log_stores import JournalError, log_at
from dora_jax.runtime.journal.object_storage import JOURNAL
from dora_jax.runtime.journal.records import Batch, Entry, Fact, Head, Published, Saved, reader
from dora_jax.runtime.journal.recovery import replay
from dora_jax.runtime.journal.workdir_mirror import url_of
from dora_jax.types import GroupId, SampleId, Version, is_training, issued_first_as

DIGESTS = (Saved.__name__.encode(), Published.__name__.encode())  # a record of another kind is not decoded for one


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


def audit(folder: Path | str) -> Audit:
    """Audits WORKDIR/journal, which may be a URL. ValueError: the first facts of the run are gone."""
    journal = EventLog(log_at(folder, read_only=True))
    numbers = journal.segments()
    if not numbers or numbers[0] != 1:
        raise ValueError(f"{folder} begins at segment {numbers[:1]}: the first facts of the run are gone")
    end = replay(journal, numbers, unheard)
    finished: collections.Counter[SampleId] = collections.Counter()
    ends: dict[GroupId, str] = {}
    settings: changes.Settings = {}
    for number in numbers:
        records = journal.read(number).records
        head = reader(records[0])(records[0])
        if changes.learned(changes.between(settings, head.settings), only_afresh=True):
            finished.clear()  # what was in flight was given up
        settings = head.settings
        for fact in facts(records):
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


def params_digest(workdir: Path, version: Version) -> int | None:
    """The digest of the params that the checkpoint of this version was given, else of those that were published as it.

    None: the workdir has no journal, or it does not reach back to the version."""
    place = url_of(workdir) or workdir
    newest: int | None = None  # that was published as the version
    if place == workdir and not (workdir / JOURNAL).is_dir():
        return None
    try:
        journal = EventLog(log_at(f"{place}/{JOURNAL}", read_only=True))
        numbers = sorted(journal.segments(), reverse=True)
    except (JournalError, OSError):
        return None
    for number in numbers:
        saved: dict[Version, int] = {}  # by this segment; the last of several holds
        published: dict[Version, int] = {}
        try:
            records = journal.read(number).records
            if not records:
                continue
            read = reader(records[0])
            for item in map(read, [data for i, data in enumerate(records) if not i or any(k in data for k in DIGESTS)]):
                match item:
                    case Head():
                        saved |= {int(at): each.params for at, each in item.saved.items()}
                        published |= {int(at): each.digest for at, each in item.digests.items()}
                    case Batch(entries=entries):
                        for entry in entries:
                            match entry:
                                case Saved(version=at, params=digest):
                                    saved[at] = digest
                                case Fact(event=ev.StepPublished(version=at), payload=Published(digest=digest)):
                                    published[at] = digest
        except (JournalError, CodecError, OSError):
            continue  # damaged, or of a newer format: an older segment may know the version
        if version in saved:
            return saved[version]
        newest = published.get(version) if newest is None else newest
    return newest
