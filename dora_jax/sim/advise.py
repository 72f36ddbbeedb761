"""Advice: which staleness bound, split of the chips and load suit this model, these chips and these lengths.

Consumes a configuration (its mode `dora`, first row's changes included); produces the best few settings with the
reasons: what waits on what. A hill climb per K over (rollout instances, inflight), each point one simulation; settings
within `NEAR` of the fastest are ordered by mean lag, because age costs learning and a few seconds do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import itemgetter

from dora_jax.config import ConfigError
from dora_jax.costs import open_costs, sizes_of
from dora_jax.sim import table
from dora_jax.sim.config import Row, SimConfig, replace, rows
from dora_jax.sim.meter import IDLE_CAPPED, IDLE_TAIL, TRAIN, WAIT_DEADLINE, WAIT_GROUPS, Result
from dora_jax.sim.run import simulate

NEAR = 0.02  # step times closer than this are equal
INFLIGHT = (1.0, 1.125, 1.25, 1.5, 2.0)  # groups outstanding beyond the batch in training, in units of P
BEST = 5
IDLE_NOTICE = 0.05  # a role that waits less than this does not wait


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """Its settings; K = 1 is `sync`."""

    max_versions: int
    rollout_instances: int
    inflight: float


def report(config: SimConfig, progress: Callable[[str], None], versions: tuple[int, ...] = (2, 3, 4)) -> str:
    """The page that `--advise` prints."""
    config = rows(config)[0].config
    total = config.hardware.chips // config.hardware.instance_chips
    if total < 2:
        raise ConfigError(f"hardware.chips: {config.hardware.chips} are one instance and no trainer: nothing to split")
    search = _Search(config, total, progress)
    colocated = replace(config, {"hardware.rollout_chips": 0})
    sync = search.simulate(Row(label="sync", mode="sync", config=colocated, published={}))
    for k in versions:
        search.climb(k)
    # Settings near the fastest are ordered by lag
    near_s = (1 + NEAR) * min(result.step_s for result in search.seen.values())
    ranked = []
    for point, result in search.seen.items():
        near = result.step_s <= near_s
        ranked.append(((not near, result.lag_mean if near else result.step_s, result.step_s), point, result))
    best = [(point, result) for _, point, result in sorted(ranked, key=itemgetter(0))[:BEST]]
    lines = [(search.row(point), result) for point, result in best]
    fastest = best[0][1]
    # What no schedule can undercut: the longest response, alone on its instance.
    costs, work = open_costs(config.model, config.hardware, config.cost), config.workload
    longest, local = work.max_new_tokens, min(work.max_new_tokens, costs.window)
    tail_s = longest * (costs.decode_base_s(1) + costs.decode_kv_s * longest / 2)
    tail_s += (longest - local / 2) * local * costs.window_kv_s
    model_line = []
    if config.model.size:  # what a model that is named by its size brings
        model = sizes_of(config.model, config.hardware.instance_chips)
        shared = f", on each of {model.kv_copies:.0f} chips" if model.kv_copies > 1 else ""
        model_line = [(
            f"{model.size}: {model.params / 1e9:,.1f}e9 parameters, of which a token meets "
            f"{model.active_params / 1e9:,.1f}e9; {model.kv_bytes_per_token:,.0f} bytes of KV a token{shared}"
        )]  # fmt: skip
    head = [
        (
            f"{config.hardware.chips} x {config.hardware.chip}, at most {total} instances of "
            f"{config.hardware.instance_chips} chips; {len(search.seen)} settings tried"
        ),
        *model_line,
        (
            f"a response of {work.max_new_tokens:,} tokens decodes for {tail_s / 60:.1f} min even alone "
            f"({1e3 * costs.decode_base_s(1):.1f} ms a token): sync cannot be faster, K versions side by side hide it "
            f"behind up to K steps"
        ),
        (
            f"sync, colocated: {sync.step_s / 60:.2f} min a step; best: {fastest.step_s / 60:.2f} min, "
            f"{fastest.tokens_per_s / sync.tokens_per_s:.2f} x its tokens/s"
        ),
    ]
    reasons = [f"{search.row(point).label}: {reason(result)}" for point, result in best]
    return "\n".join([*head, "", table.render(lines), "", *reasons])


def reason(result: Result) -> str:
    """What waits on what, and what would change it."""
    groups, rule = result.trainer[WAIT_GROUPS], result.trainer[WAIT_DEADLINE]
    idle = result.rollout[IDLE_CAPPED] + result.rollout[IDLE_TAIL]
    if rule > max(groups, IDLE_NOTICE):
        return (
            f"the trainer waits {rule:.0%} for stragglers at their deadline: faster decode or a larger K would help, "
            f"more chips for rollout would not ({idle:.0%} of it is idle)"
        )
    if groups > IDLE_NOTICE:
        return f"the trainer waits {groups:.0%} for groups: rollout ({idle:.0%} idle) is the bottleneck"
    if idle > IDLE_NOTICE:
        return f"rollout waits {idle:.0%} for the trainer, which trains {result.trainer[TRAIN]:.0%} of the time"
    return f"balanced: the trainer trains {result.trainer[TRAIN]:.0%}, rollout idles {idle:.0%}"


# ---------------------------------------------------------------- private


@dataclasses.dataclass
class _Search:
    config: SimConfig
    total: int  # instances that the chips make up
    progress: Callable[[str], None]
    seen: dict[Point, Result] = dataclasses.field(default_factory=dict)

    def row(self, point: Point) -> Row:
        chips = point.rollout_instances * self.config.hardware.instance_chips
        config = replace(self.config, {
            "hardware.rollout_chips": chips, "orchestrator.max_versions": point.max_versions,
            "orchestrator.inflight": point.inflight})  # fmt: skip
        label = f"K={point.max_versions}, rollout {chips}/{self.config.hardware.chips}, inflight {point.inflight:g}"
        return Row(label=label, mode="dora", config=config, published={})

    def climb(self, max_versions: int) -> None:
        """From half the chips, with ever smaller steps, as long as a neighbour is better."""
        here = Point(max_versions, max(1, self.total // 2), 1.25)
        stride = max(1, self.total // 4)
        while True:
            i, instances = INFLIGHT.index(here.inflight), here.rollout_instances
            neighbours = [
                *(dataclasses.replace(here, rollout_instances=n)
                  for n in (instances - stride, instances + stride) if 1 <= n < self.total),
                *(dataclasses.replace(here, inflight=INFLIGHT[j]) for j in (i - 1, i + 1) if 0 <= j < len(INFLIGHT)),
            ]  # fmt: skip
            better = min((here, *neighbours), key=self._score)
            if better != here:
                here = better
            elif stride > max(1, self.total // 16):
                stride = max(1, stride // 2)
            else:
                return

    def _score(self, point: Point) -> float:
        if point not in self.seen:
            self.seen[point] = self.simulate(self.row(point))
        return self.seen[point].step_s * (1 + NEAR * self.seen[point].lag_mean / point.max_versions)

    def simulate(self, row: Row) -> Result:
        result = simulate(row)
        self.progress(f"{row.label}: {result.step_s / 60:.2f} min a step, mean lag {result.lag_mean:.2f}")
        return result
