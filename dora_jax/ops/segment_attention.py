"""Causal attention inside the segments of packed rows, forward and backward: what the trainer attends with.

Consumes the rows' segment ids and positions, and the ids of shared prompts where there are any; produces an `attend`
function for models/decoder.py. By `trainer.attention`:
  reference  products that XLA compiles anywhere, their scores in memory block by block
  splash     the flash attention kernel that jax ships for TPUs: scores stay on the chip, masked blocks are left out
  cudnn      cuDNN's flash attention, through jax; the segments' mask is dense, one number for two tokens of a row
Law: inside a segment the three give the same values and gradients; what a padding token gets is nobody's input.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.base.chips import LANES, block_of, splash_blocks
from dora_jax.models import linear_attention
from dora_jax.models.attention import KEPT
from dora_jax.models.decoder import Attend, Scores
from dora_jax.models.sharding import spec

MIN_QUERY_BLOCK = 128  # smaller blocks skip more of the scores, but cost compile time
MAX_QUERY_BLOCKS = 8  # the blocks are unrolled: long rows take larger ones
LONG_ROW = 8192  # keys; from here on only one block's scores exist at a time, backwards too: they grow with the square
LONG_BLOCK = 512  # queries of such a block, at most
SPLASH_COMPUTE = 512  # keys of one product of a block: f32[1024, 512] scores take 2 MiB
SPLASH_FUSED = 8192  # keys; up to here one backward kernel makes all gradients, writing dq once a block of keys


def packed_attention(kind: str, segment_ids_BxL, positions_BxL, mesh: Mesh, prefix_ids_BxL=None) -> Attend:
    """Attention of packed rows on this mesh, by `trainer.attention`; objective.attention_problems says where it runs.

    prefix_ids_BxL: the segment that a token's own segment continues, which it sees too; its own where there is none.
    """
    where = (segment_ids_BxL, positions_BxL) + (() if prefix_ids_BxL is None else (prefix_ids_BxL,))
    if kind == "splash":
        if prefix_ids_BxL is not None:
            raise ValueError("trainer.attention=splash cannot share prompts: its kernel compares segment ids alone")
        return _or_recurrent(splash_attention(segment_ids_BxL, positions_BxL, mesh), segment_ids_BxL)
    if kind == "cudnn":
        return _or_recurrent(cudnn_attention(*where, mesh=mesh), segment_ids_BxL)
    if kind != "reference":
        raise ValueError(f"trainer.attention={kind!r} is unknown: known are reference, splash, cudnn")
    return context_attention(*where, mesh=mesh) if mesh.shape["context"] > 1 else segment_attention(*where)


def splash_attention(segment_ids_BxL, positions_BxL, mesh: Mesh, *, interpret: bool = False) -> Attend:
    """The TPU's kernel, one shard of rows, positions and heads at a time; queries of a KV head share its keys.

    Over `context` keys and values are gathered, and each shard's queries see those up to their own place in the row: a
    later shard computes more. Positions only count through their order, which is that of the row. `interpret` runs the
    kernel as XLA operations on any platform, for tests.
    """
    del positions_BxL
    context = mesh.shape["context"]

    def local(scale, kernel, segment_ids_BxC, q_BxCxHxD, k_BxCxKxD, v_BxCxKxD, *sinks_H):
        def whole(x):
            return x if context == 1 else jax.lax.all_gather(x, "context", axis=1, tiled=True)

        # the kernel does not scale: queries come scaled, and are rounded once more
        scaled = (q_BxCxHxD.astype(jnp.float32) * scale).astype(q_BxCxHxD.dtype)
        q_BxKxGxCxD = _grouped(scaled, k_BxCxKxD.shape[2])
        k_BxKxLxD, v_BxKxLxD = (jnp.einsum("blkd->bkld", whole(x)) for x in (k_BxCxKxD, v_BxCxKxD))
        of_heads = [x.reshape(k_BxKxLxD.shape[1], -1) for x in sinks_H]

        def one_row(queries, keys, q_KxGxCxD, k_KxLxD, v_KxLxD):
            segments = splash.SegmentIds(queries, keys)
            one_head = lambda q, k, v, *sinks: kernel(q, k, v, segments, *sinks)
            return jax.vmap(one_head)(q_KxGxCxD, k_KxLxD, v_KxLxD, *of_heads)

        o_BxKxGxCxD = jax.vmap(one_row)(segment_ids_BxC, whole(segment_ids_BxC), q_BxKxGxCxD, k_BxKxLxD, v_BxKxLxD)
        return jnp.einsum("bkgld->blkgd", o_BxKxGxCxD).reshape(q_BxCxHxD.shape)

    def attend(layer, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, scores: Scores, *sinks_H):
        length, group = q_BxLxHxD.shape[1], q_BxLxHxD.shape[2] // k_BxLxKxD.shape[2]
        kernel = splash_kernel(group, length, context, interpret, q_BxLxHxD.shape[3], scores.window)
        shards = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "context")))
        rows, heads = spec("batch", "sequence"), spec("batch", "sequence", "heads")
        keys = spec("batch", "sequence", "kv_heads")
        scaled = functools.partial(local, scores.scale)
        specs = shards, rows, heads, keys, keys, *[spec("heads")] * len(sinks_H)
        # the kernel's outputs do not say over which axes they vary
        run = jax.shard_map(scaled, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
        return run(kernel, segment_ids_BxL, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *sinks_H)

    return attend


@functools.cache
def splash_kernel(
    group: int, length: int, context: int, interpret: bool, width: int = LANES, window: int = 0
) -> splash.SplashAttentionKernel:
    """`group` query heads of `width` numbers on one KV head; its tables of blocks are numpy arrays, so that no trace
    owns them. Blocks of wider heads are shorter: they have to fit the chip's vector memory."""
    queries, keys = splash_blocks(length // context, length, width)
    compute = block_of(keys, SPLASH_COMPUTE)
    backward: dict[str, Any] = {"block_q_dkv": queries, "block_kv_dkv": keys, "block_kv_dkv_compute": compute}
    if length > SPLASH_FUSED:
        backward |= {"block_q_dq": queries, "block_kv_dq": keys}
    else:
        backward |= {"use_fused_bwd_kernel": True}
    sizes = splash.BlockSizes(block_q=queries, block_kv=keys, block_kv_compute=compute, **backward)
    square = length, length
    one = splash_mask.LocalMask(square, (window - 1, 0), 0) if window else splash_mask.CausalMask(square)
    mask = splash_mask.MultiHeadMask([one] * group)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mqa(
            mask,
            head_shards=1,
            q_seq_shards=context,
            block_sizes=sizes,
            residual_checkpoint_name=KEPT,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _grouped(q_BxLxHxD, n_kv: int):
    """[B, K, G, L, D]: queries by KV head."""
    b, length, heads, d = q_BxLxHxD.shape
    return jnp.einsum("blkgd->bkgld", q_BxLxHxD.reshape(b, length, n_kv, heads // n_kv, d))


def cudnn_attention(segment_ids_BxL, positions_BxL, *prefix_ids, mesh: Mesh) -> Attend:
    """cuDNN's kernel, one shard of rows and heads at a time; bfloat16 or float16, positions whole.

    Segments reach it as a dense mask, which it reads as a bias of 2 bytes for two tokens of a row, and whose gradient
    it writes.
    """

    def local(scores: Scores, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *where):
        same_Bx1xLxL = _may_see(where, where, scores.window)[:, None]
        o_BxLxHxD = jax.nn.dot_product_attention(
            q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, mask=same_Bx1xLxL, is_causal=True, scale=scores.scale,
            implementation="cudnn",
        )  # fmt: skip
        return jax.ad_checkpoint.checkpoint_name(o_BxLxHxD, KEPT)

    where = (segment_ids_BxL, positions_BxL, *prefix_ids)
    rows, heads, keys = spec("batch"), spec("batch", None, "heads"), spec("batch", None, "kv_heads")

    def attend(layer, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, scores: Scores):
        run = jax.shard_map(
            functools.partial(local, scores),
            mesh=mesh,
            in_specs=(heads, keys, keys, *[rows] * len(where)),
            out_specs=heads,
            check_vma=False,
        )
        return run(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *where)

    return attend


def segment_attention(segment_ids_BxL, positions_BxL, *prefix_ids) -> Attend:
    """Causal attention inside each segment of a packed row, and on the segment that it continues, if any, whose id
    `prefix_ids` gives; tokens that see each other stand in the order of their positions.

    Every token sees itself, so padding makes no NaN. Queries go block by block against the keys up to the block's end,
    which leaves out up to half of the score matrix and keeps a block's scores nearer to the cache.
    """
    where_BxL = (segment_ids_BxL, positions_BxL, *prefix_ids)

    def attend(layer, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, scores: Scores, sinks_H=None):
        heads = scores, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, sinks_H
        return _attend_blocks(*heads, where_BxL, where_BxL, triangular=True)

    return _or_recurrent(attend, segment_ids_BxL)


def _or_recurrent(attend: Attend, segment_ids_BxL) -> Attend:
    """The same, and in layers of linear attention a recurrence inside each segment."""

    def run(layer, q, k, v, scores, *sinks):
        if isinstance(scores, linear_attention.Recurrence):
            return linear_attention.packed(scores, q, k, segment_ids_BxL)
        return attend(layer, q, k, v, scores, *sinks)

    return run


def context_attention(segment_ids_BxL, positions_BxL, *prefix_ids, mesh: Mesh) -> Attend:
    """`segment_attention` where positions are sharded over the mesh's `context`: each shard's queries against all keys.

    Keys and values are gathered, in the backward pass their gradients scattered. Every shard computes the whole width,
    so that none waits for another; the half that `segment_attention` leaves out is the price.
    """

    def local(scores: Scores, q_BxCxHxD, k_BxCxKxD, v_BxCxKxD, sinks_H, *mine):
        def whole(x):
            return jax.lax.all_gather(x, "context", axis=1, tiled=True)

        if sinks_H is not None:  # its gradient is a sum over the axes on which it is whole
            sinks_H = jax.lax.pcast(sinks_H, tuple(x for x in mesh.axis_names if x not in spec("heads")), to="varying")
        heads = scores, q_BxCxHxD, whole(k_BxCxKxD), whole(v_BxCxKxD), sinks_H
        return _attend_blocks(*heads, mine, tuple(map(whole, mine)), triangular=False)

    rows, (heads, keys) = spec("batch", "sequence"), (spec("batch", "sequence", x) for x in ("heads", "kv_heads"))
    where = (segment_ids_BxL, positions_BxL, *prefix_ids)
    specs = dict(in_specs=(heads, keys, keys, spec("heads"), *[rows] * len(where)), out_specs=heads)

    def attend(layer, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, scores: Scores, sinks_H=None):
        sharded = jax.shard_map(functools.partial(local, scores), mesh=mesh, **specs)
        return sharded(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, sinks_H, *where)

    return attend


def _may_see(q_where, k_where, window: int):
    """bool[B, L, M]: whether a query looks at a key, by (segment ids, positions) and ids of shared prompts, if any."""
    same = q_where[0][:, :, None] == k_where[0][:, None, :]
    if len(q_where) > 2:
        same |= q_where[2][:, :, None] == k_where[0][:, None, :]
    behind = q_where[1][:, :, None] - k_where[1][:, None, :]
    return same & (behind >= 0) & (behind < window) if window else same & (behind >= 0)


def _attend_blocks(scores: Scores, q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, sinks_H, q_where, k_where, *, triangular: bool):
    """`where` of queries and of keys: see `_may_see`. triangular: no query sees a key that stands after it."""
    q_BxKxGxLxD = _grouped(q_BxLxHxD, k_BxMxKxD.shape[2])
    k_BxKxDxM, v_BxKxMxD = jnp.einsum("blkd->bkdl", k_BxMxKxD), jnp.einsum("blkd->bkld", v_BxMxKxD)
    sinks_KxG = None if sinks_H is None else sinks_H.reshape(q_BxKxGxLxD.shape[1:3])

    length = q_BxLxHxD.shape[1]
    if k_BxKxDxM.shape[-1] >= LONG_ROW:  # over blocks of queries, each computed again for the gradient
        block = next(size for size in range(min(LONG_BLOCK, length), 0, -1) if length % size == 0)

        def attend(part):
            q, *where = part
            mask_Bx1x1xCxM = _may_see(where, k_where, scores.window)[:, None, None]
            return attend_block(scores.scale, q, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xCxM, sinks_KxG)

        parts = tuple(
            jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)
            for x, axis in ((q_BxKxGxLxD, 3), *((x, 1) for x in q_where))
        )
        o_NxBxKxGxCxD = jax.lax.map(jax.checkpoint(attend), parts)
        o_BxKxGxLxD = jnp.moveaxis(o_NxBxKxGxCxD, 0, 3).reshape(q_BxKxGxLxD.shape)
    else:
        block = max(MIN_QUERY_BLOCK, -(-length // MAX_QUERY_BLOCKS))
        bounds = [(start, min(start + block, length)) for start in range(0, length, block)]
        ends = [stop if triangular else k_BxKxDxM.shape[-1] for _, stop in bounds]
        mask_Bx1x1xLxM = _may_see(q_where, k_where, scores.window)[:, None, None]
        o_BxKxGxLxD = jnp.concatenate(
            [
                attend_block(
                    scores.scale,
                    q_BxKxGxLxD[..., start:stop, :],
                    k_BxKxDxM[..., :end],
                    v_BxKxMxD[:, :, :end],
                    mask_Bx1x1xLxM[..., start:stop, :end],
                    sinks_KxG,
                )
                for (start, stop), end in zip(bounds, ends)
            ],
            axis=3,
        )
    return jnp.einsum("bkgld->blkgd", o_BxKxGxLxD).reshape(q_BxLxHxD.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_block(scale: float, q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM, sinks_KxG=None):
    """Softmax attention; the G query heads of a KV head are folded into rows, so that each is one large matmul.

    Passes over the scores are what it costs, so they are divided by their sums after the second matmul, and the
    gradient takes sum(probs * d probs) of a row as sum(o * d o) (FlashAttention, arXiv 2205.14135, appendix B.4).
    """
    return _attend_block_forward(scale, q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM, sinks_KxG)[0]


def _attend_block_forward(scale, q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM, sinks_KxG):
    scores = jnp.matmul(_folded(q_BxKxGxLxD), k_BxKxDxM, preferred_element_type=jnp.float32)
    scores = scale * scores.reshape(*q_BxKxGxLxD.shape[:4], -1)
    scores = jnp.where(mask_Bx1x1xLxM, scores, -jnp.inf)
    peak, of_sinks = jnp.max(scores, axis=-1, keepdims=True), None
    if sinks_KxG is not None:
        sinks = sinks_KxG[None, :, :, None, None]
        peak = jnp.maximum(peak, sinks)
        of_sinks = jnp.exp(sinks - peak)
    weights_BxKxGxLxM = jnp.exp(scores - peak)
    total = jnp.sum(weights_BxKxGxLxM, axis=-1, keepdims=True)
    total = total if of_sinks is None else total + of_sinks
    o = jnp.matmul(_folded(weights_BxKxGxLxM).astype(v_BxKxMxD.dtype), v_BxKxMxD, preferred_element_type=jnp.float32)
    o_BxKxGxLxD = o.reshape(q_BxKxGxLxD.shape) / total  # kept in f32: the gradient takes a difference with it
    kept = q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, o_BxKxGxLxD, weights_BxKxGxLxM, total, of_sinks
    return o_BxKxGxLxD.astype(q_BxKxGxLxD.dtype), kept


def _attend_block_backward(scale, kept, do_BxKxGxLxD):
    q, k_BxKxDxM, v_BxKxMxD, o, weights, total, of_sinks = kept
    do = (do_BxKxGxLxD / total).astype(q.dtype)  # of the weights before they are divided
    along = jnp.sum(do.astype(jnp.float32) * o, axis=-1, keepdims=True)
    do, rows = _folded(do), _folded(q)
    dv = jnp.matmul(do.swapaxes(-1, -2), _folded(weights).astype(q.dtype)).swapaxes(-1, -2)
    dweights = jnp.matmul(do, v_BxKxMxD.swapaxes(-1, -2), preferred_element_type=jnp.float32).reshape(weights.shape)
    dscores = _folded(weights * (dweights - along) * scale).astype(q.dtype)
    dq = jnp.matmul(dscores, k_BxKxDxM.swapaxes(-1, -2)).reshape(q.shape)
    dsinks = None if of_sinks is None else -jnp.sum(of_sinks * along, axis=(0, 3, 4))
    return dq, jnp.matmul(rows.swapaxes(-1, -2), dscores), dv, None, dsinks


attend_block.defvjp(_attend_block_forward, _attend_block_backward)


def _folded(x_BxKxGxLxN):
    """[B, K, G L, N]"""
    b, n_kv, g, length, n = x_BxKxGxLxN.shape
    return x_BxKxGxLxN.reshape(b, n_kv, g * length, n)
