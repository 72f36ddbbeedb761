"""Many simulations side by side: the cores of this machine, one process each; what several seeds of a row add up to."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dora_jax.sim.config import Row, replace
from dora_jax.sim.meter import Result
from dora_jax.sim.run import simulate

Job = TypeVar("Job")
Answer = TypeVar("Answer")


class RowResults(NamedTuple):
    """One row, over its seeds."""

    row: Row
    results: list[Result]
    seconds: float  # of computing

    @property
    def mean(self) -> Result:
        """Every figure the mean of the seeds' figures; a lag that a seed does not have counts as none."""
        names = [field.name for field in dataclasses.fields(Result)]
        return Result(**{name: _mean([getattr(result, name) for result in self.results]) for name in names})

    def spread(self, figure: Callable[[Result], float]) -> float:
        """Standard deviation over the seeds; 0 for one."""
        return statistics.stdev(map(figure, self.results)) if len(self.results) > 1 else 0.0


def run_rows(rows: Sequence[Row], seeds: int) -> Iterator[RowResults]:
    """In the order of `rows`, each with `seeds` seeds from its own on."""
    jobs = []
    for row in rows:
        seed = row.config.workload.seed
        configs = (replace(row.config, {"workload.seed": seed + i}) for i in range(seeds))
        jobs += [dataclasses.replace(row, config=config) for config in configs]
    answers = each(_timed, jobs)
    for row in rows:
        results, seconds = zip(*(next(answers) for _ in range(seeds)), strict=True)
        yield RowResults(row, list(results), sum(seconds))


def each(function: Callable[[Job], Answer], jobs: Sequence[Job]) -> Iterator[Answer]:
    """`function` of every job, in order; several at a time where there are several jobs and cores."""
    workers = min(len(os.sched_getaffinity(0)), len(jobs))
    if workers < 2:
        yield from map(function, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _end_with_the_parent) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------- private


def _end_with_the_parent() -> None:
    """End a worker with its parent: a signal that ends the parent, or Ctrl-C, which both get, ends it as well, without
    a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def outlive() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=outlive, daemon=True).start()


def _timed(row: Row) -> tuple[Result, float]:
    began = time.process_time()
    return simulate(row), time.process_time() - began


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        keys = (
            sorted({key for value in values for key in value}) if isinstance(next(iter(values[0])), int) else values[0]
        )
        return {key: statistics.fmean(value.get(key, 0.0) for value in values) for key in keys}
    return max(values) if isinstance(values[0], int) else statistics.fmean(values)
