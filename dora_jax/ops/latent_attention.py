"""Multi-head latent attention (MLA) in its absorbed form, straight from the latent pages of a KV pool.

A position leaves one row in the cache: its normed latent, then its rotated key part, then zeros up to `kv_pages.lanes`.
All heads share the row: the whole of it is their key, its first `rank` numbers are their value. Queries come absorbed,
that is, multiplied with the key's up-projection; the output is the weighted latent, which the value's up-projection
turns into a head's output. models/ holds both projections.

`latent_attention` is the Pallas kernel for TPUs, `latent_reference` the same in plain XLA, which gathers the pages.
The kernels that jax and tokamax ship serve another cache: ragged paged attention wants K and V side by side, which
doubles the bytes; tokamax.masked_dense_mla takes float8 rows of 512 + 128 numbers on TPU 7 only.
Laws: a row's result depends on its own length and pages only, bit for bit: blocks lie at fixed positions. Nothing
beyond a row's length counts, and no page beyond it is read.

The pages of a KV pool as the kernels read them: how wide a head is there, and which shapes belong together.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # the TPU's kernels take head sizes that are a multiple of it


def lanes(impl: str, head_dim: int) -> int:
    """The width of a head in pages that the kernel reads."""
    return pl.next_power_of_2(max(16, head_dim)) if impl == "gpu" else -(-head_dim // LANES) * LANES


def check_pages(q_SxLxHxD, pages, kv_lens_S, tables_SxM, rank: int | None = None) -> None:
    """Raises ValueError where queries, pages, lengths and tables do not belong together. pages: [N, P, C, D], K and V
    heads side by side, or, with the rank of their latents, [N, P, D]."""
    (s, _, heads, d), (*kv, row) = q_SxLxHxD.shape, pages.shape[2:]
    if rank is None and (kv[0] % 2 or d != row or heads % (kv[0] // 2)):
        raise ValueError(f"queries of {heads} heads of {d} do not fit pages of {kv[0]} K and V heads of {row}")
    if rank is not None and (d != row or not 0 < rank <= row):
        raise ValueError(f"absorbed queries of {d} numbers and latents of {rank} do not fit rows of {row}")
    if kv_lens_S.shape != (s,) or tables_SxM.shape[0] != s:
        raise ValueError(f"{s} sequences have lengths {kv_lens_S.shape} and tables {tables_SxM.shape}")


BLOCK_TOKENS = 512  # positions that one step of the loop loads: 640 KiB of rows of 640 numbers in bf16
MAX_ROWS = 512  # queries x heads of one program: f32[512, 512] scores and outputs take 1 MiB each
MASKED = -1e30  # finite, so that a row with nothing but masked scores makes no nan
SUBLANE_BYTES = 32  # a TPU's tile is 8 sublanes of 4 bytes; narrower types stand packed in them


def latent_reference(
    q_SxLxHxC: jax.Array, pages_NxPxC: jax.Array, kv_lens_S: jax.Array, tables_SxM: jax.Array, scale: float, rank: int
) -> jax.Array:
    """o[S, L, H, rank]: what `latent_attention` computes, by gathering every sequence's pages."""
    check_pages(q_SxLxHxC, pages_NxPxC, kv_lens_S, tables_SxM, rank)
    s, length, _, c = q_SxLxHxC.shape
    rows_SxTxC = pages_NxPxC[tables_SxM].reshape(s, -1, c).astype(q_SxLxHxC.dtype)
    at_T = jnp.arange(rows_SxTxC.shape[1])
    rows_SxTxC = jnp.where((at_T[None] < kv_lens_S[:, None])[..., None], rows_SxTxC, 0)
    scores = jnp.einsum("slhc,stc->shlt", q_SxLxHxC, rows_SxTxC, preferred_element_type=jnp.float32) * scale
    last_SxL = (kv_lens_S - length)[:, None] + jnp.arange(length)[None]
    seen_SxLxT = at_T[None, None] <= last_SxL[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen_SxLxT[:, None], scores, MASKED), axis=-1).astype(rows_SxTxC.dtype)
    return jnp.einsum("shlt,str->slhr", weights, rows_SxTxC[..., :rank])


def latent_attention(
    q_SxLxHxC: jax.Array, pages_NxPxC: jax.Array, kv_lens_S: jax.Array, tables_SxM: jax.Array, scale: float, rank: int
) -> jax.Array:
    """o[S, L, H, rank]: the L absorbed queries of a sequence are its last L positions, kv_lens >= L counts them too.

    tables_SxM says which pages hold a sequence; each query sees itself and what is before it. Rows of a page must be
    finite. Raises ValueError where the shapes do not belong together, or a page is no whole number of TPU tiles.
    """
    check_pages(q_SxLxHxC, pages_NxPxC, kv_lens_S, tables_SxM, rank)
    s, length, heads, c = q_SxLxHxC.shape
    page_size, sublanes = pages_NxPxC.shape[1], SUBLANE_BYTES // pages_NxPxC.dtype.itemsize
    if page_size % sublanes:
        raise ValueError(
            f"rollout.page_size {page_size} is no multiple of {sublanes}, which the TPU kernel for latent pages needs "
            f"in {pages_NxPxC.dtype.name}"
        )
    queries = max(n for n in range(1, length + 1) if length % n == 0 and (n == 1 or n * heads <= MAX_ROWS))
    rows, width = queries * heads, -(-rank // LANES) * LANES
    block_pages = min(max(1, BLOCK_TOKENS // page_size), tables_SxM.shape[1])
    kernel = functools.partial(_attend, scale=scale, length=length, heads=heads)
    o_SxRxW = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((s, length * heads, width), q_SxLxHxC.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(s, length // queries),
            in_specs=[pl.BlockSpec((1, rows, c), lambda s, j, *_: (s, j, 0)), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, rows, width), lambda s, j, *_: (s, j, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, block_pages, page_size, c), pages_NxPxC.dtype),
                pltpu.VMEM((rows, width), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        name="latent_attention",
    )(kv_lens_S, tables_SxM, q_SxLxHxC.reshape(s, length * heads, c), pages_NxPxC)
    return o_SxRxW.reshape(s, length, heads, width)[..., :rank]


def _attend(
    lens_ref, tables_ref, q_ref, pages_ref, o_ref, loaded_ref, sum_ref, arrived, turn_ref, *, scale, length, heads
):
    """One sequence's block of queries, R = queries x heads of them, against the blocks of positions that they see.

    Refs: lens [S] and tables [S, M] in scalar memory, q [1, R, C], pages [N, P, C] in HBM, o [1, R, W]; loaded
    [2, pages, P, C], one half of which is computed with while the next block arrives in the other, across programs too.
    """
    (_, block_pages, page_size, c), rows = loaded_ref.shape, q_ref.shape[1]
    block, queries = block_pages * page_size, rows // heads
    here = pl.program_id(0), pl.program_id(1)
    last = pl.num_programs(1) - 1

    def positions(s, j):
        """How many positions the last query of the block sees."""
        return lens_ref[s] - length + (j + 1) * queries

    def transfer(s, j, b, half, act):
        def page(i, _):
            copy = pltpu.make_async_copy(
                pages_ref.at[tables_ref[s, b * block_pages + i]], loaded_ref.at[half, i], arrived.at[half]
            )
            act(copy)

        pages = pl.cdiv(positions(s, j), page_size) - b * block_pages
        jax.lax.fori_loop(0, jnp.clip(pages, 0, block_pages), page, None)

    @pl.when((here[0] == 0) & (here[1] == 0))
    def begin():
        loaded_ref[...] = jnp.zeros_like(loaded_ref)  # what no page overwrites is multiplied with zero
        turn_ref[0] = 0
        transfer(0, 0, 0, 0, lambda copy: copy.start())

    sum_ref[...] = jnp.zeros_like(sum_ref)
    blocks, first_turn = pl.cdiv(positions(*here), block), turn_ref[0]
    row_Rx1 = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    at_1xT = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)

    def step(b, carry):
        half = (first_turn + b) % 2
        more = b + 1 < blocks
        wraps = here[1] == last
        after = jnp.where(wraps, here[0] + 1, here[0]), jnp.where(wraps, 0, here[1] + 1)

        @pl.when(more)
        def load_next_block():
            transfer(*here, b + 1, 1 - half, lambda copy: copy.start())

        @pl.when(~more & (after[0] < pl.num_programs(0)))
        def load_first_block_of_next_program():
            transfer(*after, 0, 1 - half, lambda copy: copy.start())

        transfer(*here, b, half, lambda copy: copy.wait())
        # query r // heads of the block sees position p where p <= its own; multiplied with heads, no division is needed
        ahead_1xT = b * block + at_1xT - (positions(*here) - queries)
        kv_TxC = loaded_ref[half].reshape(block, c).astype(q_ref.dtype)
        # The running maximum and total of the softmax, and its weighted sum in `sum_ref`, with one block more
        peak_Rx1, total_Rx1 = carry
        scores_RxT = jnp.where(ahead_1xT * heads <= row_Rx1, dot(q_ref[0], kv_TxC, 1) * scale, MASKED)
        new_peak_Rx1 = jnp.maximum(peak_Rx1, scores_RxT.max(-1, keepdims=True))
        kept_Rx1, weights_RxT = jnp.exp(peak_Rx1 - new_peak_Rx1), jnp.exp(scores_RxT - new_peak_Rx1)
        values_TxW = kv_TxC[:, : sum_ref.shape[1]]
        sum_ref[...] = sum_ref[...] * kept_Rx1 + dot(weights_RxT.astype(kv_TxC.dtype), values_TxW, 0)
        return new_peak_Rx1, total_Rx1 * kept_Rx1 + weights_RxT.sum(-1, keepdims=True)

    nothing = jnp.full((rows, 1), MASKED, jnp.float32), jnp.zeros((rows, 1), jnp.float32)
    _, total_Rx1 = jax.lax.fori_loop(0, blocks, step, nothing)
    turn_ref[0] = (first_turn + blocks) % 2
    o_ref[0] = (sum_ref[...] / total_Rx1).astype(o_ref.dtype)


def dot(a, b, axis: int) -> jax.Array:
    """f32: a @ b over this axis of b; products of f32 in full precision, where a GPU's default rounds to 10 bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
