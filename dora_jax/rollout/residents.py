"""Stage 2, device side: the versions that one engine holds.

Consumes published versions in the layout of `Calls.param_shardings`; produces what a call takes as its weights.
Law: a version's weights do not change from `load` to `drop`.
"""

from __future__ import annotations

from typing import Any

from dora_jax.rollout.device_calls import Calls
from dora_jax.types import Version


class Residents:
    """At most `room` versions, each with weights of its own."""

    def __init__(self, calls: Calls, room: int):
        self._calls, self._room = calls, room
        self._weights: dict[Version, Any] = {}

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
        self._weights[version] = self._calls.stored(params)

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
