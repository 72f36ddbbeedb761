"""Are runs that were killed the same, bit for bit, as runs that were not?

    python -m tests.soak.exact [--steps=12] [--cuts=5] [--seed=0] [--config=configs/quickstart.py:tiny] [--workdir=DIR]

sync: N steps straight against k steps, a kill, and N - k by the same command, at `cuts` random k and fault points of
the trainer. Compared: every array of the last checkpoint (parameters and optimizer), the weights' digest of every
version, and every metric but those of time and of where samples ran.
async: a run in mode dora; then its checkpoints are taken away and the same command makes all of its steps again from
the journal. Compared: every array of the last checkpoint, and the digest of every version.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from tests.soak.chaos import OVERRIDES, ChaosRun, prepare

POINTS = ("trainer.before_step", "trainer.after_step", "trainer.after_put")
TIMED = (  # metrics of time, of where samples ran, and of what a new process does once more or has not seen
    "groups/filtered_share",
    "time/",
    "seconds/",
    "rollout/",
    "trainer/wait_s",
    "trainer/step_s",
    "trainer/tokens_per_s",
    "trainer/mfu",
    "versions/side_by_side_share",
    "moves/",
    "reloads/",
    "waits",
)


def main() -> None:
    args = _arguments()
    prepare(args.workdir)
    draw = random.Random(args.seed)
    print(f"{'mode':5} {'killed at':32} {'arrays':>6} {'bytes':>9} {'digests':>7} {'metrics':>7}  different")
    differences = _sync(args, draw) + _async(args)
    sys.exit(1 if differences else 0)


def _sync(args: argparse.Namespace, draw: random.Random) -> int:
    straight = _run(args, "straight", "sync")
    straight.run_to_the_end()
    found = 0
    for cut, step in enumerate(sorted(draw.sample(range(1, args.steps + 1), args.cuts))):
        run, point = _run(args, f"cut{cut}", "sync"), POINTS[cut % len(POINTS)]
        if run.run_with_fault(point, step):
            raise RuntimeError(f"{point} was not passed {step} times")
        run.run_to_the_end()
        found += _compare("sync", f"{point}, step {step} of {args.steps}", straight.folder, run.folder, args.steps)
    return found


def _async(args: argparse.Namespace) -> int:
    first, again = _run(args, "dora", "dora"), _run(args, "again", "dora")
    first.run_to_the_end()
    shutil.copytree(first.folder, again.folder)
    shutil.rmtree(again.folder / "checkpoints")
    again.run_to_the_end()
    return _compare("dora", f"all {args.steps} steps from the journal", first.folder, again.folder, args.steps)


def _run(args: argparse.Namespace, name: str, mode: str) -> ChaosRun:
    folder = args.workdir / name
    shutil.rmtree(folder, ignore_errors=True)
    return ChaosRun(
        folder,
        args.config,
        overrides=(*OVERRIDES, f"--config.steps={args.steps}", f"--config.orchestrator.mode={mode}"),
    )


def _compare(mode: str, what: str, one: Path, other: Path, steps: int) -> int:
    """Prints a row; the number of differences."""
    different = []
    mine, theirs = (dict(_arrays(folder / "checkpoints" / str(steps))) for folder in (one, other))
    different += [
        name
        for name in mine.keys() | theirs.keys()
        if name not in mine or name not in theirs or mine[name].tobytes() != theirs[name].tobytes()
    ]
    digests = [_digests(folder) for folder in (one, other)]
    if digests[0] != digests[1] or len(set(digests[0].values())) != steps:
        different.append("digests")
    metrics = [_metrics(folder) for folder in (one, other)]
    values = sum(map(len, metrics[0].values()))
    if metrics[0] != metrics[1]:
        different += [
            f"metrics of step {step}"
            for step in sorted(metrics[0].keys() | metrics[1].keys())
            if metrics[0].get(step) != metrics[1].get(step)
        ]
    print(
        f"{mode:5} {what:32} {len(mine):>6} {sum(x.nbytes for x in mine.values()):>9} {len(digests[0]):>7} {values:>7} "
        f" {', '.join(different) or 'nothing'}",
        flush=True,
    )
    return len(different)


def _arrays(step: Path) -> list[tuple[str, np.ndarray]]:
    """Parameters and optimizer state, by name."""
    import jax

    from dora_jax.trainer import checkpoint

    trees = {item: checkpoint.read_arrays(step.parent, int(step.name), item) for item in ("params", "opt_state")}
    return [(jax.tree_util.keystr(key), np.asarray(x)) for key, x in jax.tree_util.tree_leaves_with_path(trees)]


def _digests(folder: Path) -> dict[int, int]:
    """Version -> digest of its weights, as they were published."""
    journal = EventLog(FileLogStore(folder / "journal", read_only=True))
    steps = replay(journal, journal.segments(), lambda sentence: None).steps
    return {step.base + 1: step.published.digest for step in steps}


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    known: dict[int, dict[str, Any]] = {}
    for row in rows:
        known.setdefault(row["step"], {}).update({k: v for k, v in row.items() if not k.startswith(TIMED)})
    return known


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="configs/quickstart.py:tiny")
    parser.add_argument("--workdir", type=Path, default=Path("runs/exact"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
