"""Stage 2: what one engine tick hands out. No JAX, so that an engine without a model needs none.

Stage 2, pure: what one tick does, as the scheduler planned it. Its calls run in the order swaps, preempts, uploads,
prefills, decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.pages import Node
from dora_jax.rollout.seq import Seq, Upload
from dora_jax.types import Sample, SampleId, Version


@dataclasses.dataclass(frozen=True)
class Preempt:
    """Read these pages to the host, then put them into seq.request."""

    seq: Seq
    pages: list[int]
    kv_len: int
    hole: tuple[int, ...] = ()  # see InFlightSample
    state: int = 0  # the place of its recurrent state


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """A row of a prefill call: a node of a prefix, or some of what an episode observed, from the start of a page on.
    What the page holds already stays."""

    of: Node | Seq
    version: Version
    start: int
    tokens: np.ndarray  # i32[n]
    pages: list[int]  # that it writes
    past: list[int]  # the pages before it
    kept: int  # how many of its first positions have KV: none of a node's


@dataclasses.dataclass(frozen=True)
class PrefillCall:
    version: Version | None  # None: each row has its own adapter
    blocks: int
    control: np.ndarray  # i32, see Shapes.prefill_control
    chunks: tuple[Chunk, ...]  # of its first rows


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    version: Version | None  # None: each row has its own adapter
    blocks: int
    control: np.ndarray  # i32, see Shapes.decode_control; of a verifying call Shapes.verify_control
    rows: tuple[tuple[Seq, int], ...]  # (sample, steps it may take)
    drafts: np.ndarray | None = None  # i32[rows, Shapes.drafts], where the call verifies them
    options: np.ndarray | None = None  # i32, see Shapes.decode_options; None: every row samples as the run does


@dataclasses.dataclass
class TickPlan:
    swaps: list[Preempt] = dataclasses.field(default_factory=list)  # of episodes that wait, to make room
    preempts: list[Preempt] = dataclasses.field(default_factory=list)
    uploads: list[Upload] = dataclasses.field(default_factory=list)
    started: list[SampleId] = dataclasses.field(default_factory=list)
    prefills: list[PrefillCall] = dataclasses.field(default_factory=list)
    decodes: list[DecodeCall] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TickResult:
    started: tuple[SampleId, ...]  # got a slot this tick
    finished: tuple[Sample, ...]
    progress: Mapping[SampleId, int]  # samples that grew: tokens so far, finished and waiting ones included
    tokens: int  # sampled this tick, over all samples
    free_pages: int  # free now, evictable prefixes included
    rows: int = 0  # samples that were decoded, where the tick did nothing else; else 0
    drafted: bool = False  # a call of it verified drafts: its tokens do not tell a decode step's time
    guesses: int = 0  # tokens of these drafts, up to the first of each that did not hold
    held: int = 0  # those of them that held
    # with rollout.keep_set, of each finished sample: i32[U, top_k], the ids each token was drawn from, -1 beyond them
    kept: Mapping[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    # of each finished sample that wants them, i32[U, TOP_COLUMNS]: the most likely tokens at each token
    tops: Mapping[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    waiting: tuple[InFlightSample, ...] = ()  # episodes whose turn ended: they are no longer in a slot


@dataclass
class GrowingResult:
    """What the next tick result will say, as far as it has happened; decodes_only: its ticks did nothing else."""

    started: list[SampleId] = dataclasses.field(default_factory=list)
    finished: list[Sample] = dataclasses.field(default_factory=list)
    progress: dict[SampleId, int] = dataclasses.field(default_factory=dict)
    kept: dict[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    waiting: list[InFlightSample] = dataclasses.field(default_factory=list)
    tops: dict[SampleId, np.ndarray] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    decodes_only: bool = True
    drafted: bool = False
    guesses: int = 0
    held: int = 0
