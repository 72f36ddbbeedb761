"""Stage 2, device side: the jitted calls of one engine and the arrays they own.

Consumes one version's params (serving layout) and an i32 control array a call; produces one small i32 result array.
The KV pool is K [pages, K, D, page_size] and V [pages, K, page_size, D] a layer, sharded over KV heads. A decode call
gathers its rows' pages once into contiguous blocks, takes several steps against them, and writes whole touched pages
back: a gather at every step would cost several times the attention itself.
Laws: every call donates the pool and the state, so calls run in the order they are made; a page that a row was not
given is never read, and unwritten positions are zeroed when gathered, so that nothing of another version leaks, not
even a nan; a shape is compiled once, by `warmup`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.models import decoder
from dora_jax.models.logits import policy_logits
from dora_jax.ops.attention import chunk_attention
from dora_jax.rollout import sample
from dora_jax.rollout.plan import DRAWN, FRESH, GROUP, HEADER, INDEX, POSITION, REMAINING, SLOT, TOKEN
from dora_jax.rollout.shapes import Shapes

PAGES_A_COPY = 32  # pages that one call moves to or from the host; longer samples take several, others decode between


class Device:
    """Pool, per-slot state and compiled calls on one mesh. Methods launch; only `np.asarray` of a result waits."""

    def __init__(self, cfg: decoder.ModelConfig, shapes: Shapes, mesh: Mesh, *, seed: int, eos_ids: tuple[int, ...],
                 vocab_limit: int, sampling: dict[str, Any], temperature: float, dtype):
        self.cfg = cfg
        self.shapes = shapes
        self.dtype = dtype
        self._replicated = NamedSharding(mesh, PartitionSpec())
        heads = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        self._pool_sharding = {"k": [heads] * cfg.n_layers, "v": [heads] * cfg.n_layers}
        self._pages_sharding = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        stop = functools.partial(_is_stop, eos_ids=eos_ids)
        logits = functools.partial(policy_logits, cfg, vocab_limit=vocab_limit, temperature=temperature or 1.0)
        draw = functools.partial(sample.draw, greedy=temperature == 0, **sampling)
        key = functools.partial(sample.sample_key, seed)
        decode = functools.partial(_decode, cfg, shapes, logits, draw, key, stop, dtype)
        prefill = functools.partial(_prefill, cfg, shapes, dtype)
        pool, rep = self._pool_sharding, self._replicated
        self._decode = jax.jit(decode, static_argnames="blocks", donate_argnums=(1, 2), out_shardings=(pool, rep, rep))
        self._prefill = jax.jit(prefill, static_argnames="blocks", donate_argnums=1, out_shardings=pool)
        self._read = jax.jit(_read_pages, out_shardings=(self._pages_sharding,) * 2)
        self._write = jax.jit(_write_pages, donate_argnums=0, out_shardings=pool)
        self.pool, self.state = jax.jit(self._empty, out_shardings=(pool, rep))()

    def _empty(self):
        s, c = self.shapes, self.cfg
        k = [jnp.zeros((s.pages + 1, c.n_kv_heads, c.head_dim, s.page_size), self.dtype) for _ in range(c.n_layers)]
        v = [jnp.zeros((s.pages + 1, c.n_kv_heads, s.page_size, c.head_dim), self.dtype) for _ in range(c.n_layers)]
        return {"k": k, "v": v}, jnp.zeros((s.slots + 1, 2), jnp.int32)

    def prefill(self, params: Any, control: np.ndarray, blocks: int) -> None:
        control = jax.device_put(control, self._replicated)
        self.pool = self._prefill(params, self.pool, control, blocks=blocks)

    def generate(self, params: Any, control: np.ndarray, blocks: int) -> jax.Array:
        """i32[rows, 2 * steps + 1]: tokens, log-prob bits, how many of them count."""
        control = jax.device_put(control, self._replicated)
        self.pool, self.state, result = self._decode(params, self.pool, self.state, control, blocks=blocks)
        result.copy_to_host_async()
        return result

    def read_pages(self, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Copies to the host: K [layers, pages, K, D, page_size] and V [layers, pages, K, page_size, D]."""
        copies = [self._read(self.pool, jax.device_put(ids, self._replicated)) for ids, _ in _pieces(pages)]
        k, v = (np.concatenate([np.asarray(copy[i]) for copy in copies], axis=1) for i in (0, 1))
        return k[:, : len(pages)], v[:, : len(pages)]

    def write_pages(self, pages: list[int], k_pages: np.ndarray, v_pages: np.ndarray) -> None:
        for ids, start in _pieces(pages):
            k, v = (_padded(x[:, start : start + PAGES_A_COPY]) for x in (k_pages, v_pages))
            k, v = jax.device_put((k, v), self._pages_sharding)
            self.pool = self._write(self.pool, jax.device_put(ids, self._replicated), k, v)

    def warmup(self, params: Any) -> None:
        """Compiles every call by making it once with padding rows only."""
        s = self.shapes
        for blocks in s.prefill_buckets:
            width = 2 + s.chunk + blocks * s.block_pages + s.chunk // s.page_size
            self.prefill(params, np.zeros((s.prefill_rows, width), np.int32), blocks)
        for blocks in s.decode_buckets:
            control = np.zeros((s.rows, HEADER + blocks * s.block_pages + s.window), np.int32)
            control[:, SLOT] = s.slots
            self.generate(params, control, blocks).block_until_ready()
        self.write_pages([0], *self.read_pages([0]))

    def compiled(self) -> int:
        """How many shapes have been compiled so far."""
        return sum(call._cache_size() for call in (self._decode, self._prefill, self._read, self._write))


# ------------------------------------------------------------------ the calls


def _decode(cfg, shapes: Shapes, logits, draw, key, stop, dtype, params, pool, state_Sx2, control_BxC, *, blocks: int):
    """Up to `steps` tokens for each row. state: next token, and whether the row still samples."""
    header, pages_BxP, window_BxW = jnp.split(control_BxC, [HEADER, HEADER + blocks * shapes.block_pages], axis=1)
    slot_B, past_B, drawn_B = header[:, SLOT], header[:, POSITION], header[:, DRAWN]
    fresh_B = header[:, FRESH] > 0
    token_B = jnp.where(fresh_B, header[:, TOKEN], state_Sx2[slot_B, 0])
    active_B = (header[:, REMAINING] > 0) & (fresh_B | (state_Sx2[slot_B, 1] > 0))
    keys_B = jax.vmap(key)(header[:, GROUP], header[:, INDEX])
    with jax.named_scope("gather"):
        past = _gather(pool, pages_BxP, past_B, shapes, blocks)
    rows, steps = token_B.shape[0], shapes.steps

    def step(carry):
        i, token_B, active_B, new, tokens_NxB, bits_NxB, count_B = carry
        new = {"k": list(new["k"]), "v": list(new["v"])}
        seen_1xN = (jnp.arange(steps) <= i)[None]

        def attend(layer, q, k, v):
            new["k"][layer] = jax.lax.dynamic_update_slice_in_dim(new["k"][layer], k.transpose(0, 2, 3, 1), i, 3)
            new["v"][layer] = jax.lax.dynamic_update_slice_in_dim(new["v"][layer], v.transpose(0, 2, 1, 3), i, 2)
            return chunk_attention(q, past[layer], past_B, new["k"][layer], new["v"][layer], seen_1xN)

        hidden_BxD = decoder.forward(cfg, params, token_B[:, None], past_B[:, None] + i, attend, dtype=dtype)[:, 0]
        with jax.named_scope("sample"):
            next_B, logprob_B = draw(logits(params, hidden_BxD), keys_B, drawn_B + i)
        token_B = jnp.where(active_B, next_B, token_B)
        tokens_NxB, bits_NxB = tokens_NxB.at[i].set(token_B), bits_NxB.at[i].set(_bits(logprob_B))
        count_B = count_B + active_B
        active_B = active_B & ~stop(token_B) & (i + 1 < header[:, REMAINING])
        return i + 1, token_B, active_B, new, tokens_NxB, bits_NxB, count_B

    kv = (rows, cfg.n_kv_heads)
    new = {"k": [jnp.zeros((*kv, cfg.head_dim, steps), dtype)] * cfg.n_layers,
           "v": [jnp.zeros((*kv, steps, cfg.head_dim), dtype)] * cfg.n_layers}
    zeros_NxB = jnp.zeros((steps, rows), jnp.int32)
    carry = (jnp.int32(0), token_B, active_B, new, zeros_NxB, zeros_NxB, jnp.zeros(rows, jnp.int32))
    _, token_B, active_B, new, tokens_NxB, bits_NxB, count_B = jax.lax.while_loop(
        lambda c: (c[0] < steps) & c[2].any(), step, carry)
    with jax.named_scope("scatter"):
        pool = _scatter(pool, new, pages_BxP, window_BxW, past_B, count_B, shapes)
    state_Sx2 = state_Sx2.at[slot_B].set(jnp.stack([token_B, active_B.astype(jnp.int32)], axis=1))
    return pool, state_Sx2, jnp.concatenate([tokens_NxB.T, bits_NxB.T, count_B[:, None]], axis=1)


def _prefill(cfg, shapes: Shapes, dtype, params, pool, control_RxC, *, blocks: int):
    """KV of one chunk a row, given the pages before it. The last layer's output is not needed and not computed."""
    chunk, n_read = shapes.chunk, blocks * shapes.block_pages
    header, tokens_RxL, past_RxP, write_RxW = jnp.split(control_RxC, [2, 2 + chunk, 2 + chunk + n_read], axis=1)
    start_R = header[:, 0]
    past = _gather(pool, past_RxP, start_R, shapes, blocks)
    causal_LxL = jnp.arange(chunk)[:, None] >= jnp.arange(chunk)[None]
    new: dict[int, tuple[jax.Array, jax.Array]] = {}

    def attend(layer, q, k, v):
        new[layer] = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        return chunk_attention(q, past[layer], start_R, *new[layer], causal_LxL)

    decoder.forward(cfg, params, tokens_RxL, start_R[:, None] + jnp.arange(chunk)[None], attend, dtype=dtype)
    for layer, (k, v) in new.items():
        pool["k"][layer] = pool["k"][layer].at[write_RxW].set(_cut_k(k, shapes.page_size))
        pool["v"][layer] = pool["v"][layer].at[write_RxW].set(_cut_v(v, shapes.page_size))
    return pool


def _read_pages(pool, pages_M):
    return jnp.stack([k[pages_M] for k in pool["k"]]), jnp.stack([v[pages_M] for v in pool["v"]])


def _write_pages(pool, pages_M, k_LxM, v_LxM):
    return {"k": [k.at[pages_M].set(new) for k, new in zip(pool["k"], k_LxM, strict=True)],
            "v": [v.at[pages_M].set(new) for v, new in zip(pool["v"], v_LxM, strict=True)]}


# ------------------------------------------------------- pages <-> contiguous


def _gather(pool, pages_BxP, past_B, shapes: Shapes, blocks: int):
    """Each layer's past as a list of (k [B,K,D,block], v [B,K,block,D]); V is zero where there is no past."""
    width = shapes.block_pages

    def block(layer: int, j: int):
        ids = pages_BxP[:, j * width : (j + 1) * width]
        k = pool["k"][layer][ids].transpose(0, 2, 3, 1, 4)  # [B, K, D, pages, page_size]
        v = pool["v"][layer][ids].transpose(0, 2, 1, 3, 4)  # [B, K, pages, page_size, D]
        k, v = k.reshape(*k.shape[:3], -1), v.reshape(*v.shape[:2], -1, v.shape[-1])
        seen = j * shapes.block + jnp.arange(shapes.block)[None] < past_B[:, None]
        return k, jnp.where(seen[:, None, :, None], v, 0)

    return [[block(layer, j) for j in range(blocks)] for layer in range(len(pool["k"]))]


def _scatter(pool, new, pages_BxP, window_BxW, past_B, count_B, shapes: Shapes):
    """Rewrites the pages of each row's window: what they held, with `count` new positions from `past` on."""
    size, width = shapes.page_size, window_BxW.shape[1]
    first_B = past_B // size
    at_BxW = first_B[:, None] + jnp.arange(width)[None]
    inside = at_BxW < pages_BxP.shape[1]
    old_BxW = jnp.where(inside, jnp.take_along_axis(pages_BxP, jnp.minimum(at_BxW, pages_BxP.shape[1] - 1), 1), 0)
    source_BxT = jnp.arange(width * size)[None] - (past_B % size)[:, None]  # index into the new positions
    is_new_BxT = (source_BxT >= 0) & (source_BxT < count_B[:, None])
    source_BxT = jnp.clip(source_BxT, 0, shapes.steps - 1)

    def merge(pages, layer_new, cut, at: tuple):
        fresh = cut(jnp.take_along_axis(layer_new, source_BxT[at], axis=at.index(slice(None), 1)), size)
        return pages.at[window_BxW].set(jnp.where(cut(is_new_BxT[at], size), fresh, pages[old_BxW]))

    every = slice(None)  # time is the last axis of K, the one before of V
    return {"k": [merge(p, n, _cut_k, (every, None, None, every)) for p, n in zip(pool["k"], new["k"], strict=True)],
            "v": [merge(p, n, _cut_v, (every, None, every, None)) for p, n in zip(pool["v"], new["v"], strict=True)]}


def _cut_k(k_BxKxDxT, size: int):
    """[B, K, D, T] -> [B, pages, K, D, page_size]"""
    b, kv, d, _ = k_BxKxDxT.shape
    return k_BxKxDxT.reshape(b, kv, d, -1, size).transpose(0, 3, 1, 2, 4)


def _cut_v(v_BxKxTxD, size: int):
    """[B, K, T, D] -> [B, pages, K, page_size, D]"""
    b, kv, _, d = v_BxKxTxD.shape
    return v_BxKxTxD.reshape(b, kv, -1, size, d).transpose(0, 2, 1, 3, 4)


def _is_stop(token_B, *, eos_ids: tuple[int, ...]):
    stopped = jnp.zeros(token_B.shape, bool)
    for eos in eos_ids:
        stopped |= token_B == eos
    return stopped


def _bits(x):
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _pieces(pages: list[int]):
    """(i32[PAGES_A_COPY] ids padded with the dummy page, start) for each piece of a page list."""
    for start in range(0, len(pages), PAGES_A_COPY):
        ids = np.zeros(PAGES_A_COPY, np.int32)
        piece = pages[start : start + PAGES_A_COPY]
        ids[: len(piece)] = piece
        yield ids, start


def _padded(x: np.ndarray) -> np.ndarray:
    """To PAGES_A_COPY pages on axis 1, contiguous."""
    out = np.zeros((x.shape[0], PAGES_A_COPY, *x.shape[2:]), x.dtype)
    out[:, : x.shape[1]] = x
    return out
