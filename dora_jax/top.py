"""A run live in a terminal:  python -m dora_jax.top --workdir=runs/a [--once]

Shows the newest step's figures and what every instance decodes now, by version. Reads metrics.jsonl and timeline.jsonl
only, so it may run on any machine that sees the workdir, and may be ended at any time (Ctrl-C).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from absl import app, flags
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dora_jax.report import findings, timeline
from dora_jax.report.load import RunData, load, number

PERIOD_S = 1.0
BAR = 24  # characters of a full instance
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")  # by version
FIGURES = {  # metric -> (label, healthy range and meaning)
    "reward/mean": ("reward", "mean over the step's batch; rises"),
    "eval/accuracy": ("held-out accuracy", "of the newest evaluation; rises"),
    "lag/mean": (
        "mean lag",
        "versions between a group and the step that trains on it; below orchestrator.max_versions",
    ),
    "time/step_s": ("step, s", "from one published version to the next"),
    "rollout/tokens_per_s": ("tokens/s sampled", "by all instances"),
    "rollout/idle_share": ("rollout idle", "share of the instances' time without work; below 20 %"),
    "mismatch/mean": ("mismatch", "|log-prob of trainer - engine|, nats; below 0.02 in bfloat16, 1e-4 in float32"),
    "trainer/grad_norm": ("gradient norm", "before clipping; no sudden growth"),
    "trainer/entropy": ("entropy", "of the policy, nats a token; falls slowly"),
    "groups/failed_share": ("groups failed", "without a score; below 1 %"),
}


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "the workdir of a run", required=True)
    flags.DEFINE_bool("once", False, "print one picture and stop")


def picture(data: RunData, now_s: float) -> Group:
    """What is shown of a run at Unix time `now_s`."""
    last = data.steps[-1] if data.steps else {}
    figures = {**last, **(data.evaluations[-1] if data.evaluations else {}), "step": last.get("step", 0)}
    table = Table("figure", "now", "meaning", box=None, pad_edge=False)
    for key, (label, meaning) in FIGURES.items():
        value = number(figures.get(key))
        table.add_row(label, "-" if value is None else f"{value:.4g}", Text(meaning, style="dim"))
    told_s = data.timeline[-1]["t"] if data.timeline else None
    age = "no timeline yet" if told_s is None else f"last sign of life {max(0.0, now_s - told_s):.0f} s ago"
    head = Text(f"{data.name}: step {figures['step']}, {age}", style="bold")
    return Group(head, table, Text(findings.bottleneck(data.steps)), _instances(data))


def _instances(data: RunData) -> Table:
    """A line an instance: its slots, coloured by the version that each serves."""
    table = Table("instance", "slots in use", "versions", box=None, pad_edge=False)
    for lane in timeline.bars(data.timeline)["instances"]:
        _, _, fill, versions = lane["bars"][-1] if lane["bars"] else (0, 0, 0, [])
        bar = Text()
        if fill == timeline.LOADING:
            bar.append("loads weights", style="dim")
        elif fill == timeline.DOWN:
            bar.append("down", style="bold red")
        samples = sum(n for _, n in versions)
        for version, n in versions:
            width = max(1, round(BAR * fill / timeline.LEVELS * n / samples))
            bar.append("█" * width, style=COLOURS[version % len(COLOURS)])
        table.add_row(str(lane["id"]), bar, ", ".join(f"v{version}: {n}" for version, n in versions))
    return table


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"error: {argv[1]!r} is not understood; the flags are --workdir and --once", file=sys.stderr)
        return 2
    folder = Path(flags.FLAGS.workdir)
    try:
        first = picture(load(folder, folder.name), time.time())
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.FLAGS.once:
        Console().print(first)
        return 0
    try:
        with Live(first, refresh_per_second=2) as live:
            while True:
                time.sleep(PERIOD_S)
                live.update(picture(load(folder, folder.name), time.time()))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
