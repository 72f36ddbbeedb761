"""Stage 2, pure: one row of numbers a slot, from which decode calls are gathered. numpy only.

Consumes admissions, pages and departures; produces the control arrays of decode calls. A row is a decode call's header
(shapes.py) and its sample's page table; it is written where something changes, never made anew.
Law: a row of a slot in use says of its sample what the sample says of itself (`check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dora_jax.rollout.pages import DUMMY, places
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import (
    ADAPTER,
    BIASED,
    BIASES,
    DRAWN,
    FRESH,
    GROUP,
    HEADER,
    HISTORY,
    INDEX,
    POSITION,
    REMAINING,
    SLOT,
    SOURCE,
    STATE,
    Option,
    Shapes,
)
from dora_jax.types import Version

# the others are the device's from the first call on
SENT = (SLOT, FRESH, POSITION, REMAINING, DRAWN, GROUP, INDEX, ADAPTER, STATE, SOURCE)


class Rows:
    def __init__(self, shapes: Shapes, adapters: Mapping[Version, int]):
        """adapters: the place of each resident version's adapter, where versions are adapters."""
        self.shapes, self._adapters = shapes, adapters
        self._width = shapes.pages_for(shapes.max_context)
        self._rows = np.zeros((shapes.slots, HEADER + self._width), np.int64 if shapes.groups > 1 else np.int32)
        self._rows[:, SLOT] = np.arange(shapes.slots)
        self._pages = np.zeros(shapes.slots, np.int32)  # of the table that are in use
        self._versions = np.zeros(shapes.slots, np.int64)
        self._arrivals = np.zeros(shapes.slots, np.int64)
        self.decodes = np.zeros(shapes.slots, bool)  # by slot: its prefix has KV, and it is not leaving
        self._seqs = np.full(shapes.slots, None, object)
        self._own: set[int] = set()  # slots whose sample is drawn otherwise than the run's
        self._reads: set[int] = set()  # and from its earlier tokens
        self._masked: set[int] = set()  # and by a grammar: a token a call
        self._replayed: set[int] = set()  # slots whose sample is replayed by calls of given rows

    @property
    def any_decodes(self) -> bool:
        return bool((self.decodes & (self._rows[:, REMAINING] > 0)).any())

    @property
    def reads_tokens(self) -> bool:
        """Whether a call of these rows takes all tokens that were drawn before it."""
        return bool(self._reads)

    def take(self, seq: Seq, pages: list[int]) -> None:
        """The sample got its slot and these pages; it does not decode before `decodes` says so."""
        slot = seq.row
        self._rows[slot, :HEADER] = self._header(seq)
        self._versions[slot], self._arrivals[slot], self._seqs[slot] = seq.version, seq.arrival, seq
        if seq.sampling is not None and seq.sampling.draws:
            self._own.add(slot)
            if seq.sampling.reads_tokens:
                self._reads.add(slot)
            if seq.matcher is not None:
                self._masked.add(slot)
        if len(seq.forced):
            self._replayed.add(slot)
        seq.table = self._rows[slot, HEADER:HEADER]
        self.append(seq, pages)

    def append(self, seq: Seq, pages: list[int]) -> None:
        start, stop = HEADER + len(seq.table), HEADER + len(seq.table) + len(pages)
        self._rows[seq.row, start:stop] = pages
        self._pages[seq.row] += len(pages)
        seq.table = self._rows[seq.row, HEADER:stop]

    def again(self, seq: Seq) -> None:
        """The next call takes from the host where the sample is, not from the state of its slot."""
        seq.fresh = True
        self._rows[seq.row, :HEADER] = self._header(seq)

    def free(self, seq: Seq) -> None:
        slot = seq.row
        self._rows[slot, REMAINING], self._pages[slot], self.decodes[slot], self._seqs[slot] = 0, 0, False, None
        for slots in (self._own, self._reads, self._masked, self._replayed):
            slots.discard(slot)
        seq.table = self._rows[slot, :0]

    def growth(self) -> list[tuple[Seq, int]]:
        """(sample, pages that its next decode call needs beyond those it has), in order of arrival."""
        position, remaining = self._rows[:, POSITION], self._rows[:, REMAINING]
        need = self.shapes.pages_for(position + np.minimum(remaining, self.shapes.reach)) - self._pages
        slots = np.flatnonzero((need > 0) & (remaining > 0))
        slots = slots[np.argsort(self._arrivals[slots])]
        return list(zip(self._seqs[slots].tolist(), need[slots].tolist(), strict=True))

    def batches(self) -> Iterator[tuple[Version | None, int, np.ndarray]]:
        """(version, rows, slots of one decode call). Version None: of any versions, whose adapters the rows name. Rows
        0: any number that takes the slots; else that of a replay.

        By context where several calls are needed: a call costs what its longest row costs, and the one that is not full
        takes the shortest rows."""
        ready = np.flatnonzero(self.decodes & (self._rows[:, REMAINING] > 0))
        versions, widths = self._versions[ready], np.zeros(len(ready), np.int64)
        if self._replayed:
            widths[:] = [seq.next_rung or self.shapes.rows for seq in self.on(ready)]
        for version in (None,) if self.shapes.adapters else sorted(set(versions.tolist())):
            of_version = np.full(len(ready), True) if version is None else versions == version
            for width in np.unique(widths[of_version]).tolist():
                slots, most = ready[of_version & (widths == width)], width or self.shapes.rows
                if len(slots) > most:
                    slots = slots[np.argsort(-self._rows[slots, POSITION], kind="stable")]
                for first in range(0, len(slots), most):
                    yield version, width, slots[first : first + most]

    def blocks(self, slots: np.ndarray) -> int:
        """Blocks of context in a call of these slots."""
        return self.shapes.bucket(int(self._rows[slots, POSITION].max()), self.shapes.decode_buckets)

    def on(self, slots: np.ndarray) -> list[Seq]:
        return self._seqs[slots].tolist()

    def call(
        self, slots: np.ndarray, blocks: int, drafts: np.ndarray | None, width: int
    ) -> tuple[np.ndarray, tuple[tuple[Seq, int], ...]]:
        """(control array, (sample, steps it may take) by row) of a decode call of `width` rows, whose steps are in
        flight now; of a verifying call, where drafts i32[rows, shapes.drafts] are given."""
        s, seqs = self.shapes, self.on(slots)
        masked = [row for row, slot in enumerate(slots.tolist()) if slot in self._masked] if self._masked else []
        for row in range(len(seqs)) if drafts is not None else masked:
            self.again(seqs[row])
        rows = self._rows[slots]
        position, table = rows[:, POSITION], rows[:, HEADER:]
        steps = np.minimum(rows[:, REMAINING], s.steps if drafts is None else s.drafts + 1)
        if masked:
            steps[masked] = np.minimum(steps[masked], 1)  # the mask of the next one follows from its token
        read, wide = blocks * s.block_pages, s.window if drafts is None else s.verify_window
        window = HEADER + s.groups * read
        shape = s.decode_control(blocks, width) if drafts is None else s.verify_control(blocks)
        control = np.full(shape, DUMMY, np.int32)
        control[len(slots) :, SLOT] = s.slots  # padding rows keep their state in a slot of their own
        used = control[: len(slots)]
        used[:, :HEADER] = rows[:, :HEADER]
        if masked:
            used[masked, REMAINING] = steps[masked]
        reads = min(self._width, read)
        past = np.arange(reads) < s.pages_for(position)[:, None]
        at = position[:, None] // s.page_size + np.arange(wide)
        written = at < s.pages_for(position + steps)[:, None]
        new = table[np.arange(len(seqs))[:, None], np.minimum(at, self._width - 1)]
        for row in np.flatnonzero(rows[:, FRESH]).tolist():
            if (shared := seqs[row].tail_page) is not None:
                table[row, seqs[row].first_private] = shared  # `rows` is this call's
                seqs[row].tail_page = None
        tables = zip(places(table[:, :reads], s.groups), places(new, s.groups), strict=True)
        for group, (read_here, written_here) in enumerate(tables):
            np.copyto(used[:, HEADER + group * read :][:, :reads], read_here, where=past)
            np.copyto(used[:, window + group * wide :][:, :wide], written_here, where=written)
        behind = window + s.groups * wide
        if drafts is not None:
            used[:, behind:] = drafts
        elif behind < control.shape[1]:  # of an engine that scores: tokens to be drawn
            used[:, behind:] = [seq.next_forced(s.steps) for seq in seqs]
        self._rows[slots, FRESH] = 0
        if s.states:
            self._rows[slots, SOURCE] = self._rows[slots, STATE]
        for column, sign in ((POSITION, 1), (DRAWN, 1), (REMAINING, -1)):
            self._rows[slots, column] += sign * steps
        for seq, taken in zip(seqs, steps.tolist(), strict=True):
            seq.inflight += taken
            seq.fresh, seq.source = False, seq.state
        return control, tuple(zip(seqs, steps.tolist(), strict=True))

    def options(self, slots: np.ndarray, width: int) -> np.ndarray | None:
        """The options of a decode call of `width` rows for these slots; None: all of them sample as the run does."""
        own_rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._own] if self._own else []
        if not own_rows:
            return None
        options = np.zeros(self.shapes.decode_options(width), np.int32)
        options[:, BIASED:] = -1
        numbers = options.view(np.float32)
        numbers[:, [Option.TEMPERATURE, Option.TOP_P, Option.REPETITION]] = 1.0
        whole = [Option.OWN, Option.MIN_TOKENS, Option.N_PROMPT, Option.TOP_K, Option.TOP_LOGPROBS]
        steps = self.shapes.steps
        real = [Option.TEMPERATURE, Option.TOP_P, Option.MIN_P, Option.PRESENCE, Option.FREQUENCY, Option.REPETITION]
        for row in own_rows:
            seq = self._seqs[slots[row]]
            own = seq.sampling
            penalties = own.presence_penalty, own.frequency_penalty, own.repetition_penalty
            n_prompt, done = seq.n_prompt + len(own.given), seq.n_out + seq.inflight
            options[row, whole] = 1, own.min_tokens, n_prompt, own.top_k, own.top_logprobs
            numbers[row, real] = own.temperature, own.top_p, own.min_p, *penalties
            options[row, BIASED : BIASED + len(own.biased_ids)] = own.biased_ids
            numbers[row, BIASES : BIASES + len(own.biases)] = own.biases
            if own.reads_tokens:
                options[row, HISTORY : HISTORY + len(seq.sequence)] = seq.sequence
            options[row, Option.MASKED] = seq.matcher is not None and done >= len(own.given)
            given = own.given[done : done + steps]
            first = options.shape[1] - steps
            options[row, first : first + len(given)] = given
        return options

    def check(self, admitted: list[Seq]) -> None:
        if sorted(map(id, admitted)) != sorted(map(id, filter(None, self._seqs))):
            raise RuntimeError("the rows in use are not those of the samples that run")
        for seq in admitted:
            sent, true = self._rows[seq.row, :HEADER], np.array(self._header(seq), np.int32)
            columns = list(range(HEADER) if seq.fresh else SENT)
            if (sent != true)[columns].any() or self._pages[seq.row] != len(seq.table):
                raise RuntimeError(f"the row of {seq.id} says {sent.tolist()}, the sample {true.tolist()}")
            if self.decodes[seq.row] and (seq.leaving or not seq.ready):
                raise RuntimeError(f"{seq.id} decodes although it leaves or its prefix has no KV")

    # ----------------------------------------------------------- private

    def _header(self, seq: Seq) -> tuple[int, ...]:
        return (
            seq.row,
            seq.fresh,
            seq.sequence[-1],
            seq.position,
            seq.remaining,
            seq.drawn,
            seq.id.group_id,
            seq.id.index,
            seq.repeats(self.shapes.max_repeats),
            self._adapters.get(seq.version, 0),
            seq.state,
            seq.source,
        )
