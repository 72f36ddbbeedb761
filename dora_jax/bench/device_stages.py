"""Runs one stage of bench.device in this process."""

from __future__ import annotations

from dora_jax.bench import device_kernels
from dora_jax.bench.device_record import Record
from dora_jax.config import Config
from dora_jax.models.families import KNOWN
from dora_jax.plan import devices


def run(stage: str, record: Record, size: str) -> None:
    tiny = size == "tiny"
    kind, _, model = stage.partition("-")
    if kind == "flashinfer":
        return device_kernels.flashinfer(record, tiny)  # torch alone: JAX would take the memory
    from dora_jax.bench import device_decode, device_models, device_train

    devices.setup_platform(Config())
    if kind in ("read", "kernel"):
        return getattr(device_kernels, kind)(record, tiny)
    cfg = device_models.TINY if tiny else KNOWN[f"Qwen3-{model or '0.6B'}"]
    stages = {
        "decode": device_decode.decode,
        "gap": device_train.gap,
        "train": device_train.train,
        "memory": device_train.shared_device,
    }
    return stages[kind](record, cfg, tiny)
