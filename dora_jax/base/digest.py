"""A fingerprint of a version's weights, or of any other arrays: equal bits give an equal number on any mesh.

Consumes a pytree of arrays; produces 64 bits. Integer sums wrap around and do not depend on the order of summation, so
it is computed where the arrays are, without gathering them, and in a fraction of the time that it takes to copy them.
It finds what changed by accident; it is no cryptographic hash.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN, MIX_1, MIX_2 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def digest(tree: Any) -> int:
    """Blocks until the number is on the host. What rests in host memory passes through the devices leaf by leaf.

    Leaves of one shape share a compiled program: an optimizer's moments take that of the weights."""
    parts = []
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        here = jax.device_put(leaf, leaf.sharding.with_memory_kind("device")) if _on_host(leaf) else leaf
        parts.append(_leaf(here, np.uint32(number + 1)))
        if here is not leaf:
            parts[-1].block_until_ready()  # so that one leaf is on the devices at a time
    total = np.zeros(2, np.uint32)
    for part in jax.device_get(parts):
        total = (total ^ (total >> 15)) * MIX_1 + part
    high, low = total
    return int(high) << 32 | int(low)


def digest_json(value: Any) -> int:
    """64 bits of plain data, which are the same once it has been written as JSON and read back."""
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@jax.jit
def _leaf(x: jax.Array, number: jax.Array) -> jax.Array:
    """u32[2]: two sums over the bits of every element, mixed with the element's place and the leaf's number."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize]).astype(jnp.uint32)  # of 8 bytes: another axis
    place = jnp.full(bits.shape, number * MIX_2, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    first = _mix(bits ^ place * GOLDEN)
    second = _mix(bits + place * MIX_1)
    return jnp.stack([first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)])


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * MIX_1
    h = (h ^ (h >> 13)) * MIX_2
    return h ^ (h >> 16)


def _on_host(x: Any) -> bool:
    return isinstance(x, jax.Array) and (x.sharding.memory_kind or "").endswith("_host")
