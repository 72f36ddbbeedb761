"""Stage 2, device side: KV pages as the XLA reference reads them, `rollout.attention = reference`.

The pool has a list of arrays, one a layer, for K [pages, K, D, page_size] and, unless values are a part of the keys, V
[pages, K, page_size, D]. A decode call gathers its rows' pages once into contiguous blocks,
takes several steps against them, and writes whole touched pages back: a gather at every step would cost several times
the attention itself.
Laws: a page that a row was not given is never read, and unwritten positions are zeroed when gathered, so that nothing
of another version leaks, not even a nan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dora_jax.models.attention import Attend
from dora_jax.ops.attention import chunk_attention
from dora_jax.rollout.quantize import KV, narrow
from dora_jax.rollout.shapes import POSITIONS, KVLayout, Shapes

Pool = dict[str, list[jax.Array]]


class Gathered:
    """What device_calls.py asks of a KV pool. The arrays come in and go out; the object holds sizes only."""

    turns = False  # see kv_pallas.py
    pool_spec = PartitionSpec(None, "tensor")
    pages_spec = PartitionSpec(None, None, "tensor")  # of pages on their way to or from the host

    def __init__(self, kv: KVLayout, shapes: Shapes, dtype: Any):
        self.kv = kv
        self.shapes = shapes
        self.dtype = dtype
        self.pool_dtype = KV[shapes.kv] or dtype

    def empty(self) -> Pool:
        rows = [1 + (self.shapes.local_pages if self._group(i) else self.shapes.pages) for i in range(self.kv.layers)]
        return self._zeros(rows, self.shapes.page_size, self.pool_dtype)

    # ------------------------------------------------------------ decode

    def begin(self, pool: Pool, pages_GxBxP, window_GxBxW, past_B) -> tuple[Any, Pool]:
        """(what all steps read, what they change): the past, and room for the new positions."""
        del window_GxBxW
        with jax.named_scope("gather"):
            past = self._gather(pool, pages_GxBxP, past_B)
        return (past, past_B), self._zeros([len(past_B)] * self.kv.layers, self.shapes.steps, self.dtype)

    def attend_step(self, fixed, i, active_B) -> Callable[[Pool], Attend]:
        """The `attend` of step i; it puts the new KV into what it is made with, which the next step gets."""
        del active_B  # what a finished row computes is not kept: see `end`
        past, past_B = fixed

        def attend(new: Pool, layer, q, k, v, scores, sinks=None):
            for name, x in self._turned(k, v).items() if k is not None else ():
                new[name][layer] = jax.lax.dynamic_update_slice_in_dim(new[name][layer], x, i, POSITIONS[name] % 4)
            now = {name: of_layers[layer] for name, of_layers in new.items()}
            return chunk_attention(q, past[layer], past_B, now["k"], self._values(now), i[None], scores, sinks)

        return functools.partial(functools.partial, attend)

    def attend_ahead(self, fixed, new: Pool, active_B) -> Attend:
        """The `attend` of several positions a row at once, each of which sees those before it."""
        del active_B
        past, past_B = fixed

        def attend(layer, q, k, v, scores, sinks=None):
            for name, x in self._turned(k, v).items() if k is not None else ():
                new[name][layer] = x
            now = {name: of_layers[layer] for name, of_layers in new.items()}
            at_L = jnp.arange(q.shape[1])
            return chunk_attention(q, past[layer], past_B, now["k"], self._values(now), at_L, scores, sinks)

        return attend

    def end(self, pool: Pool, new: Pool, pages_GxBxP, window_GxBxW, past_B, count_B) -> Pool:
        """Rewrites the pages of each row's window: what they held, with `count` new positions from `past` on."""
        size, width, most = self.shapes.page_size, window_GxBxW.shape[2], pages_GxBxP.shape[2]
        at_BxW = past_B[:, None] // size + jnp.arange(width)[None]
        of_pages = functools.partial(jnp.take_along_axis, indices=jnp.minimum(at_BxW, most - 1), axis=1)
        old_GxBxW = [jnp.where(at_BxW < most, of_pages(pages_BxP), 0) for pages_BxP in pages_GxBxP]
        source_BxT = jnp.arange(width * size)[None] - (past_B % size)[:, None]  # index into the new positions
        is_new_BxT = (source_BxT >= 0) & (source_BxT < count_B[:, None])

        def merge(name: str, layer: int):
            pages, layer_new, group = pool[name][layer], new[name][layer], self._group(layer)
            axis = POSITIONS[name] % 4
            others = [i for i in (1, 2, 3) if i != axis]
            source, is_new = (jnp.expand_dims(x, others) for x in (source_BxT, is_new_BxT))
            source = jnp.clip(source, 0, layer_new.shape[axis] - 1)
            fresh = narrow(_cut(jnp.take_along_axis(layer_new, source, axis), name, size), self.pool_dtype)
            merged = jnp.where(_cut(is_new, name, size), fresh, pages[old_GxBxW[group]])
            return pages.at[window_GxBxW[group]].set(merged)

        with jax.named_scope("scatter"):
            return {name: [merge(name, layer) for layer in range(self.kv.layers)] for name in pool}

    # ----------------------------------------------------------- prefill

    def attend_chunk(self, pool: Pool, past_GxRxP, write_GxRxW, start_R, length_R, kept_R) -> Attend:
        """The `attend` of one chunk a row; it puts the chunk's KV into `pool`, but for the first `kept` positions,
        whose KV the first page holds."""
        del length_R  # positions beyond it go to the dummy page or to places that are written again before they count
        gather = functools.partial(self._gather, pool, past_GxRxP, start_R)
        past = gather()
        if past_GxRxP.shape[2]:
            # In a loop of one turn, which XLA cannot foresee, and which the writes wait for: else it copies the pool
            empty = jax.tree.map(jnp.zeros_like, past)
            turns = jnp.int32(start_R.max() >= 0)
            one, past = jax.lax.fori_loop(0, turns, lambda i, _: (i + 1, gather()), (0, empty))
            write_GxRxW = one * write_GxRxW
        at_L, size = jnp.arange(self.shapes.chunk), self.shapes.page_size
        is_kept_RxS = jnp.arange(size)[None] < kept_R[:, None]
        chunks: dict[int, dict[str, jax.Array]] = {}  # of layers, for those that have no KV of their own

        def attend(layer, q, k, v, scores, sinks=None):
            if k is None:
                now = chunks[layer]
                return chunk_attention(q, past[layer], start_R, now["k"], self._values(now), at_L, scores, sinks)
            now, write_RxW = self._turned(k, v), write_GxRxW[self._group(layer)]
            for name, x in now.items():
                axis, pages = POSITIONS[name] % 4, pool[name][layer]
                is_kept = jnp.expand_dims(is_kept_RxS, [i for i in (1, 2, 3) if i != axis])
                first = jax.lax.slice_in_dim(x, 0, size, axis=axis)
                held = pages[write_RxW[:, 0]].astype(x.dtype)
                now[name] = jax.lax.dynamic_update_slice_in_dim(x, jnp.where(is_kept, held, first), 0, axis)
                new = narrow(_cut(now[name], name, size), self.pool_dtype)
                pool[name][layer] = pages.at[write_RxW].set(new)
            chunks[layer] = now
            return chunk_attention(q, past[layer], start_R, now["k"], self._values(now), at_L, scores, sinks)

        return attend

    # -------------------------------------------------------------- host

    def read(self, pool: Pool, pages_GxM) -> tuple[jax.Array, ...]:
        """One array a name, [layers, pages, ...], as requests carry them; zeros of layers whose pages are gone."""

        def of_layer(layer: int, x):
            if not (group := self._group(layer)):
                return x[pages_GxM[0]]
            here_M = pages_GxM[group] > 0
            return jnp.where(jnp.expand_dims(here_M, (1, 2, 3)), x[pages_GxM[group]], 0)

        return tuple(jnp.stack([of_layer(i, pool[name[0]][i]) for i in self._layers(name)]) for name in self.kv.names)

    def write(self, pool: Pool, pages_GxM, *arrays: jax.Array) -> Pool:
        found = {name: list(of_layers) for name, of_layers in pool.items()}
        for name, of_layers in zip(self.kv.names, arrays, strict=True):
            for i, new in zip(self._layers(name), narrow(of_layers, self.pool_dtype), strict=True):
                found[name[0]][i] = found[name[0]][i].at[pages_GxM[self._group(i)]].set(new)
        return found

    # ----------------------------------------------------------- private

    def _group(self, layer: int) -> int:
        """The pool of this layer's pages."""
        return int(self.shapes.groups > 1 and self.kv.windows[layer] > 0)

    def _layers(self, name: str) -> tuple[int, ...]:
        """The layers of the host's array of this name."""
        return self.kv.layers_of(int(name.endswith("2")))

    def _zeros(self, rows: list[int], positions: int, dtype) -> Pool:
        """For K and V an array a layer: so many pages, or rows of a call, of so many positions."""
        shapes = {name: functools.partial(self.kv.shape, name, positions=positions) for name in self.kv.names[:2]}
        return {name: [jnp.zeros((n, *of(i)), dtype) for i, n in enumerate(rows)] for name, of in shapes.items()}

    def _turned(self, k, v) -> dict[str, jax.Array]:
        """[B, L, K, D] -> K [B, K, D, L] and V [B, K, L, D], where there is one."""
        return {"k": k.transpose(0, 2, 3, 1)} | ({} if v is None else {"v": v.transpose(0, 2, 1, 3)})

    def _values(self, arrays: dict[str, jax.Array]) -> jax.Array:
        """V [B, K, S, D], of latents a part of K."""
        return arrays["v"] if "v" in arrays else arrays["k"][:, :, : self.kv.rank].swapaxes(2, 3)

    def _gather(self, pool: Pool, pages_GxBxP, past_B):
        """Each layer's past as a list of (k [B,K,D,block], v [B,K,block,D]); V is zero where there is no past, and of
        layers whose pages behind the window are gone where the window has passed."""
        s, width = self.shapes, self.shapes.block_pages
        past: list[list[tuple[jax.Array, jax.Array]]] = [[] for _ in range(self.kv.layers)]
        for layer, blocks in enumerate(past):
            group = self._group(layer)
            pages_BxP = pages_GxBxP[group]
            for j in range(pages_BxP.shape[1] // width):
                found = {}
                for name in pool:
                    axis = POSITIONS[name] % 4
                    x = jnp.moveaxis(pool[name][layer][pages_BxP[:, j * width : (j + 1) * width]], 1, axis)
                    found[name] = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]).astype(self.dtype)
                at_S = j * s.block + jnp.arange(s.block)[None]
                seen = at_S < past_B[:, None]
                if group:
                    seen &= at_S > past_B[:, None] - self.kv.windows[layer]
                blocks.append((found["k"], jnp.where(seen[:, None, :, None], self._values(found), 0)))
        return past


def _cut(x: jax.Array, name: str, size: int) -> jax.Array:
    """Positions into pages of so many: K [B, K, D, T] -> [B, pages, K, D, size], V [B, K, T, D] -> [B, pages, K, size,
    D]"""
    axis = POSITIONS[name] % 4
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 1)
