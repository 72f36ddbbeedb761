"""The measurements of bench.device: a JSON file that one process at a time adds to. Standard library only."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Record:
    """The JSON file, a list of measurements; one process at a time adds to it."""

    def __init__(self, path: Path, stage: str = ""):
        self.path, self.stage = path, stage
        self.entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        value = None if value is None else float(value)
        self.entries.append({"stage": self.stage, "name": name, "value": value, "unit": unit, **more})
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.entries, indent=1))
        unfinished.replace(self.path)
        print(line(self.entries[-1]), flush=True)

    def value(self, stage: str, name: str) -> float | None:
        return next((e["value"] for e in self.entries if (e["stage"], e["name"]) == (stage, name)), None)

    def has(self, name: str) -> bool:
        return any((e["stage"], e["name"]) == (self.stage, name) for e in self.entries)

    def forget(self, stage: str) -> None:
        self.entries = [e for e in self.entries if e["stage"] != stage]

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What fails inside becomes an entry of this name, and the stage goes on."""
        try:
            yield
        except Exception as error:  # an out-of-memory error or a refused option is a result here
            traceback.print_exc()
            self.add(name, None, "failed", error=f"{type(error).__name__}: {error}"[:2000])


def line(entry: dict[str, Any]) -> str:
    value = "" if entry["value"] is None else f"{entry['value']:.4g}"
    note = entry.get("error", "").partition("\n")[0] or entry.get("note", "")
    return f"{entry['stage']:12s} {entry['name']:58s} {value:>9s} {entry['unit']:10s} {note}".rstrip()
