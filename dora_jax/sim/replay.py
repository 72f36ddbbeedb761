"""A recorded run in the simulator: a new orchestrator takes the recorded events and has to give the same commands.

Consumes a recording (recording.py). Law: a replay gives the same commands or raises at the first event that does not.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from dora_jax.config import ConfigError
from dora_jax.costs.recording import read
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.types import GroupId, Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What a recording shows; seconds are the run's own."""

    mode: str
    events: int
    steps: int
    seconds: float
    step_s: float
    rollout_only: float
    lags: dict[int, int]


class Differs(RuntimeError):
    """The replay's commands are not those of the recorded run."""


def replay(path: str | Path, warmup: int = 0, rundown: int = 0) -> Replay:
    """Feed a recording to a new orchestrator and compare every command; `Differs` names the first difference.

    `warmup`, `rundown`: steps left out of the averages at the start, and at the end, where a run uses up its stock."""
    config, start, events = read(path)
    brain, digest = Orchestrator(config, **start), hashlib.blake2b(digest_size=8)
    watch = _Watch(warmup, rundown)
    for number, (event, expected) in enumerate(events, start=2):
        brain.commit(event)
        if not expected:  # more of its batch follow
            watch(event, ())
            continue
        commands = brain.decide()
        digest.update(repr(commands).encode())
        if expected != digest.hexdigest():
            raise Differs(f"{path}, line {number}: the replay's commands differ: {commands}")
        watch(event, commands)
    return watch.result(config.mode)


def render(result: Replay) -> str:
    lags = " ".join(f"{lag}:{n / sum(result.lags.values()):.0%}" for lag, n in sorted(result.lags.items()))
    return (
        f"{result.events:,} events replay to the same commands: mode {result.mode}, {result.steps} steps in "
        f"{result.seconds:.1f} s, {result.step_s:.2f} s a step, rollout only {result.rollout_only:.1%}, "
        f"groups by lag {lags}"
    )


# ---------------------------------------------------------------- private


class _Watch:
    """Adds up a recording: (time, trainer's busy time, lags) at its start and at every publication."""

    def __init__(self, warmup: int, rundown: int):
        self._warmup, self._rundown = warmup, rundown
        self._now = self._busy = self._took = 0.0
        self._started: dict[GroupId, Version] = {}
        self._lags: collections.Counter[int] = collections.Counter()
        self._marks: list[tuple[float, float, collections.Counter[int]]] = []
        self.events = 0

    def __call__(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        self.events += 1
        match event:
            case ev.TimePassed(now_s=now_s):
                self._now = now_s
                if not self._marks:
                    self._mark()
            case ev.StepPublished():
                self._busy += self._now - self._took
                self._mark()
        for command in commands:
            match command:
                case ev.Start(ids=ids, version=version):
                    for id in ids:  # a group is of the version of its first sample
                        self._started.setdefault(id.group_id, version)
                case ev.Train(group_ids=groups, base_version=base):
                    self._took = self._now
                    self._lags.update(base - self._started.pop(group) for group in groups)

    def result(self, mode: str) -> Replay:
        if not self._marks:
            self._mark()
        first, last = self._warmup, len(self._marks) - 1 - self._rundown
        if last < first:
            steps = len(self._marks) - 1
            raise ConfigError(
                f"recording: {steps} steps leave none beside {first} of warm-up and {self._rundown} at the end"
            )
        (began, busy_before, lags_before), (ended, busy, lags) = self._marks[first], self._marks[last]
        seconds = ended - began
        return Replay(
            mode=mode,
            events=self.events,
            steps=last - first,
            seconds=seconds,
            step_s=seconds / max(1, last - first),
            rollout_only=1 - (busy - busy_before) / seconds if seconds else 0.0,
            lags=dict(lags - lags_before),
        )

    def _mark(self) -> None:
        self._marks.append((self._now, self._busy, self._lags.copy()))
