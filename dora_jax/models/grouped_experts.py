"""The product of tokens with their experts in blocks of rows, by the grouped matrix product that jax ships for TPUs.

A row is one choice of one token: k rows a token, sorted by expert, so that one product takes all rows of an expert. Of
experts that are elsewhere there are no rows here. Forward 3 grouped products, backward 8: it computes the inner ones
again. XLA's own gradient of `jax.lax.ragged_dot` multiplies every expert's matrix with every row on a TPU, so the
gradients are written here, on megablox's two kernels.
Laws: no row is dropped: a loop takes block after block until there are none; memory follows the block, which holds the
rows of an even load, and time follows the load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from dora_jax.models.families.config import EXPERT_SLACK

TILE_ROWS = (512, 256, 128)  # of the kernels, the first of which an expert has four
TILE_WIDTH = 1024  # the same, of matrices; of gradients half of it one way, for they are kept in float32
EVEN_LOAD = "once_under_even_load"  # names the loop over blocks, whose count depends on the load


GATES = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}  # by cfg.activation
CLAMP, CLAMPED_GAIN = 7.0, 1.702  # of the activation "clamped"
Matrices = Sequence[jax.Array]  # gate, up, down of every expert; then the biases of gate and up, of experts with them


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What stands between the products of a feed-forward, by ModelConfig.activation."""
    if activation != "clamped":
        return GATES[activation](gate) * up
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * gate * jax.nn.sigmoid(CLAMPED_GAIN * gate)


class BlockPlan(NamedTuple):
    """Static sizes."""

    rows: int  # of a block
    blocks: int  # at most
    per_token: int
    tile: int  # rows of a tile, which divide a block
    interpret: bool
    gate: str = "silu"  # the activation


class Sorted(NamedTuple):
    """The rows of all tokens in the order of their experts, those of experts elsewhere last."""

    choice_N: jax.Array  # i32: token x k + j, padded to whole blocks
    place_N: jax.Array | None  # i32: where a choice stands; only where one block holds all
    ends_E: jax.Array  # i32: behind the last row of each expert that is here


def experts(
    h_TxD: jax.Array,
    weights_Txk: jax.Array,
    ids_Txk: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
    first: int | jax.Array = 0,
    *,
    biases: Sequence[jax.Array] = (),
    parts: int = 1,
    interpret: bool = False,
    gate: str = "silu",
) -> jax.Array:
    """[T, D]: for each token, the weighted sum of its experts among `first` and those behind it.

    biases: of gate and up. parts: devices that share out the experts. interpret: on any device, for tests. gate: the
    activation.
    """
    count = gate_ExDxF.shape[0]
    tokens, k = ids_Txk.shape
    plan = plan_of(tokens, k, count, parts, interpret)._replace(gate=gate)
    local_N = ids_Txk.reshape(-1) - first
    local_N = jnp.where((local_N >= 0) & (local_N < count), local_N, count)
    place_N, sizes_E = places_of(local_N, count + 1)
    choice_N = jnp.pad(order_of(local_N), (0, plan.blocks * plan.rows - local_N.shape[0]))
    rows_of = Sorted(choice_N, place_N if plan.blocks == 1 else None, jnp.cumsum(sizes_E[:-1]))
    y_TxD = _mixed(plan, h_TxD, weights_Txk.reshape(-1), rows_of, gate_ExDxF, up_ExDxF, down_ExFxD, *biases)
    return y_TxD.astype(h_TxD.dtype)


def plan_of(tokens: int, k: int, count: int, parts: int, interpret: bool) -> BlockPlan:
    """The plan of so many tokens whose experts are on `parts` devices, `count` of them on this one."""
    even = tokens * k if parts == 1 else int(EXPERT_SLACK * tokens * k / parts)
    tile = next((n for n in TILE_ROWS if 4 * n * count <= even), TILE_ROWS[-1])
    rows = -(-even // tile) * tile
    return BlockPlan(rows, -(-tokens * k // rows), k, tile, interpret)


def order_of(ids_N: jax.Array) -> jax.Array:
    """i32[N]: a stable argsort of small numbers, as one sort of one array: XLA compiles a sort of pairs in four times
    the time."""
    n = ids_N.shape[0]
    return jax.lax.sort(ids_N.astype(jnp.int32) * n + jnp.arange(n, dtype=jnp.int32), is_stable=False) % n


def places_of(ids_N: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """(where each of the numbers, all below `count`, stands in that order; how many there are of each)."""
    hits_NxE = ids_N[:, None] == jnp.arange(count)[None]
    sizes_E = jnp.sum(hits_NxE, axis=0, dtype=jnp.int32)
    place_NxE = jnp.cumsum(hits_NxE, axis=0, dtype=jnp.int32) - 1 + (jnp.cumsum(sizes_E) - sizes_E)[None]
    return jnp.sum(jnp.where(hits_NxE, place_NxE, 0), axis=-1), sizes_E


# ---------------------------------------------------------------- the product and its gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(plan: BlockPlan, h_TxD, weights_N, rows_of: Sorted, *matrices) -> jax.Array:
    """f32[T, D]."""

    def add(start, y_TxD):
        block = _Block(plan, rows_of, start, h_TxD.shape[0])
        y_RxD = block.grouped.forward(block.of_tokens(h_TxD), weights_N[block.choice_R], matrices)
        return block.added(y_TxD, y_RxD)

    return over_blocks(plan, rows_of.ends_E[-1], add, jnp.zeros(h_TxD.shape, jnp.float32))


def _forward(plan, *inputs):
    return _mixed(plan, *inputs), inputs


def _backward(plan: BlockPlan, inputs, dy_TxD):
    h_TxD, weights_N, rows_of, *matrices = inputs
    dy_TxD = dy_TxD.astype(h_TxD.dtype)

    def add(start, sums):
        dh_TxD, dweights_N, dmatrices = sums
        block = _Block(plan, rows_of, start, h_TxD.shape[0])
        rows = block.of_tokens(h_TxD), weights_N[block.choice_R], block.of_tokens(dy_TxD)
        dx_RxD, dweights_R, dmatrices = block.grouped.backward(*rows, matrices, dmatrices)
        return block.added(dh_TxD, dx_RxD), block.spread(dweights_N, dweights_R), dmatrices

    zeros = jnp.zeros(h_TxD.shape, jnp.float32), jnp.zeros(weights_N.shape, jnp.float32), sums_of(plan, matrices)
    dh_TxD, dweights_N, dmatrices = over_blocks(plan, rows_of.ends_E[-1], add, zeros)
    return dh_TxD.astype(h_TxD.dtype), dweights_N, None, *(d.astype(h_TxD.dtype) for d in dmatrices)


_mixed.defvjp(_forward, _backward)


class _Block:
    """The rows from `start` on: which tokens they are of, and back."""

    def __init__(self, plan: BlockPlan, rows_of: Sorted, start: int | jax.Array, tokens: int):
        self._per_token, self._place_N, self._tokens = plan.per_token, rows_of.place_N, tokens
        self.choice_R = jax.lax.dynamic_slice_in_dim(rows_of.choice_N, start, plan.rows)
        self._held = rows_of.ends_E[-1]
        self._here_R = start + jnp.arange(plan.rows) < self._held
        ends_E = jnp.clip(rows_of.ends_E - start, 0, plan.rows)
        self.grouped = Grouped(plan, jnp.diff(ends_E, prepend=0).astype(jnp.int32))

    def of_tokens(self, x_TxD: jax.Array) -> jax.Array:
        """[R, D]: each row's token."""
        return x_TxD[self.choice_R // self._per_token]

    def added(self, sum_TxD: jax.Array, x_RxD: jax.Array) -> jax.Array:
        """The sum, and each token's rows."""
        if self._place_N is None:
            token_R = jnp.where(self._here_R, self.choice_R // self._per_token, self._tokens)
            return sum_TxD.at[token_R].add(x_RxD.astype(sum_TxD.dtype), mode="drop")
        here_N = self._place_N < self._held  # a gather: a scatter would sort the rows once more
        x_NxD = jnp.where(here_N[:, None], x_RxD[jnp.where(here_N, self._place_N, 0)], 0)
        return jnp.sum(x_NxD.reshape(self._tokens, -1, x_NxD.shape[-1]).astype(sum_TxD.dtype), axis=1)

    def spread(self, sum_N: jax.Array, x_R: jax.Array) -> jax.Array:
        """A number a row to its choice."""
        if self._place_N is None:
            choice_R = jnp.where(self._here_R, self.choice_R, sum_N.shape[0])
            return sum_N.at[choice_R].set(x_R, mode="drop", unique_indices=True)
        here_N = self._place_N < self._held
        return jnp.where(here_N, x_R[jnp.where(here_N, self._place_N, 0)], 0.0)


# ---------------------------------------------------------------- one block, however its rows came here


def over_blocks(plan: BlockPlan, rows: jax.Array, body: Callable[[Any, Any], Any], sums: Any) -> Any:
    """body(first row, sums) -> sums, for every block that has any of so many rows."""
    if plan.blocks == 1:
        return body(0, sums)
    with jax.named_scope(EVEN_LOAD):
        return jax.lax.while_loop(
            lambda carry: carry[0] < rows, lambda carry: (carry[0] + plan.rows, body(*carry)), (jnp.int32(0), sums)
        )[1]


def sums_of(plan: BlockPlan, matrices: Matrices) -> Matrices:
    """Where the gradients of all blocks add up; one block adds nothing up."""
    return tuple(jnp.zeros(w.shape, jnp.float32 if plan.blocks > 1 else w.dtype) for w in matrices)


class Grouped:
    """Rows that lie by expert, so many of each."""

    def __init__(self, plan: BlockPlan, sizes_E: jax.Array):
        self._plan, self._sizes_E = plan, sizes_E

    def forward(self, x_RxD: jax.Array, weights_R: jax.Array, matrices: Matrices) -> jax.Array:
        """Each row's part of the result; undefined behind the last row."""
        inner_RxF = gated(self._plan.gate, *self._inner(x_RxD, matrices))
        return self._product((weights_R[:, None] * inner_RxF).astype(inner_RxF.dtype), matrices[2])

    def backward(
        self, x_RxD: jax.Array, weights_R: jax.Array, dy_RxD: jax.Array, matrices: Matrices, sums: Matrices
    ) -> tuple[jax.Array, jax.Array, Matrices]:
        """(gradients of the rows, of their weights, the sums with those of the matrices) for that of `forward`."""
        gate_ExDxF, up_ExDxF, down_ExFxD = matrices[:3]
        inner_RxF, back = jax.vjp(functools.partial(gated, self._plan.gate), *self._inner(x_RxD, matrices))
        dinner_RxF = self._product(dy_RxD, down_ExFxD, transposed=True).astype(jnp.float32)
        dweights_R = jnp.sum(inner_RxF.astype(jnp.float32) * dinner_RxF, axis=-1)
        dgate_RxF, dup_RxF = back((weights_R[:, None] * dinner_RxF).astype(inner_RxF.dtype))
        dx_RxD = self._product(dgate_RxF, gate_ExDxF, transposed=True).astype(jnp.float32)
        dx_RxD = dx_RxD + self._product(dup_RxF, up_ExDxF, transposed=True).astype(jnp.float32)
        weighted_RxF = (weights_R[:, None] * inner_RxF).astype(inner_RxF.dtype)
        pairs = (x_RxD, dgate_RxF), (x_RxD, dup_RxF), (weighted_RxF, dy_RxD)
        of_biases = []
        for sum_of, d_RxF in zip(sums[3:], (dgate_RxF, dup_RxF)):  # sums of each expert's rows
            of_expert_RxE = self._of_expert_RxE
            d_RxF = jnp.where(of_expert_RxE.any(1, keepdims=True), d_RxF, 0)  # behind the last row it is undefined
            rows = of_expert_RxE.astype(d_RxF.dtype)
            of_biases += [sum_of + jnp.einsum("re,rf->ef", rows, d_RxF, preferred_element_type=sum_of.dtype)]
        sums = tuple(  # and of each expert's rows x^T dy
            tgmm(
                x.T,
                dy,
                self._sizes_E,
                preferred_element_type=sum_of.dtype,
                tiling=(self._plan.tile, min(x.shape[1], TILE_WIDTH), min(dy.shape[1], TILE_WIDTH // 2)),
                existing_out=sum_of if self._plan.blocks > 1 else None,
                interpret=self._plan.interpret,
            )
            for (x, dy), sum_of in zip(pairs, sums[:3], strict=True)
        )
        return dx_RxD.astype(x_RxD.dtype), dweights_R, (*sums, *of_biases)

    @property
    def _of_expert_RxE(self) -> jax.Array:
        """Whether a row is of an expert."""
        ends_E, row_Rx1 = jnp.cumsum(self._sizes_E)[None], jnp.arange(self._plan.rows)[:, None]
        return (row_Rx1 < ends_E) & (row_Rx1 >= ends_E - self._sizes_E[None])

    def _inner(self, x_RxD: jax.Array, matrices: Matrices) -> list[jax.Array]:
        """The rows' products with gate and up, and their biases."""
        inner = [self._product(x_RxD, w_ExDxF) for w_ExDxF in matrices[:2]]
        if len(matrices) == 3:
            return inner
        of_expert_RxE = self._of_expert_RxE.astype(x_RxD.dtype)
        return [x + of_expert_RxE @ bias_ExF for x, bias_ExF in zip(inner, matrices[3:], strict=True)]

    def _product(self, x_RxD: jax.Array, w_ExDxF: jax.Array, transposed: bool = False) -> jax.Array:
        """Each row with its expert's matrix."""
        width = w_ExDxF.shape[1 if transposed else 2]
        return gmm(
            x_RxD,
            w_ExDxF,
            self._sizes_E,
            preferred_element_type=x_RxD.dtype,
            tiling=(self._plan.tile, min(x_RxD.shape[1], TILE_WIDTH), min(width, TILE_WIDTH)),
            transpose_rhs=transposed,
            interpret=self._plan.interpret,
        )
