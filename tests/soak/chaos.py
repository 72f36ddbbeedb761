"""The real run, killed with SIGKILL again and again, then its books.

    python -m tests.soak.chaos [--kills=10] [--points=all|none|NAME,...] [--seed=0]
    [--config=configs/quickstart.py:tiny]
                               [--workdir=DIR] [--at_once=2] [--fresh]

Every incarnation is a process of its own that runs the same command: `python -m dora_jax.train`. To save the seconds
that a Python takes to import JAX, it is forked from one that has imported everything and begun nothing; --fresh starts
an interpreter for each incarnation, which is what the start-up time of a whole job is. Each named fault point
(tests/fakes/faults.py) kills one incarnation at its first or second pass; the random kills come up to RUN_S
after an incarnation has begun to take facts. A run that reaches its end before all kills are spent is audited, and the
next run begins. At the end every run is left alone until it is done. One row a run:
    issued = trained + filtered + failed + in flight; lost, trained twice, generated again: 0
and one SIGTERM per run, with the time until the process is gone and its exit code (42).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dora_jax.base.exits import RETRY
from dora_jax.cli import flags
from dora_jax.runtime.journal.journal_audit import audit
from tests.fakes import faults

RANDOM = "at random"
RUN_S = 3.0  # a random kill comes within so long after the journal's segment of this incarnation
START_S = 900.0  # an incarnation that has not begun by then is an error
STEPS = 24
PRELOADED = ("dora_jax.runtime.job", "reasoning_gym", "tensorboardX")  # what an incarnation imports before it begins
OVERRIDES = (  # segments are kept, so that the audit sees the first fact; checkpoints often, so that their points are met
    f"--config.steps={STEPS}",
    "--config.checkpoint.every=3",
    "--config.journal.keep_all=True",
    "--config.journal.partial_s=0.2",
    "--config.orchestrator.filter_zero_variance=False",
    "--config.trainer.updates=2",  # a step in parts, so that the point between them is met
    "--config.trainer.overlong_cache=64",
)  # answers differ in length: so every step has a gradient, and other weights


class Forked:
    """A process that imported everything before it began; what Popen offers of it."""

    _one_at_a_time = threading.Lock()  # a start asks for every process's exit code too, and a code can be read once

    def __init__(self, command: list[str], dies_at: str, log: Path):
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_live, args=(command, dies_at, str(log))
        )
        with self._one_at_a_time:
            self._process.start()

    @property
    def returncode(self) -> int | None:
        with self._one_at_a_time:
            return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        ends = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if time.monotonic() > ends:
                raise subprocess.TimeoutExpired("an incarnation", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _live(command: list[str], dies_at: str, log: str) -> None:
    """`python -m COMMAND` in this process."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faults.arm(dies_at)
    sys.argv = command
    from dora_jax import train

    flags.run(train.main)


@dataclasses.dataclass
class ChaosRun:
    """One workdir and the processes that worked on it."""

    folder: Path
    config: str
    fresh: bool = False  # an interpreter for each incarnation
    overrides: tuple[str, ...] = OVERRIDES
    incarnations: int = 0
    kills: int = 0
    start_s: list[float] = dataclasses.field(default_factory=list)  # until the journal takes facts
    points: list[str] = dataclasses.field(default_factory=list)  # at which it was killed
    ok: bool = False

    def start(self, dies_at: str = "") -> subprocess.Popen | Forked:
        self.incarnations += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["dora_jax.train", f"--config={self.config}", f"--workdir={self.folder}", *self.overrides]
        if not self.fresh:
            return Forked(command, dies_at, self.folder / "console.log")
        with (self.folder / "console.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.faults", *command],
                env={**os.environ, "DORA_FAULT": dies_at},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def segments(self) -> int:
        """Begun so far."""
        return len(list((self.folder / "journal").glob("*.log")))

    def wait_for_facts(self, process: subprocess.Popen | Forked, before: int) -> bool:
        """Until this incarnation has its own segment; False where it ended first."""
        began = time.monotonic()
        while self.segments() == before:
            if process.poll() is not None:
                return False
            if time.monotonic() - began > START_S:
                raise RuntimeError(f"an incarnation has not begun within {START_S:.0f} s: {self.tail()}")
            time.sleep(0.02)
        self.start_s.append(time.monotonic() - began)
        return True

    def tail(self) -> str:
        return (self.folder / "console.log").read_text()[-8000:]

    # ------------------------------------------------------------ incarnations

    def run_with_kill_after(self, delay_s: float) -> bool:
        """True where the run reached its end first."""
        before, process = self.segments(), self.start()
        if self.wait_for_facts(process, before):
            try:
                process.wait(delay_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        return self._ended(process)

    def run_with_fault(self, name: str, passes: int) -> bool:
        return self._ended(self.start(f"{name}:{passes}"))

    def run_with_sigterm(self, delay_s: float) -> tuple[float, int | None]:
        """(seconds until it was gone, exit code)."""
        before, process = self.segments(), self.start()
        if not self.wait_for_facts(process, before):
            return 0.0, self._code(process)
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        return (process.wait(START_S), time.monotonic() - began)[1], process.returncode

    def run_to_the_end(self) -> None:
        if not self._ended(self.start()):
            raise RuntimeError("a process that this program did not kill was killed")

    def _ended(self, process: subprocess.Popen | Forked) -> bool:
        code = self._code(process)
        if code == -signal.SIGKILL:
            self.kills += 1
            return False
        if code != 0:
            raise RuntimeError(f"an incarnation ended with exit code {code}: {self.tail()}")
        return True

    def _code(self, process: subprocess.Popen | Forked) -> int:
        return process.wait(START_S)


def main() -> None:
    args = _arguments()
    draw = random.Random(args.seed)
    passed = [
        point for point in faults.POINTS if not point.startswith(("chips.", "rollout."))
    ]  # no chips are lent, no drafts made
    points = passed if args.points == "all" else [p for p in args.points.split(",") if p != "none"]
    kills = [(RANDOM, 0)] * args.kills + [(name, draw.randint(1, 2)) for name in points]
    draw.shuffle(kills)
    prepare(args.workdir)
    print(f"{len(kills)} kills: {args.kills} at random, one at each of {len(points)} points")
    print(f"{'run':>3} {'starts':>6} {'kills':>5} {'stop s':>6} {'code':>4} {'start s':>7}  books", flush=True)
    numbers, runs = itertools.count(), []

    def work() -> None:
        while kills:
            runs.append(_one_run(next(numbers), kills, args, draw))

    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        for future in [pool.submit(work) for _ in range(args.at_once)]:
            future.result()
    starts = sorted(s for run in runs for s in run.start_s)
    print(
        f"{len(runs)} runs, {sum(run.incarnations for run in runs)} incarnations, {sum(run.kills for run in runs)} kills, of which "
        f"{sum(len(run.points) for run in runs)} at {len({p for run in runs for p in run.points})} points; a start "
        f"takes {starts[len(starts) // 2]:.1f} s (median), up to {starts[-1]:.1f} s"
    )
    sys.exit(0 if all(run.ok for run in runs) else 1)


def prepare(folder: Path) -> None:
    """For incarnations that work below `folder`: they share what they compile, so that a restart costs seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DORA_COMPILE_CACHE", str(folder / "cache"))
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # it tells what killed incarnations have left open
    multiprocessing.set_forkserver_preload(list(PRELOADED))


def _one_run(number: int, kills: list, args: argparse.Namespace, draw: random.Random) -> ChaosRun:
    """One workdir until its end; takes what it can of `kills`, and gives back what did not come to pass."""
    folder = args.workdir / f"run{number}"
    base = folder / "base"  # its own: runs at once would make one in the same place
    run = ChaosRun(
        folder, args.config, args.fresh, (*OVERRIDES, f"--config.model.path={base}", f"--config.sft.out={base}")
    )
    shutil.rmtree(run.folder, ignore_errors=True)
    ended, stop_s, code = False, 0.0, None
    while kills and not ended:
        what, passes = kills.pop()
        spent = run.kills
        ended = run.run_with_kill_after(draw.uniform(0, RUN_S)) if what is RANDOM else run.run_with_fault(what, passes)
        if run.kills == spent:  # a point once more in an incarnation that follows another
            kills += [(RANDOM, 0)] if what is RANDOM else [(what, 1), (RANDOM, 0)]
        elif what is not RANDOM:
            run.points.append(what)
        if code is None and not ended:
            stop_s, code = run.run_with_sigterm(draw.uniform(0, RUN_S))
    if not ended:
        run.run_to_the_end()
    books = audit(run.folder / "journal")
    run.ok = books.ok and books.epochs == 1 and books.weights == STEPS and code in (None, RETRY, 0)
    starts = f"{sorted(run.start_s)[len(run.start_s) // 2]:.1f}" if run.start_s else "-"
    print(
        f"{number:>3} {run.incarnations:>6} {run.kills:>5} {stop_s:>6.1f} {code if code is not None else '-':>4} {starts:>7}  "
        f"{books}",
        flush=True,
    )
    return run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--points", default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="configs/quickstart.py:tiny")
    parser.add_argument("--workdir", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--at_once", type=int, default=2)  # runs
    return parser.parse_args()


if __name__ == "__main__":
    main()
