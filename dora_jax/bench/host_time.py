"""Host time of a rollout instance: what the plan, the commit and the reports of a tick cost beside the device's work.

    python -m dora_jax.bench.host_time [--rows=256] [--contexts=2048,30720] [--pages=16,64] [--steps=8] [--ticks=60]
                                         [--partial_s=2] [--instances=1] [--step_ms=0]

The engine is the one that `train` assembles, with a device in its place that answers at once: every row samples
`steps` tokens in every call. Rows stand just below the context, each at a position of its own. `plan`, `commit` and
`rest` (launches, page uploads, the tick's result) are milliseconds of a tick; `us` is their sum by row and step; all
are medians. `report` is what one report of all rows' new tokens costs, each partial_s, in milliseconds.
With --instances=N: N instances on threads of one process for a few seconds; `tokens/s` is what all of them commit,
reports included, and so the most that one interpreter lock lets through; `core` is what the process uses of one core.
With --step_ms as well a decode step takes so long, during which the host is free and results are read one call behind
(rollout.late_results); `idle` is the share of the time in which a device waits for its host.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dora_jax.bench import harness
from dora_jax.config import Config, RolloutSection
from dora_jax.models import decoder
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.types import SampleId

NOTHING: Any = None  # where an engine that computes nothing needs nothing
MODEL = decoder.new_config("qwen3", vocab_size=64, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=8)
GROUP = 8
TOKEN = 5  # what every row samples
WINDOW_S = 3.0  # of a measurement with several instances


class Pending:
    """A result that is there at a time."""

    def __init__(self, data: np.ndarray, due_s: float):
        self._data, self._due_s = data, due_s

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return self._data


class InstantDevice:
    """A `device.Device` that computes nothing; a call takes `call_s`, after the one before."""

    def __init__(self, engine: Engine, call_s: float = 0.0):
        self._call_s = call_s
        self.idle_s = 0.0  # between calls
        self._due_s: float | None = None
        s = self.shapes = engine.shapes
        self.compiled = lambda: 0
        self._result = np.zeros((s.rows, s.result), np.int32)
        self._result[:, : s.steps] = TOKEN
        self._result[:, s.steps : 2 * s.steps] = np.float32(-1).view(np.int32)
        self._result[:, 2 * s.steps] = s.steps

    def forget(self) -> None:
        """What comes next is its first call."""
        self.idle_s, self._due_s = 0.0, None

    def prefill(self, params: Any, control: np.ndarray, blocks: int) -> None:
        """Nothing to compute."""

    def generate(self, params: Any, control: np.ndarray, blocks: int) -> tuple[np.ndarray | Pending, None]:
        if not self._call_s:
            return self._result, None
        now_s = time.perf_counter()
        begins_s = max(now_s, self._due_s or now_s)
        self.idle_s += begins_s - (self._due_s or now_s)
        self._due_s = begins_s + self._call_s
        return Pending(self._result, self._due_s), None


@dataclasses.dataclass(frozen=True)
class HostTime:
    """Milliseconds of a tick, and of a report."""

    plan: float
    commit: float
    rest: float
    report: float


def new_worker(instance: int, args: argparse.Namespace, context: int, page: int) -> EngineWorker:
    """An instance whose slots all decode, at positions up to `context`."""
    rows, steps = args.rows, args.steps
    spare = (args.ticks + 8) * steps
    chunk = context // 4  # few and large ones, all in the first tick: prefill is not what is timed
    rollout = RolloutSection(
        slots=rows,
        pages=rows * (context + spare) // page + 2 * rows,
        page_size=page,
        max_prompt_tokens=chunk,
        max_new_tokens=context + spare - chunk,
        decode_steps=steps,
        prefill_tokens=rows * 2 * context,
        prefill_chunk=chunk,
        late_results="on" if args.step_ms else "off",
    )
    config = presets.filled(Config(rollout=rollout))
    engine = build.engine_of(config, MODEL, harness.one_device(), eos_ids=(1,))
    engine.device = InstantDevice(engine, args.step_ms * 1e-3 * steps)  # type: ignore[assignment]
    engine.load(0, decoder.serving_layout(decoder.init_params(MODEL, 0)))
    worker = EngineWorker(instance, engine, NOTHING, queue.SimpleQueue(), args.partial_s)
    for i in range(rollout.slots):
        n = context - rollout.max_prompt_tokens - i * rollout.decode_steps % 128
        worker.receive(
            InFlightSample(
                id=SampleId(i // GROUP, i % GROUP),
                version=0,
                out_ids=np.full(n, TOKEN, np.int32),
                prompt_ids=np.arange(rollout.max_prompt_tokens, dtype=np.int32) + i // GROUP,
                logprobs=np.full(n, -1, np.float32),
                max_new_tokens=rollout.max_new_tokens,
            ),
            1,
            NOTHING,
        )
    while len(engine.tick().progress) < rollout.slots:
        pass
    return worker


def measured(worker: EngineWorker, ticks: int) -> HostTime:
    engine: Any = worker.engine
    spent: dict[str, list[float]] = {"plan": [], "commit": []}

    def timed(owner: Any, name: str, into: list[float]) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def clocked(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            into.append(time.perf_counter() - began)
            return result

        setattr(owner, name, clocked)

    timed(engine.scheduler, "plan", spent["plan"])
    timed(engine, "_commit", spent["commit"])
    whole = []
    for _ in range(ticks):
        began = time.perf_counter()
        engine.tick()
        whole.append(time.perf_counter() - began)
    worker.work()  # all rows have grown
    worker._partials_s = worker._reported_s = 0.0
    began = time.perf_counter()
    worker.work()
    report = time.perf_counter() - began - statistics.median(whole)
    plan, commit, tick = (1e3 * statistics.median(times) for times in (spent["plan"], spent["commit"], whole))
    return HostTime(plan=plan, commit=commit, rest=tick - plan - commit, report=1e3 * report)


@dataclasses.dataclass(frozen=True)
class Rate:
    """Of several instances in one process."""

    tokens_s: float
    core: float  # share of one core's time
    idle: float  # share of the time, mean over the devices


def device_of(worker: EngineWorker) -> InstantDevice:
    engine: Any = worker.engine  # one of `worker_of`
    return engine.device


def together(workers: list[EngineWorker], ticks: int) -> Rate:
    """Each on a thread of its own, while one thread takes what they report."""
    over = threading.Event()

    def run(worker: EngineWorker) -> None:
        for _ in range(ticks):
            if over.is_set():
                return
            worker.work()

    def sums() -> tuple[float, float, float, float]:
        idle_s = statistics.mean(device_of(worker).idle_s for worker in workers)
        return time.perf_counter(), sum(worker.tokens for worker in workers), time.process_time(), idle_s

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for worker in workers:
        device_of(worker).forget()
    before = sums()
    for thread in threads:
        thread.start()
    while time.perf_counter() - before[0] < WINDOW_S and all(thread.is_alive() for thread in threads):
        for worker in workers:
            outbox: Any = worker.outbox
            while not outbox.empty():
                outbox.get()
        time.sleep(0.01)
    took_s, tokens, cpu_s, idle_s = (after - start for start, after in zip(before, sums(), strict=True))
    over.set()
    for thread in threads:
        thread.join()
    return Rate(tokens_s=tokens / took_s, core=cpu_s / took_s, idle=idle_s / took_s)


def table(args: argparse.Namespace) -> Iterator[str]:
    several = args.instances > 1
    yield f"{args.rows} rows, {args.steps} steps a call, {args.instances} instance{'s' * several}"
    yield f"{'context':>8s}{'page':>6s}" + (
        f"{'tokens/s':>12s}{'core':>7s}{'idle':>7s}"
        if several
        else f"{'plan':>8s}{'commit':>8s}{'rest':>8s}{'us':>8s}{'report':>9s}"
    )
    for context in args.contexts:
        for page in args.pages:
            workers = [new_worker(i, args, context, page) for i in range(args.instances)]
            line = f"{context:8d}{page:6d}"
            if several:
                rate = together(workers, args.ticks)
                yield line + f"{rate.tokens_s:12.0f}{rate.core:7.0%}{rate.idle:7.1%}"
            else:
                row = measured(workers[0], args.ticks)
                us = 1e3 * (row.plan + row.commit + row.rest) / args.rows / args.steps
                yield line + f"{row.plan:8.2f}{row.commit:8.2f}{row.rest:8.2f}{us:8.2f}{row.report:9.2f}"


def main() -> None:
    args = harness.flags(__doc__, rows=256, contexts=(2048, 30720), pages=(16, 64), steps=8, ticks=60, partial_s=2.0,
                         instances=1, step_ms=0.0)  # fmt: skip
    for line in table(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
