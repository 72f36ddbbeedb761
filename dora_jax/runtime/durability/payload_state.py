"""What the journal says, and the payload that follows from it.

    Head                    begins a segment: the orchestrator's snapshot, then the records of the book
    Batch(entries, last)    what came in together, in order, and was decided on once
        Fact(event, payload)    one event that the orchestrator consumed
        Partial                 tokens that a running sample has grown by

Consumes facts in order; holds the payload of everything unfinished: samples of unscored groups, scored groups not yet
trained, trajectories so far, evaluations under way. Law: `apply` is called right before the orchestrator steps an event
that counts, while it runs and when it is replayed, so both give the same book.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.state import State
from dora_jax.runtime.codec import Codec, CodecError
from dora_jax.types import GroupId, Sample, SampleId, ScoredGroup, Span, TokenTable, Version, is_eval

FORMAT = 4  # of the records of a segment: its head says which
OLDEST = 3  # that `upgrade` knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A ScoredGroup without its samples, which the journal has."""

    version: Version
    rewards: np.ndarray  # f32[G]
    parts: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    epoch: int
    digest: int  # of the version's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    format: int
    epoch: int  # opened anew where a replay could not reproduce a version
    config: Any  # OrchestratorConfig as plain data
    orchestrator: Any  # its snapshot
    digests: dict[str, Published]  # of the live versions
    book: int  # records that follow and belong to the snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    event: ev.Event
    payload: Sample | Scores | Published | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Tokens [start, start + len) of a running sample."""

    id: SampleId
    version: Version
    start: int
    out_ids: np.ndarray  # i32
    logprobs: np.ndarray  # f32


Entry = Fact | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    entries: tuple[Fact | Partial, ...]
    last: bool  # False: more of the same batch follow in the next record, which would else be too large


CODEC = Codec(Head, Scores, Published, Fact, Partial, Batch)
TOKENS_A_RECORD = 1 << 20  # of payload: a batch of more is split


def batches(entries: Sequence[Entry]) -> Iterator[Batch]:
    """The records of one batch."""
    part: list[Entry] = []
    tokens = 0
    for entry in entries:
        if tokens >= TOKENS_A_RECORD:
            yield Batch(entries=tuple(part), last=False)
            part, tokens = [], 0
        part.append(entry)
        payload = entry if isinstance(entry, Partial) else entry.payload
        tokens += len(payload.out_ids) if isinstance(payload, Partial | Sample) else 0
    if part:
        yield Batch(entries=tuple(part), last=True)


def upgrade(row: Any, written: int) -> Any:
    """What format `written` has for a record -> what FORMAT has for it; CodecError: this version does not know that format.

    Rows are [class name, field, ...], records within them too. A change of a record raises FORMAT and has its step here:
    from one format to the next, in order, and nothing else knows of the older ones."""
    if not (type(written) is int and OLDEST <= written <= FORMAT):
        raise CodecError(f"it is of format {written}, and this version reads {OLDEST} to {FORMAT}")
    if written == 3 and isinstance(row, list) and row[:1] == [Fact.__name__]:  # each event was decided on by itself
        *fact, payload = row
        if isinstance(payload, list) and payload[:1] == [Sample.__name__]:  # without a token table
            payload = [*payload, [TokenTable.__name__, None, None, None]]
        return [Batch.__name__, [[*fact, payload]], True]
    return row


def reader(head: bytes) -> Callable[[bytes], Any]:
    """Decodes the records of a segment that begins with this one, in whatever format it was written."""
    formats: list[Any] = []

    def note(row: Any) -> Any:
        formats.append(row[1] if isinstance(row, list) and row[1:] and row[0] == Head.__name__ else None)
        return upgrade(row, formats[0])

    CODEC.decode(head, note)
    return (
        CODEC.decode if formats == [FORMAT] else lambda data: CODEC.decode(data, lambda row: upgrade(row, formats[0]))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One trained batch, as the trainer got it."""

    base: Version
    groups: tuple[ScoredGroup, ...]
    published: Published


class Book:
    def __init__(self) -> None:
        self.samples: dict[GroupId, dict[int, Sample]] = {}
        self.scored: dict[GroupId, ScoredGroup] = {}
        self.evaluated: dict[GroupId, ScoredGroup] = {}
        self.partial: dict[SampleId, list[Partial]] = {}  # chunks, end to end
        self.digests: dict[Version, Published] = {}

    def apply(self, entry: Entry, state: State) -> Step | None:
        """`state`: the orchestrator's, before it steps the event. A step that ended is returned and forgotten."""
        if isinstance(entry, Partial):
            self._grow(entry, state)
            return None
        match entry.event:
            case ev.SampleDone(id=id):
                self.samples.setdefault(id.group_id, {})[id.index] = entry.payload
                self.partial.pop(id, None)
            case ev.SampleCancelled(id=id):
                self.partial.pop(id, None)
            case ev.GroupScored(group_id=group_id, trainable=trainable):
                self._scored(group_id, trainable, entry.payload)
            case ev.GroupFailed(group_id=group_id):
                self.samples.pop(group_id, None)
            case ev.StepPublished(version=version):
                self.digests[version] = entry.payload
                groups = tuple(self.scored.pop(group_id) for group_id in state.ledger.batch)
                return Step(base=version - 1, groups=groups, published=entry.payload)
        return None

    def tokens(self, id: SampleId) -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
        """(out_ids i32[U], logprobs f32[U], the versions that sampled them) of a running sample; empty: it starts over."""
        chunks = self.partial.get(id, [])
        spans: list[Span] = []
        for chunk in chunks:
            start = spans.pop().start if spans and spans[-1].version == chunk.version else chunk.start
            spans.append(Span(version=chunk.version, start=start, stop=_end(chunk)))
        return (
            np.concatenate([np.zeros(0, np.int32), *(c.out_ids for c in chunks)]),
            np.concatenate([np.zeros(0, np.float32), *(c.logprobs for c in chunks)]),
            tuple(spans),
        )

    def forget_partials(self) -> None:
        """Running samples start over at their version: its weights are not bit for bit what they were."""
        self.partial.clear()

    def prune(self, state: State) -> None:
        """Forgets what the orchestrator will not ask for."""
        self.prune_groups(state)
        self.samples = {
            g: {i: s for i, s in done.items() if state.groups[g].units[i] is None} for g, done in self.samples.items()
        }
        self.partial = {id: chunks for id, chunks in self.partial.items() if state.unit(id) is not None}

    def prune_groups(self, state: State) -> None:
        """The same of whole groups, without a look at each sample."""
        live = state.ledger.live
        self.samples = {g: done for g, done in self.samples.items() if g in state.groups}
        self.scored = {g: group for g, group in self.scored.items() if live.get(g, ("",))[0] in ("ready", "training")}
        self.evaluated = {g: group for g, group in self.evaluated.items() if group.version in state.evaluating}
        self.digests = {v: published for v, published in self.digests.items() if v in state.alive or v == 0}

    def records(self) -> Iterator[Sample | ScoredGroup | Partial]:
        """What `load` takes."""
        for done in self.samples.values():
            yield from done.values()
        yield from self.scored.values()
        yield from self.evaluated.values()
        for chunks in self.partial.values():
            yield from chunks

    def load(self, item: Sample | ScoredGroup | Partial) -> None:
        match item:
            case Sample(id=id):
                self.samples.setdefault(id.group_id, {})[id.index] = item
            case ScoredGroup(group_id=group_id):
                (self.evaluated if is_eval(group_id) else self.scored)[group_id] = item
            case Partial(id=id):
                self.partial.setdefault(id, []).append(item)

    # ------------------------------------------------------------ private

    def _grow(self, chunk: Partial, state: State) -> None:
        if state.unit(chunk.id) is None:
            return  # it ended while its tokens were on the way
        chunks = self.partial.setdefault(chunk.id, [])
        while chunks and chunks[-1].start >= chunk.start:
            chunks.pop()  # told again: it moved, or went on from fewer tokens than were recorded
        if chunks and _end(chunks[-1]) > chunk.start:
            chunks[-1] = _shortened(chunks[-1], chunk.start)
        if (_end(chunks[-1]) if chunks else 0) != chunk.start:
            raise RuntimeError(f"tokens of {chunk.id} are missing in front of {chunk.start}")
        chunks.append(chunk)

    def _scored(self, group_id: GroupId, trainable: bool, scores: Scores | None) -> None:
        done = self.samples.pop(group_id)
        if not (trainable or is_eval(group_id)):
            return
        group = ScoredGroup(
            group_id=group_id,
            version=scores.version,
            samples=tuple(done[i] for i in sorted(done)),
            rewards=scores.rewards,
            parts=scores.parts,
        )
        (self.evaluated if is_eval(group_id) else self.scored)[group_id] = group


def _end(chunk: Partial) -> int:
    return chunk.start + len(chunk.out_ids)


def _shortened(chunk: Partial, stop: int) -> Partial:
    n = stop - chunk.start
    return dataclasses.replace(chunk, out_ids=chunk.out_ids[:n], logprobs=chunk.logprobs[:n])
