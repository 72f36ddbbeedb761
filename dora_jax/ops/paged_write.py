"""The new KV of a decode step written into its pages, by Pallas kernels for TPUs.

XLA writes such rows by a scatter, whose updates it does one after the other, with operations beside it that sort out
their places. `write` starts a copy for each row before it waits for any. `turn_and_write` also makes the rows: it norms
and rotates the heads of a layer's queries and keys, puts the keys and values side by side, and writes them.
`scattered` and models.attention.HeadTurn are the same in plain XLA, which other platforms take.
Laws: a row is written to its own position only; rows of two sequences that write to one page, which only the dummy page
is, write the same zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dora_jax.models.attention import HeadTurn
from dora_jax.ops.latent_attention import SUBLANE_BYTES
from dora_jax.types import KV_WRITERS

WRITE, TURN_AND_WRITE = KV_WRITERS
HBM = pl.BlockSpec(memory_space=pl.ANY)  # where what a kernel copies itself lies
BLOCK_ROWS = 16  # sequences that one program of a kernel takes: their heads stay in a core's registers and memory


class Where(NamedTuple):
    """Where the sequences of a call stand in the pages of any layer, and where those of this one begin."""

    lens_S: jax.Array  # how many positions there are, the new ones too
    tables_SxM: jax.Array  # which pages hold them
    page_SxL: jax.Array  # of each new position: its page,
    at_SxL: jax.Array  # and its place there
    first: jax.Array  # i32[]: the layer's first page


def where_of(positions_SxL: jax.Array, tables_SxM: jax.Array, page_size: int) -> Where:
    """The place of new positions, which end their sequences, in a pool whose layer begins at page 0."""
    page_SxL = jnp.take_along_axis(tables_SxM, positions_SxL // page_size, axis=1)
    return Where(positions_SxL[:, -1] + 1, tables_SxM, page_SxL, positions_SxL % page_size, jnp.int32(0))


def scattered(pages: jax.Array, new: jax.Array, where: Where) -> jax.Array:
    """The pages [N, P, ...] with the rows [S, L, ...] of new positions, in the pages' type."""
    return pages.at[where.first + where.page_SxL, where.at_SxL].set(new)


def written(pages: jax.Array, new: jax.Array, where: Where) -> jax.Array:
    """`scattered`; of one new position a sequence by `write`, where it is compiled for a TPU. Not so latents of 8 bits:
    what else writes them are scatters, for which XLA lays the pool out otherwise, and turns all of it round."""
    if new.shape[1] > 1 or (pages.ndim == 3 and pages.dtype.itemsize == 1):
        return scattered(pages, new, where)
    return jax.lax.platform_dependent(pages, new, where, tpu=write, default=scattered)


def write(pages: jax.Array, new: jax.Array, where: Where) -> jax.Array:
    """What `scattered` does, of one position a sequence. Latent rows [D] share a tile with their neighbours, which is
    therefore read, changed and written."""
    new, rows, taken, scratch, latent = new[:, 0], len(new), HBM, [], pages.ndim == 3
    if latent:
        rows = _block(rows)
        tile = math.gcd(SUBLANE_BYTES // pages.dtype.itemsize, pages.shape[1])
        taken, scratch = _taken(rows, new), [pltpu.VMEM((rows, tile, pages.shape[2]), pages.dtype)]
    return pl.pallas_call(
        _write_tiles if latent else _write_rows,
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(new) // rows,),
            in_specs=[taken, HBM],
            out_specs=HBM,
            scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={4: 0},
        name=WRITE,
    )(*_scalars(where), new, pages)


def _write_rows(page_ref, at_ref, first_ref, new_ref, _, pages_ref, done):
    """Refs: page and at [S] and first [1] in scalar memory, rows [S, C, D] and pages [N, P, C, D] in HBM."""

    def copy(t):
        there = pages_ref.at[first_ref[0] + page_ref[t], at_ref[t]]
        return pltpu.make_async_copy(new_ref.at[t], there, done)

    _each("start", copy, 0, new_ref.shape[0])
    _each("wait", copy, 0, new_ref.shape[0])


def _write_tiles(page_ref, at_ref, first_ref, new_ref, _, pages_ref, tiles_ref, done):
    """A block of R sequences. Refs: page and at [S] and first [1] in scalar memory, rows [R, D] and the tiles around
    them [R, T, D] in the core's, pages [N, P, D] in HBM."""
    rows, tile, _ = tiles_ref.shape
    begin = pl.program_id(0) * rows

    def inside(t):
        return jax.lax.rem(at_ref[begin + t], tile)  # the lowering of `%` asks which TPU is here

    def copy(t, back: bool):
        at = pl.multiple_of(at_ref[begin + t] - inside(t), tile)
        there = pages_ref.at[first_ref[0] + page_ref[begin + t], pl.ds(at, tile)]
        ends = (tiles_ref.at[t], there) if back else (there, tiles_ref.at[t])
        return pltpu.make_async_copy(*ends, done)

    for act in ("start", "wait"):
        _each(act, functools.partial(copy, back=False), 0, rows)
    line_Tx1 = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    for t in range(rows):  # by numbers that are known: a row of a packed type is not taken by one that is computed
        own_Tx1 = line_Tx1 == inside(t)
        new_1xD, old_TxD = new_ref[t : t + 1].astype(jnp.float32), tiles_ref[t].astype(jnp.float32)
        tiles_ref[t] = jnp.where(own_Tx1, new_1xD, old_TxD).astype(tiles_ref.dtype)
    for act in ("start", "wait"):
        _each(act, functools.partial(copy, back=True), 0, rows)


# -------------------------------------------------------- from a layer's products


def turn_and_write(q_Sx1xHD, k_Sx1xKD, v_Sx1xKD, turn: HeadTurn, pages, where: Where, real_Sx1, *, narrow) -> tuple:
    """(q [S, 1, H, D], the pages [N, P, 2K, D] with one new position a sequence): queries and keys turned, keys and
    values side by side, zeros where a number is not finite or a sequence not real; narrow: to the pages' type."""
    (s, _, width), (_, _, heads, d) = q_Sx1xHD.shape, pages.shape
    rows, o_SxHxD = _block(s), jax.ShapeDtypeStruct((s, width // d, d), q_Sx1xHD.dtype)
    each = [*(x[:, 0] for x in (q_Sx1xHD, k_Sx1xKD, v_Sx1xKD)), *(x.reshape(s, d) for x in turn.angles)]
    gains = [x.reshape(1, d) for x in turn.gains]
    q_SxHxD, pages = pl.pallas_call(
        functools.partial(_turn_and_write, angles=len(turn.angles), eps=turn.eps, offset=turn.offset, narrow=narrow),
        out_shape=(o_SxHxD, jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(s // rows,),
            in_specs=[*(_taken(rows, x) for x in each), *(_taken(1, x, moves=False) for x in gains), HBM],
            out_specs=(_taken(rows, o_SxHxD), HBM),
            scratch_shapes=[pltpu.VMEM((s + 1, heads, d), pages.dtype), pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={4 + len(each) + len(gains): 1},
        name=TURN_AND_WRITE,
    )(*_scalars(where), real_Sx1[:, 0].astype(jnp.int32), *each, *gains, pages)
    return q_SxHxD[:, None], pages


def _turn_and_write(
    page_ref, at_ref, first_ref, real_ref, q_ref, k_ref, v_ref, *refs, angles: int, eps: float, offset: float, narrow
):
    """A block of R sequences. Refs: page, at and real [S] and first [1] in scalar memory, q [R, HD], k and v [R, KD],
    angles [R, D], gains [1, D], the pages [N, P, 2K, D] in HBM; o [R, H, D]; all rows [S + 1, 2K, D], whose last one is
    zeros."""
    *given, _, o_ref, pages_ref, rows_ref, done = refs
    i, sequences, (rows, _, d) = pl.program_id(0), rows_ref.shape[0] - 1, o_ref.shape
    gains = given[angles:]

    def heads(ref, gain: int) -> list[jax.Array]:
        """f32[R, D] of each head of queries or keys."""
        each = []
        for at in range(0, ref.shape[1], d):
            x = ref[:, at : at + d].astype(jnp.float32)
            if gains:
                x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
                x = (x * (gains[gain][...] + offset)).astype(ref.dtype).astype(jnp.float32)
            if angles:
                cos_ref, sin_ref = given[:angles]
                x = x * cos_ref[...] + pltpu.roll(x, d // 2, 1) * sin_ref[...]
                x = x.astype(ref.dtype).astype(jnp.float32)
            each.append(x)
        return each

    o_ref[...] = jnp.stack(heads(q_ref, 0), axis=1).astype(o_ref.dtype)
    keys = heads(k_ref, 1)
    values = [v_ref[:, at : at + d].astype(jnp.float32) for at in range(0, v_ref.shape[1], d)]
    kv_RxCxD = jnp.stack([x for pair in zip(keys, values, strict=True) for x in pair], axis=1)
    kv_RxCxD = jnp.where(jnp.isfinite(kv_RxCxD), kv_RxCxD, 0)
    rows_ref[pl.ds(pl.multiple_of(i * rows, rows), rows)] = narrow(kv_RxCxD)

    @pl.when(i == 0)
    def begin():
        rows_ref[sequences] = jnp.zeros(rows_ref.shape[1:], rows_ref.dtype)

    def copy(t):
        there = pages_ref.at[first_ref[0] + page_ref[t], at_ref[t]]
        return pltpu.make_async_copy(rows_ref.at[jnp.where(real_ref[t] > 0, t, sequences)], there, done)

    _each("start", copy, i * rows, rows)

    @pl.when(i == pl.num_programs(0) - 1)
    def end():
        _each("wait", copy, 0, sequences)


# ---------------------------------------------------------------- private


def _block(sequences: int) -> int:
    """How many of them a program takes: whole tiles, or all."""
    return next((n for n in (BLOCK_ROWS, BLOCK_ROWS // 2) if sequences % n == 0), sequences)


def _taken(rows: int, x: jax.Array | jax.ShapeDtypeStruct, moves: bool = True) -> pl.BlockSpec:
    """So many rows of x for each program, the next ones for the next if it `moves`."""

    def which(i, *_):
        return (i if moves else 0, *(0 for _ in x.shape[1:]))

    return pl.BlockSpec((rows, *x.shape[1:]), which)


def _scalars(where: Where) -> tuple[jax.Array, jax.Array, jax.Array]:
    return where.page_SxL[:, 0], where.at_SxL[:, 0], where.first.reshape(1)


def _each(act: str, copy: Callable, begin, count: int) -> None:
    """Start or wait for these copies."""

    def one(t, _):
        getattr(copy(t), act)()

    jax.lax.fori_loop(begin, begin + count, one, None)
