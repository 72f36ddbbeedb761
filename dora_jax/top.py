"""A run live in a terminal:  python -m dora_jax.top --workdir=runs/a [--once]

Shows the newest step's figures and what every instance decodes now, by version. It reads files of the workdir only,
which may be in a bucket, so that it runs on any machine that sees them, and may be ended at any time (Ctrl-C).
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

from dora_jax.config import ConfigError
from dora_jax.report import findings, legend, seconds, timeline
from dora_jax.report.load import RunData, load, number

PERIOD_S = 1.0
BAR = 24  # characters of a full instance
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")  # by version
BUCKET_PERIOD_S = 15.0  # a run copies its logs into its bucket twice a minute
FIGURES = {  # metric -> label
    "reward/mean": "reward",
    "eval/accuracy": "held-out accuracy",
    "lag/mean": "mean lag",
    "time/step_s": "step, s",
    "rollout/tokens_per_s": "tokens/s sampled",
    "rollout/idle_share": "rollout idle",
    "mismatch/mean": "mismatch",
    "trainer/grad_norm": "gradient norm",
    "trainer/entropy": "entropy",
    "groups/failed_share": "groups failed",
}


def picture(data: RunData, now_s: float) -> Group:
    """What is shown of a run at Unix time `now_s`."""
    last = data.steps[-1] if data.steps else {}
    figures = {**last, **(data.evaluations[-1] if data.evaluations else {}), "step": last.get("step", 0)}
    table = Table("figure", "now", "meaning", box=None, pad_edge=False)
    for key, label in FIGURES.items():
        what, healthy = legend.METRICS.get(key) or legend.EVALUATION[key]
        value, low, high = (number(figures.get(f"{key}{end}")) for end in ("", "_low", "_high"))
        shown = "-" if value is None else f"{value:.4g}"
        if low is not None and high is not None:
            shown += f" ({low:.2f} to {high:.2f})"
        table.add_row(label, shown, Text(f"{what}; {healthy}" if healthy else what, style="dim"))
    last_t = data.timeline[-1]["t"] if data.timeline else None
    age = "no timeline yet" if last_t is None else f"last row {max(0.0, now_s - last_t):.0f} s ago"
    head = Text(f"{data.name}: step {figures['step']}, {age}", style="bold")
    # The newest word on each instance that was in quarantine
    quarantined = [Text(reasons[-1], style="red") for _, reasons in sorted(findings.quarantines(data).items())]
    unhealthy = [Text(f"{verdict}.", style="bold red") for verdict in findings.health(data)]
    spent = [Text(line) for line in seconds.phrases(seconds.steps(data.timeline)[-1:])]
    return Group(head, *unhealthy, table, Text(findings.bottleneck(data.steps)), *spent, _instances(data), *quarantined)


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
    workdir = flags.FLAGS.workdir
    period_s = BUCKET_PERIOD_S if "://" in workdir else PERIOD_S
    try:
        console = Console()
        first = picture(load(workdir, Path(workdir).name, texts=False), time.time())
        if flags.FLAGS.once:
            console.print(first)
            return 0
        with Live(first, console=console, refresh_per_second=2) as live:
            while True:
                time.sleep(period_s)
                live.update(picture(load(workdir, Path(workdir).name, texts=False), time.time()))
    except (OSError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "the workdir of a run, a folder or gs://bucket/folder", required=True)
    flags.DEFINE_bool("once", False, "print one picture and stop")
    app.run(main)
