"""Weights by storage: versions that trainer and instances share. The durable path, and the late joiner's.

    write (every process of the trainer: what it gives) -> finish (the controller) -> read (a receiver: what it wants)

Consumes the slices of a version (`runtime.transfer.slices`), a chunk for each shard of the trainer's; produces any others. In a folder a version is v7, and
v7.partial until it is finished; in a bucket, where nothing is renamed, it is whole when the controller says so, and
nobody reads before; v7.whole says it to the next controller. Laws: what is finished is whole, and never written again;
a process writes what it gives and nothing else, so that all write about as much, and reads what it wants, each
chunk once.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import tensorstore as ts

from dora_jax.publish import Box, Slices, within
from dora_jax.runtime.durability.object_storage import RETRIES, WEIGHTS, Objects, StoreError, side_by_side
from dora_jax.runtime.transfer.transfer_manifest import Shard, refused
from dora_jax.types import Version

# A version is remade from checkpoint and journal where the machine fails, so it need not survive that: no fsync.
CONTEXT = ts.Context({"file_io_sync": False, "gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})


class Stored(Protocol):
    """StoreError: the storage did not do it."""

    def clear(self) -> None:
        """At the start of a run: what an earlier one left is made again."""

    def look(self) -> None:
        """In place of `clear`, where an earlier controller's weights are used: what of them is whole."""

    def keep_only(self, versions: Collection[Version]) -> None:
        """Drops all others; of these some may be being written."""

    def has(self, version: Version) -> bool: ...

    def write(self, version: Version, slices: Any) -> None:
        """What this process gives of it."""

    def finish(self, version: Version) -> None:
        """All parts are there: from now on the version can be read."""

    def read(self, version: Version, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
        """These parts of it; WireError where the version has no such tensors."""

    def drop(self, version: Version) -> None: ...


def weights_at(place: str) -> Stored:
    """`place`: a workdir, which may be a URL."""
    return BucketWeights(place) if "://" in place else StoredWeights(Path(place) / WEIGHTS)


class StoredWeights:
    """In a folder that all processes see."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def look(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def keep_only(self, versions: Collection[Version]) -> None:
        kept = {path for version in versions for path in (self._whole(version), self._partial(version))}
        for path in [path for path in self.folder.iterdir() if path not in kept]:
            shutil.rmtree(path)

    def has(self, version: Version) -> bool:
        return self._whole(version).exists()

    def write(self, version: Version, slices: Any) -> None:
        _write(_folder(self._partial(version)), slices)

    def finish(self, version: Version) -> None:
        if self.has(version):  # a second trainer wrote it again
            shutil.rmtree(self._partial(version))
        else:
            self._partial(version).rename(self._whole(version))

    def read(self, version: Version, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
        return _read(_folder(self._whole(version)), shards)

    def drop(self, version: Version) -> None:
        for path in (self._whole(version), self._partial(version)):
            shutil.rmtree(path, ignore_errors=True)

    def _whole(self, version: Version) -> Path:
        return self.folder / f"v{version}"

    def _partial(self, version: Version) -> Path:
        return self.folder / f"v{version}.partial"


class BucketWeights:
    """In a bucket. The controller never waits for it but in `clear`: `write` and `read` are the gangs'."""

    def __init__(self, url: str):
        self._store = Objects(url)
        self._whole: set[Version] = set()
        self._later: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="bucket", daemon=True).start()

    def clear(self) -> None:
        self._whole.clear()
        self._store.drop_folder(WEIGHTS)

    def look(self) -> None:
        self._whole = {version for version, name in self._there() if name.endswith(WHOLE)}

    def keep_only(self, versions: Collection[Version]) -> None:
        for version in {version for version, _ in self._there()}.difference(versions):
            self.drop(version)

    def has(self, version: Version) -> bool:
        return version in self._whole

    def write(self, version: Version, slices: Any) -> None:
        _write(self._at(version), slices)

    def finish(self, version: Version) -> None:
        self._whole.add(version)
        self._later.put(lambda: self._store.put(_key(version) + WHOLE, b""))  # for a controller that comes anew

    def read(self, version: Version, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
        return _read(self._at(version), shards)

    def drop(self, version: Version) -> None:
        self._whole.discard(version)
        self._later.put(lambda: (self._store.drop(_key(version) + WHOLE), self._store.drop_folder(_key(version))))

    def _there(self) -> list[tuple[Version, str]]:
        """(version, the name of an object of it)"""
        names = [key.removeprefix(f"{WEIGHTS}/v") for key in self._store.keys(WEIGHTS)]
        return [(int(name.split("/")[0].removesuffix(WHOLE)), name) for name in names]

    def _run(self) -> None:
        """In order: what was dropped after it was finished leaves no word that it is whole."""
        while True:
            with contextlib.suppress(StoreError):  # what is left over, the next `clear` deletes
                self._later.get()()

    def _at(self, version: Version) -> Place:
        return lambda name: f"{self._store.url}/{_key(version)}/{name}/"


def name_of(path: Any) -> str:
    """Of an array in a tree, as Orbax names it too."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def read_arrays(spec_of: Callable[[str], dict[str, Any]], shardings: Any) -> Any:
    """Of each stored array, what this process's devices hold."""
    leaves = {name_of(path): sharding for path, sharding in jax.tree_util.tree_leaves_with_path(shardings)}

    def load(name: str) -> jax.Array:
        store = ts.open(spec_of(name), open=True, context=CONTEXT).result()
        return jax.make_array_from_callback(store.shape, leaves[name], lambda index: store[index].read().result())

    arrays = jax.tree.unflatten(jax.tree.structure(shardings), side_by_side(load, leaves))
    return jax.block_until_ready(arrays)


# ---------------------------------------------------------------- private

WHOLE = ".whole"  # an empty object behind a version that is finished
Place = Callable[[str], Any]  # name of an array -> where it lies, as tensorstore is told


def _key(version: Version) -> str:
    return f"{WEIGHTS}/v{version}"


def _folder(folder: Path) -> Place:
    return lambda name: {"driver": "file", "path": f"{folder / name}/"}


def _write(place: Place, slices: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(slices)
    try:
        stores = [_create(place(name_of(path)), leaf) for path, leaf in leaves]
        writes = [
            store.result()[within(box, _whole(leaf))].write(leaf.at(box))
            for store, (_, leaf) in zip(stores, leaves, strict=True)
            for box in leaf.given
        ]
        for write in writes:
            write.result()
    except (ValueError, OSError) as error:  # tensorstore's statuses, as of `Objects`
        raise StoreError(" ".join(str(error).split())) from error


def _read(place: Place, shards: Sequence[Shard]) -> dict[Shard, np.ndarray]:
    def load(path: str) -> dict[Shard, np.ndarray]:
        kvstore = place(path.replace("/", "."))
        store = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True, context=CONTEXT).result()
        mine = [shard for shard in shards if shard.path == path]
        if (tuple(store.shape), store.dtype.name) != (mine[0].shape, mine[0].dtype):
            raise refused(mine[0], f"and is stored as {store.dtype.name}{list(store.shape)}")
        reads = {shard: store[within((shard.start, shard.stop), _whole(shard))].read() for shard in mine}
        return {shard: read.result() for shard, read in reads.items()}

    loaded = side_by_side(load, dict.fromkeys(shard.path for shard in shards))
    return {shard: array for part in loaded for shard, array in part.items()}


def _create(kvstore: Any, leaf: Slices) -> ts.Future:
    """A chunk is what one device of the trainer holds."""
    metadata = {
        "shape": leaf.shape,
        "data_type": leaf.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.part}},
    }
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    return ts.open(spec, create=True, open=True, context=CONTEXT)


def _whole(leaf: Slices | Shard) -> Box:
    return (0,) * len(leaf.shape), tuple(leaf.shape)
