"""Stage 4, buffer: scored groups -> one TrainBatch of static shape. Pure, numpy only.

Each sample becomes one segment of P + U - 1 input tokens (the last token is only a target); segments are packed into
rows by falling length, never share attention, and never straddle rows.
Laws: the shape depends on the config alone, so one compiled step serves every batch; the rows that hold tokens fill
whole micro-batches first, so the trainer can skip the empty ones; what an update divides by (`loss_weights`) is
computed here, over the whole update; the result does not depend on the order of the groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dora_jax.types import GroupId, Sample, ScoredGroup

Row = int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Arrays [B, L]; position t predicts `targets[t]`. Row r belongs to micro-batch r % micro_batches."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32, the next token
    segment_ids: np.ndarray  # i32, 0 = padding, 1.. within the row
    positions: np.ndarray  # i32, within the segment
    version: np.ndarray  # i32, that sampled the target; -1 = padding
    mask: np.ndarray  # bool, the target was sampled by the policy
    behavior_logprobs: np.ndarray  # f32, of the target, by the engine
    advantages: np.ndarray  # f32
    rewards: np.ndarray  # f32, of the whole trajectory
    loss_weights: np.ndarray  # f32, 1 / the denominator of the whole step; 0 outside the mask
    old_logprobs: np.ndarray | None = None  # f32, by the trainer at the start of the step
    ref_logprobs: np.ndarray | None = None  # f32, by the reference model
    values: np.ndarray | None = None  # f32, by the value model at the start of the step
    returns: np.ndarray | None = None  # f32, its target
    group_ids: tuple[GroupId, ...] = ()

    def arrays(self) -> dict[str, np.ndarray]:
        """What goes to the device; group_ids would recompile the step."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: x for name, x in named.items() if name != "group_ids" and x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The static shape of a step's batch."""

    rows: int  # B
    tokens: int  # L
    micro_batches: int  # M; B is a multiple of M * shards
    shards: int = 1  # data-parallel shards of the mesh

    def row_order(self) -> np.ndarray:
        """Row of the k-th filled bin: micro-batch by micro-batch, dealt over the shards inside each."""
        per_micro = self.rows // self.micro_batches
        inside = np.arange(per_micro).reshape(self.shards, -1).T.reshape(-1)  # one row per shard in turn
        return (np.arange(self.micro_batches)[:, None] + inside[None, :] * self.micro_batches).reshape(-1)


def layout(*, pack_tokens: int, rows: int, micro_batches: int, samples: int, max_tokens: int,
           shards: int = 1) -> Layout:
    """rows 0: enough for `samples` of `max_tokens` each (prompt and response), rounded up to the mesh."""
    longest = max_tokens - 1
    if longest > pack_tokens:
        raise ValueError(f"trainer.pack_tokens={pack_tokens} is shorter than the longest sample: {longest} tokens "
                         f"(prompt and response limits together, less one)")
    unit = micro_batches * shards
    needed = rows or math.ceil(samples / (pack_tokens // longest))
    if rows and rows % unit:
        raise ValueError(f"trainer.rows={rows} is not a multiple of micro_batches x data-parallel shards = {unit}")
    return Layout(rows=-(-needed // unit) * unit, tokens=pack_tokens, micro_batches=micro_batches, shards=shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """The step's trajectories, one a row, [n] or [n, T] over their response tokens: what advantages are made of."""

    group_ids: np.ndarray  # int[n]
    rewards: np.ndarray  # f32[n]
    lengths: np.ndarray  # int[n] response tokens
    truncated: np.ndarray  # bool[n] ended at the length limit
    mask: np.ndarray  # bool[n, T] sampled by the policy
    behavior_logprobs: np.ndarray  # f32[n, T]
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    grad_sq: np.ndarray | None = None  # |grad log pi|^2 of the trajectory, in every column


class Estimate(Protocol):
    """What an objective makes of the trajectories."""

    advantages: np.ndarray  # f32[n] or [n, T]
    mask: np.ndarray  # bool[n, T] that takes part in the loss
    returns: np.ndarray | None  # f32[n, T]


class Objective(Protocol):
    """The trainer's part in packing; see `trainer.prepare.Prepare`."""

    def estimate(self, sequences: Sequences) -> Estimate: ...

    def token_weights(self, mask: np.ndarray, segment_ids: np.ndarray, group_ids: np.ndarray) -> np.ndarray: ...


Score = Callable[[TrainBatch], dict[str, np.ndarray]]  # -> old_logprobs, ref_logprobs, values [B, L] (those in use)


def pack(groups: Sequence[ScoredGroup], shape: Layout, objective: Objective, score: Score | None = None) -> TrainBatch:
    """The batch of a step of one update, or of an update that takes its groups before the others are there."""
    return pack_step([groups], shape, objective, score)[0]


def pack_step(updates: Sequence[Sequence[ScoredGroup]], shape: Layout, objective: Objective,
              score: Score | None = None) -> tuple[TrainBatch, ...]:
    """A batch for the groups of each optimizer update. Advantages are of the whole step, denominators of each update.

    `score`, where the objective needs it, runs the models on the packed rows first.
    """
    parts = [_Part(sorted(groups, key=lambda g: g.group_id), shape, score) for groups in updates]
    longest = max(part.spread.longest for part in parts)
    every = [part.sequences(longest) for part in parts]
    estimate = objective.estimate(Sequences(**{
        name: np.concatenate([s[name] for s in every]) for name in every[0]}))
    stops = np.cumsum([len(part.samples) for part in parts])
    return tuple(part.batch_of(estimate, slice(stop - len(part.samples), stop), objective)
                 for part, stop in zip(parts, stops))


# ---------------------------------------------------------------- private


class _Part:
    """The groups of one update in their rows, before they have advantages."""

    def __init__(self, groups: Sequence[ScoredGroup], shape: Layout, score: Score | None):
        self.samples = [sample for group in groups for sample in group.samples]
        places = _places([len(s.prompt_ids) + len(s.out_ids) - 1 for s in self.samples], shape)
        self.spread = _Spread(self.samples, places, shape)
        self._batch = _tokens(self.samples, places, self.spread, shape)
        self._rewards = np.concatenate([np.asarray(group.rewards, np.float32) for group in groups])
        self._group_ids = np.repeat([g.group_id for g in groups], [len(g.samples) for g in groups])
        zeros = dict.fromkeys(("advantages", "rewards", "loss_weights"), self.spread.zeros())
        self._scored = score(TrainBatch(**self._batch, **zeros)) if score else {}

    def sequences(self, longest: int) -> dict[str, np.ndarray]:
        """The fields of `Sequences`, as wide as the step's longest response."""
        per_token = {name: self._batch[name] for name in ("mask", "behavior_logprobs")} | self._scored
        return {
            "group_ids": self._group_ids, "rewards": self._rewards,
            "lengths": np.array([len(s.out_ids) for s in self.samples]),
            "truncated": np.array([s.finish == "length" for s in self.samples]),
        } | {name: self.spread.gather(np.asarray(x), longest) for name, x in per_token.items()}

    def batch_of(self, estimate: Estimate, mine: slice, objective: Objective) -> TrainBatch:
        """`mine`: the rows of the step's estimate that are of this update."""
        spread = self.spread
        mask = spread.responses(estimate.mask[mine], bool)
        weights = objective.token_weights(mask, self._batch["segment_ids"], spread.segments(self._group_ids))
        returns = estimate.returns
        returns = {} if returns is None else {"returns": spread.responses(returns[mine], np.float32)}
        return TrainBatch(
            **(self._batch | {"mask": mask}), **{name: x for name, x in self._scored.items() if name != "grad_sq"},
            **returns, advantages=spread.responses(estimate.advantages[mine], np.float32) * mask,
            rewards=spread.responses(self._rewards, np.float32), loss_weights=np.asarray(weights, np.float32),
            group_ids=tuple(dict.fromkeys(self._group_ids.tolist())))


@dataclasses.dataclass(frozen=True)
class _Place:
    row: Row
    start: int
    segment: int


def _places(lengths: Sequence[int], shape: Layout) -> list[_Place]:
    """First fit by falling length; ties by index, so the same samples always land in the same place."""
    free: list[int] = []
    count: list[int] = []
    rows = shape.row_order()
    places: list[_Place | None] = [None] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        bin_ = next((k for k, room in enumerate(free) if room >= lengths[i]), len(free))
        if bin_ == len(free):
            if bin_ == shape.rows or lengths[i] > shape.tokens:
                raise ValueError(f"{len(lengths)} samples with {sum(lengths)} tokens do not fit into {shape.rows} rows "
                                 f"of {shape.tokens}: raise trainer.rows or trainer.pack_tokens")
            free.append(shape.tokens)
            count.append(0)
        count[bin_] += 1
        places[i] = _Place(int(rows[bin_]), shape.tokens - free[bin_], count[bin_])
        free[bin_] -= lengths[i]
    return places


class _Spread:
    """Moves per-trajectory arrays [n] or [n, T] to the packed rows [B, L], and back."""

    def __init__(self, samples: Sequence[Sample], places: Sequence[_Place], shape: Layout):
        self._shape = (shape.rows, shape.tokens)
        self._first = [place.start + len(s.prompt_ids) - 1 for s, place in zip(samples, places)]
        self._rows = [place.row for place in places]
        self._starts = [place.start for place in places]
        self._lengths = [len(s.out_ids) for s in samples]
        self._totals = [len(s.prompt_ids) + len(s.out_ids) - 1 for s in samples]
        self.longest = max(self._lengths)

    def zeros(self, dtype: type = np.float32) -> np.ndarray:
        return np.zeros(self._shape, dtype)

    def responses(self, values: np.ndarray, dtype: type) -> np.ndarray:
        """Each trajectory's values at the positions that predict its response."""
        out = self.zeros(dtype)
        for i, (row, first, n) in enumerate(zip(self._rows, self._first, self._lengths)):
            out[row, first:first + n] = values[i] if values.ndim == 1 else values[i, :n]
        return out

    def segments(self, values: np.ndarray) -> np.ndarray:
        """Each trajectory's value over its whole segment; -1 in padding."""
        out = np.full(self._shape, -1, np.int64)
        for row, start, n, value in zip(self._rows, self._starts, self._totals, values):
            out[row, start:start + n] = value
        return out

    def gather(self, packed: np.ndarray, width: int) -> np.ndarray:
        """[B, L] -> [n, width] over response tokens, 0 beyond each length."""
        out = np.zeros((len(self._rows), width), packed.dtype)
        for i, (row, first, n) in enumerate(zip(self._rows, self._first, self._lengths)):
            out[i, :n] = packed[row, first:first + n]
        return out


def _tokens(samples: Sequence[Sample], places: Sequence[_Place], spread: _Spread,
            shape: Layout) -> dict[str, np.ndarray]:
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: spread.zeros(np.int32) for name in names}
    batch["version"] = np.full((shape.rows, shape.tokens), -1, np.int32)
    batch["mask"] = spread.zeros(bool)
    batch["behavior_logprobs"] = spread.zeros(np.float32)
    for sample, place in zip(samples, places):
        text = np.concatenate([sample.prompt_ids, sample.out_ids])
        n = len(text) - 1
        here = (place.row, slice(place.start, place.start + n))
        batch["tokens"][here], batch["targets"][here] = text[:-1], text[1:]
        batch["segment_ids"][here], batch["positions"][here] = place.segment, np.arange(n)
        first = place.start + len(sample.prompt_ids) - 1
        response = (place.row, slice(first, first + len(sample.out_ids)))
        batch["mask"][response] = sample.mask
        batch["behavior_logprobs"][response] = np.where(sample.mask, sample.logprobs, 0.0)
        for span in sample.spans:
            batch["version"][place.row, first + span.start:first + span.stop] = span.version
    return batch
