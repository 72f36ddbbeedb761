"""What every instance did, sampled, while the run went on: the data of the report's timeline and of its instance table.

    WORKDIR/timeline.jsonl      a row a fact or a sample of time; `t` is Unix time in seconds
        {"t", "start"}                       a process began (a run that resumes writes on)
        {"t", "up": i, "slots": n}           {"t", "down": i, "reason": text}
        {"t", "load": i, "version": v}       {"t", "loaded": i, "version": v}
        {"t", "train": base version}         {"t", "published": v}
        {"t", "busy": {i: {v: samples}}}     the instances whose running samples have changed since the last such row
        {"t", "moves": [[src, dst, n]]}      samples that moved since the last such row
        {"t", "spent", "step", "seconds"}    lane -> what it did in a step -> seconds; the step's seconds
    WORKDIR/trace.json          the same rows as a Chrome trace (run_trace.py)
    WORKDIR/instances.json      {"instances": {i: {...}}, "lengths": {"generated" | "trained": {bucket: samples}}}

Consumes the loop's events and commands, and finished samples; produces these files. Law: the files stay small however
long the run and however many its instances: ROWS samples of time for each doubling of the run's length, fewer where
there are more than INSTANCES instances; rows of steps and loads add up, so the first two have a budget and leave what
is older in timeline.1.jsonl and trace.1.json, and drop what is older still. A damaged instances.json is moved aside.
"""

from __future__ import annotations

import collections
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.base import state_files
from dora_jax.base.retrying_file import PatientFile
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.seams import RunPlugin
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.observe.run_trace import RunTrace
from dora_jax.types import InstanceId, SampleId, Version, is_training

ROWS = 2000
PERIOD_S = 0.1  # the shortest between two samples of time
INSTANCES = 16
SUMMARY_PERIOD_S = 20.0
BUCKETS = 8  # of lengths, for each doubling
FORMAT = 2  # of instances.json
LENGTHS = ("generated", "trained")
STATISTICS = ("samples", "tokens", "zero_tokens", "nonfinite", "logprob_sum")


def length_bucket(tokens: int) -> int:
    """The bucket that holds `tokens`: eight for each doubling."""
    return round(BUCKETS * math.log2(max(1, tokens)))


class Timeline(RunPlugin):
    """Observer of the loop (`event`) and listener of payload records (`record`)."""

    does = "timeline"

    def __init__(
        self, workdir: Path, notify: Callable[[str], None], clock: Callable[[], float] = time.time, log_bytes: int = 0
    ):
        """log_bytes: budget of timeline.jsonl, and of trace.json; 0: none."""
        self._file = PatientFile(workdir / "timeline.jsonl", notify, budget_bytes=log_bytes, lines=True)
        self._trace = RunTrace(workdir, notify, log_bytes)
        self._summary_path = workdir / "instances.json"
        self._clock = clock
        self._began_s = self._sampled_s = self._summed_s = clock()
        self._where: dict[SampleId, tuple[InstanceId, Version]] = {}  # running samples
        self._busy: dict[InstanceId, collections.Counter[Version]] = {}
        self._changed: set[InstanceId] = set()
        self._moves: collections.Counter[tuple[InstanceId, InstanceId]] = collections.Counter()
        self._instances: dict[InstanceId, dict[str, float]] = {}
        self._lengths: dict[str, collections.Counter[int]] = {kind: collections.Counter() for kind in LENGTHS}
        if self._summary_path.exists():  # the statistics of the run's earlier processes
            try:
                found = state_files.read(self._summary_path, FORMAT)
                rows = found["instances"].items()
                self._instances = {int(i): {name: row[name] + 0 for name in STATISTICS} for i, row in rows}
                for kind in LENGTHS:
                    self._lengths[kind].update({int(bucket): n + 0 for bucket, n in found["lengths"][kind].items()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._instances, self._lengths = {}, {kind: collections.Counter() for kind in LENGTHS}
                place = state_files.set_aside(self._summary_path)
                what = error if isinstance(error, state_files.StateError) else f"{self._summary_path} is damaged"
                notify(f"{what}; it is moved aside as {place}, and statistics of instances begin anew")
        self.write({"start": True})

    def record(self, record: object) -> None:
        match record:
            case Finished(sample=sample, instance=instance) if is_training(sample.id.group_id):
                if instance is not None:
                    # a finished sample goes into the statistics of the instance that finished it
                    row = self._instances.setdefault(instance, dict.fromkeys(STATISTICS, 0))
                    logprobs = np.asarray(sample.logprobs, np.float64)
                    finite = np.isfinite(logprobs)
                    row["samples"] += 1
                    row["tokens"] += len(sample.out_ids)
                    row["zero_tokens"] += int(np.count_nonzero(np.asarray(sample.out_ids) == 0))
                    row["nonfinite"] += int(np.count_nonzero(~finite))
                    row["logprob_sum"] += float(logprobs[finite].sum())
                self._lengths["generated"][length_bucket(len(sample.out_ids))] += 1
            case StepDone(groups=groups):
                lengths = (len(sample.out_ids) for group in groups for sample in group.samples)
                self._lengths["trained"].update(map(length_bucket, lengths))

    def event(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        if isinstance(event, ev.InstanceReported) and not commands:
            return  # by far the most events, and nothing starts or ends by one
        match event:
            case ev.InstanceUp(instance=i, slots=slots):
                self._busy[i] = collections.Counter()
                self.write({"up": i, "slots": slots})
            case ev.InstanceDown(instance=i, reason=reason):
                self._busy.pop(i, None)
                self._where = {id: at for id, at in self._where.items() if at[0] != i}
                self.write({"down": i, "reason": reason})
            case ev.WeightsLoaded(instance=i, version=version):
                self.write({"loaded": i, "version": version})
            case ev.SampleStarted(id=id, instance=i, version=version):
                self._enter(id, i, version)
            case ev.SampleMoved(id=id, src=src, dst=dst):
                if (left := self._leave(id)) is not None:
                    self._enter(id, dst, left[1])
                self._moves[src, dst] += 1
            case ev.SampleDone(id=id) | ev.SampleParked(id=id) | ev.SampleWaiting(id=id) | ev.SampleCancelled(id=id):
                self._leave(id)
            case ev.StepPublished(version=version):
                self.write({"published": version})
        for command in commands:
            match command:
                case ev.Resume(ids=ids, instance=i, version=version):
                    for id in ids:
                        self._enter(id, i, version)
                case ev.LoadWeights(instance=i, version=version):
                    self.write({"load": i, "version": version})
                case ev.Train(base_version=base):
                    self.write({"train": base})
        now = self._clock()
        if now - self._sampled_s >= (
            max(PERIOD_S, (now - self._began_s) / ROWS) * max(1.0, len(self._busy) / INSTANCES)
        ):
            self._flush(now)
        if now - self._summed_s >= SUMMARY_PERIOD_S:
            self._summed_s = now
            self._write_summary()

    def close(self) -> None:
        self._flush(self._clock())
        self._write_summary()
        self._file.close()
        self._trace.close()

    # ------------------------------------------------------------ private

    def _enter(self, id: SampleId, instance: InstanceId, version: Version) -> None:
        self._leave(id)
        if instance not in self._busy:
            return  # it went down while the sample was on its way
        self._where[id] = instance, version
        self._busy[instance][version] += 1
        self._changed.add(instance)

    def _leave(self, id: SampleId) -> tuple[InstanceId, Version] | None:
        at = self._where.pop(id, None)
        if at is not None and (busy := self._busy.get(at[0])) is not None:
            busy[at[1]] -= 1
            if not busy[at[1]]:
                del busy[at[1]]
            self._changed.add(at[0])
        return at

    def _flush(self, now: float) -> None:
        self._sampled_s = now
        if self._changed:
            busy = {i: dict(self._busy[i]) for i in sorted(self._changed) if i in self._busy}
            self._changed.clear()
            self.write({"busy": busy}, now)
        if self._moves:
            self.write({"moves": [[src, dst, n] for (src, dst), n in sorted(self._moves.items())]}, now)
            self._moves.clear()

    def write(self, row: dict[str, Any], now: float | None = None) -> None:
        """now: of rows that tell of one moment; None: the clock says it."""
        stamped = {"t": round(self._clock() if now is None else now, 3)} | row
        self._file.write(json.dumps(stamped, separators=(",", ":")).encode() + b"\n")
        self._trace.row(stamped)

    def _write_summary(self) -> None:
        summary = {"instances": self._instances, "lengths": self._lengths}
        try:
            state_files.replace(self._summary_path, state_files.encode(summary, FORMAT))
        except OSError:
            pass  # the disk is full, say: the next summary holds all that this one would
