"""A simulated run as a Chrome trace: a row per instance, one for the trainer, arrows between them.

An arrow leads from the sample that completed a group to the batch that took it.
"""

from __future__ import annotations

import json
from pathlib import Path

from dora_jax.base import chrome_trace
from dora_jax.base.chrome_trace import MICRO, ROLLOUT, TRAINER
from dora_jax.orchestrate.events import Train
from dora_jax.sim.instance import DECODE, IDLE, PREFILL, Instance, Job
from dora_jax.types import GroupId, InstanceId


class Trace:
    """`arrows`: at most so many groups get one, so that a large run stays readable."""

    def __init__(self, label: str, arrows: int = 20_000):
        self._events: list[chrome_trace.Event] = []
        self._rows = chrome_trace.Rows(label, self._events.append)
        self._last_done: dict[GroupId, tuple[float, InstanceId]] = {}
        self._arrows = arrows
        self._now = 0.0

    def state(self, now: float, instance: Instance) -> None:
        """The instance's slice goes on, or ends and another begins."""
        self._now = now
        activity = instance.activity
        if activity in (DECODE, PREFILL):
            name = chrome_trace.versions(instance.counts) or activity
        else:
            name = "" if activity == IDLE else activity
        self._rows.turn(ROLLOUT, instance.id, name, now)

    def done(self, now: float, job: Job, instance: Instance) -> None:
        self._last_done[job.id.group_id] = (now, instance.id)

    def train(self, now: float, end: float, command: Train) -> None:
        name = f"v{command.base_version + 1}"
        self._rows.slice(TRAINER, 0, name, now, end, {"groups": len(command.group_ids), "base": command.base_version})
        for group in command.group_ids:
            done = self._last_done.pop(group, None)
            if done is not None and self._arrows > 0:
                self._arrows -= 1
                self._rows.arrow("group", group, (ROLLOUT, done[1], done[0] - 1 / MICRO), (TRAINER, 0, now))

    def save(self, path: str) -> None:
        """Write what has been told; slices in progress end with the last thing that happened."""
        self._rows.end(self._now)
        Path(path).write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
