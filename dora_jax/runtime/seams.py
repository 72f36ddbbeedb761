"""The seams of the runtime: a Protocol for each place where one implementation stands for another.

WeightStore    publish.DeviceWeights and publish.HostWeights (memory), transfer.StoredWeights (storage),
               cluster.RemoteWeights (the trainer's processes, which send them over the wire)
"""

from __future__ import annotations

from typing import Any, Protocol

from dora_jax.types import Version

Tree = Any  # a pytree: arrays, `publish.Slices`, ShapeDtypeStructs or shardings


class WeightStore(Protocol):
    """The weights of several versions. A version is immutable: its number is put once. Any thread may use the store."""

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that are whole, oldest first."""

    def put(self, version: Version, weights: Tree) -> None:
        """Keeps these weights as `version`."""

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        """The weights in the layout that `shardings` describe; None: as they are kept. KeyError: this process does not
        hold the version."""

    def drop(self, version: Version) -> None:
        """Forgets the version. A version that is not there is dropped already."""
