"""Stage 2, pure: what one tick does, as the scheduler planned it. Its calls run in the order swaps, preempts, uploads,
prefills, decodes."""

from __future__ import annotations

import dataclasses

import numpy as np

from dora_jax.rollout.pages import Node
from dora_jax.rollout.seq import Seq, Upload
from dora_jax.types import SampleId, Version


@dataclasses.dataclass(frozen=True)
class Preempt:
    """Read these pages to the host, then put them into seq.parcel."""

    seq: Seq
    pages: list[int]
    kv_len: int


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A chunk of what an episode observed, from the start of a page on. What the page holds already stays."""

    seq: Seq
    start: int
    tokens: np.ndarray  # i32[n]
    pages: list[int]  # that it writes

    @property
    def version(self) -> Version:
        return self.seq.version

    def past(self, page_size: int) -> tuple[list[int], int]:
        """(the pages before it, how many of its first positions have KV)."""
        return self.seq.table[: self.start // page_size].tolist(), self.seq.filled - self.start


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    version: Version | None  # None: each row has its own adapter
    blocks: int
    control: np.ndarray  # i32, see Shapes.prefill_control
    chunks: tuple[Node | Piece, ...]  # of its first rows


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    version: Version | None  # None: each row has its own adapter
    blocks: int
    control: np.ndarray  # i32, see Shapes.decode_control; of a verifying call Shapes.verify_control
    rows: tuple[tuple[Seq, int], ...]  # (sample, steps it may take)
    drafts: np.ndarray | None = None  # i32[rows, Shapes.drafts], where the call verifies them


@dataclasses.dataclass
class TickPlan:
    swaps: list[Preempt] = dataclasses.field(default_factory=list)  # of episodes that wait, to make room
    preempts: list[Preempt] = dataclasses.field(default_factory=list)
    uploads: list[Upload] = dataclasses.field(default_factory=list)
    started: list[SampleId] = dataclasses.field(default_factory=list)
    prefills: list[PrefillCall] = dataclasses.field(default_factory=list)
    decodes: list[DecodeCall] = dataclasses.field(default_factory=list)
