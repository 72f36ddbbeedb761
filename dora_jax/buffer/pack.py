"""Stage 4, buffer: scored groups -> one TrainBatch of static shape. Pure, numpy only.

Each sample becomes one segment of P + U - 1 input tokens (the last token is only a target), in the row that layout.py
gives it; segments never share attention and never straddle rows. Where prompts are shared, the first P - 1 tokens
of a group's prompt are a segment of their own, once a row, that the group's samples in this row continue and look at:
each then has U tokens, from the prompt's last one on. Where the layout asks for it, samples whose advantage is zero get
no place: their loss and gradient are zero, and what an update divides by still counts them.
Each branch of an episode is a segment too, and the episode is one trajectory: its branches one behind the other.
Each process of a gang places all samples and fills the rows that its devices hold; what is estimated of the whole step
is estimated of trajectories, so it needs no other rows.
Laws: the shape depends on the config alone, so one compiled step serves every batch; the rows that hold tokens fill
whole micro-batches first, so the trainer can skip the empty ones; what an update divides by (`loss_weights`) is
computed here, over the whole update; the result does not depend on the order of the groups. The group store holds what
is scored and not yet trained; which groups a step takes is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from dora_jax.base.lanes import doing
from dora_jax.buffer.layout import BatchShape, Place, Row, items_of, places_of
from dora_jax.types import Estimate, GroupId, Sample, ScoredGroup, Span, TokenTable


class MemoryGroupStore:
    """One process; called from several threads, each call touches the dict once per group."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, ScoredGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: ScoredGroup) -> None:
        """Keep a scored group; an id that is already there is an error."""
        if self._groups.setdefault(group.group_id, group) is not group:
            raise ValueError(f"group {group.group_id} is already in the store")

    def take(self, group_ids: Iterable[GroupId]) -> tuple[ScoredGroup, ...]:
        """Remove and return these groups, in this order; an unknown id is an error and removes nothing."""
        group_ids = tuple(group_ids)
        missing = sorted(set(group_ids) - self._groups.keys())
        if missing or len(set(group_ids)) != len(group_ids):
            raise ValueError(f"cannot take groups {group_ids}: not in the store {missing}, or named twice")
        return tuple(self._groups.pop(group_id) for group_id in group_ids)

    def discard(self, group_id: GroupId) -> None:
        """Forget a group, if it is there."""
        self._groups.pop(group_id, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Arrays [B, L]; position t predicts `targets[t]`. Row r is of micro-batch r % (number of those here). Of a gang
    each process has the rows of `sent.local_rows`."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32, the next token
    segment_ids: np.ndarray  # i32, 0 = padding, 1.. within the row
    positions: np.ndarray  # i32, within the segment
    version: np.ndarray  # i32, that sampled the target; -1: none did
    mask: np.ndarray  # bool, the target was sampled by the policy
    behavior_logprobs: np.ndarray  # f32, of the target, by the engine
    advantages: np.ndarray  # f32
    rewards: np.ndarray  # f32, of the whole trajectory
    loss_weights: np.ndarray  # f32, 1 / the denominator of the whole step; 0 outside the mask
    old_logprobs: np.ndarray | None = None  # f32, by the trainer at the start of the step
    ref_logprobs: np.ndarray | None = None  # f32, by the reference model
    values: np.ndarray | None = None  # f32, by the value model at the start of the step
    prefix_ids: np.ndarray | None = None  # i32, the segment that the token's own continues, its own where none
    returns: np.ndarray | None = None  # f32, its target
    routes: np.ndarray | None = None  # uint8 or uint16 [B, L, M, k], the experts that sampling took; missing in padding
    temperatures: np.ndarray | None = None  # f32, that the target was drawn at; None: all at the run's
    rungs: np.ndarray | None = None  # i32, rows of the call that drew the target, as far as known; stays on the host
    group_ids: tuple[GroupId, ...] = ()
    rows: int  # of the static shape, whose last micro-batches are empty and left out
    sent: BatchShape  # of what all processes send
    lengths: np.ndarray  # int[2, S] of every segment of all rows: its tokens, and those of the prompt that it continues

    @property
    def shape(self) -> tuple[int, int]:  # the static one, for which the update is compiled
        return self.rows, self.tokens.shape[1]

    def arrays(self) -> dict[str, np.ndarray]:
        """What goes to the device; anything else would recompile the step."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        beside = "rungs", "group_ids", "rows", "sent", "lengths"
        return {name: x for name, x in named.items() if name not in beside and x is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
    """The step's trajectories, one a row, [n] or [n, T] over their response tokens: what advantages are made of."""

    group_ids: np.ndarray  # int[n]
    rewards: np.ndarray  # f32[n]
    lengths: np.ndarray  # int[n] sampled tokens
    truncated: np.ndarray  # bool[n] ended at the length limit
    mask: np.ndarray  # bool[n, T] sampled by the policy
    behavior_logprobs: np.ndarray  # f32[n, T]
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    grad_sq: np.ndarray | None = None  # |grad log pi|^2 of the trajectory, in every column


class Objective(Protocol):
    """The trainer's part in packing; see `trainer.prepare.Prepare`."""

    def estimate(self, sequences: Sequences) -> Estimate: ...

    def token_weights(self, mask: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        """Weight of each token, one trajectory a row."""


Score = Callable[[TrainBatch], dict[str, np.ndarray]]  # -> old_logprobs, ref_logprobs, values (those in use), all rows


def pack(
    groups: Sequence[ScoredGroup], shape: BatchShape, objective: Objective, score: Score | None = None
) -> TrainBatch:
    """The batch of a step of one update, or of an update that takes its groups before the others are there."""
    return pack_step([groups], shape, objective, score)[0]


def pack_step(
    updates: Sequence[Sequence[ScoredGroup]], shape: BatchShape, objective: Objective, score: Score | None = None
) -> tuple[TrainBatch, ...]:
    """A batch for the groups of each optimizer update. Advantages are of the whole step, denominators of each update.

    `score`, where the objective needs it, runs the models on the packed rows first.
    """
    parts = []
    for groups in updates:
        groups = sorted(groups, key=lambda g: g.group_id)
        samples = [sample for group in groups for sample in group.samples]
        rewards = np.concatenate([np.asarray(group.rewards, np.float32) for group in groups])
        group_ids = np.repeat([g.group_id for g in groups], [len(g.samples) for g in groups])
        parts.append(_PackedUpdate(samples, shape, score, rewards, group_ids))
    longest = max(part.spread.longest for part in parts)
    every = [part.sequences(longest) for part in parts]
    estimate = objective.estimate(Sequences(**{name: np.concatenate([s[name] for s in every]) for name in every[0]}))
    stops = np.cumsum([len(part.samples) for part in parts])
    return tuple(
        part.batch_of(estimate, slice(stop - len(part.samples), stop), objective) for part, stop in zip(parts, stops)
    )


# ---------------------------------------------------------------- private


class _PackedUpdate:
    """The groups of one update in their rows, before they have advantages."""

    def __init__(
        self, samples: list[Sample], shape: BatchShape, score: Score | None, rewards: np.ndarray, group_ids: np.ndarray
    ):
        self.samples, self._shape, self._rewards, self._group_ids = samples, shape, rewards, group_ids
        # each sample behind the branches of its episode, and the index of the sample that each belongs to
        segments = [segment for sample in samples for segment in (*_branches(sample), sample)]
        owners = [i for i, sample in enumerate(samples) for _ in range(len(sample.branches) + 1)]
        places, self._sent = places_of(items_of(segments, shape.share_prompts), shape)
        self.spread = _Spread(segments, owners, places, self._sent)
        self._batch: dict[str, Any] = dict(rows=shape.rows, sent=self._sent, lengths=_lengths(segments, places))
        self._batch |= _tokens(segments, places, self._sent)
        self._batch |= dict.fromkeys(("advantages", "rewards", "loss_weights"), _zeros(self._sent))
        with doing("score"):
            self._scored = score(TrainBatch(**self._batch)) if score else {}

    def sequences(self, longest: int) -> dict[str, np.ndarray]:
        """The fields of `Sequences`, as wide as the step's longest response."""
        mask, logprobs = self.spread.sampled(longest)
        truncated = np.array([s.finish == "length" for s in self.samples])
        found = dict(group_ids=self._group_ids, rewards=self._rewards, truncated=truncated, lengths=mask.sum(1))
        found |= {name: self.spread.gather(np.asarray(x), longest) for name, x in self._scored.items()}
        return found | {"mask": mask, "behavior_logprobs": logprobs}

    def batch_of(self, estimate: Estimate, mine: slice, objective: Objective) -> TrainBatch:
        """`mine`: the rows of the step's estimate that are of this update."""
        mask, advantages = estimate.mask[mine], estimate.advantages[mine]
        weights = np.asarray(objective.token_weights(mask, self._group_ids), np.float32)
        if self._shape.skip_zero_advantage and not self._scored:
            moving = mask & (advantages[:, None] if advantages.ndim == 1 else advantages).astype(bool)
            if not moving.any(1).all():
                # the samples that move the weights; the first one where none does, for its metrics
                chosen = np.flatnonzero(moving.any(1)) if moving.any() else np.array([0])
                part = _PackedUpdate(
                    [self.samples[i] for i in chosen], self._shape, None, self._rewards[chosen], self._group_ids[chosen]
                )
                batch = part._batch_with(mask[chosen], advantages[chosen], weights[chosen])
                return dataclasses.replace(batch, group_ids=tuple(dict.fromkeys(self._group_ids.tolist())))
        returns = None if estimate.returns is None else self.spread.responses(estimate.returns[mine], np.float32)
        return self._batch_with(mask, advantages, weights, returns)

    def _batch_with(
        self, mask: np.ndarray, advantages: np.ndarray, weights: np.ndarray, returns: np.ndarray | None = None
    ) -> TrainBatch:
        placed, held = self.spread.responses(mask, bool), self._sent.local_rows() >= 0
        inside = self._batch["segment_ids"] > 0
        scored = {name: np.where(inside, x[held], 0.0) for name, x in self._scored.items() if name != "grad_sq"}
        floats = {"advantages": advantages, "rewards": self._rewards, "loss_weights": weights}
        made = {name: self.spread.responses(x, np.float32) for name, x in floats.items()}
        made |= {"mask": placed, "advantages": made["advantages"] * placed}
        ids = tuple(dict.fromkeys(self._group_ids.tolist()))
        return TrainBatch(**(self._batch | scored | made), returns=returns, group_ids=ids)


class _Spread:
    """Moves per-trajectory arrays [n] or [n, T] to the packed rows that this process fills, and back from all rows.

    owners: the trajectory of each segment; the segments of one stand in its row one behind the other."""

    def __init__(self, samples: Sequence[Sample], owners: Sequence[int], places: Sequence[Place], sent: BatchShape):
        self._samples, self._sent, self._rows = samples, sent, sent.local_rows().tolist()
        self._n = 1 + max(owners)
        self._responses = []  # of each segment: row, first column and length of its response; owner, first column there
        filled = [0] * self._n
        for sample, place, owner in zip(samples, places, owners):
            n = len(sample.out_ids)
            first = place.start + len(sample.prompt_ids) - 1 - place.shared
            self._responses.append((place.row, first, n, owner, filled[owner]))
            filled[owner] += n
        self.longest = max(filled)

    def responses(self, values: np.ndarray, dtype: type) -> np.ndarray:
        """Each trajectory's values at the positions that predict its response, where its row is filled here."""
        out = _zeros(self._sent, dtype)
        for row, first, n, i, at in self._responses:
            if (row := self._rows[row]) >= 0:
                out[row, first : first + n] = values[i] if values.ndim == 1 else values[i, at : at + n]
        return out

    def sampled(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """(where the policy sampled, the engine's log-probs there), [n, width]."""
        mask, logprobs = np.zeros((self._n, width), bool), np.zeros((self._n, width), np.float32)
        for sample, (_, _, n, i, at) in zip(self._samples, self._responses):
            mask[i, at : at + n], logprobs[i, at : at + n] = sample.mask, sample.logprobs
        return mask, np.where(mask, logprobs, np.float32(0))

    def gather(self, packed: np.ndarray, width: int) -> np.ndarray:
        """[B, L] of all rows -> [n, width] over response tokens, 0 beyond each length."""
        out = np.zeros((self._n, width), packed.dtype)
        for row, first, n, i, at in self._responses:
            out[i, at : at + n] = packed[row, first : first + n]
        return out


def _zeros(shape: BatchShape, dtype: type = np.float32) -> np.ndarray:
    return np.zeros((int((shape.local_rows() >= 0).sum()), shape.tokens), dtype)


def _branches(sample: Sample) -> Iterator[Sample]:
    for branch in sample.branches:
        yield dataclasses.replace(
            sample,
            prompt_ids=branch.prompt_ids,
            out_ids=branch.out_ids,
            logprobs=branch.logprobs,
            mask=branch.mask,
            spans=(Span(version=branch.version, start=0, stop=len(branch.out_ids)),),
            table=branch.table,
            branches=(),
        )


def _lengths(samples: Sequence[Sample], places: Sequence[Place]) -> np.ndarray:
    """What `TrainBatch.lengths` holds: a shared prompt is a segment too, once a row."""
    own = [len(s.prompt_ids) + len(s.out_ids) - 1 - place.shared for s, place in zip(samples, places)]
    prompts = {(place.row, place.prompt_segment): place.shared for place in places if place.shared}
    return np.array([own + list(prompts.values()), [place.shared for place in places] + [0] * len(prompts)])


def _tokens(samples: Sequence[Sample], places: Sequence[Place], shape: BatchShape) -> dict[str, np.ndarray]:
    """What stands of these segments in the rows that this process fills."""
    names = ("tokens", "targets", "segment_ids", "positions") + ("prefix_ids",) * shape.share_prompts
    batch = {name: _zeros(shape, np.int32) for name in names}
    batch["version"] = np.full_like(batch["tokens"], -1)
    batch["mask"], batch["behavior_logprobs"] = _zeros(shape, bool), _zeros(shape)
    if shape.routes:
        batch["routes"] = shape.routes.missing(*batch["tokens"].shape)
    if shape.temperature:
        batch["temperatures"] = _zeros(shape) + np.float32(shape.temperature)
    if any(sample.table.rungs is not None for sample in samples):
        batch["rungs"] = _zeros(shape, np.int32)

    def write(
        row: Row, start: int, segment: int, prefix: int, text: np.ndarray, position: int, table: TokenTable
    ) -> None:
        n = len(text) - 1
        here = (row, slice(start, start + n))
        batch["tokens"][here], batch["targets"][here] = text[:-1], text[1:]
        batch["segment_ids"][here], batch["positions"][here] = segment, np.arange(position, position + n)
        if shape.share_prompts:
            batch["prefix_ids"][here] = prefix
        if table.routes is not None and shape.routes:
            batch["routes"][here] = table.routes[position : position + n]
        if shape.temperature and table.temperatures is not None:
            own = table.temperatures[position : position + n]
            batch["temperatures"][here] = np.where(own > 0, own, shape.temperature)
        if table.rungs is not None:
            batch["rungs"][here] = np.repeat(*table.rungs)[position : position + n]

    rows = shape.local_rows().tolist()
    for sample, place in zip(samples, places):
        if (row := rows[place.row]) < 0:
            continue
        text, shared = np.concatenate([sample.prompt_ids, sample.out_ids]), place.shared
        name = f"{sample.id.index} of group {sample.id.group_id}"
        table = sample.table
        if shape.routes:
            table = dataclasses.replace(table, routes=shape.routes.check(table.routes, len(text) - 1, name))
        if shared:  # written again by every sample of the group, the same each time
            prompt = place.prompt_segment
            write(row, place.prompt_start, prompt, prompt, sample.prompt_ids, 0, table)
        write(row, place.start, place.segment, prompt if shared else place.segment, text[shared:], shared, table)
        first = place.start + len(sample.prompt_ids) - 1 - shared
        response = (row, slice(first, first + len(sample.out_ids)))
        batch["mask"][response] = sample.mask
        batch["behavior_logprobs"][response] = np.where(sample.mask, sample.logprobs, 0.0)
        for span in sample.spans:
            batch["version"][row, first + span.start : first + span.stop] = span.version
        batch["version"][response][~np.asarray(sample.mask, bool)] = -1
    return batch
