"""A fingerprint of a version's weights: equal bits give an equal number on any mesh.

Consumes a pytree of arrays; produces 64 bits. Integer sums wrap around and do not depend on the order of summation, so
it is computed where the arrays are, without gathering them, and in a fraction of the time that it takes to copy them.
It finds what changed by accident; it is no cryptographic hash.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN, MIX_1, MIX_2 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(params: Any) -> int:
    """Blocks until the number is on the host."""
    high, low = np.asarray(_digest(params))
    return int(high) << 32 | int(low)


@jax.jit
def _digest(params: Any) -> jax.Array:
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(params)):
        total = (total ^ (total >> 15)) * MIX_1 + _leaf(leaf, number)
    return total


def _leaf(x: jax.Array, number: int) -> jax.Array:
    """u32[2]: two sums over the bits of every element, mixed with the element's place."""
    bits = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.full(x.shape, np.uint32((number + 1) * int(MIX_2) % 2**32), jnp.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    first = _mix(bits ^ place * GOLDEN)
    second = _mix(bits + place * MIX_1)
    return jnp.stack([first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * MIX_1
    h = (h ^ (h >> 13)) * MIX_2
    return h ^ (h >> 16)
