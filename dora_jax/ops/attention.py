"""Attention of a few new positions over their own past, in two forms: contiguous blocks, or pages of a pool.

`chunk_attention` is the XLA reference, which runs anywhere (`rollout.attention = reference`). `paged_step` writes a
step's KV into pages and attends over them, by the kernel that `rollout.attention` names: tpu, the ragged paged
attention that jax ships, behind paged_write.py's kernels; tokamax, the batched one of that package, which writes the
pages itself; gpu, paged_gpu.py.
`paged_reference` attends in plain XLA; tests hold all of them equal to it. Pages of latent attention are read by
latent_attention.py's kernel, for TPUs.

The reference's past comes in blocks of equal width, K as [B, K, D, S] and V as [B, K, S, D]: the layouts that a CPU
streams at memory speed. The new positions stand apart, so that the past is read only while a chunk is decoded.
Law: results do not depend on how many masked blocks follow, bit for bit. Each block's products have one shape, the
maximum is exact, and sums run over the blocks in order, to which a masked block adds exact zeros. One long sample
in the batch therefore changes nobody else's tokens, though it makes the bucket longer.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_paged_attention

from dora_jax.models.decoder import Scores
from dora_jax.ops import latent_attention, paged_write
from dora_jax.ops.latent_attention import check_pages
from dora_jax.ops.paged_write import Where

MASKED = -1e30  # finite, so that a row with nothing but masked scores makes no nan


def chunk_attention(
    q_BxLxHxD,
    past: Sequence[tuple[jax.Array, jax.Array]],
    past_len_B,
    k_new_BxKxDxM,
    v_new_BxKxMxD,
    at_L,
    scores: Scores,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """o[B, L, H, D of v]. `past`: (k [B,K,D,S], v [B,K,S,D]) blocks, of which the first past_len positions count; V
    must be zero beyond. at_L: i32[L], which of the M new positions each query is, which sees itself and what is before
    it, as far as its window reaches. sinks_H: see models/attention.py."""
    b, length, heads, d = q_BxLxHxD.shape
    kv = k_new_BxKxDxM.shape[1]
    group = heads // kv
    q = q_BxLxHxD.reshape(b, length, kv, group, d).transpose(0, 2, 3, 1, 4).reshape(b, kv, group * length, d)

    def products(k_BxKxDxS, mask):
        s = jnp.einsum("bkqd,bkds->bkqs", q, k_BxKxDxS, preferred_element_type=jnp.float32)
        return jnp.where(mask, s * scores.scale, MASKED)

    parts, start = [], 0
    for k, v in past:
        width = k.shape[-1]
        at_S = (start + jnp.arange(width))[None, None, None, :]
        seen = at_S < past_len_B[:, None, None, None]
        if scores.window:
            last_BxL = past_len_B[:, None] + jnp.tile(at_L, group)[None]
            seen &= at_S > last_BxL[:, None, :, None] - scores.window
        parts.append((products(k, seen), v))
        start += width
    behind_LxM = at_L[:, None] - jnp.arange(k_new_BxKxDxM.shape[-1])[None]  # how far a position is behind the query's
    mask_LxM = (behind_LxM >= 0) & (behind_LxM < (scores.window or behind_LxM.shape[1]))
    parts.append((products(k_new_BxKxDxM, jnp.tile(mask_LxM, (group, 1))[None, None]), v_new_BxKxMxD))
    # Softmax over all parts; the new positions first, then the past in order, masked tail blocks add zeros
    peak = parts[-1][0].max(-1, keepdims=True)
    for s, _ in parts[:-1]:
        peak = jnp.maximum(peak, s.max(-1, keepdims=True))
    total, out = jnp.float32(0), jnp.float32(0)
    if sinks_H is not None:
        sinks = jnp.repeat(sinks_H.reshape(kv, group), length, axis=1)[None, :, :, None]
        peak = jnp.maximum(peak, sinks)
        total = jnp.exp(sinks - peak)
    for s, v in [parts[-1], *parts[:-1]]:
        weights = jnp.exp(s - peak)
        total += weights.sum(-1, keepdims=True)
        out += jnp.einsum("bkqs,bksd->bkqd", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
    o = (out / total).astype(q.dtype).reshape(b, kv, group, length, -1)
    return o.transpose(0, 3, 1, 2, 4).reshape(b, length, heads, -1)


# ------------------------------------------------------------------- pages

# The kernels' blocks. Of an engine all calls of one kind have tables of one width, and so blocks of one size, on which
# bits depend: they do not depend on what is beside a sample.
BLOCK_TOKENS = 512, 2048  # KV positions that one step of a kernel streams: the fewest and the most,
BLOCK_BYTES = 2 << 20  # but for the fewest no more than this, of which two are in a chip's fast memory
BLOCKS = 8  # of a longest context: a row reads half a block more than it has, and a block costs its start
BLOCK_QUERIES = 32  # of a prompt's chunk; a sequence with a single query has a block of its own, else it would be
# computed once for each of its neighbours
PLATFORMS = {"tpu": "tpu", "tokamax": "tpu", "gpu": "gpu"}  # where a kernel runs
LATENT = ("reference", "tpu")  # what reads latent pages
SINKS = (
    "reference",
    "gpu",
)  # what has a place for sinks: jax's kernel returns no sum of the weights that one could add to


def check_platform(impl: str, platform: str, latent: bool = False, sinks: bool = False) -> None:
    """Raises ValueError where this kernel cannot run, or cannot read the cache of latent attention, or computes no
    sinks."""
    if sinks and impl not in SINKS:
        raise ValueError(f"rollout.attention {impl} computes no attention sinks; {' and '.join(SINKS)} do")
    needed = PLATFORMS.get(impl, platform)
    if latent and impl not in LATENT:
        raise ValueError(f"rollout.attention {impl} reads no latent pages (MLA); {' and '.join(LATENT)} do")
    if platform != needed:
        raise ValueError(f"rollout.attention {impl} needs {needed.upper()} devices; this instance's are {platform}")
    if impl == "tokamax" and importlib.util.find_spec("tokamax") is None:
        raise ValueError(
            "rollout.attention tokamax needs that package, which needs Python 3.12: pip install 'dora_jax[tpu-kernels]'"
        )


def paged_kernel(impl: str, rank: int = 0) -> Callable[..., jax.Array]:
    """What `rollout.attention` names, tpu or gpu: a function with the arguments of `paged_reference`.

    rank: 0, or how many numbers of a row of latent pages are its value; see latent_attention.py.
    """
    if rank:
        return functools.partial(latent_attention.latent_attention, rank=rank)
    if impl == "tpu":
        return paged_attention
    from dora_jax.ops import paged_gpu

    return paged_gpu.paged_attention


def paged_step(
    q_SxLxHxD, new, pages, where: Where, scores: Scores, impl: str, rank: int = 0, sinks_H=None
) -> tuple[jax.Array, jax.Array]:
    """(o[S, L, H, D], the pages with the new KV): the L queries of a sequence are its last L positions, whose KV is
    `new`, in the pages' type; each query sees itself and what is before it. new None: there is none, or it is written.

    new [S, L, ...], pages [N, P, ...]: K and V heads side by side [2K, D], or a latent row [D] whose first `rank`
    numbers are the value; o is then [S, L, H, rank]. Of a sequence the positions that count are read and must be
    finite; the last L of them are written here. D is `lanes`: what is smaller comes padded.
    """
    tables_SxM = where.first + where.tables_SxM
    if impl == "tokamax" and new is not None:
        return tokamax_step(q_SxLxHxD, new, pages, where.lens_S, tables_SxM, scores)
    if new is not None:
        pages = paged_write.written(pages, new, where) if impl == "tpu" else paged_write.scattered(pages, new, where)
    how = (scores.scale,) if rank else (scores,) if sinks_H is None else (scores, sinks_H)  # of latents the scale alone
    return paged_kernel(impl, rank)(q_SxLxHxD, pages, where.lens_S, tables_SxM, *how), pages


def block_tokens(tables_SxM, kv_pages_NxPxCxD) -> int:
    """KV positions that one step of a TPU kernel streams, a power of two. jax's table of tuned sizes, which has
    contexts up to 4,096 on v5e and v6e, says 1,024 to 4,096 for pages of 128 and more and rows that are full."""
    _, page, heads, d = kv_pages_NxPxCxD.shape
    least, most = BLOCK_TOKENS
    fitting = BLOCK_BYTES // (heads * d * kv_pages_NxPxCxD.dtype.itemsize)
    wanted = min(most, fitting, tables_SxM.shape[1] * page // BLOCKS)
    return max(least, 1 << wanted.bit_length() >> 1)


def paged_attention(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM, scores: Scores) -> jax.Array:
    """`paged_step` with the KV written already, by jax's ragged paged attention for TPUs."""
    check_pages(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM)
    s, length, heads, d = q_SxLxHxD.shape
    block_pages = max(1, block_tokens(tables_SxM, kv_pages_NxPxCxD) // kv_pages_NxPxCxD.shape[1])
    tables_SxM = jnp.pad(tables_SxM, ((0, 0), (0, max(0, block_pages - tables_SxM.shape[1]))))
    narrower = kv_pages_NxPxCxD.dtype != q_SxLxHxD.dtype
    scales = {"k_scale": 1.0, "v_scale": 1.0} if narrower else {}  # with them the kernel widens what it reads
    o_TxHxD = ragged_paged_attention.ragged_paged_attention(
        q_SxLxHxD.reshape(-1, heads, d),
        kv_pages_NxPxCxD,
        kv_lens_S,
        tables_SxM,
        np.arange(s + 1, dtype=np.int32) * length,
        np.full((1,), s, np.int32),
        sm_scale=scores.scale,
        sliding_window=scores.window or None,
        **scales,
        num_kv_pages_per_block=block_pages,
        num_queries_per_block=min(length, BLOCK_QUERIES),
    )
    return o_TxHxD.reshape(q_SxLxHxD.shape)


def tokamax_step(
    q_SxLxHxD, new_SxLxCxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM, scores: Scores, implementation: str = "kernel"
) -> tuple[jax.Array, jax.Array]:
    """`paged_step` by tokamax's batched ragged paged attention. implementation: "kernel", or "reference", its plain
    XLA.

    The kernel itself, not the package's operator around it, which looks for a TPU and asks a table for block sizes.
    """
    from tokamax._src.ops.batched_rpa import reference  # Python 3.12 only, and seconds to import
    from tokamax._src.ops.batched_rpa.kernel import configs, wrapper

    check_pages(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM)
    s, length, heads, d = q_SxLxHxD.shape
    new_TxCxD = new_SxLxCxD.reshape(s * length, -1, d)
    decoding = s if length == 1 else 0
    narrower = kv_pages_NxPxCxD.dtype != q_SxLxHxD.dtype
    options = dict(sm_scale=scores.scale, sliding_window=scores.window or None)
    options |= {"k_scale": 1.0, "v_scale": 1.0} if narrower else {}
    attend = reference.batched_ragged_paged_attention_reference
    if implementation == "kernel":
        attend = wrapper.ragged_paged_attention
        blocks = dict(bkv_sz=block_tokens(tables_SxM, kv_pages_NxPxCxD), n_buffer=3)
        options |= dict(
            decode_block_sizes=configs.BlockSizes(bq_sz=1, bq_c_sz=1, batch_size=8, **blocks),
            prefill_block_sizes=configs.BlockSizes(bq_sz=128, bq_c_sz=64, batch_size=2, **blocks),
        )
    o_TxHxD, kv_pages_NxPxCxD = attend(
        q_SxLxHxD.reshape(s * length, heads, d),
        new_TxCxD[:, 0::2],
        new_TxCxD[:, 1::2],
        kv_pages_NxPxCxD,
        kv_lens_S,
        tables_SxM.reshape(-1),
        jnp.arange(s + 1, dtype=jnp.int32) * length,
        jnp.array([decoding, decoding, s], jnp.int32),
        **options,
    )
    return o_TxHxD.reshape(q_SxLxHxD.shape), kv_pages_NxPxCxD


def paged_reference(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM, scores: Scores, sinks_H=None) -> jax.Array:
    """The same in plain XLA: every sequence's pages side by side, one softmax."""
    check_pages(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM)
    s, length, _heads, d = q_SxLxHxD.shape
    kv = kv_pages_NxPxCxD[tables_SxM].astype(q_SxLxHxD.dtype).reshape(s, -1, *kv_pages_NxPxCxD.shape[2:])
    at_T = jnp.arange(kv.shape[1])
    own_SxT = at_T[None] < kv_lens_S[:, None]
    k_SxTxKxD, v_SxTxKxD = (jnp.where(own_SxT[:, :, None, None], x, 0) for x in (kv[:, :, 0::2], kv[:, :, 1::2]))
    q = q_SxLxHxD.reshape(s, length, k_SxTxKxD.shape[2], -1, d)
    found = jnp.einsum("slkgd,stkd->skglt", q, k_SxTxKxD, preferred_element_type=jnp.float32) * scores.scale
    last_SxL = (kv_lens_S - length)[:, None] + jnp.arange(length)[None]
    seen_SxLxT = at_T[None, None] <= last_SxL[:, :, None]
    seen_SxLxT &= at_T[None, None] > last_SxL[:, :, None] - (scores.window or len(at_T))
    each = jnp.where(seen_SxLxT[:, None, None], found, MASKED)
    if sinks_H is not None:
        sinks = jnp.broadcast_to(sinks_H.reshape(1, *each.shape[1:3], 1, 1), (*each.shape[:-1], 1))
        each = jnp.concatenate([sinks, each], axis=-1)
    weights = jax.nn.softmax(each, axis=-1)[..., -len(at_T) :].astype(kv.dtype)
    return jnp.einsum("skglt,stkd->slkgd", weights, v_SxTxKxD).reshape(q_SxLxHxD.shape).astype(q_SxLxHxD.dtype)
