"""What a run says about itself, to metrics.jsonl, TensorBoard and the console.

Consumes named values from the runtime; produces one JSON line a record, the same scalars for TensorBoard, one console
line a step, and between the lines a progress line that moves whatever the run is doing.
Laws: names are paths (`lag/max`, `rollout/tokens_per_s`); every line of metrics.jsonl is strict JSON (what is not
finite is null); after a resume no line is later than the step resumed from, until it is written again; a damaged line
is moved aside and stops no run.

95 % intervals of shares, in closed form (`wilson`, `of_prompts`). Source: Wilson 1927; of several samples a prompt,
with the number of trials that the spread of the prompts' means amounts to (the design effect of cluster sampling).
"""

from __future__ import annotations

import html
import json
import math
import numbers
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from dora_jax.base import state_files
from dora_jax.base.console import Console
from dora_jax.base.health import Health
from dora_jax.base.retrying_file import PatientFile

SHARES = tuple(f"eval/{name}{end}" for name in ("accuracy", "pass_at_k") for end in ("", "_low", "_high"))
Z = 1.96  # half the width of a 95 % interval, in standard errors


SampleRow = Mapping[str, Any]  # group, prompt, expected, reward and text
COLUMNS = ("group", "prompt", "expected", "reward", "text")  # of tables of samples
MAX_TEXT = 4000  # characters of a cell


class Sink(Protocol):
    """Receives a run's metrics while it goes on: the Prometheus page, Weights & Biases, or a class of the user's that
    `monitor.sinks` names, which is called with (config, workdir). Its owner closes it (`close()`)."""

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """One record of metrics.jsonl: name -> number; None where it is not finite."""

    def status(self, facts: Mapping[str, Any]) -> None:
        """What the orchestrator does now, about once a second: base, training, versions, groups, waits,
        verdicts (how many hold) and health (their sentences)."""

    def samples(self, step: int, kind: str, rows: Sequence[SampleRow]) -> None:
        """Texts to read. heldout: of the version `step`, one row a prompt; trained: of the step's most mixed group, the
        best and the worst. A class of the user's may do without this method."""


class Writer:
    """The sinks of one workdir: metrics.jsonl, tensorboard/, the console, and `others`. Closed by leaving its `with`
    block."""

    def __init__(self, workdir: Path | str, console: Console | None = None, others: Sequence[Sink] = ()):
        self._others = others
        self._workdir = Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self.file = self._workdir / "metrics.jsonl"
        self._console = console or Console()
        self.resumed_at: int | None = None
        self._health = Health()
        self.evaluations: dict[int, dict[str, float]] = {}  # version -> record, of what an earlier process evaluated
        self._lines: PatientFile | None = None
        self._board: _Board | None = None

    def __enter__(self) -> Self:
        self._console.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._console.stop()
        for file in (self._lines, self._board and self._board.file):
            if file:
                file.close()

    def resume(self, step: int) -> None:
        """Drop what was written after `step`: the run goes on from there. Call before the first write.

        Damaged lines are moved aside: what is no record, and a later step that stands before an earlier one. A note
        says where they are, and of which steps no record is left.
        """
        if self._lines:
            raise RuntimeError("Writer.resume must come before the first write")
        self.resumed_at = step
        data = self.file.read_bytes() if self.file.is_file() else b""
        lines, found = data.split(b"\n"), state_files.read_lines(data, is_record)
        last = max((n for n, row in found.rows if row["step"] <= step and not _evaluates(row)), default=0)
        misplaced = [(n, lines[n - 1]) for n, row in found.rows if row["step"] > step and n < last]
        if damaged := sorted(found.damaged + misplaced):
            place = state_files.set_aside(self.file, (line for _, line in damaged))
            self.note(
                f"{self.file} is damaged in line {state_files.numbers(n for n, _ in damaged)}; what stood there is in "
                f"{place}"
            )
        kept = [row for _, row in found.rows if row["step"] <= step]
        missing = {*range(1, step + 1)} - {row["step"] for row in kept if not _evaluates(row)}
        if missing:
            self.note(f"{self.file} has no record of step {state_files.numbers(missing)}")
        self.evaluations = {
            row["step"]: {name: math.nan if value is None else value for name, value in row.items()}
            for row in kept
            if _evaluates(row)
        }
        for row in kept:
            self._health.follow(row)
        if self.file.is_file():
            state_files.replace(self.file, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def write(self, step: int, metrics: Mapping[str, float], *, waits: Sequence[str] = ()) -> None:
        """One record in every sink; waits: phrases that say what waited for what, the longest wait first."""
        scalars = {name: _scalar(value) for name, value in metrics.items()}
        if self._lines is None or self._board is None:
            self._board = _Board(self._workdir / "tensorboard", self.resumed_at, self.note)
            self._lines = PatientFile(self.file, self.note, lines=True)
        words = {"waits": "; ".join(waits)} if waits else {}
        self._lines.write(json.dumps({"step": step, **scalars, **words}, allow_nan=False).encode() + b"\n")
        self._board.write(step, {name: value for name, value in scalars.items() if value is not None})
        self._console.step(step, scalars, waits)
        for sink in self._others:
            sink.write(step, scalars)
        started, ended = self._health.follow({"step": step, **scalars, "waits": "; ".join(waits)})
        for verdict in started:
            self.note(f"health: {verdict}")
        for verdict in ended:
            self.note(f"health: {verdict.name} is over at step {step}")

    def samples(self, step: int, kind: str, groups: Sequence[SampleRow]) -> None:
        """Rows of groups (runtime.common.sample_log) to the sinks that show text: of held-out ones the first sample of
        each, of others all."""
        first = 1 if kind == "heldout" else None
        rows = [{name: {**g, **s}[name] for name in COLUMNS} for g in groups for s in g["samples"][:first]]
        if not rows:
            return
        if self._board:
            # a pipe, a line break and a mark of HTML would end a cell of Markdown
            cells = [[html.escape(f"{row[name]!s:.{MAX_TEXT}}").replace("|", "&#124;") for name in COLUMNS]
                     for row in rows]  # fmt: skip
            lines = [" | ".join(cell.replace("\n", "<br>") for cell in line) for line in cells]
            head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
            self._board.text(step, f"samples/{kind}", head + "".join(f"| {line} |\n" for line in lines))
        for sink in self._others:
            sink.samples(step, kind, rows)

    def phase(self, role: str, text: str) -> None:
        """What this role does now, for the progress line; the role "all" speaks for all of them."""
        self._console.phase(role, text)

    def count_tokens(self, tokens: int) -> None:
        self._console.count(tokens)

    def status(self, facts: Mapping[str, Any]) -> None:
        """The orchestrator's own words for the progress line."""
        self._console.status(facts)
        verdicts = [str(verdict) for verdict in self._health.verdicts]
        for sink in self._others:
            sink.status({**facts, "verdicts": len(verdicts), "health": verdicts})

    def note(self, text: str) -> None:
        self._console.note(text)

    def close_with(self, text: str) -> None:
        """The closing line; nothing moves after it."""
        self._console.stop()
        self._console.note(text)


class _Board:
    """TensorBoard's event file. tensorboardX's own writer is a thread that dies where the disk is full, and a queue
    that then holds up the run."""

    def __init__(self, folder: Path, resumed_at: int | None, notify: Callable[[str], None]):
        from tensorboardX import record_writer, summary  # half a second that a dry run need not pay
        from tensorboardX.proto import event_pb2, summary_pb2

        self._crc, self._events, self._summaries = record_writer.masked_crc32c, event_pb2, summary_pb2
        self._text = summary.text
        folder.mkdir(parents=True, exist_ok=True)
        self.file = PatientFile(folder / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}", notify)
        self._add(file_version="brain.Event:2")
        if resumed_at is not None:  # hides what an earlier process wrote after this step
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=resumed_at + 1, session_log=start)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=number) for name, number in scalars.items()]
        self._add(step=step, summary=summary(value=values))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._add(step=step, summary=self._text(name, markdown))

    def _add(self, **fields: Any) -> None:
        data = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        size = struct.pack("<Q", len(data))
        self.file.write(size + struct.pack("<I", self._crc(size)) + data + struct.pack("<I", self._crc(data)))


def is_record(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is what `Writer.write` writes; of an evaluation, what `runtime.evaluations` makes."""
    step, waits = row.get("step"), row.get("waits", "")
    numbers = [value for name, value in row.items() if name not in ("step", "waits")]
    if type(step) is not int or step < 0 or type(waits) is not str:
        return False
    if not all(value is None or type(value) in (int, float) for value in numbers):
        return False
    shares = [row[name] for name in SHARES if row.get(name) is not None]
    whole = type(row.get("eval/prompts")) is int and "eval/reward/mean" in row
    return all(0 <= share <= 1 for share in shares) and (whole or not _evaluates(row))


# ---------------------------------------------------------------- private


def _evaluates(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in row)


def _scalar(value: Any) -> float | int | None:
    """A plain JSON number; None where it is not finite."""
    if isinstance(value, numbers.Integral | np.bool_):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def wilson(share: float, trials: float) -> tuple[float, float]:
    """The interval of a share of `trials` independent trials; of none: 0 to 1."""
    if trials <= 0:
        return 0.0, 1.0
    centre = (share + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(max(0.0, share * (1 - share)) / trials + Z * Z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def of_prompts(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """The interval of the mean of the prompts' shares, each of `samples` samples, which are alike within a prompt.

    The prompts are the independent trials: their number is the fewest that count, all samples the most.
    """
    n = len(shares)
    share = sum(shares) / n if n else 0.0
    spread = sum((x - share) ** 2 for x in shares) / max(1, n - 1) / max(1, n)
    trials = share * (1 - share) / spread if spread else n
    return wilson(share, min(max(trials, n), n * samples))
