"""Stage 2, device side: the versions that one engine holds.

Consumes published versions in the layout of `Calls.param_shardings`; produces what a call takes as its weights.
Laws: a version's weights do not change from `load` to `drop`; where versions are adapters, base weights are there once,
and a version lies at the same place of every engine, unless another version still holds that place.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dora_jax.rollout.adapter_stack import AdapterStack
from dora_jax.rollout.device_calls import Calls
from dora_jax.types import Version


class Residents:
    """At most `room` versions, each with weights of its own."""

    def __init__(self, calls: Calls, room: int):
        self._calls, self._room = calls, room
        self._weights: dict[Version, Any] = {}

    @property
    def compiled(self) -> int:
        """Programs that put a version where it belongs."""
        return 0

    def take_base(self, params: Any) -> None:
        """RuntimeError: versions are full weights."""
        raise RuntimeError("base weights belong to an engine of adapters (lora.rank)")

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._weights))

    def load(self, version: Version, params: Any) -> None:
        """RuntimeError: the version is here, or there is no room."""
        if version in self._weights:
            raise RuntimeError(f"version {version} is already loaded")
        if len(self._weights) >= self._room:
            raise RuntimeError(
                f"cannot load version {version}: {self._room} residents are held ({', '.join(map(str, self.versions))})"
            )
        self._weights[version] = self._taken(version, params)

    def drop(self, version: Version) -> None:
        del self._weights[version]

    def of(self, version: Version | None) -> Any:
        """What a call of this version takes."""
        if version is None:
            raise ValueError("a call of several versions needs adapters")
        return self._weights[version]

    def any(self) -> Any:
        """What a call takes that compiles: a version's, or zeros."""
        return next(iter(self._weights.values())) if self._weights else self._calls.zeros()

    def _taken(self, version: Version, params: Any) -> Any:
        return self._calls.stored(params)


class AdapterResidents(Residents):
    """At most `room` adapters beside one base, each in a place of the stack; every call takes base and stack."""

    def __init__(self, calls: Calls, room: int, stack: AdapterStack, places: dict[Version, int]):
        """places: filled here, for the plan that writes a row's place into its call."""
        super().__init__(calls, room)
        self._stack, self._places = stack, places
        self._base: Any = None
        self._several: Any = None
        self._write: Any = None

    @property
    def compiled(self) -> int:
        return self._write._cache_size() if self._write else 0

    def take_base(self, params: Any) -> None:
        """Base weights, in the layout of `Calls.base_shardings`; once, before the first version."""
        formats = self._calls.param_formats[1]
        self._base = self._calls.stored(params)
        self._write = self._stack.writer(formats)
        self._several = self._write(self._stack.empty(formats), self._stack.nothing(), jnp.int32(0))

    def drop(self, version: Version) -> None:
        super().drop(version)
        del self._places[version]

    def of(self, version: Version | None) -> Any:
        return self._base, self._several

    def any(self) -> Any:
        return self._calls.zeros() if self._base is None else (self._base, self._several)

    def _taken(self, version: Version, params: Any) -> None:
        if self._base is None:
            raise RuntimeError(f"cannot load version {version}: it is an adapter, and no base weights are here")
        # the place decides the last bit of a product: every instance takes the same, for samples that move
        wanted = (version % self._room, *range(self._room))
        place = next(i for i in wanted if i not in self._places.values())
        self._several = self._write(self._several, params, jnp.int32(place))
        self._places[version] = place


def new_residents(calls: Calls, room: int, places: dict[Version, int]) -> Residents:
    """Of an engine with these calls; places: see AdapterResidents."""
    return AdapterResidents(calls, room, calls.adapters, places) if calls.adapters else Residents(calls, room)
