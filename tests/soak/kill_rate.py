"""What a run of many processes still trains when one of its rollout processes is killed every so often.

    python -m tests.soak.kill_rate [--every_s=60] [--phase_s=120] [--pairs=2] [--seed=0] [--workdir=DIR] [--gangs=4]
                                   [--config=configs/quickstart.py:tiny] [-- --config.field=value ...]

One run; its time is cut into phases of `phase_s`, in turn without and with kills (the order turns round from pair to
pair). In a phase with kills one process of one rollout gang, drawn at random, gets a SIGKILL at its start and every
`every_s` from then on. One row a phase: steps that ended in it, trained tokens a second, kills, and the seconds from a
kill until its gang was up again. At the end the share of the undisturbed rate that is left, and the books of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import statistics
import time
from pathlib import Path

from tests.soak.gang_run import WatchedRun, new_parser, running, settle

LOOK_S = 0.2


@dataclasses.dataclass
class Phase:
    kills: bool
    tokens: float = 0.0  # trained
    steps: int = 0
    struck: int = 0
    seconds: float = 0.0
    back_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Trained:
    """The tokens of each step that is new in metrics.jsonl."""

    def __init__(self, folder: Path):
        self._file = folder / "metrics.jsonl"
        self._read = 0
        section = json.loads((folder / "config.json").read_text())["orchestrator"]
        self._samples = section["groups_per_step"] * section["group_size"]

    def take(self) -> list[float]:
        with self._file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        rows = [row for row in map(json.loads, data.splitlines()) if "trainer/step_s" in row]
        return [row["response/length"] * self._samples for row in rows]


def main() -> None:
    args = _arguments()
    draw = random.Random(args.seed)
    phases: list[Phase] = []
    print(f"{'phase':>5} {'kills':>5} {'s':>6} {'steps':>5} {'tokens/s':>9}  back after s", flush=True)
    with running(args) as run:
        run.ready(args.gangs)
        trained = Trained(args.workdir)
        for pair in range(args.pairs):
            for kills in (pair % 2 == 1, pair % 2 == 0):
                run.wait("all gangs", lambda: len(run.pids) == args.gangs)
                phases.append(_phase(run, trained, kills, args, draw))
                _notify(len(phases), phases[-1])
    quiet, struck = ([phase.rate for phase in phases if phase.kills == kills] for kills in (False, True))
    share = [b / a for a, b in zip(quiet, struck, strict=True)]
    settle(
        run,
        f"{100 * sum(struck) / sum(quiet):.1f} % of the undisturbed rate; pairs: "
        f"{', '.join(f'{100 * x:.1f}' for x in share)} %",
    )


def _phase(run: WatchedRun, trained: Trained, kills: bool, args: argparse.Namespace, draw: random.Random) -> Phase:
    phase = Phase(kills)
    struck: dict[str, tuple[float, list[int]]] = {}  # gang -> when, and its processes
    trained.take()
    began = last = time.monotonic()
    next_s = began if kills else float("inf")
    while last - began < args.phase_s:
        run.look()
        for gang in [gang for gang in struck if gang in run.pids and run.pids[gang] != struck[gang][1]]:
            phase.back_s.append(time.monotonic() - struck.pop(gang)[0])
        up = sorted(gang for gang in run.pids if gang.startswith("rollout"))
        if time.monotonic() >= next_s and up:  # else all are on their way back: the next one that is up
            gang = draw.choice(up)
            struck[gang] = time.monotonic(), run.pids[gang]
            os.kill(draw.choice(run.pids[gang]), signal.SIGKILL)
            next_s += args.every_s
            phase.struck += 1
        if run.process.poll() is not None:
            raise RuntimeError(f"the run ended: {run.console.read_text()[-3000:]}")
        time.sleep(LOOK_S)
        steps, last = trained.take(), time.monotonic()
        phase.steps += len(steps)
        phase.tokens += sum(steps)
    phase.seconds = last - began
    return phase


def _notify(number: int, phase: Phase) -> None:
    back = f"median {statistics.median(phase.back_s):.1f}, up to {max(phase.back_s):.1f}" if phase.back_s else ""
    print(
        f"{number:>5} {phase.struck:>5} {phase.seconds:>6.1f} {phase.steps:>5} {phase.rate:>9.0f}  {back}", flush=True
    )


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, "runs/kill_rate", gangs=4)
    parser.add_argument("--every_s", type=float, default=60.0)
    parser.add_argument("--phase_s", type=float, default=120.0)
    parser.add_argument("--pairs", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
