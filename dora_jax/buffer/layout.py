"""Stage 4, buffer: the static shape of a step's batch, and where its samples stand in the rows. Pure, numpy only.

Laws: the shape depends on the config alone; samples are placed by falling length, so the same samples always lie in the
same places, whatever their order; the rows that hold tokens fill whole micro-batches first. Rows are enough for the
longest samples, and most of a large batch is then empty: its last micro-batches are neither packed nor sent. Where rows
are split, those behind the micro-batches of long samples hold none that stands in two short rows, each of which the
trainer computes as a row. Every process places all samples, alike, and fills the rows of the shards that its devices
hold.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dora_jax.types import Sample

Row = int
WHOLE_PLACES = 1 << 18  # a smaller batch, of about 12 MB, is made whole: its bytes cost less than a program that widens
COUNTS = 8  # so many rows may be sent of a large batch: each is a program that widens what arrives


class Routes(Protocol):
    """What the expert routes of a model look like; see models.routes.RouteShape."""

    def missing(self, *rows: int) -> np.ndarray: ...

    def check(self, routes: np.ndarray | None, rows: int, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The static shape of a step's batch."""

    rows: int  # B
    tokens: int  # L
    micro_batches: int  # M; B is a multiple of M * shards
    shards: int = 1  # data-parallel shards of the mesh
    splits: int = 1  # short rows of a row that holds no longer sample
    share_prompts: bool = False
    skip_zero_advantage: bool = False
    routes: Routes | None = None  # of what the samples carry; None: the trainer's routers choose
    temperature: float | None = None  # the run's, where turns may have their own; None: there is no such column
    held: tuple[int, ...] | None = None  # shards whose rows this process fills, in their order; None: all of them

    def holding(self, filled: int) -> BatchShape:
        """The shape of the first micro-batches, which hold so many filled rows, in steps of 1 / COUNTS of all: what is
        made and sent of a large batch. The same rows stand in the same micro-batches."""
        if self.rows * self.tokens < WHOLE_PLACES:
            return self
        step = -(-self.micro_batches // COUNTS)
        count = min(self.micro_batches, -(-filled * self.micro_batches // (self.rows * step)) * step)
        return dataclasses.replace(self, rows=self.rows // self.micro_batches * count, micro_batches=count)

    def local_rows(self) -> np.ndarray:
        """int[rows]: where each row stands among those that this process fills; -1: it fills others."""
        found = np.full((self.shards, self.rows // self.shards), -1)
        held = list(range(self.shards) if self.held is None else self.held)
        found[held] = np.arange(found[held].size).reshape(len(held), -1)
        return found.reshape(-1)

    def row_order(self) -> np.ndarray:
        """Row of the k-th filled bin: micro-batch by micro-batch, dealt over the shards inside each."""
        per_micro = self.rows // self.micro_batches
        inside = np.arange(per_micro).reshape(self.shards, -1).T.reshape(-1)  # one row per shard in turn
        return (np.arange(self.micro_batches)[:, None] + inside[None, :] * self.micro_batches).reshape(-1)


def layout(
    *,
    pack_tokens: int,
    rows: int,
    micro_batches: int,
    samples: int,
    max_tokens: int,
    shards: int = 1,
    splits: int = 1,
    share_prompts: bool = False,
    skip_zero_advantage: bool = False,
) -> BatchShape:
    """rows 0: enough for `samples` of `max_tokens` each (prompt and response), rounded up to the mesh."""
    if (longest := max_tokens - 1) > pack_tokens:
        raise ValueError(
            f"trainer.pack_tokens={pack_tokens} is shorter than the longest sample: {longest} tokens "
            f"(prompt and response limits together, less one)"
        )
    unit = micro_batches * shards
    needed = rows or math.ceil(samples / (pack_tokens // longest))
    if rows and rows % unit:
        raise ValueError(f"trainer.rows={rows} is not a multiple of micro_batches x data-parallel shards = {unit}")
    return BatchShape(
        rows=-(-needed // unit) * unit,
        tokens=pack_tokens,
        micro_batches=micro_batches,
        shards=shards,
        splits=splits,
        share_prompts=share_prompts,
        skip_zero_advantage=skip_zero_advantage,
    )


class Item(NamedTuple):
    """A sample that wants a place: `length` tokens of its own, behind `shared` ones of its prompt."""

    prompt: bytes  # what samples must have in common to share it
    shared: int
    length: int


def items_of(samples: Sequence[Sample], share_prompts: bool) -> list[Item]:
    shared = [len(s.prompt_ids) - 1 if share_prompts else 0 for s in samples]
    return [
        Item(s.prompt_ids.tobytes() if n else b"", n, len(s.prompt_ids) + len(s.out_ids) - 1 - n)
        for s, n in zip(samples, shared)
    ]


class Place(NamedTuple):
    row: Row
    start: int  # of the sample's own tokens
    segment: int
    shared: int = 0  # tokens of the prompt that stand elsewhere in the row
    prompt_start: int = 0
    prompt_segment: int = 0


class _Bins:
    """Bins that are being filled from the left; how much is free stands in a tree of maxima, so that the first bin with
    room is found in O(log bins)."""

    def __init__(self, sizes: Sequence[int]):
        self._sizes, self._leaves = sizes, 1 << (len(sizes) - 1).bit_length()
        self._free = [0] * (2 * self._leaves)  # of bin k: at _leaves + k; above it the larger one of each two
        self._free[self._leaves : self._leaves + len(sizes)] = sizes
        for node in range(self._leaves - 1, 0, -1):
            self._free[node] = max(self._free[2 * node], self._free[2 * node + 1])
        self.segments = [0] * len(sizes)  # of each bin
        self._prompts: dict[bytes, dict[int, tuple[int, int]]] = collections.defaultdict(dict)  # bin -> start, segment

    def place(self, item: Item) -> tuple[int, ...] | None:
        """Its bin, start and segment, and start and segment of the prompt that it shares; None: no bin has room.

        First into a bin that holds the prompt, else into the first with room: bins stand in the order of filling."""
        holding = self._prompts[item.prompt] if item.shared else {}
        k = next((k for k in holding if self._free[self._leaves + k] >= item.length), None)
        if k is None:
            if self._free[1] < item.shared + item.length:
                return None
            node = 1
            while node < self._leaves:
                node = 2 * node + (self._free[2 * node] < item.shared + item.length)
            k = node - self._leaves
            if item.shared:
                holding[k] = self._take(k, item.shared)
        return k, *self._take(k, item.length), *holding.get(k, (0, 0))

    def _take(self, k: int, tokens: int) -> tuple[int, int]:
        """Start and segment of the tokens that are now taken."""
        node = self._leaves + k
        start, self.segments[k] = self._sizes[k] - self._free[node], self.segments[k] + 1
        self._free[node] -= tokens
        while node > 1 and self._free[node // 2] != (most := max(self._free[node], self._free[node ^ 1])):
            node //= 2
            self._free[node] = most
        return start, self.segments[k]


def places_of(items: Sequence[Item], shape: BatchShape) -> tuple[list[Place], BatchShape]:
    """First fit by falling length, samples that share a prompt one after another and first into rows that hold it.

    Ties by index, so the same samples always land in the same place. Returns the places, and the shape of the
    micro-batches that hold them (`BatchShape.holding`), in whose rows they stand."""
    total: collections.Counter[bytes] = collections.Counter()
    for item in items:
        total[item.prompt] += item.length if item.shared else 0
    falling = sorted(range(len(items)), key=lambda i: (-total[items[i].prompt], items[i].prompt, -items[i].length, i))
    placed = _placed(items, falling, shape, shape.rows)
    if not placed:
        raise ValueError(
            f"{len(items)} samples with {sum(item.shared + item.length for item in items)} tokens do "
            f"not fit into {shape.rows} rows of {shape.tokens}: raise trainer.rows or trainer.pack_tokens"
        )
    if shape.splits > 1:
        # Rows up to the end of the last micro-batch with a sample longer than a short row stay whole, and all of them
        # where short ones, which waste more, have too little room. Long samples come first, and stand as they stood
        long = [row for i, (row, *_) in zip(falling, placed) if items[i].length > shape.tokens // shape.splits]
        per_micro = shape.rows // shape.micro_batches
        placed = _placed(items, falling, shape, -(-(1 + max(long, default=-1)) // per_micro) * per_micro) or placed
    sent = shape.holding(1 + max(row for row, *_ in placed))
    order = sent.row_order().tolist()
    places = {
        i: Place(order[row], start, segment, items[i].shared, *prompt)
        for i, (row, start, segment, *prompt) in zip(falling, placed)
    }
    return [places[i] for i in range(len(items))], sent


def _placed(items: Sequence[Item], falling: Sequence[int], shape: BatchShape, whole: int) -> list[tuple[int, ...]]:
    """Where these items stand, in this order, with the row for the bin; the first rows are whole and the others are
    split. Empty: they do not fit."""
    size = shape.tokens // shape.splits
    bins = _Bins([shape.tokens] * whole + [size] * ((shape.rows - whole) * shape.splits))
    placed = [at for i in falling if (at := bins.place(items[i]))]
    if len(placed) < len(falling):
        return []
    for n, (k, start, segment, *prompt) in enumerate(placed):
        if k >= whole:
            row, split = divmod(k - whole, shape.splits)
            segment += sum(bins.segments[k - split : k])
            placed[n] = whole + row, split * size + start, segment, *prompt
    return placed
