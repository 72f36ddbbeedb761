"""Weights in storage that trainer and instances share. A late joiner finds them there, and so does the next controller.

    put (every process of the trainer: its slices) -> seal (the controller) -> get (a receiver: what its devices need)

Consumes the slices of a version (slices.py), a chunk for each shard of the trainer; produces any other slices. The
objects of version 7 are weights/v7/..., in a folder as in a bucket; weights/v7.whole tells the next controller that the
version is complete. Laws: a version that is sealed is whole, and is never written again; no process reads a version
before the controller has sealed it; a process writes its own slices and nothing else, so that all write about as much;
a process reads each chunk that it needs once; every chunk carries its crc32c, so that a flipped bit is an error at the
read, as is a chunk that is missing; what cannot be read is read again, then refused by name.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from dora_jax.publish import Tree
from dora_jax.runtime.journal.object_storage import RETRIES, WEIGHTS, Lease, Objects, StoreError, one_line, side_by_side
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.transfer_manifest import Shard, refused
from dora_jax.types import Version

# A version is made again from checkpoint and journal where the machine fails, so it need not survive that: no fsync.
CONTEXT = ts.Context({"file_io_sync": False, "gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})
READS = 2  # of an array: a bit that flipped on its way is right the second time, one that flipped in storage is not
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
WHOLE = ".whole"  # the suffix of an empty object beside a version that is sealed
OF_A_VERSION = re.compile(rf"{WEIGHTS}/v(0|[1-9]\d{{0,17}})({re.escape(WHOLE)}|/.+)", re.ASCII | re.DOTALL)


class StoredWeights:
    """`WeightStore` in a workdir, which may be a URL. Every process has one; only the controller's knows which versions
    are whole. The controller waits for the storage in `clear` and `look` alone: `put` and `get` are for the gangs. All
    of it may raise StoreError: the storage did not do it."""

    def __init__(self, place: str | Path, lease: Lease | None = None):
        """lease: the controller's, where it seals and drops versions in a bucket."""
        self._store = Objects(str(place), lease)
        self._sealed: set[Version] = set()
        self._later: queue.SimpleQueue[Callable[[], None]] | None = None
        if "://" in self._store.url:
            self._later = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._later,), name="stored weights", daemon=True).start()

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._sealed))

    def clear(self) -> None:
        """At the start of a run that uses nothing of an earlier one: deletes all versions."""
        self._sealed.clear()
        self._store.drop_folder(WEIGHTS)

    def look(self) -> None:
        """At the start of a run that takes over the gangs of an earlier controller: finds the versions that are
        whole."""
        self._sealed = {version for version, whole in self._listed() if whole}

    def keep_only(self, versions: Collection[Version]) -> None:
        """Drops all other versions. Those that are kept need not be whole."""
        for version in {version for version, _ in self._listed()}.difference(versions):
            self.drop(version)

    def put(self, version: Version, weights: Tree) -> None:
        """weights: the Slices that this process gives."""
        leaves = jax.tree_util.tree_leaves_with_path(weights)
        try:
            stores = []
            for path, leaf in leaves:
                metadata = {
                    "shape": leaf.shape,
                    "data_type": leaf.dtype.name,
                    # a chunk is what one device of the trainer holds
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.part}},
                    "codecs": CODECS,
                }
                spec = {
                    "driver": "zarr3",
                    "kvstore": self._store.spec(f"{_key(version)}/{name_of(path)}/"),
                    "metadata": metadata,
                    "store_data_equal_to_fill_value": True,  # so that a chunk that is missing is not one of zeros
                }
                stores.append(ts.open(spec, create=True, open=True, context=CONTEXT))
            writes = [
                store.result()[tuple(map(slice, *box))].write(leaf.at(box))
                for store, (_, leaf) in zip(stores, leaves, strict=True)
                for box in leaf.given
            ]
            for write in writes:
                write.result()
        except (ValueError, OSError) as error:  # tensorstore's statuses, as of `Objects`
            raise StoreError(" ".join(str(error).split())) from error

    def seal(self, version: Version) -> None:
        """Every process of the trainer has put its slices: the version is whole from now on."""
        self._sealed.add(version)
        self._soon(lambda: self._store.put(_key(version) + WHOLE, b""))

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        """The Slices that this process's devices need. shardings: stacked ShapeDtypeStructs with shardings. WireError:
        the version has no such tensors. StoreError: an array of it is damaged, or not to be had."""
        wanted = slices.wanted(shardings)

        def load(path: str) -> dict[Shard, np.ndarray]:
            mine = [shard for shard in wanted if shard.path == path]
            spec = {"driver": "zarr3", "kvstore": self._store.spec(f"{_key(version)}/{path.replace('/', '.')}/")}
            for read in range(1, READS + 1):
                try:
                    store = ts.open(spec, open=True, context=CONTEXT).result()
                    if any(codec["name"] == "crc32c" for codec in store.spec().to_json()["metadata"]["codecs"]):
                        # else it was written without checksums, and chunks of zeros were left out
                        store = ts.open(spec | {"fill_missing_data_reads": False}, open=True, context=CONTEXT).result()
                    if (tuple(store.shape), store.dtype.name) != (mine[0].shape, mine[0].dtype):
                        raise refused(mine[0], f"and is stored as {store.dtype.name}{list(store.shape)}")
                    reads = {shard: store[tuple(map(slice, shard.start, shard.stop))].read() for shard in mine}
                    return {shard: read.result() for shard, read in reads.items()}
                except (ValueError, OSError, KeyError) as error:  # tensorstore's statuses
                    if read == READS:
                        raise StoreError(
                            f"version {version} in storage is damaged: {path} was read {READS} times: {one_line(error)}"
                        ) from error
            raise AssertionError("READS is at least 1")

        loaded = side_by_side(load, dict.fromkeys(shard.path for shard in wanted))
        return slices.received(shardings, {shard: array for part in loaded for shard, array in part.items()})

    def drop(self, version: Version) -> None:
        def drop() -> None:
            self._store.drop(_key(version) + WHOLE)
            self._store.drop_folder(_key(version))

        self._sealed.discard(version)
        self._soon(drop)

    # ------------------------------------------------------------ private

    def _listed(self) -> list[tuple[Version, bool]]:
        """(version, whether this object of it says that it is whole). Objects that no run wrote are passed over."""
        found = [OF_A_VERSION.fullmatch(key) for key in self._store.keys(WEIGHTS)]
        return [(int(match[1]), match[2] == WHOLE) for match in found if match]

    def _soon(self, work: Callable[[], None]) -> None:
        """Now in a folder; in a bucket on another thread, because the caller must not wait for it."""
        if self._later is None:
            work()
        else:
            self._later.put(work)

    def _run(self, later: queue.SimpleQueue[Callable[[], None]]) -> None:
        """In order, so that a version that was dropped after it was sealed leaves no object that calls it whole."""
        while True:
            with contextlib.suppress(StoreError):  # `clear` of the next run deletes what is left over
                later.get()()


def name_of(path: jax.tree_util.KeyPath) -> str:
    """The name of an array in a tree, as Orbax has it: "layers.q_proj"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def read_arrays(spec_of: Callable[[str], dict[str, Any]], shardings: Tree) -> Tree:
    """The stored arrays on these shardings; this process reads what its devices hold. spec_of(name of an array): its
    tensorstore spec."""
    leaves = {name_of(path): sharding for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)}

    def load(name: str) -> jax.Array:
        store = ts.open(spec_of(name), open=True, context=CONTEXT).result()
        return jax.make_array_from_callback(store.shape, leaves[name], lambda index: store[index].read().result())

    arrays = jax.tree.unflatten(jax.tree.structure(shardings), side_by_side(load, leaves))
    return jax.block_until_ready(arrays)


# ---------------------------------------------------------------- private


def _key(version: Version) -> str:
    return f"{WEIGHTS}/v{version}"
