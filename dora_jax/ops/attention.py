"""Attention of one chunk of new positions over its own past: the XLA reference, which runs anywhere.

The past comes in blocks of equal width, K as [B, K, D, S] and V as [B, K, S, D]: the layouts that a CPU streams at
memory speed. The new positions stand apart, so that the past is read only while a chunk is decoded.
Law: results do not depend on how many masked blocks follow, bit for bit. Each block's products have one shape, the
maximum is exact, and sums run over the blocks in order, to which a masked block adds exact zeros. One long sample
in the batch therefore changes nobody else's tokens, though it makes the bucket longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with nothing but masked scores makes no nan


def chunk_attention(q_BxLxHxD, past: Sequence[tuple[jax.Array, jax.Array]], past_len_B, k_new_BxKxDxM, v_new_BxKxMxD,
                    new_mask_LxM) -> jax.Array:
    """o[B, L, H, D]. `past`: (k [B,K,D,S], v [B,K,S,D]) blocks, of which the first past_len positions count; V must
    be zero beyond. `new_mask_LxM` says which of the M new positions each of the L queries sees, itself at least."""
    b, length, heads, d = q_BxLxHxD.shape
    kv = k_new_BxKxDxM.shape[1]
    group = heads // kv
    q = q_BxLxHxD.reshape(b, length, kv, group, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, group * length, d)
    q = q * jnp.asarray(d**-0.5, q.dtype)

    def scores(k_BxKxDxS, mask):
        s = jnp.einsum("bkqd,bkds->bkqs", q, k_BxKxDxS, preferred_element_type=jnp.float32)
        return jnp.where(mask, s, MASKED)

    parts, start = [], 0
    for k, v in past:
        width = k.shape[-1]
        seen = (start + jnp.arange(width))[None, None, None, :] < past_len_B[:, None, None, None]
        parts.append((scores(k, seen), v))
        start += width
    mask = jnp.tile(new_mask_LxM, (group, 1))[None, None]
    parts.append((scores(k_new_BxKxDxM, mask), v_new_BxKxMxD))
    o = _combine(parts, q_BxLxHxD.dtype)
    return o.reshape(b, kv, group, length, d).transpose(0, 3, 1, 2, 4).reshape(b, length, heads, d)


def _combine(parts, dtype) -> jax.Array:
    """Softmax over all parts; the new positions first, then the past in order, masked tail blocks add zeros."""
    peak = parts[-1][0].max(-1, keepdims=True)
    for s, _ in parts[:-1]:
        peak = jnp.maximum(peak, s.max(-1, keepdims=True))
    total, out = 0.0, 0.0
    for s, v in [parts[-1], *parts[:-1]]:
        weights = jnp.exp(s - peak)
        total = total + weights.sum(-1, keepdims=True)
        out = out + jnp.einsum("bkqs,bksd->bkqd", weights.astype(dtype), v, preferred_element_type=jnp.float32)
    return (out / total).astype(dtype)
