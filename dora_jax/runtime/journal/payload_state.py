"""The payload of everything unfinished, as it follows from the records of the journal.

Consumes facts in order, and the commands that follow from them; holds samples of unscored groups, scored groups not yet
trained, the tokens of running samples, and evaluations under way. Law: `apply` is called right before the orchestrator
steps an event that counts, while it runs and when it is replayed, so both give the same payload.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dora_jax.config.changes import Settings
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.state import State
from dora_jax.runtime.journal.records import REWRITTEN, SAMPLED, Entry, Fact, Partial, Published, Saved
from dora_jax.types import GroupId, Sample, SampleId, ScoredGroup, Span, TokenTable, Version, is_eval, is_served


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One trained batch, as the trainer got it."""

    base: Version
    groups: tuple[ScoredGroup, ...]
    published: Published


class PayloadState:
    """TypeError: a fact comes without the payload that its event needs."""

    def __init__(self) -> None:
        self.samples: dict[GroupId, dict[int, Sample]] = {}  # finished, of groups not yet scored
        self.scored: dict[GroupId, ScoredGroup] = {}  # not yet trained
        self.evaluated: dict[GroupId, ScoredGroup] = {}
        self.partial: dict[SampleId, list[Partial]] = {}  # chunks, end to end
        self.digests: dict[Version, Published] = {}
        self.saved: dict[Version, Saved] = {}  # checkpoints -> digests of what they were given to save
        self.settings: Settings = {}  # of the run that made this

    def apply(self, entry: Entry, state: State) -> Step | None:
        """`state`: the orchestrator's, before it steps the event. Returns the step that ended, and forgets its
        groups."""
        if isinstance(entry, Partial):
            if state.unit(entry.id) is not None:  # else the sample ended while its tokens were on the way
                chunks = self.partial.setdefault(entry.id, [])
                while chunks and chunks[-1].start >= entry.start:
                    chunks.pop()  # reported again: the sample moved, or went on from fewer tokens than were recorded
                if chunks and _end(chunks[-1]) > entry.start:
                    chunk = chunks[-1]
                    n = entry.start - chunk.start
                    chunks[-1] = dataclasses.replace(chunk, out_ids=chunk.out_ids[:n], logprobs=chunk.logprobs[:n])
                if (_end(chunks[-1]) if chunks else 0) != entry.start:
                    raise RuntimeError(f"tokens of {entry.id} are missing in front of {entry.start}")
                chunks.append(entry)
            return None
        if isinstance(entry, Saved):
            self.saved[entry.version] = entry
            return None
        match entry.event:
            case ev.SampleDone(id=id) if not is_served(id.group_id):
                self.samples.setdefault(id.group_id, {})[id.index] = _payload(entry, Sample)
                self.partial.pop(id, None)
            case ev.SampleCancelled(id=id):
                self.partial.pop(id, None)
            case ev.GroupScored(group_id=group_id, trainable=trainable):
                done = self.samples.pop(group_id)
                if trainable or is_eval(group_id):
                    group = dataclasses.replace(
                        _payload(entry, ScoredGroup), samples=tuple(done[i] for i in sorted(done))
                    )
                    (self.evaluated if is_eval(group_id) else self.scored)[group_id] = group
            case ev.GroupFailed(group_id=group_id):
                self.samples.pop(group_id, None)
            case ev.StepPublished(version=version):
                published = self.digests[version] = _payload(entry, Published)
                groups = tuple(self.scored.pop(group_id) for group_id in state.ledger.batch)
                return Step(base=version - 1, groups=groups, published=published)
        return None

    def follow(self, command: ev.Command) -> None:
        """A sample that starts has no tokens: one that began on an instance in quarantine begins again. A
        group that is discarded has nothing."""
        match command:
            case ev.Start(ids=ids):
                for id in ids:
                    self.partial.pop(id, None)
            case ev.Discard(group_id=group_id):
                self.samples.pop(group_id, None)
                self.scored.pop(group_id, None)
                for id in [id for id in self.partial if id.group_id == group_id]:
                    del self.partial[id]

    def tokens(self, id: SampleId) -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
        """(out_ids i32[U], logprobs f32[U], the versions that sampled them) of a running sample. Empty: no tokens of it
        are recorded, and it starts over."""
        chunks = self._chunks(id)
        spans: list[Span] = []
        for chunk in chunks:
            start = spans.pop().start if spans and spans[-1].version == chunk.version else chunk.start
            spans.append(Span(version=chunk.version, start=start, stop=_end(chunk)))
        return (
            np.concatenate([np.zeros(0, np.int32), *(c.out_ids for c in chunks)]),
            np.concatenate([np.zeros(0, np.float32), *(c.logprobs for c in chunks)]),
            tuple(spans),
        )

    def mask(self, id: SampleId) -> np.ndarray | None:
        """bool[U]: which of `tokens` were sampled. None: all, as of any sample that is no episode."""
        chunks = self._chunks(id)
        if all(chunk.kind == SAMPLED for chunk in chunks):
            return None
        return np.repeat([chunk.kind == SAMPLED for chunk in chunks], [len(chunk.out_ids) for chunk in chunks])

    def table(self, id: SampleId, prompt: int) -> TokenTable:
        """The rows that are recorded of a running sample with a prompt of so many tokens, from its first token on."""
        known: np.ndarray | None = None
        for chunk in self._chunks(id):
            known = None if known is None else known[: prompt + chunk.start]  # later tokens were others
            if (new := chunk.table.routes) is not None and chunk.row <= (0 if known is None else len(known)):
                known = new if known is None else np.concatenate([known[: chunk.row], new])
        return TokenTable(routes=known)

    def forget_saved(self, first: Version, last: float = math.inf) -> None:
        """Forgets the digests of checkpoints that are gone: all but those from `first` to `last`."""
        self.saved = {version: saved for version, saved in self.saved.items() if first <= version <= last}

    def prune(self, state: State) -> None:
        """Forgets the payload that the orchestrator will not ask for."""
        self.prune_groups(state)
        self.samples = {
            g: {i: s for i, s in done.items() if state.groups[g].units[i] is None} for g, done in self.samples.items()
        }
        self.partial = {id: chunks for id, chunks in self.partial.items() if state.unit(id) is not None}

    def prune_groups(self, state: State) -> None:
        """Like `prune`, for whole groups: it looks at no sample."""
        live = state.ledger.live
        self.samples = {g: done for g, done in self.samples.items() if g in state.groups}
        self.scored = {g: group for g, group in self.scored.items() if live.get(g, ("",))[0] in ("ready", "training")}
        self.evaluated = {g: group for g, group in self.evaluated.items() if group.version in state.evaluating}
        self.digests = {v: published for v, published in self.digests.items() if v in state.alive or v == 0}

    def records(self) -> Iterator[Sample | ScoredGroup | Partial]:
        """All payload, as `load` takes it."""
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
            case _:
                raise TypeError(f"a {type(item).__name__} stands among the payload")

    # ------------------------------------------------------------ private

    def _chunks(self, id: SampleId) -> list[Partial]:
        """None of an episode with an earlier branch: that branch is not recorded, so the episode starts over."""
        chunks = self.partial.get(id, [])
        return [] if any(chunk.kind == REWRITTEN for chunk in chunks) else chunks


P = TypeVar("P", Sample, ScoredGroup, Published)


def _payload(fact: Fact, kind: type[P]) -> P:
    if not isinstance(fact.payload, kind):
        raise TypeError(f"a {type(fact.event).__name__} comes without its {kind.__name__}")
    return fact.payload


def _end(chunk: Partial) -> int:
    return chunk.start + len(chunk.out_ids)
