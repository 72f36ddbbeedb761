"""Experts over the devices of a mesh. The trainer's (`compute`): each device multiplies the tokens of its row of
devices with its own experts.

Matrices are gathered over the mesh axis `fsdp` and results summed over `tensor`. Over `expert`, expert_dispatch:
  gather      all tokens go to all devices, and each device keeps the sums of its own: k experts a token on e devices
              send e / k of what an exchange does
  all_to_all  a token goes to the devices that have its experts (`experts` below)
As compiled for v5p-512, the experts of one layer of DeepSeek-V3 at 4096 tokens a chip, forward and backward, receive
5.7 GB and hold 13.5 GiB gathered over 16 devices; 4.5 GB and 6.7 GiB exchanged over 64, which gather fewer matrices.
Law: no token is dropped, whatever the load.

Experts over a mesh axis by all-to-all: each token goes to the devices that have its experts, and comes back.

Consumes the tokens of one device inside a shard_map; produces their sums over all experts. Every device sorts its
choices by expert, so that what goes to another device lies together, and knows how many each sends to each: a receiver
takes its rows in the order of the senders, in blocks of an even load (grouped_experts.py says what a block computes).
Laws: no token is dropped: all devices go on until the last has taken all its rows; nothing but counts, rows and one
number a row is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dora_jax.models import moe
from dora_jax.models.grouped_experts import BlockPlan, Grouped, order_of, over_blocks, places_of, plan_of, sums_of
from dora_jax.models.sharding import TABLE, serving_table, spec


class _Sent(NamedTuple):
    """What every device sends to every other; the same on all of them but for the first two."""

    choice_N: jax.Array  # i32: this device's choices, token x k + j, in the order of their experts
    place_N: jax.Array  # i32: where a choice stands in it
    counts_SxE: jax.Array  # i32: rows of each sender for each expert


class _Exchange(NamedTuple):
    """Static."""

    plan: BlockPlan
    axis: str
    devices: int  # of the axis
    mesh_axes: tuple[str, ...]


def experts(
    h_TxD: jax.Array,
    weights_Txk: jax.Array,
    ids_Txk: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
    *,
    biases: Sequence[jax.Array] = (),
    axis: str,
    devices: int,
    mesh_axes: tuple[str, ...],
    interpret: bool = False,
    gate: str = "silu",
) -> jax.Array:
    """[T, D]: for each of this device's tokens, the weighted sum of its experts, E of which each device has.

    biases: of gate and up. interpret: without the TPU's kernel and collective, for tests.
    """
    (tokens, k), count = ids_Txk.shape, gate_ExDxF.shape[0]
    plan = plan_of(tokens * devices, k, count, devices, interpret)._replace(gate=gate)
    ids_N = jnp.minimum(ids_Txk.reshape(-1), count * devices)  # choices of no expert come last
    place_N, counts_E = places_of(ids_N, count * devices + 1)
    sent = _Sent(order_of(ids_N), place_N, jax.lax.all_gather(counts_E[:-1], axis))
    over = _Exchange(plan, axis, devices, mesh_axes)
    matrices = gate_ExDxF, up_ExDxF, down_ExFxD, *biases
    return _mixed(over, h_TxD, weights_Txk.reshape(-1), sent, *matrices).astype(h_TxD.dtype)


# ---------------------------------------------------------------- the product and its gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(over: _Exchange, h_TxD, weights_N, sent: _Sent, *matrices) -> jax.Array:
    """f32[T, D]."""
    x_NxD = h_TxD[sent.choice_N // over.plan.per_token]
    weights_SxN = jax.lax.all_gather(weights_N[sent.choice_N], over.axis)

    def add(start, y_NxD):
        block = _Block(over, sent, start)
        y_RxD = block.grouped.forward(block.received(x_NxD), block.numbers(weights_SxN), matrices)
        return block.returned(y_RxD, y_NxD)

    return _of_tokens(sent, over_blocks(over.plan, _most(over, sent), add, jnp.zeros_like(x_NxD)), h_TxD.shape[0])


def _forward(over, *inputs):
    return _mixed(over, *inputs), inputs


def _backward(over: _Exchange, inputs, dy_TxD):
    h_TxD, weights_N, sent, *matrices = inputs
    token_N = sent.choice_N // over.plan.per_token
    x_NxD, dy_NxD = h_TxD[token_N], dy_TxD.astype(h_TxD.dtype)[token_N]
    weights_SxN = jax.lax.all_gather(weights_N[sent.choice_N], over.axis)

    def add(start, sums):
        dx_NxD, dweights_SxN, dmatrices = sums
        block = _Block(over, sent, start)
        rows = block.received(x_NxD), block.numbers(weights_SxN), block.received(dy_NxD)
        dx_RxD, dweights_R, dmatrices = block.grouped.backward(*rows, matrices, dmatrices)
        return block.returned(dx_RxD, dx_NxD), block.spread(dweights_R, dweights_SxN), dmatrices

    zeros = jnp.zeros_like(x_NxD), jnp.zeros(weights_SxN.shape, jnp.float32), sums_of(over.plan, matrices)
    dx_NxD, dweights_SxN, dmatrices = over_blocks(over.plan, _most(over, sent), add, zeros)
    dweights_N = jax.lax.psum_scatter(dweights_SxN, over.axis, scatter_dimension=0)[sent.place_N]
    dh_TxD = _of_tokens(sent, dx_NxD, h_TxD.shape[0])
    return dh_TxD.astype(h_TxD.dtype), dweights_N, None, *(d.astype(h_TxD.dtype) for d in dmatrices)


_mixed.defvjp(_forward, _backward)


def _of_tokens(sent: _Sent, x_NxD: jax.Array, tokens: int) -> jax.Array:
    """f32[T, D]: each token's rows together; those of no expert are zero."""
    return jnp.sum(x_NxD[sent.place_N].reshape(tokens, -1, x_NxD.shape[-1]).astype(jnp.float32), axis=1)


def _most(over: _Exchange, sent: _Sent) -> jax.Array:
    """Rows of the device that receives the most, of the whole mesh: all of it goes through the same blocks."""
    rows_T = jnp.sum(sent.counts_SxE.reshape(over.devices, over.devices, -1), axis=(0, 2))
    return jax.lax.pmax(jnp.max(rows_T), over.mesh_axes)


# ---------------------------------------------------------------- one block of rows


class _Block:
    """The rows from `start` on that each device receives, by senders; here they are put in the order of their
    experts."""

    def __init__(self, over: _Exchange, sent: _Sent, start: int | jax.Array):
        self._over, me, rows = over, jax.lax.axis_index(over.axis), over.plan.rows
        counts_SxTxE = sent.counts_SxE.reshape(over.devices, over.devices, -1)  # senders, receivers, experts of one
        self._count = counts_SxTxE.shape[2]
        sizes_SxT = jnp.sum(counts_SxTxE, axis=2)
        starts_SxT = jnp.cumsum(sizes_SxT, axis=0) - sizes_SxT - start  # in the receiver's block
        from_SxT = jnp.clip(-starts_SxT, 0, sizes_SxT)
        self._sizes_SxT = jnp.clip(rows - starts_SxT, 0, sizes_SxT) - from_SxT
        first_SxT = jnp.cumsum(sizes_SxT, axis=1) - sizes_SxT
        self._sender_SxT = first_SxT + from_SxT  # where a piece begins in the sender's order
        self._block_SxT = jnp.clip(starts_SxT + from_SxT, 0, rows)  # where it begins in the receiver's block
        row_R = jnp.arange(rows)
        ends_SE = jnp.cumsum(counts_SxTxE[:, me].reshape(-1)) - start
        part_R = jnp.sum(row_R[:, None] >= ends_SE[None], axis=1, dtype=jnp.int32)
        self._here_R = row_R < ends_SE[-1]
        self._from_R = jnp.minimum(part_R // self._count, over.devices - 1)  # the sender of a row
        self._at_R = self._sender_SxT[:, me][self._from_R] + row_R - self._block_SxT[:, me][self._from_R]
        expert_R = jnp.where(self._here_R, part_R % self._count, self._count)
        self._order_R = order_of(expert_R)
        self._place_R, sizes_E = places_of(expert_R, self._count + 1)
        self.grouped = Grouped(over.plan, sizes_E[:-1])

    def received(self, x_NxD: jax.Array) -> jax.Array:
        """[R, D]: the rows that come here, by expert."""
        into = jnp.zeros((self._over.plan.rows, x_NxD.shape[1]), x_NxD.dtype)
        return self._move(x_NxD, into, self._sender_SxT, self._block_SxT, self._sizes_SxT)[self._order_R]

    def returned(self, y_RxD: jax.Array, into_NxD: jax.Array) -> jax.Array:
        """The rows where they came from."""
        y_RxD = y_RxD[self._place_R]
        return self._move(y_RxD, into_NxD, self._block_SxT.T, self._sender_SxT.T, self._sizes_SxT.T)

    def numbers(self, x_SxN: jax.Array) -> jax.Array:
        """[R]: of every sender's numbers those of the rows, by expert."""
        return jnp.where(self._here_R, x_SxN[self._from_R, self._at_R], 0.0)[self._order_R]

    def spread(self, x_R: jax.Array, into_SxN: jax.Array) -> jax.Array:
        """The rows' numbers among those of every sender."""
        at_R = jnp.where(self._here_R, self._at_R, into_SxN.shape[1])
        return into_SxN.at[self._from_R, at_R].set(x_R[self._place_R], mode="drop", unique_indices=True)

    def _move(self, x_NxD, into_MxD, begin_SxT, end_SxT, sizes_SxT) -> jax.Array:
        """From the place `begin` of each sender's rows to the place `end` of each receiver's, so many rows."""
        me = jax.lax.axis_index(self._over.axis)
        if self._over.plan.interpret:
            # What a ragged all-to-all receives, where a platform has none
            begin_S, end_S, sizes_S = (x_SxT[:, me] for x_SxT in (begin_SxT, end_SxT, sizes_SxT))
            x_SxNxD = jax.lax.all_gather(x_NxD, self._over.axis)
            row_M = jnp.arange(into_MxD.shape[0])
            mine_MxS = (row_M[:, None] >= end_S[None]) & (row_M[:, None] < (end_S + sizes_S)[None])
            from_M = jnp.argmax(mine_MxS, axis=1)
            at_M = jnp.clip(begin_S[from_M] + row_M - end_S[from_M], 0, x_NxD.shape[0] - 1)
            return jnp.where(mine_MxS.any(1)[:, None], x_SxNxD[from_M, at_M], into_MxD)
        sizes = sizes_SxT[me], end_SxT[me], sizes_SxT[:, me]
        return jax.lax.ragged_all_to_all(x_NxD, into_MxD, begin_SxT[me], *sizes, axis_name=self._over.axis)


def compute(kind: str, mesh: Mesh, dispatch: str = "gather") -> moe.Compute:
    """The expert compute of this name, over the mesh; ValueError where there is none."""
    local = _local(kind, mesh, mesh.shape["expert"])
    if mesh.size == 1:
        return local
    tokens, expert, embed, mlp = spec("batch", "sequence"), TABLE["expert"], TABLE["expert_embed"], TABLE["expert_mlp"]
    wide, back = spec(*moe.WIDE), spec(*moe.BACK)

    def whole(x: jax.Array, axis: str, at: int) -> jax.Array:
        return jax.lax.all_gather(x, axis, axis=at, tiled=True) if mesh.shape[axis] > 1 else x

    def one_device(activation, h, weights, ids, gate, up, down):
        (gate, up), biases = moe.unbiased(gate, up)
        gate, up, down = whole(gate, embed, 1), whole(up, embed, 1), whole(down, embed, 2)
        if dispatch == "all_to_all" and mesh.shape[expert] > 1:
            inputs = (*(x.reshape(-1, x.shape[-1]) for x in (h, weights, ids)), gate, up, down)
            options = {"axis": expert, "devices": mesh.shape[expert], "mesh_axes": mesh.axis_names}
            y = experts(*inputs, biases=biases, interpret=_interpreted(mesh), gate=activation, **options)
            return jax.lax.psum(y.reshape(h.shape), mlp)
        h, weights, ids = (whole(x, expert, 0) for x in (h, weights, ids))
        gate, up = map(moe.Biased, (gate, up), biases) if biases else (gate, up)
        y = local(h, weights, ids, gate, up, down, jax.lax.axis_index(expert) * down.shape[0], gate=activation)
        y = jax.lax.psum(y, mlp)
        return jax.lax.psum_scatter(y, expert, scatter_dimension=0, tiled=True) if mesh.shape[expert] > 1 else y

    def run(*inputs, gate: str = "silu"):
        specs = (tokens, tokens, tokens, *_placed(inputs[3:], (wide, wide, back)))
        each = functools.partial(one_device, gate)
        return jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)(*inputs)

    return run


def serving(kind: str, mesh: Mesh, *, whole: bool) -> moe.Compute:
    """The same on an engine's devices, all of which have all tokens: each adds its part of every expert, or its experts
    (`whole`), and one sum a layer goes over them."""
    local = _local(kind, mesh, mesh.size if whole else 1)
    if mesh.size == 1:
        return local
    table = serving_table(mesh, whole_experts=whole)
    wide, back = (PartitionSpec(*(table[axis] for axis in axes)) for axes in (moe.WIDE, moe.BACK))
    devices = table["heads"]

    def one_device(activation, h, weights, ids, gate, up, down):
        first = jax.lax.axis_index(devices) * down.shape[0] if whole else 0
        return jax.lax.psum(local(h, weights, ids, gate, up, down, first, gate=activation), devices)

    def run(*inputs, gate: str = "silu"):
        specs = (*(PartitionSpec(),) * 3, *_placed(inputs[3:], (wide, wide, back)))
        each = functools.partial(one_device, gate)
        return jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(*inputs)

    return run


def _placed(matrices: Sequence[jax.Array | moe.Biased], specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """The specs of matrices [E, in, out], and of those with a bias."""
    return [
        moe.Biased(s, PartitionSpec(s[0], s[2])) if isinstance(x, moe.Biased) else s for x, s in zip(matrices, specs)
    ]


def _local(kind: str, mesh: Mesh, parts: int) -> moe.Compute:
    """What one of `parts` devices computes that share out the experts."""
    if kind not in moe.COMPUTES:
        raise ValueError(f"expert compute {kind!r} is unknown; known: {', '.join(moe.COMPUTES)}")
    if kind != "megablox":
        return moe.COMPUTES[kind]
    return functools.partial(moe.megablox, parts=parts, interpret=_interpreted(mesh))


def _interpreted(mesh: Mesh) -> bool:
    """presets.py refuses kernels of TPUs on a CPU; tests do not."""
    return mesh.devices.flat[0].platform == "cpu"
