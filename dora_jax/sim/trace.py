"""A run as a Chrome trace, to be opened in Perfetto: a row per instance, one for the trainer, arrows between them.

Slices are named by version, so that a version has one colour everywhere. An arrow leads from the sample that completed
a group to the batch that took it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dora_jax.orchestrate.events import Train
from dora_jax.sim.instance import DECODE, IDLE, PREFILL, Instance, Job
from dora_jax.types import GroupId, InstanceId

TRAINER, ROLLOUT = 1, 2  # process ids: the two groups of rows
MICRO = 1e6
# Old names that the legacy viewer knows; Perfetto takes its colour from the slice's name.
COLOURS = ("thread_state_running", "rail_response", "rail_animation", "cq_build_running", "cq_build_attempt_failed",
           "thread_state_runnable", "rail_load", "generic_work")  # fmt: skip


class Trace:
    """`arrows`: at most so many groups get one, so that a large run stays readable."""

    def __init__(self, label: str, arrows: int = 20_000):
        self._events: list[dict[str, Any]] = []
        self._open: dict[InstanceId, tuple[str, float]] = {}  # name and begin of the slice in progress
        self._last_done: dict[GroupId, tuple[float, InstanceId]] = {}
        self._arrows = arrows
        self._now = 0.0
        self._name(TRAINER, 0, f"trainer ({label})", "trainer")
        self._name(ROLLOUT, 0, f"rollout ({label})", "instance 0")

    def state(self, now: float, instance: Instance) -> None:
        """The instance's slice goes on, or ends and another begins."""
        self._now = now
        activity = instance.activity
        if activity in (DECODE, PREFILL):
            name = "+".join(f"v{version}" for version in sorted(instance.counts)) or activity
        else:
            name = "" if activity == IDLE else activity
        before, since = self._open.get(instance.id, ("", now))
        if instance.id not in self._open and instance.id:
            self._name(ROLLOUT, instance.id, "", f"instance {instance.id}")
        if name != before or instance.id not in self._open:
            self._slice(ROLLOUT, instance.id, before, since, now)
            self._open[instance.id] = (name, now)

    def done(self, now: float, job: Job, instance: Instance) -> None:
        self._last_done[job.id.group_id] = (now, instance.id)

    def train(self, now: float, end: float, command: Train) -> None:
        name = f"v{command.base_version + 1}"
        self._slice(TRAINER, 0, name, now, end, {"groups": len(command.group_ids), "base": command.base_version})
        for group in command.group_ids:
            done = self._last_done.pop(group, None)
            if done is not None and self._arrows > 0:
                self._arrows -= 1
                self._flow("s", ROLLOUT, done[1], done[0] - 1 / MICRO, group)
                self._flow("f", TRAINER, 0, now, group)

    def save(self, path: str) -> None:
        """Write what has been told; slices in progress end with the last thing that happened."""
        for instance, (name, since) in self._open.items():
            self._slice(ROLLOUT, instance, name, since, self._now)
        Path(path).write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    # ------------------------------------------------------------ private

    def _name(self, process: int, row: int, process_name: str, row_name: str) -> None:
        if process_name:
            self._events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": process_name}})
        self._events.append({"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": row_name}})

    def _slice(self, process: int, row: int, name: str, begin: float, end: float, args: Any = None) -> None:
        if not name or end <= begin:
            return
        digits = "".join(c for c in name.partition("+")[0] if c.isdigit())
        colour = {"cname": COLOURS[int(digits) % len(COLOURS)]} if digits else {}
        self._events.append({
            "ph": "X", "pid": process, "tid": row, "name": name, "cat": "sim", "ts": begin * MICRO,
            "dur": (end - begin) * MICRO, "args": args or {}, **colour})  # fmt: skip

    def _flow(self, phase: str, process: int, row: int, time: float, group: GroupId) -> None:
        self._events.append({
            "ph": phase, "pid": process, "tid": row, "name": "group", "cat": "batch", "id": group,
            "ts": time * MICRO, **({"bp": "e"} if phase == "f" else {})})  # fmt: skip
