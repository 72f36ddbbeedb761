"""Random damage to a kept workdir: is every one noticed, healed, or harmless?

    python -m tests.soak.damage [--mode=plain|sync|elastic|...] [--faults=500] [--first=0] [--seed=0]
                                [--subject=checkpoint|journal|stale|weights|...] [--planted=restore|state]
                                [--resumes=4] [--workdir=DIR] [--table]

A tiny run is made, observed from outside (damage_truth.py), and killed with samples under way. Then case by case a copy
of its workdir is damaged (damage_kinds.py), and the command's own resume goes as far as its loop (damage_rig.py). What
the trainer then holds, the steps that were made again, and the samples that are known must be the true history:
    exact      the state of the undamaged workdir
    older      an older state, true to the byte, with a sentence, where the newest was really gone
    refused    a sentence, where nothing good was left
    wrong      a byte is another; or a better state was there
    trace      any other exception
At last `resumes` damaged copies are run to their end by the command itself, which a row "to the end" counts: `ended`, or
in mode sync, whose runs are the same however often they are killed, `exact` where each version that was made, the last
one included, has the weights and the optimizer's state of a run that nothing disturbed, else wrong.
A case depends on mode, seed and number alone: --first=17 --faults=1 repeats number 17, and ranges run side by side.
Each adds a line to DIR/MODE/cases.jsonl; --table adds up what is there. `stale` puts files of an earlier moment of the
run among those of its end. --planted makes the restore lie, which the judge must find: also in copies that are run
to their end. The exit code is 1 where a case is wrong or a trace.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from dora_jax.trainer import checkpoint
from tests.soak.agent_kills import Agents
from tests.soak.agent_training import TRAIN, Run
from tests.soak.chaos import OVERRIDES
from tests.soak.damage_kinds import SUBJECTS, stale
from tests.soak.damage_rig import Outcome, Rig
from tests.soak.damage_truth import (
    EXACT,
    OLDER,
    OLDER_COPY,
    REFUSED,
    TRACE,
    VERDICTS,
    WRONG,
    Allowed,
    Truth,
    judge,
    one_bit_off,
    other_versions,
)
from tests.soak.damage_weights import StoredCases

STEPS = 12
KILLED_AT = "trainer.after_put:11"  # what a kill leaves behind has samples under way
QUICKSTART = "configs/quickstart.py:tiny"
SESSIONS, AGENTS = "sessions", 16  # it trains on what these agents of agent_kills.py do through its endpoint
MODES = {  # config, and what is changed of it
    "plain": (QUICKSTART,),
    "lora": (QUICKSTART, "--config.lora.rank=4"),
    "drafts": (QUICKSTART, "--config.rollout.drafts=3"),
    "environments": ("configs/agent.py:tiny",),
    SESSIONS: (
        "",
        *TRAIN,
        "--config.serving.reward_s=3600",
        "--config.serving.session_idle_s=3600",
        "--config.eval.every=0",
    ),
    **{name: (QUICKSTART, f"--config.orchestrator.mode={name}") for name in ("sync", "one_step", "partial", "evict")},
    "exact": (QUICKSTART, "--config.rollout.exact=True"),
    "narrow": (QUICKSTART, "--config.rollout.narrow_rows=16"),
    "elastic": (
        QUICKSTART,
        "--config.cpu_devices=3",
        "--config.orchestrator.elastic=True",
        "--config.orchestrator.max_versions=1",
        "--config.trainer.lent_memory=host",
    ),
}
SAME_END = ("sync",)  # however often such a run is killed, its versions have the same bits
CHANGED = (
    *(override for override in OVERRIDES if "keep_all" not in override),
    f"--config.steps={STEPS}",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep=3",
    "--config.eval.every=4",
)
WEIGHTS, STALE, REST = "weights", "stale", "rest"  # weights: a subject that no resume reads, see damage_weights.py
SHARES = {name: share for name, (share, _) in SUBJECTS.items()} | {STALE: 3, WEIGHTS: 2}
AGAIN = 0.1  # share of the cases that are resumed twice
ENDED, TO_THE_END = "ended", "to the end"  # a verdict and a subject of the copies that the command runs to their end


def main() -> None:
    args = _arguments()
    logging.set_verbosity(logging.FATAL)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.table:
        sys.exit(_table(args.workdir))
    folder = args.workdir / args.mode
    cases = Cases(folder, args.seed, args.subject, args.mode)
    if args.planted:
        cases.plant(args.planted)
    counts: collections.Counter[str] = collections.Counter()
    for case, amount in ((cases.run, args.faults), (cases.to_the_end, args.resumes)):
        for number in range(args.first, args.first + amount):
            row = case(number)
            counts[row["verdict"]] += 1
            with open(folder / ("planted.jsonl" if args.planted else "cases.jsonl"), "a") as file:
                file.write(json.dumps(row) + "\n")
            if row["verdict"] in (WRONG, TRACE):
                print(f"{number}: {row['verdict']}: {row['subject']}: {row['what']}: {row['why']}", flush=True)
    cases.close()
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in (*VERDICTS, ENDED)))
    sys.exit(1 if counts[WRONG] + counts[TRACE] else 0)


class Cases:
    """The damaged copies of one run, by number."""

    def __init__(self, folder: Path, seed: int = 0, subject: str = "", mode: str = "plain"):
        self._folder, self._seed, self._subject, self._mode = folder, seed, subject, mode
        self._true = folder / "true"
        self._scratch = folder / f"case.{os.getpid()}"
        self._planted = False
        os.environ.setdefault("DORA_COMPILE_CACHE", str(folder.parent / "cache"))
        config, *changes = MODES[mode]
        if mode == SESSIONS:
            options = argparse.Namespace(workdir=folder, envs=Path(), steps=STEPS, warm_steps=1)
            self._agents = Run(options, "agents", 0)
            config = str(self._agents.config)
            with socket.create_server(("127.0.0.1", 0)) as listening:
                self._port = listening.getsockname()[1]
            changes = [change.replace("{port}", str(self._port)) for change in changes]
        self._command = [f"--config={config}", *CHANGED, *changes]
        self._command += [f"--config.{field}={folder.absolute() / 'base'}" for field in ("model.path", "sft.out")]
        if not (folder / "truth.jsonl").exists():
            self._make()
        self._truth = Truth(folder / "truth.jsonl")
        self._rig = Rig(self._command)
        outcome = self._resume(lambda copy: None)
        if outcome.resumed is None:
            raise RuntimeError(f"the undamaged workdir is not resumed: {outcome}")
        self._undamaged = outcome.resumed
        self._stored = StoredCases(folder, self._rig.params)
        verdict, why = judge(
            self._truth, self._undamaged, self._undamaged, Allowed(self._truth.newest, all_samples=True)
        )
        if verdict != EXACT:
            raise RuntimeError(f"the undamaged workdir is resumed otherwise: {why}")

    def close(self) -> None:
        self._stored.close()

    def plant(self, fault: str) -> None:
        """Makes every restore from now on wrong by one bit of the optimizer's state. restore: in what is read; state:
        in what the trainer holds when the resume is over, as if nothing had looked."""
        self._planted = True
        restore = checkpoint.restore

        def wrong_restore(*args: Any, **named: Any) -> Any:
            restored = restore(*args, **named)
            return restored._replace(opt_state=one_bit_off(restored.opt_state))

        def wrong_state(trainer: Any) -> None:
            trainer.state = trainer.state._replace(opt_state=one_bit_off(trainer.state.opt_state))

        if fault == "restore":
            checkpoint.restore = wrong_restore
        else:
            self._rig.after_begin = wrong_state

    def run(self, number: int) -> dict[str, Any]:
        """One case; a row of cases.jsonl."""
        began = time.monotonic()
        draw = random.Random(f"{self._seed}:{number}")
        subject = self._drawn(draw)
        if subject == WEIGHTS:
            what, verdict, why = self._stored.run(draw)
            return self._row(number, subject, what, verdict, why, began)
        damage: Any = None

        def harm(copy: Path) -> None:
            nonlocal damage
            damage = self._harm(copy, subject, draw)

        outcome = self._resume(harm, keep=True)
        verdict, why = self._verdict(outcome, damage.allowed)
        if verdict in (EXACT, OLDER):
            if fault := _metrics_fault(self._true, self._scratch, self._harmed, outcome.resumed.version):  # type: ignore[union-attr]
                verdict, why = WRONG, fault
            elif draw.random() < AGAIN:  # what the first resume has left on the disk is resumed too
                again = self._rig.resume(self._scratch)
                second, why_second = self._verdict(again, damage.allowed)
                if second not in (EXACT, OLDER):
                    verdict, why = second, f"at the second resume: {why_second}"
        if verdict in (EXACT, OLDER, REFUSED) and (fault := _readers_fault(self._scratch)):
            verdict, why = TRACE, fault
        shutil.rmtree(self._scratch)
        return self._row(number, subject, damage.what, verdict, why, began)

    def to_the_end(self, number: int) -> dict[str, Any]:
        """A damaged copy that the command runs to its end; a row of cases.jsonl."""
        began, copy, truth = time.monotonic(), self._folder / f"end{number}", self._folder / f"end{number}.jsonl"
        shutil.rmtree(copy, ignore_errors=True)
        truth.unlink(missing_ok=True)
        shutil.copytree(self._true, copy)
        draw = random.Random(f"{self._seed}:{number}")
        subject = self._drawn(draw)
        damage = self._harm(copy, REST if subject == WEIGHTS else subject, draw)  # no resume reads weights
        done = self._observed(copy, truth, DAMAGE_PLANTED=str(STEPS - 1) if self._planted else "")
        verdict, why = WRONG, f"code {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1:]}"
        if "Traceback" in done.stderr:
            verdict = TRACE
        elif damage.allowed.refusal and done.returncode in (1, 2) and done.stderr.startswith("error: "):
            verdict = REFUSED
        elif done.returncode == 0 and (copy / "checkpoints" / str(STEPS)).is_dir():
            verdict, why = ENDED, ""
            if self._mode in SAME_END:
                why = other_versions(Truth(self._folder / "undisturbed.jsonl"), Truth(truth))
                verdict = WRONG if why else EXACT
        if verdict not in (WRONG, TRACE):
            shutil.rmtree(copy)
        return self._row(number, TO_THE_END, damage.what, verdict, why, began)

    # ------------------------------------------------------------ private

    def _make(self) -> None:
        """The run, killed; then an evaluation, whose files belong to a workdir too."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (self._true, self._folder / OLDER_COPY, self._folder / "undisturbed"):
            shutil.rmtree(old, ignore_errors=True)
        truth = self._folder / "truth.partial"
        truth.unlink(missing_ok=True)
        if self._mode == SESSIONS:
            self._agents.warm()
        run = self._observed(self._true, truth, DORA_FAULT=KILLED_AT)
        if run.returncode != -9:
            raise RuntimeError(f"the run was not killed, but ended with {run.returncode}: {run.stderr[-2000:]}")
        if self._mode in SAME_END:
            straight = self._observed(self._folder / "undisturbed", self._folder / "undisturbed.jsonl")
            if straight.returncode:
                raise RuntimeError(f"the undisturbed run ended with {straight.returncode}: {straight.stderr[-2000:]}")
        if self._mode != SESSIONS:  # which has no reward of its own
            evaluated = [sys.executable, "-m", "dora_jax.evaluate", f"--workdir={self._true}"]
            subprocess.run(evaluated, check=True, capture_output=True)
        truth.rename(self._folder / "truth.jsonl")

    def _observed(self, workdir: Path, truth: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        agents = Agents(f"http://127.0.0.1:{self._port}", AGENTS, self._seed) if self._mode == SESSIONS else None
        done = subprocess.run(
            [sys.executable, "-m", "tests.soak.damage_truth", str(truth), *self._command, f"--workdir={workdir}"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if agents is not None:
            agents.over.set()
        return done

    def _drawn(self, draw: random.Random) -> str:
        return self._subject or draw.choices(list(SHARES), list(SHARES.values()))[0]

    def _row(self, number: int, subject: str, what: str, verdict: str, why: str, began: float) -> dict[str, Any]:
        reported = {"subject": subject, "what": what, "verdict": verdict, "why": why}
        return {
            "mode": self._mode,
            "number": number,
            "seed": self._seed,
            **reported,
            "s": round(time.monotonic() - began, 2),
        }

    def _harm(self, copy: Path, subject: str, draw: random.Random) -> Any:
        if subject == STALE:
            damage = stale(copy, self._folder / OLDER_COPY, self._truth, self._undamaged, draw)
        else:
            damage = SUBJECTS[subject][1](copy, self._truth, self._undamaged, draw)
        metrics = copy / "metrics.jsonl"
        self._harmed = metrics.read_bytes() if metrics.is_file() else None
        return damage

    def _resume(self, harm: Callable[[Path], None], keep: bool = False) -> Outcome:
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.copytree(self._true, self._scratch)
        harm(self._scratch)
        outcome = self._rig.resume(self._scratch)
        if not keep:
            shutil.rmtree(self._scratch)
        return outcome

    def _verdict(self, outcome: Outcome, allowed: Any) -> tuple[str, str]:
        if outcome.trace:
            return TRACE, _short(outcome.trace)
        if outcome.resumed is None:
            return (REFUSED if allowed.refusal else WRONG), f"refused: {outcome.refusal}"
        return judge(self._truth, self._undamaged, outcome.resumed, allowed)


def _metrics_fault(true: Path, copy: Path, harmed: bytes | None, version: int) -> str:
    """Lines that damage had left whole and that are gone, or are later than the resume."""
    if harmed is None or not (copy / "metrics.jsonl").is_file():
        return ""
    whole = set((true / "metrics.jsonl").read_bytes().splitlines())
    wanted = [line for line in harmed.splitlines() if line in whole and json.loads(line)["step"] <= version]
    held = (copy / "metrics.jsonl").read_bytes().splitlines()
    if lost := [line for line in wanted if line not in held]:
        return f"metrics.jsonl has lost {len(lost)} whole lines, as {lost[0][:40]!r}"
    if late := [line for line in held if line in whole and json.loads(line)["step"] > version]:
        return f"metrics.jsonl holds {len(late)} lines that are later than version {version}"
    return ""


def _readers_fault(workdir: Path) -> str:
    """What the readers of a workdir raise: report, top, and the choice of a checkpoint to evaluate."""
    from dora_jax import top
    from dora_jax.config import ConfigError
    from dora_jax.report import load
    from dora_jax.runtime import job

    for name, read in (
        ("report", lambda: load.load(workdir, "case")),
        ("top", lambda: top.picture(load.load(workdir, "case"), time.time())),
        ("evaluate", lambda: job.pick(workdir / "checkpoints", None)),
    ):
        try:
            read()
        except (ConfigError, FileNotFoundError):
            continue
        except Exception as error:
            import traceback

            return f"{name}: " + _short("".join(traceback.format_exception(error)))
    return ""


def _short(trace: str) -> str:
    """The last line of a trace, and where in this package it was raised."""
    places = re.findall(r'File ".*/(dora_jax/[^"]+)", line (\d+), in (\w+)', trace)
    places = [place for place in places if "/soak/" not in place[0]]
    where = " <- ".join(f"{file}:{line} {name}" for file, line, name in reversed(places[-3:]))
    lines = trace.strip().splitlines()
    return f"{lines[-1][:200]} ({where})"


def _table(folder: Path) -> int:
    """Adds up the cases of all modes; the last verdict of each number counts."""
    lines = [line for path in sorted(folder.glob("*/cases.jsonl")) for line in path.read_text().splitlines()]
    rows = {
        (row["mode"], row["seed"], row["number"], row["subject"] == TO_THE_END): row for row in map(json.loads, lines)
    }
    groups = collections.defaultdict(list)
    for row in rows.values():
        for group in ((row["mode"], row["subject"]), (row["mode"], "all"), ("all", row["subject"]), ("all", "all")):
            groups[group].append(row)
    print(
        f"{'mode':13}{'what':12} {'cases':>6} "
        + " ".join(f"{verdict:>8}" for verdict in (*VERDICTS, ENDED))
        + f" {'s a case':>9}"
    )
    for (mode, subject), mine in sorted(groups.items()):
        counts = collections.Counter(row["verdict"] for row in mine)
        seconds = sum(row["s"] for row in mine) / len(mine)
        numbers = " ".join(f"{counts[verdict]:>8}" for verdict in (*VERDICTS, ENDED))
        print(f"{mode:13}{subject:12} {len(mine):>6} {numbers} {seconds:>9.2f}")
    bad = [row for row in rows.values() if row["verdict"] in (WRONG, TRACE)]
    for row in sorted(bad, key=lambda row: (row["subject"], row["why"])):
        repeat = f"--mode={row['mode']} --seed={row['seed']} --first={row['number']}"
        print(f"{repeat}: {row['verdict']}: {row['what']}: {row['why']}")
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="plain", choices=MODES)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--resumes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subject", default="", choices=("", *SHARES))
    parser.add_argument("--planted", default="", choices=("", "restore", "state"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--workdir", type=Path, default=Path("runs/damage"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
