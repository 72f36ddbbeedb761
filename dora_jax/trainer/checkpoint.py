"""Stage 5, train: checkpoints, written in the background, trusted only once they verify.

    <dir>/<step>/{params,opt_state,rl_state,metrics}   Orbax items; params alone is what readers want
    <dir>/<step>/manifest.json                         size and crc32 of every file, written last

Laws: a step without a manifest that verifies is never reported as latest (Orbax itself lists empty folders and saves
that failed in the background); a failed background save raises at the next call; what `save` was given is what comes
back, though the next training step donates those buffers; a restore may use another mesh but never another dtype.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy

MANIFEST = "manifest.json"
ITEMS = ("params", "opt_state", "rl_state", "metrics")
JSON_FILES = {"rl_state": "metadata", "metrics": "metrics"}  # as Orbax names them: it knows an item called metrics
CHUNK_BYTES = 1 << 22


class Restored(NamedTuple):
    params: Any
    opt_state: Any
    rl_state: dict[str, Any]
    metrics: dict[str, float]


class Checkpoints:
    """The one writer of a checkpoint folder; used by one thread. `section`: keep."""

    def __init__(self, directory: str | os.PathLike, section: Any):
        self._dir = Path(directory).absolute()
        self._dir.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            _tidy(self._dir)
        keep = preservation_policy.AnyPreservationPolicy([preservation_policy.LatestN(section.keep)])
        arrays, text = ocp.StandardCheckpointHandler, ocp.JsonCheckpointHandler
        self._manager = ocp.CheckpointManager(
            self._dir, options=ocp.CheckpointManagerOptions(preservation_policy=keep),
            item_handlers={"params": arrays(), "opt_state": arrays(), "rl_state": text(), "metrics": text()})
        self._pending: int | None = None

    def save(self, step: int, params: Any, opt_state: Any, rl_state: Mapping[str, Any],
             metrics: Mapping[str, float]) -> None:
        """Starts a save; the buffers are free again on return. Raises what the previous save failed of."""
        self._settle()
        save = ocp.args.StandardSave
        started = self._manager.save(step, args=ocp.args.Composite(
            params=save(params), opt_state=save(opt_state),
            rl_state=ocp.args.JsonSave(dict(rl_state)), metrics=ocp.args.JsonSave(dict(metrics))))
        if not started:
            raise RuntimeError(f"checkpoint of step {step} was refused: {self._dir} already holds step "
                               f"{self._manager.latest_step()}")
        self._pending = step

    def poll(self) -> None:
        """Cheap; call it every step, so that a finished save gets its manifest and a failed one is heard of."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self._settle()

    def wait(self) -> None:
        """Blocks until what was saved is on disk and verified."""
        self._settle()

    def latest(self, full: bool = False) -> int | None:
        self.poll()
        return latest(self._dir, full=full)

    def restore(self, step: int, params: Any, opt_state: Any) -> Restored:
        """`params`, `opt_state`: ShapeDtypeStructs with the shardings to restore onto (any mesh)."""
        return Restored(read_params(self._dir, step, params), _read_arrays(self._dir, step, "opt_state", opt_state),
                        read_json(self._dir, step, "rl_state"), read_json(self._dir, step, "metrics"))

    def restore_params(self, step: int, params: Any) -> Any:
        return read_params(self._dir, step, params)

    def close(self) -> None:
        try:
            self._settle()
        finally:
            self._manager.close()

    def _settle(self) -> None:
        """Waits for the save in flight, then writes its manifest."""
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise RuntimeError(f"the checkpoint of step {step} failed in the background: {error}") from error
        if jax.process_index() == 0:
            _write_manifest(self._dir / str(step))


# ------------------------------------------------------- readers, no writer needed


def latest(directory: str | os.PathLike, full: bool = False) -> int | None:
    """The newest step that verifies (full: checksums too, else sizes); None where there is none."""
    for step in reversed(steps(directory)):
        fault = verify(directory, step, full=full)
        if fault is None:
            return step
        logging.warning("checkpoint %s is passed over: %s", Path(directory) / str(step), fault)
    return None


def steps(directory: str | os.PathLike) -> list[int]:
    """Steps with a manifest, oldest first."""
    return sorted(int(path.parent.name) for path in Path(directory).glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def verify(directory: str | os.PathLike, step: int, full: bool = False) -> str | None:
    """What is wrong with a step's files, or None. `full` reads every byte: Orbax alone misses flipped bits."""
    root = Path(directory) / str(step)
    files = json.loads((root / MANIFEST).read_text())["files"]
    for name, (size, crc) in files.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if full and _crc32(path) != crc:
            return f"{name} does not match its checksum"
    return None


def read_params(directory: str | os.PathLike, step: int, like: Any = None) -> Any:
    """Params of a step onto `like` (ShapeDtypeStructs with shardings); None: as stored, whole on the first device."""
    return _read_arrays(directory, step, "params", like)


def read_json(directory: str | os.PathLike, step: int, item: str) -> dict[str, Any]:
    return json.loads((Path(directory) / str(step) / item / JSON_FILES[item]).read_text())


# ---------------------------------------------------------------- private


def _read_arrays(directory: str | os.PathLike, step: int, item: str, like: Any) -> Any:
    path = Path(directory).absolute() / str(step) / item
    with ocp.StandardCheckpointer() as reader:
        if like is None or item == "params":
            stored = reader.metadata(path).item_metadata.tree
            like = _on_first_device(stored) if like is None else like
            _same_dtypes(stored, like, path)
        return reader.restore(path, like)


def _on_first_device(stored: Any) -> Any:
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored)


def _same_dtypes(stored: Any, like: Any, path: Path) -> None:
    """Orbax would cast silently."""
    wanted = {jax.tree_util.keystr(key): x.dtype for key, x in jax.tree_util.tree_leaves_with_path(like)}
    for key, leaf in jax.tree_util.tree_leaves_with_path(stored):
        name = jax.tree_util.keystr(key)
        if name in wanted and wanted[name] != leaf.dtype:
            raise ValueError(f"{path}: {name} is stored as {leaf.dtype} and was asked for as {wanted[name]}")


def _write_manifest(root: Path) -> None:
    """Temporary file and rename: a manifest is there whole or not at all."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST)
    listing = {str(path.relative_to(root)): (path.stat().st_size, _crc32(path)) for path in files}
    part = root / (MANIFEST + ".part")
    with part.open("w") as out:
        json.dump({"step": int(root.name), "files": listing}, out)
        out.flush()
        os.fsync(out.fileno())
    part.rename(root / MANIFEST)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _tidy(directory: Path) -> None:
    """What a killed writer left: half-written folders go, a whole step that only lacks its manifest gets one."""
    for path in directory.iterdir():
        if ".orbax-checkpoint-tmp" in path.name:
            shutil.rmtree(path)
        elif path.name.isdigit() and path.is_dir() and not (path / MANIFEST).exists():
            if all((path / item).is_dir() for item in ITEMS) and (path / "_CHECKPOINT_METADATA").is_file():
                _write_manifest(path)  # Orbax renames a step into place only when all of it is written
            else:
                logging.warning("%s is no checkpoint and is removed", path)
                shutil.rmtree(path)
        elif path.name.isdigit() and path.is_dir() and verify(directory, int(path.name)) is not None:
            path.rename(directory / f"{path.name}.broken")  # kept for a person, out of the way of the next save
