"""Measured speeds: how fast an instance decodes, against the fleet's median at equal load.

Consumes what instances report of their ticks; produces the speeds that placement, shares and moves count with. Load is
what decides a decode step's time: the versions that are decoded side by side (a call each), the rows, and the tokens of
KV that they read. The line through the whole fleet's reports (line.py) says how long a step of a median instance takes at
a load; an instance's pace is by how much it beats that. Reports enter the line as a median instance would have made them:
a fast one is given more rows, and the line would else say that rows cost nothing. Ticks with drafts have a line of their
own; by how much they beat the other says what drafts are worth (drafts.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dora_jax.orchestrate.events import Drafted, InstanceReported
from dora_jax.orchestrate.fleet import Fleet, Instance
from dora_jax.orchestrate.line import Line

SMOOTHED_STEPS = 1024  # decode steps over which a pace is averaged
MOST_AT_ONCE = 0.5  # a report's part in a pace: one that fell into a compilation is not believed
MEASURED_STEPS = 256  # before a pace counts
FARTHEST = 3.0  # octaves from the line that one report may be
DIFFERENCE = (
    0.25  # octaves by which a speed must be off before it is changed: less is noise, and each change moves work
)
ROWS = 1  # where a load has its rows
LINE_REPORTS = 8  # before the line says anything


def observe(fleet: Fleet, instance: Instance, event: InstanceReported) -> None:
    """A report of ticks that only decoded, without drafts."""
    if event.sampled and event.row_s > 0 and event.busy_s > 0:
        load = _load(instance, event, event)
        _pace(instance, fleet.measured.line, load, event)
        fleet.measured.drafts.decoded(load[ROWS], event.row_s)


def observe_drafts(fleet: Fleet, instance: Instance, event: InstanceReported, drafted: Drafted) -> None:
    """A report of ticks with drafts. What they gained is known once the line says what decode calls take."""
    line, drafts = fleet.measured.line, fleet.measured.drafts
    if not (drafted.sampled and drafted.row_s > 0 and drafted.busy_s > 0):
        return
    load = _load(instance, event, drafted)
    _pace(instance, drafts.line, load, drafted)
    drafts.guessed(drafted.guesses, drafted.held)
    if line.reports >= LINE_REPORTS:
        plain_s = drafted.sampled * line.step_s(load) / 2.0**instance.pace
        least_s, most_s = drafted.row_s / 2**FARTHEST, drafted.row_s * 2**FARTHEST
        drafts.drafted(load[ROWS], drafted.sampled, max(least_s, min(most_s, plain_s)), drafted.row_s)


def _pace(instance: Instance, line: Line, load: Sequence[float], ticks: InstanceReported | Drafted) -> None:
    """By how much the ticks beat the line of their kind, which they then enter."""
    step_s, steps = ticks.row_s / ticks.sampled, ticks.sampled / load[ROWS]
    if line.reports >= LINE_REPORTS:
        octaves = max(-FARTHEST, min(FARTHEST, math.log2(max(line.step_s(load), 1e-12) / step_s)))
        instance.paced_steps += steps
        instance.pace += (octaves - instance.pace) * min(
            MOST_AT_ONCE, steps / min(SMOOTHED_STEPS, instance.paced_steps)
        )
    line.add(load, step_s * 2.0**instance.pace)


def _load(instance: Instance, event: InstanceReported, ticks: InstanceReported | Drafted) -> tuple[float, float, float]:
    context = max(0, instance.pages - event.free) * instance.page_size
    return float(max(1, len(instance.counts))), ticks.row_s / ticks.busy_s, float(context)


def renew(fleet: Fleet) -> None:
    """Every measured instance's speed follows its pace, where they differ."""
    measured = [instance for instance in fleet.instances.values() if instance.paced_steps >= MEASURED_STEPS]
    if len(measured) < 2:
        return
    median = statistics.median(instance.pace for instance in measured)
    for instance in measured:
        instance.pace -= median
        speed = 2.0**instance.pace
        if abs(math.log2(speed / instance.speed)) >= DIFFERENCE:
            fleet.weigh(instance, -1)
            instance.speed = speed
            fleet.weigh(instance, 1)
            fleet.offer(instance)
