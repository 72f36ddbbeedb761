"""Stage 6, publish: versions of the policy, from the trainer to the engines.

    put(version, params)  the trainer's masters are copied into the serving layout, before the next step donates them
    get(version, shardings) -> the same weights on an engine's devices

Laws: a version is immutable and complete from the moment `versions` names it; a number is put once, ever; readers on
other threads see all of a version or none of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.models import decoder
from dora_jax.types import Version


def serving_copy(dtype: str, shardings: Any = None) -> Callable[[Any], Any]:
    """Stacked masters -> their copy in the serving layout and in `dtype`, on the same devices, so laid out."""
    dtype = jnp.dtype(dtype)

    def copy(params: Any) -> Any:  # an explicit copy: an output that is its input could share the donated buffer
        return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), decoder.serving_layout(params))

    return jax.jit(copy, out_shardings=shardings)


class WeightStore:
    """One process. Keeps each version on the trainer's devices, in the serving layout, until it is dropped."""

    def __init__(self, dtype: str = "float32"):
        """dtype: what engines compute in; the trainer's masters stay f32."""
        self._copy = serving_copy(dtype)
        self._weights: dict[Version, Any] = {}
        self._newest: Version | None = None
        self._lock = threading.Lock()

    @property
    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return tuple(sorted(self._weights))

    def put(self, version: Version, params: Any) -> None:
        """Publish stacked params as `version`; blocks until the copy is whole."""
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"version {version} cannot be published after version {self._newest}: versions are "
                             f"immutable and only rise")
        weights = jax.block_until_ready(self._copy(params))
        # An array lists its shards at the first look; two engines that look at once leave it with some of them twice
        # (JAX 0.10), and no device_put of it works any more.
        jax.tree.map(lambda x: x.addressable_shards, weights)
        with self._lock:
            self._weights[version] = weights
            self._newest = version

    def get(self, version: Version, shardings: Any) -> Any:
        """The weights on these shardings (a pytree of the serving layout, or one sharding for all). Read-only."""
        with self._lock:
            if version not in self._weights:
                raise KeyError(f"version {version} is not in the weight store: it holds {sorted(self._weights)}")
            weights = self._weights[version]
        return jax.block_until_ready(jax.device_put(weights, shardings))

    def drop(self, version: Version) -> None:
        with self._lock:
            if version not in self._weights:
                raise KeyError(f"version {version} is not in the weight store: it holds {sorted(self._weights)}")
            del self._weights[version]
