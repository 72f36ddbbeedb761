"""Gangs as actors of a Ray cluster: Ray chooses machines, starts processes, sees them die. Nothing else knows Ray.

A gang with a slice type gets a whole TPU slice, one actor a host; without one it gets a CPU of any machine per process.
Laws: nothing is restarted by Ray (its retries run a call twice); a gang goes only where every host of the slice lives,
because Ray itself would wait for ever for the rest of a broken one; what actors say to the controller is not Ray's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora_jax.runtime.cluster.launcher import Started, Ticket

SLICE, POD_TYPE = "ray.io/tpu-slice-name", "ray.io/tpu-pod-type"  # labels of a TPU host's node
PLACED_S = 20.0  # a reservation that is not granted by then is for a slice that has just lost a host
GONE_S = 15.0  # until a killed actor's end is known
LOOK_S = 1.0
FORWARDED = ("DORA_", "XLA_", "LIBTPU_", "PYTHONHASHSEED")  # of the controller's environment


class Process:
    """The actor: becomes a process of a gang, and ends as one."""

    def run(self, ticket: Ticket, token: bytes) -> None:
        from dora_jax.runtime.cluster.host import serve

        serve(ticket, token)


class RayHosts:
    """Joins the cluster of RAY_ADDRESS, or starts one on this machine."""

    def __init__(self) -> None:
        told_to_stop = signal.getsignal(signal.SIGTERM)
        if not ray.is_initialized():
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False)
        signal.signal(signal.SIGTERM, told_to_stop)  # Ray's own ends the process where it stands
        self.ip = ray.util.get_node_ip_address()
        self._taken: dict[str, str] = {}  # slice -> gang
        self._left_s: dict[str, float] = {}  # slice -> when a gang there ended

    def start(self, ticket: Ticket, token: bytes, hosts: int, slice_type: str) -> Started:
        return RayGang(self._taken, self._left_s, ticket, token, hosts, slice_type)

    def close(self) -> None:
        ray.shutdown()


class RayGang:
    """One gang's actors; placed when there is room for all of them, and not before."""

    def __init__(self, taken: dict[str, str], left_s: dict[str, float], ticket: Ticket, token: bytes, hosts: int,
                 slice_type: str):
        self._taken, self._left_s, self._ticket, self._token = taken, left_s, ticket, token
        self._hosts, self._slice_type = hosts, slice_type
        self._room: PlacementGroup | None = None
        self._slice: str | None = None
        self._asked_s = self._looked_s = 0.0
        self._actors: list[Any] = []
        self._ends: list[Any] = []

    @property
    def placed(self) -> bool:
        return bool(self._actors)

    def ended(self) -> str | None:
        if not self._actors:
            self._place()
            return None
        done, _ = ray.wait(self._ends, timeout=0)
        if not done:
            return None
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return "an actor returned"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.wait(self._ends, num_returns=len(self._ends), timeout=GONE_S) if self._ends else None
        self._give_back()

    # ------------------------------------------------------------ private

    def _place(self) -> None:
        """Reserves, then starts; called again and again until both are done."""
        now = time.monotonic()
        if self._room is None:
            if now - self._looked_s > LOOK_S:
                self._looked_s = self._asked_s = now
                self._reserve()
        elif self._room.wait(timeout_seconds=0.01):
            self._start()
        elif now - self._asked_s > PLACED_S:
            self._give_back()

    def _reserve(self) -> None:
        if not self._slice_type:
            self._room = placement_group([{"CPU": 1}] * self._hosts)
            return
        slices = intact_slices(ray.nodes(), self._slice_type, self._hosts)
        free = [name for name in slices if name not in self._taken]
        if free:  # Ray takes its time to see that a host is gone: where a gang has just ended is tried last
            name = min(free, key=lambda name: self._left_s.get(name, 0.0))
            self._slice, self._taken[name] = name, self._ticket.gang
            self._room = placement_group([{"TPU": slices[name]}] * self._hosts, strategy="STRICT_SPREAD",
                                         bundle_label_selector=[{SLICE: name}] * self._hosts)

    def _start(self) -> None:
        env = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        for index in range(self._hosts):
            where = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=index)
            actor = ray.remote(Process).options(
                num_cpus=0 if self._slice_type else 1, max_restarts=0, max_task_retries=0, scheduling_strategy=where,
                resources={"TPU": self._room.bundle_specs[index]["TPU"]} if self._slice_type else {},
                runtime_env={"env_vars": env}).remote()
            self._actors.append(actor)
            self._ends.append(actor.run.remote(self._ticket, self._token))

    def _give_back(self) -> None:
        if self._room is not None:
            remove_placement_group(self._room)
            self._room = None
        if self._slice is not None:
            del self._taken[self._slice]
            self._left_s[self._slice] = time.monotonic()
            self._slice = None


def intact_slices(nodes: list[Mapping[str, Any]], slice_type: str, hosts: int) -> dict[str, float]:
    """Slice -> chips a host, of the slices of this type all of whose hosts live; in order of their names."""
    chips: dict[str, list[float]] = {}
    for node in nodes:
        labels = node.get("Labels", {})
        if node["Alive"] and labels.get(POD_TYPE) == slice_type:
            chips.setdefault(labels[SLICE], []).append(node["Resources"].get("TPU", 0.0))
    return {name: each[0] for name, each in sorted(chips.items()) if len(each) == hosts and each[0]}
