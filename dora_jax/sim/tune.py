"""Tuning: each row of the table at its fastest point of one grid, the same for every mode.

The grid (`grid` in the configuration): the rollout chips' share of all, the load and the staleness bound; a mode that
does not know one of them is not tuned along it. Colocated is one more split. One axis after the other is searched,
from the point of the grid that is nearest to the row's own and until nothing changes; along an axis a point is taken
for the best when both of its neighbours are slower. One seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dora_jax.orchestrate.modes import FIXED_LOAD
from dora_jax.sim.config import Row, replace
from dora_jax.sim.meter import Result
from dora_jax.sim.run import simulate
from dora_jax.sim.table import grid

SPLIT, INFLIGHT, BOUND = "hardware.rollout_chips", "orchestrator.inflight", "orchestrator.max_versions"
STRIDE = "orchestrator.stride"
FIXED_BOUND = (*FIXED_LOAD, "partial")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    row: Row  # at its best point
    changes: dict[str, Any]  # that point
    result: Result
    tried: int


def tune(row: Row) -> Tuned:
    """The fastest point of the row's grid."""
    search, config = _Search(row), row.config
    own = {
        SPLIT: config.hardware.rollout_chips or config.hardware.chips // 2,
        INFLIGHT: config.orchestrator.inflight,
        BOUND: config.orchestrator.max_versions,
        STRIDE: config.orchestrator.stride,
    }
    here = {name: min(values, key=lambda value: abs(value - own[name])) for name, values in search.axes.items()}
    before = None
    while here != before:
        before = dict(here)
        for name in search.axes:
            here = search.along(name, here)
    beside = {**here, SPLIT: 0}
    here = min((here, beside), key=search.step_s)
    return Tuned(row=search.at(here), changes=here, result=search.result(here), tried=len(search.seen))


def render(found: Sequence[Tuned]) -> str:
    head = ["mode", "rollout chips", "inflight", "K", "min/step", "rollout only", "mean lag", "points tried"]
    lines = []
    for best in found:
        chips, lag = best.changes[SPLIT], best.result.lag_mean
        lines.append([
            best.row.label, str(chips) if chips else "colocated", f"{best.changes.get(INFLIGHT, '')}",
            f"{best.changes.get(BOUND, '')}", f"{best.result.step_s / 60:.2f}", f"{best.result.rollout_only:.1%}",
            f"{lag:.2f}", str(best.tried)])  # fmt: skip
    return grid(head, lines)


# ---------------------------------------------------------------- private


class _Search:
    def __init__(self, row: Row):
        self.row = row
        section = row.config.grid
        hardware = row.config.hardware
        mode = row.mode
        unit, total = hardware.instance_chips, hardware.chips // hardware.instance_chips
        splits = sorted({min(total - 1, max(1, round(share * total))) * unit for share in section.rollout_shares})
        axes: dict[str, Sequence[Any]] = {SPLIT: splits}
        if mode not in FIXED_LOAD:
            axes[INFLIGHT] = section.inflight
        if mode not in FIXED_BOUND:
            axes[BOUND] = section.max_versions
        if mode == "dora" and len(section.strides) > 1:
            axes[STRIDE] = section.strides
        self.axes = axes
        self.seen: dict[tuple, Result] = {}

    def at(self, point: dict[str, Any]) -> Row:
        return dataclasses.replace(self.row, config=replace(self.row.config, point))

    def result(self, point: dict[str, Any]) -> Result:
        key = tuple(sorted(point.items()))
        if key not in self.seen:
            self.seen[key] = simulate(self.at(point))
        return self.seen[key]

    def step_s(self, point: dict[str, Any]) -> float:
        return self.result(point).step_s

    def along(self, name: str, here: dict[str, Any]) -> dict[str, Any]:
        """Downhill along one axis."""
        values = self.axes[name]
        while True:
            i = values.index(here[name])
            better = min((here, *({**here, name: values[j]} for j in (i - 1, i + 1) if 0 <= j < len(values))),
                         key=self.step_s)  # fmt: skip
            if better == here:
                return here
            here = better
