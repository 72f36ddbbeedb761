"""Files of a workdir, a folder or in a bucket, -> `RunData` for the page, and rows of samples for programs.

A line that holds no row is counted and left out: a run may be writing it now, or it is damaged. Samples are what
runtime/common/sample_log.py writes, or an older run wrote, of one group a step. Law: what stands there twice, since a
step was made again, counts once, as it was last.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_jax.base import state_files
from dora_jax.base.retrying_file import earlier
from dora_jax.config import workdirs
from dora_jax.types import InstanceId, Version

OLD_SAMPLES = "samples.jsonl"  # of runs that wrote one group a step
SAMPLES = ("samples", "evaluations/samples")  # folders; the second is that of dora_jax.evaluate
STEP = re.compile(rb'\{"step": (\d+),')  # begins a row of samples
KINDS = ("trained", "filtered", "failed", "heldout")
LONGEST = 10_000  # characters of a text that the page may need
OWN_EVALUATIONS = "evaluations/metrics.jsonl"  # of dora_jax.evaluate, which go before those of the run
MOST_S = 1e11  # Unix times are below it
MOST = 2**53  # whole numbers are below it: a reader in JavaScript has no others
Row = dict[str, Any]
Valid = Callable[[Row], bool]


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a workdir, a folder or in a bucket."""

    read: Callable[[str], bytes | None]  # by name; None: it is not there
    under: Callable[[str], list[str]]  # the names in a folder of it


@dataclass(kw_only=True)
class Rollouts:
    """What a page shows of them.

    steps: of each step, the row of the group whose rewards spread most, or whose tokens were looked at, with its best
    and its worst sample. heldout: of each prompt, its rows of the first and of the last version it was evaluated at.
    """

    steps: list[Row] = field(default_factory=list)
    heldout: list[tuple[Row, Row]] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)  # by kind
    size_bytes: int = 0
    damaged: int = 0  # lines


@dataclass(kw_only=True)
class RunData:
    """steps, evaluations: rows of metrics.jsonl, the last of each step."""

    name: str
    steps: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    timeline: list[Row] = field(default_factory=list)
    rollouts: Rollouts = field(default_factory=Rollouts)
    instances: dict[InstanceId, dict[str, float]] = field(default_factory=dict)
    lengths: dict[str, dict[int, int]] = field(default_factory=dict)  # generated, trained: bucket -> samples
    config: Row = field(default_factory=dict)
    overrides: Row = field(default_factory=dict)
    ledger: dict[str, int] = field(default_factory=dict)  # groups by state; see audit.py
    audit: str = ""  # a sentence
    changes: list[Row] = field(default_factory=list)  # of the configuration, between starts: step, changed
    remarks: list[str] = field(default_factory=list)  # what could not be read


def opened(workdir: str | Path) -> Files:
    """workdir: a folder, or gs://bucket/folder. FileNotFoundError with a sentence where there is no run."""
    if "://" in str(workdir):
        from dora_jax.runtime.journal.object_storage import Objects  # a folder needs none of it

        store = Objects(str(workdir))
        if not any(store.get(name) for name in ("config.json", "metrics.jsonl")):
            raise FileNotFoundError(f"{workdir} holds no run")
        return Files(read=store.log, under=store.keys)
    folder = Path(workdir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: --workdir takes the workdir of a run, or several with commas")
    return Files(
        read=lambda name: (folder / name).read_bytes() if (folder / name).is_file() else None,
        under=lambda name: [str(file.relative_to(folder)) for file in (folder / name).glob("*")],
    )


def load(workdir: str | Path, name: str, texts: bool = True) -> RunData:
    """See `opened`. texts: what the policy wrote is read too, which may be much."""
    files = opened(workdir)
    read, data = files.read, RunData(name=name)
    by_step: dict[tuple[int, bool], Row] = {}
    for row in _rows(read, "metrics.jsonl", data.remarks, _has_step):
        by_step[row["step"], any(key.startswith("eval/") for key in row)] = row  # a resumed run writes some steps again
    data.steps = [row for (_, evaluation), row in sorted(by_step.items()) if not evaluation]
    evaluations = {step: row for (step, evaluation), row in by_step.items() if evaluation}
    if read(OWN_EVALUATIONS) is not None:
        evaluations |= {row["step"]: row for row in _rows(read, OWN_EVALUATIONS, data.remarks, _has_step)}
    data.evaluations = [row for _, row in sorted(evaluations.items())]
    data.timeline = list(_both(read, "timeline.jsonl", data.remarks, _has_time))
    if texts:
        data.rollouts = collect(files)
        if data.rollouts.damaged:
            data.remarks.append(f"{data.rollouts.damaged} lines of samples hold no row and are left out")
    if read("changes.jsonl") is not None:
        data.changes = list(_rows(read, "changes.jsonl", data.remarks, _has_changes))
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


def samples(
    workdir: str | Path, *, step: int | None = None, task: str | None = None, kind: str | None = None,
    contains: str | None = None,
) -> list[Row]:  # fmt: skip
    """Samples of a run, the oldest step first. See `dora_jax.samples`."""
    if kind not in (None, *KINDS):
        raise ValueError(f"kind = {kind!r} is none of {', '.join(KINDS)}")
    rows: dict[tuple[str, int, str, str], Row] = {}
    for group in _groups(opened(workdir), Rollouts(), step):
        if (kind is not None and group["kind"] != kind) or (task is not None and group["task"] != task):
            continue
        for sample in group["samples"]:
            if contains is None or contains in str(sample.get("text")) or contains in str(group.get("prompt")):
                row = {name: value for name, value in group.items() if name != "samples"} | sample
                rows[group["kind"], group["step"], str(group.get("group")), str(sample.get("index"))] = row
    return sorted(rows.values(), key=operator.itemgetter("step"))


def collect(files: Files) -> Rollouts:
    """One pass over all rows; of the texts no more is held than a page may show."""
    result, by_step = Rollouts(), dict[int, Row]()
    evaluated: dict[tuple[str, str], tuple[Row, Row]] = {}
    counted: dict[str, set[tuple[int, str]]] = {}
    for group in _groups(files, result, None):
        kind, step, shown = group["kind"], group["step"], group["samples"]
        counted.setdefault(kind, set()).add((step, str(group.get("group"))))
        if kind == "heldout" and shown:
            row = _shortened(group, shown)
            question = row["prompt"], str(row.get("expected"))
            first, last = evaluated.get(question, (row, row))
            evaluated[question] = row if step <= first["step"] else first, row if step >= last["step"] else last
        elif kind == "trained" and shown:
            best, worst = (which(shown, key=lambda sample: number(sample.get("reward")) or 0.0) for which in (max, min))
            looked = [sample for sample in shown if "by_token" in sample]
            chosen = _shortened(group, looked or ([best] if best is worst else [best, worst]))
            rewards = [number(sample.get("reward")) or 0.0 for sample in shown]
            chosen["rank"] = (bool(looked), statistics.pstdev(rewards) if max(map(abs, rewards)) < 1e100 else 0.0)
            before = by_step.get(step)
            if before is None or before["rank"] <= chosen["rank"]:
                by_step[step] = chosen
    result.groups = {kind: len(counted[kind]) for kind in KINDS if kind in counted}
    result.steps = [row for _, row in sorted(by_step.items())]
    result.heldout = sorted(evaluated.values(), key=_place)
    return result


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
        value = int(text)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if abs(value) < MOST else None


# ---------------------------------------------------------------- private


def _has_step(row: Row) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < MOST


def _has_samples(row: Row) -> bool:
    return _has_step(row) and "samples" in row


def _has_changes(row: Row) -> bool:
    changed = row.get("changed") if _has_step(row) else None
    return isinstance(changed, dict) and all(isinstance(pair, list) and len(pair) == 2 for pair in changed.values())


def _has_time(row: Row) -> bool:
    time_s = number(row.get("t"))
    return time_s is not None and 0 <= time_s < MOST_S


def _both(read: Callable[[str], bytes | None], name: str, remarks: list[str], *valid: Valid) -> Iterator[Row]:
    """The rows of a log that has a budget, the older ones first."""
    if read(before := str(earlier(Path(name)))) is not None:
        yield from _rows(read, before, remarks, *valid)
        remarks.append(f"{name} has reached its budget (monitor.log_bytes): rows older than those of {before} are gone")
    yield from _rows(read, name, remarks, *valid)


def _rows(read: Callable[[str], bytes | None], name: str, remarks: list[str], *valid: Valid) -> Iterator[Row]:
    content = read(name)
    if content is None:
        remarks.append(f"{name} is not there")
        return
    found = state_files.read_lines(content, *valid)
    yield from (row for _, row in found.rows)
    if refused := len(found.damaged) + bool(found.torn):
        remarks.append(f"{name}: {refused} lines hold no row and are left out")


def _object(read: Callable[[str], bytes | None], name: str, remarks: list[str]) -> Row:
    content = read(name)
    if content is None:
        remarks.append(f"{name} is not there")
        return {}
    try:
        return state_files.decode(content, name, workdirs.FORMAT)
    except state_files.StateError as error:
        remarks.append(f"{error}; it is left out")
        return {}


def _groups(files: Files, seen: Rollouts, step: int | None) -> Iterator[Row]:
    """Rows of groups with their fields in order, oldest first; what was read is added up in `seen`."""
    stored = [
        [name for name in files.under(folder) if name.endswith(".jsonl") and Path(name).stem.isdigit()]
        for folder in SAMPLES
    ]
    names = [str(earlier(Path(OLD_SAMPLES))), OLD_SAMPLES]
    for each in stored:
        names += sorted(each, key=_first_step)
    for name in names:
        content = files.read(name)
        if content is None:
            continue
        seen.size_bytes += len(content)
        lines = content.split(b"\n") if step is not None else [content]
        for line in lines:
            match = STEP.match(line)
            if step is not None and match is not None and int(match[1]) != step:
                continue
            read = state_files.read_lines(line, _has_samples)
            seen.damaged += len(read.damaged) + bool(read.torn and step is None)
            for _, row in read.rows:
                whole = row["samples"] if isinstance(row["samples"], list) else []
                kind = row.get("kind", "trained")
                if kind in KINDS and step in (None, row["step"]):
                    yield {"kind": kind, "task": "", **row, "samples": [s for s in whole if isinstance(s, dict)]}


def _first_step(name: str) -> int:
    return int(Path(name).stem)


def _place(pair: tuple[Row, Row]) -> tuple[int, int]:
    """Sort held-out prompts by the version that first answered them, then as the task has them."""
    return pair[0]["step"], -(version_of(pair[0].get("group")) or 0)


def _shortened(group: Row, chosen: list[Row]) -> Row:
    samples = [{**sample, "text": str(sample.get("text", ""))[:LONGEST]} for sample in chosen]
    return {**group, "prompt": str(group.get("prompt", ""))[:LONGEST], "samples": samples}
