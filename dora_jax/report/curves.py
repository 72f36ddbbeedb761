"""Metrics of one or several runs -> the data of the plots that page.js draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dora_jax.base import metrics
from dora_jax.report.load import Row, RunData, configured, number
from dora_jax.report.markup import rounded

SHOWN_POINTS = 2000  # of a curve
CURVES = (  # title, metrics, what it shows; the first MAIN are in sight
    ("Reward", ("reward/mean",), "mean over the step's batch; its 95 % interval counts a group as one observation"),
    ("Held-out accuracy", ("eval/accuracy",), "share of held-out samples that count as solved, with its 95 % interval"),
    (
        "Solved",
        ("reward/solved_all", "reward/solved_none"),
        "share of the groups all of whose samples are right, or none",
    ),
    ("Length, tokens", ("response/length", "response/length_max"), "of the responses trained on"),
    ("Truncated", ("response/truncated",), "share of the samples that ended at the length limit"),
    ("Entropy", ("trainer/entropy",), "of the policy over the trained tokens"),
    ("KL, nats a token", ("trainer/kl_anchor", "trainer/kl_ref"), "of the policy to the anchor, and to the reference"),
    ("Effective samples", ("trainer/ess_share",), "by importance weights, of all"),
    ("Step time, s", ("time/step_s", "trainer/wait_s"), "whole step, and of it the trainer's wait"),
    ("Lag", ("lag/mean", "lag/max"), "staleness in versions of the groups trained on"),
    ("Rollout idle", ("rollout/idle_share",), "share of the instances' time without work"),
    ("Tokens per second", ("rollout/tokens_per_s", "trainer/tokens_per_s"), "sampled and trained on"),
    ("Mismatch", ("mismatch/mean", "mismatch/p99"), "|log-prob of the trainer - of the engine| at the same version"),
    ("Gradient norm", ("trainer/grad_norm",), "before clipping"),
)
MAIN = 9


def curves(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """For each plot the union of the runs' steps, and a line a run and metric."""
    plots = []
    for place, (title, keys, note) in enumerate(CURVES):
        rows = [run.evaluations if key.startswith("eval/") else run.steps for run in runs for key in keys]
        steps = sorted({row["step"] for chosen in rows for row in chosen})
        steps = steps[:: len(steps) // SHOWN_POINTS + 1]
        lines = []
        for i, run in enumerate(runs):
            for key in keys:
                chosen = run.evaluations if key.startswith("eval/") else run.steps
                by_step = {row["step"]: row for row in chosen}
                ends = [_ends(key, by_step.get(step, {}), run) for step in steps]
                low, high = [low for low, _ in ends], [high for _, high in ends]
                band = {"low": low, "high": high} if any(map(any, ends)) else {}
                label = key if len(runs) == 1 else f"{run.name} {key}"
                values = [rounded(by_step.get(step, {}).get(key)) for step in steps]
                lines.append({"label": label, "run": i, "values": values} | band)
        plots.append({"title": title, "note": note, "steps": steps, "lines": lines, "more": place >= MAIN})
    return plots


def _ends(key: str, row: Row, run: RunData) -> tuple[float | None, float | None]:
    if key == "eval/accuracy":
        low, high = accuracy_interval(row)
        return rounded(low), rounded(high)
    mean, std = number(row.get(key)), number(row.get("reward/std"))
    groups = number(configured(run, "orchestrator.groups_per_step"))
    if key != "reward/mean" or mean is None or std is None or not groups:
        return None, None
    half = metrics.Z * std / math.sqrt(groups)
    return rounded(mean - half), rounded(mean + half)


def accuracy_interval(row: Row) -> tuple[float | None, float | None]:
    """The interval as the run wrote it; in an older run the prompts count as the trials."""
    low, high = number(row.get("eval/accuracy_low")), number(row.get("eval/accuracy_high"))
    share = number(row.get("eval/accuracy"))
    if share is None or (low is not None and high is not None):
        return low, high
    return metrics.wilson(share, number(row.get("eval/prompts")) or 0)


def lags(run: RunData) -> dict[str, Any]:
    """Shares of the step's groups by lag."""
    names = sorted({key for row in run.steps for key in row if key.startswith("lag/") and key[4:].isdigit()}, key=_lag)
    rows = run.steps[:: len(run.steps) // SHOWN_POINTS + 1]
    zero = {"lag/0": 1.0}  # a step that names no lag has none
    shares = [[rounded((row if names else zero).get(name, 0.0)) or 0.0 for name in names] for row in rows]
    return {"steps": [row["step"] for row in rows], "lags": [_lag(name) for name in names], "shares": shares}


def _lag(name: str) -> int:
    return int(name[4:])
