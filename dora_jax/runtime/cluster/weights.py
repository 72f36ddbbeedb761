"""Weights by storage: versions that trainer and instances share. The durable path, and the late joiner's.

    write (every process of the trainer: its shards) -> finish (the controller) -> read

Consumes a version in the serving layout; produces the same weights on any other mesh. In a folder a version is v7, and
v7.partial until it is finished; in a bucket, where nothing is renamed, it is whole when the controller says so, and
nobody reads before; v7.whole says it to the next controller. Laws: what is finished is whole, and never written again;
a process reads and writes what its own devices hold and nothing else.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import tensorstore as ts

from dora_jax.runtime.bucket import RETRIES, WEIGHTS, Objects, StoreError, side_by_side
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

    def write(self, version: Version, weights: Any) -> None:
        """This process's part of it; each slice is written by the process that holds its first copy."""

    def finish(self, version: Version) -> None:
        """All parts are there: from now on the version can be read."""

    def read(self, version: Version, shardings: Any) -> Any:
        """On `shardings` (a pytree of the serving layout)."""

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

    def write(self, version: Version, weights: Any) -> None:
        _write(_folder(self._partial(version)), weights)

    def finish(self, version: Version) -> None:
        if self.has(version):  # a second trainer wrote it again
            shutil.rmtree(self._partial(version))
        else:
            self._partial(version).rename(self._whole(version))

    def read(self, version: Version, shardings: Any) -> Any:
        return _read(_folder(self._whole(version)), shardings)

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

    def write(self, version: Version, weights: Any) -> None:
        _write(self._at(version), weights)

    def finish(self, version: Version) -> None:
        self._whole.add(version)
        self._later.put(lambda: self._store.put(_key(version) + WHOLE, b""))  # for a controller that comes anew

    def read(self, version: Version, shardings: Any) -> Any:
        return _read(self._at(version), shardings)

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


def _write(place: Place, weights: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    try:
        stores = [_create(place(name_of(path)), leaf) for path, leaf in leaves]
        writes = [store.result()[shard.index].write(np.asarray(shard.data))
                  for store, (_, leaf) in zip(stores, leaves, strict=True)
                  for shard in leaf.addressable_shards if shard.replica_id == 0]
        for write in writes:
            write.result()
    except (ValueError, OSError) as error:  # tensorstore's statuses, as of `Objects`
        raise StoreError(" ".join(str(error).split())) from error


def _read(place: Place, shardings: Any) -> Any:
    return read_arrays(lambda name: {"driver": "zarr3", "kvstore": place(name)}, shardings)


def _create(kvstore: Any, leaf: jax.Array) -> ts.Future:
    """A chunk is what one device holds."""
    chunk = leaf.sharding.shard_shape(leaf.shape)
    metadata = {"shape": leaf.shape, "data_type": leaf.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}}
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    return ts.open(spec, create=True, open=True, context=CONTEXT)
