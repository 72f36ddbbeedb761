"""Migration: which samples move so that instances become free. Values in, values out.

An instance is emptied whole or not at all: a half-moved one frees nothing. Samples go only between instances of the
same version, and only onto slots and pages that are free now.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from dora_jax.types import InstanceId, SampleId


class Mover(NamedTuple):
    id: SampleId
    tokens: int
    pages: int  # it needs at its destination


class EmptiedInstance(NamedTuple):
    """An instance to be emptied."""

    id: InstanceId
    movers: list[Mover]


class Sink(NamedTuple):
    """An instance of the same version that stays."""

    id: InstanceId
    used: int
    slots: int
    free_pages: int
    speed: float


def plan_moves(
    sources: list[EmptiedInstance], sinks: list[Sink], limit: int
) -> list[tuple[SampleId, InstanceId, InstanceId]]:
    """(sample, src, dst): sources with the fewest samples first, the longest sample first onto the least loaded sink.
    `limit` bounds the moves of one step; the next trigger goes on."""
    heap = [(s.used / (s.slots * s.speed), s.id, s.used, s.slots, s.free_pages, s.speed) for s in sinks]
    heapq.heapify(heap)
    moves: list[tuple[SampleId, InstanceId, InstanceId]] = []
    for source in sorted(sources, key=lambda s: (len(s.movers), s.id)):
        if len(moves) + len(source.movers) > limit:
            break
        placed = _place(source, heap)
        if placed is None:
            break
        moves += placed
    return moves


def _place(source: EmptiedInstance, heap: list) -> list[tuple[SampleId, InstanceId, InstanceId]] | None:
    """Moves for all samples of `source`; None if they do not fit (`heap` is then used up)."""
    placed = []
    for mover in sorted(source.movers, key=lambda m: (-m.tokens, m.id)):
        while heap and (heap[0][2] >= heap[0][3] or heap[0][4] < mover.pages):
            heapq.heappop(heap)
        if not heap:
            return None
        _, id, used, slots, pages, speed = heapq.heappop(heap)
        placed.append((mover.id, source.id, id))
        used, pages = used + 1, pages - mover.pages
        heapq.heappush(heap, (used / (slots * speed), id, used, slots, pages, speed))
    return placed


def worth_moving(left_tokens: list[float], *, slots: int, token_s: float, move_s: float) -> bool:
    """Whether emptying an instance gains more than it costs, in slot-seconds, by what was measured so far.

    Gain: its slots are free for as long as the sample with the most tokens left would have run on. Cost: each moved
    sample stands still for one move.
    """
    return slots * max(left_tokens) * token_s >= len(left_tokens) * move_s
