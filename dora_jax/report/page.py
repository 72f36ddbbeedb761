"""`RunData` of one or several runs -> one HTML page that holds all it needs: figures as text, plots and timeline as
data.

Tables, sentences and samples are in the HTML and stay readable without JavaScript; assets/page.js draws the rest from
the JSON beside it. Law: nothing that a run wrote is markup here: text is escaped, JSON holds no `<`, and each sample
stands in an element of its own, so that its direction of writing changes nothing around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from dora_jax.config import changes
from dora_jax.report import curves, findings, samples, seconds, timeline
from dora_jax.report.load import Row, RunData, configured, series
from dora_jax.report.markup import as_json, escaped, figure, percent, table

LISTED_INSTANCES = 32  # more are behind a fold
SHOWN_QUARANTINES = 3  # of an instance
SHOWN_DIFFERENCES = 100  # fields in which runs differ


def page(runs: Sequence[RunData]) -> str:
    pictures = [timeline.bars(run.timeline) for run in runs]
    read = [samples.section(run.rollouts, number) for number, run in enumerate(runs)]
    body = "".join(
        _run(run, picture, html, number=i)
        for i, (run, picture, (html, _)) in enumerate(zip(runs, pictures, read, strict=True))
    )
    data = {
        "runs": [run.name for run in runs],
        "curves": curves.curves(runs),
        "lags": [curves.lags(run) for run in runs],
        "timelines": [
            {name: value for name, value in picture.items() if name != "usage"}
            | {"waits": {str(row["step"]): str(row.get("waits", "")) for row in run.steps} if picture["steps"] else {}}
            for run, picture in zip(runs, pictures, strict=True)
        ],
        "tokens": [tokens for _, tokens in read],
    }
    title = "dora_jax: " + ", ".join(run.name for run in runs)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escaped(title)}</title><style>{_asset('uPlot.min.css')}{_asset('page.css')}</style></head><body>"
        f"<header><h1>{escaped(title)}</h1>{''.join(map(_verdict, runs))}</header><main>"
        "<section><h2>Held-out prompts, before and after training</h2>"
        f"{''.join(map(samples.before_and_after, runs))}</section>"
        f"<section id=health><h2>Health</h2>{''.join(map(_health, runs))}</section>"
        f"<section><h2>Timeline</h2>{''.join(map(_timeline, runs, pictures, range(len(runs))))}</section>"
        "<section><h2>Seconds of a step</h2>"
        f"{''.join(f'<p>{escaped(run.name)}</p>{seconds.picture(run.timeline)}' for run in runs)}</section>"
        "<section><h2>Curves</h2><p class=note>A click on a curve opens a sample of that step.</p>"
        "<div id=curves class=grid></div>"
        "<details id=more><summary>more curves</summary><div class=grid></div></details>"
        "<noscript><p>The curves and the timeline need JavaScript; all figures are in the "
        f"tables.</p></noscript></section>{_comparison(runs)}{body}</main>"
        f"<script type=application/json id=data>{as_json(data)}</script>"
        f"<script>{_asset('uPlot.iife.min.js')}</script><script>{_asset('page.js')}</script></body></html>"
    )


# ---------------------------------------------------------------- parts of the page


def _comparison(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        trainer, rollout = findings.idle_shares(run.steps[1:])
        low, high = curves.accuracy_interval(last)
        shown = percent(last.get("eval/accuracy"))
        rows.append(
            (
                run.name,
                configured(run, "orchestrator.mode") or "-",
                len(run.steps),
                (shown if low is None else f"{shown} ({percent(low)} to {percent(high)})"),
                figure(findings.mean(series(run.steps, "reward/mean")[-10:])),
                figure(findings.mean(series(run.steps[1:], "time/step_s"))),
                figure(findings.mean(series(run.steps[1:], "rollout/tokens_per_s"))),
                figure(findings.mean(series(run.steps, "lag/mean"))),
                percent(trainer),
                percent(rollout),
            )
        )
    head = ("run", "mode", "steps", "held-out accuracy", "reward, last 10", "s a step", "tokens/s", "mean lag",
            "trainer idle", "rollout idle")  # fmt: skip
    return f"<section><h2>Summary</h2>{table(head, rows)}{_differences(runs)}</section>"


def _differences(runs: Sequence[RunData]) -> str:
    """The fields in which the runs' configurations differ."""
    flat = [dict(_fields(run.config)) for run in runs]
    names = [name for name in dict.fromkeys(name for each in flat for name in each)]
    rows = [
        (name, *(each.get(name, "-") for each in flat)) for name in names if len({each.get(name) for each in flat}) > 1
    ]
    if not rows:
        return ""
    return (
        f"<details open><summary>fields that differ: {len(rows)}</summary>"
        f"{table(('field', *(run.name for run in runs)), rows[:SHOWN_DIFFERENCES])}</details>"
    )


def _fields(tree: Row, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)[:200]


def _verdict(run: RunData) -> str:
    """The verdict in a line, above everything."""
    names = [verdict.name for verdict in findings.health(run)]
    if not run.steps:
        return f"<p class=verdict>{escaped(run.name)}: no step has ended yet.</p>"
    line = f"<a href=#health>{escaped(', '.join(names))}</a>" if names else "healthy"
    return f"<p class='verdict {'sick' if names else 'well'}'>{escaped(run.name)}: {line}</p>"


def _health(run: RunData) -> str:
    verdicts = findings.health(run)
    if not verdicts:
        sentence = "no rule finds anything at its newest step." if run.steps else "no step has ended yet."
        return f"<p>{escaped(run.name)}: {sentence}</p>"
    items = "".join(f"<li>{escaped(str(verdict))}.</li>" for verdict in verdicts)
    return f"<p>{escaped(run.name)}:</p><ul>{items}</ul>"


def _timeline(run: RunData, picture: Row, number: int) -> str:
    thinned = picture["count"] - len(picture["instances"])
    note = f"<p>{thinned} of {picture['count']} instances are left out of the picture.</p>" if thinned else ""
    return (
        f"<p>{escaped(run.name)}: {escaped(findings.progress(run))} {escaped(findings.bottleneck(run.steps))}</p>"
        f"<canvas class=timeline data-run={number}></canvas><p class=tip></p>{note}<p class=note>One row an instance, "
        "coloured by version; height is the share of its slots in use. Grey is idle, hatched a load of weights, black "
        "a dead instance; lines are moves of running samples, dashed lines restarts. Point at a bar for its version or "
        "for what the idle role waits for; scroll to zoom, drag to shift, double-click for all of it.</p>"
    )


def _run(run: RunData, picture: dict[str, Any], read: str, number: int) -> str:
    bias = findings.length_bias(run.lengths)
    bad, suspects = findings.suspicious(run), findings.quarantines(run)
    sentences = [
        *([bias[2]] if bias else []),
        *([run.audit] if run.audit else []),
        *(f"Changed at step {row['step']}: {changes.sentence(row['changed'])}." for row in run.changes),
        *(f"{remark}." for remark in run.remarks),
        *(f"Instance {i} looks unhealthy: {why}." for i, why in sorted(bad.items())),
        *(reasons for _, each in sorted(suspects.items()) for reasons in each[:SHOWN_QUARANTINES]),
    ]
    bad |= {
        i: "; ".join([*([bad[i]] if i in bad else []), f"quarantined {len(each)} x"]) for i, each in suspects.items()
    }
    return (
        f"<section><h2>{escaped(run.name)}</h2>{''.join(f'<p>{escaped(s)}</p>' for s in sentences)}"
        f"<h3>Lag by step</h3><canvas class=lags data-run={number}></canvas>"
        f"<h3>Ledger</h3>{table(('what', 'count'), findings.ledger(run))}"
        f"<h3>Evaluations</h3>{_evaluations(run.evaluations)}"
        f"<h3>Instances</h3>{_instances(run, picture, bad)}"
        f"<h3>Samples</h3>{samples.stored(run)}{read}"
        f"<h3>Configuration</h3><details><summary>{len(run.overrides)} overrides</summary>"
        f"<pre>{escaped(json.dumps(run.overrides, indent=1))}</pre></details>"
        "<details><summary>all "
        f"fields</summary><pre>{escaped(json.dumps(run.config, indent=1))}</pre></details></section>"
    )


def _evaluations(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        low, high = curves.accuracy_interval(row)
        lines.append(
            (
                row.get("step"),
                percent(row.get("eval/accuracy")),
                f"{percent(low)} to {percent(high)}",
                percent(row.get("eval/pass_at_k")),
                figure(row.get("eval/reward/mean")),
                figure(row.get("eval/response_length")),
                figure(row.get("eval/prompts")),
            )
        )
    return table(("version", "accuracy", "95 % interval", "pass@k", "reward", "length", "prompts"), lines)


def _instances(run: RunData, picture: dict[str, Any], bad: dict[int, str]) -> str:
    usage: dict[int, timeline.Usage] = picture["usage"]
    rows = []
    for i in sorted({*run.instances, *usage}):
        row, use = run.instances.get(i, {}), usage.get(i)
        tokens, up_s = row.get("tokens") or 0, use.up_s if use else 0
        rows.append(
            (
                i,
                f"{row.get('samples', 0):,.0f}",
                f"{tokens:,.0f}",
                figure(tokens / up_s if up_s else None),
                percent(row.get("zero_tokens", 0) / tokens if tokens else None),
                figure(row.get("logprob_sum", 0) / tokens if tokens else None),
                f"{row.get('nonfinite', 0):.0f}",
                percent(use.idle_s / up_s if use and up_s else None),
                percent(use.loading_s / up_s if use and up_s else None),
                f"{use.longest_idle_s:.1f}" if use else "-",
                use.deaths if use else "-",
                bad.get(i, ""),
            )
        )
    head = ("instance", "samples", "tokens", "tokens/s", "token 0", "mean log-prob", "non-finite", "idle", "loading",
            "longest idle, s", "deaths", "remark")  # fmt: skip
    if len(rows) <= LISTED_INSTANCES:
        return table(head, rows)
    remarked = [row for row in rows if row[-1]]
    return (table(head, remarked) if remarked else "<p>No instance looks unhealthy.</p>") + (
        f"<details><summary>all {len(rows)} instances</summary>{table(head, rows)}</details>"
    )


def _asset(name: str) -> str:
    return resources.files("dora_jax.report").joinpath("assets", name).read_text(encoding="utf-8")
