"""The hardware table: what one chip can do, and what a slice of them is called. Figures as published, or measured by
others where the maker's round up."""

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
    clock_hz: float = 0.0  # of a TPU's core: what XLA's estimates of cycles count
    host_bytes_per_s: float = 15 * GB  # to host memory
    ici_latency_s: float = 5e-6  # one collective, whatever its size


def _chip(
    hbm_gb: float,
    hbm_gbs: float,
    tflops: float,
    ici_gbs: float,
    dcn_gbit: float,
    host_gbs: float = 15,
    clock_ghz: float = 0.0,
) -> Chip:
    return Chip(
        clock_hz=clock_ghz * 1e9,
        hbm_bytes=hbm_gb * GB, hbm_bytes_per_s=hbm_gbs * GB, flops=tflops * 1e12, ici_bytes_per_s=ici_gbs * GB,
        dcn_bytes_per_s=dcn_gbit * GBIT, host_bytes_per_s=host_gbs * GB)  # fmt: skip


CHIPS = {
    "v4": _chip(32, 1200, 275, 45 * 6, 50, clock_ghz=1.05),
    "v5e": _chip(16, 819, 197, 45 * 4, 25, clock_ghz=1.5),
    "v5p": _chip(95, 2765, 459, 90 * 6, 50, clock_ghz=1.75),
    "v6e": _chip(32, 1638, 918, 90 * 4, 100, host_gbs=32, clock_ghz=1.75),
    "tpu7x": _chip(192, 7380, 2307, 600, 100, clock_ghz=2.2),
    "h100": _chip(80, 3350, 989, 450, 400),
    "h800": _chip(80, 3350, 989, 200, 400),
    "h200": _chip(141, 4800, 989, 450, 400),
}

DEVICE_KINDS = {  # what JAX calls a device -> (row of the hardware table, devices a chip)
    "TPU v4": ("v4", 1),
    "TPU v5 lite": ("v5e", 1),
    "TPU v5": ("v5p", 1),
    "TPU v5p": ("v5p", 1),
    "TPU v6 lite": ("v6e", 1),
    "TPU7x": ("tpu7x", 2),
    "NVIDIA H100 80GB HBM3": ("h100", 1),
    "NVIDIA H800": ("h800", 1),
    "NVIDIA H200": ("h200", 1),
}
GPUS = ("h100", "h800", "h200")
CORES_IN_NAME = {"v4": 2, "v5p": 2, "tpu7x": 2}  # such names count cores, two a chip; the others count chips
ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x"}  # Google Cloud's, Ray's
FLAT = ("v5e", "v6e")  # two-dimensional slices; the others have three
DEVICES_A_CHIP = dict(DEVICE_KINDS.values())
LAPTOP_BYTES = 32 * GB  # of memory, which virtual devices share
HOST_CHIPS = 4  # of a TPU host
LINKS = {"v4": 6, "v5p": 6, "tpu7x": 6, "v5e": 4, "v6e": 4}  # of a chip, two a dimension

LANES = 128  # numbers of a TPU's vector: blocks of splash attention are multiples of it
SPLASH_BLOCK = 1024  # its queries and keys at once; more of both, of heads of a vector, does not fit a core's memory


def ici_bytes_per_s(chip: str, chips: int) -> float:
    """One way, from a chip to the others of its slice of so many, a power of two (v5p-8: 4 chips, 2x2x1, two links).

    A dimension has both of its links where it wraps around, as those of cubes of fours do, and a side of 16 of a flat
    slice; else the chip at its end has one. GPUs, and devices of one chip: all of it."""
    if chip not in LINKS or chips < 2:
        return CHIPS[chip].ici_bytes_per_s
    sides = [1] * (LINKS[chip] // 2)
    for _ in range(chips.bit_length() - 1):
        sides[sides.index(min(sides))] *= 2
    cube = chip not in FLAT and all(side % 4 == 0 for side in sides)
    used = sum(2 if cube or (chip in FLAT and side == 16) else 1 for side in sides if side > 1)
    return CHIPS[chip].ici_bytes_per_s * used / LINKS[chip]


def block_of(length: int, most: int) -> int:
    """The longest divisor of `length` that is a multiple of LANES and at most `most`."""
    sizes = [size for size in range(LANES, min(length, most) + 1, LANES) if length % size == 0]
    if not sizes:
        raise ValueError(f"trainer.attention=splash: {length} positions of a row are not a multiple of {LANES}")
    return sizes[-1]


def splash_blocks(queries: int, keys: int, width: int) -> tuple[int, int]:
    """Queries and keys of a block of splash attention: those of wider heads are shorter."""
    most = SPLASH_BLOCK // -(-width // LANES)
    return block_of(queries, most), block_of(keys, most)


def parse(name: str) -> tuple[str, int]:
    """(chip, number of chips) of a machine's name: a TPU slice such as v5e-64 or v5p-16, or GPUs such as h100-8.

    ValueError where there is no such chip or slice.
    """
    match = re.fullmatch(r"(\w+?)-(\d+)", name)
    chip = ALIASES.get(match[1], match[1]) if match else ""
    if match is None or chip not in CHIPS:
        raise ValueError(
            f"slice {name!r} is unknown: name one such as v5e-64, v5p-16, v6e-16, v4-32, tpu7x-128, h100-8, laptop"
        )
    count, cores = int(match[2]), CORES_IN_NAME.get(chip, 1)
    number = count // cores
    if number * cores != count or number < 1 or number & (number - 1):
        raise ValueError(f"slice {name!r}: {count} is not {'twice ' if cores == 2 else ''}a power of two")
    return chip, number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of one role of a run, as JAX counts them. What is not known is 0 or empty."""

    name: str = ""  # v5p-16, laptop
    platform: str = "cpu"  # cpu, tpu or gpu
    chip: str = ""  # a key of CHIPS; empty on a CPU
    devices: int = 0
    host_devices: int = 0  # of each host
    memory_bytes: float = 0.0  # of each device
    bfloat16: bool = False  # whether a CPU multiplies it natively

    @property
    def hosts(self) -> int:
        return self.devices // self.host_devices if self.host_devices else 0

    def __str__(self) -> str:
        return self.name or self.chip or self.platform


def machine(name: str) -> Machine:
    """The machine of this name, "laptop" or what `parse` knows; ValueError for any other."""
    if name == "laptop":
        return Machine(name=name, devices=1, host_devices=1, memory_bytes=LAPTOP_BYTES)
    chip, chips = parse(name)
    per_chip = DEVICES_A_CHIP.get(chip, 1)
    one_host = chip in GPUS or (chip in FLAT and chips <= 2 * HOST_CHIPS)  # larger slices have hosts of four
    return Machine(
        name=name,
        platform="gpu" if chip in GPUS else "tpu",
        chip=chip,
        devices=chips * per_chip,
        host_devices=per_chip * (chips if one_host else min(chips, HOST_CHIPS)),
        memory_bytes=CHIPS[chip].hbm_bytes / per_chip,
    )
