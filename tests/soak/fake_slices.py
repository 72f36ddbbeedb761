"""A Ray cluster on this machine whose nodes say that they are hosts of TPU slices; each may be taken away.

Consumes a number of slices and of the hosts of each; produces an address that `cluster.launcher=ray` joins. A node is a
host: its raylet and every process that this started. Laws: a node that is taken away never comes back; its slice is
replaced as a whole, as a slice of TPUs is.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

CHIPS = 4  # of a host
STORE_BYTES = 100 << 20
PREEMPTION = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
NOTICE_S = 30.0  # what `ray start --block` waits before it ends its node


class FakeSlices:
    """Close it: its processes outlive this one otherwise."""

    def __init__(self, slices: int, spare: int, hosts: int = 1):
        self.spare, self.type = spare, f"v4-{2 * CHIPS * hosts}"  # which counts cores
        self._hosts = hosts
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # which Ray expects without making it
        head = {
            "num_cpus": 2,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": tempfile.mkdtemp(prefix="ray"),
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._slices: dict[str, dict[int, Any]] = {}  # name -> its nodes by the pids of their raylets
        self._broken: list[str] = []
        self._frozen: list[int] = []
        self._made = 0
        for _ in range(slices + spare):
            self.add()
        self._cluster.wait_for_nodes()

    def add(self) -> None:
        """One more slice."""
        name, self._made = f"slice-{self._made}", self._made + 1
        self._slices[name] = {}
        for worker in range(self._hosts):
            labels = {
                "ray.io/tpu-slice-name": name,
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-pod-type": self.type,
            }
            first = {f"TPU-{self.type}-head": 1} if worker == 0 else {}
            node = self._cluster.add_node(
                num_cpus=1,
                object_store_memory=STORE_BYTES,
                labels=labels,
                resources={"TPU": CHIPS, name: 1, **first},
                env_vars={"TPU_NAME": name, "TPU_WORKER_ID": str(worker)},
            )
            self._slices[name][_raylet(node)] = node

    def replace(self) -> None:
        """What is left of the slices that have lost a host goes, and as many new ones come."""
        broken, self._broken = self._broken, []
        for name in broken:
            for node in self._slices.pop(name).values():
                self._cluster.remove_node(node, allow_graceful=False)
            self.add()

    def take(self, pid: int, how: signal.Signals) -> float:
        """Takes away the node that runs this process; when that was. SIGSTOP: as one whose network is gone."""
        name, raylet = self._where(pid)
        gone = [raylet, *(child.pid for child in psutil.Process(raylet).children(recursive=True))]
        began = time.monotonic()
        for each in gone:
            os.kill(each, how)
        if how == signal.SIGSTOP:
            self._frozen += gone
        del self._slices[name][raylet]
        self._broken.append(name)
        return began

    def drain(self, pid: int) -> float:
        """Tells Ray that the node of this process goes, as `ray start --block` does upon SIGTERM; when that was."""
        name, raylet = self._where(pid)
        node = self._slices[name][raylet]
        began = time.monotonic()
        head = self._cluster.head_node
        assert head is not None
        done, why = head.get_gcs_client().drain_node(
            node.node_id,
            PREEMPTION,
            "Node received SIGTERM; draining before shutdown.",
            int(1000 * (time.time() + NOTICE_S)),
        )
        if not done:
            raise RuntimeError(f"Ray does not drain {name}: {why}")
        self._broken.append(name)
        return began

    def _where(self, pid: int) -> tuple[str, int]:
        """The slice and the raylet of this process."""
        line = {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
        return next((name, raylet) for name, nodes in self._slices.items() for raylet in nodes if raylet in line)

    def close(self) -> None:
        for pid in self._frozen:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return next(info.process.pid for kind, infos in node.all_processes.items() if kind == "raylet" for info in infos)
