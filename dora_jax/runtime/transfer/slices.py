"""The slices of a version that travel: what a receiver needs of the stacked tensors, and which process gives which
part.

    source    offered(copy) -> slices         one of the processes that hold a shard of the trainer's gives it
              pieces(slices, wanted)          the part of what a receiver wants that this process gives
    receiver  wanted(like)                    the boxes that this process's devices need, as few as can be
              sums(slices, shards)            what proves them, see box_digest.py
              received(like, got) -> slices   in host memory; `publish.placed` brings them to the devices

Consumes shardings and `publish.Slices`; produces shards that wire and storage carry. Laws: all processes of a world
deal out the same shards, so that one of them gives each, and all give about as many bytes; a receiver gets every
element that its devices need, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from dora_jax.base.box_digest import Box, LeafBox, Sums, box_of, common, sums_of, volume, within
from dora_jax.publish import Slices, Tree, name_of, sliced
from dora_jax.runtime.transfer.transfer_manifest import Shard, refused, sound, turns

Leaf: TypeAlias = np.ndarray | jax.Array | jax.ShapeDtypeStruct | Slices
Holders = dict[Box, list[int]]  # of one tensor: each box -> the processes that hold it


def offered(copy: Tree) -> Tree:
    """The shards of the trainer's copy that this process gives, as Slices on their way to host memory."""
    giver = _givers(dict(_named(copy)))
    return sliced(copy, lambda path, box: giver[path, box] == jax.process_index())


def writers(copy: Tree) -> dict[int, int]:
    """Bytes that each process of the world gives of such a copy (arrays, or ShapeDtypeStructs with shardings)."""
    leaves = dict(_named(copy))
    given: dict[int, int] = {}
    for (path, box), process in _givers(leaves).items():
        given[process] = given.get(process, 0) + volume(box) * leaves[path].dtype.itemsize
    return given


def wanted(like: Tree) -> tuple[Shard, ...]:
    """The shards that this process's devices need; boxes that together make one box are one shard. `like`: stacked
    ShapeDtypeStructs with shardings."""
    me = jax.process_index()
    return tuple(
        shard_of(path, leaf, box)
        for path, leaf in _named(like)
        for box, holders in _joined(_holders(leaf)).items()
        if me in holders
    )


def pieces(slices: Tree, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
    """The arrays that this process gives of these shards. WireError: a shard is no part of the version's tensors."""
    leaves = dict(_named(slices))
    found: dict[Shard, np.ndarray] = {}
    for shard in shards:
        leaf = leaves.get(shard.path)
        if leaf is None:
            raise refused(shard, "and nothing of that name is there")
        if leaf.shape != shard.shape or leaf.dtype.name != shard.dtype:
            raise refused(shard, f"and it is {leaf.dtype.name}{list(leaf.shape)} here")
        if not sound(shard, leaf.dtype.itemsize):
            raise refused(shard, "and is no part of it")
        for box in leaf.given:
            if (part := common(box, (shard.start, shard.stop))) is not None:
                found[shard_of(shard.path, leaf, part)] = leaf.at(box)[within(part, box)]
    return found


def received(like: Tree, got: Mapping[Shard, np.ndarray]) -> Tree:
    """Tree of Slices, for the devices of `like` and for other receivers. `got`: the shards that were `wanted`."""
    leaves = dict(_named(like))
    giver = _givers(leaves, {path: _joined(_holders(leaf)) for path, leaf in leaves.items()})
    arrays: dict[str, dict[Box, np.ndarray | jax.Array]] = {path: {} for path in leaves}
    for shard, array in got.items():
        arrays[shard.path][shard.start, shard.stop] = array
    found = []
    for path, leaf in leaves.items():
        mine, part = arrays[path], leaf.sharding.shard_shape(leaf.shape)
        given = frozenset(box for box in mine if giver[path, box] == jax.process_index())
        found.append(Slices(tuple(leaf.shape), np.dtype(leaf.dtype), part, mine, given))
    return jax.tree.unflatten(jax.tree.structure(like), found)


def sums(slices: Tree, shards: Sequence[Shard]) -> tuple[Sums, ...]:
    """The sums of these shards of stacked Slices; over all shards of a world, each once, they make up the digest."""
    leaves = {path: (number, leaf) for number, (path, leaf) in enumerate(_named(slices))}
    boxes = []
    for shard in shards:
        number, leaf = leaves[shard.path]
        boxes.append(LeafBox(leaf.at((shard.start, shard.stop)), number, shard.start, shard.shape))
    return tuple(sums_of(boxes))


def shard_of(path: str, leaf: Leaf, box: Box | None = None) -> Shard:
    """The shard of this box; None: of all of it. `leaf`: the whole array, or what describes it."""
    box = box or ((0,) * len(leaf.shape), tuple(leaf.shape))
    return Shard(
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        start=box[0],
        stop=box[1],
        bytes=volume(box) * leaf.dtype.itemsize,
    )


# ---------------------------------------------------------------- private


def _named(tree: Tree) -> list[tuple[str, Any]]:
    """(name, leaf) of all leaves."""
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _holders(leaf: jax.Array | jax.ShapeDtypeStruct) -> Holders:
    """The holders of each box among all processes of the world."""
    holders: Holders = {}
    for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
        processes = holders.setdefault(box_of(index, leaf.shape), [])
        if device.process_index not in processes:
            processes.append(device.process_index)
    return holders


def _joined(holders: Holders) -> Holders:
    """The joined boxes, where those of each process make one box and the boxes of any two processes are equal or
    disjoint; else the boxes as they are."""
    joined: Holders = {}
    for process in {process for processes in holders.values() for process in processes}:
        mine = [box for box, processes in holders.items() if process in processes]
        hull = (tuple(map(min, zip(*(start for start, _ in mine)))), tuple(map(max, zip(*(stop for _, stop in mine)))))
        if volume(hull) != sum(map(volume, mine)):
            return holders
        joined.setdefault(hull, []).append(process)
    apart = all(common(a, b) is None for a in joined for b in joined if a != b)
    return joined if apart else holders


def _givers(leaves: Mapping[str, Any], holders: Mapping[str, Holders] | None = None) -> dict[tuple[str, Box], int]:
    """The process that gives each box. holders None: of the boxes as they lie."""
    holders = holders or {path: _holders(leaf) for path, leaf in leaves.items()}
    boxes = [(path, box) for path in holders for box in holders[path]]
    sizes = [volume(box) * leaves[path].dtype.itemsize for path, box in boxes]
    return dict(zip(boxes, turns(sizes, [holders[path][box] for path, box in boxes]), strict=True))
