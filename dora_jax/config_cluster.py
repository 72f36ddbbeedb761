"""The section of a run in more than one process, and the rules that it brings. Standard library only."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClusterSection:
    """More than one process: the controller is this one, the trainer and each rollout instance are gangs of their own."""

    launcher: str = ""  # process: children on this machine; ray: actors of a Ray cluster; empty: all in one process
    trainer_hosts: int = 1  # processes of the trainer; its mesh spans their devices
    hosts_per_instance: int = 1  # processes of each of the rollout.instances; rollout.tensor spans their devices
    devices_per_host: int = 0  # virtual CPU devices of each process; 0: what its host has
    trainer_slice: str = ""  # ray: the TPU slice type of the trainer, e.g. v5litepod-16; empty: any machine
    instance_slice: str = ""  # ray: that of each instance; it may be another
    wire: str = "storage"  # weights reach the instances by storage, or by transfer, to which storage is the fallback
    silence_s: float = 10.0  # a process that is not heard for so long is taken for dead
    stall_s: float = 300.0  # as is one that has work and does not move; longer than any step takes
    start_s: float = 900.0  # from starting a gang until it is compiled
    reattach_s: float = 120.0  # a gang whose controller died waits so long for the next one to take it over; 0: it ends
    max_restarts: int = 3  # of a gang in a row that come to nothing, before the run ends
    elastic: bool = (
        False  # an instance without room waits for it; WORKDIR/wanted_instances says how many there are to be
    )


def problems(config: Any) -> Iterator[str]:
    """Rules of a run in several processes."""
    cluster, rollout = config.cluster, config.rollout
    if not cluster.launcher:
        return
    if not rollout.instances:
        yield "rollout.instances: 0 derives their number from the devices of one process; a cluster wants a number"
    devices = cluster.hosts_per_instance * cluster.devices_per_host
    if devices and devices != rollout.tensor:
        yield (
            f"rollout.tensor: {rollout.tensor} is not what an instance has, cluster.hosts_per_instance * "
            f"cluster.devices_per_host = {devices}"
        )
    for asked, cost in (("drafts", "draft_cost"), ("narrow_rows", "narrow_cost")):
        if cluster.hosts_per_instance > 1 and getattr(rollout, asked) and not getattr(rollout, cost):
            yield f"rollout.{cost}: 0 is measured by each process, and those of one instance must decide alike; set it"
    if config.orchestrator.elastic and cluster.trainer_hosts % max(1, cluster.hosts_per_instance):
        yield (
            f"orchestrator.elastic: the trainer's {cluster.trainer_hosts} processes make up no whole number of instances of "
            f"cluster.hosts_per_instance = {cluster.hosts_per_instance}"
        )
    if config.cpu_devices:
        yield "cpu_devices: belongs to a run in one process; in a cluster it is cluster.devices_per_host"
    alone = "slice pace journal.record orchestrator.colocated reward_model.path"
    for name in alone.split():
        if operator.attrgetter(name)(config):
            yield f"{name}: belongs to a run in one process"
