"""The table of modes: what each row of a simulation took, what waited on what, and how that compares with the paper.

Where a row ran with several seeds, its figures are means, and the first ones are followed by their standard deviation.
Three blocks: the outcome with its floors (bound.py), in minutes a step, where the time of both roles went, and what was
moved. One more where a row mixes tasks: the share of each that was asked for and trained. Another where a row names
published figures ("step_min", "rollout_only", "tokens_per_s"; "fitted" is 1 where parameters were fitted on that row,
"misfit" where no parameters can meet it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter

from dora_jax.sim import bound, workload
from dora_jax.sim.config import Row
from dora_jax.sim.meter import CAUSES, DOWN, IDLE_CAPPED, IDLE_TAIL, TRAIN, WAIT_DEADLINE, WAIT_GROUPS, Result
from dora_jax.sim.run import orchestrator_config

Line = tuple[Row, Result]
Spread = Callable[[Callable[[Result], float]], float]  # figure -> its standard deviation over the seeds of a row
TITLES = {IDLE_CAPPED: "idle: capped", IDLE_TAIL: "idle: tail"}


def render(lines: Sequence[Line], spreads: Sequence[Spread] = ()) -> str:
    rows = []
    for i, (row, r) in enumerate(lines):
        lags = " ".join(f"{lag}:{share:.0%}" for lag, share in sorted(r.lags.items()))
        minutes, share, tokens = _minutes(r.step_s), f"{r.rollout_only:.1%}", f"{r.tokens_per_s:,.0f}"
        if spreads:
            minutes += f" ± {_minutes(spreads[i](attrgetter('step_s')))}"
            share += f" ± {spreads[i](attrgetter('rollout_only')):.1%}"
            tokens += f" ± {spreads[i](attrgetter('tokens_per_s')):,.0f}"
        # What versions on instances of their own add to a step; "-" where versions do not share the instances.
        apart = orchestrator_config(row.config, row.mode).decisions.repartitions and row.config.hardware.residents == 1
        unused_s = bound.fragment_s(row.config) / max(1, row.config.orchestrator.stride)
        rows.append([
            row.label, minutes, share, tokens, f"{r.occupancy:.1f}",
            lags, f"{r.lag_mean:.2f}", f"{r.mixed:.1%}", f"{r.live_mean:.1f}/{r.live_max}",
            _minutes(bound.step_floor_s(row)), (_minutes(unused_s) if apart else "-")])  # fmt: skip
    head = ("mode", "min/step", "rollout only", "tokens/s", "batch", "groups by lag", "mean lag", "mixed samples",
            "versions mean/max", "floor", "fragments")  # fmt: skip
    blocks = [grid(head, rows), *_fastest(lines), _time(lines), _traffic(lines)]
    if any(row.config.orchestrator.elastic for row, _ in lines):
        # "late": the trainer's longest wait for chips that were lent.
        columns = ("chips of the trainer", "lends a step", "instances lent", "of", "late s")
        rows = [
            [row.label, f"{r.lends:.1f}", f"{r.lent:.2f}", str(len(row.config.hardware.lendable)), f"{r.late_s:.1f}"]
            for row, r in lines
        ]
        blocks.append(grid(columns, rows))
    if any(row.config.workload.mix for row, _ in lines):
        blocks.append(_tasks(lines, spreads))
    if any(row.published for row, _ in lines):
        blocks.append(_published(lines))
    return "\n\n".join(blocks)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    out = []
    for first, *others in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        out.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(out)


# ---------------------------------------------------------------- private


def _fastest(lines: Sequence[Line]) -> list[str]:
    """Which row is the fastest of those that change nothing in the algorithm, and what each faster one changes."""
    changes: dict[str, list[str]] = {}
    for row, r in lines:
        decisions = orchestrator_config(row.config, row.mode).decisions
        changes[row.label] = [
            what
            for what, holds in (
                (f"{r.mixed:.1%} of its samples are of several versions", decisions.mixes_versions),
                ("nothing bounds its lag", decisions.max_lag is None),
                (
                    f"it may give up samples, here {r.cancelled_tokens:,.0f} tokens a step",
                    decisions.on_publish == "evict" or decisions.over_issued,
                ),
            )
            if holds
        ]
    keeps = [(r.step_s, row.label) for row, r in lines if not changes[row.label]]
    if len(lines) < 2 or not keeps:
        return []
    best_s, best = min(keeps)
    sentence = (
        "fastest of the rows that keep every sample, each of one version, within a bound on its lag: "
        f"{best}, {_minutes(best_s)} min/step"
    )
    faster = [
        f"faster is {row.label}, {_minutes(r.step_s)}: {', '.join(changes[row.label])}"
        for row, r in sorted(lines, key=lambda line: line[1].step_s)
        if r.step_s < best_s and changes[row.label]
    ]
    return ["\n".join([sentence, *faster])]


def _time(lines: Sequence[Line]) -> str:
    causes = [cause for cause in CAUSES if cause != DOWN or any(r.rollout[DOWN] > 0 for _, r in lines)]
    head = ["share of time", "trainer: train", "wait: groups", "wait: rule"]
    head += ["rollout: " + causes[0], *(TITLES.get(cause, cause) for cause in causes[1:])]
    rows = []
    for row, r in lines:
        trainer = [r.trainer[name] for name in (TRAIN, WAIT_GROUPS, WAIT_DEADLINE)]
        rows.append([row.label, *(f"{share:.1%}" for share in (*trainer, *(r.rollout[cause] for cause in causes)))])
    return grid(head, rows)


def _traffic(lines: Sequence[Line]) -> str:
    head = ["a step", "moves", "KV GB", "reloads", "weights GB", "re-prefilled", "given up", "preempted", "ready left"]
    rows = [[
        row.label, f"{r.moves:.0f}", f"{r.move_bytes / 1e9:.1f}", f"{r.reloads:.0f}", f"{r.weight_bytes / 1e9:,.0f}",
        f"{r.reprefilled_tokens:,.0f}", f"{r.cancelled_tokens:,.0f}", f"{r.preempted:.0f}", f"{r.ready_left:.0f}"]
        for row, r in lines]  # fmt: skip
    return grid(head, rows)


def _tasks(lines: Sequence[Line], spreads: Sequence[Spread]) -> str:
    """Groups by task; "waiting": samples that wait for their environment without a slot, on average."""
    names = sorted({name for row, _ in lines for name in row.config.workload.mix})
    rows = []
    for i, (row, r) in enumerate(lines):
        asked = workload.weights(row.config.workload)
        cells = [row.label, f"{r.waiting:.0f}"]
        for name in names:
            trained = f"{_share(name, r):.1%}"
            if spreads:
                trained += f" ± {spreads[i](functools.partial(_share, name)):.1%}"
            cells += [f"{asked.get(name, 0) / max(1, sum(asked.values())):.1%}", trained]
        rows.append(cells)
    return grid(
        ["groups by task", "waiting", *(head for name in names for head in (f"{name}: asked", "trained"))], rows
    )


def _share(task: str, result: Result) -> float:
    return result.tasks.get(task, 0.0)


def _published(lines: Sequence[Line]) -> str:
    """Only rows that name published figures; ratios are to the first of them."""
    head = ["against the published figures", "min/step", "published", "off by", "rollout only", "published", "off by",
            "tokens/s ratio", "published", "parameters"]  # fmt: skip
    lines = [(row, r) for row, r in lines if row.published]
    first, first_result = lines[0]
    rows = []
    for row, r in lines:
        step, share, tokens_per_s = (row.published[name] for name in ("step_min", "rollout_only", "tokens_per_s"))
        parameters = "fitted here" if row.published["fitted"] else "not fitted here"
        if row.published["misfit"]:
            parameters = "misfit: none can meet it"
        rows.append(
            [
                row.label,
                _minutes(r.step_s),
                f"{step:.2f}",
                f"{r.step_s / 60 / step - 1:+.1%}",
                f"{r.rollout_only:.1%}",
                f"{share:.1%}",
                f"{100 * (r.rollout_only - share):+.1f} pt",
                f"{r.tokens_per_s / first_result.tokens_per_s:.2f}",
                f"{tokens_per_s / first.published['tokens_per_s']:.2f}",
                parameters,
            ]
        )
    return grid(head, rows)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.2f}"
