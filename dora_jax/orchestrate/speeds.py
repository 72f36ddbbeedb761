"""Measured speeds: how fast an instance decodes, against the fleet's median at equal load.

Consumes what instances report of their ticks; produces the speeds that placement, shares and moves count with. Load is
what decides a decode step's time: the versions that are decoded side by side (a call each), the rows, and the tokens of
KV that they read. The line through the whole fleet's reports (line.py) says how long a step of a median instance takes at
a load; an instance's pace is by how much it beats that. Reports enter the line as a median instance would have made them:
a fast one is given more rows, and the line would else say that rows cost nothing.
"""

from __future__ import annotations

import math
import statistics

from dora_jax.orchestrate.events import InstanceReported
from dora_jax.orchestrate.fleet import Fleet, Instance

SMOOTHED_STEPS = 1024  # decode steps over which a pace is averaged
MOST_AT_ONCE = 0.5  # a report's part in a pace: one that fell into a compilation is not believed
MEASURED_STEPS = 256  # before a pace counts
FARTHEST = 3.0  # octaves from the line that one report may be
DIFFERENCE = (
    0.25  # octaves by which a speed must be off before it is changed: less is noise, and each change moves work
)
LINE_REPORTS = 8  # before the line says anything


def observe(fleet: Fleet, instance: Instance, event: InstanceReported) -> None:
    """A report of ticks that only decoded."""
    if not (event.sampled and event.row_s > 0 and event.busy_s > 0):
        return
    rows, step_s = event.row_s / event.busy_s, event.row_s / event.sampled
    context = max(0, instance.pages - event.free) * instance.page_size
    load = (float(max(1, len(instance.counts))), rows, float(context))
    steps = event.sampled / rows
    line = fleet.measured.line
    if line.reports >= LINE_REPORTS:
        octaves = max(-FARTHEST, min(FARTHEST, math.log2(max(line.step_s(load), 1e-12) / step_s)))
        instance.paced_steps += steps
        instance.pace += (octaves - instance.pace) * min(
            MOST_AT_ONCE, steps / min(SMOOTHED_STEPS, instance.paced_steps)
        )
    line.add(load, step_s * 2.0**instance.pace)


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
