"""Attention straight from the pages of a KV pool on a GPU, in Pallas Triton: `rollout.attention = gpu`.

Decode (one query a row) is memory-bound, so it is split over the context (flash decoding, Dao et al. 2023): a program
takes one KV head of one row and SPAN positions, reads each K and V once for all query heads of the group, which stand
as the rows of one tensor-core product, and writes a partial output; a second kernel combines the partials of a row.
A prefill chunk (many queries a row) runs the same loop unsplit, one program a block of queries.
Laws: a row's result depends on its own length and pages only, bit for bit: spans and blocks lie at fixed positions.
Nothing beyond a row's length is read: not a page, not a table entry, not the rest of its last page. A program whose
span begins beyond it ends at once.
The reference is attention.paged_reference, and so is the layout of the pool, [pages, page_size, 2K, D] with K and V of
a head side by side: a program reads 2 x D values in one piece a position, and neighbouring programs the other heads.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dora_jax.models.decoder import Scores
from dora_jax.ops import latent_attention
from dora_jax.ops.latent_attention import dot

SPAN = 512  # positions of one program of a decode call: short enough that ragged rows balance over the processors
BLOCK = 64  # positions that one step of the loop loads: 32 KiB of K and V at D = 128 in bf16
STAGES = 3  # steps whose loads are in flight at once
WARPS = 4
MIN_ROWS = 16  # of a tensor-core product
MAX_ROWS = 64  # queries x heads of a group, of one program of a prefill call
COMBINED = 16  # partials that one step of the combining loop loads
MASKED = -1e30  # finite, so that a row with nothing but masked scores makes no nan
LOG2E = math.log2(math.e)


def paged_attention(
    q_SxLxHxD,
    kv_pages_NxPxCxD,
    kv_lens_S,
    tables_SxM,
    scores: Scores,
    sinks_H: jax.Array | None = None,
    *,
    span: int = SPAN,
    block: int = BLOCK,
    stages: int = STAGES,
    warps: int = WARPS,
    interpret: bool = False,
) -> jax.Array:
    """o[S, L, H, D] as attention.paged_reference gives it; zeros for a row of length 0. A sink's weight joins the sum
    at the end, in the kernel that divides by it.

    span, block: positions, powers of two, a span a multiple of a block. interpret: in Python on any device, for tests.
    Raises ValueError where the head size is no power of two (see kv_pages.lanes), where more query heads share a KV
    head than the kernel takes, or where the pool is beyond its indices.
    """
    latent_attention.check_pages(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM)
    s, length, heads, d = q_SxLxHxD.shape
    n, page_size, kv, _ = kv_pages_NxPxCxD.shape
    if d != (width := latent_attention.lanes("gpu", d)):
        raise ValueError(f"heads of {d} come padded to {width}, a power of two")
    if kv_pages_NxPxCxD.dtype.itemsize == 1 and 2**31 <= kv_pages_NxPxCxD.size <= 2**32:
        raise ValueError(
            f"Pallas indexes an 8-bit pool of 2 to 4 GiB with 31 bits, and this one has "
            f"{kv_pages_NxPxCxD.size} values; set rollout.pages so that it is smaller, or larger"
        )
    group = heads // (kv // 2)
    most = MIN_ROWS if q_SxLxHxD.dtype == jnp.float32 else MAX_ROWS  # products in full precision take many registers
    rows = min(most, max(MIN_ROWS, pl.next_power_of_2(length * group)))
    splits = -(-tables_SxM.shape[1] * page_size // span) if length == 1 else 1
    if length == 1 and group > rows:
        raise ValueError(f"{group} query heads share a KV head; the kernel takes {rows}")
    blocks = -(-length * group // rows)
    if splits == 1:
        outs = [jax.ShapeDtypeStruct(q_SxLxHxD.shape, q_SxLxHxD.dtype)]
    else:
        partials = s, length, heads, splits
        outs = [jax.ShapeDtypeStruct((*partials, d), jnp.float32), jax.ShapeDtypeStruct(partials, jnp.float32)]
    kernel = functools.partial(
        _attend,
        scale=scores.scale * LOG2E,
        window=scores.window,
        group=group,
        rows=rows,
        block=block,
        page_size=page_size,
        span=span if splits > 1 else None,
        splits=splits,
        sinks=sinks_H is not None and splits == 1,
    )
    sinks = [] if sinks_H is None else [sinks_H.astype(jnp.float32) * LOG2E]
    out = pl.pallas_call(
        kernel,
        out_shape=outs,
        grid=(kv // 2, s, blocks * splits),
        interpret=interpret,
        name="paged_attention",
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
    )(q_SxLxHxD, kv_pages_NxPxCxD.reshape(n * page_size, kv, d), kv_lens_S, tables_SxM, *(sinks if splits == 1 else []))
    if splits == 1:
        return out[0]
    return pl.pallas_call(
        functools.partial(_combine, span=span, sinks=sinks_H is not None),
        grid=(heads, s),
        interpret=interpret,
        name="combine_partials",
        out_shape=jax.ShapeDtypeStruct(q_SxLxHxD.shape, q_SxLxHxD.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*out, kv_lens_S, *sinks)


def _attend(
    q_ref,
    pool_ref,
    lens_ref,
    tables_ref,
    *refs,
    scale: float,
    window: int,
    group: int,
    rows: int,
    block: int,
    page_size: int,
    span: int | None,
    splits: int,
    sinks: bool,
):
    """One KV head of one row: a block of its queries against a span of its positions.

    Refs: q [S, L, H, D], pool [positions, 2K, D], lens [S], tables [S, M], with `sinks` theirs [H], to base 2; o [S, L,
    H, D], or partials [S, L, H, splits, D] with the logarithm to base 2 of their sums [S, L, H, splits].
    """
    sinks_ref, (o_ref, *lse_ref) = (refs[0], refs[1:]) if sinks else (None, refs)
    head, s, j = (pl.program_id(axis) for axis in range(3))
    length, d = q_ref.shape[1], q_ref.shape[3]
    lane_1xD = jnp.arange(d, dtype=jnp.int32)[None]
    first, split = (j, 0) if splits == 1 else (0, j)
    row_R = first * rows + jnp.arange(rows, dtype=jnp.int32)
    real_R = row_R < length * group
    query_R, head_R = jax.lax.div(row_R, group), head * group + jax.lax.rem(row_R, group)
    n = lens_ref[s]
    seen_R = n - length + query_R + 1  # positions that each query sees
    start = 0 if span is None else split * span
    stop = n - length + 1 + jnp.minimum(length - 1, jax.lax.div(first * rows + rows - 1, group))
    stop = stop if span is None else jnp.minimum(stop, start + span)
    inside = start < stop  # even where it is all before the window, it is a partial, of nothing
    if window:  # blocks before the window of the first query are left out
        oldest = n - length + jax.lax.div(first * rows, group) + 1 - window
        start = jnp.maximum(start, jax.lax.div(jnp.maximum(oldest, 0), block) * block)
    where_Rx1 = s, query_R[:, None], head_R[:, None]
    q_RxD = plgpu.load(q_ref.at[*where_Rx1, lane_1xD], mask=(real_R & (start < stop))[:, None], other=0.0)

    def step(n_done, carry):
        o_RxD, peak_R, total_R = carry
        at_T = start + n_done * block + jnp.arange(block, dtype=jnp.int32)
        own_T = at_T < stop
        page_T = plgpu.load(tables_ref.at[s, jax.lax.div(at_T, page_size)], mask=own_T, other=0)
        token_Tx1 = (page_T * page_size + jax.lax.rem(at_T, page_size))[:, None]
        k_TxD, v_TxD = (
            plgpu.load(pool_ref.at[token_Tx1, 2 * head + i, lane_1xD], mask=own_T[:, None], other=0.0).astype(
                q_RxD.dtype
            )
            for i in (0, 1)
        )
        seen_RxT = (at_T[None] < seen_R[:, None]) & own_T[None]
        if window:
            seen_RxT &= at_T[None] >= seen_R[:, None] - window
        scores_RxT = jnp.where(seen_RxT, dot(q_RxD, k_TxD.T, 0) * scale, MASKED)
        new_peak_R = jnp.maximum(peak_R, scores_RxT.max(-1))
        kept_R = jnp.exp2(peak_R - new_peak_R)
        weights_RxT = jnp.where(seen_RxT, jnp.exp2(scores_RxT - new_peak_R[:, None]), 0)
        o_RxD = o_RxD * kept_R[:, None] + dot(weights_RxT.astype(v_TxD.dtype), v_TxD, 0)
        return o_RxD, new_peak_R, total_R * kept_R + weights_RxT.sum(-1)

    carry = jnp.zeros((rows, d), jnp.float32), jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    steps = jax.lax.div(jnp.maximum(stop - start, 0) + block - 1, block)
    o_RxD, peak_R, total_R = jax.lax.fori_loop(0, steps, step, carry)
    if sinks_ref is not None:
        sink_R = plgpu.load(sinks_ref.at[head_R], mask=real_R, other=MASKED)
        new_peak_R = jnp.maximum(peak_R, sink_R)
        o_RxD *= jnp.exp2(peak_R - new_peak_R)[:, None]
        total_R = total_R * jnp.exp2(peak_R - new_peak_R) + jnp.exp2(sink_R - new_peak_R)
    o_RxD = o_RxD / jnp.where(total_R > 0, total_R, 1)[:, None]
    if splits == 1:
        plgpu.store(o_ref.at[*where_Rx1, lane_1xD], o_RxD.astype(o_ref.dtype), mask=real_R[:, None])
    else:
        written_R = real_R & inside
        plgpu.store(o_ref.at[*where_Rx1, split, lane_1xD], o_RxD, mask=written_R[:, None])
        plgpu.store(lse_ref[0].at[s, query_R, head_R, split], peak_R + jnp.log2(total_R), mask=written_R)


def _combine(o_ref, lse_ref, lens_ref, *refs, span: int, sinks: bool):
    """One query head of one row: its partials, each weighed with its share of the whole sum."""
    out_ref = refs[-1]
    head, s = pl.program_id(0), pl.program_id(1)
    lane_D = jnp.arange(o_ref.shape[4], dtype=jnp.int32)
    splits = jax.lax.div(lens_ref[s] + span - 1, span)

    def step(i, carry):
        out_D, peak, total = carry
        at_C = i * COMBINED + jnp.arange(COMBINED, dtype=jnp.int32)
        own_C = at_C < splits
        lse_C = plgpu.load(lse_ref.at[s, 0, head, at_C], mask=own_C, other=MASKED)
        o_CxD = plgpu.load(o_ref.at[s, 0, head, at_C[:, None], lane_D[None]], mask=own_C[:, None], other=0.0)
        new_peak = jnp.maximum(peak, lse_C.max())
        kept, weights_C = jnp.exp2(peak - new_peak), jnp.exp2(lse_C - new_peak)
        return out_D * kept + (o_CxD * weights_C[:, None]).sum(0), new_peak, total * kept + weights_C.sum()

    carry = jnp.zeros(lane_D.shape, jnp.float32), jnp.float32(MASKED), jnp.float32(0)
    if sinks:  # it has the whole of its weight, and no value
        carry = carry[0], refs[0][head], jnp.float32(1)
    out_D, _, total = jax.lax.fori_loop(0, jax.lax.div(splits + COMBINED - 1, COMBINED), step, carry)
    out_ref[s, 0, head, :] = (out_D / jnp.where(total > 0, total, 1)).astype(out_ref.dtype)
