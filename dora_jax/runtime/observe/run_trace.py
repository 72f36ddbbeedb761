"""A real run as a Chrome trace, written while it goes on: WORKDIR/trace.json, for https://ui.perfetto.dev.

Consumes the rows of timeline.jsonl as they are written, and so is sampled as they are; produces an array of events. The
format allows that its end is missing, as it is where the run was killed; a run that resumes writes on. A file that has
reached half its budget ends as trace.1.json, and another begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dora_jax.base import chrome_trace, state_files
from dora_jax.base.chrome_trace import MICRO, ROLLOUT, TRAINER
from dora_jax.base.retrying_file import PatientFile
from dora_jax.types import InstanceId

BEGIN, BETWEEN, END = b"[\n", b",\n", b"\n]\n"
TAIL_BYTES = 2**16  # more than an event


class RunTrace:
    def __init__(self, workdir: Path, notify: Callable[[str], None], budget_bytes: int = 0):
        path = workdir / "trace.json"
        self._before = BETWEEN if _reopened(path, notify) else BEGIN  # what stands before the next event
        self._file = PatientFile(path, notify)
        self._most_bytes = budget_bytes // 2
        self._rows = chrome_trace.TraceRows("live", self._emit)
        self._loading: set[InstanceId] = set()
        self._busy: dict[InstanceId, str] = {}  # name of the slice, while it has samples
        self._training = ""  # name of the trainer's slice
        self._arrows = 0
        self._now_s = 0.0

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of timeline.jsonl."""
        if self._most_bytes and self._file.size >= self._most_bytes:
            # end this file, and go on in another with what every row is doing
            self._rows.end(self._now_s)
            self._file.write(END)
            self._before = BEGIN if self._file.begin_anew() else BETWEEN
            self._rows = chrome_trace.TraceRows("live", self._emit)
            self._rows.turn(TRAINER, 0, self._training, self._now_s)
            for instance in self._busy:
                self._turn(instance, self._busy[instance])
        self._now_s = now_s = row["t"]
        match row:
            case {"up": instance}:
                self._turn(instance, "")
            case {"down": instance}:
                self._loading.discard(instance)
                self._turn(instance, "")
            case {"load": instance}:
                self._loading.add(instance)
                self._turn(instance, self._busy.get(instance, ""))
            case {"loaded": instance}:
                self._loading.discard(instance)
                self._turn(instance, self._busy.get(instance, ""))
            case {"busy": instances}:
                for instance, counts in instances.items():
                    self._turn(instance, chrome_trace.versions(v for v, n in counts.items() if n))
            case {"moves": moves}:
                for source, target, samples in moves:
                    self._arrows += 1
                    left_s = self._now_s - 1 / MICRO  # within the slice that may end now
                    self._rows.arrow(
                        f"{samples} moved", self._arrows, (ROLLOUT, source, left_s), (ROLLOUT, target, self._now_s)
                    )
            case {"train": base}:
                self._training = f"v{base + 1}"
                self._rows.turn(TRAINER, 0, self._training, now_s)
            case {"spent": lanes}:
                for name, spent_s in lanes.items():
                    self._rows.count(f"seconds of {name}", spent_s, now_s)
            case {"published": _}:
                self._training = ""
                self._rows.turn(TRAINER, 0, "", now_s)

    def close(self) -> None:
        self._rows.end(self._now_s)
        self._file.write(END)
        self._file.close()

    def _turn(self, instance: InstanceId, name: str) -> None:
        self._busy[instance] = name
        self._rows.turn(ROLLOUT, instance, name or ("load" if instance in self._loading else ""), self._now_s)

    def _emit(self, event: chrome_trace.Event) -> None:
        self._file.write(self._before + json.dumps(event, separators=(",", ":")).encode())
        self._before = BETWEEN


def _reopened(path: Path, notify: Callable[[str], None]) -> bool:
    """Take the end of the array away, and an event that a crash cut short. False: there is no event before that, and
    what stood there is moved aside."""
    if not path.is_file():
        return False
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        kept = tail.removesuffix(END)
        head, _, last = kept.rpartition(BETWEEN)
        if not state_files.read_lines(last.removeprefix(BEGIN)).rows:
            kept = head
        if kept:
            file.truncate(size - len(tail) + len(kept))
            return True
    if size:
        notify(f"{path} holds no event; it is moved aside as {state_files.set_aside(path)}")
    return False
