"""A recorded run in the simulator: the same orchestrator fed with what really happened, and its work for other modes.

A journal is JSON lines: first {"config": fields of OrchestratorConfig, "start": keywords of Orchestrator}, then one
event a line, {"event": "SampleDone", ...its fields}; the last of a batch also has {"commands": how many the batch
caused, "digest": of all commands so far}.
Time is in the TimePassed events, so a journal needs no clock of its own.

Laws: a replay gives the same commands or raises at the first event that does not; `recorded_work` gives each recorded
sample its own length, whatever mode then runs on it (workload.distribution = "journal").
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.types import GroupId, SampleId, Version

EVENTS = {cls.__name__: cls for cls in ev.Event.__args__}


class Journal:
    """Observer of `orchestrate.loop.run` that writes a journal. `start`: the Orchestrator's keywords, if any."""

    def __init__(self, path: str | Path, config: OrchestratorConfig, start: dict[str, Any] | None = None):
        self._file = Path(path).open("w")
        self._digest = hashlib.blake2b(digest_size=8)
        self._write({"config": dataclasses.asdict(config), "start": start or {}})

    def __call__(self, events: Sequence[ev.Event], commands: Sequence[ev.Command]) -> None:
        self._digest.update(repr(commands).encode())
        lines = [{"event": type(e).__name__} | {name: getattr(e, name) for name in type(e).__slots__} for e in events]
        lines[-1] |= {"commands": len(commands), "digest": self._digest.hexdigest()}
        for line in lines:
            self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """What a journal shows; seconds are the run's own."""

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
    """Feed a journal to a new orchestrator and compare every command; `Differs` names the first difference.

    `warmup`, `rundown`: steps left out of the averages at the start, and at the end, where a run lives on its stock."""
    lines = _read(path)
    header = next(lines)
    config = OrchestratorConfig(**_frozen(header["config"]))
    brain, digest = Orchestrator(config, **_frozen(header["start"])), hashlib.blake2b(digest_size=8)
    watch = _Watch(warmup, rundown)
    for number, line in enumerate(lines, start=2):
        event = _event(line)
        brain.commit(event)
        if "digest" not in line:  # others of its batch follow
            watch(event, ())
            continue
        commands = brain.decide()
        digest.update(repr(commands).encode())
        if line["digest"] != digest.hexdigest():
            raise Differs(f"{path}, line {number}: the replay's commands differ: {commands}")
        watch(event, commands)
    return watch.result(config.mode)


def recorded_body(path: str | Path) -> tuple[OrchestratorConfig, list[ev.InstanceUp]]:
    """What the run was told, and the instances that came up at its start."""
    lines = _read(path)
    header = next(lines)
    ups = []
    for line in lines:
        if line["event"] not in ("InstanceUp", "TimePassed"):
            break
        if line["event"] == "InstanceUp":
            ups.append(_event(line))
    if not ups:
        raise ConfigError(f"journal: {path} does not begin with an instance")
    return OrchestratorConfig(**_frozen(header["config"])), ups


def recorded_work(path: str | Path) -> tuple[dict[SampleId, int], frozenset[GroupId]]:
    """Response tokens of every sample that ended, and the groups that were filtered or failed."""
    lengths, untrainable = {}, set()
    lines = _read(path)
    next(lines)
    for line in lines:
        match line:
            case {"event": "SampleDone", "id": id, "tokens": tokens}:
                lengths[SampleId(*id)] = tokens
            case {"event": "GroupScored", "trainable": False, "group_id": group} | {
                "event": "GroupFailed",
                "group_id": group,
            }:
                untrainable.add(group)
    if not lengths:
        raise ConfigError(f"journal: in {path} no sample ended")
    return lengths, frozenset(untrainable)


def render(result: Replay) -> str:
    lags = " ".join(f"{lag}:{n / sum(result.lags.values()):.0%}" for lag, n in sorted(result.lags.items()))
    return (
        f"{result.events:,} events replay to the same commands: mode {result.mode}, {result.steps} steps in "
        f"{result.seconds:.1f} s, {result.step_s:.2f} s a step, rollout only {result.rollout_only:.1%}, "
        f"groups by lag {lags}"
    )


# ---------------------------------------------------------------- private


class _Watch:
    """Adds up a journal: (time, trainer's busy time, lags) at its start and at every publication."""

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
                f"journal: {steps} steps leave none beside {first} of warm-up and {self._rundown} at the end"
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


def _read(path: str | Path) -> Iterator[dict[str, Any]]:
    if not Path(path).is_file():
        raise ConfigError(f"journal: {path} does not exist")
    with Path(path).open() as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                known = "config" in line if number == 1 else line["event"] in EVENTS
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ConfigError(f"journal: {path}, line {number} is no line of a journal")
            yield line


def _event(line: dict[str, Any]) -> ev.Event:
    cls = EVENTS[line["event"]]
    fields = _frozen({name: line[name] for name in cls.__slots__})
    if "id" in fields:
        fields["id"] = SampleId(*fields["id"])
    if "ids" in fields:
        fields["ids"] = tuple(SampleId(*id) for id in fields["ids"])
    return cls(**fields)


def _frozen(value: Any) -> Any:
    """JSON lists as the tuples that they were."""
    if isinstance(value, dict):
        return {name: _frozen(v) for name, v in value.items()}
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value
