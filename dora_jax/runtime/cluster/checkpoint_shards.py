"""Checkpoints of a cluster: the trainer's processes write them, the controller keeps them.

    in a folder    Checkpoints of all processes together -> StepFolder, to which they are steps like any other
    in a bucket    Checkpoints of each process (a scratch folder of its own) -> calls.Part of all -> StepBucket.seal

Consumes scratch folders in which a chunk of an array is a file; produces URL/checkpoints/STEP, which a run in one
process reads too. Laws: a step in a bucket gets its manifest last, from the controller, when every process of one gang
has reported what it put, and the bucket lists all of it; a step without is none, and is swept when a run begins; arrays
never come to the controller but to be checked.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from dora_jax.base import state_files
from dora_jax.config import CheckpointSection, ConfigError
from dora_jax.runtime.common.seams import Tree
from dora_jax.runtime.journal import object_storage, workdir_mirror
from dora_jax.runtime.journal.object_storage import STEPS, Lease, Objects, StoredSteps, StoreError
from dora_jax.runtime.transfer.weight_storage import name_of, read_arrays
from dora_jax.trainer import checkpoint, manifest
from dora_jax.trainer.manifest import Files
from dora_jax.types import Version

CHUNK = re.compile(r".+/[0-9.]+")  # of an array; what has another name all processes write alike
BAD_BATCHES = "bad_batch_*"  # left for a person by trainer/health.py
OCDBT = "manifest.ocdbt"  # an item that has it was written by a run in one process


class StepFolder:
    """The checkpointed steps, as the controller sees them, in a folder that all processes see. OSError: the storage did
    not do it."""

    def __init__(self, folder: Path, notify: Callable[[str], None]):
        self._folder, self._notify = folder.absolute(), notify
        self._folder.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Removes what is half done. Nothing may write meanwhile."""
        checkpoint.tidy(self._folder, self._notify)

    def steps(self) -> list[Version]:
        """The steps with a manifest."""
        return checkpoint.steps(self._folder)

    def unsealed(self) -> list[Version]:
        """The steps that are complete but for their manifest."""
        return checkpoint.unsealed(self._folder)

    def aside(self) -> list[str]:
        """Names of the folders of steps that were moved aside."""
        return checkpoint.aside(self._folder)

    def fault(self, step: Version) -> str | None:
        """Reads every byte of the step; returns what is wrong with it, or None."""
        return checkpoint.verify(self._folder, step, full=True)

    def read_json(self, step: Version, item: str) -> dict[str, Any]:
        return checkpoint.read_json(self._folder, step, item)

    def set_aside(self, step: Version, why: str) -> None:
        """Takes the step off the list; `why` names the folder that keeps it."""
        state_files.set_aside(self._folder / str(step), why=why)

    def seal(self, step: Version, parts: Sequence[Files] | None = None) -> None:
        """Writes the manifest of a step: of an unsealed one, or, in a bucket only, of the files that each process of
        one gang has put: `parts`."""
        if parts is not None:
            raise RuntimeError("in a folder the processes of the trainer seal a step themselves")
        manifest.write(self._folder / str(step))


class StepBucket:
    """Like StepFolder, in a bucket. A step that is moved aside is deleted."""

    def __init__(self, url: str, lease: Lease | None = None):
        self._store = Objects(url, lease)
        self._stored = StoredSteps(self._store)
        self._stored.look()
        self.tidy = self._stored.sweep

    def steps(self) -> list[Version]:
        return sorted(self._stored.whole)

    def unsealed(self) -> list[Version]:
        return []  # no process says that it has put all of one

    def aside(self) -> list[str]:
        return []

    def fault(self, step: Version) -> str | None:
        if (vouched := self._stored.whole.get(step)) is None:
            return "it has no manifest"
        folder = f"{STEPS}/{step}/"

        def held(key: str) -> manifest.Held | None:
            data = self._store.get(key)
            return None if data is None else (len(data), zlib.crc32(data))

        keys = self._store.keys(folder[:-1])
        there = dict(zip(keys, object_storage.side_by_side(held, keys), strict=True))
        return manifest.fault_of(vouched, step, lambda name: there.get(folder + name))

    def read_json(self, step: Version, item: str) -> dict[str, Any]:
        name = f"{STEPS}/{step}/{item}/{checkpoint.JSON_FILES[item]}"
        if (data := self._store.get(name)) is None:
            raise StoreError(f"{self._store.url}: {name} is not there")
        return json.loads(data)

    def set_aside(self, step: Version, why: str) -> None:
        self._stored.drop(step)

    def seal(self, step: Version, parts: Sequence[Files] | None = None) -> None:
        if parts is None:
            raise RuntimeError("in a bucket a step without a manifest is none")
        files: Files = {}
        for part in parts:
            if twice := set(files) & set(part):
                raise RuntimeError(f"two processes put {min(twice)} of step {step}")
            files |= part
        folder = f"{STEPS}/{step}/"
        if missing := {folder + name for name in files} - set(self._store.keys(folder[:-1])):
            raise StoreError(f"{min(missing)} was put, and is not there")
        self._stored.seal(step, manifest.text(step, dict(sorted(files.items()))).encode())
        self._stored.sweep(before=step)  # of those that not all processes came to put


StepStore = StepFolder | StepBucket


def steps_at(place: str, notify: Callable[[str], None], lease: Lease | None = None) -> StepStore:
    """`place`: a workdir, which may be a URL."""
    if "://" not in place:
        return StepFolder(Path(place) / STEPS, notify)
    try:
        return StepBucket(place, lease)
    except OSError as error:
        raise ConfigError(f"workdir: {place} cannot be used: {error}") from error


# ------------------------------------------------------- of a process of the trainer


class CheckpointWriter:
    """A process of the trainer writes checkpoints: into the workdir that all of them see, together with the others; or,
    where that is a bucket, its shards into a scratch folder of its own, from which it uploads them. What the bucket
    does not have yet is lost with the gang."""

    def __init__(self, place: str, rank: int):
        self._bucket, self._store, self._rank = "://" in place, Objects(place), rank
        self.speaks = self._bucket or rank == 0  # of what befalls a checkpoint, or its part of one
        self.folder = workdir_mirror.scratch(place, f"trainer.{rank}") if self._bucket else Path(place)
        if self._bucket:
            for path in self.folder.glob(BAD_BATCHES):  # an earlier gang ended over it
                self._store.put(path.name, path.read_bytes())
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def checkpoints(self, section: CheckpointSection, notify: Callable[[str], None]) -> checkpoint.Checkpoints:
        if not self._bucket:
            return checkpoint.Checkpoints(self.folder / STEPS, section, notify)
        newest = dataclasses.replace(section, keep=1, keep_best=0, keep_every=0)  # the bucket has the others
        return checkpoint.Checkpoints(self.folder / STEPS, newest, notify, self._put)

    def restore(self, step: Version, params: Tree, opt_state: Tree, unsealed: bool = False) -> tuple[Tree, Tree]:
        """(params, opt_state) of a step, laid out as `params` and `opt_state` say: ShapeDtypeStructs with shardings of
        any mesh. Each process reads what its own devices hold and waits for no other, so that one may fail alone.
        unsealed: nothing vouches for its files: the metadata by which Orbax finds the arrays is checked too."""
        if unsealed and self._bucket:
            raise ValueError("in a bucket a step without a manifest is none")
        items = {"params": params, "opt_state": opt_state}
        for item, like in items.items() if unsealed else ():
            checkpoint.check_layout(self.folder / STEPS, step, item, like)
        restored = [_item(self._store, f"{STEPS}/{step}/{item}", like) for item, like in items.items()]
        return restored[0], restored[1]

    def _put(self, root: Path) -> Files:
        files = {
            name: entry for name, entry in manifest.listing(root).items() if self._rank == 0 or CHUNK.fullmatch(name)
        }
        object_storage.push_part(self._store.put, root, files)
        return files


def _item(store: Objects, folder: str, like: Tree) -> Tree:
    merged = store.get(folder + "/" + OCDBT) is not None

    def spec_of(name: str) -> dict[str, Any]:
        whole = {"driver": "ocdbt", "base": store.spec(f"{folder}/"), "path": f"{name}/"}
        return {"driver": "zarr", "kvstore": whole if merged else store.spec(f"{folder}/{name}/")}

    def check(path: jax.tree_util.KeyPath, found: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{store.url}/{folder}/{name_of(path)} is {found.dtype}{list(found.shape)}, and was asked for as "
                f"{wanted.dtype}{list(wanted.shape)}"
            )
        return found

    arrays = read_arrays(spec_of, jax.tree.map(lambda x: x.sharding, like))
    return jax.tree_util.tree_map_with_path(check, arrays, like)
