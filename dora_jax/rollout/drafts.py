"""Stage 2, pure: drafts of a sample's next tokens from its group's other samples. numpy only.

Consumes the samples of this engine as they grow and end, and what is sent of those of others; produces guesses at what
a sample draws next: the tokens that followed the same last tokens in a sample of the same group, itself included. Any
version may draft. One call verifies a guess: it draws at every position with that position's own key and keeps the
draws up to the first that differs, so the tokens are those of decoding step by step (up to near-ties between batch
shapes), and no version but the sample's own decides. Suffixes of siblings: Seer (OSDI 26) and DAS draft from them; the
rule that keeps a draw is exact here because rollout/sample.py keys every draw by its position.

Stage 2, pure: which call decodes the rows of a version: the decode call, a narrower one, or one that verifies drafts.

Consumes the rows that decode, and what the calls cost: times that `Device.measure` takes when calls are compiled, or
the configuration's; produces the decode calls of a tick. Few rows take the quickest narrower call that holds them. An
engine with a ladder (rollout.ladder) begins with one call, of all rows and the longest context. A shorter context is
compiled when samples would take it, beside what runs; a narrower call once the wider ones have taken a few times as
long as a compilation: what is spent on one that never pays is little beside what was spent anyway. Drafts are verified
where they draw more tokens a second than the call that the rows would else take.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dora_jax.rollout.rows import Rows
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import Shapes
from dora_jax.rollout.ticks import DecodeCall
from dora_jax.types import GroupId, SampleId

NONE = -1  # no guess: no token equals it
SUFFIXES = (8, 4, 2)  # last tokens that must be alike, the longest match first
PRIOR = 4.0  # guesses that stand for what is not known yet of a group
TYPICAL = 0.7  # share of guesses that hold, of a run that has made none
WATCHED = 8  # of so many groups that draw without drafts, one is compared with guesses
EVERY = 5  # draw of it; coprime to usual row counts
RESTS = 7  # calls that decode without being asked, after one whose drafts would not have been worth it
MEMORY = 0.98  # of the run's share: what it keeps at each guess
ENDED_TOKENS = 2**22  # of samples that are not here: of as many groups as that is, the newest


@dataclasses.dataclass
class _Source:
    """The tokens of one sample, and how many of them the index holds."""

    n_prompt: int
    sequence: np.ndarray  # prompt + sampled
    indexed: int = 0


@dataclasses.dataclass(eq=False)
class _Group:
    """Where each suffix of the group's samples was met last, and how often its guesses held."""

    sources: dict[int, _Source] = dataclasses.field(default_factory=dict)
    held: float = 0.0
    failed: float = 0.0
    ended: int = 0  # tokens of samples that have left or are elsewhere
    resting: int = 0  # calls until it is asked again
    # last tokens -> (sample, position of what followed)
    after: dict[bytes, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def grow(self, index: int, n_prompt: int, sequence: np.ndarray) -> None:
        """The tokens of sample `index` so far."""
        self.sources.setdefault(index, _Source(n_prompt, sequence)).sequence = sequence

    def guess(self, index: int, sequence: np.ndarray, most: int) -> np.ndarray:
        """At most so many tokens that followed the end of sample `index` before; none where it is new. Of a sample that
        repeats itself, it goes on so."""
        for known, source in self.sources.items():
            tokens = source.sequence
            for at in range(max(source.indexed, source.n_prompt), len(tokens)):
                for n in SUFFIXES:
                    if at >= n:
                        self.after[tokens[at - n : at].tobytes()] = known, at
            source.indexed = len(tokens)
        for n in SUFFIXES:
            if len(sequence) >= n and (found := self.after.get(sequence[-n:].tobytes())) is not None:
                other, at = found
                followed = self.sources[other].sequence[at : at + most]
                return np.resize(followed, most) if other == index else followed
        return sequence[:0]


class Drafter:
    """Guesses for the samples of one engine, and whether a call verifies them: from measured acceptance and cost."""

    def __init__(self, shapes: Shapes):
        self.verified = self.accepted = 0  # tokens of drafts that a call verified, and those of them that held
        self.tokens, self._steps, self._rows = shapes.drafts, shapes.steps, shapes.draft_rows
        # in the order in which samples of them left or were sent
        self._groups = collections.defaultdict[GroupId, _Group](_Group)
        self._ended = 0  # tokens of samples that have left or are elsewhere, of all groups
        self._share = TYPICAL  # of guesses that hold, over all groups
        self._unwatched = 0  # draws since the last that was compared

    def promising(self, seqs: Sequence[Seq], cost: float) -> bool:
        """Whether full drafts of these samples would be worth a verifying call. cost: its time over that of the decode
        call that they would take."""
        return len(seqs) <= self._rows and self._worth(seqs, [self.tokens] * len(seqs), cost)

    def decide(self, seqs: Sequence[Seq], cost: float, here: Iterable[Seq]) -> np.ndarray | None:
        """i32[n, drafts] that the next call of these samples verifies, NONE beyond the end of a guess; None: it
        decodes. cost: as above. here: every sample of the engine."""
        if len(seqs) > self._rows or any(seq.sampling and seq.sampling.draws for seq in seqs):
            return None
        first = self._groups[seqs[0].id.group_id]
        if first.resting:
            first.resting -= 1
            return None
        if not self.promising(seqs, cost):
            first.resting = RESTS
        if first.resting or any(seq.inflight for seq in seqs):
            return None
        groups = {seq.id.group_id for seq in seqs}
        for seq in here:
            if seq.id.group_id in groups:
                self._groups[seq.id.group_id].grow(seq.id.index, seq.n_prompt, seq.sequence)
        drafts = np.stack([self.draft(seq) for seq in seqs])
        return drafts if self._worth(seqs, (drafts != NONE).sum(1).tolist(), cost) else None

    def draft(self, seq: Seq) -> np.ndarray:
        """i32[tokens]: a guess at what the sample draws next, NONE beyond its end."""
        draft = np.full(self.tokens, NONE, np.int32)
        most = max(0, min(self.tokens, seq.remaining - 1))
        found = self._groups[seq.id.group_id].guess(seq.id.index, seq.sequence, most)
        draft[: len(found)] = found
        return draft

    def learn(self, seq: Seq, draft: np.ndarray | None, drawn: np.ndarray) -> tuple[int, int]:
        """What the sample draws next, before it takes it in. draft: the one that was verified, of which the answer says
        how many tokens were guessed, up to the first that does not hold, and how many of these hold. None: what it
        would have been is made now, once in a while, so that acceptance is known without a call; the answer is 0, 0."""
        verified = draft is not None
        if draft is None:
            if seq.id.group_id % WATCHED:
                return 0, 0
            self._unwatched = (self._unwatched + 1) % EVERY
            if self._unwatched:
                return 0, 0
            self._groups[seq.id.group_id].grow(seq.id.index, seq.n_prompt, seq.sequence)
            draft = self.draft(seq)
        else:
            self.verified += int((draft != NONE).sum())
            self.accepted += len(drawn) - 1
        known = draft[: len(drawn)]
        known = known[known != NONE]
        if not len(known):
            return 0, 0
        wrong = np.flatnonzero(known != drawn[: len(known)])
        held, failed = (int(wrong[0]), 1) if len(wrong) else (len(known), 0)
        group = self._groups[seq.id.group_id]
        group.held, group.failed = group.held + held, group.failed + failed
        keep = MEMORY ** (held + failed)
        self._share = keep * self._share + (1 - keep) * held / (held + failed)
        return (held + failed, held) if verified else (0, 0)

    def know(self, id: SampleId, tokens: np.ndarray) -> None:
        """The response, so far, of a sample that another engine has: it drafts for its siblings here. Of what is sent
        of a sample again, only what follows the same tokens counts."""
        group = self._groups[id.group_id] = self._groups.pop(id.group_id, _Group())  # the last to be forgotten
        source = -1 - id.index  # not that of the sample itself, which may come here
        known = group.sources[source].sequence if source in group.sources else tokens[:0]
        if len(tokens) > len(known) and np.array_equal(tokens[: len(known)], known):
            group.grow(source, 0, tokens)
            self._keep(group, len(tokens) - len(known))

    def end(self, seq: Seq) -> None:
        """The sample leaves this engine; its tokens go on to draft for its siblings, here now or later, until the
        tokens of newer groups take their room."""
        id = seq.id.group_id
        group = self._groups[id] = self._groups.pop(id, _Group())  # the last to be forgotten
        group.grow(seq.id.index, seq.n_prompt, seq.sequence.copy())
        self._keep(group, len(seq.sequence))

    # ----------------------------------------------------------- private

    def _keep(self, group: _Group, tokens: int) -> None:
        """So many more tokens of samples that are not here; those of the oldest groups make room."""
        group.ended += tokens
        self._ended += tokens
        while self._ended > ENDED_TOKENS and len(self._groups) > 1:
            self._ended -= self._groups.pop(next(iter(self._groups))).ended

    def _worth(self, seqs: Sequence[Seq], guesses: Sequence[int], cost: float) -> bool:
        """Whether a verifying call of so many guesses a sample draws more tokens in its time than a decode call. Of k
        guesses, each of which holds with probability a, it draws (1 - a^(k+1)) / (1 - a) in the mean."""
        drawn = decoded = 0.0
        for seq, k in zip(seqs, guesses, strict=True):
            group = self._groups[seq.id.group_id]
            a = (group.held + PRIOR * self._share) / (group.held + group.failed + PRIOR)
            drawn += k + 1 if a >= 1.0 else (1 - a ** (k + 1)) / (1 - a)
            decoded += min(self._steps, seq.remaining)
        return drawn > decoded * cost


PATIENCE = 4  # compilations that a missed call of a ladder costs before it is compiled, beside what runs
PAYS = 0.95  # a narrower call that takes more of a decode call's time than this is not used


class CallCosts:
    """Times over that of a decode call whose rows all take all steps, by blocks of context. A narrower call without a
    measured time is not used."""

    def __init__(self, shapes: Shapes):
        self.narrow: dict[tuple[int, int], float] = {}  # by (rows, blocks)
        self.verify = dict.fromkeys(shapes.decode_buckets, shapes.draft_cost or 1.0)
        self.decode_s: dict[int, float] = {}  # of the decode call,
        self.compile_s: dict[int, float] = {}  # and what its compilation took
        self.patience = PATIENCE
        self._rungs, self._rows, self._step = shapes.rungs, shapes.rows, 1 / shapes.steps
        self._longest = shapes.decode_buckets[-1]
        self._ladder, self._lost_s = shapes.ladder, collections.defaultdict[tuple[int, int], float](float)
        for rows in self._rungs if shapes.narrow_cost else ():
            share = (rows - self._rungs[0]) / (self._rows - self._rungs[0])
            cost = shapes.narrow_cost + (1 - shapes.narrow_cost) * share
            self.narrow |= {(rows, blocks): cost for blocks in shapes.decode_buckets}

    def context(self, blocks: int) -> int:
        """Blocks of the shortest decode call that is there and holds so many; the one that a warm-up has left out is
        compiled next."""
        there = min((each for each in self.compile_s if each >= blocks), default=blocks)
        if there > blocks:
            self._lost_s[self._rows, blocks] = math.inf
        return there

    def replayed(self, rows: int, blocks: int) -> int:
        """The same of a call of so many rows. Where none is there, the longest is compiled at its first call, a shorter
        one beside what runs."""
        if not self._ladder or rows not in self._rungs:
            return blocks
        there = min((each for width, each in self.narrow if width == rows and each >= blocks), default=self._longest)
        if there > blocks:
            self._lost_s[rows, blocks] += self.decode_s.get(there, 0.0) * self.narrow.get((rows, there), 1.0)
        return there

    def rows(self, samples: int, blocks: int) -> int:
        """Rows of the quickest decode call that takes so many samples."""
        fit = [
            (cost, rows)
            for rows in self._rungs
            if rows >= samples and (cost := self.narrow.get((rows, blocks), math.inf)) <= PAYS
        ]
        return min(fit)[1] if fit else self._rows

    def of_draft(self, samples: int, blocks: int) -> float:
        """A verifying call's time over that of the decode call that so many samples would take. It is no less than a
        step of that one, whatever was measured."""
        rows = self.rows(samples, blocks)
        if rows == self._rows:
            return self.verify[blocks]
        return max(self._step, self.verify[blocks] / self.narrow[rows, blocks])

    def use(self, samples: int, blocks: int) -> int:
        """`rows` of a call that is made now: its time counts for the narrowest call that would have taken them, once a
        warm-up has measured it."""
        rows = self.rows(samples, blocks)
        if self._ladder and blocks in self.decode_s and samples <= self._rungs[-1]:
            at = next(rung for rung in self._rungs if rung >= samples), blocks
            if at not in self.narrow:
                self._lost_s[at] += self.decode_s[blocks] * self.narrow.get((rows, blocks), 1.0)
        return rows

    def next_rung(self) -> tuple[int, int] | None:
        """(rows, blocks) of the call to compile now; None: none has been missed for long enough."""
        lost, patience_s = self._lost_s.items(), self.patience * max(self.compile_s.values(), default=0.0)
        late = [at for at, lost_s in lost if at not in self.narrow and lost_s > patience_s]
        return max(late, key=self._lost_s.__getitem__, default=None)

    def climbed(self, rows: int, blocks: int, decode_s: float, narrow_s: float) -> None:
        """The call of so many rows is there; the times are of the widest of this context and of this one."""
        self.decode_s[blocks], self.compile_s[blocks] = decode_s, max(self.compile_s.values())
        self.narrow[rows, blocks] = narrow_s / decode_s


class Decoding:
    """`calls` commits what it decides: the rows' steps are in flight."""

    def __init__(self, shapes: Shapes, rows: Rows):
        self.costs = CallCosts(shapes)
        self.drafter = Drafter(shapes) if shapes.drafts else None
        self._rows = rows

    def calls(self, here: Collection[Seq]) -> list[DecodeCall]:
        """One for each version and row batch. here: every sample of the engine."""
        calls = []
        for version, width, slots in self._rows.batches():
            drafts, blocks = None, self.costs.context(shortest := self._rows.blocks(slots))
            if self.drafter is not None:
                cost = self.costs.of_draft(len(slots), blocks)
                drafts = self.drafter.decide(self._rows.on(slots), cost, here)
            if width:
                blocks = self.costs.replayed(width, blocks)
            else:  # while a shorter context is compiled, none of fewer rows is missed at this one
                width = (self.costs.use if blocks == shortest else self.costs.rows)(len(slots), blocks)
            options = self._rows.options(slots, width)
            calls.append(DecodeCall(version, blocks, *self._rows.call(slots, blocks, drafts, width), drafts, options))
        return calls

    @property
    def needs_tokens(self) -> bool:
        """Whether the next calls take the samples' last tokens: they may verify drafts, or a row has penalties."""
        if self._rows.reads_tokens:
            return True
        return self.drafter is not None and any(
            self.drafter.promising(self._rows.on(slots), self.costs.of_draft(len(slots), self._rows.blocks(slots)))
            for _, _, slots in self._rows.batches()
        )
