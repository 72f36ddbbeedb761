"""Causal attention inside the segments of packed rows, forward and backward: what the trainer attends with.

Consumes the rows' segment ids and positions; produces an `attend` function for models/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dora_jax.models.decoder import Attend
from dora_jax.models.sharding import spec

MIN_QUERY_BLOCK = 128  # smaller blocks skip more of the scores, but cost compile time
MAX_QUERY_BLOCKS = 8  # the blocks are unrolled: long rows take larger ones
LONG_ROW = 8192  # keys; from here on only one block's scores exist at a time, backwards too: they grow with the square
LONG_BLOCK = 512  # queries of such a block, at most


def segment_attention(segment_ids_BxL, positions_BxL) -> Attend:
    """Causal attention inside each segment of a packed row; a segment's tokens stand in the order of their positions.

    Every token sees itself, so padding makes no NaN. Queries go block by block against the keys up to the block's end,
    which leaves out up to half of the score matrix and keeps a block's scores nearer to the cache.
    """
    where_BxL = segment_ids_BxL, positions_BxL

    def attend(layer, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD):
        return _attend_blocks(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, where_BxL, where_BxL, triangular=True)

    return attend


def context_attention(segment_ids_BxL, positions_BxL, mesh: jax.sharding.Mesh) -> Attend:
    """`segment_attention` where positions are sharded over the mesh's `context`: each shard's queries against all keys.

    Keys and values are gathered, in the backward pass their gradients scattered. Every shard computes the whole width,
    so that none waits for another; the half that `segment_attention` leaves out is the price.
    """
    def local(segment_ids_BxC, positions_BxC, q_BxCxHxD, k_BxCxKxD, v_BxCxKxD):
        def whole(x):
            return jax.lax.all_gather(x, "context", axis=1, tiled=True)

        mine = segment_ids_BxC, positions_BxC
        return _attend_blocks(q_BxCxHxD, whole(k_BxCxKxD), whole(v_BxCxKxD), mine, tuple(map(whole, mine)),
                              triangular=False)

    rows, heads = spec("batch", "sequence"), (spec("batch", "sequence", name) for name in ("heads", "kv_heads", "kv_heads"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, *heads), out_specs=spec("batch", "sequence", "heads"))
    return lambda layer, q, k, v: sharded(segment_ids_BxL, positions_BxL, q, k, v)


def _attend_blocks(q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, q_where, k_where, *, triangular: bool):
    """`where`: (segment ids, positions) of queries and of keys. triangular: no query sees a key that stands after it."""
    n_kv, d = k_BxMxKxD.shape[2:]
    q_BxKxGxLxD = jnp.einsum("blkgd->bkgld", (q_BxLxHxD * d**-0.5).reshape(*q_BxLxHxD.shape[:2], n_kv, -1, d))
    k_BxKxDxM, v_BxKxMxD = jnp.einsum("blkd->bkdl", k_BxMxKxD), jnp.einsum("blkd->bkld", v_BxMxKxD)

    def mask(q_where, k_where):
        same = q_where[0][:, :, None] == k_where[0][:, None, :]
        return (same & (q_where[1][:, :, None] >= k_where[1][:, None, :]))[:, None, None]

    if k_BxKxDxM.shape[-1] >= LONG_ROW:
        o_BxKxGxLxD = _one_by_one(lambda q, *where: _attend_block(q, k_BxKxDxM, v_BxKxMxD, mask(where, k_where)),
                                  q_BxKxGxLxD, *q_where)
    else:
        length = q_BxLxHxD.shape[1]
        block = max(MIN_QUERY_BLOCK, -(-length // MAX_QUERY_BLOCKS))
        bounds = [(start, min(start + block, length)) for start in range(0, length, block)]
        ends = [stop if triangular else k_BxKxDxM.shape[-1] for _, stop in bounds]
        mask_Bx1x1xLxM = mask(q_where, k_where)
        o_BxKxGxLxD = jnp.concatenate([
            _attend_block(q_BxKxGxLxD[..., start:stop, :], k_BxKxDxM[..., :end], v_BxKxMxD[:, :, :end],
                          mask_Bx1x1xLxM[..., start:stop, :end])
            for (start, stop), end in zip(bounds, ends)], axis=3)
    return jnp.einsum("bkgld->blkgd", o_BxKxGxLxD).reshape(q_BxLxHxD.shape)


def _one_by_one(attend_block: Callable, q_BxKxGxLxD, segment_ids_BxL, positions_BxL):
    """attend_block over blocks of queries, each computed again for the gradient."""
    length = q_BxKxGxLxD.shape[3]
    block = next(size for size in range(min(LONG_BLOCK, length), 0, -1) if length % size == 0)

    def blocks(x, axis: int):
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1:]), axis, 0)

    o_NxBxKxGxCxD = jax.lax.map(lambda part: jax.checkpoint(attend_block)(*part),
                                (blocks(q_BxKxGxLxD, 3), blocks(segment_ids_BxL, 1), blocks(positions_BxL, 1)))
    return jnp.moveaxis(o_NxBxKxGxCxD, 0, 3).reshape(q_BxKxGxLxD.shape)


@jax.custom_vjp
def _attend_block(q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM):
    """Softmax attention; the G query heads of a KV head are folded into rows, so that each is one large matmul.

    Passes over the scores are what it costs, so they are divided by their sums after the second matmul, and the
    gradient takes sum(probs * d probs) of a row as sum(o * d o) (FlashAttention, arXiv 2205.14135, appendix B.4).
    """
    return _attend_block_forward(q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM)[0]


def _attend_block_forward(q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, mask_Bx1x1xLxM):
    scores = jnp.matmul(_folded(q_BxKxGxLxD), k_BxKxDxM, preferred_element_type=jnp.float32)
    scores = scores.reshape(*q_BxKxGxLxD.shape[:4], -1)
    scores = jnp.where(mask_Bx1x1xLxM, scores, -jnp.inf)
    weights_BxKxGxLxM = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights_BxKxGxLxM, axis=-1, keepdims=True)
    o = jnp.matmul(_folded(weights_BxKxGxLxM).astype(v_BxKxMxD.dtype), v_BxKxMxD, preferred_element_type=jnp.float32)
    o_BxKxGxLxD = o.reshape(q_BxKxGxLxD.shape) / total  # kept in f32: the gradient takes a difference with it
    kept = q_BxKxGxLxD, k_BxKxDxM, v_BxKxMxD, o_BxKxGxLxD, weights_BxKxGxLxM, total
    return o_BxKxGxLxD.astype(q_BxKxGxLxD.dtype), kept


def _attend_block_backward(kept, do_BxKxGxLxD):
    q, k_BxKxDxM, v_BxKxMxD, o, weights, total = kept
    do = (do_BxKxGxLxD / total).astype(q.dtype)  # of the weights before they are divided
    along = jnp.sum(do.astype(jnp.float32) * o, axis=-1, keepdims=True)
    do, rows = _folded(do), _folded(q)
    dv = jnp.matmul(_folded(weights).astype(q.dtype).swapaxes(-1, -2), do)
    dweights = jnp.matmul(do, v_BxKxMxD.swapaxes(-1, -2), preferred_element_type=jnp.float32).reshape(weights.shape)
    dscores = _folded(weights * (dweights - along)).astype(q.dtype)
    dq = jnp.matmul(dscores, k_BxKxDxM.swapaxes(-1, -2)).reshape(q.shape)
    return dq, jnp.matmul(rows.swapaxes(-1, -2), dscores), dv, None


_attend_block.defvjp(_attend_block_forward, _attend_block_backward)


def _folded(x_BxKxGxLxN):
    """[B, K, G L, N]"""
    b, n_kv, g, length, n = x_BxKxGxLxN.shape
    return x_BxKxGxLxN.reshape(b, n_kv, g * length, n)
