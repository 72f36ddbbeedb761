"""`RunData` of one or several runs -> one HTML page that holds all it needs: figures as text, plots and timeline as data.

Tables, sentences and samples are in the HTML and stay readable without JavaScript; assets/page.js draws the rest from the
JSON beside it. Law: nothing that a run wrote is markup here: text is escaped, JSON holds no `<`, and each sample stands in an
element of its own, so that its direction of writing changes nothing around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from dora_jax.report import findings, timeline
from dora_jax.report.load import Row, RunData, number, series

SHOWN_SAMPLES = 400  # groups; more are thinned out evenly
SHOWN_CHARACTERS = 4000  # of a text
SHOWN_POINTS = 2000  # of a curve
CURVES = (  # title, metrics, what it shows
    ("Reward", ("reward/mean",), "mean over the step's batch"),
    ("Held-out accuracy", ("eval/accuracy",), "share of held-out samples that count as solved, with its 95 % interval"),
    ("Lag", ("lag/mean", "lag/max"), "staleness in versions of the groups trained on"),
    ("Step time, s", ("time/step_s", "trainer/wait_s"), "whole step, and of it the trainer's wait"),
    ("Rollout idle", ("rollout/idle_share",), "share of the instances' time without work"),
    ("Tokens per second", ("rollout/tokens_per_s", "trainer/tokens_per_s"), "sampled and trained on"),
    ("Length, tokens", ("response/length", "response/length_max"), "of the responses trained on"),
    ("Mismatch", ("mismatch/mean", "mismatch/p99"), "|log-prob of the trainer - of the engine| at the same version"),
    ("Entropy", ("trainer/entropy",), "of the policy over the trained tokens"),
    ("Gradient norm", ("trainer/grad_norm",), "before clipping"),
)


def page(runs: Sequence[RunData]) -> str:
    pictures = [timeline.bars(run.timeline) for run in runs]
    data = {
        "runs": [run.name for run in runs],
        "curves": [_curve(title, keys, note, runs) for title, keys, note in CURVES],
        "lags": [_lags(run) for run in runs],
        "timelines": pictures,
    }
    body = "".join(_run(run, picture, number=i) for i, (run, picture) in enumerate(zip(runs, pictures, strict=True)))
    title = "dora_jax: " + ", ".join(run.name for run in runs)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_asset('uPlot.min.css')}{_asset('page.css')}</style></head><body>"
        f"<header><h1>{escape(title)}</h1></header><main>"
        f"{_comparison(runs)}<section><h2>Curves</h2><div id=curves class=grid></div>"
        "<noscript><p>The curves and the timeline need JavaScript; all figures are in the tables.</p></noscript></section>"
        f"{body}</main><script type=application/json id=data>{_json(data)}</script>"
        f"<script>{_asset('uPlot.iife.min.js')}</script><script>{_asset('page.js')}</script></body></html>"
    )


# ---------------------------------------------------------------- parts of the page


def _comparison(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        trainer, rollout = findings.idle_shares(run.steps[1:])
        rows.append(
            (
                run.name,
                str((run.config.get("orchestrator") or {}).get("mode", "-")),
                len(run.steps),
                _percent(last.get("eval/accuracy")),
                _figure(findings.mean(series(run.steps[1:], "time/step_s"))),
                _figure(findings.mean(series(run.steps, "lag/mean"))),
                _percent(trainer),
                _percent(rollout),
            )
        )
    head = ("run", "mode", "steps", "held-out accuracy", "s a step", "mean lag", "trainer idle", "rollout idle")
    return f"<section><h2>Summary</h2>{_table(head, rows)}</section>"


def _run(run: RunData, picture: dict[str, Any], number: int) -> str:
    bias = findings.length_bias(run.lengths)
    sentences = [findings.bottleneck(run.steps), *([bias[2]] if bias else []), *(f"{r}." for r in run.remarks)]
    bad = findings.suspicious(run)
    sentences += [f"Instance {i} looks unhealthy: {why}." for i, why in sorted(bad.items())]
    thinned = picture["count"] - len(picture["instances"])
    note = f"<p>{thinned} of {picture['count']} instances are left out of the picture.</p>" if thinned else ""
    return (
        f"<section><h2>{escape(run.name)}</h2>{''.join(f'<p>{escape(s)}</p>' for s in sentences)}"
        f"<h3>Timeline</h3><p class=note>One row an instance, coloured by version; height is the share of its slots in "
        "use. Grey is idle, hatched a load of weights, black a dead instance; lines are moves of running samples. Scroll "
        "to zoom, drag to shift.</p>"
        f"<canvas class=timeline data-run={number}></canvas><p class=tip></p>{note}"
        f"<h3>Lag by step</h3><canvas class=lags data-run={number}></canvas>"
        f"<h3>Ledger</h3>{_table(('what', 'count'), findings.ledger(run))}"
        f"<h3>Evaluations</h3>{_evaluations(run.evaluations)}"
        f"<h3>Instances</h3>{_instances(run, picture, bad)}"
        f"<h3>Samples</h3>{_samples(run.samples)}"
        f"<h3>Configuration</h3><details><summary>{len(run.overrides)} overrides</summary>"
        f"<pre>{escape(json.dumps(run.overrides, indent=1))}</pre></details>"
        f"<details><summary>all fields</summary><pre>{escape(json.dumps(run.config, indent=1))}</pre></details></section>"
    )


def _evaluations(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        accuracy = number(row.get("eval/accuracy"))
        trials = (number(row.get("eval/prompts")) or 0) * (number(row.get("eval/k")) or 1)
        low, high = findings.interval(accuracy, trials) if accuracy is not None else (None, None)
        lines.append(
            (
                row.get("step"),
                _percent(accuracy),
                f"{_percent(low)} to {_percent(high)}",
                _percent(row.get("eval/pass_at_k")),
                _figure(row.get("eval/reward/mean")),
                _figure(row.get("eval/response_length")),
            )
        )
    return _table(("version", "accuracy", "95 % interval", "pass@k", "reward", "length"), lines)


def _instances(run: RunData, picture: dict[str, Any], bad: dict[int, str]) -> str:
    idle = timeline.idle_by_instance(picture)
    rows = []
    for i, row in sorted(run.instances.items()):
        tokens = row.get("tokens") or 0
        waits, loads = idle.get(i, (None, None))
        rows.append(
            (
                i,
                f"{row.get('samples', 0):,.0f}",
                f"{tokens:,.0f}",
                _percent(row.get("zero_tokens", 0) / tokens if tokens else None),
                _figure(row.get("logprob_sum", 0) / tokens if tokens else None),
                f"{row.get('nonfinite', 0):.0f}",
                _percent(waits),
                _percent(loads),
                bad.get(i, ""),
            )
        )
    head = ("instance", "samples", "tokens", "token 0", "mean log-prob", "non-finite", "idle", "loading", "remark")
    return _table(head, rows)


def _samples(rows: Sequence[Row]) -> str:
    shown = rows if len(rows) <= SHOWN_SAMPLES else [rows[i * len(rows) // SHOWN_SAMPLES] for i in range(SHOWN_SAMPLES)]
    parts = []
    for row in shown:
        samples = [s for s in row.get("samples") or [] if isinstance(s, dict)]
        rewards = ", ".join(_figure(s.get("reward")) for s in samples)
        answers = "".join(
            f"<p class=note>reward {_figure(s.get('reward'))}, {_figure(s.get('reward_above_mean'))} above its group's mean; "
            f"{escape(str(s.get('tokens', '-')))} tokens; {escape(str(s.get('finish', '-')))}; mean log-prob "
            f"{_figure(s.get('mean_logprob'))}, lowest {_figure(s.get('min_logprob'))}</p>{_text(s.get('text'))}"
            for s in samples
        )
        parts.append(
            f"<details id='step{escape(str(row.get('step')))}'><summary>step {escape(str(row.get('step')))}, group "
            f"{escape(str(row.get('group')))}, version {escape(str(row.get('version')))}: rewards {rewards}</summary>"
            f"{_text(row.get('prompt'))}<p class=note>expected: <bdi>{escape(str(row.get('expected'))[:200])}</bdi></p>"
            f"{answers}</details>"
        )
    return "".join(parts) or "<p>No sample is recorded.</p>"


# ---------------------------------------------------------------- data of the plots


def _curve(title: str, keys: Sequence[str], note: str, runs: Sequence[RunData]) -> dict[str, Any]:
    """One plot: the union of the runs' steps, and a line a run and metric."""
    rows = [run.evaluations if key.startswith("eval/") else run.steps for run in runs for key in keys]
    steps = sorted({row["step"] for chosen in rows for row in chosen})
    steps = steps[:: len(steps) // SHOWN_POINTS + 1]
    lines = []
    for run in runs:
        for key in keys:
            chosen = run.evaluations if key.startswith("eval/") else run.steps
            by_step = {row["step"]: row for row in chosen}
            label = key if len(runs) == 1 else f"{run.name} {key}"
            values = [_rounded(by_step.get(step, {}).get(key)) for step in steps]
            low, high = _band(key, [by_step.get(step, {}) for step in steps])
            lines.append({"label": label, "run": run.name, "values": values, "low": low, "high": high})
    return {"title": title, "note": note, "steps": steps, "lines": lines}


def _band(key: str, rows: Sequence[Row]) -> tuple[list[float | None], list[float | None]] | tuple[None, None]:
    if key != "eval/accuracy":
        return None, None
    low, high = [], []
    for row in rows:
        share, n = number(row.get(key)), (number(row.get("eval/prompts")) or 0) * (number(row.get("eval/k")) or 1)
        ends = (None, None) if share is None else findings.interval(share, n)
        low.append(_rounded(ends[0]))
        high.append(_rounded(ends[1]))
    return low, high


def _lags(run: RunData) -> dict[str, Any]:
    """Shares of the step's groups by lag."""
    names = sorted({key for row in run.steps for key in row if key.startswith("lag/") and key[4:].isdigit()}, key=_lag)
    rows = run.steps[:: len(run.steps) // SHOWN_POINTS + 1]
    zero = {"lag/0": 1.0}  # a step that names no lag has none
    shares = [[_rounded((row if names else zero).get(name, 0.0)) or 0.0 for name in names] for row in rows]
    return {"steps": [row["step"] for row in rows], "lags": [_lag(name) for name in names], "shares": shares}


def _lag(name: str) -> int:
    return int(name[4:])


# ---------------------------------------------------------------- text


def _table(head: Iterable[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are text, whatever they hold."""
    names = list(head)
    lines = "".join(
        "<tr>"
        + "".join(f"<td data-of='{escape(str(h))}'>{escape(str(c))}</td>" for h, c in zip(names, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class=scroll><table><tr>{''.join(f'<th>{escape(str(h))}</th>' for h in names)}</tr>{lines}</table></div>"
    )


def _text(value: Any) -> str:
    text = str(value if value is not None else "")
    more = f" [... {len(text) - SHOWN_CHARACTERS:,} characters]" if len(text) > SHOWN_CHARACTERS else ""
    return f"<pre dir=auto class=sample>{escape(text[:SHOWN_CHARACTERS] + more)}</pre>"


def _figure(value: Any) -> str:
    known = number(value)
    return "-" if known is None else f"{known:.4g}"


def _percent(value: Any) -> str:
    known = number(value)
    return "-" if known is None else f"{known:.1%}"


def _rounded(value: Any) -> float | None:
    known = number(value)
    return None if known is None else float(f"{known:.5g}")


def _json(value: Any) -> str:
    """JSON for a script element: no `<`, so that nothing in it ends the element, and no NaN."""
    return (
        json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    )


def _asset(name: str) -> str:
    return resources.files("dora_jax.report").joinpath("assets", name).read_text(encoding="utf-8")
