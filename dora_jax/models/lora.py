"""Low-rank adapters: y = x W + (alpha / rank) (x A) B beside the matrices of a model, whose weights stay as they are.

An adapter is a tree like the params, of the adapted matrices alone: {stack: {name: {"a": [..., in, rank], "b": [...,
rank, out]}}}; leading axes are the matrix's own (layers, experts). Both layouts of decoder.py exist; `stacked` puts
several adapters behind a leading axis, and decoder.forward's adapter_index says which one a row takes.
Laws: a first adapter adds zeros, for B is zero; a factor's first value depends on (seed, layer, name) alone; a
factor lies on the mesh as its matrix does, and the rank is whole everywhere.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import Lora

Adapter = dict[str, Any]
RANK = "lora"  # the logical axis


def abstract(cfg: ModelConfig, lora: Lora, dtype: Any = jnp.float32) -> Adapter:
    """ShapeDtypeStructs of the stacked layout. ValueError: some layers have no matrix that lora.targets names."""
    params, found = decoder.abstract_params(cfg), {}
    for stack, part in decoder.stacks(cfg).items():
        found[stack] = {
            name: {
                "a": jax.ShapeDtypeStruct((*matrix.shape[:-1], lora.rank), dtype),
                "b": jax.ShapeDtypeStruct((*matrix.shape[:-2], lora.rank, matrix.shape[-1]), dtype),
            }
            for name, matrix in params[stack].items()
            if lora.adapts(name)
        }
        if not found[stack]:
            raise ValueError(
                f"lora.targets: {', '.join(lora.targets)} name no matrix of the {len(part.layers)} {part.block} layers "
                f"of this {cfg.family} model"
            )
    return found


def init(cfg: ModelConfig, lora: Lora, seed: int, shardings: Any = None) -> Adapter:
    """A fresh f32 adapter, stacked, made on its shards: A uniform within in ** -0.5, B zero. The same on every mesh."""
    return jax.jit(functools.partial(_init, cfg, lora, seed), out_shardings=shardings)()


def merge(params: decoder.Params, adapter: Adapter, gain: float) -> decoder.Params:
    """The stacked weights with a stacked adapter added up into them, in the weights' own types; computed in f32."""
    merged = dict(params)
    for stack, layers in adapter.items():
        merged[stack] = dict(params[stack])
        for name, factors in layers.items():
            a, b = (factors[x].astype(jnp.float32) for x in "ab")
            matrix, product = params[stack][name], jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            merged[stack][name] = (matrix.astype(jnp.float32) + gain * product).astype(matrix.dtype)
    return merged


def stacked(adapters: Sequence[Adapter]) -> Adapter:
    """Several adapters of one layout behind a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)


def specs(
    cfg: ModelConfig,
    lora: Lora,
    mesh: Mesh,
    layout: str = "stacked",
    *,
    whole_experts: bool = False,
    several: bool = False,
) -> Any:
    """Tree of NamedSharding that matches an adapter of this layout, as sharding.param_specs; several: of a `stacked`
    one, whose leading axis is whole everywhere."""
    axes = {  # logical ones, one a dimension
        stack: {
            name: {"a": (*names[:-1], RANK), "b": (*names[:-2], RANK, names[-1])}
            for name, names in decoder.logical_axes(cfg)[stack].items()
            if lora.adapts(name)
        }
        for stack in decoder.stacks(cfg)
    }
    return sharding.placed_axes(cfg, mesh, axes, layout, whole_experts=whole_experts, leading=(None,) * several)


# ---------------------------------------------------------------- private


def _init(cfg: ModelConfig, lora: Lora, seed: int) -> Adapter:
    like, key = abstract(cfg, lora), jax.random.key(seed)

    def layer(number: jax.Array, shape: tuple[int, ...], name: str) -> jax.Array:
        named = jax.random.fold_in(jax.random.fold_in(key, number), zlib.crc32(f"lora {name}".encode()))
        bound = shape[-2] ** -0.5
        return jax.random.uniform(named, shape, minval=-bound, maxval=bound)

    adapter: Adapter = {stack: {} for stack in like}
    for stack, part in decoder.stacks(cfg).items():
        for name, shapes in like[stack].items():
            one = functools.partial(layer, shape=shapes["a"].shape[1:], name=name)
            a = jax.vmap(one)(jnp.array(part.layers))
            adapter[stack][name] = {"a": a, "b": jnp.zeros(shapes["b"].shape)}
    return adapter
