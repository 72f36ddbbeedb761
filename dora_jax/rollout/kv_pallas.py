"""Stage 2, device side: KV pages as a kernel reads them: every `rollout.attention` but reference.

The pool is one array [layers x pages, page_size, *row] for each shape of rows, one or two, which the kernels stream: of
GQA a row is [2K, D], K and V of a head side by side, of latent attention [D]. A layer's pages stand after those of the
layer before, so that a loop over layers hands the whole pool on in place. Every step writes its KV into the pages
themselves and attends straight from them, so nothing is gathered.
Laws: a row of a call writes to pages of its own window only, and zeros once it has finished; the positions that the
kernel reads of a page are those that its row wrote, so that nothing of another version leaks; the pool is finite, for
kernels multiply what they mask by zero (weights that are not numbers still end a sample: by its logits); what goes to
the host has the layout of kv_xla.py, so that a sample moves between instances with different kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dora_jax.models.attention import Attend
from dora_jax.models.sharding import serving_table
from dora_jax.ops import attention, latent_attention, paged_write
from dora_jax.rollout.quantize import KV, narrow
from dora_jax.rollout.shapes import KVLayout, Shapes

KV_HEADS = PartitionSpec(None, None, "tensor")  # of k, v [B, L, K, D] and of a pool of K and V heads
WHOLE = PartitionSpec()
Pool = list[jax.Array]  # by the shape of its rows; a list, so that `attend` can put another in its place


class Paged:
    """What device_calls.py asks of a KV pool; see kv_xla.py, which has the same methods."""

    pages_spec = PartitionSpec(None, None, "tensor")

    def __init__(self, kv: KVLayout, shapes: Shapes, dtype: Any, mesh: Mesh):
        self.kv = kv
        self.shapes = shapes
        self.pool_dtype = KV[shapes.kv] or dtype
        self.mesh = mesh
        self.lanes = [latent_attention.lanes(shapes.attention, width) for _, width in kv.rows]  # a head's in the pool
        self.pool_spec = WHOLE if kv.rank else KV_HEADS
        # whether a decode step's `attend` turns heads (models.attention.HeadTurn), whose kernel takes no padded ones
        self.turns = shapes.attention == "tpu" and not kv.rank and self.lanes == [width for _, width in kv.rows]

        self.groups = [int(shapes.groups > 1 and window > 0) for window in kv.windows]  # the pool of a layer's pages
        sizes = [1 + (shapes.local_pages if group else shapes.pages) for group in self.groups]
        self.firsts = [0] * kv.layers  # where a layer's pages begin
        self.rows = [0 for _ in kv.rows]
        for row in range(len(kv.rows)):
            for layer in kv.layers_of(row):
                self.firsts[layer], self.rows[row] = self.rows[row], self.rows[row] + sizes[layer]

    def empty(self) -> Pool:
        rows = [(n,) if self.kv.rank else (2 * heads, n) for n, (heads, _) in zip(self.lanes, self.kv.rows)]
        sizes = zip(self.rows, rows, strict=True)
        return [jnp.zeros((n, self.shapes.page_size, *row), self.pool_dtype) for n, row in sizes]

    # ------------------------------------------------------------ decode

    def begin(self, pool: Pool, pages_GxBxP, window_GxBxW, past_B) -> tuple[Any, Pool]:
        """(tables and positions, the pool); a window that starts inside a shared page gets a copy of it."""
        first_B, rows = past_B // self.shapes.page_size, jnp.arange(len(past_B))
        tables_GxBxM = jnp.pad(pages_GxBxP, ((0, 0), (0, 0), (0, window_GxBxW.shape[2])))
        shared_GxB, own_GxB = tables_GxBxM[:, rows, first_B], window_GxBxW[:, :, 0]
        needed_GxB = (past_B % self.shapes.page_size > 0)[None] & (shared_GxB != own_GxB)
        from_GxB, to_GxB = jnp.where(needed_GxB, shared_GxB, 0), jnp.where(needed_GxB, own_GxB, 0)
        # written position by position, as KV is: to write whole pages, XLA would turn the whole pool round
        every = jnp.arange(self.shapes.page_size)[None]

        def copy(layers, i, pool):
            layer = i if len(layers) == self.kv.layers else jnp.asarray(layers)[i]
            first, group = self._first(layer), jnp.asarray(self.groups)[layer] if self.shapes.groups > 1 else 0
            return pool.at[(first + to_GxB[group])[:, None], every].set(pool[(first + from_GxB[group])[:, None], every])

        # in every layer; in most calls no row needs it
        for row, pages in enumerate(pool):
            layers = self.kv.layers_of(row)
            count = jnp.where(needed_GxB.any(), len(layers), 0)
            pool = [*pool[:row], jax.lax.fori_loop(0, count, functools.partial(copy, layers), pages), *pool[row + 1 :]]
        at_BxW = first_B[:, None] + jnp.arange(window_GxBxW.shape[2])[None]
        return (tables_GxBxM.at[:, rows[:, None], at_BxW].set(window_GxBxW), past_B), pool

    def attend_step(self, fixed, i, active_B) -> Callable[[Pool], Attend]:
        tables_GxBxM, past_B = fixed
        return self._attend(tables_GxBxM, (past_B + i)[:, None], active_B[:, None])

    def attend_ahead(self, fixed, pool: Pool, active_B) -> Attend:
        """Attend from several positions a row at once, each of which sees those before it. What is written beyond the
        positions that count is written again before it counts."""
        tables_GxBxM, past_B = fixed
        positions_BxL = past_B[:, None] + jnp.arange(self.shapes.drafts + 1)[None]
        return self._attend(tables_GxBxM, positions_BxL, jnp.broadcast_to(active_B[:, None], positions_BxL.shape))(pool)

    def end(self, pool: Pool, moved: Pool, pages_GxBxP, window_GxBxW, past_B, count_B) -> Pool:
        del pool, pages_GxBxP, window_GxBxW, past_B, count_B
        return moved

    # ----------------------------------------------------------- prefill

    def attend_chunk(self, pool: Pool, past_GxRxP, write_GxRxW, start_R, length_R, kept_R) -> Attend:
        chunk, width = self.shapes.chunk, write_GxRxW.shape[2]
        tables_GxRxM = jnp.pad(past_GxRxP, ((0, 0), (0, 0), (0, width)))
        at_RxW = (start_R // self.shapes.page_size)[:, None] + jnp.arange(width)[None]
        tables_GxRxM = tables_GxRxM.at[:, jnp.arange(start_R.shape[0])[:, None], at_RxW].set(write_GxRxW)
        real_RxL = jnp.arange(chunk)[None] < length_R[:, None]
        is_kept_RxL = jnp.arange(chunk)[None] < kept_R[:, None]
        return self._attend(tables_GxRxM, start_R[:, None] + jnp.arange(chunk)[None], real_RxL, is_kept_RxL)(pool)

    # -------------------------------------------------------------- host

    def read(self, pool: Pool, pages_GxM) -> tuple[jax.Array, ...]:
        """One array a name, [layers, M, ...], as requests carry them; zeros of layers whose pages are gone."""
        arrays: list[jax.Array] = []
        for row, (_, width) in enumerate(self.kv.rows):
            groups = jnp.asarray(self.groups)[jnp.asarray(self.kv.layers_of(row))]
            rows = pool[row][self._of_layers(row, pages_GxM)]  # [layers, M, page_size, *row]
            if self.shapes.groups > 1:
                here_LxM = (pages_GxM > 0)[groups] | (groups == 0)[:, None]
                rows = jnp.where(jnp.expand_dims(here_LxM, range(2, rows.ndim)), rows, 0)
            if self.kv.rank:
                return (jnp.expand_dims(rows[..., :width].swapaxes(2, 3), 2),)
            k, v = rows[..., 0::2, :width], rows[..., 1::2, :width]
            arrays += [k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4)]
        return tuple(arrays)

    def write(self, pool: Pool, pages_GxM, *arrays: jax.Array) -> Pool:
        each, pool = len(arrays) // len(pool), list(pool)
        for row in range(len(pool)):
            k_LxM, *v_LxM = arrays[each * row :][:each]
            v = v_LxM[0].transpose(0, 1, 3, 2, 4) if v_LxM else None
            rows = self._rows(row, k_LxM.transpose(0, 1, 4, 2, 3), v)
            rows = jnp.where(jnp.isfinite(rows), rows, 0)
            at_LxM = self._of_layers(row, pages_GxM)
            every = jnp.arange(self.shapes.page_size)[None]  # position by position, see `begin`
            pool[row] = pool[row].at[at_LxM[:, :, None], every[None]].set(narrow(rows, self.pool_dtype))
        return pool

    # ----------------------------------------------------------- private

    def _first(self, layer):
        """Where the pages of a layer begin, whose number may be a loop's."""
        if self.shapes.groups == 1 and len(self.kv.rows) == 1:
            return layer * (self.shapes.pages + 1)
        return jnp.asarray(self.firsts)[layer]

    def _of_layers(self, row: int, pages_GxM) -> jax.Array:
        """Where these pages of each layer with such rows stand, [layers, M]: one gather of whole pages, for which
        nothing is copied."""
        layers = jnp.asarray(self.kv.layers_of(row))
        return self._first(layers)[:, None] + pages_GxM[jnp.asarray(self.groups)[layers]]

    def _attend(self, tables_GxSxM, positions_SxL, real_SxL, is_kept_SxL=None) -> Callable[[Pool], Attend]:
        """Makes, of a pool, the `attend` that writes the new KV into it, zeros where it is not real, then reads all of
        it; of a layer that has no KV of its own it reads what that layer wrote. What is the same for all layers is
        computed here: once, outside of a loop over them.

        is_kept_SxL: positions of the first page that keep what they hold; None: there are none."""
        impl, kv, size = self.shapes.attention, self.kv, self.shapes.page_size
        where_G = [paged_write.where_of(positions_SxL, tables_SxM, size) for tables_SxM in tables_GxSxM]
        to_pool = functools.partial(narrow, dtype=self.pool_dtype)

        def rows_of(row: int, k, v, real_SxL):
            rows = self._rows(row, k, v)
            written = jnp.expand_dims(real_SxL, range(2, rows.ndim)) & jnp.isfinite(rows)
            return to_pool(jnp.where(written, rows, 0))

        def turned(row: int, q, k, v, turn, pages, where, real_SxL):
            """`turn_and_write` in plain XLA."""
            q, k, v = (turn(x, self.lanes[row], i) for i, x in enumerate((q, k, v)))
            return q, paged_write.scattered(pages, rows_of(row, k, v, real_SxL), where)

        def run(scores, q, k, v, pages, where, real_SxL, is_kept_SxL, sinks_H, turn):
            row, rank, rows = scores.row, kv.rank, None
            if turn is not None:
                kernel = functools.partial(paged_write.turn_and_write, narrow=to_pool)
                given, plain = (q, k, v, turn, pages, where, real_SxL), functools.partial(turned, row)
                q, pages = jax.lax.platform_dependent(*given, tpu=kernel, default=plain)
            elif k is not None:
                rows = rows_of(row, k, v, real_SxL)
            if is_kept_SxL is not None and rows is not None:
                # position by position, see `begin`
                held = pages[where.first + where.page_SxL[:, :1], jnp.arange(size)[None]]
                stays = jnp.expand_dims(is_kept_SxL[:, :size], range(2, rows.ndim))
                rows = rows.at[:, :size].set(jnp.where(stays, held, rows[:, :size]))
            o, pages = attention.paged_step(self._padded(row, q), rows, pages, where, scores, impl, rank, sinks_H)
            return o[..., : rank or kv.rows[row][1]], pages

        cut = serving_table(self.mesh)["heads"]
        heads = PartitionSpec(None, None, cut)
        own = WHOLE if kv.rank else KV_HEADS
        split = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(heads, own, own, own, *(WHOLE,) * 3, PartitionSpec(cut), WHOLE),
            out_specs=(heads, own),
            check_vma=False,  # a kernel is opaque to the check
        )  # fmt: skip

        def attend(pool: Pool, layer, q, k, v, scores, sinks_H=None, turn=None):
            group = int(self.shapes.groups > 1 and scores.window > 0)
            where = where_G[group]._replace(first=jnp.asarray(self._first(layer), jnp.int32))
            inputs = q, k, v, pool[scores.row], where, real_SxL, is_kept_SxL, sinks_H, turn
            o, pool[scores.row] = split(functools.partial(run, scores))(*inputs)
            return o

        return functools.partial(functools.partial, attend)  # a pool -> `attend` of it

    def _rows(self, row: int, k, v) -> jax.Array:
        """[..., K, D] once or twice -> [..., *row]: K and V of head 0, of head 1, ..., or the one latent row."""
        if v is None:
            return self._padded(row, k[..., 0, :])
        return self._padded(row, jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], -1, k.shape[-1]))

    def _padded(self, row: int, x) -> jax.Array:
        """[..., D] to that pool's width."""
        return jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, self.lanes[row] - x.shape[-1])))
