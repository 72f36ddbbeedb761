"""The hardware table: what one chip can do. Figures as published, or measured by others where the maker's round up."""

from __future__ import annotations

import dataclasses
import re

GB = 1e9
GBIT = 1e9 / 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    hbm_bytes: float
    hbm_bytes_per_s: float
    flops: float  # bf16, dense
    ici_bytes_per_s: float  # to the chips of its own slice or node, one way, all links together
    dcn_bytes_per_s: float  # to everything else, one way
    host_bytes_per_s: float = 15 * GB  # to host memory
    ici_latency_s: float = 5e-6  # one collective, whatever its size


def _chip(hbm_gb: float, hbm_gbs: float, tflops: float, ici_gbs: float, dcn_gbit: float, host_gbs: float = 15) -> Chip:
    return Chip(
        hbm_bytes=hbm_gb * GB, hbm_bytes_per_s=hbm_gbs * GB, flops=tflops * 1e12, ici_bytes_per_s=ici_gbs * GB,
        dcn_bytes_per_s=dcn_gbit * GBIT, host_bytes_per_s=host_gbs * GB)  # fmt: skip


CHIPS = {
    "v4": _chip(32, 1200, 275, 45 * 6, 50),
    "v5e": _chip(16, 819, 197, 45 * 4, 25),
    "v5p": _chip(95, 2765, 459, 90 * 6, 50),
    "v6e": _chip(32, 1638, 918, 90 * 4, 100, host_gbs=32),
    "tpu7x": _chip(192, 7380, 2307, 600, 100),
    "h100": _chip(80, 3350, 989, 450, 400),
    "h800": _chip(80, 3350, 989, 200, 400),
    "h200": _chip(141, 4800, 989, 450, 400),
}

DEVICE_KINDS = {  # what JAX calls a device -> (row of the hardware table, devices a chip)
    "TPU v4": ("v4", 1), "TPU v5 lite": ("v5e", 1), "TPU v5": ("v5p", 1), "TPU v5p": ("v5p", 1),
    "TPU v6 lite": ("v6e", 1), "TPU7x": ("tpu7x", 2), "NVIDIA H100 80GB HBM3": ("h100", 1), "NVIDIA H800": ("h800", 1),
    "NVIDIA H200": ("h200", 1),
}
GPUS = ("h100", "h800", "h200")
CORES_IN_NAME = {"v4": 2, "v5p": 2, "tpu7x": 2}  # such names count cores, two a chip; the others count chips
ALIASES = {"v5litepod": "v5e"}


def parse(name: str) -> tuple[str, int]:
    """(chip, number of chips) of a machine's name: a TPU slice such as v5e-64 or v5p-16, or GPUs such as h100-8.

    ValueError where there is no such chip or slice.
    """
    match = re.fullmatch(r"(\w+?)-(\d+)", name)
    chip = ALIASES.get(match[1], match[1]) if match else ""
    if chip not in CHIPS:
        raise ValueError(f"slice {name!r} is unknown: name one such as v5e-64, v5p-16, v6e-16, v4-32, tpu7x-128, h100-8")
    count, cores = int(match[2]), CORES_IN_NAME.get(chip, 1)
    number = count // cores
    if number * cores != count or number < 1 or number & (number - 1):
        raise ValueError(f"slice {name!r}: {count} is not {'twice ' if cores == 2 else ''}a power of two")
    return chip, number
