"""What the stages of bench.device that run a model share: the tiny model, weights as a trainer offers them, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.config import Config
from dora_jax.models import decoder, sharding
from dora_jax.models.families import new_config
from dora_jax.models.families.config import ModelConfig
from dora_jax.publish import sliced
from dora_jax.runtime.assembly.run import publishing_copy

GIB = 2**30
TINY = new_config("qwen3", vocab_size=512, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128)


def one_device() -> jax.sharding.Mesh:
    return sharding.make_mesh(jax.devices()[:1], 1, 1, 1)


def published(config: Config, cfg: ModelConfig, masters: Any = None) -> Any:
    """Weights as the run's trainer offers them, in host memory; random ones where there are no masters."""
    if masters is None:
        masters = decoder.init_params(cfg, 0, dtype=jnp.dtype(config.model.dtype))
    slices = sliced(publishing_copy(config, cfg, one_device())(masters))
    jax.tree.map(lambda leaf: leaf.bring_home(), slices)
    return slices


def peak_gib() -> float | None:
    """The most that this process has held on the device so far."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in stats else None
