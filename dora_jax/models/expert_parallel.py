"""Experts over the devices of a mesh. The trainer's (`compute`): each device multiplies the tokens of its row of devices with its own experts.

Matrices are gathered over the mesh axis `fsdp` and results summed over `tensor`. Over `expert`, DISPATCHES:
  gather      all tokens go to all devices, and each device keeps the sums of its own: k experts a token on e devices
              send e / k of what an exchange does
  all_to_all  a token goes to the devices that have its experts (exchanged_experts.py)
As compiled for v5p-512, the experts of one layer of DeepSeek-V3 at 4096 tokens a chip, forward and backward, receive 5.7
GB and hold 13.5 GiB gathered over 16 devices; 4.5 GB and 6.7 GiB exchanged over 64, which gather fewer matrices.
Law: no token is dropped, whatever the load.
"""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh, PartitionSpec

from dora_jax.models import exchanged_experts, moe
from dora_jax.models.sharding import TABLE, serving_table, spec

DISPATCHES = ("gather", "all_to_all")


def compute(kind: str, mesh: Mesh, dispatch: str = "gather") -> moe.Compute:
    """The expert compute of this name, over the mesh; ValueError where there is none."""
    local = _local(kind, mesh, mesh.shape["expert"])
    if mesh.size == 1:
        return local
    tokens, expert, embed, mlp = spec("batch", "sequence"), TABLE["expert"], TABLE["expert_embed"], TABLE["expert_mlp"]
    wide, back = spec(*moe.WIDE), spec(*moe.BACK)

    def whole(x: jax.Array, axis: str, at: int) -> jax.Array:
        return jax.lax.all_gather(x, axis, axis=at, tiled=True) if mesh.shape[axis] > 1 else x

    def one_device(h, weights, ids, gate, up, down):
        gate, up, down = whole(gate, embed, 1), whole(up, embed, 1), whole(down, embed, 2)
        if dispatch == "all_to_all" and mesh.shape[expert] > 1:
            return jax.lax.psum(exchanged(h, weights, ids, gate, up, down), mlp)
        h, weights, ids = (whole(x, expert, 0) for x in (h, weights, ids))
        y = local(h, weights, ids, gate, up, down, jax.lax.axis_index(expert) * gate.shape[0])
        y = jax.lax.psum(y, mlp)
        return jax.lax.psum_scatter(y, expert, scatter_dimension=0, tiled=True) if mesh.shape[expert] > 1 else y

    def exchanged(h, weights, ids, *matrices):
        flat = (x.reshape(-1, x.shape[-1]) for x in (h, weights, ids))
        options = {"axis": expert, "devices": mesh.shape[expert], "mesh_axes": mesh.axis_names}
        y = exchanged_experts.experts(*flat, *matrices, interpret=_interpreted(mesh), **options)
        return y.reshape(h.shape)

    specs = (tokens, tokens, tokens, wide, wide, back)
    return jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)


def serving(kind: str, mesh: Mesh, *, whole: bool) -> moe.Compute:
    """The same on an engine's devices, all of which have all tokens: each adds its part of every expert, or its experts
    (`whole`), and one sum a layer goes over them."""
    local = _local(kind, mesh, mesh.size if whole else 1)
    if mesh.size == 1:
        return local
    table = serving_table(mesh, whole_experts=whole)
    wide, back = (PartitionSpec(*(table[axis] for axis in axes)) for axes in (moe.WIDE, moe.BACK))
    devices = table["heads"]

    def one_device(h, weights, ids, gate, up, down):
        first = jax.lax.axis_index(devices) * gate.shape[0] if whole else 0
        return jax.lax.psum(local(h, weights, ids, gate, up, down, first), devices)

    specs = (*(PartitionSpec(),) * 3, wide, wide, back)
    return jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


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
