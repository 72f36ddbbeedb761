"""Does staleness cost learning? Every mode on the same task, from the same base, over several seeds.

    python -m dora_jax.bench.learning [--seeds=0,1,2,3,4] [--modes=sync,one_step,partial,evict,dora2,dora3,dora5]
                                      [--workdir=runs/learning] [--base=DIR] [--steps=80]
                                      [--config=configs/quickstart.py] [--lora_learning_rate=0.003]
    python -m dora_jax.bench.learning real_model [--seeds=0,1,2] [--modes=dora3] [--control] [--steps=16]
                                                 [--workdir=runs/real_model]
    python -m dora_jax.bench.learning real_model --folder
    python -m dora_jax.bench.learning satisfaction [--base=FOLDER] [--steps=40] [--users=32] [--workdir=runs/satisfaction]

Each point is one run of `dora_jax.train` on the quickstart's config, or a twin of it; one that has ended is not
run again, one that was cut short starts over, since its clock counts. All start from one base, made by `dora_jax.sft`
where it is missing. The number behind a mode is K (3 where there is none and the mode has one). Behind that, -s2 gives
rollouts every second version (orchestrator.stride), -tis turns that off-policy correction on (trainer.correction, and
the ratio then starts at the weights before the update), and -lora16 trains adapters of rank 16 in the place of all
weights, at a learning rate of their own, --lora_learning_rate.

Printed are means over seeds and, behind +-, half of their 95 % confidence interval (Student's t); differences are
taken seed by seed. Per step: the mean of the trained groups' reward over all steps, and of held-out accuracy over all
evaluations but the first. A step's reward is of the weights that sampled its groups, so it is behind by the lag;
`by version` is not: the mean over versions of what the groups of each scored. Per second: the same curves over time,
averaged from the start to the end of the seed's fastest run. Seconds count from the first sample, compilation aside,
on two clocks: `s in all` as it was, all others without evaluation: a step beside one counts as its neighbours do.

`gap` is the mean KL of trained tokens from the policy that the ratio is anchored at: what sampled them, or with -tis
the weights before the update. `collapsed` is the share of runs whose held-out accuracy ends 20 points below its best.

The second table: pass rate of groups by their lag, less that of the mode's most frequent lag: raw, inside groups of
equal difficulty (terms of the sum), and inside those of equal difficulty and version. The last holds the weights
fixed: what is left there, is selection. The third: steps by the lag of their youngest group, and what the loss met
there; from 2 on no group is left on which the engine-trainer gap could be measured.

real_model: RL of SmolLM2-135M-Instruct on two cores: does a chat model learn to add, and in how many seconds? --folder
makes the model's folder (.cache/smollm2-135m-instruct in this checkout) and prints where it is. It learns 600 sums of
two numbers of two digits, of which 256 are held out, in the model's chat template; the reward is that the last number
of the answer is the sum. One run of `dora_jax.train` a seed and mode, on configs/rows.py:chat with the fields below;
one that has ended is not run again. --control adds a run whose rewards are shuffled among the samples of a step: it
must learn nothing. Printed are held-out accuracies before, half-way and at the end, the mean lag, the gap, and the
seconds of the whole process, compilation and evaluations included.

satisfaction: what a scripted user makes of a run that trains on its sessions, and what that costs it in latency.
The user asks the endpoint of a live run for sums and says "thanks" where the answer is right, else "wrong": what it
says next is the reward, and the run never sees the right answer. `satisfied` is the share of sessions that ended with
thanks, by quarters of the run. Then as many of the same sessions go to the base as `python -m dora_jax.serve` serves
it, without training: `p50`, `p99` are milliseconds from a question to its whole answer.
--base: a warm start for sums with a chat template; where it is missing it is made, which takes minutes.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from dora_jax.bench import harness
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.sim.table import grid

MODES = ("sync", "one_step", "partial", "evict", "dora2", "dora3", "dora5")
MEASURED, BASELINE = "dora3", "sync"  # of the verdict
NO_LAG = ("sync", "partial")  # all groups have the same, or none: a trajectory has several versions
# Three times that of all weights: three seeds of 40 steps end at 99.5 %. At that of all weights they end at 93 %; at
# ten times that they learn in 10 to 30 steps and end at 90 %, for a step then moves groups of a lag of 2 off the
# policy.
LORA_LEARNING_RATE = 3e-3
EVAL_EVERY = 10
SMOOTH, TARGET = 5, 0.9  # a run has learnt when the mean reward of so many steps is this
COLLAPSE = 0.2  # a run whose held-out accuracy ends so far below its best has collapsed
LAST = 4  # versions at the end of a run whose groups, where they lag, are not trained any more
RESULT = "groups.json"  # in a run's folder, last: its arguments and every trained group


class AnsweredGroup(NamedTuple):
    """A trained group as the journal has it."""

    version: int
    lag: int
    terms: int  # numbers that the prompt adds up
    passed: int
    samples: int


class Curve(NamedTuple):
    """One run. Per step [n], but held-out accuracy, which has its own versions."""

    clock: np.ndarray  # seconds at the end of each step
    quiet_clock: np.ndarray  # without evaluation
    reward: np.ndarray
    lag: np.ndarray
    gap: np.ndarray  # KL from the policy that the ratio is anchored at
    wait: np.ndarray  # share of the step for which the trainer had no batch
    idle: np.ndarray  # share of the step for which an instance had nothing to do
    versions: np.ndarray
    heldout: np.ndarray  # at `versions`
    groups: list[AnsweredGroup]


def settings_of(mode: str, lora_learning_rate: float) -> dict[str, str | float]:
    """The fields that a mode's name stands for."""
    named = re.fullmatch(r"([a-z_]+)(\d*)(?:-s(\d+))?(-tis)?(?:-lora(\d+))?", mode)
    if named is None:
        raise SystemExit(f"error: --modes: {mode} is no mode, such as dora3, dora4-s2, partial-tis or dora3-lora16")
    name, k, stride, tis, rank = named.groups()
    settings: dict[str, str | float] = {"orchestrator.mode": name, "orchestrator.max_versions": int(k or 3)}
    settings |= {"orchestrator.stride": int(stride)} if stride else {}
    settings |= {"trainer.correction": "tis", "trainer.anchor": "proximal"} if tis else {}
    if rank:
        settings |= {"lora.rank": int(rank), "lora.alpha": 2.0 * int(rank), "trainer.learning_rate": lora_learning_rate}
    return settings


def groups_of(folder: Path, base: Path) -> list[AnsweredGroup]:
    """What is kept of the journal: all trained groups."""
    tokenizer, journal = Tokenizer.load(base), EventLog(FileLogStore(folder / "journal", read_only=True))
    groups = []
    for step in replay(journal, journal.segments(), print).steps:
        for g in step.groups:
            terms = len(re.findall(r"\d+", tokenizer.decode(g.samples[0].prompt_ids)))
            passed = int((g.rewards >= 1).sum())
            groups.append(AnsweredGroup(g.version, step.base - g.version, terms, passed, len(g.rewards)))
    return groups


def load(folder: Path) -> Curve:
    records = harness.records_of(folder)
    steps = [r for r in records if "reward/mean" in r]
    evals = [r for r in records if "eval/accuracy" in r]
    end, took = column(steps, "time/run_s"), column(steps, "time/step_s")
    took[0] = steps[0]["trainer/wait_s"] + steps[0]["trainer/step_s"]  # without what was compiled before
    start = end[0] - took[0]
    windows = [(end[r["step"] - 1] if r["step"] else start, r["time/run_s"]) for r in evals]
    return Curve(
        end - start,
        np.cumsum(without(end - took, end, took, windows)),
        column(steps, "reward/mean"),
        column(steps, "lag/mean"),
        column(steps, "trainer/kl_anchor"),
        column(steps, "trainer/wait_s") / took,
        column(steps, "rollout/idle_share"),
        column(evals, "step"),
        column(evals, "eval/accuracy"),
        [AnsweredGroup(*g) for g in json.loads((folder / RESULT).read_text())["groups"]],
    )


def column(records: list[dict], name: str) -> np.ndarray:
    return np.array([r[name] for r in records], np.float64)


def without(begin: np.ndarray, end: np.ndarray, took: np.ndarray, windows: list[tuple[float, float]]) -> np.ndarray:
    """Seconds of each step; those that overlap a window are interpolated from the others."""
    busy = np.zeros(len(took), bool)
    for first, last in windows:
        busy |= (begin < last) & (end > first)
    index = np.arange(len(took))
    return np.where(busy, np.interp(index, index[~busy], took[~busy]), took)


def figures(curve: Curve, seconds: float) -> dict[str, float]:
    """A run in numbers; `seconds`: how long its fastest companion took, without evaluation."""
    smooth = np.convolve(curve.reward, np.ones(SMOOTH) / SMOOTH, "valid")
    learnt = np.flatnonzero(smooth >= TARGET)
    reached = curve.quiet_clock[learnt[0] + SMOOTH - 1] if len(learnt) else np.nan
    at = np.concatenate([[0.0], curve.quiet_clock])[curve.versions.astype(int)]
    versions_of, *counts = zip(*((g.version, g.passed, g.samples) for g in curve.groups), strict=True)
    passed, samples = (np.bincount(versions_of, each) for each in counts)
    rate = passed[samples > 0] / samples[samples > 0]
    versions = np.arange(len(curve.reward) - LAST)
    return {
        "reward": curve.reward.mean(),
        "by version": np.interp(versions, np.flatnonzero(samples), rate).mean(),
        "held-out": curve.heldout[1:].mean(),
        "last": curve.heldout[-1],
        "collapsed": float(curve.heldout[-1] < curve.heldout.max() - COLLAPSE),
        "lag": curve.lag.mean(),
        "gap": curve.gap.mean(),
        "reward/s": area(curve.quiet_clock, curve.reward, seconds),
        "held-out/s": area(at, curve.heldout, seconds),
        "s to learn": reached,
        "ms/step": 1e3 * curve.quiet_clock[-1] / len(curve.reward),
        "s in all": curve.clock[-1],
        "trainer waits": curve.wait[1:].mean(),
        "rollout idle": curve.idle[1:].mean(),
    }


def area(at: np.ndarray, values: np.ndarray, stop: float) -> float:
    return float(np.interp(np.linspace(0.0, stop, 1000), at, values).mean())


def by_lag(groups: list[AnsweredGroup], lag: int, than: int) -> list[float]:
    """Pass rate at `lag` less that at `than`: raw, within terms, within terms and version.

    Strata weigh n m / (n + m), as Mantel and Haenszel's do: those that hold one side only say nothing.
    """
    found = []
    for fields in ((), ("terms",), ("terms", "version")):
        strata: dict[Any, np.ndarray] = collections.defaultdict(
            lambda: np.zeros((2, 2))
        )  # [there or not, passed or all]
        for g in groups:
            if g.lag in (lag, than):
                strata[tuple(getattr(g, field) for field in fields)][int(g.lag == lag)] += (g.passed, g.samples)
        both = np.array([s for s in strata.values() if s[:, 1].all()]).reshape(-1, 2, 2)
        weight = both[:, :, 1].prod(1) / both[:, :, 1].sum(1)
        rate = both[:, :, 0] / both[:, :, 1]
        found.append(float((weight * (rate[:, 1] - rate[:, 0])).sum() / weight.sum()) if len(both) else np.nan)
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval of the mean); nan of one value."""
    n = len(values)
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(np.mean(values)) if n else np.nan, float(half)


def learning_table(found: dict[str, list[dict[str, float]]]) -> str:
    digits = {"lag": 2, "gap": 4, "s to learn": 1, "ms/step": 0, "s in all": 1, "trainer waits": 2, "rollout idle": 2}
    head = list(next(iter(found.values()))[0])
    rows = [
        [mode, *(cell(interval([run[name] for run in runs]), digits.get(name, 3)) for name in head)]
        for mode, runs in found.items()
    ]
    return grid(["mode", *head], rows)


def lag_table(found: dict[str, list[Curve]]) -> str:
    head = ["mode", "lag", "share", "pass rate", "against lag", "raw", "within terms", "within terms, version"]
    rows = []
    for mode, curves in found.items():
        counts = collections.Counter(g.lag for curve in curves for g in curve.groups)
        than = counts.most_common(1)[0][0]
        for lag, count in sorted(counts.items()):
            groups = [g for curve in curves for g in curve.groups if g.lag == lag]
            rate = sum(g.passed for g in groups) / sum(g.samples for g in groups)
            line = [mode, str(lag), f"{count / counts.total():.1%}", f"{rate:.1%}"]
            if lag == than:
                rows.append([*line, "-", "", "", ""])
                continue
            seeds = np.array([by_lag(curve.groups, lag, than) for curve in curves])
            rows.append([*line, str(than), *(cell(interval([x for x in s if np.isfinite(x)]), 3) for s in seeds.T)])
    return grid(head, rows)


def youngest_table(records: dict[str, list[dict]]) -> str:
    """`records`: of all runs of a mode."""
    means = {
        "reward": "reward/mean",
        "clipped": "trainer/clip_fraction",
        "ESS": "trainer/ess_share",
        "largest ratio": "trainer/ratio_max",
        "gradient norm": "trainer/grad_norm",
    }
    rows = []
    for mode, of_mode in records.items():
        by_youngest = collections.defaultdict(list)
        for record in of_mode:
            if lags := [int(name[4:]) for name in record if re.fullmatch(r"lag/\d+", name)]:
                by_youngest[min(lags)].append(record)
        for lag, steps in sorted(by_youngest.items()):
            share = len(steps) / sum(map(len, by_youngest.values()))
            measured = sum("mismatch/mean" in step for step in steps) / len(steps)
            cells = [f"{column(steps, name).mean():.4f}" for name in means.values()]
            rows.append([mode, str(lag), f"{share:.1%}", *cells, f"{measured:.0%}"])
    return grid(["mode", "youngest", "steps", *means, "gap measured"], rows)


def verdict(found: dict[str, list[dict[str, float]]], measured: str, baseline: str) -> list[str]:
    """One mode against another, seed by seed."""
    verdicts, pairs = [], list(zip(found[measured], found[baseline], strict=True))
    for name in ("reward", "by version", "held-out", "last", "reward/s", "held-out/s"):
        mean, half = interval([a[name] - b[name] for a, b in pairs])
        word = "above" if mean > half else "below" if mean < -half else "inside the interval"
        label = "per second" if name.endswith("/s") else "per step"
        verdicts.append(f"{label}, {name}: {measured} less {baseline} {cell((mean, half), 4)}: {word}")
    for name in ("ms/step", "s to learn", "s in all"):
        mean, half = interval([np.log(b[name] / a[name]) for a, b in pairs])
        ratios = [f"{ratio:.2f}" for ratio in np.exp([mean, mean - half, mean + half])]
        verdicts.append(f"{name}: {baseline} / {measured} = {ratios[0]} ({ratios[1]} to {ratios[2]})")
    return verdicts


def cell(mean_half: tuple[float, float], digits: int) -> str:
    return " +-".join(f"{each:.{digits}f}" for each in mean_half)


def learning(
    seeds=(0, 1, 2, 3, 4), modes=MODES, workdir=Path("runs/learning"), base=None, steps=80,
    config="configs/quickstart.py", lora_learning_rate=LORA_LEARNING_RATE,
) -> Iterator[str]:  # fmt: skip
    base = Path(base or workdir / "base")
    if not (base / "config.json").exists():
        harness.program(
            "dora_jax.sft", f"--config={config}", f"--config.sft.out={base}", f"--workdir={workdir / 'sft'}"
        )
    folders = {mode: [workdir / f"{mode}-seed{seed}" for seed in seeds] for mode in modes}
    for i, seed in enumerate(seeds):  # the modes of a seed run one after the other, another one first each time
        for j in range(len(modes)):
            mode = modes[(seed + j) % len(modes)]
            fields = {"seed": seed, "steps": steps, "model.path": base, "eval.every": EVAL_EVERY, "checkpoint.every": 0}
            fields |= settings_of(mode, lora_learning_rate)
            folder = folders[mode][i]
            harness.trained(folder, RESULT, config, fields, lambda _: {"groups": groups_of(folder, base)})
    curves = {mode: [load(folder) for folder in of_mode] for mode, of_mode in folders.items()}
    shortest = [min(curves[mode][i].quiet_clock[-1] for mode in modes) for i in range(len(seeds))]
    found = {mode: [figures(c, s) for c, s in zip(of_mode, shortest)] for mode, of_mode in curves.items()}
    yield f"{steps} steps, {len(seeds)} seeds, {os.cpu_count()} cores; mean +- half of the 95 % interval\n"
    lagging = [mode for mode in modes if mode not in NO_LAG]
    records = {mode: [r for folder in folders[mode] for r in harness.records_of(folder)] for mode in lagging}
    yield "\n\n".join([learning_table(found), lag_table({m: curves[m] for m in lagging}), youngest_table(records)])
    for measured, baseline in [(MEASURED, BASELINE), *((mode, mode.partition("-lora")[0]) for mode in modes)]:
        if measured != baseline and {measured, baseline} <= found.keys():
            yield "\n".join(["", *verdict(found, measured, baseline)])


# ----------------------------------------------------------- a real model

REAL_CONFIG = "configs/rows.py:chat"
ROWS = 600
FIELDS = {
    "cpu_devices": 2,  # the instance's and the trainer's
    "task.heldout": 256,
    "eval.prompts": 256,
    "rollout.instances": 1,
    "rollout.slots": 64,
    "rollout.pages": 640,
    "rollout.max_prompt_tokens": 64,
    "rollout.max_new_tokens": 32,
    "rollout.context_block": 48,
    "rollout.prefill_chunk": 16,
    "rollout.prefill_tokens": 512,  # pages of the system prompt are shared by all
    "orchestrator.groups_per_step": 8,
    "orchestrator.group_size": 8,
    "trainer.pack_tokens": 512,
    "trainer.micro_batches": 16,
    "trainer.learning_rate": 2e-5,
    "trainer.skip_zero_advantage": True,  # at first most groups have no right answer
    "checkpoint.every": 0,
}


def write_rows(path: Path) -> None:
    """Write the rows of sums, which do not depend on the seed of the run."""
    rng = np.random.default_rng(0)
    pairs = {tuple(pair) for pair in rng.integers(10, 100, (4 * ROWS, 2)).tolist()}
    lines = [
        json.dumps({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)})
        for a, b in sorted(pairs)[:: len(pairs) // ROWS][:ROWS]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def real_model(
    seeds=(0, 1, 2), modes=(MEASURED,), control=False, steps=16, workdir=Path("runs/real_model"), folder=False
) -> Iterator[str]:
    model = harness.smollm_folder()
    if folder:
        yield str(model)
        return
    rows = workdir / "sums.jsonl"
    write_rows(rows)
    runs = [(f"{mode}-seed{seed}", mode, seed, False) for seed in seeds for mode in modes]
    runs += [("shuffled", modes[0], 0, True)] * control
    table = harness.Table({"run": "20s", "held-out accuracy": ">26s", "gain": ">9s", "lag": "5.2f", "gap": "8.5f",
                           "seconds": "9.0f"})  # fmt: skip
    yield table.head
    for name, mode, seed, shuffled in runs:
        kept = workdir / name
        fields = FIELDS | {"seed": seed, "steps": steps, "eval.every": steps // 2, "model.path": model,
                           "task.path": rows, "task.shuffle_rewards": shuffled}  # fmt: skip
        fields |= settings_of(mode, LORA_LEARNING_RATE)

        def read(seconds: float) -> dict[str, Any]:
            steps_made = harness.records_of(kept, "trainer/kl_anchor")
            lag, gap = (column(steps_made, name).mean() for name in ("lag/mean", "trainer/kl_anchor"))
            accuracy = [r["eval/accuracy"] for r in harness.records_of(kept, "eval/accuracy")]
            return {"seconds": seconds, "accuracy": accuracy, "lag": lag, "gap": gap}

        found = harness.trained(kept, "result.json", REAL_CONFIG, fields, read)
        accuracy = found["accuracy"]
        gain = f"{100 * (accuracy[-1] - accuracy[0]):+.1f}"
        yield table.row(name, " -> ".join(f"{a:.1%}" for a in accuracy), gain,
                        *(found[each] for each in ("lag", "gap", "seconds")))  # fmt: skip


# -------------------------------------------------------------- satisfaction

TEMPLATE = (  # the quickstart's "sum = working<end>", with a line break in front of each message of the user
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|endoftext|>"
    "{% else %}{{ '\\n' + m.content + ' ' }}{% endif %}{% endfor %}"
)
LIVE_CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = {steps}
    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {{"min_terms": 3, "max_terms": 7, "min_digits": 1, "max_digits": 1}}
    c.task.extract, c.task.template = r": (.*)$", "\\n{{prompt}} "
    c.sft.out = c.model.path = {base!r}
    c.sft.examples, c.sft.slip_rate, c.sft.steps = 40960, 0.7, {warm}
    c.sft.batch_rows, c.sft.pack_tokens, c.sft.learning_rate, c.sft.warmup_steps = 8, 128, 5e-3, min(200, {warm})
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32
    c.rollout.slots, c.rollout.decode_steps, c.rollout.residents = 64, 1, 3
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 64, 64
    c.orchestrator.groups_per_step, c.orchestrator.group_size, c.orchestrator.inflight = {groups}, 8, max(0.5, 1 / {groups})
    c.trainer.pack_tokens, c.trainer.micro_batches = 128, 4
    c.checkpoint.every = 0
    return c
"""
LIVE = (
    "--config.task.rewards=('dora_jax.bench.learning.thanked',)",
    "--config.task.reward_sandbox=weak",
    "--config.serving.train=True",
    "--config.environment.max_turns=1",
)
ENGINE = (  # of the run, for the endpoint beside it
    "--config.rollout.slots=64",
    "--config.rollout.decode_steps=1",
    "--config.rollout.max_prompt_tokens=64",
    "--config.rollout.max_new_tokens=64",
)
LIVE_GROUPS = 16
START_S = 900.0
POLL_S = 0.2


def thanked(prompt: str, response: str, answer: dict[str, Any]) -> float:
    """The reward: what the user wrote next."""
    return float(any(message["content"] == "thanks" for message in answer["next"]))


class Talk(NamedTuple):
    """One session."""

    satisfied: bool
    version: int
    latency_s: float
    tokens: int


class Ended(RuntimeError):
    """The endpoint refused a request."""


class User:
    """So many sessions at once, one after the other in each of `users` threads. Port: of the endpoint, on loopback."""

    def __init__(self, port: int, users: int, seed: int):
        self.talks: list[Talk] = []
        self._port, self._over = port, threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(seed * users + i,)) for i in range(users)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _live(self, number: int) -> None:
        rng, connection = random.Random(number), http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        for count in range(sys.maxsize):
            try:
                if self._over.is_set():
                    return
                self.talks.append(_talk(connection, rng, f"{number}-{count}"))
            except (OSError, http.client.HTTPException, Ended):
                connection.close()
                self._over.wait(POLL_S)  # the run ends, or has ended


def _talk(connection: http.client.HTTPConnection, rng: random.Random, session: str) -> Talk:
    def asked(**more: Any) -> dict[str, Any]:
        headers = {"content-type": "application/json", "x-session-id": session}
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, **more}), headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise Ended(body.decode())
        return json.loads(body)

    terms = [str(rng.randint(1, 9)) for _ in range(rng.randint(3, 7))]
    question = terms[0] + "".join(f" {rng.choice('+-')} {term}" for term in terms[1:]) + " ="
    messages = [{"role": "user", "content": question}]
    latency_s, answer = harness.timed(asked)
    text = answer["choices"][0]["message"]["content"]
    found = re.search(r"#### (-?\d+)$", text)
    satisfied = found is not None and int(found[1]) == eval(question[:-1])
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "thanks" if satisfied else "wrong"},
    ]
    asked(max_tokens=1)
    return Talk(satisfied, answer["weight_version"], latency_s, answer["usage"]["completion_tokens"])


# ---------------------------------------------------------------- the two servers


@contextlib.contextmanager
def serving(log: Path, *command: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """(port, process) of the program, whose {port} is filled in, from when it answers there; it is ended where it has not
    ended."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with log.open("wb") as out:
        arguments = [word.replace("{port}", str(port)) for word in command]
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=out, stderr=out)
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} does not answer: see {log}")
            time.sleep(POLL_S)
        yield port, process
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except (OSError, ValueError, http.client.HTTPException):
        return False


def satisfaction(
    base=Path("runs/satisfaction_base"), workdir=Path("runs/satisfaction"), steps=40, users=32, groups=LIVE_GROUPS,
    warm_steps=4000,
) -> Iterator[str]:  # fmt: skip
    """groups: of eight sessions, a step. warm_steps: of the warm start, where it is made. Exits with 1 where the run
    fails."""
    workdir.mkdir(parents=True, exist_ok=True)
    config = workdir / "config.py"
    config.write_text(LIVE_CONFIG.format(steps=steps, base=str(base), groups=groups, warm=warm_steps))
    if not (base / "config.json").exists():
        harness.program("dora_jax.sft", f"--config={config}", f"--workdir={workdir}/sft")
    (base / "chat_template.jinja").write_text(TEMPLATE)

    log, folders = workdir / "train.log", (f"--config={config}", f"--workdir={workdir}/run")
    with serving(log, "dora_jax.train", *folders, "--config.serving.port={port}", *LIVE) as (port, process):
        user = User(port, users, seed=1)
        code = process.wait()
    user.stop()
    if code:
        print(f"the run ended with exit code {code}: see {log}", file=sys.stderr)
        raise SystemExit(1)

    with serving(workdir / "serve.log", "dora_jax.serve", f"--model={base}", "--port={port}", *ENGINE) as (port, _):
        still = User(port, users, seed=2)
        while len(still.talks) < len(user.talks):
            time.sleep(POLL_S)
        still.stop()
    yield from talk_table(user.talks, still.talks, steps)


def talk_table(trained: Sequence[Talk], still: Sequence[Talk], steps: int) -> Iterator[str]:
    versions = len({talk.version for talk in trained})
    machine = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    yield f"{len(trained)} sessions over {steps} steps, answered by {versions} versions; {machine}"
    yield "                 satisfied  p50 ms  p99 ms  tokens an answer"
    ends = [i * max(1, len(trained) // 4) for i in range(4)]
    parts = {f"quarter {i + 1}": trained[ends[i] : stop] for i, stop in enumerate([*ends[1:], None])}
    for name, talks in (parts | {"all": trained, "no training": still}).items():
        if not talks:
            yield f"{name:16} no session"
            continue
        latency = sorted(talk.latency_s for talk in talks)
        p50, p99 = (1e3 * latency[min(len(latency) - 1, int(q * len(latency)))] for q in (0.5, 0.99))
        satisfied = sum(talk.satisfied for talk in talks) / len(talks)
        tokens = sum(talk.tokens for talk in talks) / len(talks)
        yield f"{name:16} {satisfied:9.1%} {p50:7.0f} {p99:7.0f} {tokens:17.1f}"


if __name__ == "__main__":
    harness.run(learning, real_model, satisfaction)
