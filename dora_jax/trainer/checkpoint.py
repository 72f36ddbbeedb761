"""Stage 5, train: checkpoints, written in the background, trusted only once they verify.

    <dir>/<step>/{params,opt_state,rl_state,metrics}   Orbax items; params alone is what readers want
    <dir>/<step>/manifest.json                         size and checksum of every file, written last (manifest.py)

Laws: a step whose manifest does not verify is never the latest (Orbax itself lists empty folders and saves that failed
in the background); a save that fails is said, cleared away and survived; nothing is deleted before something newer has
verified; no parameter that is not finite is ever saved; what `save` was given is what comes back, though the next
training step donates those buffers; a restore may use another mesh, and another dtype only where that is asked for.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
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

from dora_jax.config import RunError
from dora_jax.exits import NO_ROOM_WORDS, never_print
from dora_jax.fault_injection import point
from dora_jax.trainer import manifest
from dora_jax.trainer.manifest import MANIFEST, TEMPORARY, Files, steps

ITEMS = ("params", "opt_state", "rl_state", "metrics")
JSON_FILES = {"rl_state": "metadata", "metrics": "metrics"}  # as Orbax names them: it knows an item called metrics
# Orbax writes its metadata once a step and complains that an item, read alone, has none; nor is it asked to merge. What a
# save fails of it logs on every thread, with the trace, and then raises: `_failed` says it once.
NOISE = (
    "Metadata file does not exist",
    "Skipping merge of OCDBT checkpoints",
    "_SignalingThread.run() raised an exception",
    "Handler Commit operations or the Commit callback",
    "[wait_until_finished] Save Finalize thread",
    "Failed to write metadata=",
    "Failed to update metadata=",
)
logging.get_absl_logger().addFilter(lambda record: not any(noise in record.getMessage() for noise in NOISE))
BEST_BY = "reward/mean"  # the metric by which the best steps are kept
# The writes of a save that has failed find their event loop closed.
never_print(lambda error: isinstance(error, RuntimeError) and str(error) == "Event loop is closed")


class Restored(NamedTuple):
    params: Any
    opt_state: Any
    rl_state: dict[str, Any]
    metrics: dict[str, float]


class Checkpoints:
    """The one writer of a checkpoint folder; used by one thread. `section`: keep, keep_best, keep_every.

    `put(folder)`: each process of the trainer has a folder of its own, and its part of a step is as good as saved once
    this has taken it to where it meets the others; what it gives is `part`, with the newest step.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        section: Any,
        notify: Callable[[str], None] = logging.warning,
        put: Callable[[Path], Files] | None = None,
    ):
        self._dir = Path(directory).absolute()
        self._dir.mkdir(parents=True, exist_ok=True)
        self._section = section
        self._notify, self._put = notify, put
        self._seals = put is not None or jax.process_index() == 0
        if self._seals:
            tidy(self._dir, notify)
        self._manager = _own_manager(self._dir) if put else _manager(self._dir)
        self.part: tuple[int, Files] | None = None
        self._finite = jax.jit(_all_finite)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "manifest")  # checksums read every byte
        self._saving: int | None = None
        self._sealing: tuple[int, concurrent.futures.Future] | None = None
        self._floor: int | None = None

    def save(
        self, step: int, params: Any, opt_state: Any, rl_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> bool:
        """Starts a save; the buffers are free again on return. False: it could not be started, which was said."""
        self._settle()
        if not self._finite(params):
            raise ValueError(f"version {step} has parameters that are not finite: it is not saved")
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
        point("checkpoint.started")
        return True

    def protect(self, version: int) -> None:
        """The newest step up to this version stays: samples that run at it could not go on without."""
        self._floor = version

    def poll(self) -> None:
        """Cheap; call it every step, so that a finished save gets its manifest and a failed one is heard of."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self._seal()
        if self._sealing is not None and self._sealing[1].done():
            self._sealed()

    def wait(self) -> None:
        """Blocks until what was saved is on disk and verified; raises where it failed."""
        if error := self._settle():
            raise RunError(f"{error}; the same command goes on from what is written")

    def latest(self, full: bool = False) -> int | None:
        self.poll()
        return latest(self._dir, full=full)

    def steps(self) -> list[int]:
        return steps(self._dir)

    def usable(self, step: int) -> bool:
        """Reads every byte of a step; one that cannot be trusted is put out of the way, and said."""
        fault = verify(self._dir, step, full=True)
        if fault is not None:
            self._notify(f"checkpoint {step} cannot be trusted and is stepped over: {fault}")
            self._put_aside(step, "broken")
        return fault is None

    def undo_after(self, version: int) -> None:
        """Steps that a fallback has undone make room for those that will be made again."""
        for step in [step for step in steps(self._dir) if step > version]:
            self._notify(f"checkpoint {step} is later than what can be recovered and is put aside")
            self._put_aside(step, "undone")

    def restore(self, step: int, params: Any, opt_state: Any, *, cast: bool = False) -> Restored:
        return restore(self._dir, step, params, opt_state, cast=cast)

    def close(self) -> None:
        """What fails now has been said; `wait` first where that must not be."""
        try:
            self._settle()
        finally:
            self._pool.shutdown()
            self._manager.close()

    # ------------------------------------------------------------ private

    def _settle(self) -> str | None:
        """Sees the save in flight to its end; what it failed of, if it did."""
        error = self._seal() if self._saving is not None else None
        return (self._sealed() if self._sealing is not None else None) or error

    def _seal(self) -> str | None:
        """All of a step is written: its manifest is next."""
        step, self._saving = self._saving, None
        assert step is not None
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # as in `save`
            return self._failed(step, error)
        point("checkpoint.before_manifest")
        if self._seals:
            self._sealing = step, self._pool.submit(self._finish, self._dir / str(step))
        return None

    def _finish(self, root: Path) -> Files | None:
        manifest.write(root)
        return self._put(root) if self._put else None

    def _sealed(self) -> str | None:
        assert self._sealing is not None
        (step, future), self._sealing = self._sealing, None
        try:
            files = future.result()
        except OSError as error:
            return self._failed(step, error)
        if files is not None:
            self.part = step, files
        point("checkpoint.after_manifest")
        self._forget()
        return None

    def _failed(self, step: int, error: Exception) -> str:
        """Alarm; what is left of the step makes room."""
        why = " ".join(str(error).split())
        if full := [words for words in NO_ROOM_WORDS if words in why]:
            why = f"{self._dir}: {full[0]}"  # of which file, and how TensorStore met it, helps nobody
        sentence = f"the checkpoint of step {step} failed in the background: {why}"
        self._notify(f"{sentence}; training goes on, and the newest good one is {latest(self._dir)}")
        for path in self._dir.iterdir():
            if path.name == str(step) or path.name.startswith(f"{step}{TEMPORARY}"):
                shutil.rmtree(path, ignore_errors=True)
        self._manager.reload()
        return sentence

    def _forget(self) -> None:
        """Deletes the steps that no rule keeps; one has just verified, so the newest is good."""
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

    def _put_aside(self, step: int, why: str) -> None:
        put_aside(self._dir / str(step), why)
        self._manager.reload()


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
        read_params(directory, step, params, cast=cast),
        read_arrays(directory, step, "opt_state", opt_state, cast),
        read_json(directory, step, "rl_state"),
        read_json(directory, step, "metrics"),
    )


def read_params(directory: str | os.PathLike, step: int, like: Any = None, *, cast: bool = False) -> Any:
    """Params of a step onto `like` (ShapeDtypeStructs with shardings); None: as stored, whole on the first device."""
    return read_arrays(directory, step, "params", like, cast)


def read_arrays(directory: str | os.PathLike, step: int, item: str, like: Any = None, cast: bool = False) -> Any:
    """An item of a step, `like` as in `read_params`."""
    path = Path(directory).absolute() / str(step) / item
    with ocp.StandardCheckpointer() as reader:
        stored = reader.metadata(path).item_metadata.tree
        if like is None:
            like = _on_first_device(stored)
        elif not cast:
            _same_dtypes(stored, like, path)
        return reader.restore(path, like)


def read_json(directory: str | os.PathLike, step: int, item: str) -> dict[str, Any]:
    return json.loads((Path(directory) / str(step) / item / JSON_FILES[item]).read_text())


def to_keep(
    known: Sequence[int], section: Any, floor: int | None, metrics_of: Callable[[int], Mapping[str, float]]
) -> set[int]:
    """Of the steps that there are, oldest first."""
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


def tidy(directory: Path, notify: Callable[[str], None]) -> None:
    """What a killed writer left: half-written folders go, a whole step that only lacks its manifest gets one."""
    for path in sorted(directory.iterdir()):
        if TEMPORARY in path.name:
            notify(f"{path.name} was never finished and is removed")
            shutil.rmtree(path)
        elif not path.name.isdigit() or not path.is_dir():
            continue
        elif not (path / MANIFEST).exists():
            if all((path / item).is_dir() for item in ITEMS) and (path / "_CHECKPOINT_METADATA").is_file():
                manifest.write(path)  # Orbax renames a step into place only when all of it is written
            else:
                notify(f"{path.name} is no checkpoint and is removed")
                shutil.rmtree(path)
        elif (fault := verify(directory, int(path.name))) is not None:
            notify(f"checkpoint {path.name} cannot be trusted and is put aside: {fault}")
            put_aside(path, "broken")


def put_aside(path: Path, why: str) -> None:
    """Kept for a person, out of the way of the next save."""
    target = path.with_name(f"{path.name}.{why}")
    again = 1
    while target.exists():
        again += 1
        target = path.with_name(f"{path.name}.{why}{again}")
    path.rename(target)


# ---------------------------------------------------------------- private


def _manager(directory: Path) -> ocp.CheckpointManager:
    arrays, text = ocp.StandardCheckpointHandler, ocp.JsonCheckpointHandler
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(preservation_policy=preservation_policy.PreserveAll()),
        item_handlers={"params": arrays(), "opt_state": arrays(), "rl_state": text(), "metrics": text()},
    )


def _own_manager(directory: Path) -> ocp.CheckpointManager:
    """Of this process alone, in a folder of its own. A chunk of an array is a file, so that the parts of all processes,
    laid over one another, are a step like any other; Orbax's usual format would have to be merged."""
    me = jax.process_index()
    alone = MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"part{me}")
    types = type_handlers.create_type_handler_registry((jax.Array, type_handlers.ArrayHandler(primary_host=None)))

    def arrays() -> ocp.PyTreeCheckpointHandler:
        return ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone, type_handler_registry=types)

    def text() -> ocp.JsonCheckpointHandler:
        return ocp.JsonCheckpointHandler(multiprocessing_options=alone)

    options = ocp.CheckpointManagerOptions(
        create=False,
        multiprocessing_options=alone,
        preservation_policy=preservation_policy.PreserveAll(),
        # made beside the save, folders are said to be there under a name that all processes of a world share
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(
        directory,
        options=options,
        item_handlers={"params": arrays(), "opt_state": arrays(), "rl_state": text(), "metrics": text()},
    )


def _on_first_device(stored: Any) -> Any:
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored)


def _same_dtypes(stored: Any, like: Any, path: Path) -> None:
    """Orbax would cast silently."""
    wanted = {_name(key): x.dtype for key, x in jax.tree_util.tree_leaves_with_path(like)}
    for key, leaf in jax.tree_util.tree_leaves_with_path(stored):
        name = _name(key)
        if name in wanted and wanted[name] != leaf.dtype:
            raise ValueError(f"{path}: {name} is stored as {leaf.dtype} and was asked for as {wanted[name]}")


def _name(key: Any) -> str:
    """a/b/0, whether the tree is made of dictionaries, as it is read, or of named tuples, as it was written."""
    return jax.tree_util.keystr(key, simple=True, separator="/")


def _all_finite(params: Any) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array(finite))
