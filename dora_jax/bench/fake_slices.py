"""A Ray cluster on this machine whose nodes say that they are hosts of TPU slices; each may be taken away.

Consumes a number of slices of one host; produces an address that `cluster.launcher=ray` joins. A node is its raylet and
every process that this started. Law: a node that is taken away never comes back; a new one takes its place.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

SLICE_TYPE = "v4-8"  # one host of four chips
STORE_BYTES = 100 << 20


class FakeSlices:
    """Close it: its processes outlive this one otherwise."""

    def __init__(self, slices: int, spare: int):
        self.spare = spare
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)  # which Ray expects without making it
        head = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False,
                "temp_dir": tempfile.mkdtemp(prefix="ray")}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        self._nodes: dict[int, Any] = {}  # pid of the raylet -> node
        self._frozen: list[int] = []
        self._made = 0
        for _ in range(slices + spare):
            self.add()
        self._cluster.wait_for_nodes()

    def add(self) -> None:
        """One more slice."""
        name, self._made = f"slice-{self._made}", self._made + 1
        labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": "0", "ray.io/tpu-pod-type": SLICE_TYPE}
        node = self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, labels=labels,
                                      resources={"TPU": 4, f"TPU-{SLICE_TYPE}-head": 1, name: 1},
                                      env_vars={"TPU_NAME": name, "TPU_WORKER_ID": "0"})
        self._nodes[_raylet(node)] = node

    def take(self, pid: int, how: signal.Signals) -> float:
        """Takes away the node that runs this process; when that was. SIGSTOP: as one whose network is gone."""
        raylet = next(each for each in _ancestors(pid) if each in self._nodes)
        gone = _descendants(raylet)
        began = time.monotonic()
        for each in gone:
            os.kill(each, how)
        if how == signal.SIGSTOP:
            self._frozen += gone
        del self._nodes[raylet]
        return began

    def close(self) -> None:
        for pid in self._frozen:
            if _parents().get(pid) is not None:
                os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return next(info.process.pid for kind, infos in node.all_processes.items() if kind == "raylet" for info in infos)


def _parents() -> dict[int, int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
    return parents


def _ancestors(pid: int) -> list[int]:
    parents, line = _parents(), [pid]
    while line[-1] in parents:
        line.append(parents[line[-1]])
    return line


def _descendants(pid: int) -> list[int]:
    parents, line = _parents(), [pid]
    for each in line:
        line += [child for child, parent in parents.items() if parent == each]
    return line
