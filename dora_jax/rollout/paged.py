"""Stage 2, device side: KV pages as a paged kernel reads them, `rollout.attention` = tpu or gpu.

The pool is [pages, page_size, 2K, D] a layer, K and V of a head side by side: what the kernels of ops/ stream. Every step writes its KV into the pages themselves and attends straight from them, so nothing is gathered.
Laws: a row writes to pages of its own window only, and zeros once it has finished; the positions that the kernel reads
of a page are those that its row wrote, so that nothing of another version leaks; what goes to the host has the layout
of gathered.py, so that a sample moves between instances with different kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dora_jax.models.config import ModelConfig
from dora_jax.ops import attention
from dora_jax.rollout.quantize import KV, narrow
from dora_jax.rollout.shapes import Shapes

HEADS = PartitionSpec(None, None, "tensor")  # of q, k, v [B, L, H, D] and of the pool
WHOLE = PartitionSpec()


class Paged:
    """What forward.py asks of a KV pool; see gathered.py, which has the same methods."""

    pool_spec = HEADS
    pages_spec = PartitionSpec(None, None, "tensor")

    def __init__(self, cfg: ModelConfig, shapes: Shapes, dtype, mesh: Mesh):
        self.cfg = cfg
        self.shapes = shapes
        self.pool_dtype = KV[shapes.kv] or dtype
        self.mesh = mesh
        self.kernel = attention.paged_kernel(shapes.attention)
        self.lanes = attention.lanes(shapes.attention, cfg.head_dim)  # a head's width in the pool

    def empty(self):
        s, c = self.shapes, self.cfg
        shape = (s.pages + 1, s.page_size, 2 * c.n_kv_heads, self.lanes)
        return [jnp.zeros(shape, self.pool_dtype) for _ in range(c.n_layers)]

    # ------------------------------------------------------------ decode

    def begin(self, pool, pages_BxP, window_BxW, past_B):
        """(tables and positions, the pool); a window that starts inside a shared page gets a copy of it."""
        first_B = past_B // self.shapes.page_size
        rows = jnp.arange(pages_BxP.shape[0])
        tables_BxM = jnp.pad(pages_BxP, ((0, 0), (0, window_BxW.shape[1])))
        shared_B = tables_BxM[rows, first_B]
        pool = [pages.at[window_BxW[:, 0]].set(pages[shared_B]) for pages in pool]
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
        kv = jnp.stack([pages[pages_M] for pages in pool])  # [layers, M, page_size, 2K, D]
        k, v = kv[..., 0::2, : self.cfg.head_dim], kv[..., 1::2, : self.cfg.head_dim]
        return k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4)

    def write(self, pool, pages_M, k_LxM, v_LxM):
        kv = self._padded(_interleaved(k_LxM.transpose(0, 1, 4, 2, 3), v_LxM.transpose(0, 1, 3, 2, 4)))
        kv = narrow(kv, self.pool_dtype)
        return [pages.at[pages_M].set(new) for pages, new in zip(pool, kv, strict=True)]

    # ----------------------------------------------------------- private

    def _attend(self, pool, tables_SxM, positions_SxL, real_SxL):
        """`attend` that writes the new KV into `pool`, zeros where it is not real, then reads all of it."""
        page_SxL = jnp.take_along_axis(tables_SxM, positions_SxL // self.shapes.page_size, axis=1)
        offset_SxL = positions_SxL % self.shapes.page_size
        split = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(HEADS,) * 4 + (WHOLE,) * 5, out_specs=(HEADS, HEADS),
            check_vma=False)  # a kernel is opaque to the check

        @split
        def run(q, k, v, pages, tables_SxM, kv_lens_S, page_SxL, offset_SxL, real_SxL):
            new_SxLxCxD = self._padded(jnp.where(real_SxL[:, :, None, None], _interleaved(k, v), 0))
            pages = pages.at[page_SxL, offset_SxL].set(narrow(new_SxLxCxD, self.pool_dtype))
            o = self.kernel(self._padded(q), pages, kv_lens_S, tables_SxM, self.cfg.head_dim**-0.5)
            return o[..., : self.cfg.head_dim], pages

        def attend(layer, q, k, v):
            o, pool[layer] = run(q, k, v, pool[layer], tables_SxM, positions_SxL[:, -1] + 1, page_SxL, offset_SxL,
                                 real_SxL)
            return o

        return attend

    def _padded(self, x):
        """[..., D] to the pool's width."""
        return jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, self.lanes - x.shape[-1])))


def _interleaved(k, v):
    """[..., K, D] twice -> [..., 2K, D]: K and V of head 0, of head 1, ..."""
    return jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1])
