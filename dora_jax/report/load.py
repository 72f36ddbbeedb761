"""Files of a workdir, a folder or in a bucket, -> `RunData`. A line that holds no row is counted and left out: a run
may be writing it now, or it is damaged."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_jax.base import state_files
from dora_jax.base.retrying_file import earlier
from dora_jax.config import workdirs
from dora_jax.types import InstanceId, Version

OWN_EVALUATIONS = "evaluations/metrics.jsonl"  # of dora_jax.evaluate, which go before those of the run
MOST_S = 1e11  # Unix times are below it
MOST = 2**53  # whole numbers are below it: a reader in JavaScript has no others
Row = dict[str, Any]
Read = Callable[[str], bytes | None]  # a file of the workdir by its name; None: it is not there
Valid = Callable[[Row], bool]


@dataclass(kw_only=True)
class RunData:
    """steps, evaluations: rows of metrics.jsonl, the last of each step; samples: rows of samples.jsonl."""

    name: str
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    timeline: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    instances: dict[InstanceId, dict[str, float]] = field(default_factory=dict)
    lengths: dict[str, dict[int, int]] = field(default_factory=dict)  # generated, trained: bucket -> samples
    config: Row = field(default_factory=dict)
    overrides: Row = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)  # groups by state; see audit.py
    audit: str = ""  # a sentence
    remarks: list[str] = field(default_factory=list)  # what could not be read


def load(workdir: str | Path, name: str) -> RunData:
    """workdir: a folder, or gs://bucket/folder. FileNotFoundError with a sentence where there is no run."""
    read = _bucket(str(workdir)) if "://" in str(workdir) else _folder(Path(workdir))
    data = RunData(name=name)
    by_step: dict[tuple[int, bool], Row] = {}
    for row in _rows(read, "metrics.jsonl", data.remarks, _has_step):
        by_step[row["step"], any(key.startswith("eval/") for key in row)] = row  # a resumed run writes some steps again
    data.steps = [row for (_, evaluation), row in sorted(by_step.items()) if not evaluation]
    evaluations = {step: row for (step, evaluation), row in by_step.items() if evaluation}
    if read(OWN_EVALUATIONS) is not None:
        evaluations |= {row["step"]: row for row in _rows(read, OWN_EVALUATIONS, data.remarks, _has_step)}
    data.evaluations = [row for _, row in sorted(evaluations.items())]
    data.timeline = list(_both(read, "timeline.jsonl", data.remarks, _has_time))
    data.samples = list(_both(read, "samples.jsonl", data.remarks))
    data.config = _object(read, "config.json", data.remarks)
    data.overrides = _object(read, "overrides.json", data.remarks)
    summary = _object(read, "instances.json", data.remarks)
    instances, lengths = summary.get("instances"), summary.get("lengths")
    for id, row in instances.items() if isinstance(instances, dict) else ():
        if (instance := version_of(id)) is not None and isinstance(row, dict):
            data.instances[instance] = {key: number(value) or 0.0 for key, value in row.items()}
    for kind, counts in lengths.items() if isinstance(lengths, dict) else ():
        if isinstance(counts, dict):
            pairs = ((version_of(bucket), version_of(n)) for bucket, n in counts.items())
            data.lengths[kind] = {bucket: n for bucket, n in pairs if bucket is not None and n is not None}
    return data


def configured(data: RunData, name: str) -> Any:
    """A field of the run's configuration by its dotted name; None: it is not there."""
    tree: Any = data.config
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return None
    return float(value) if math.isfinite(value) else None


def series(rows: list[Row], key: str) -> list[float | None]:
    return [number(row.get(key)) for row in rows]


def version_of(text: Any) -> Version | None:
    """A version, an instance or a count; None for anything else."""
    try:
        found = int(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) < MOST else None


# ---------------------------------------------------------------- private


def _folder(folder: Path) -> Read:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: --workdir takes the workdir of a run, or several with commas")
    return lambda name: (folder / name).read_bytes() if (folder / name).is_file() else None


def _bucket(url: str) -> Read:
    from dora_jax.runtime.journal.object_storage import Objects  # a folder needs none of it

    store = Objects(url)
    if not any(store.get(name) for name in ("config.json", "metrics.jsonl")):
        raise FileNotFoundError(f"{url} holds no run")
    return store.get


def _has_step(row: Row) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < MOST


def _has_time(row: Row) -> bool:
    time_s = number(row.get("t"))
    return time_s is not None and 0 <= time_s < MOST_S


def _both(read: Read, name: str, remarks: list[str], *valid: Valid) -> Iterator[Row]:
    """The rows of a log that has a budget, the older ones first."""
    if read(before := str(earlier(Path(name)))) is not None:
        yield from _rows(read, before, remarks, *valid)
        remarks.append(f"{name} has reached its budget (monitor.log_bytes): rows older than those of {before} are gone")
    yield from _rows(read, name, remarks, *valid)


def _rows(read: Read, name: str, remarks: list[str], *valid: Valid) -> Iterator[Row]:
    content = read(name)
    if content is None:
        remarks.append(f"{name} is not there")
        return
    found = state_files.read_lines(content, *valid)
    yield from (row for _, row in found.rows)
    if refused := len(found.damaged) + bool(found.torn):
        remarks.append(f"{name}: {refused} lines hold no row and are left out")


def _object(read: Read, name: str, remarks: list[str]) -> Row:
    content = read(name)
    if content is None:
        remarks.append(f"{name} is not there")
        return {}
    try:
        return state_files.decode(content, name, workdirs.FORMAT)
    except state_files.StateError as error:
        remarks.append(f"{error}; it is left out")
        return {}
