"""Bits flipped and files cut in what a real run left on the disk: is every one noticed, or harmless?

    python -m dora_jax.bench.damage [--faults=500] [--resumes=4] [--seed=0] [--config=configs/quickstart.py:tiny] [--workdir=DIR]

A run of STEPS steps is made and killed on the way. Then, `faults` times each, one bit of one file is flipped, or the file
is cut at a random byte, and put back afterwards:
    checkpoint   noticed: the newest step no longer verifies and an older one takes its place; else what is restored must
                 be the same bit for bit
    journal      noticed: recovery says so and begins from what it can trust, which must be a part of the true history
                 (batches and weights of every step, samples that have ended); else it must give exactly the true state
At last `resumes` damaged copies are run to their end by the same command. One row each.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
from pathlib import Path

import numpy as np
from absl import logging

from dora_jax import validate, workdirs
from dora_jax.bench.chaos import OVERRIDES, ChaosRun, prepare
from dora_jax.runtime.durability.event_log import EventLog
from dora_jax.runtime.durability.log_stores import FileLogStore, JournalError
from dora_jax.runtime.durability.records import CODEC
from dora_jax.runtime.durability.recovery import Recovered, recover
from dora_jax.runtime.run import orchestrator_config
from dora_jax.trainer import checkpoint

STEPS = 12
KILLED_AT = 11  # a step: what a kill leaves behind has samples under way


def main() -> None:
    args = _arguments()
    logging.set_verbosity(logging.ERROR)  # what is noticed is counted here
    prepare(args.workdir)
    shutil.rmtree(args.workdir / "run", ignore_errors=True)
    run = _new_run(args.workdir / "run", args.config)
    if run.life_with_fault("trainer.after_put", KILLED_AT):
        raise RuntimeError("the run was not killed")
    draw = random.Random(args.seed)
    print(f"{'what':10} {'faults':>6} {'bytes':>9} {'noticed':>7} {'harmless':>8} {'wrong':>5}  where")
    wrong = _row("checkpoint", _Checkpoint(run.folder / "checkpoints"), args.faults, draw)
    wrong += _row("journal", _Journal(run.folder / "journal"), args.faults, draw)
    for i in range(args.resumes):
        wrong += _resume(run, args.workdir / f"resume{i}", i, draw)
    sys.exit(1 if wrong else 0)


def _new_run(folder: Path, config: str) -> ChaosRun:
    return ChaosRun(folder, config, overrides=(*OVERRIDES, f"--config.steps={STEPS}", "--config.checkpoint.keep=9"))


def _row(what: str, subject: _Checkpoint | _Journal, faults: int, draw: random.Random) -> int:
    counts: collections.Counter[str] = collections.Counter()
    sizes = [f.stat().st_size for f in subject.files]
    for i in range(faults):  # any byte, and every other time any file: small ones describe the large
        path = draw.choices(subject.files, sizes if i % 2 else None)[0]
        content = path.read_bytes()
        path.write_bytes(damaged(content, draw))
        counts[subject.verdict()] += 1
        path.write_bytes(content)
    size = sum(f.stat().st_size for f in subject.files)
    print(
        f"{what:10} {faults:>6} {size:>9} {counts['noticed']:>7} {counts['harmless']:>8} {counts['wrong']:>5}  "
        f"{len(subject.files)} files",
        flush=True,
    )
    return counts["wrong"]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One bit is another, or the end is missing."""
    at = draw.randrange(len(content))
    if draw.random() < 0.25:
        return content[:at]
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


class _Checkpoint:
    """The newest step of a folder with several."""

    def __init__(self, folder: Path):
        self._folder = folder
        *_, self._second, self._newest = checkpoint.steps(folder)
        self.files = sorted(
            path for path in (folder / str(self._newest)).rglob("*") if path.stat().st_size and path.is_file()
        )
        self._true = self._read()

    def verdict(self) -> str:
        if checkpoint.verify(self._folder, self._newest, full=True) is not None:
            return "noticed" if checkpoint.latest(self._folder, full=True) == self._second else "wrong"
        return "harmless" if self._read() == self._true else "wrong"

    def _read(self) -> list[bytes]:
        import jax

        trees = [checkpoint.read_arrays(self._folder, self._newest, item) for item in ("params", "opt_state")]
        texts = [checkpoint.read_json(self._folder, self._newest, item) for item in ("rl_state", "metrics")]
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(trees)] + [repr(text).encode() for text in texts]


class _Journal:
    def __init__(self, folder: Path):
        self._folder = folder
        self.files = sorted(folder.glob("*.log"))
        self._checkpoints = [0, *checkpoint.steps(folder.parent / "checkpoints")]
        self._config = orchestrator_config(validate.from_config_dict(workdirs.read(folder.parent), "evaluate"))
        (true, _), (whole, _) = self._recover(), self._recover([0])
        assert true is not None and whole is not None, "the undamaged journal is whole"
        self._true = true
        self._steps = _bytes_of(whole)
        self._state = self._state_of(self._true)

    def verdict(self) -> str:
        try:
            found, said = self._recover()
        except JournalError as error:  # the run then begins at its newest checkpoint, which is said
            return "noticed" if len(str(error)) > 10 else "wrong"
        if found is None or not self._is_history(found):
            return "wrong"
        if said:
            return "noticed"
        return "harmless" if self._state_of(found) == self._state else "wrong"

    def _recover(self, checkpoints: list[int] | None = None) -> tuple[Recovered | None, list[str]]:
        said: list[str] = []
        journal = EventLog(FileLogStore(self._folder, read_only=True))
        return recover(journal, self._config, checkpoints or self._checkpoints, lambda version: True, said.append), said

    def _is_history(self, found: Recovered) -> bool:
        """Its steps are true ones, and lead from its checkpoint to where it goes on."""
        steps = _bytes_of(found)
        return (
            all(self._steps[base] == step for base, step in steps.items())
            and found.base <= self._true.base
            and list(steps) == list(range(found.start, found.base))
        )

    def _state_of(self, found: Recovered) -> tuple:
        return found.orchestrator.snapshot(), [CODEC.encode(item) for item in found.payloads.records()], found.base


def _bytes_of(found: Recovered) -> dict[int, bytes]:
    """Base -> the batch and the digest that was published."""
    return {step.base: CODEC.encode(step.published) + b"".join(map(CODEC.encode, step.groups)) for step in found.steps}


def _resume(run: ChaosRun, folder: Path, number: int, draw: random.Random) -> int:
    """A damaged copy goes on to its end; its newest checkpoint and its newest segment are hit."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run.folder, folder)
    newest = folder / "checkpoints" / str(checkpoint.steps(folder / "checkpoints")[-1])
    victims = [
        max(newest.rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size),
        max((folder / "journal").glob("*.log")),
    ]
    for path in victims:
        path.write_bytes(damaged(path.read_bytes(), draw))
    again = _new_run(folder, run.config)
    before = len((folder / "console.log").read_text())
    again.life_to_the_end()
    said = [
        line
        for line in (folder / "console.log").read_text()[before:].splitlines()
        if "resuming" in line or "trusted" in line or "not read" in line
    ]
    ok = checkpoint.latest(folder / "checkpoints", full=True) == STEPS
    print(f"resume {number}: {'reached its end' if ok else 'WRONG'}; " + "; ".join(said), flush=True)
    return not ok


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--resumes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="configs/quickstart.py:tiny")
    parser.add_argument("--workdir", type=Path, default=Path("runs/damage"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
