"""What one GPU does with the calls of a run: its speed of light, the kernels, decoding, the gap, training, memory.

    python -m dora_jax.bench.device [--stages=read,kernel,...] [--out=device.json] [--size=full] [--again]

Weights and prompts are random, nothing is read or downloaded; engine and trainer come from the assembly of a run, bf16
and with the kernels of its presets. Each stage runs in a process of its own, for eight minutes at most, and each
measurement is added to --out as soon as there is one: the same command goes on where it was cut off; a failure is an
entry and not tried again unless --again says so. --size=tiny goes through everything on a CPU and means nothing.
  read         reading 8 GiB, and a large bf16 matrix product: what the shares below are of
  kernel       paged attention alone, 64 ragged rows of up to 4k: the reference, ours, ours by block, span and stages
  flashinfer   the same by FlashInfer's own wrapper, where it and torch are installed
  decode-SIZE  the engine, 64 ragged rows of up to 4k: (weights + live KV bytes) / time of a step, of the read speed,
               with results read late and not; idle: the share of that time in which the device has nothing to do
  gap          |engine - trainer| log-probs in bf16, beside those of one bf16 forward pass against f32
  train-0.6B   an update by kernel and remat: the model's FLOPs over the time, of the matrix product's
  memory       trainer and engine of 0.6B on this device, with the pages that the plan leaves: their peak, and its
Targets on an H100 or H200: decode-0.6B and decode-8B read at 60 %, our kernel at 80 % of FlashInfer, training at 40 %
MFU, idle 2 % at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STAGES = ("read", "kernel", "flashinfer", "decode-0.6B", "decode-8B", "gap", "train-0.6B", "memory")
LIMIT_S = 480
DONE = "seconds of the stage"


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


def run(stages: list[str], out: Path, size: str, again: bool) -> None:
    """Each stage that is not done, in a process of its own."""
    for stage in stages:
        record = Record(out, stage)
        if again:
            record.forget(stage)
            out.write_text(json.dumps(record.entries))
        elif record.has(DONE):
            continue
        command = [sys.executable, "-m", "dora_jax.bench.device", f"--one={stage}", f"--out={out}", f"--size={size}"]
        began = time.perf_counter()
        try:
            code = subprocess.run(command, env=environment(), timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            Record(out, stage).add("stage", None, "failed", error=f"cut off after {LIMIT_S} s; the next run goes on")
            continue
        record = Record(out, stage)
        if code:
            record.add("stage", None, "failed", error=f"the process ended with code {code}")
        record.add(DONE, time.perf_counter() - began, "s")


def environment() -> dict[str, str]:
    """Of a stage: JAX may take nearly all of the device's memory, as a run's processes do."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "PYTHONUNBUFFERED": "1", **os.environ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of: {','.join(STAGES)}")
    parser.add_argument("--out", type=Path, default=Path("device.json"))
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--again", action="store_true", help="measure stages that are done once more")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        from dora_jax.bench import device_stages

        device_stages.run(args.one, Record(args.out, args.one), args.size)
        return
    stages = args.stages.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        parser.error(f"--stages: {', '.join(unknown)} is none of {', '.join(STAGES)}")
    run(stages, args.out, args.size, args.again)
    print(f"\n{args.out}:")
    for entry in Record(args.out).entries:
        print(line(entry))


if __name__ == "__main__":
    main()
