"""Rows of timeline.jsonl -> where the seconds of a step went: one stacked picture, and the figures of `dora_jax.top`.

A lane is what one thread did: the trainer's, the controller's, and the instances' (the mean of those that the rows
name). Work is coloured, waits are grey; each lane's stack is as high as the step took. Values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dora_jax.base.lanes import WAITING, summed
from dora_jax.report.load import Row, number
from dora_jax.report.markup import escaped

COLUMNS = 240  # of the picture: more steps are taken together
SMALL = 0.001  # of the step: what took less is not listed
COLOURS = ["#2458c5", "#d9822b", "#2f9e44", "#c23030", "#7157d9", "#1098ad", "#b8860b", "#e8590c", "#0e9f8a", "#a0694d"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    step: int
    seconds: float
    lanes: dict[str, dict[str, float]]  # trainer, instances, controller -> what it did -> seconds


def steps(rows: Sequence[Row]) -> list[StepTimes]:
    """A row a step, of a step that was made again the last one."""
    by_step: dict[int, StepTimes] = {}
    for row in rows:
        spent, step, seconds = row.get("spent"), row.get("step"), number(row.get("seconds"))
        if not isinstance(spent, dict) or type(step) is not int or not seconds or seconds < 0:
            continue
        lanes = {
            str(name): {str(does): s for does, value in lane.items() if (s := number(value)) is not None and s > 0}
            for name, lane in spent.items()
            if isinstance(lane, dict)
        }
        instances = [lane for name, lane in lanes.items() if name.isdigit()]
        mean = {does: s / len(instances) for does, s in summed(*instances).items()}
        shown = {"trainer": lanes.get("trainer"), "instances": mean, "controller": lanes.get("controller")}
        by_step[step] = StepTimes(
            step=step, seconds=seconds, lanes={name: lane for name, lane in shown.items() if lane}
        )
    return [by_step[step] for step in sorted(by_step)]


def means(taken: Sequence[StepTimes]) -> dict[str, dict[str, float]]:
    """lane -> what it did -> mean seconds a step, work before waits and the longest first."""
    whole: dict[str, dict[str, float]] = {}
    for name in taken[-1].lanes if taken else ():
        total = summed(*(step.lanes.get(name, {}) for step in taken))
        order = sorted(total, key=lambda does: (does.startswith(WAITING), -total[does]))
        whole[name] = {does: total[does] / len(taken) for does in order}
    return whole


def phrases(taken: Sequence[StepTimes]) -> list[str]:
    """A line a lane: `trainer 18.2 s a step: update 15.1, waiting for rollouts 2.0`."""
    return [
        f"{name} {sum(lane.values()):.3g} s a step: "
        + ", ".join(f"{does} {s:.3g}" for does, s in sorted(lane.items(), key=lambda item: -item[1]) if s > 0.005)
        for name, lane in means(taken).items()
    ]


def picture(rows: Sequence[Row]) -> str:
    taken = steps(rows)
    settled = taken[1:] or taken  # the first step compiles
    if not settled:
        return "<p>no step tells where its time went.</p>"
    width = -(-len(settled) // COLUMNS)
    columns = [settled[i : i + width] for i in range(0, len(settled), width)]
    top = max(sum(step.seconds for step in column) / len(column) for column in columns)
    mean_s, lanes = sum(step.seconds for step in settled) / len(settled), []
    for name, whole in means(settled).items():
        height = [0.0] * len(columns)
        shapes, marks = [], []
        for at, (does, s) in enumerate(whole.items()):
            waits = does.startswith(WAITING)
            colour = "currentColor" if waits else COLOURS[at % len(COLOURS)]
            opacity = 0.12 + 0.1 * (at % 4) if waits else 1
            path = ""
            for i, column in enumerate(columns):
                bar = 100 / top * sum(step.lanes.get(name, {}).get(does, 0.0) for step in column) / len(column)
                height[i] += bar
                path += f"M{i} {100 - height[i]:.2f}h1v{bar:.2f}h-1z" if bar > 0.005 else ""
            fill = f"<path fill='{colour}' fill-opacity={opacity:.2f} d="
            shapes.append(f"{fill}'{path}'/>")
            if s > SMALL * mean_s:
                box = f"<svg class=key viewBox='0 0 1 1'>{fill}'M0 0h1v1H0z'/></svg>"
                marks.append(f"<li>{box}{escaped(does)} {s:.3g} s, {s / mean_s:.1%}</li>")
        total = sum(whole.values())
        lanes.append(
            f"<h3>{escaped(name)}: {total:.3g} s of {mean_s:.3g} s a step ({total / mean_s:.1%})</h3>"
            f"<svg class=stack viewBox='0 0 {len(columns)} 100' preserveAspectRatio=none role=img "
            f"aria-label='seconds a step of the {escaped(name)}'>{''.join(shapes)}</svg>"
            f"<ul class=keys>{''.join(marks)}</ul>"
        )
    return "".join(lanes) + (
        f"<p class=note>Steps {settled[0].step} to {settled[-1].step} from left to right, all lanes on one scale, 0 to "
        f"{top:.3g} s a step. Lanes work side by side, so each adds up to the step for itself. Of several instances: "
        "their mean.</p>"
    )
