"""Stage 5, train: checkpoints, written in the background, trusted only once they verify.

    <dir>/<step>/{params,opt_state,rl_state,metrics}   Orbax items; params alone is what readers want
    <dir>/<step>/manifest.json                         size and checksum of every file, written last (manifest.py)

Laws: a step whose manifest does not verify is never the latest (Orbax itself lists empty folders and saves that failed
in the background); a manifest is written by the process that saved the step, or after a restore whose digests are those
of the save (`adopt`); a save that fails is reported, cleared away and survived; nothing is deleted before something
newer has verified; no parameter that is not finite is ever saved; what `save` was given is what comes back, though the
next training step donates those buffers; a restore may use another mesh, and another dtype only where that is asked
for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import json
import logging as python_logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import type_handlers
from orbax.checkpoint.checkpoint_managers import preservation_policy
from orbax.checkpoint.options import MultiprocessingOptions

from dora_jax.base import exits, state_files
from dora_jax.base.digest import digest, digest_json
from dora_jax.base.exits import NO_ROOM, NO_ROOM_WORDS, never_print
from dora_jax.config import CheckpointSection, RunError
from dora_jax.trainer import manifest
from dora_jax.trainer.manifest import MANIFEST, TEMPORARY, Files, steps

ITEMS = ("params", "opt_state", "rl_state", "metrics")
JSON_FILES = {"rl_state": "metadata", "metrics": "metrics"}  # as Orbax names them: it knows an item called metrics
# Orbax writes its metadata once a step and complains that an item, read alone, has none; nor is it asked to merge. What
# a save fails of it logs on every thread, with the trace, and then raises: `_failed` says it once.
NOISE = (
    "Metadata file does not exist",
    "Skipping merge of OCDBT checkpoints",
    "_SignalingThread.run() raised an exception",
    "Handler Commit operations or the Commit callback",
    "[wait_until_finished] Save Finalize thread",
    "Failed to write metadata=",
    "Failed to get item metadata from directory",
    "Failed to update metadata=",
)
logging.get_absl_logger().addFilter(lambda record: not any(noise in record.getMessage() for noise in NOISE))
# Where the disk is full, Orbax leaves writes behind whose errors nobody takes, and asyncio logs each with its trace.
python_logging.getLogger("asyncio").addFilter(
    lambda record: getattr(record.exc_info and record.exc_info[1], "errno", None) not in NO_ROOM
)
STEP_METADATA = "_CHECKPOINT_METADATA"  # a file of Orbax, in every step that it has completed
UNPROVED = "unproved"  # in the name of a folder moved aside: it lacks its manifest, and no digests vouch for it
BEST_BY = "reward/mean"  # the metric by which the best steps are kept
# The writes of a save that has failed find their event loop closed. Where a piece of a checkpoint cannot be read, Orbax
# leaves its reads of the others behind; `proved` says it once.
never_print(
    lambda error: (
        (isinstance(error, RuntimeError) and str(error) == "Event loop is closed")
        or "Encountered error while reading array index" in str(error)
    )
)


WHY_CHARS = 300  # of a library's error, which may list every array


class Restored(NamedTuple):
    params: Any
    opt_state: Any
    rl_state: dict[str, Any]
    metrics: dict[str, float]


class Digests(NamedTuple):
    """Digests of what a checkpoint was given to save. 0: not known."""

    params: int
    opt_state: int
    rl_state: int  # and of the metrics beside it


class UnusableCheckpoint(ValueError):
    """A checkpoint that cannot be read, or does not restore to what was saved; the message says why."""


class Checkpoints:
    """The one writer of a checkpoint folder; used by one thread. `section`: keep, keep_best, keep_every.

    `put(folder)`: each process of the trainer has a folder of its own, and its part of a step is as good as saved once
    this has taken it to where it meets the others; what it gives is `part`, with the newest step. `adopts`: the caller
    looks at the `unsealed` steps; else they are moved aside.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        section: CheckpointSection,
        notify: Callable[[str], None] = logging.warning,
        put: Callable[[Path], Files] | None = None,
        adopts: bool = False,
    ):
        self._dir = Path(directory).absolute()
        self._dir.mkdir(parents=True, exist_ok=True)
        manifest.sync_folder(self._dir.parent)
        self._section = section
        self._notify, self._put = notify, put
        self._seals = put is not None or jax.process_index() == 0
        if self._seals:
            tidy(self._dir, notify)
            for step in [] if adopts else unsealed(self._dir):
                notify(f"checkpoint {step} has no manifest and is moved aside")
                state_files.set_aside(self._dir / str(step), why=UNPROVED)
        self._manager = _manager(self._dir, alone=put is not None)
        self.part: tuple[int, Files] | None = None
        self._finite = jax.jit(_all_finite)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "manifest")  # checksums read every byte
        self._saving: int | None = None
        self._sealing: tuple[int, concurrent.futures.Future] | None = None
        self._floor: int | None = None
        self._saves: list[tuple[int, Digests]] = []

    def save(
        self, step: int, params: Any, opt_state: Any, rl_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> bool:
        """Starts a save; the buffers are free again on return. False: it could not be started, which was reported."""
        self._settle()
        if not self._finite(params):
            raise ValueError(f"version {step} has parameters that are not finite: it is not saved")
        digests = Digests(digest(params), digest(opt_state), digest_json([dict(rl_state), dict(metrics)]))
        save = ocp.args.PyTreeSave if self._put else ocp.args.StandardSave
        args = ocp.args.Composite(
            params=save(params),
            opt_state=save(opt_state),
            rl_state=ocp.args.JsonSave(dict(rl_state)),
            metrics=ocp.args.JsonSave(dict(metrics)),
        )
        try:
            started = self._manager.save(step, args=args)
        except Exception as error:  # of Orbax, tensorstore or the file system: whatever it is, training goes on
            self._failed(step, error)
            return False
        if not started:
            raise RuntimeError(
                f"checkpoint of step {step} was refused: {self._dir} already holds step {self._manager.latest_step()}"
            )
        self._saving = step
        self._saves.append((step, digests))
        return True

    def take_saves(self, wait: bool = False) -> list[tuple[int, Digests]]:
        """The saves that were started since the last call, with digests of what they were given."""
        saves, self._saves = self._saves, []
        return saves

    def protect(self, version: int) -> None:
        """The newest step up to this version stays: samples that run at it could not go on without."""
        self._floor = version

    def poll(self) -> None:
        """Cheap; call it every step, so that a finished save gets its manifest and a failed one is reported."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.seal()
        if self._sealing is not None and self._sealing[1].done():
            self.sealed()

    def wait(self) -> None:
        """Blocks until what was saved is on disk and verified; raises where it failed."""
        if error := self._settle():
            raise RunError(f"{error}; the same command goes on from what is written")

    def latest(self, full: bool = False) -> int | None:
        self.poll()
        return latest(self._dir, full=full)

    def steps(self) -> list[int]:
        return steps(self._dir)

    def unsealed(self) -> list[int]:
        return unsealed(self._dir)

    def aside(self) -> list[str]:
        return aside(self._dir)

    def adopt(self, step: int, params: Any, opt_state: Any, digests: Digests) -> None:
        """Writes the manifest of an unsealed step whose arrays, restored as by `restore`, have these digests.
        UnusableCheckpoint: it stays as it is."""
        proved(self._dir, step, params, opt_state, digests)
        manifest.write(self._dir / str(step))
        self._manager.reload()

    def undo_after(self, version: int) -> None:
        """Steps that a fallback has undone make room for those that will be made again."""
        for step in [step for step in steps(self._dir) if step > version]:
            self._notify(f"checkpoint {step} is later than what can be recovered and is moved aside")
            self.set_aside(step, "undone")

    def set_aside(self, step: int, why: str) -> None:
        state_files.set_aside(self._dir / str(step), why=why)
        self._manager.reload()

    def restore(
        self, step: int, params: Any, opt_state: Any, digests: Digests | None = None, *, cast: bool = False
    ) -> Restored:
        """Like the function `restore`, for a step whose every byte verifies and whose contents have these digests.
        UnusableCheckpoint: it has not, or cannot be read."""
        if fault := verify(self._dir, step, full=True):
            raise UnusableCheckpoint(fault)
        try:
            return proved(self._dir, step, params, opt_state, digests, cast=cast)
        except UnusableCheckpoint as error:
            cause = error.__cause__
            unread = getattr(cause, "errno", None) == errno.EIO  # a file on a damaged disk
            if isinstance(cause, Exception) and not unread and exits.refusal(cause) is not None:
                raise cause from None  # too little memory, say: the files are as they were written
            raise

    def close(self) -> None:
        """What fails now has been reported; `wait` first where that must not be."""
        try:
            self._settle()
        finally:
            self._pool.shutdown()
            self._manager.close()

    # ------------------------------------------------------------ private

    def _settle(self) -> str | None:
        """Sees the save in flight to its end; what it failed of, if it did."""
        error = self.seal() if self._saving is not None else None
        return (self.sealed() if self._sealing is not None else None) or error

    def seal(self) -> str | None:
        """All of a step is written: its manifest is next."""
        step, self._saving = self._saving, None
        assert step is not None
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # as in `save`
            return self._failed(step, error)
        if self._seals:
            self._sealing = step, self._pool.submit(self._finish, self._dir / str(step))
        return None

    def _finish(self, root: Path) -> Files | None:
        manifest.write(root)
        return self._put(root) if self._put else None

    def sealed(self) -> str | None:
        assert self._sealing is not None
        (step, future), self._sealing = self._sealing, None
        try:
            files = future.result()
        except OSError as error:
            return self._failed(step, error)
        if files is not None:
            self.part = step, files
        # Deletes the steps that no rule keeps; one has just verified, so the newest is good
        known = steps(self._dir)
        kept = to_keep(known, self._section, self._floor, lambda step: read_json(self._dir, step, "metrics"))
        for step in known:
            if step not in kept:  # not by Orbax: its delete waits for every process, and one alone decides here
                gone = self._dir / f"{step}{TEMPORARY}.deleted"
                (self._dir / str(step)).rename(gone)
                shutil.rmtree(gone)
        for path in self._dir.glob(f"*{TEMPORARY}*"):  # of a save that failed while its other files were being written
            if not path.name.startswith(f"{self._saving}{TEMPORARY}"):
                shutil.rmtree(path, ignore_errors=True)
        self._manager.reload()
        return None

    def _failed(self, step: int, error: Exception) -> str:
        """Alarm; what is left of the step makes room."""
        why = " ".join(str(error).split())
        if full := [words for words in NO_ROOM_WORDS if words in why]:
            why = f"{self._dir}: {full[0]}"  # of which file, and how TensorStore met it, helps nobody
        sentence = f"the checkpoint of step {step} failed in the background: {why}"
        for path in self._dir.iterdir():
            if path.name == str(step) or path.name.startswith(f"{step}{TEMPORARY}"):
                with contextlib.suppress(OSError):
                    (path / MANIFEST).unlink()  # first: what is left of the step is none
                shutil.rmtree(path, ignore_errors=True)
        self._notify(f"{sentence}; training goes on, and the newest good one is {latest(self._dir)}")
        self._manager.reload()
        return sentence


# ------------------------------------------------------- readers, no writer needed


def latest(directory: str | os.PathLike, full: bool = False) -> int | None:
    """The newest step that verifies (full: checksums too, else sizes); None where there is none."""
    for step in reversed(steps(directory)):
        fault = verify(directory, step, full=full)
        if fault is None:
            return step
        logging.warning("checkpoint %s is passed over: %s", Path(directory) / str(step), fault)
    return None


def verify(directory: str | os.PathLike, step: int, full: bool = False) -> str | None:
    """What is wrong with a step's files, or None. `full` reads every byte: Orbax alone misses flipped bits."""
    return manifest.fault(Path(directory) / str(step), full)


def restore(directory: str | os.PathLike, step: int, params: Any, opt_state: Any, *, cast: bool = False) -> Restored:
    """`params`, `opt_state`: ShapeDtypeStructs with the shardings to restore onto (any mesh)."""
    return Restored(
        read_arrays(directory, step, "params", params, cast),
        read_arrays(directory, step, "opt_state", opt_state, cast),
        read_json(directory, step, "rl_state"),
        read_json(directory, step, "metrics"),
    )


def proved(
    directory: str | os.PathLike, step: int, params: Any, opt_state: Any, digests: Digests | None, *, cast: bool = False
) -> Restored:
    """Like `restore`. UnusableCheckpoint: it cannot be read, or does not have these digests."""
    try:
        restored = restore(directory, step, params, opt_state, cast=cast)
        rl_state = digest_json([restored.rl_state, restored.metrics])
        held = digests and Digests(digest(restored.params), digest(restored.opt_state), rl_state)
    except Exception as error:  # of Orbax, tensorstore, JSON or the file system: whatever the damage leads to
        raise UnusableCheckpoint(f"it cannot be read ({why(error)})") from error
    if digests and held and (fault := difference(digests, held)):
        raise UnusableCheckpoint(fault)
    return restored


def difference(wanted: Sequence[int], held: Sequence[int]) -> str | None:
    """Which items have other digests than are wanted, in a sentence; None: none. 0 is wanted of what is not known."""
    names = [name for name, a, b in zip(Digests._fields, wanted, held, strict=True) if a and a != b]
    return f"{' and '.join(names)} came back with other values than were saved" if names else None


def read_texts(read: Callable[[str], Any], wanted: int) -> tuple[dict[str, Any], dict[str, float]]:
    """(rl_state, metrics), each as `read(item)` finds it; UnusableCheckpoint: they cannot be read, or do not have this
    digest."""
    try:
        rl_state, metrics = read("rl_state"), read("metrics")
    except (ValueError, RecursionError, FileNotFoundError) as error:
        raise UnusableCheckpoint(f"it cannot be read ({why(error)})") from error
    if fault := difference((0, 0, wanted), (0, 0, digest_json([rl_state, metrics]))):
        raise UnusableCheckpoint(fault)
    return rl_state, metrics


def why(error: Exception) -> str:
    """The message of a library's error, on one line of bounded length."""
    text = " ".join(str(error).split())[:WHY_CHARS]
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__} {text}".strip()


def check_layout(directory: str | os.PathLike, step: int, item: str, like: Any) -> None:
    """ValueError: an item's metadata, by which Orbax would read it, is not of arrays like these."""
    path = Path(directory).absolute() / str(step) / item
    with ocp.StandardCheckpointer() as reader:
        stored = _stored(reader, path)
    there, wanted = (
        {_name(key): (x.shape, x.dtype) for key, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (stored, like)
    )
    if there != wanted:
        raise ValueError(f"{path}: its metadata lists other arrays than the trainer has")


def read_arrays(directory: str | os.PathLike, step: int, item: str, like: Any = None, cast: bool = False) -> Any:
    """An item of a step onto `like` (ShapeDtypeStructs with shardings); None: as stored, whole on the first device."""
    path = Path(directory).absolute() / str(step) / item
    with ocp.StandardCheckpointer() as reader:
        stored = _stored(reader, path)
        if like is None:
            one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored)
        elif not cast:  # Orbax would cast silently
            wanted = {_name(key): x.dtype for key, x in jax.tree_util.tree_leaves_with_path(like)}
            for key, leaf in jax.tree_util.tree_leaves_with_path(stored):
                name = _name(key)
                if name in wanted and wanted[name] != leaf.dtype:
                    raise ValueError(f"{path}: {name} is stored as {leaf.dtype} and was asked for as {wanted[name]}")
        return reader.restore(path, like)


def read_json(directory: str | os.PathLike, step: int, item: str) -> dict[str, Any]:
    return json.loads((Path(directory) / str(step) / item / JSON_FILES[item]).read_text())


def to_keep(
    known: Sequence[int],
    section: CheckpointSection,
    floor: int | None,
    metrics_of: Callable[[int], Mapping[str, float]],
) -> set[int]:
    """The steps to keep of those that there are, oldest first."""
    kept = set(known[-section.keep :])
    if section.keep_every:
        kept |= {step for step in known if step % section.keep_every == 0}
    if section.keep_best:
        best = {step: metrics_of(step).get(BEST_BY) for step in known}
        ranked = sorted((step for step in known if best[step] is not None), key=lambda s: (best[s], s))
        kept |= set(ranked[-section.keep_best :])
    if floor is not None:
        kept |= {max((step for step in known if step <= floor), default=known[0])}
    return kept


def unsealed(directory: str | os.PathLike) -> list[int]:
    """Steps that Orbax has completed, and that lack their manifest, oldest first. Call `tidy` before."""
    folders = [path for path in Path(directory).iterdir() if path.name.isdigit() and path.is_dir()]
    return sorted(int(path.name) for path in folders if not (path / MANIFEST).exists())


def tidy(directory: Path, notify: Callable[[str], None]) -> None:
    """Removes the half-written folders that a killed writer left, and puts broken steps aside. A complete step that
    only lacks its manifest stays: nothing here vouches for its bytes."""
    for path in sorted(directory.iterdir()):
        if TEMPORARY in path.name:
            notify(f"{path.name} was never finished and is removed")
            shutil.rmtree(path)
        elif not path.name.isdigit():
            continue
        elif not path.is_dir():
            notify(f"{path.name} is a file, no checkpoint, and is moved aside")  # it has the name of a step to come
            state_files.set_aside(path, why="broken")
        elif not (path / MANIFEST).exists():
            if not any(inside.is_file() for inside in path.rglob("*")):
                notify(f"{path.name} is empty, no checkpoint, and is removed")
                shutil.rmtree(path)
            elif not (all((path / item).is_dir() for item in ITEMS) and (path / STEP_METADATA).is_file()):
                notify(f"{path.name} is no complete checkpoint and is moved aside")
                state_files.set_aside(path, why="broken")
        elif (fault := verify(directory, int(path.name))) is not None:
            notify(f"checkpoint {path.name} cannot be trusted and is moved aside: {fault}")
            state_files.set_aside(path, why="broken")


def aside(directory: str | os.PathLike) -> list[str]:
    """Names of the folders of steps that were moved aside."""
    return sorted(path.name for path in Path(directory).glob("*") if re.fullmatch(r"\d+\.[a-z]+[.\d]*", path.name))


# ---------------------------------------------------------------- private


class _Manager(ocp.CheckpointManager):
    """Orbax reads the metrics of every step whenever it lists them, and raises where one is damaged. Which steps to
    keep is decided here (`to_keep`), so it needs none."""

    def metrics(self, step: int) -> None:
        return None


def _manager(directory: Path, alone: bool) -> ocp.CheckpointManager:
    """alone: of this process, in a folder of its own. A chunk of an array is a file then, so that the parts of all
    processes, laid over one another, are a step like any other; Orbax's usual format would have to be merged."""
    arrays, text, own = ocp.StandardCheckpointHandler, ocp.JsonCheckpointHandler, {}
    if alone:
        me = jax.process_index()
        mine = MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"part{me}")
        types = type_handlers.create_type_handler_registry((jax.Array, type_handlers.ArrayHandler(primary_host=None)))
        arrays = functools.partial(
            ocp.PyTreeCheckpointHandler, use_ocdbt=False, multiprocessing_options=mine, type_handler_registry=types
        )
        text = functools.partial(ocp.JsonCheckpointHandler, multiprocessing_options=mine)
        # made beside the save, folders are reported to be there under a name that all processes of a world share
        beside = ocp.AsyncOptions(create_directories_asynchronously=False)
        own = dict(create=False, multiprocessing_options=mine, async_options=beside)
    return _Manager(
        directory,
        options=ocp.CheckpointManagerOptions(preservation_policy=preservation_policy.PreserveAll(), **own),
        item_handlers={"params": arrays(), "opt_state": arrays(), "rl_state": text(), "metrics": text()},
    )


def _stored(reader: ocp.StandardCheckpointer, path: Path) -> Any:
    """The tree of an item's metadata. ValueError: the metadata cannot be read."""
    found = reader.metadata(path).item_metadata
    if found is None:
        raise ValueError(f"{path.name}: its metadata cannot be read")
    return found.tree


def _name(key: Any) -> str:
    """a/b/0, whether the tree is made of dictionaries, as it is read, or of named tuples, as it was written."""
    return jax.tree_util.keystr(key, simple=True, separator="/")


def _all_finite(params: Any) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array(finite))
