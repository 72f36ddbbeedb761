"""The devices of a TPU slice, or GPUs, that are not there, and which of them a run would give to its trainer and an
instance.

Consumes a configuration that names its slice; produces `SlicePlacement`s. libtpu describes the slice and touches no
TPU; XLA's plugin for CUDA takes the description of a GPU and loads no driver.
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


# A Hopper GPU as XLA's compiler takes it: its memory, its bandwidth and its name are those of the hardware table
GPU_TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  device_memory_size: %d memory_bandwidth: %d
}
platform_name: "CUDA" device_description_str: "%s" dnn_version_info { major: 9 minor: 10 }
"""


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
        return gpu_devices(name, field)
    if not installed():
        raise ConfigError(f"{field}: compiling for {name} needs libtpu: pip install 'dora_jax[aot]'")
    os.environ.update(QUIET)
    jax.config.update("jax_platforms", "cpu")  # libtpu only compiles here: it must not look for chips
    return list(topologies.get_topology_desc(topology_name=topology(name), platform="tpu").devices)


def gpu_devices(name: str, field: str = "slice") -> list[Any]:
    """Descriptions of so many GPUs of one node."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise ConfigError(f"{field}: compiling for {name} needs XLA's plugin for CUDA: pip install 'dora_jax[cuda]'")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # it calls the driver, which need not be there
    jax.config.update("jax_platforms", "cpu")
    chip, number = chips.parse(name)
    target, topology = gpu_target(chip), f"1x1x{number}"
    return list(topologies.get_topology_desc("", platform="cuda", target_config=target, topology=topology).devices)


def gpu_target(chip: str) -> str:
    """XLA's GpuTargetConfigProto, as text."""
    kind = next(kind for kind, (row, _) in chips.DEVICE_KINDS.items() if row == chip)
    return GPU_TARGET % (chips.CHIPS[chip].hbm_bytes, chips.CHIPS[chip].hbm_bytes_per_s, kind)


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
    def platform(self) -> str:
        """What programs are lowered for."""
        return "cuda" if chips.parse(self.slice_name)[0] in chips.GPUS else "tpu"

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
