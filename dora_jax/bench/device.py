"""What one GPU does with the calls of a run: its speed of light, the kernels, decoding, the gap, training, memory.

    python -m dora_jax.bench.device [--stages=read,kernel,...] [--out=device.json] [--size=full] [--again]

Weights and prompts are random, nothing is read or downloaded; engine and trainer come from the assembly of a run, bf16
and with the kernels of its presets. Each stage runs in a process of its own, for eight minutes at most. Each
measurement goes to --out at once, so the same command goes on where it was cut off; a failure is an entry, and only
--again tries it again. --size=tiny goes through everything on a CPU and means nothing.
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
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from dora_jax.bench.device_record import Record, line

STAGES = ("read", "kernel", "flashinfer", "decode-0.6B", "decode-8B", "gap", "train-0.6B", "memory")
LIMIT_S = 480
DONE = "seconds of the stage"


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
