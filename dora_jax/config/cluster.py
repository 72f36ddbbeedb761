"""The section of a run in more than one process, and the rules that it brings. Standard library only."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dora_jax.base import callables
from dora_jax.base.config_tree import FREE, field

LAUNCHERS = {  # that ship: name -> import path
    "process": "dora_jax.runtime.cluster.launch_process.ProcessLauncher",
    "ray": "dora_jax.runtime.cluster.launch_ray.RayLauncher",
}


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """More than one process: the controller is this one, the trainer and each rollout instance are gangs of their
    own."""

    change: ClassVar[str] = FREE

    launcher: str = field(
        "",
        "process: children on this machine; ray: actors of a Ray cluster; or the import path of a Launcher of yours "
        "(runtime/cluster/launch_process.py); empty: one process",
    )
    trainer_hosts: int = field(1, "processes of the trainer; its mesh spans their devices", ge=1)
    hosts_per_instance: int = field(1, "processes of an instance; rollout.tensor spans their devices", ge=1)
    devices_per_host: int = field(0, "virtual CPU devices of each process; 0: what its host has", ge=0)
    trainer_slice: str = field("", "ray: the TPU slice type of the trainer, e.g. v5litepod-16; empty: any machine")
    instance_slice: str = field("", "ray: that of each instance; it may be another")
    wire: Literal["storage", "transfer"] = field(
        "storage", "of weights to the instances; transfer falls back to storage"
    )
    encrypt: Literal["all", "control"] = field(
        "all", "control: weights and KV go plain, with keyed checksums, where TLS is below 0.7 of TCP"
    )
    heartbeat_timeout_s: float = field(10.0, "heartbeat timeout", gt=0)
    stall_timeout_s: float = field(300.0, "seconds without progress of a process; must exceed the longest step", gt=0)
    start_s: float = field(900.0, "from starting a gang until it is compiled", gt=0, tuning=True)
    reattach_s: float = field(120.0, "seconds that a gang waits for a new controller; 0: it ends with its own", ge=0)
    max_restarts: int = field(3, "fruitless restarts of a gang in a row, before the run ends", ge=0, tuning=True)
    elastic: bool = field(False, "instances without room wait for it; WORKDIR/wanted_instances: how many are wanted")


def problems(config: Any) -> Iterator[str]:
    """Rules of a run in several processes."""
    cluster, rollout = config.cluster, config.rollout
    if not cluster.launcher:
        return
    if cluster.launcher not in LAUNCHERS:
        try:
            callables.imported(cluster.launcher, "launcher")
        except ValueError as error:
            yield f"cluster.launcher: none of {', '.join(LAUNCHERS)}, and {error}"
    if not rollout.instances:
        yield "rollout.instances: 0 derives their number from the devices of one process; a cluster wants a number"
    devices = cluster.hosts_per_instance * cluster.devices_per_host
    if devices and devices != rollout.tensor:
        yield (
            f"rollout.tensor: {rollout.tensor} is not what an instance has, cluster.hosts_per_instance * "
            f"cluster.devices_per_host = {devices}"
        )
    several = cluster.hosts_per_instance > 1
    for asked, cost in (("drafts", "draft_cost"), ("narrow_rows", "narrow_cost")):
        if several and getattr(rollout, asked) and not getattr(rollout, cost):
            yield f"rollout.{cost}: 0 is measured by each process, and those of one instance must decide alike; set it"
    if several and rollout.ladder == "on":
        yield "rollout.ladder: on follows times that each process measures, and those of one instance must decide alike"
    if config.orchestrator.elastic and cluster.trainer_hosts % cluster.hosts_per_instance:
        yield (
            f"orchestrator.elastic: the trainer's {cluster.trainer_hosts} processes make up no whole number of "
            f"instances of cluster.hosts_per_instance = {cluster.hosts_per_instance}"
        )
    if config.cpu_devices:
        yield "cpu_devices: belongs to a run in one process; in a cluster it is cluster.devices_per_host"
    alone = "slice pace journal.record orchestrator.colocated reward_model.path"
    for name in alone.split():
        if operator.attrgetter(name)(config):
            yield f"{name}: belongs to a run in one process"
