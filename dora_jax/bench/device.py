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

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.bench import harness


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


GIB = 2**30
SHAPES = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}  # query heads, KV heads, head size of Qwen3
PAGE = 64
SWEEP: tuple[dict[str, int], ...] = ({}, {"span": 256}, {"span": 1024}, {"span": 2048}, {"block": 32}, {"block": 128}, {"stages": 2}, {"stages": 5},
         {"warps": 8}, {"block": 128, "warps": 8}, {"span": 1024, "stages": 5})  # fmt: skip
READ = "read speed"
MATMUL = "bf16 matrix product"


def best_s(run: Callable[[], Any], calls: int = 10, rounds: int = 5) -> float:
    """Seconds of one call, the mean of calls that follow each other, in the best of some rounds."""
    import jax

    jax.block_until_ready(run())
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        out = [run() for _ in range(calls)]
        jax.block_until_ready(out[-1])
        taken.append((time.perf_counter() - began) / calls)
    return min(taken)


def read(record: Record, tiny: bool) -> None:
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    record.add("devices", len(jax.devices()), device.platform, note=f"{device.device_kind}, jax {jax.__version__}")
    rows, n = (2**10, 2**8) if tiny else (2**16, 2**13)
    x = jax.jit(lambda: (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), 1) % 251).astype(jnp.bfloat16))()
    with record.attempt(READ):
        times = [
            best_s(functools.partial(run, x))
            for run in (
                jax.jit(lambda x: x.sum(1, dtype=jnp.float32)),
                jax.jit(lambda x: x.max(1)),
                jax.jit(lambda x: x.max(0)),
            )
        ]
        record.add(READ, x.nbytes / min(times) / 1e9, "GB/s", note=f"{x.nbytes / GIB:.3g} GiB of bf16")
    with record.attempt("copy speed"):
        copy = jax.jit(lambda x: x + jnp.bfloat16(1))
        record.add(
            "copy speed", 2 * x.nbytes / best_s(functools.partial(copy, x)) / 1e9, "GB/s", note="read and written"
        )
    del x
    with record.attempt(MATMUL):
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (0, 1))
        product = jax.jit(jnp.matmul)
        record.add(MATMUL, 2 * n**3 / best_s(lambda: product(a, b)) / 1e12, "TFLOP/s", note=f"{n} x {n} x {n}")


# --------------------------------------------------------- paged attention


def paged_case(shape: tuple[int, int, int], rows: int, context: int, page: int) -> dict[str, np.ndarray]:
    """Tables and lengths of ragged rows; their pages lie in no order."""
    rng = np.random.default_rng(0)
    lens = rng.integers(1, context + 1, rows).astype(np.int32)
    tables = rng.permutation(np.arange(1, 1 + rows * (context // page), dtype=np.int32)).reshape(rows, -1)
    return {"lens": lens, "tables": tables}


def kv_bytes(case: dict[str, np.ndarray], shape: tuple[int, int, int]) -> int:
    """Of one layer, bf16: what the kernel has to read."""
    return int(case["lens"].sum()) * 2 * shape[1] * shape[2] * 2


def kernel(record: Record, tiny: bool) -> None:
    import jax
    import jax.numpy as jnp

    from dora_jax.ops import attention, paged_gpu

    rows, context, page = (4, 256, 16) if tiny else (64, 4096, PAGE)
    repeats = 1 if tiny else 20
    for name, (heads, kv, d) in {"tiny": (4, 2, 16)}.items() if tiny else SHAPES.items():
        case = paged_case((heads, kv, d), rows, context, page)
        lens, tables = jnp.asarray(case["lens"]), jnp.asarray(case["tables"])
        pool = jax.random.normal(jax.random.key(0), (int(tables.max()) + 1, page, 2 * kv, d), jnp.bfloat16)
        q = jax.random.normal(jax.random.key(1), (rows, 1, heads, d), jnp.bfloat16)
        needed = kv_bytes(case, (heads, kv, d))

        def measured(label: str, attend: Callable[..., Any], most: int) -> None:
            """Each call attends with what the one before gave, inside one program: no launch is in the time."""
            if record.has(label):
                return
            with record.attempt(label):
                chain = jax.jit(
                    lambda q, pool: jax.lax.fori_loop(0, most, lambda i, q: attend(q, pool, lens, tables, d**-0.5), q)
                )
                seconds = best_s(lambda: chain(q, pool), calls=2) / most
                share(record, label, needed, seconds)

        def ours(q, pool, lens, tables, scale, **options):
            return paged_gpu.paged_attention(q, pool, lens, tables, scale, interpret=tiny, **options)

        label = f"{name}: error of ours against the reference"
        with record.attempt(label):
            off = jnp.abs(
                ours(q, pool, lens, tables, d**-0.5).astype(jnp.float32)
                - attention.paged_reference(q, pool, lens, tables, d**-0.5).astype(jnp.float32)
            ).max()
            record.add(label, float(off), "largest", note="bf16, values near 1")
        measured(f"{name}: reference", attention.paged_reference, 1)  # a loop would gather the pages once
        for options in SWEEP[:1] if tiny else SWEEP:
            chosen = ", ".join(f"{key} {value}" for key, value in options.items())
            measured(f"{name}: ours{chosen and f', {chosen}'}", functools.partial(ours, **options), repeats)


def share(record: Record, label: str, needed_bytes: int, seconds: float) -> None:
    """Adds the time, and as what share of the read speed it reads what has to be read."""
    speed = record.value("read", READ)
    record.add(
        label,
        needed_bytes / seconds / 1e9 / speed if speed else None,
        "of read",
        note=f"{seconds * 1e6:.1f} us, {needed_bytes / 1e6:.1f} MB",
        seconds=seconds,
    )


def flashinfer(record: Record, tiny: bool) -> None:
    """FlashInfer reads [pages, 2, page_size, K, D]; its plan is made once, outside of the time."""
    missing = [name for name in ("torch", "flashinfer") if importlib.util.find_spec(name) is None]
    if tiny or missing:
        record.add("installed", 0, "skipped", note="tiny" if tiny else f"no {', '.join(missing)} here")
        return
    import flashinfer as rival
    import torch

    for name, (heads, kv, d) in SHAPES.items():
        case = paged_case((heads, kv, d), 64, 4096, PAGE)
        counts = -(-case["lens"] // PAGE)
        i32 = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
        pages = i32(np.concatenate([row[:n] for row, n in zip(case["tables"], counts, strict=True)]))
        bf16 = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        pool = bf16(int(case["tables"].max()) + 1, 2, PAGE, kv, d)
        q = bf16(64, heads, d)
        for tensor_cores in (True, False):
            label = f"{name}: FlashInfer, tensor cores {'on' if tensor_cores else 'off'}"
            with record.attempt(label):
                wrapper = rival.BatchDecodeWithPagedKVCacheWrapper(
                    torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=tensor_cores
                )
                wrapper.plan(
                    i32(np.concatenate([[0], np.cumsum(counts)])),
                    pages,
                    i32(case["lens"] - (counts - 1) * PAGE),
                    heads,
                    kv,
                    d,
                    PAGE,
                    q_data_type=torch.bfloat16,
                    kv_data_type=torch.bfloat16,
                )
                share(record, label, kv_bytes(case, (heads, kv, d)), _torch_s(lambda: wrapper.run(q, pool)))
                ours, theirs = record.value("kernel", f"{name}: ours"), record.entries[-1]["value"]
                if ours and theirs:
                    record.add(f"{label}: ours beside it", ours / theirs, "times", note="at least 0.8")


def _torch_s(run: Callable[[], Any], calls: int = 20, rounds: int = 5) -> float:
    """Seconds of one call on the device, the best of some rounds."""
    import torch

    run()
    taken = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3 / calls)
    return min(taken)


STAGES = ("read", "kernel", "flashinfer", "decode-0.6B", "decode-8B", "gap", "train-0.6B", "memory")
LIMIT_S = 480
DONE = "seconds of the stage"


def run(stages: Sequence[str], out: Path, size: str, again: bool) -> None:
    """Each stage that is not done, in a process of its own."""
    for stage in stages:
        record = Record(out, stage)
        if again:
            record.forget(stage)
            out.write_text(json.dumps(record.entries))
        elif record.has(DONE):
            continue
        command = [sys.executable, "-m", "dora_jax.bench.device_model", stage, str(out), size]
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
    args = harness.flags(__doc__, stages=STAGES, out=Path("device.json"), size=["full", "tiny"], again=False)
    if unknown := sorted(set(args.stages) - set(STAGES)):
        raise SystemExit(f"error: --stages: {', '.join(unknown)} is none of {', '.join(STAGES)}")
    run(args.stages, args.out, args.size, args.again)
    print(f"\n{args.out}:")
    for entry in Record(args.out).entries:
        print(line(entry))


if __name__ == "__main__":
    main()
