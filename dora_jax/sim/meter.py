"""What a simulated run is judged by: counters while it runs, averages over its measured steps.

Consumes calls of the world; produces a `Result`. The first `warmup_steps` publications are left out: a snapshot of
every counter is taken there and subtracted at the end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from dora_jax.base import chrome_trace
from dora_jax.base.chrome_trace import MICRO, ROLLOUT, TRAINER
from dora_jax.orchestrate.events import Train
from dora_jax.orchestrate.modes import Decisions
from dora_jax.sim.config import SimConfig
from dora_jax.sim.instance import ACTIVITIES, DECODE, IDLE, PREFILL, SimInstance
from dora_jax.sim.trainer import SimGroup
from dora_jax.types import GroupId, InstanceId, Version

DOWN = "down"
IDLE_CAPPED = "idle: trainer busy"  # nothing admitted: the load target or the rule waits for the step in training
IDLE_TAIL = "idle: tail elsewhere"  # the trainer waits for samples that run on other instances
CAUSES = (*(a for a in ACTIVITIES if a != IDLE), IDLE_CAPPED, IDLE_TAIL, DOWN)

TRAIN, WAIT_GROUPS, WAIT_DEADLINE = "train", "wait: groups", "wait: deadline"


class EndOfMeasurement(Exception):
    """The last step to be measured is published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Averages over the measured steps of one run."""

    steps: int
    seconds: float
    step_s: float
    rollout_only: float  # share of the time in which nothing trains
    tokens_per_s: float  # prompts and responses of trained groups
    trainer: Mapping[str, float]  # share of its time by cause
    rollout: Mapping[str, float]  # share of the instances' time by cause
    occupancy: float  # mean samples in a batch while it decodes
    lags: Mapping[int, float]  # share of the trained groups
    tasks: Mapping[str, float]  # share of the trained groups
    waiting: float  # mean samples that waited for their environment, without a slot
    mixed: float  # share of the trained samples whose tokens are of more than one version
    live_mean: float
    live_max: int
    moves: float  # a step, as all that follow
    reloads: float
    move_bytes: float
    weight_bytes: float
    reprefilled_tokens: float
    cancelled_tokens: float
    preempted: float
    tokens: float
    ready_left: float  # groups that were ready and not in the batch, when a step was published
    lends: float = 0.0  # instances made of the trainer's chips, a step
    lent: float = 0.0  # instances that the trainer's chips made up, on average
    late_s: float = 0.0  # from a batch that may be taken to the trainer's begin, where its chips were lent: the longest

    @property
    def lag_mean(self) -> float:
        return sum(lag * share for lag, share in self.lags.items())


class Meter:
    def __init__(self, config: SimConfig, decisions: Decisions):
        self.moves = self.reloads = self.filtered = 0
        self.move_bytes = self.weight_bytes = 0.0
        self.reprefilled = self.cancelled_tokens = 0
        self._warmup = config.warmup_steps
        self.lends, self.lent_s = 0, 0.0  # instances of the trainer's chips that have given them back
        self.late_s = 0.0  # for which the trainer has waited for its chips, at most
        self._capped = decisions.capped  # else nothing but the groups themselves is waited for
        self._part = config.orchestrator.groups_per_step // decisions.parts  # groups that the trainer takes at once
        self._tokens = self._samples = self._mixed = 0
        self._lags: dict[int, int] = {}
        self._tasks: dict[str, int] = {}  # trained groups
        self._waiting, self._waiting_s, self._waits_since = 0, 0.0, 0.0
        self._live_sum = self._live_count = self._live_max = 0
        self._ready_left = 0
        self._trainer = dict.fromkeys((TRAIN, WAIT_GROUPS, WAIT_DEADLINE), 0.0)
        self._state = WAIT_GROUPS
        self._since = 0.0
        self._idle_tail = 0.0  # instance-seconds idle while the trainer waited
        self._lost: dict[str, float] = {}  # totals of instances that went down
        self._down: dict[InstanceId, float] = {}  # since when
        self._idle_before = 0.0
        self._start: dict[str, float] | None = None
        self._start_lags: dict[int, int] = {}
        self._start_tasks: dict[str, int] = {}
        self.result: Result | None = None
        self.step_ends: list[float] = []

    # ------------------------------------------------------------------ what the world tells

    def ready(self, now: float, groups: int) -> None:
        """So many groups are ready; enough of them, and the trainer waits for the deadline rule."""
        if self._state == WAIT_GROUPS:
            self._trainer_state(now, self._waits(groups))

    def train_begins(self, now: float, instances: Iterable[SimInstance]) -> None:
        """Every instance stands at `now`, here and where the trainer ends."""
        self._trainer_state(now, TRAIN)
        self._idle_tail += self._idle_s(instances) - self._idle_before

    def train_ends(self, now: float, instances: Iterable[SimInstance], ready: int) -> None:
        """The trainer has nothing to do; `ready`: groups that it may not take yet."""
        self._trainer_state(now, self._waits(ready))
        self._idle_before = self._idle_s(instances)

    def trained(self, base: Version, groups: Iterable[SimGroup]) -> None:
        """One part of a step."""
        for group in groups:
            self._tokens += group.tokens
            self._samples += group.done
            self._mixed += group.mixed
            self._lags[base - group.version] = self._lags.get(base - group.version, 0) + 1
            self._tasks[group.task] = self._tasks.get(group.task, 0) + 1

    def waits(self, now: float, by: int) -> None:
        """So many samples more wait for their environment without a slot."""
        self._waiting_s += self._waiting * (now - self._waits_since)
        self._waiting, self._waits_since = self._waiting + by, now

    def live(self, versions: int) -> None:
        self._live_sum += versions
        self._live_count += 1
        self._live_max = max(self._live_max, versions)

    def lost(self, now: float, instance: SimInstance, comes_back: bool = True) -> None:
        if comes_back:
            self._down[instance.id] = now
        for name, seconds in {**instance.spent, "slot_s": instance.slot_s, "preempted": instance.preempted}.items():
            self._lost[name] = self._lost.get(name, 0.0) + seconds

    def up(self, now: float, id: InstanceId) -> None:
        self._lost[DOWN] = self._lost.get(DOWN, 0.0) + now - self._down.pop(id, now)

    def published(self, now: float, version: Version, instances: Iterable[SimInstance], ready: int) -> None:
        """After the warm-up counting begins; the result is always up to date."""
        self.train_ends(now, instances, ready)
        self._ready_left += ready
        self.step_ends.append(now)
        if version <= self._warmup:
            self._start, self._start_lags = self._counters(now, instances), dict(self._lags)
            self._start_tasks = dict(self._tasks)
            self._live_sum = self._live_count = self._live_max = 0
        elif self._start is not None:
            self.result = self._result(version - self._warmup, self._counters(now, instances))

    # ------------------------------------------------------------------ private

    def _waits(self, ready: int) -> str:
        """What the trainer waits for while so many groups are ready."""
        return WAIT_DEADLINE if self._capped and ready >= self._part else WAIT_GROUPS

    def _trainer_state(self, now: float, state: str) -> None:
        self._trainer[self._state] += now - self._since
        self._state, self._since = state, now

    def _idle_s(self, instances: Iterable[SimInstance]) -> float:
        """Instance-seconds idle so far, those of the lost included."""
        return self._lost.get(IDLE, 0.0) + sum(instance.spent[IDLE] for instance in instances)

    def _counters(self, now: float, instances: Iterable[SimInstance]) -> dict[str, float]:
        counters = {"now": now, "tokens": self._tokens, "moves": self.moves, "reloads": self.reloads}
        counters |= {"samples": self._samples, "mixed": self._mixed}
        counters |= {"move_bytes": self.move_bytes, "weight_bytes": self.weight_bytes, "idle_tail": self._idle_tail}
        counters |= {"reprefilled": self.reprefilled, "cancelled": self.cancelled_tokens, "ready": self._ready_left}
        self.waits(now, 0)
        counters |= {"waiting_s": self._waiting_s, "lends": self.lends, "lent_s": self.lent_s}
        counters |= {f"trainer/{name}": seconds for name, seconds in self._trainer.items()}
        for name in (*ACTIVITIES, DOWN, "slot_s"):
            counters[f"rollout/{name}"] = self._lost.get(name, 0.0)
        counters[f"rollout/{DOWN}"] += sum(now - since for since in self._down.values())
        counters["preempted"] = self._lost.get("preempted", 0)
        for instance in instances:
            for name, seconds in instance.spent.items():
                counters[f"rollout/{name}"] += seconds
            counters["rollout/slot_s"] += instance.slot_s
            counters["preempted"] += instance.preempted
        return counters

    def _result(self, steps: int, end: dict[str, float]) -> Result:
        assert self._start is not None
        d = {name: value - self._start[name] for name, value in end.items()}
        seconds, all_s = d["now"], sum(d[f"rollout/{name}"] for name in (*ACTIVITIES, DOWN))
        rollout = {name: d[f"rollout/{name}"] / all_s for name in (*ACTIVITIES, DOWN) if name != IDLE}
        rollout[IDLE_TAIL] = d["idle_tail"] / all_s
        rollout[IDLE_CAPPED] = d[f"rollout/{IDLE}"] / all_s - rollout[IDLE_TAIL]
        lags = {lag: n - self._start_lags.get(lag, 0) for lag, n in sorted(self._lags.items())}
        groups = sum(lags.values())
        tasks = {task: n - self._start_tasks.get(task, 0) for task, n in sorted(self._tasks.items())}
        decode_s = d["rollout/decode"]
        return Result(
            steps=steps, seconds=seconds, step_s=seconds / steps,
            rollout_only=max(0.0, 1 - d[f"trainer/{TRAIN}"] / seconds),
            tokens_per_s=d["tokens"] / seconds, tokens=d["tokens"] / steps,
            trainer={name: d[f"trainer/{name}"] / seconds for name in self._trainer},
            rollout={name: rollout[name] for name in CAUSES},
            occupancy=d["rollout/slot_s"] / decode_s if decode_s else 0.0,
            lags={lag: n / groups for lag, n in lags.items() if n}, mixed=d["mixed"] / d["samples"],
            tasks={task: n / groups for task, n in tasks.items()}, waiting=d["waiting_s"] / seconds,
            live_mean=self._live_sum / max(1, self._live_count), live_max=self._live_max,
            moves=d["moves"] / steps, reloads=d["reloads"] / steps, move_bytes=d["move_bytes"] / steps,
            weight_bytes=d["weight_bytes"] / steps, reprefilled_tokens=d["reprefilled"] / steps,
            cancelled_tokens=d["cancelled"] / steps, preempted=d["preempted"] / steps, ready_left=d["ready"] / steps,
            lends=d["lends"] / steps, lent=d["lent_s"] / seconds, late_s=self.late_s,
        )  # fmt: skip


# A simulated run as a Chrome trace: a row per instance, one for the trainer, arrows between them.
#
# An arrow leads from the sample that completed a group to the batch that took it.


class Trace:
    """`arrows`: at most so many groups get one, so that a large run stays readable."""

    def __init__(self, label: str, arrows: int = 20_000):
        self._events: list[chrome_trace.Event] = []
        self._rows = chrome_trace.TraceRows(label, self._events.append)
        self.last_done: dict[GroupId, tuple[float, InstanceId]] = {}
        self._arrows = arrows
        self._now = 0.0

    def state(self, now: float, instance: SimInstance) -> None:
        """The instance's slice goes on, or ends and another begins."""
        self._now = now
        activity = instance.activity
        if activity in (DECODE, PREFILL):
            name = chrome_trace.versions(instance.counts) or activity
        else:
            name = "" if activity == IDLE else activity
        self._rows.turn(ROLLOUT, instance.id, name, now)

    def train(self, now: float, end: float, command: Train) -> None:
        name = f"v{command.base_version + 1}"
        self._rows.slice(TRAINER, 0, name, now, end, {"groups": len(command.group_ids), "base": command.base_version})
        for group in command.group_ids:
            done = self.last_done.pop(group, None)
            if done is not None and self._arrows > 0:
                self._arrows -= 1
                self._rows.arrow("group", group, (ROLLOUT, done[1], done[0] - 1 / MICRO), (TRAINER, 0, now))

    def save(self, path: str) -> None:
        """Write what has been recorded; slices in progress end with the last thing that happened."""
        self._rows.end(self._now)
        Path(path).write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
