"""The hardware table: what one chip can do. Figures as published, or measured by others where the maker's round up."""

from __future__ import annotations

import dataclasses

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
