"""Rows of timeline.jsonl -> bars of a picture: what each instance and the trainer did, and when. Values in, values out.

    bars(rows) -> {"end": ms, "instances": [{"id", "bars": [[from, to, fill, [[version, samples], ...]]]}], "trainer":
    [...],
                   "moves": [[ms, src, dst, samples]], "restarts": [ms], "steps": [[ms, version published]],
                   "usage": {instance: Usage}}

Times are milliseconds since the first row that tells of work: compiling comes before it. A bar of no versions is idle
time; fill -1 is an instance that loads weights, fill -2 one that is down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dora_jax.report.load import Row, version_of
from dora_jax.types import InstanceId

SHOWN_INSTANCES = 96  # more are thinned out evenly
SHOWN_MOVES = 3000
LEVELS = 16  # of fill, so that bars that look alike are one
LOADING, DOWN = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The time of an instance, while it was up."""

    up_s: float
    idle_s: float  # without a sample
    loading_s: float  # without a sample, while weights are loaded
    longest_idle_s: float
    deaths: int


@dataclass
class _Lane:
    slots: int = 1
    fill: int = DOWN
    versions: list[list[int]] = field(default_factory=list)
    since: int = 0
    loading: int = 0  # loads under way
    deaths: int = 0
    bars: list[list[Any]] = field(default_factory=list)

    def turn(self, now: int, fill: int, versions: list[list[int]]) -> None:
        """The bar so far ends and another begins, unless it looks the same."""
        alike = fill == self.fill and [v for v, _ in versions] == [v for v, _ in self.versions]
        if alike:
            return
        if now > self.since and not (self.fill == DOWN and not self.bars):
            self.bars.append([self.since, now, self.fill, self.versions])
        self.since, self.fill, self.versions = now, fill, versions


def bars(rows: list[Row]) -> dict[str, Any]:
    origin = min((row["t"] for row in rows if not row.get("start")), default=0.0)
    lanes: dict[InstanceId, _Lane] = {}
    trainer, moves, restarts, steps = _Lane(fill=0), [], [], []
    now = 0
    for row in rows:
        before, now = now, max(now, round(1000 * (row["t"] - origin)))
        if row.get("start"):  # what an earlier process did ended with its last row
            restarts.append(now)
            for lane in lanes.values():
                lane.turn(before, DOWN, [])
            trainer.turn(before, DOWN, [])
            trainer.turn(now, 0, [])
        elif (base := version_of(row.get("train"))) is not None:
            trainer.turn(now, LEVELS, [[base + 1, 1]])
        elif (version := version_of(row.get("published"))) is not None:
            trainer.turn(now, 0, [])
            steps.append([now, version])
        elif isinstance(row.get("moves"), list):
            for move in row["moves"]:
                counts = [version_of(x) for x in move] if isinstance(move, list) else []
                if len(counts) == 3 and None not in counts:
                    moves.append([now, *counts])
        else:
            _instances(row, now, lanes)
    for lane in (*lanes.values(), trainer):
        lane.turn(now, -3, [])  # looks like no other: ends the last bar
    ids = sorted(lanes)
    shown = (
        ids if len(ids) <= SHOWN_INSTANCES else [ids[i * len(ids) // SHOWN_INSTANCES] for i in range(SHOWN_INSTANCES)]
    )
    usage = {}
    for i, lane in lanes.items():
        spans = [(fill, stop - start) for start, stop, fill, _ in lane.bars]
        idle = [ms for fill, ms in spans if fill == 0]
        usage[i] = Usage(
            up_s=sum(ms for fill, ms in spans if fill != DOWN) / 1e3,
            idle_s=sum(idle) / 1e3,
            loading_s=sum(ms for fill, ms in spans if fill == LOADING) / 1e3,
            longest_idle_s=max(idle, default=0) / 1e3,
            deaths=lane.deaths,
        )
    return {
        "end": now,
        "count": len(ids),
        "instances": [{"id": i, "bars": lanes[i].bars} for i in shown],
        "trainer": trainer.bars,
        "moves": moves[:: len(moves) // SHOWN_MOVES + 1],
        "restarts": restarts[1:],
        "steps": steps,
        "usage": usage,
    }


def _instances(row: Row, now: int, lanes: dict[InstanceId, _Lane]) -> None:
    if (up := version_of(row.get("up"))) is not None:
        lane = lanes.setdefault(up, _Lane(since=now))
        lane.slots, lane.loading = max(1, version_of(row.get("slots")) or 1), 0
        lane.turn(now, 0, [])
    elif (down := version_of(row.get("down"))) in lanes and down is not None:
        lanes[down].turn(now, DOWN, [])
        lanes[down].deaths += 1
    elif (asked := version_of(row.get("load"))) in lanes and asked is not None:
        lanes[asked].loading += 1
        if not lanes[asked].versions:
            lanes[asked].turn(now, LOADING, [])
    elif (loaded := version_of(row.get("loaded"))) in lanes and loaded is not None:
        lane = lanes[loaded]
        lane.loading = max(0, lane.loading - 1)
        if lane.fill == LOADING and not lane.loading:
            lane.turn(now, 0, [])
    elif isinstance(row.get("busy"), dict):
        for id, counts in row["busy"].items():
            if (i := version_of(id)) in lanes and i is not None and isinstance(counts, dict):
                lane, pairs = lanes[i], [(version_of(v), version_of(n)) for v, n in counts.items()]
                versions = sorted([v, n] for v, n in pairs if v is not None and n)
                samples = sum(n for _, n in versions)
                if samples:
                    lane.turn(now, max(1, min(LEVELS, round(LEVELS * samples / lane.slots))), versions)
                else:
                    lane.turn(now, LOADING if lane.loading else 0, [])
