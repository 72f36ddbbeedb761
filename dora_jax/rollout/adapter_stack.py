"""Stage 2, device side: the adapters of several versions beside one another, as the calls of one engine take them.

Consumes published adapters (models/lora.py) in the layout of `one`; produces one tree whose leaves have a leading axis
of places. A place is rewritten in place, so a version is loaded without a new program and without a second copy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dora_jax.models import decoder, lora
from dora_jax.models.lora_config import Lora
from dora_jax.rollout.shapes import Shapes


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterStack:
    """The arrays' shapes and shardings, and what writes to them. The object holds none."""

    lora: Lora
    one: Any  # shardings of a published adapter
    abstract: Any  # of `shapes.adapters` of them, with shardings

    @classmethod
    def of(cls, cfg: decoder.ModelConfig, section: Lora, shapes: Shapes, mesh: Mesh, dtype: Any) -> AdapterStack:
        where = functools.partial(lora.specs, cfg, section, mesh, shapes.layout, whole_experts=shapes.whole_experts)
        one = jax.eval_shape(
            lambda tree: decoder.serving_layout(tree, shapes.layout), lora.abstract(cfg, section, dtype)
        )
        several = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct((shapes.adapters, *x.shape), x.dtype, sharding=s),
            one,
            where(several=True),
        )
        return cls(section, where(), several)

    def empty(self, formats: Any) -> Any:
        """Adapters that change nothing, in these formats."""
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.abstract), out_shardings=formats
        )()

    def nothing(self) -> Any:
        """One of them, as it is published."""
        make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), self.abstract)
        return jax.jit(make, out_shardings=self.one)()

    def writer(self, formats: Any) -> Any:
        """Jitted: (adapters, one, its place) -> the adapters with it, in the same memory."""

        def write(several: Any, one: Any, place: jax.Array) -> Any:
            return jax.tree.map(lambda many, x: many.at[place].set(x.astype(many.dtype)), several, one)

        return jax.jit(write, donate_argnums=0, out_shardings=formats)
