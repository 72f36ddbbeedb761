"""THE table: logical axis -> mesh axis. Nothing else in the package decides where a dimension is placed.

Consumes the logical axes that decoder.py's modules carry; produces NamedShardings for both layouts. Mesh axes:
  data     batch rows, parameters replicated
  fsdp     batch rows, and parameters sharded over d_model (gathered layer by layer)
  expert   batch rows, and experts; other parameters as over fsdp
  context  positions of a row; attention gathers keys and values, a fraction of the activations under shared KV heads
  tensor   heads, d_ff, vocabulary
  copies   the same, but for KV heads: the devices of an engine that hold the same one
Law: a size that its mesh axis does not divide is an error that names both, never a replicated fallback; of an engine's
KV heads alone, neighbours may share one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dora_jax.models import decoder
from dora_jax.models.families.config import ModelConfig, check_mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")  # neighbours in the last axes: their collectives are the most

TABLE: dict[str, Any] = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": "context",
    "layers": None,
    "norm": None,  # gains are small: replicated
    "embed": ("fsdp", "expert"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "expert",  # of a mixture
    "expert_embed": "fsdp",  # d_model of an expert's matrices
    "expert_mlp": "tensor",  # width of an expert
    "router": None,  # one score an expert
    "latent": None,  # what latent attention projects down to
    "rank": ("fsdp", "expert"),  # the same, as what a projection takes
    "lora": None,  # the rank of an adapter
}
COPIES = "copies"  # of an engine's mesh only, see `serving_mesh`


def make_mesh(
    devices: Sequence[jax.Device], data: int, fsdp: int, tensor: int, context: int = 1, expert: int = 1
) -> Mesh:
    """A mesh of exactly these devices; axes stay Auto on every jax version."""
    sizes = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    needed = math.prod(sizes.values())
    if needed != len(devices):
        product = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if axis != "expert" or size > 1)
        raise ValueError(f"mesh {product} needs {needed} devices, not {len(devices)}")
    grid = np.array(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def serving_mesh(cfg: ModelConfig, mesh: Mesh, expert: int = 1) -> Mesh:
    """An engine's devices as its arrays lie on them. Of more devices than the model has KV heads, neighbours share one:
    the axis "tensor" counts the KV heads, and "copies" the devices that hold the same one; a cache of latents has
    one."""
    if COPIES in mesh.shape:
        return mesh
    check_mesh(cfg, fsdp=1, tensor=mesh.shape["tensor"], expert=expert, serving=True)
    if mesh.shape["tensor"] <= cfg.cache_heads:
        return mesh
    grid = mesh.devices.reshape(*mesh.devices.shape[:-1], cfg.cache_heads, -1)
    return Mesh(grid, (*AXES, COPIES), axis_types=(AxisType.Auto,) * grid.ndim)


def serving_table(mesh: Mesh, whole_experts: bool = False) -> dict[str, Any]:
    """The table on a `serving_mesh`: an engine gathers nothing per layer, so it is tensor parallel only. whole_experts:
    a device has some experts of a mixture whole, else a part of each."""
    all_devices = ("tensor", COPIES) if COPIES in mesh.shape else "tensor"
    whole = dict.fromkeys(("embed", "expert_embed", "rank", "expert"))
    cut = ("heads", "mlp", "vocab", "expert" if whole_experts else "expert_mlp")
    return {**TABLE, **whole, "expert_mlp": None, **dict.fromkeys(cut, all_devices)}


def param_specs(cfg: ModelConfig, mesh: Mesh, layout: str = "stacked", *, whole_experts: bool = False):
    """Pytree of NamedSharding that matches the params of this layout: "stacked", or an engine's, tensor only: "serving"
    or "scanned" (see decoder.serving_layout), for which `serving_table` says what whole_experts is."""
    return placed_axes(cfg, mesh, decoder.logical_axes(cfg), layout, whole_experts=whole_experts)


def placed_axes(
    cfg: ModelConfig,
    mesh: Mesh,
    axes: Any,
    layout: str,
    *,
    whole_experts: bool = False,
    leading: tuple[str | None, ...] = (),
) -> Any:
    """`param_specs` of any tree of logical axes that has the model's stacks; leading: mesh axes in front of each."""
    if layout == "stacked":
        check_mesh(cfg, **{axis: mesh.shape[axis] for axis in ("fsdp", "tensor", "expert")})
        table = TABLE
    else:
        mesh = serving_mesh(cfg, mesh, mesh.shape["tensor"] if whole_experts else 1)
        table = serving_table(mesh, whole_experts)

    def place(axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*leading, *(table[axis] for axis in axes)))

    named = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, tuple))
    if layout == "serving":
        stacks = decoder.stacks(cfg)
        layers = [named(lambda names: names[1:], axes[key]) for key, s in stacks.items() for _ in s.layers]
        axes = {**{name: names for name, names in axes.items() if name not in stacks}, decoder.LAYERS: layers}
    return named(place, axes)


def stacked_like(cfg: ModelConfig, serving: Any) -> Any:
    """Serving shardings -> where the same devices would have the stacked tensors."""
    layers = serving["layers"]
    if not isinstance(layers, list):
        return serving

    def stacked(where: NamedSharding) -> NamedSharding:
        return NamedSharding(where.mesh, PartitionSpec(None, *where.spec))

    return serving | {name: jax.tree.map(stacked, layers[part.place]) for name, part in decoder.stacks(cfg).items()}


def row_shards(mesh: Mesh) -> int:
    """Parts that a batch's rows fall into."""
    return math.prod(mesh.shape[axis] for axis in TABLE["batch"])


def held_shards(mesh: Mesh) -> tuple[int, ...]:
    """Which of the `row_shards` devices of this process hold, in their order."""
    shards = row_shards(mesh)
    held = NamedSharding(mesh, spec("batch")).addressable_devices_indices_map((shards,))
    return tuple(sorted({range(shards)[where][0] for (where,) in held.values()}))


def spec(*axes: str | None) -> PartitionSpec:
    """What the table says of an array with these logical axes, the rest whole."""
    return PartitionSpec(*(axis and TABLE[axis] for axis in axes))


def batch_spec(mesh: Mesh) -> NamedSharding:
    """[B, L]: rows over data and fsdp, positions over context."""
    return NamedSharding(mesh, spec("batch", "sequence"))


def constrain_rows(mesh: Mesh) -> Callable[..., jax.Array]:
    """`constrain` for decoder.forward: keeps rows where the batch is, so that weights travel and activations do not."""

    def pin(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(*axes)))

    return pin
