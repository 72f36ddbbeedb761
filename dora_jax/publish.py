"""Stage 6, publish: versions of the policy, from the trainer to the engines. The stores in memory stand here.

    offered_copy   the trainer's masters -> a copy in the engines' dtype on the same shards, before the next step
                   donates them; nothing is gathered
    sliced         that copy -> host memory, shard by shard
    placed         shards -> the serving layout on an engine's devices, each of which gets the slices that it needs

Laws: a version is immutable, and complete from the moment `versions` names it; a number is put once, ever; a reader on
another thread sees all of a version or none of it; no engine gets a version whose digest is not the one that was taken
when it was put.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dora_jax.base.box_digest import Box, LeafBox, added, box_of, combined, common, sums_of, volume, within
from dora_jax.base.digest import digest as digest_of
from dora_jax.config import RunError
from dora_jax.models import decoder
from dora_jax.types import Version

Tree = Any  # a pytree: of arrays, of Slices, of ShapeDtypeStructs or of shardings


def name_of(path: jax.tree_util.KeyPath) -> str:
    """The name of a tensor from its path in the tree, as in "layers/q_proj"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def offered_copy(dtype: str, shardings: Tree | None = None) -> Callable[[Tree], Tree]:
    """Jitted: stacked masters -> their copy in `dtype`. `shardings`: where the masters lie, and so the copy."""
    return jax.jit(functools.partial(decoder.copied, dtype=dtype), out_shardings=shardings)


@dataclasses.dataclass(frozen=True)
class Slices:
    """The boxes that this process has of a stacked tensor, or of one of its layers; a leaf of a pytree."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: np.dtype
    part: tuple[int, ...]  # shape of what one device holds
    boxes: dict[Box, np.ndarray | jax.Array]  # on the host, or still on a device
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
        """The array in this box; read-only. ValueError: this process does not have all of it."""
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
        """Moves all boxes to host memory, which frees the memory of the devices."""
        for box in self.boxes:
            self._host(box)

    def _host(self, box: Box) -> np.ndarray:
        """The array in host memory. Any number of threads may ask."""
        array = np.asarray(self.boxes[box])
        self.boxes[box] = array
        return array


def sliced(copy: Tree, given: Callable[[str, Box], bool] = lambda path, box: True) -> Tree:
    """Tree of Slices: of the shards that this process holds, those that are `given`, each once. Their way to host
    memory has begun on return."""

    def slices(path: jax.tree_util.KeyPath, leaf: jax.Array) -> Slices:
        shards = {box_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        mine = {box: data for box, data in shards.items() if given(name_of(path), box)}
        for data in mine.values():
            data.copy_to_host_async()
        return Slices(leaf.shape, np.dtype(leaf.dtype), leaf.sharding.shard_shape(leaf.shape), mine, frozenset(mine))

    return jax.tree_util.tree_map_with_path(slices, copy)


def placed(slices: Tree, shardings: Tree) -> Tree:
    """An engine's layout on these shardings (its pytree, or one for the serving layout). The arrays may still be on
    their way to the devices."""
    engine = _engine_layout(slices, shardings)
    return jax.tree.map(
        lambda leaf, where: jax.make_array_from_callback(
            leaf.shape, where, lambda index: leaf.at(box_of(index, leaf.shape))
        ),
        engine,
        jax.tree.broadcast(shardings, engine),
    )


def host_digest(slices: Tree, like: Tree) -> int:
    """`digest` of the stacked copy, from Slices in either layout that this process has all boxes of. like: the copy as
    ShapeDtypeStructs."""
    stacked = jax.tree_util.tree_leaves_with_path(like)
    numbers = {name_of(path): (number, tuple(leaf.shape)) for number, (path, leaf) in enumerate(stacked)}
    boxes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(slices):
        # The tensor of the stacked copy in which the leaf lies, and its layer there; None: it is all of it
        name, layer = name_of(path), None
        if len(path) > 1 and isinstance(path[1], jax.tree_util.SequenceKey):
            layer, stack = path[1].idx, ""
            for stack in decoder.stack_names(like):
                if layer < (count := jax.tree.leaves(like[stack])[0].shape[0]):
                    break
                layer -= count
            name = name_of((jax.tree_util.DictKey(stack), *path[2:]))
        number, shape = numbers[name]
        for box in leaf.boxes:
            array = leaf.at(box)
            boxes.append(LeafBox(array, number, box[0], shape) if layer is None else
                         LeafBox(array[None], number, (layer, *box[0]), shape))  # fmt: skip
    sums = list(zip(boxes, sums_of(boxes), strict=True))
    return combined(added(found for box, found in sums if box.number == number) for number in range(len(stacked)))


class HostWeights:
    """`WeightStore` in the host memory of this process: each version is a tree of Slices. Any thread may use it."""

    def __init__(self) -> None:
        self._slices: dict[Version, Tree] = {}
        self._lock = threading.Lock()

    @property
    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return tuple(sorted(self._slices))

    def put(self, version: Version, weights: Tree) -> None:
        """weights: a tree of Slices, in host memory or on its way there. It is kept, not copied."""
        with self._lock:
            self._slices[version] = weights

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        """The weights on these shardings (an engine's, or one for the serving layout); None: the Slices."""
        with self._lock:
            slices = _held(self._slices, version)
        return slices if shardings is None else jax.block_until_ready(placed(slices, shardings))

    def drop(self, version: Version) -> None:
        with self._lock:
            self._slices.pop(version, None)


class DeviceWeights:
    """`WeightStore` on the trainer's devices, in one process: on the trainer's shards, or in the serving layout where
    engines share these devices. A version is also in host memory once an engine elsewhere has asked. Any thread may
    use it."""

    def __init__(self, dtype: str = "float32"):
        """dtype: what engines compute in. The trainer's masters stay f32."""
        self._dtype = dtype
        self._copy: Callable[[Tree], Tree] | None = None
        self._weights: dict[Version, Tree] = {}
        self._digests: dict[Version, int] = {}  # of the stacked copies
        self._like: Tree = None  # a stacked copy, as ShapeDtypeStructs
        self._host = HostWeights()  # of these versions, those that engines elsewhere need
        self._elsewhere = False  # an engine has asked that does not share the trainer's devices
        self._newest: Version | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()  # a layout that several engines ask for at once is made once

    @property
    def versions(self) -> tuple[Version, ...]:
        with self._lock:
            return tuple(sorted(self._weights))

    def put(self, version: Version, weights: Tree, digest: int = 0, copy: int = 0) -> int:
        """Copies the trainer's stacked masters, and returns the digest of the copy once it is whole.

        digest: of the masters, where it is known, which a copy in their own type has too; copy: unused, since the copy
        is made here. ValueError: the version is not newer than all versions before it."""
        if self._newest is not None and version <= self._newest:
            raise ValueError(
                f"version {version} cannot be published after version {self._newest}: versions are "
                f"immutable and only rise"
            )
        if self._copy is None:
            self._copy = offered_copy(self._dtype, jax.tree.map(lambda x: x.sharding, weights))
        made = jax.block_until_ready(self._copy(weights))
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
        slices = sliced(made) if self._elsewhere else None
        taken = digest if digest and same_types(weights, made) else digest_of(made)
        with self._lock:
            self._weights[version] = made
            self._digests[version] = taken
            if slices is not None:
                self._host.put(version, slices)
            self._newest = version
        return taken

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        """The weights on these shardings (an engine's, or one for the serving layout); None: as they are kept, stacked
        or in the serving layout. The result is read-only. KeyError: the store does not hold the version. RunError: it
        is not what was put."""
        with self._lock:
            weights, taken = _held(self._weights, version), self._digests[version]
        if shardings is None:
            return weights
        with self._making:
            if _devices(weights) == _devices(shardings):
                if decoder.layout_of(weights) == "scanned":  # a copy in the serving layout was checked when it was made
                    _check(version, digest_of(weights), taken)
                # An engine's layout without a way over the host; an array that lies so already is not copied
                engine = jax.eval_shape(lambda copy: _engine_layout(copy, shardings), weights)
                if decoder.layout_of(engine) == decoder.layout_of(weights):
                    weights = jax.block_until_ready(jax.device_put(weights, shardings))
                else:
                    leaves, shape = jax.tree.flatten(jax.tree.broadcast(shardings, engine))
                    weights = jax.block_until_ready(_to_serving(tuple(leaves), shape)(weights))
                with self._lock:
                    if version in self._weights:  # another thread may have dropped it meanwhile
                        self._weights[version] = weights
                return weights
            self._elsewhere = True
            with self._lock:
                slices = self._host.get(version, None) if version in self._host.versions else None
            if slices is None:
                slices = sliced(weights)
                with self._lock:
                    if version in self._weights:
                        self._host.put(version, slices)
        _check(version, host_digest(slices, self._like), taken)
        return jax.block_until_ready(placed(slices, shardings))

    def drop(self, version: Version) -> None:
        with self._lock:
            self._weights.pop(version, None)
            self._digests.pop(version, None)
            self._host.drop(version)


# ------------------------------------------------------------------- private


def _held(weights: Mapping[Version, Tree], version: Version) -> Tree:
    if version not in weights:
        raise KeyError(f"version {version} is not in the weight store: it holds {sorted(weights)}")
    return weights[version]


def _check(version: Version, found: int, taken: int) -> None:
    if found != taken:
        raise RunError(
            f"version {version} is not what was published: the digest of its copy in memory is {found:016x}, and was "
            f"{taken:016x}; no engine gets it"
        )


def same_types(masters: Tree, copy: Tree) -> bool:
    """Whether a copy has the bits of the masters."""
    return all(x.dtype == y.dtype for x, y in zip(jax.tree.leaves(masters), jax.tree.leaves(copy), strict=True))


def _devices(tree: Tree) -> set[jax.Device]:
    leaf = jax.tree.leaves(tree)[0]
    return (leaf if isinstance(leaf, jax.sharding.Sharding) else leaf.sharding).device_set


def _engine_layout(weights: Tree, shardings: Tree) -> Tree:
    """The arrays or Slices in the layout of `shardings`: a pytree, or one sharding for the serving layout."""
    wanted = "serving" if isinstance(shardings, jax.sharding.Sharding) else decoder.layout_of(shardings)
    return weights if decoder.layout_of(weights) == wanted else decoder.serving_layout(weights, wanted)


@functools.lru_cache(maxsize=4)
def _to_serving(shardings: tuple[jax.sharding.Sharding, ...], shape: jax.tree_util.PyTreeDef) -> Callable[[Tree], Tree]:
    return jax.jit(decoder.serving_layout, out_shardings=jax.tree.unflatten(shape, shardings))
