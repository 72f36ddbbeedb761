"""Stage 2, device side: KV pages as a kernel reads them: every `rollout.attention` but reference.

The pool is one array [layers x pages, page_size, 2K, D], K and V of a head side by side, which the kernels stream; a
layer's pages stand after those of the layer before, so that a loop over layers hands the whole pool on in place.
Every step writes its KV into the pages themselves and attends straight from them, so nothing is gathered.
Laws: a row writes to pages of its own window only, and zeros once it has finished; the positions that the kernel reads
of a page are those that its row wrote, so that nothing of another version leaks; the pool is finite, for kernels
multiply what they mask by zero (weights that are not numbers still end a sample: by its logits); what goes to the host has the layout
of kv_xla.py, so that a sample moves between instances with different kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dora_jax.models.config import ModelConfig
from dora_jax.models.sharding import serving_table
from dora_jax.ops import attention, kv_pages
from dora_jax.rollout.quantize import KV, narrow
from dora_jax.rollout.shapes import Shapes

KV_HEADS = PartitionSpec(None, None, "tensor")  # of k, v [B, L, K, D] and of the pool
WHOLE = PartitionSpec()


class Paged:
    """What device_calls.py asks of a KV pool; see kv_xla.py, which has the same methods."""

    pool_spec = KV_HEADS
    pages_spec = PartitionSpec(None, None, "tensor")

    def __init__(self, cfg: ModelConfig, shapes: Shapes, dtype, mesh: Mesh):
        self.cfg = cfg
        self.shapes = shapes
        self.pool_dtype = KV[shapes.kv] or dtype
        self.mesh = mesh
        self.lanes = kv_pages.lanes(shapes.attention, cfg.head_dim)  # a head's width in the pool

    def empty(self):
        s, c = self.shapes, self.cfg
        return [jnp.zeros((c.n_layers * (s.pages + 1), s.page_size, 2 * c.n_kv_heads, self.lanes), self.pool_dtype)]

    # ------------------------------------------------------------ decode

    def begin(self, pool, pages_BxP, window_BxW, past_B):
        """(tables and positions, the pool); a window that starts inside a shared page gets a copy of it."""
        first_B = past_B // self.shapes.page_size
        rows = jnp.arange(pages_BxP.shape[0])
        tables_BxM = jnp.pad(pages_BxP, ((0, 0), (0, window_BxW.shape[1])))
        shared_B, own_B = tables_BxM[rows, first_B], window_BxW[:, 0]
        pool = [self._copied(pool[0], shared_B, own_B, (past_B % self.shapes.page_size > 0) & (shared_B != own_B))]
        at_BxW = first_B[:, None] + jnp.arange(window_BxW.shape[1])[None]
        return (tables_BxM.at[rows[:, None], at_BxW].set(window_BxW), past_B), pool

    def attend_step(self, fixed, pool, i, active_B):
        tables_BxM, past_B = fixed
        return self._attend(pool, tables_BxM, (past_B + i)[:, None], active_B[:, None])

    def end(self, pool, moved, pages_BxP, window_BxW, past_B, count_B):
        del pool, pages_BxP, window_BxW, past_B, count_B
        return moved

    # ----------------------------------------------------------- prefill

    def attend_chunk(self, pool, past_RxP, write_RxW, start_R, length_R):
        chunk, width = self.shapes.chunk, write_RxW.shape[1]
        tables_RxM = jnp.pad(past_RxP, ((0, 0), (0, width)))
        at_RxW = (start_R // self.shapes.page_size)[:, None] + jnp.arange(width)[None]
        tables_RxM = tables_RxM.at[jnp.arange(start_R.shape[0])[:, None], at_RxW].set(write_RxW)
        real_RxL = jnp.arange(chunk)[None] < length_R[:, None]
        return self._attend(pool, tables_RxM, start_R[:, None] + jnp.arange(chunk)[None], real_RxL)

    # -------------------------------------------------------------- host

    def read(self, pool, pages_M):
        kv = self._by_layer(pool[0])[:, pages_M]  # [layers, M, page_size, 2K, D]
        k, v = kv[..., 0::2, : self.cfg.head_dim], kv[..., 1::2, : self.cfg.head_dim]
        return k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4)

    def write(self, pool, pages_M, k_LxM, v_LxM):
        kv = self._padded(_interleaved(k_LxM.transpose(0, 1, 4, 2, 3), v_LxM.transpose(0, 1, 3, 2, 4)))
        kv = jnp.where(jnp.isfinite(kv), kv, 0)
        first_L = jnp.arange(self.cfg.n_layers) * (self.shapes.pages + 1)
        at_LxM = first_L[:, None] + pages_M[None]
        return [pool[0].at[at_LxM[:, :, None], self._positions()[None]].set(narrow(kv, self.pool_dtype))]

    # ----------------------------------------------------------- private

    def _by_layer(self, pool):
        return pool.reshape(self.cfg.n_layers, -1, *pool.shape[1:])

    def _positions(self):
        """Of a page, [1, page_size]. Pages are written position by position, as KV is: to write them whole, XLA would
        turn the whole pool round."""
        return jnp.arange(self.shapes.page_size)[None]

    def _copied(self, pool, from_B, to_B, needed_B):
        """The pool with the pages of the rows that need it copied in every layer; in most calls no row does."""
        from_B, to_B = jnp.where(needed_B, from_B, 0), jnp.where(needed_B, to_B, 0)
        every = self._positions()

        def copy(layer, pool):
            first = layer * (self.shapes.pages + 1)
            return pool.at[(first + to_B)[:, None], every].set(pool[(first + from_B)[:, None], every])

        return jax.lax.fori_loop(0, jnp.where(needed_B.any(), self.cfg.n_layers, 0), copy, pool)

    def _attend(self, pool, tables_SxM, positions_SxL, real_SxL):
        """`attend` that writes the new KV into `pool`, zeros where it is not real, then reads all of it."""
        impl, scale = self.shapes.attention, self.cfg.head_dim**-0.5
        lens_S = positions_SxL[:, -1] + 1

        def run(q, k, v, pages, tables_SxM, lens_S, real_SxL):
            new_SxLxCxD = _interleaved(k, v)
            kept_SxLxCxD = real_SxL[:, :, None, None] & jnp.isfinite(new_SxLxCxD)
            new_SxLxCxD = self._padded(jnp.where(kept_SxLxCxD, new_SxLxCxD, 0))
            o, pages = attention.paged_step(
                self._padded(q), narrow(new_SxLxCxD, self.pool_dtype), pages, lens_S, tables_SxM, scale, impl
            )
            return o[..., : self.cfg.head_dim], pages

        heads = PartitionSpec(None, None, serving_table(self.mesh)["heads"])
        split = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(heads, *(KV_HEADS,) * 3, *(WHOLE,) * 3),
            out_specs=(heads, KV_HEADS),
            check_vma=False,
        )  # a kernel is opaque to the check

        def attend(layer, q, k, v):
            o, pool[0] = split(q, k, v, pool[0], tables_SxM + layer * (self.shapes.pages + 1), lens_S, real_SxL)
            return o

        return attend

    def _padded(self, x):
        """[..., D] to the pool's width."""
        return jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, self.lanes - x.shape[-1])))


def _interleaved(k, v):
    """[..., K, D] twice -> [..., 2K, D]: K and V of head 0, of head 1, ..."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1])
