"""Gangs as actors of a Ray cluster: Ray chooses machines, starts processes, sees them die. Nothing else knows Ray.

A gang with a slice type gets a whole TPU slice, one actor a host; without one it gets a CPU of any machine per process.
Laws: nothing is restarted by Ray (its retries run a call twice); a gang goes only where every host of the slice is up
and stays, because Ray itself would wait for ever for the rest of a broken one; what actors say to the controller is not
Ray's; in a cluster that outlives the controller so do gangs, under the name RUN/GANG/EPOCH, and leave it by themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state  # nodes that are about to go are reported nowhere else
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora_jax.config import ConfigError
from dora_jax.runtime.cluster.launch_process import StartedGang, Ticket

NAMESPACE = "dora_jax"  # of names in the cluster
SLICE, POD_TYPE = "ray.io/tpu-slice-name", "ray.io/tpu-pod-type"  # labels of a TPU host's node
PLACED_S = 5.0  # a slice that is not granted by then has just lost a host, which Ray learns up to a minute later
GONE_S = 15.0  # until a killed actor's end is known
LEAVE_S = 20.0  # for a process to give its gang's reservation back
LOOK_S = 1.0
FORWARDED = ("DORA_", "XLA_", "LIBTPU_", "PYTHONHASHSEED")  # of the controller's environment


class RayProcess:
    """The Ray actor that becomes a process of a gang."""

    def run(self, ticket: Ticket, lasting: bool) -> None:
        from dora_jax.runtime.cluster.process_main import serve

        room = get_current_placement_group()

        def leave() -> None:
            """Gives the place of the whole gang back; no controller may be there to do it."""
            thread = threading.Thread(target=remove_placement_group, args=(room,), daemon=True)
            thread.start()
            thread.join(LEAVE_S)  # Ray may be gone, too

        serve(ticket, *([leave] if lasting else []))

    def end(self) -> None:
        """Waits behind `run`, which never returns: this call fails when the actor ends."""


class RayLauncher:
    """Joins the cluster of RAY_ADDRESS, or starts one on this machine."""

    def __init__(self, workdir: Path, run: str):
        address = os.environ.get("RAY_ADDRESS", "local")
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, include_dashboard=False)
        except ConnectionError as error:  # nobody is there, or a token is needed that this process does not have
            raise ConfigError(f"RAY_ADDRESS: {str(error).splitlines()[0]}") from error
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process where it stands
        self.ip = ray.util.get_node_ip_address()
        self._run, self._lasting = run, address != "local"
        self.slices = FreeSlices()

    def start(self, ticket: Ticket, hosts: int, slice_type: str) -> StartedGang:
        for behind in self._left_behind(ticket.gang):
            behind.kill()
        return RayGang(self.slices, self._name(ticket), hosts, slice_type, (ticket, self._lasting))

    def find(self, ticket: Ticket, hosts: int, slice_type: str, pids: Sequence[int]) -> StartedGang | None:
        """The gang as an earlier controller left it; other epochs of it end."""
        found = None
        for behind in self._left_behind(ticket.gang, hosts, slice_type):
            if behind.name == self._name(ticket) and behind.whole:
                found = behind
            else:
                behind.kill()
        return found

    def close(self) -> None:
        for behind in self._left_behind():
            behind.kill()
        ray.shutdown()

    # ------------------------------------------------------------ private

    def _name(self, ticket: Ticket) -> str:
        return f"{self._run}/{ticket.gang}/{ticket.epoch}"

    def _left_behind(self, gang: str = "", hosts: int = 0, slice_type: str = "") -> list[RayGang]:
        """What there is in the cluster of this gang, or of all, of any epoch."""
        if not self._lasting:
            return []
        rooms = {room["name"] for room in placement_group_table().values() if room["state"] != "REMOVED"}
        actors = {name.rpartition("/")[0] for name in ray.util.list_named_actors()}
        prefix = f"{self._run}/{gang}/" if gang else f"{self._run}/"
        names = [name for name in sorted(rooms | actors) if name.startswith(prefix)]
        return [RayGang(self.slices, name, hosts, slice_type, None) for name in names]


Work = tuple[Ticket, bool]  # what a RayProcess runs: ticket, whether it outlives the controller


class RayGang(StartedGang):
    """One gang's actors, found by its name; placed when there is room for all of them, and not before. Without work: a
    gang that is there."""

    def __init__(self, slices: FreeSlices, name: str, hosts: int, slice_type: str, work: Work | None):
        self.name = name
        self._slices, self._hosts, self._slice_type, self._work = slices, hosts, slice_type, work
        self._room: PlacementGroup | None = None
        self._nodes: set[str] = set()
        self._asked_s = self._looked_s = 0.0
        self._actors: list[Any] = []
        self._ends: list[Any] = []
        self.placed = False
        if work is None:
            # what there is of it in the cluster
            with contextlib.suppress(ValueError):  # its actors alone are there
                self._room = get_placement_group(self.name)
                self._nodes = _nodes_of(self._room)
            for actor in sorted(ray.util.list_named_actors()):
                if actor.rpartition("/")[0] == self.name:
                    with contextlib.suppress(ValueError):  # it has just ended
                        self._actors.append(ray.get_actor(actor))
            self._ends = [actor.end.remote() for actor in self._actors]
            self.placed = bool(self._actors)
            self.whole = self._room is not None and len(self._actors) == hosts
            if self._slice_type:
                self._slices.hold(self.name, self._nodes)

    def ended(self) -> str | None:
        if not self._actors:
            if self._work is not None:
                # reserves a place, then starts the actors; called until both are done
                now = time.monotonic()
                if self._room is None:
                    if now - self._looked_s > LOOK_S:
                        self._looked_s = self._asked_s = now
                        named: dict[str, str] = {"name": self.name, "lifetime": "detached"} if self._work[1] else {}
                        if not self._slice_type:
                            self._room = placement_group([{"CPU": 1}] * self._hosts, **named)
                        elif got := self._slices.take(self.name, self._slice_type, self._hosts):
                            name, chips = got
                            self._room = placement_group(
                                [{"TPU": chips}] * self._hosts,
                                strategy="STRICT_SPREAD",
                                bundle_label_selector=[{SLICE: name}] * self._hosts,
                                **named,
                            )
                elif self._room.wait(timeout_seconds=0.01):
                    self._start(self._room, self._work)
                elif self._slice_type and now - self._asked_s > PLACED_S:
                    self._reclaim()
            return None
        done, _ = ray.wait(self._ends, timeout=0)
        if not done:
            return None
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return "an actor returned"

    def needs(self) -> str:
        if self._slice_type:
            return (
                f"Ray has no free slice {self._slice_type} whose nodes are all up; another slice, or fewer "
                "rollout.instances, makes room"
            )
        free, all_of_them = (of().get("CPU", 0) for of in (ray.available_resources, ray.cluster_resources))
        return (
            f"each of its processes needs a CPU of Ray, and {free:g} of {all_of_them:g} are free; "
            "another machine, or fewer rollout.instances, makes room"
        )

    def notice(self) -> str | None:
        """Notice that one of its machines is about to go, in a few words: `ray start --block` received SIGTERM, say."""
        if self._actors and time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            if self._nodes & state.get_draining_nodes().keys():
                return "Ray drains its node"
        return None

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.wait(self._ends, num_returns=len(self._ends), timeout=GONE_S) if self._ends else None
        self._reclaim()

    # ------------------------------------------------------------ private

    def _start(self, room: PlacementGroup, work: Work) -> None:
        env = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        for index in range(self._hosts):
            where = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=index)
            named = {"name": f"{self.name}/{index}", "lifetime": "detached"} if work[1] else {}
            actor: Any = (
                ray.remote(RayProcess)
                .options(
                    num_cpus=0 if self._slice_type else 1,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=where,
                    resources={"TPU": room.bundle_specs[index]["TPU"]} if self._slice_type else {},
                    runtime_env={"env_vars": env},
                    **named,
                )
                .remote()
            )
            self._actors.append(actor)
            self._ends.append(actor.run.remote(*work))
        self._nodes = _nodes_of(room)
        self.placed = True

    def _reclaim(self) -> None:
        if self._room is not None:
            remove_placement_group(self._room)
            self._room = None
        self._slices.leave(self.name)


class FreeSlices:
    """Which gang runs on which TPU slice; all supervisors share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken: dict[str, str] = {}  # gang -> slice
        self._left_s: dict[str, float] = {}  # slice -> when a gang there ended

    def take(self, gang: str, slice_type: str, hosts: int) -> tuple[str, float] | None:
        """A slice for this gang, and the chips of each host."""
        slices = intact_slices(ray.nodes(), state.get_draining_nodes(), slice_type, hosts)
        with self._lock:
            free = slices.keys() - self.taken.values()
            if not free:
                return None
            # Ray takes its time to see that a host is gone: where a gang has just ended is tried last
            name = self.taken[gang] = min(sorted(free), key=lambda name: self._left_s.get(name, 0.0))
            return name, slices[name]

    def hold(self, gang: str, nodes: Collection[str]) -> None:
        """Notes that the gang runs on these nodes already."""
        names = [node["Labels"][SLICE] for node in ray.nodes() if node["NodeID"] in nodes]
        with self._lock:
            self.taken.update((gang, name) for name in names)

    def leave(self, gang: str) -> None:
        with self._lock:
            name = self.taken.pop(gang, None)
            if name is not None:
                self._left_s[name] = time.monotonic()


def intact_slices(
    nodes: Sequence[Mapping[str, Any]], going: Collection[str], slice_type: str, hosts: int
) -> dict[str, float]:
    """Slice -> chips a host, of the slices of this type all of whose hosts live and stay; in order of their names."""
    chips: dict[str, list[float]] = {}
    for node in nodes:
        labels = node.get("Labels", {})
        if node["Alive"] and node["NodeID"] not in going and labels.get(POD_TYPE) == slice_type:
            chips.setdefault(labels[SLICE], []).append(node["Resources"].get("TPU", 0.0))
    return {name: each[0] for name, each in sorted(chips.items()) if len(each) == hosts and each[0]}


def _nodes_of(room: PlacementGroup) -> set[str]:
    return set(placement_group_table(room)["bundles_to_node_id"].values())
