"""The devices of a TPU slice that is not there, and which of them a run would give to its trainer and an instance.

Consumes a configuration that names its slice; produces `SlicePlacement`s. libtpu describes the slice and touches no
TPU.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from dora_jax.aot.roles import INSTANCE, TRAINER, Role
from dora_jax.base import chips
from dora_jax.config import Config, ConfigError
from dora_jax.models import sharding
from dora_jax.plan import devices

QUIET = {  # libtpu would ask a metadata server and lock the machine's chips; there are none
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


def installed() -> bool:
    """Whether libtpu is here."""
    return importlib.util.find_spec("libtpu") is not None


def slice_devices(name: str, field: str = "slice") -> list[Any]:
    """Descriptions of the slice's devices, in the order in which JAX would list them; ConfigError says why not."""
    if name in ("", "laptop"):
        raise ConfigError(f"{field}: {name or 'empty'}; --aot compiles for a TPU slice such as v5e-8")
    try:
        chip, _ = chips.parse(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if chip in chips.GPUS:
        raise ConfigError(
            f"{field}: XLA compiles programs for {name} only where there is such a GPU; --aot is for TPUs"
        )
    if not installed():
        raise ConfigError(f"{field}: compiling for {name} needs libtpu: pip install 'dora_jax[aot]'")
    os.environ.update(QUIET)
    jax.config.update("jax_platforms", "cpu")  # libtpu only compiles here: it must not look for chips
    return list(topologies.get_topology_desc(topology_name=topology(name), platform="tpu").devices)


def topology(name: str) -> str:
    """v5e-64 -> v5e:8x8, v5p-16 -> v5p:2x2x2: dimensions as equal as powers of two can be, the longest last."""
    kind, number = chips.parse(name)
    dimensions = [1] * (2 if kind in chips.FLAT else 3)
    while number > 1:
        dimensions[dimensions.index(min(dimensions))] *= 2
        number //= 2
    dimensions.sort(reverse=kind not in chips.FLAT and dimensions[2] == 1)  # of three dimensions the least is 2x2x1
    return f"{kind}:{'x'.join(map(str, dimensions))}"


@dataclass(frozen=True, kw_only=True)
class SlicePlacement:
    """Where the run would put a role."""

    slice_name: str
    mesh: jax.sharding.Mesh

    @property
    def cores(self) -> int:
        """Devices a chip."""
        return chips.DEVICES_A_CHIP[chips.parse(self.slice_name)[0]]

    @property
    def chips(self) -> int:
        return max(self.mesh.size // self.cores, 1)

    def role(self, name: str) -> Role:
        """The role without anything held or compiled yet."""
        return Role(name=name, slice_name=self.slice_name, chips=self.chips, held={}, programs=())


def place_of(config: Config, role: str) -> SlicePlacement:
    cluster = config.cluster
    field, name = "slice", config.slice
    if cluster.launcher:
        field = {TRAINER: "cluster.trainer_slice", INSTANCE: "cluster.instance_slice"}[role]
        name = {TRAINER: cluster.trainer_slice, INSTANCE: cluster.instance_slice}[role]
    found = slice_devices(name, field)
    if cluster.launcher:
        mine, shape = found, devices.trainer_mesh(len(found), config) if role == TRAINER else ()
        if role == INSTANCE:
            mine = found[: config.rollout.tensor]
    else:
        plan = devices.plan(len(found), config)
        mine, shape = [found[i] for i in (plan.trainer if role == TRAINER else plan.instances[0])], plan.trainer_mesh
    mesh = sharding.make_mesh(mine, *shape) if role == TRAINER else sharding.make_mesh(mine, 1, 1, len(mine))
    return SlicePlacement(slice_name=name, mesh=mesh)
