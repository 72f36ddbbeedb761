"""A run's events in a file, which the simulator feeds to an orchestrator again. Standard library only.

A recording is JSON lines: first {"config": fields of OrchestratorConfig, "start": keywords of Orchestrator}, then one
event a line, {"event": "SampleDone", ...its fields}; the last of a batch also has {"commands": how many the batch
caused, "digest": of all commands so far}.
Time is in the TimePassed events, so a recording needs no clock of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.types import GroupId, SampleId

EVENTS = {cls.__name__: cls for cls in typing.get_args(ev.Event)}


class Recording:
    """Observer of `orchestrate.loop.run` that writes a recording. `start`: the Orchestrator's keywords, if any."""

    def __init__(self, path: str | Path, config: OrchestratorConfig, start: dict[str, Any] | None = None):
        self._file = Path(path).open("w")  # noqa: SIM115 (close() closes it)
        self._digest = hashlib.blake2b(digest_size=8)
        header = {"config": dataclasses.asdict(config), "start": start or {}}
        self._file.write(json.dumps(header) + "\n")

    def __call__(self, events: Sequence[ev.Event], commands: Sequence[ev.Command]) -> None:
        self._digest.update(repr(commands).encode())
        lines = [{"event": type(e).__name__} | {name: getattr(e, name) for name in type(e).__slots__} for e in events]
        lines[-1] |= {"commands": len(commands), "digest": self._digest.hexdigest()}
        self._file.writelines(json.dumps(line) + "\n" for line in lines)

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> tuple[OrchestratorConfig, dict[str, Any], Iterator[tuple[ev.Event, str]]]:
    """(what configured the run, keywords of its Orchestrator, its events).

    Beside the last event of a batch stands the digest of all commands so far, "" beside the others.
    """
    lines = _lines(path)
    header = next(lines)
    events = ((_event(line), line.get("digest", "")) for line in lines)
    return OrchestratorConfig(**_frozen(header["config"])), _frozen(header["start"]), events


def recorded_work(path: str | Path) -> tuple[dict[SampleId, int], frozenset[GroupId]]:
    """Response tokens of every sample that ended, and the groups that were filtered or failed."""
    lengths: dict[SampleId, int] = {}
    untrainable: set[GroupId] = set()
    for event, _ in read(path)[2]:
        match event:
            case ev.SampleDone(id=id, tokens=tokens):
                lengths[id] = tokens
            case ev.GroupScored(trainable=False, group_id=group) | ev.GroupFailed(group_id=group):
                untrainable.add(group)
    if not lengths:
        raise ConfigError(f"recording: in {path} no sample ended")
    return lengths, frozenset(untrainable)


# ---------------------------------------------------------------- private


def _lines(path: str | Path) -> Iterator[dict[str, Any]]:
    if not Path(path).is_file():
        raise ConfigError(f"recording: {path} does not exist")
    with Path(path).open() as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
                known = "config" in line if number == 1 else line["event"] in EVENTS
            except (ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ConfigError(f"recording: {path}, line {number} is no line of a recording")
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
