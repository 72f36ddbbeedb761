"""A recorded run in the simulator: a new orchestrator takes its events and has to give the same commands.

Consumes a recording (recording.py). Law: a replay gives the same commands or raises at the first event that does not.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from pathlib import Path

from dora_jax.config import ConfigError
from dora_jax.costs.recording import read
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.types import GroupId, Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaySummary:
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


def replay(path: str | Path, warmup: int = 0, rundown: int = 0) -> ReplaySummary:
    """Feed a recording to a new orchestrator and compare every command; `Differs` names the first difference.

    `warmup`, `rundown`: steps left out of the averages at the start, and at the end, where a run uses up its stock."""
    config, start, events = read(path)
    brain, digest = Orchestrator(config, **start), hashlib.blake2b(digest_size=8)
    now = took = trained_s = 0.0
    started: dict[GroupId, Version] = {}
    lags: collections.Counter[int] = collections.Counter()
    marks: list[tuple[float, float, collections.Counter[int]]] = []  # at the start and at every publication
    number = 1
    for number, (event, expected) in enumerate(events, start=2):
        brain.commit(event)
        commands: tuple[ev.Command, ...] = ()
        if expected:  # else more of its batch follow
            commands = brain.decide()
            digest.update(repr(commands).encode())
            if expected != digest.hexdigest():
                raise Differs(f"{path}, line {number}: the replay's commands differ: {commands}")
        if isinstance(event, ev.TimePassed):
            now = event.now_s
        elif isinstance(event, ev.StepPublished):
            trained_s += now - took
        if isinstance(event, ev.StepPublished) or (isinstance(event, ev.TimePassed) and not marks):
            marks.append((now, trained_s, lags.copy()))
        for command in commands:
            if isinstance(command, ev.Start):
                for id in command.ids:  # a group is of the version of its first sample
                    started.setdefault(id.group_id, command.version)
            elif isinstance(command, ev.Train):
                took = now
                lags.update(command.base_version - started.pop(group) for group in command.group_ids)
    marks = marks or [(now, trained_s, lags.copy())]
    steps = len(marks) - 1
    if steps < warmup + rundown:
        raise ConfigError(f"recording: {steps} steps leave none beside {warmup} of warm-up and {rundown} at the end")
    (began, trained_before_s, lags_before), (ended, trained_s, lags) = marks[warmup], marks[steps - rundown]
    seconds, steps = ended - began, steps - warmup - rundown
    return ReplaySummary(
        mode=config.mode,
        events=number - 1,
        steps=steps,
        seconds=seconds,
        step_s=seconds / max(1, steps),
        rollout_only=1 - (trained_s - trained_before_s) / seconds if seconds else 0.0,
        lags=dict(lags - lags_before),
    )


def render(result: ReplaySummary) -> str:
    lags = " ".join(f"{lag}:{n / sum(result.lags.values()):.0%}" for lag, n in sorted(result.lags.items()))
    return (
        f"{result.events:,} events replay to the same commands: mode {result.mode}, {result.steps} steps in "
        f"{result.seconds:.1f} s, {result.step_s:.2f} s a step, rollout only {result.rollout_only:.1%}, "
        f"groups by lag {lags}"
    )
