"""Stage 2, device side: weights as an engine keeps them; weights and KV in fewer bits, where `rollout.weights` and
`rollout.kv` ask for it.

`grouped` and `joined` make one weight of projections that take one input, which is one product then: `gate_up_proj` of
gate_proj and up_proj. A device of a tensor-parallel engine has its columns of each side by side, so that a layer
(attention.Products.each) splits what comes out without moving anything between devices. Query, key and value stay
apart: a kernel takes each by itself, and to cut them out of one product are three small operations a layer more.

Consumes one version's params in an engine's layout; produces the same tree with each projection as 8-bit values and
one f32 scale an output channel, by which the product is multiplied. Embedding, head, gains and biases
stay: they are read row by row, or decide between tokens. So do routers, experts and the up-projection of latents, which
no single product takes. With bfloat16, which is for a CPU, there is no scale, and the head is of that type too, as the
trainer's is (trainer.matmul). KV in float8 has no scale: its values are of order one, and
the kernels take one scale a pool at most.
Law: the trainer never sees these weights, so the engine's log-probs drift from its own; bench/train_step.py prints by
how much, and trainer.max_mismatch stops a run that drifts too far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dora_jax.models import decoder
from dora_jax.models.decoder import Params

WEIGHTS = {"": None, "published": None, "bfloat16": jnp.bfloat16, "int8": jnp.int8, "float8": jnp.float8_e4m3fn}
OF_CPU = ("", "published", "bfloat16")  # weights that a CPU keeps turned
KV = {"": None, "float8": jnp.float8_e4m3fn}
OF_LINEAR = tuple(f"delta_{x}" for x in "qkvzo")
NAMES = ("q", "k", "v", "o", "gate", "up", "gate_up", "down", "q_a", "q_b", "kv_a", "attn_gate", *OF_LINEAR)
JOINED = {"gate_up_proj": ("gate_proj", "up_proj")}
PROJECTIONS = tuple(f"{x}_proj{of_sublayer}" for of_sublayer in ("", "_0", "_1") for x in NAMES)


class OfLayer:
    """A weight of one layer, which the decoder indexes as it does stacked ones."""

    def __getitem__(self, every: Any) -> Self:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrow(OfLayer):
    """A weight [..., D, F] in 8 bits: `x @ weight` is what the decoder asks of it, and scales after the product, so
    that no wide weight is ever made."""

    values: Any  # int8 or float8 [..., D, F]
    scale: Any  # f32[..., 1, F]

    def astype(self, dtype: Any) -> Narrow:
        """It takes the type of what it is multiplied with."""
        return self

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, self.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * self.scale.reshape((1,) * (y.ndim - 1) + (-1,))).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turned(OfLayer):
    """A weight [D, F] kept as [F, D]: a CPU multiplies a few dozen rows by it a quarter sooner so. Rows [M, D] are
    multiplied in its type, sums are float32."""

    values: Any  # [F, D]

    def astype(self, dtype: Any) -> Turned:
        """It keeps its type."""
        return self

    def __rmatmul__(self, x_MxD: jax.Array) -> jax.Array:
        rows_MxD = x_MxD.astype(self.values.dtype)
        if len(x_MxD) == 1 and rows_MxD.dtype == jnp.bfloat16:  # a CPU has no fast product of one such row
            rows_MxD = jnp.pad(rows_MxD, ((0, 1), (0, 0)))
        y = jax.lax.dot_general(rows_MxD, self.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return y[: len(x_MxD)].astype(x_MxD.dtype)


def grouped(params: Params, one: Callable[[Sequence], object] = tuple) -> Params:
    """The tree, or one like it, with what `one` makes of weights that are joined in their place."""

    def of_layer(weights: dict) -> dict:
        weights = dict(weights)
        for name, several in JOINED.items():
            if weights.keys() >= set(several):
                weights[name] = one([weights.pop(each) for each in several])
        return weights

    return _layers(of_layer, params)


def joined(weights: Sequence[jax.Array], devices: int) -> jax.Array:
    """[..., D, sum of F] of weights [..., D, F], for an engine of so many devices."""
    cut = [x.reshape(*x.shape[:-1], devices, -1) for x in weights]
    return jnp.concatenate(cut, axis=-1).reshape(*weights[0].shape[:-1], -1)


def turned(params: Params, dtype: DTypeLike | None) -> Params:
    """Each projection as Turned, and the head as well, in this type; None: projections alone, in their own."""
    laid_out = _projections(params, lambda weight: Turned(weight.T.astype(dtype or weight.dtype)))
    if dtype is None:
        return laid_out
    head_DxV = laid_out.pop("lm_head", None)
    head_VxD = laid_out["embed"] if head_DxV is None else head_DxV.T
    return laid_out | {decoder.HEAD: Turned(head_VxD.astype(dtype))}


def turned_specs(shardings: Params, dtype: DTypeLike | None) -> Params:
    """The specs of `turned` weights, given those of the weights."""

    def one(sharding: NamedSharding) -> Turned:
        before, after = sharding.spec
        return Turned(NamedSharding(sharding.mesh, PartitionSpec(after, before)))

    laid_out = _projections(shardings, one)
    if dtype is None:
        return laid_out
    head = laid_out.pop("lm_head", None)
    return laid_out | {decoder.HEAD: Turned(laid_out["embed"]) if head is None else one(head)}


def stored(params: Params, dtype) -> Params:
    """Each projection as Narrow, or as it is where dtype is None; the largest value of an output channel maps to the
    type's largest."""
    if dtype is None:
        return params
    largest = float(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).max)

    def one(weight):
        scale = jnp.abs(weight).max(-2, keepdims=True).astype(jnp.float32) / largest
        scaled = weight.astype(jnp.float32) / jnp.where(scale == 0, 1.0, scale)
        scaled = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
        return Narrow(jnp.clip(scaled, -largest, largest).astype(dtype), scale)

    return _projections(params, one)


def specs(shardings: Params) -> Params:
    """The specs of `stored` weights, given those of the weights."""

    def one(sharding: NamedSharding) -> Narrow:
        *others, _, last = sharding.spec
        return Narrow(sharding, NamedSharding(sharding.mesh, PartitionSpec(*others, None, last)))

    return _projections(shardings, one)


def tied(params: Any, step) -> Any:
    """Narrow weights tied to the step: else XLA widens them before the loop and holds the wide ones."""
    if not any(isinstance(x, Narrow) for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Narrow))):
        return params
    return jax.lax.optimization_barrier((params, step))[0]


def narrow(x, dtype) -> jax.Array:
    """To the pool's type; float8 has no infinity, and beyond its largest value a cast makes nan."""
    if dtype == x.dtype or jnp.finfo(dtype).bits >= 16:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _projections(params: Params, one: Callable) -> Params:
    return _layers(lambda weights: {name: one(w) if name in PROJECTIONS else w for name, w in weights.items()}, params)


def _layers(of_layer: Callable[[dict], dict], params: Params) -> Params:
    stacks = {name: params[name] for name in decoder.stack_names(params)}
    return params | {name: list(map(of_layer, x)) if isinstance(x, list) else of_layer(x) for name, x in stacks.items()}
