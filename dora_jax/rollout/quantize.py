"""Stage 2, device side: weights and KV in 8 bits, where `rollout.weights` and `rollout.kv` ask for it.

Consumes one version's params in the serving layout; produces the same tree with each projection as 8-bit values and
one f32 scale an output channel, which `restored` turns back inside a compiled call. Embedding, head, gains and biases
stay: they are read row by row, or decide between tokens. KV in float8 has no scale: its values are of order one, and
the kernels take one scale a pool at most.
Law: the trainer never sees these weights, so the engine's log-probs drift from its own; bench/drift.py prints by how
much, and trainer.max_mismatch stops a run that drifts too far.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

WEIGHTS = {"": None, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}
KV = {"": None, "float8": jnp.float8_e4m3fn}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantized(params: Any, dtype) -> Any:
    """Each projection as {"values", "scale"}; the largest value of an output channel maps to the type's largest."""
    largest = float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)

    def one(weight_DxF):
        scale_1xF = jnp.abs(weight_DxF).max(0, keepdims=True).astype(jnp.float32) / largest
        scaled = weight_DxF.astype(jnp.float32) / jnp.where(scale_1xF == 0, 1.0, scale_1xF)
        scaled = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
        return {"values": jnp.clip(scaled, -largest, largest).astype(dtype), "scale": scale_1xF}

    return _layers(params, one)


def restored(params: Any, dtype) -> Any:
    """The tree that decoder.forward takes; inside a loop XLA then converts as it reads."""

    def one(weight):
        return (weight["values"].astype(jnp.float32) * weight["scale"]).astype(dtype)

    return _layers(params, one)


def narrow(x, dtype) -> jax.Array:
    """To the pool's type; float8 has no infinity, and beyond its largest value a cast makes nan."""
    if dtype == x.dtype or jnp.finfo(dtype).bits >= 16:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _layers(params: Any, one) -> Any:
    layers = [{name: one(w) if name in PROJECTIONS else w for name, w in layer.items()} for layer in params["layers"]]
    return {**params, "layers": layers}
