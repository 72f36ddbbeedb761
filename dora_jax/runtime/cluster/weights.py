"""Weights by storage: versions as folders that trainer and instances share. The durable path, and the late joiner's.

    write (every process of the trainer: its shards, into v7.partial) -> finish (the controller: v7) -> read

Consumes a version in the serving layout; produces the same weights on any other mesh. Laws: a folder without
".partial" is whole, and never written again; a process reads and writes what its own devices hold and nothing else.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from dora_jax.types import Version

# A version is remade from checkpoint and journal where the machine fails, so it need not survive that: no fsync.
CONTEXT = ts.Context({"file_io_sync": False})


class StoredWeights:
    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def clear(self) -> None:
        """At the start of a run: what an earlier one left is made again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def has(self, version: Version) -> bool:
        return self._whole(version).exists()

    def write(self, version: Version, weights: Any) -> None:
        """This process's part of it; each slice is written by the process that holds its first copy."""
        partial = self._partial(version)
        leaves = jax.tree_util.tree_leaves_with_path(weights)
        stores = [_create(partial / _name(path), leaf) for path, leaf in leaves]
        writes = [store.result()[shard.index].write(np.asarray(shard.data))
                  for store, (_, leaf) in zip(stores, leaves, strict=True)
                  for shard in leaf.addressable_shards if shard.replica_id == 0]
        for write in writes:
            write.result()

    def finish(self, version: Version) -> None:
        """All parts are there: from now on the version can be read."""
        if self.has(version):  # a second trainer wrote it again
            shutil.rmtree(self._partial(version))
        else:
            self._partial(version).rename(self._whole(version))

    def read(self, version: Version, shardings: Any) -> Any:
        """On `shardings` (a pytree of the serving layout)."""
        whole = self._whole(version)
        stores = jax.tree_util.tree_map_with_path(lambda path, _: _open(whole / _name(path)), shardings)
        weights = jax.tree.map(lambda store, sharding: _load(store.result(), sharding), stores, shardings)
        return jax.block_until_ready(weights)

    def drop(self, version: Version) -> None:
        for path in (self._whole(version), self._partial(version)):
            shutil.rmtree(path, ignore_errors=True)

    def _whole(self, version: Version) -> Path:
        return self.folder / f"v{version}"

    def _partial(self, version: Version) -> Path:
        return self.folder / f"v{version}.partial"


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _spec(path: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}


def _create(path: Path, leaf: jax.Array) -> ts.Future:
    """A chunk is what one device holds."""
    chunk = leaf.sharding.shard_shape(leaf.shape)
    metadata = {"shape": leaf.shape, "data_type": leaf.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}}
    return ts.open({**_spec(path), "metadata": metadata}, create=True, open=True, context=CONTEXT)


def _open(path: Path) -> ts.Future:
    return ts.open(_spec(path), open=True, context=CONTEXT)


def _load(store: ts.TensorStore, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(store.shape, sharding, lambda index: store[index].read().result())
