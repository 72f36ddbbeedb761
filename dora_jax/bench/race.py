"""The race: RL from one folder of weights to one held-out accuracy, ours against TRL's GRPOTrainer.

    python -m dora_jax.bench.race [--case=toy] [--seeds=0] [--minutes=60] [--steps=0] [--every=0] [--install]
                                  [--workdir=runs/race] [--base=FOLDER] [--micro_batch=64] [--dtypes=float32,bfloat16]
    python -m dora_jax.bench.race --case=smollm --seeds=0,1,2 --minutes=60

toy: sums of one-digit numbers and the quickstart's base of 0.1M parameters, which `dora_jax.sft` makes here (--base
takes a folder that there is); the accuracy to reach is 40 points above it. smollm: bench.learning's sums of two-digit numbers and its model
of 135M; the accuracy to reach is the highest that TRL reaches in --minutes.

Ours is `dora_jax.train` on configs/rows.py as it is shipped; the fields that both sides share, and paths, are given to
it on its command line, which is printed. TRL trains in that type of --dtypes which made the shorter step: float32, and
bfloat16 by autocast, which a CPU without bfloat16 products takes many minutes a step for; --micro_batch is its samples
a backward pass. The accuracy to reach is fixed from TRL's own curve, and printed, before ours is run; what ours leaves
out and overlaps is printed too, and off in the row `ours plain` (first seed; the compile cache is warm). `cold`: the
compile cache was empty.
The clock is the same for both: from the start of the process until a checkpoint is on disk. Checkpoints are scored
after the run by one scorer (race_trl.py): greedy answers of `transformers` in float32, on the same held-out rows, whose
prompts must have the same ids on both sides. Between two checkpoints the accuracy counts as a straight line.
A run that has ended is not run again; its checkpoints are removed once they are scored. CASE/curves.csv in the workdir
has the curves. `load`: of the machine when the run began.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dora_jax.bench import harness, learning
from dora_jax.config import TaskSection
from dora_jax.config import files as config_files

SCRIPT = str(Path(__file__).with_name("race_trl.py"))
DTYPES = ("float32", "bfloat16")
TRIED_STEPS = 3  # of TRL, in each type
HELD_OUT = 256
TOY_ROWS = 2304
PLAIN = {"orchestrator.mode": "sync", "orchestrator.filter_zero_variance": False, "trainer.skip_zero_advantage": False}
NO_LIMIT_S = 1e9


class Case(NamedTuple):
    config: str
    shared: Mapping[str, Any]  # fields whose values both sides take
    steps: int
    every: int  # steps between two checkpoints
    gain: float  # above the base's accuracy; 0: the highest of TRL


def sizes(groups: int, prompt: int, new: int, learning_rate: float) -> dict[str, Any]:
    return {
        "orchestrator.groups_per_step": groups,
        "orchestrator.group_size": 8,
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_new_tokens": new,
        "trainer.learning_rate": learning_rate,
        "trainer.warmup_steps": 5,
    }


CASES = {
    "toy": Case("configs/rows.py", sizes(16, 32, 96, 3e-4), steps=40, every=4, gain=0.4),
    "smollm": Case("configs/rows.py:chat", sizes(8, 64, 32, 2e-5), steps=64, every=4, gain=0.0),
}


class Point(NamedTuple):
    seconds: float
    step: int
    accuracy: float


def target_of(curve: Sequence[Point], gain: float) -> float:
    return curve[0].accuracy + gain if gain else max(point.accuracy for point in curve)


def first_at(curve: Sequence[Point], target: float) -> float:
    """Seconds at which the accuracy is first at the target or above it; infinite where it never is."""
    if curve[0].accuracy >= target:
        return curve[0].seconds
    for a, b in itertools.pairwise(curve):
        if b.accuracy >= target:
            return a.seconds + (b.seconds - a.seconds) * (target - a.accuracy) / (b.accuracy - a.accuracy)
    return float("inf")


def write_sums(path: Path) -> None:
    """Distinct sums of 3 to 7 one-digit numbers."""
    rng = random.Random(0)
    rows: dict[str, str] = {}
    while len(rows) < TOY_ROWS:
        terms = [str(rng.randint(1, 9)) for _ in range(rng.randint(3, 7))]
        sum_ = terms[0] + "".join(f" {rng.choice('+-')} {term}" for term in terms[1:])
        rows[f"{sum_} ="] = str(eval(sum_))
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows.items()]
    path.write_text("\n".join(lines) + "\n")


def split(path: Path) -> tuple[Path, Path]:
    """(rows to train on, held-out rows), which do not depend on the seed of a run."""
    lines = path.read_text().splitlines()
    random.Random(0).shuffle(lines)
    parts = path.with_name("train.jsonl"), path.with_name("heldout.jsonl")
    for part, of_part in zip(parts, (lines[HELD_OUT:], lines[:HELD_OUT]), strict=True):
        part.write_text("\n".join(of_part) + "\n")
    return parts


class Race:
    """One case in one folder: its base, its rows and its runs."""

    def __init__(self, case: Case, folder: Path, base: Path, python: Path, micro_batch: int):
        self.case, self.folder, self.base, self._python, self._micro_batch = case, folder, base, python, micro_batch
        self.rows, self.heldout = split(folder / "rows.jsonl")
        self.template = config_files.load_file(case.config).task.template

    def work_of(self, out: Path, seed: int, dtype: str, steps: int, every: int, limit_s: float) -> dict[str, Any]:
        """One run of TRL."""
        shared = {name.rpartition(".")[2]: value for name, value in self.case.shared.items()}
        return {
            "model": str(self.base), "rows": str(self.rows), "template": self.template, "out": str(out), "seed": seed,
            "dtype": dtype, "steps": steps, "every": every, "limit_s": limit_s, "micro_batch": self._micro_batch,
            "groups": shared.pop("groups_per_step"), **shared,
        }  # fmt: skip

    def trl(self, name: str, *settings: Any) -> dict[str, Any]:
        """settings: as of work_of, behind `out`."""
        folder, load = self.folder / name, os.getloadavg()[0]
        work = self.work_of(folder, *settings)

        def run() -> None:
            began = {"began": time.time()}
            harness.called("TRL", [str(self._python), SCRIPT, "train", json.dumps(work | began)])

        def read(seconds: float) -> dict[str, Any]:
            return {"load": load, "saved": saved_of(folder, "checkpoint-", seconds)}

        return harness.ended(folder, "times.json", [json.dumps(work)], run, read)

    def fields(self, seed: int) -> dict[str, Any]:
        """What ours is given: what both sides share, and paths."""
        paths = {"model.path": self.base, "task.path": self.rows, "task.heldout_path": self.heldout}
        kept = {"checkpoint.every": self.case.every, "checkpoint.keep": self.case.steps}
        return {"seed": seed, "steps": self.case.steps, **paths, **kept, **self.case.shared}

    def ours(self, name: str, cache: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        folder, load = self.folder / name, os.getloadavg()[0]

        def read(seconds: float) -> dict[str, Any]:
            return {"load": load, "saved": saved_of(folder / "checkpoints", "", seconds)}

        return harness.trained(folder, "times.json", self.case.config, fields, read, DORA_COMPILE_CACHE=str(cache))

    def curve(self, name: str, saved: Mapping[str, float]) -> list[Point]:
        """The curve of a run that has ended; scored once."""
        run = self.folder / name
        if not (kept := run / "curve.json").exists():
            folders = [self._model_of(run, step) for step in saved]
            accuracies = self._scored([self.base, *folders])
            points = zip([0.0, *saved.values()], [0, *map(int, saved)], accuracies, strict=True)
            kept.write_text(json.dumps(list(points)))
            for each in [*folders, run / "checkpoints"]:
                shutil.rmtree(each, ignore_errors=True)
        return [Point(*point) for point in json.loads(kept.read_text())]

    def _model_of(self, run: Path, step: str) -> Path:
        """The checkpoint as a Hugging Face folder."""
        if (theirs := run / f"checkpoint-{step}").exists():
            return theirs
        if not (out := run / "hf" / step).exists():
            harness.program("dora_jax.export_hf", f"--workdir={run}", f"--step={step}", f"--out={out}")
        return out

    def _scored(self, folders: Sequence[Path]) -> list[float]:
        from dora_jax.models.tokenizer import Tokenizer
        from dora_jax.tasks.prompts import Wording

        work = {"model": str(self.base), "heldout": str(self.heldout), "folders": list(map(str, folders)),
                "template": self.template, "max_new_tokens": self.case.shared["rollout.max_new_tokens"]}  # fmt: skip
        printed = harness.called("scorer", [str(self._python), SCRIPT, "score", json.dumps(work)])
        found = json.loads(printed.splitlines()[-1])
        tokenizer = Tokenizer.load(self.base)
        wording = Wording(TaskSection(template=self.template), tokenizer)
        prompts = [json.loads(line)["prompt"] for line in self.heldout.read_text().splitlines()]
        if found["prompts"] != [list(tokenizer.encode(wording.text(prompt))) for prompt in prompts]:
            raise RuntimeError("the held-out prompts have other ids in transformers")
        return found["accuracies"]


def saved_of(folder: Path, prefix: str, seconds: float) -> dict[str, float]:
    """Step -> seconds from the start of the process, which has just ended after so many, until the newest file of that
    checkpoint was written."""
    began = time.time() - seconds
    steps = sorted(int(path.name[len(prefix) :]) for path in folder.glob(f"{prefix}*") if path.name[-1].isdigit())
    written = {step: max(f.stat().st_mtime for f in (folder / f"{prefix}{step}").rglob("*")) for step in steps}
    return {str(step): at - began for step, at in written.items()}


def step_s(saved: Mapping[str, float]) -> float:
    """Seconds a step between the first and the last checkpoint."""
    (first, *_, last), (began, *_, end) = map(int, saved), saved.values()
    return (end - began) / (last - first)


def prepared(case: str, folder: Path, base: str) -> Path:
    """Writes the rows; the folder of the base's weights, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if case == "smollm":
        learning.write_rows(folder / "rows.jsonl")
        return Path(base or harness.smollm_folder())
    write_sums(folder / "rows.jsonl")
    made = Path(base or folder / "base")
    if not (made / "config.json").exists():
        config = "--config=configs/quickstart.py"
        harness.program("dora_jax.sft", config, f"--config.sft.out={made}", f"--workdir={folder}/sft")
    return made


def race(
    case: Literal["toy", "smollm"] = "toy", seeds=(0,), minutes=60.0, steps=0, every=0, workdir=Path("runs/race"),
    base="", micro_batch=64, dtypes=DTYPES, install=False,
) -> Iterator[str]:  # fmt: skip
    given, folder = CASES[case], workdir / case
    chosen = given._replace(steps=steps or given.steps, every=every or given.every)
    python = harness.interpreter("trl", install)
    found = Race(chosen, folder, prepared(case, folder, base), python, micro_batch)
    seconds_of = dict.fromkeys(dtypes, 0.0)
    for each in dtypes if len(dtypes) > 1 else ():
        seconds_of[each] = step_s(found.trl(f"tried-{each}", seeds[0], each, TRIED_STEPS, 1, NO_LIMIT_S)["saved"])
        yield f"TRL, {TRIED_STEPS} steps: {each} {seconds_of[each]:.1f} s a step"
    dtype = min(dtypes, key=lambda each: seconds_of[each])
    shared = " ".join(f"--config.{field}={value}" for field, value in found.fields(seeds[0]).items())
    yield f"ours: dora_jax.train --config={chosen.config} {shared}"
    table = harness.Table({"": "14s", "seed": "5d", "load": "6.1f", "before": "8.1%", "highest": "9.1%",
                           "target": "8.1%", "s to it": "9.1f", "of TRL": "8.2f", "s a step": "10.2f"})  # fmt: skip
    lines, curves = [], {}
    for seed in seeds:
        run = found.trl(f"trl-seed{seed}", seed, dtype, chosen.steps, chosen.every, 60 * minutes)
        curve = found.curve(f"trl-seed{seed}", run["saved"])
        target = target_of(curve, chosen.gain)
        theirs = first_at(curve, target)
        yield f"seed {seed}: the accuracy to reach is {target:.1%}; TRL is there after {theirs:.0f} s"
        runs = {f"TRL {dtype}": (run, curve)}
        for name, fields in ours_of(seed == seeds[0]).items():
            place, cache = f"{name.replace(' ', '-')}-seed{seed}", folder / f"cache-seed{seed}"
            if name.endswith("cold") and not (folder / place / "times.json").exists():
                shutil.rmtree(cache, ignore_errors=True)
            run = found.ours(place, cache, {**found.fields(seed), **fields})
            runs[name] = run, found.curve(place, run["saved"])
            if name.endswith("cold"):
                yield shipped(folder / place)
        for name, (run, curve) in runs.items():
            seconds, best = first_at(curve, target), max(point.accuracy for point in curve)
            lines.append(table.row(name, seed, run["load"], curve[0].accuracy, best, target, seconds, seconds / theirs,
                                   step_s(run["saved"])))  # fmt: skip
            curves[name, seed] = curve
    yield from ["", table.head, *lines]
    write_curves(folder / "curves.csv", curves)


def ours_of(first: bool) -> dict[str, Mapping[str, Any]]:
    """Runs of ours for a seed -> their own fields."""
    return {"ours cold": {}, "ours warm": {}} | ({"ours plain": PLAIN} if first else {})


def shipped(run: Path) -> str:
    """What the shipped configuration leaves out and overlaps."""
    config = json.loads((run / "config.json").read_text())
    values = []
    for field in PLAIN:
        section, name = field.split(".")
        values.append(f"{field}={config[section][name]}")
    return f"ours leaves out and overlaps: {' '.join(values)}"


def write_curves(path: Path, curves: Mapping[tuple[str, int], Sequence[Point]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "seed", *Point._fields])
        writer.writerows([*of, *point] for of, curve in curves.items() for point in curve)


if __name__ == "__main__":
    harness.run(race)
