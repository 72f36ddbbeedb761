"""Stage 6, publish: versions of the policy, from the trainer to the engines.

    offered_copy   the trainer's masters -> a copy in the engines' dtype on the same shards, before the next step
                   donates them; nothing is gathered
    sliced         that copy -> host memory, shard by shard
    placed         shards -> the serving layout on an engine's devices, each of which gets the slices that it needs

Laws: a version is immutable and complete from the moment `versions` names it; a number is put once, ever; readers on
other threads see all of a version or none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models import decoder, sharding
from dora_jax.models.config import ModelConfig
from dora_jax.types import Version

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop in each dimension


def offered_copy(dtype: str, shardings: Any = None) -> Callable[[Any], Any]:
    """Jitted: stacked masters -> their copy in `dtype`. `shardings`: where the masters lie, and so the copy."""
    dtype = jnp.dtype(dtype)

    def copy(params: Any) -> Any:  # an explicit copy: an output that is its input could share the donated buffer
        return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)

    return jax.jit(copy, out_shardings=shardings)


def copy_bytes(cfg: ModelConfig, mesh: Mapping[str, int], dtype: str) -> int:
    """What one device of the trainer holds of an offered copy. `mesh`: the size of each axis."""

    def size(leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> int:
        return math.prod(leaf.shape) // math.prod(mesh[name] for axis in axes for name in sharding.mesh_axes(axis))

    leaves = jax.tree.map(size, decoder.abstract_params(cfg), decoder.logical_axes(cfg))
    return sum(jax.tree.leaves(leaves)) * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Slices:
    """A stacked tensor, or a layer of one, as far as this process has it. No pytree: a leaf of one."""

    shape: tuple[int, ...]  # of the whole
    dtype: np.dtype
    part: tuple[int, ...]  # shape of what one device holds
    boxes: dict[Box, Any]  # arrays; on the host, or still on a device
    given: frozenset[Box]  # of these boxes, those that this process gives to others

    def __getitem__(self, layer: int) -> Slices:
        boxes = {
            (start[1:], stop[1:]): self._host(box)[layer - start[0]]
            for box in self.boxes
            for start, stop in [box]
            if start[0] <= layer < stop[0]
        }
        return Slices(self.shape[1:], self.dtype, self.part[1:], boxes, frozenset())

    def at(self, box: Box) -> np.ndarray:
        """Read-only. ValueError where this process does not have all of it."""
        for mine in self.boxes:
            if common(box, mine) == box:
                return self._host(mine)[within(box, mine)]
        parts = [(mine, part) for mine in self.boxes if (part := common(box, mine)) is not None]
        if sum(volume(part) for _, part in parts) != volume(box):
            raise ValueError(f"{box} of an array {self.shape} is not here in one piece or in several")
        whole = np.empty([b - a for a, b in zip(*box, strict=True)], self.dtype)
        for mine, part in parts:
            whole[within(part, box)] = self._host(mine)[within(part, mine)]
        return whole

    def bring_home(self) -> None:
        """Lets go of the devices' memory."""
        for box in self.boxes:
            self._host(box)

    def _host(self, box: Box) -> np.ndarray:
        """Any number of threads may ask."""
        if not isinstance(array := self.boxes[box], np.ndarray):
            array = self.boxes[box] = np.asarray(array)
        return array


def sliced(copy: Any, given: Callable[[str, Box], bool] = lambda path, box: True) -> Any:
    """Tree of Slices: the shards that this process holds, each once, and that are `given`; they leave their devices."""

    def slices(path: Any, leaf: jax.Array) -> Slices:
        shards = {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        mine = {box: data for box, data in shards.items() if given(name_of(path), box)}
        for data in mine.values():
            data.copy_to_host_async()
        return Slices(leaf.shape, np.dtype(leaf.dtype), leaf.sharding.shard_shape(leaf.shape), mine, frozenset(mine))

    return jax.tree_util.tree_map_with_path(slices, copy)


def placed(slices: Any, shardings: Any) -> Any:
    """An engine's layout on these shardings (its pytree, or one for the serving layout): ready, or on its way to the
    devices."""
    engine = _engine_layout(slices, shardings)
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, engine)
    return jax.tree.map(
        lambda leaf, where: jax.make_array_from_callback(
            leaf.shape, where, lambda index: leaf.at(box_of(index, leaf.shape))
        ),
        engine,
        shardings,
    )


class WeightStore:
    """One process. Keeps each version on the trainer's devices until it is dropped: on the trainer's shards, and in
    host memory once an engine elsewhere has asked; or in the serving layout, where engines share these devices."""

    def __init__(self, dtype: str = "float32"):
        """dtype: what engines compute in; the trainer's masters stay f32."""
        self._dtype = dtype
        self._copy: Callable[[Any], Any] | None = None
        self._weights: dict[Version, Any] = {}
        self._slices: dict[Version, Any] = {}  # of these versions, on the host or on their way there
        self._elsewhere = False  # an engine has asked that does not share the trainer's devices
        self._newest: Version | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()  # what several engines ask for at once is made once

    @property
    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return tuple(sorted(self._weights))

    def put(self, version: Version, params: Any) -> None:
        """Publish stacked params as `version`; blocks until the copy is whole."""
        if self._newest is not None and version <= self._newest:
            raise ValueError(
                f"version {version} cannot be published after version {self._newest}: versions are "
                f"immutable and only rise"
            )
        if self._copy is None:
            self._copy = offered_copy(self._dtype, jax.tree.map(lambda x: x.sharding, params))
        copy = jax.block_until_ready(self._copy(params))
        slices = sliced(copy) if self._elsewhere else None
        with self._lock:
            self._weights[version] = copy
            if slices is not None:
                self._slices[version] = slices
            self._newest = version

    def get(self, version: Version, shardings: Any) -> Any:
        """The weights on these shardings (an engine's, or one for the serving layout); None: as they are kept, stacked
        or in the serving layout. Read-only."""
        weights = self._held(version)
        if shardings is None:
            return weights
        with self._making:
            if _devices(weights) == _devices(shardings):
                weights = _replaced(weights, shardings)
                self._keep(self._weights, version, weights)
                return weights
            self._elsewhere = True
            if (slices := self._slices.get(version)) is None:
                slices = sliced(weights)
                self._keep(self._slices, version, slices)
        return jax.block_until_ready(placed(slices, shardings))

    def drop(self, version: Version) -> None:
        self._held(version)
        with self._lock:
            del self._weights[version]
            self._slices.pop(version, None)

    # ------------------------------------------------------------ private

    def _held(self, version: Version) -> Any:
        with self._lock:
            if version not in self._weights:
                raise KeyError(f"version {version} is not in the weight store: it holds {sorted(self._weights)}")
            return self._weights[version]

    def _keep(self, there: dict[Version, Any], version: Version, made: Any) -> None:
        with self._lock:
            if version in self._weights:  # it may have been dropped meanwhile
                there[version] = made


def _devices(tree: Any) -> set[jax.Device]:
    leaf = jax.tree.leaves(tree)[0]
    return (leaf if isinstance(leaf, jax.sharding.Sharding) else leaf.sharding).device_set


def _engine_layout(weights: Any, shardings: Any) -> Any:
    """Arrays or slices as `shardings` have them: a pytree, or one for the serving layout."""
    wanted = "serving" if isinstance(shardings, jax.sharding.Sharding) else decoder.layout_of(shardings)
    return weights if decoder.layout_of(weights) == wanted else decoder.serving_layout(weights, wanted)


def _replaced(copy: Any, shardings: Any) -> Any:
    """An engine's layout on the same devices, without a way over the host; what lies so already is not copied."""
    engine = jax.eval_shape(lambda copy: _engine_layout(copy, shardings), copy)
    if jax.tree.structure(engine) == jax.tree.structure(copy):
        return jax.block_until_ready(jax.device_put(copy, shardings))
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, engine)
    leaves, shape = jax.tree.flatten(shardings)
    return jax.block_until_ready(_to_serving(tuple(leaves), shape)(copy))


@functools.lru_cache(maxsize=4)
def _to_serving(shardings: tuple[Any, ...], shape: Any) -> Callable[[Any], Any]:
    return jax.jit(decoder.serving_layout, out_shardings=jax.tree.unflatten(shape, shardings))


# ------------------------------------------------------------------- boxes


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _, _ in spans), tuple(b for _, b, _ in spans)


def volume(box: Box) -> int:
    return math.prod(b - a for a, b in zip(*box, strict=True))


def common(a: Box, b: Box) -> Box | None:
    """What is in both."""
    start, stop = tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))
    return (start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None


def within(box: Box, outer: Box) -> tuple[Any, ...]:
    """Where it lies in an array of the outer box."""
    return (*(slice(a - at, b - at) for a, b, at in zip(*box, outer[0], strict=True)), ...)
