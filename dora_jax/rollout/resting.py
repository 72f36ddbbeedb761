"""Stage 2, pure: episodes that wait for their environment and keep their pages in the meantime. No device.

Consumes samples whose turn has ended; gives their pages back to them when they go on, or, the longest-waiting first, to
others when pages run short. Law: a page of a resting episode is its own or its prefix's, as that of one that runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.pages import Node, PrefixIndex
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import Shapes
from dora_jax.types import SampleId, Version


@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    seq: Seq  # as it was when its turn ended
    path: list[Node]
    table: list[int]  # page of each page-sized stretch: the path's, then its own from first_private
    first_private: int
    kv_len: int

    @property
    def private(self) -> list[int]:
        return self.table[self.first_private :]


class Resting:
    def __init__(self, shapes: Shapes, index: PrefixIndex):
        self._shapes, self._index = shapes, index
        self._rests: dict[SampleId, Rest] = {}  # the longest-waiting first

    def __contains__(self, id: SampleId) -> bool:
        return id in self._rests

    def __iter__(self) -> Iterator[Rest]:
        return iter(self._rests.values())

    @property
    def pages(self) -> int:
        """Those that `release` makes available at least."""
        return sum(len(rest.private) for rest in self)

    def add(self, seq: Seq, kv_len: int) -> None:
        """Takes over the pages that hold its KV; those beyond are free."""
        rest = Rest(seq, seq.path, seq.table.tolist(), seq.first_private, kv_len)
        self._rests[seq.id] = self._cut(rest, kv_len)

    def adopt(self, id: SampleId) -> Rest | None:
        """Its pages are the caller's now."""
        return self._rests.pop(id, None)

    def put_back(self, rest: Rest) -> None:
        self._rests = {rest.seq.id: rest, **self._rests}

    def release(self, id: SampleId) -> Rest:
        """Frees its pages, which hold its KV until the next call writes to them."""
        rest = self._rests.pop(id)
        self._index.release(rest.path)
        self._index.free(rest.private)
        return rest

    @property
    def oldest(self) -> SampleId | None:
        return next(iter(self._rests), None)

    def of(self, version: Version) -> list[SampleId]:
        return [id for id, rest in self._rests.items() if rest.seq.version == version]

    def fit(self, parcel: InFlightSample) -> bool:
        """Whether the episode can go on in these pages: what it shares with what is in them is kept, the rest is cut."""
        rest = self._rests[parcel.id]
        ours, theirs = np.concatenate([parcel.prompt_ids, parcel.out_ids]), rest.seq.sequence
        n = min(len(ours) - 1, rest.kv_len)
        other = np.flatnonzero(ours[:n] != theirs[:n])
        kv_len = int(other[0]) if len(other) else n
        if (
            parcel.version != rest.seq.version
            or len(parcel.prompt_ids) != rest.seq.n_prompt
            or kv_len < rest.seq.n_prompt
        ):
            return False
        self._rests[parcel.id] = self._cut(rest, kv_len)
        return True

    # ----------------------------------------------------------- private

    def _cut(self, rest: Rest, kv_len: int) -> Rest:
        n = max(self._shapes.pages_for(kv_len), rest.first_private)
        self._index.free(rest.table[n:])
        return dataclasses.replace(rest, table=rest.table[:n], kv_len=kv_len)
