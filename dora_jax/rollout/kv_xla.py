"""Stage 2, device side: KV pages as the XLA reference reads them, `rollout.attention = reference`.

The pool is K [pages, K, D, page_size] and V [pages, K, page_size, D] a layer. A decode call gathers its rows' pages
once into contiguous blocks, takes several steps against them, and writes whole touched pages back: a gather at every
step would cost several times the attention itself.
Laws: a page that a row was not given is never read, and unwritten positions are zeroed when gathered, so that nothing
of another version leaks, not even a nan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dora_jax.models.config import ModelConfig
from dora_jax.ops.attention import chunk_attention
from dora_jax.rollout.quantize import KV, narrow
from dora_jax.rollout.shapes import Shapes


class Gathered:
    """What device_calls.py asks of a KV pool. The arrays come in and go out; the object holds sizes only."""

    pool_spec = PartitionSpec(None, "tensor")
    pages_spec = PartitionSpec(None, None, "tensor")  # of pages on their way to or from the host

    def __init__(self, cfg: ModelConfig, shapes: Shapes, dtype):
        self.cfg = cfg
        self.shapes = shapes
        self.dtype = dtype
        self.pool_dtype = KV[shapes.kv] or dtype

    def empty(self):
        s, c = self.shapes, self.cfg
        shapes = {
            "k": (s.pages + 1, c.n_kv_heads, c.head_dim, s.page_size),
            "v": (s.pages + 1, c.n_kv_heads, s.page_size, c.head_dim),
        }
        return {name: [jnp.zeros(shape, self.pool_dtype) for _ in range(c.n_layers)] for name, shape in shapes.items()}

    # ------------------------------------------------------------ decode

    def begin(self, pool, pages_BxP, window_BxW, past_B):
        """(what all steps read, what they change): the past, and room for the new positions."""
        del window_BxW
        rows, steps, c = pages_BxP.shape[0], self.shapes.steps, self.cfg
        new = {
            "k": [jnp.zeros((rows, c.n_kv_heads, c.head_dim, steps), self.dtype)] * c.n_layers,
            "v": [jnp.zeros((rows, c.n_kv_heads, steps, c.head_dim), self.dtype)] * c.n_layers,
        }
        with jax.named_scope("gather"):
            return (self._gather(pool, pages_BxP, past_B), past_B), new

    def attend_step(self, fixed, new, i, active_B):
        """The `attend` of step i; it puts the new KV into `new`, which the caller hands to the next step."""
        del active_B  # what a finished row computes is not kept: see `end`
        past, past_B = fixed
        seen_1xN = (jnp.arange(self.shapes.steps) <= i)[None]

        def attend(layer, q, k, v):
            new["k"][layer] = jax.lax.dynamic_update_slice_in_dim(new["k"][layer], k.transpose(0, 2, 3, 1), i, 3)
            new["v"][layer] = jax.lax.dynamic_update_slice_in_dim(new["v"][layer], v.transpose(0, 2, 1, 3), i, 2)
            return chunk_attention(q, past[layer], past_B, new["k"][layer], new["v"][layer], seen_1xN)

        return attend

    def end(self, pool, new, pages_BxP, window_BxW, past_B, count_B):
        """Rewrites the pages of each row's window: what they held, with `count` new positions from `past` on."""
        size, width = self.shapes.page_size, window_BxW.shape[1]
        at_BxW = past_B[:, None] // size + jnp.arange(width)[None]
        inside = at_BxW < pages_BxP.shape[1]
        old_BxW = jnp.where(inside, jnp.take_along_axis(pages_BxP, jnp.minimum(at_BxW, pages_BxP.shape[1] - 1), 1), 0)
        source_BxT = jnp.arange(width * size)[None] - (past_B % size)[:, None]  # index into the new positions
        is_new_BxT = (source_BxT >= 0) & (source_BxT < count_B[:, None])
        source_BxT = jnp.clip(source_BxT, 0, self.shapes.steps - 1)

        def merge(pages, layer_new, cut, at: tuple):
            fresh = cut(jnp.take_along_axis(layer_new, source_BxT[at], axis=at.index(slice(None), 1)), size)
            fresh = narrow(fresh, self.pool_dtype)
            return pages.at[window_BxW].set(jnp.where(cut(is_new_BxT[at], size), fresh, pages[old_BxW]))

        every = slice(None)  # time is the last axis of K, the one before of V
        k_at, v_at = (every, None, None, every), (every, None, every, None)
        with jax.named_scope("scatter"):
            return {
                "k": [merge(p, n, _cut_k, k_at) for p, n in zip(pool["k"], new["k"], strict=True)],
                "v": [merge(p, n, _cut_v, v_at) for p, n in zip(pool["v"], new["v"], strict=True)],
            }

    # ----------------------------------------------------------- prefill

    def attend_chunk(self, pool, past_RxP, write_RxW, start_R, length_R):
        """The `attend` of one chunk a row; it puts the chunk's KV into `pool`."""
        del length_R  # positions beyond it go to the dummy page or to places that are written again before they count
        past = self._gather(pool, past_RxP, start_R)
        chunk, size = self.shapes.chunk, self.shapes.page_size
        causal_LxL = jnp.arange(chunk)[:, None] >= jnp.arange(chunk)[None]

        def attend(layer, q, k, v):
            k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
            pool["k"][layer] = pool["k"][layer].at[write_RxW].set(narrow(_cut_k(k, size), self.pool_dtype))
            pool["v"][layer] = pool["v"][layer].at[write_RxW].set(narrow(_cut_v(v, size), self.pool_dtype))
            return chunk_attention(q, past[layer], start_R, k, v, causal_LxL)

        return attend

    # -------------------------------------------------------------- host

    def read(self, pool, pages_M):
        """K [layers, pages, K, D, page_size] and V [layers, pages, K, page_size, D], as parcels carry them."""
        return jnp.stack([k[pages_M] for k in pool["k"]]), jnp.stack([v[pages_M] for v in pool["v"]])

    def write(self, pool, pages_M, k_LxM, v_LxM):
        k_LxM, v_LxM = narrow(k_LxM, self.pool_dtype), narrow(v_LxM, self.pool_dtype)
        return {
            "k": [k.at[pages_M].set(new) for k, new in zip(pool["k"], k_LxM, strict=True)],
            "v": [v.at[pages_M].set(new) for v, new in zip(pool["v"], v_LxM, strict=True)],
        }

    # ----------------------------------------------------------- private

    def _gather(self, pool, pages_BxP, past_B):
        """Each layer's past as a list of (k [B,K,D,block], v [B,K,block,D]); V is zero where there is no past."""
        s, width = self.shapes, self.shapes.block_pages

        def block(layer: int, j: int):
            ids = pages_BxP[:, j * width : (j + 1) * width]
            k = pool["k"][layer][ids].transpose(0, 2, 3, 1, 4)  # [B, K, D, pages, page_size]
            v = pool["v"][layer][ids].transpose(0, 2, 1, 3, 4)  # [B, K, pages, page_size, D]
            k, v = k.astype(self.dtype), v.astype(self.dtype)
            k, v = k.reshape(*k.shape[:3], -1), v.reshape(*v.shape[:2], -1, v.shape[-1])
            seen = j * s.block + jnp.arange(s.block)[None] < past_B[:, None]
            return k, jnp.where(seen[:, None, :, None], v, 0)

        return [[block(layer, j) for j in range(pages_BxP.shape[1] // width)] for layer in range(self.cfg.n_layers)]


def _cut_k(k_BxKxDxT, size: int):
    """[B, K, D, T] -> [B, pages, K, D, page_size]"""
    b, kv, d, _ = k_BxKxDxT.shape
    return k_BxKxDxT.reshape(b, kv, d, -1, size).transpose(0, 3, 1, 2, 4)


def _cut_v(v_BxKxTxD, size: int):
    """[B, K, T, D] -> [B, pages, K, page_size, D]"""
    b, kv, _, d = v_BxKxTxD.shape
    return v_BxKxTxD.reshape(b, kv, -1, size, d).transpose(0, 2, 1, 3, 4)
