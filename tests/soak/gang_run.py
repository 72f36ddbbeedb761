"""A run of many processes on this machine, watched by what its console says. The programs of this folder strike at it.

Consumes a configuration, its overrides and a workdir, which is emptied first; produces the processes that are up, by
id, and at the end the books of the whole run. Law: however the page ends, the run is asked to stop and waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dora_jax.runtime.journal.journal_audit import audit

PATIENCE_S = 600.0
STEPS = 100_000  # it ends when the page has seen enough
OVERRIDES = (
    f"--config.steps={STEPS}",
    "--config.eval.every=0",
    "--config.cluster.elastic=True",
    "--config.journal.keep_all=True",
    "--config.journal.partial_s=0.2",
    "--config.checkpoint.every=5",
)
PROCESSES = ("--config.cluster.launcher=process",)

UP = re.compile(r"(trainer|rollout \d+) \(epoch (\d+)\) is up.*: pids ([\d, ]+)")
LOST = re.compile(r"(trainer|rollout \d+) \(epoch (\d+)\) (?:is lost|has left): (.*)")


@dataclasses.dataclass
class WatchedRun:
    """One workdir and the controller that works on it."""

    command: list[str]
    folder: Path
    process: subprocess.Popen = dataclasses.field(init=False)  # `start` makes it
    read: int = 0  # bytes of the console that have been looked at
    pids: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0
    back: int = 0  # times the trainer came back to its version
    slices: Any = None  # FakeSlices, where nodes are taken away

    def start(self) -> None:
        self.pids, self.lost = {}, {}
        with self.console.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    def look(self) -> None:
        """What has been printed since the last look."""
        with self.console.open("rb") as log:
            log.seek(self.read)
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self.read += len(text)
        for line in text.decode(errors="replace").splitlines():
            if up := UP.search(line):
                self.pids[up[1]] = [int(pid) for pid in up[3].split(",")]
                self.lost.pop(up[1], None)
            elif lost := LOST.search(line):
                self.lost[lost[1]] = lost[3]
                self.pids.pop(lost[1], None)
            self.steps += line.startswith("step ") and "reward" in line
            self.back += "the trainer is back at version" in line

    def wait(self, what: str, done: Callable[[], bool]) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while True:
            self.look()
            if done():
                return time.monotonic() - began
            if self.process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                raise RuntimeError(f"{what} did not come: {self.console.read_text()[-3000:]}")
            time.sleep(0.02)

    def ready(self, gangs: int) -> None:
        self.wait("all gangs", lambda: len(self.pids) == gangs)
        steps = self.steps
        self.wait("a step", lambda: self.steps > steps)


def new_parser(doc: str, workdir: str, gangs: int) -> argparse.ArgumentParser:
    """What every page over such a run takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gangs", type=int, default=gangs)
    parser.add_argument("--config", default="configs/quickstart.py:tiny")
    parser.add_argument("--workdir", type=Path, default=Path(workdir))
    parser.add_argument("overrides", nargs="*", help="after --: overrides of the configuration")
    return parser


@contextlib.contextmanager
def running(flags: argparse.Namespace, launcher: Sequence[str] = PROCESSES, slices: Any = None) -> Iterator[WatchedRun]:
    """The run, with all its gangs up."""
    shutil.rmtree(flags.workdir, ignore_errors=True)
    flags.workdir.mkdir(parents=True)
    run = WatchedRun(
        [
            sys.executable,
            "-m",
            "dora_jax.train",
            f"--config={flags.config}",
            f"--workdir={flags.workdir}",
            *OVERRIDES,
            f"--config.rollout.instances={flags.gangs - 1}",  # the other gang is the trainer
            *launcher,
            *flags.overrides,
        ],
        flags.workdir,
        slices=slices,
    )
    run.start()
    try:
        run.wait("all gangs", lambda: len(run.pids) == flags.gangs)
        yield run
    finally:
        run.process.terminate()
        run.process.wait(PATIENCE_S)


def settle(run: WatchedRun, notes: str) -> None:
    """The last line, with the books; ends the program."""
    books = audit(run.folder / "journal")
    print(f"{notes}; exit code {run.process.returncode}; {books}")
    sys.exit(0 if books.ok else 1)
