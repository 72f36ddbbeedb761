"""Which slices of a version travel: what a receiver wants of the stacked tensors, and which process gives which part.

    source    offered(copy) -> slices         every shard of the trainer's is given by one of the processes that hold it
              pieces(slices, wanted)          what this process gives of what a receiver wants
    receiver  wanted(like)                    the boxes that this process's devices need, as few as can be
              received(like, got) -> slices   on the host; `publish.placed` brings them to the devices

Consumes shardings and `publish.Slices`; produces shards that wire and storage carry. Laws: all processes of a world
deal out the same shards, so each is given by one of them, and all give about as many bytes; a receiver gets every
element that its devices need, and each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dora_jax.publish import Box, Slices, box_of, common, name_of, sliced, volume, within
from dora_jax.runtime.transfer.transfer_manifest import Shard, refused, sound, turns

Holders = dict[Box, list[int]]  # of one tensor: each box, and the processes that hold it


def offered(copy: Any) -> Any:
    """Of the trainer's copy, the shards that this process gives: on their way to host memory."""
    giver = _givers({path: _holders(leaf) for path, leaf in _named(copy)}, _itemsizes(copy))
    return sliced(copy, lambda path, box: giver[path, box] == jax.process_index())


def writers(copy: Any) -> dict[int, int]:
    """Bytes that each process of the world gives of such a copy (arrays, or ShapeDtypeStructs with shardings)."""
    leaves = dict(_named(copy))
    given: dict[int, int] = {}
    for (path, box), process in _givers({p: _holders(leaf) for p, leaf in leaves.items()}, _itemsizes(copy)).items():
        given[process] = given.get(process, 0) + volume(box) * leaves[path].dtype.itemsize
    return given


def wanted(like: Any) -> tuple[Shard, ...]:
    """`like`: stacked ShapeDtypeStructs with shardings. Boxes that together are one are wanted as one."""
    me = jax.process_index()
    return tuple(
        shard_of(path, leaf, box)
        for path, leaf in _named(like)
        for box, holders in _joined(_holders(leaf)).items()
        if me in holders
    )


def pieces(slices: Any, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
    """WireError where something else is wanted than the version's tensors."""
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


def received(like: Any, got: Mapping[Shard, np.ndarray]) -> Any:
    """Tree of Slices, for `like`'s devices and for other receivers."""
    boxes = {path: _joined(_holders(leaf)) for path, leaf in _named(like)}
    giver, me = _givers(boxes, _itemsizes(like)), jax.process_index()
    arrays: dict[str, dict[Box, np.ndarray]] = {path: {} for path in boxes}
    for shard, array in got.items():
        arrays[shard.path][shard.start, shard.stop] = array

    def slices(path: Any, leaf: Any) -> Slices:
        mine = arrays[name_of(path)]
        given = frozenset(box for box in mine if giver[name_of(path), box] == me)
        return Slices(tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding.shard_shape(leaf.shape), mine, given)

    return jax.tree_util.tree_map_with_path(slices, like)


def shard_of(path: str, leaf: Any, box: Box) -> Shard:
    """`leaf`: the whole array, or what describes it."""
    return Shard(
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        start=box[0],
        stop=box[1],
        bytes=volume(box) * leaf.dtype.itemsize,
    )


# ---------------------------------------------------------------- private


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _itemsizes(tree: Any) -> dict[str, int]:
    return {path: leaf.dtype.itemsize for path, leaf in _named(tree)}


def _holders(leaf: Any) -> Holders:
    """In the whole world."""
    holders: Holders = {}
    for device, index in leaf.sharding.devices_indices_map(tuple(leaf.shape)).items():
        processes = holders.setdefault(box_of(index, leaf.shape), [])
        if device.process_index not in processes:
            processes.append(device.process_index)
    return holders


def _joined(holders: Holders) -> Holders:
    """Where the boxes of each process are together one, and those of any two are the same one or have nothing in
    common: these. Else as they are."""
    joined: Holders = {}
    for process in {process for processes in holders.values() for process in processes}:
        mine = [box for box, processes in holders.items() if process in processes]
        hull = (tuple(map(min, zip(*(start for start, _ in mine)))), tuple(map(max, zip(*(stop for _, stop in mine)))))
        if volume(hull) != sum(map(volume, mine)):
            return holders
        joined.setdefault(hull, []).append(process)
    apart = all(common(a, b) is None for a in joined for b in joined if a != b)
    return joined if apart else holders


def _givers(holders: Mapping[str, Holders], itemsizes: Mapping[str, int]) -> dict[tuple[str, Box], int]:
    """Of each box the process that gives it."""
    boxes = [(path, box) for path in holders for box in holders[path]]
    takers = turns([volume(box) * itemsizes[path] for path, box in boxes], [holders[path][box] for path, box in boxes])
    return dict(zip(boxes, takers, strict=True))
