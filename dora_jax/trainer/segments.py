"""Sums over trajectories, whether a row is one trajectory or several packed ones. numpy in, numpy out; else jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def segment_sum(values_BxL: Any, segment_ids_BxL: Any, n_segments: int | None = None) -> Any:
    """Each token gets the sum over its own sequence, f32[B, L]. segment_ids None: one sequence a row.

    Ids count from 0 within a row and stay below n_segments (default L + 1, more than a row can hold).
    """
    if segment_ids_BxL is None:
        shape = values_BxL.shape
        total = values_BxL.sum(axis=-1, keepdims=True)
        return np.broadcast_to(total, shape) if isinstance(values_BxL, np.ndarray) else jnp.broadcast_to(total, shape)
    rows, length = values_BxL.shape
    n = n_segments or length + 1
    if isinstance(values_BxL, np.ndarray):
        keys = (np.asarray(segment_ids_BxL) + n * np.arange(rows)[:, None]).reshape(-1)
        sums = np.bincount(keys, weights=values_BxL.reshape(-1), minlength=rows * n)
        return sums[keys].reshape(rows, length).astype(values_BxL.dtype)
    return jax.vmap(lambda v, ids: jax.ops.segment_sum(v, ids, num_segments=n)[ids])(
        values_BxL, jnp.asarray(segment_ids_BxL)
    )


def segment_max(values_BxL: jax.Array, segment_ids_BxL: Any) -> jax.Array:
    """Each token gets the largest value of its own sequence."""
    if segment_ids_BxL is None:
        return jnp.broadcast_to(values_BxL.max(axis=-1, keepdims=True), values_BxL.shape)
    n = values_BxL.shape[1] + 1
    return jax.vmap(lambda v, ids: jax.ops.segment_max(v, ids, num_segments=n)[ids])(
        values_BxL, jnp.asarray(segment_ids_BxL)
    )
