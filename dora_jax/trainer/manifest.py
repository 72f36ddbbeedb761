"""Stage 5, train: what a checkpoint folder must hold to be believed.

    <step>/manifest.json    {"step", "files": {name: [bytes, crc32]}, "tree": sha256 of that listing}, written last

Orbax checks its own metadata but not the payload: a flipped bit in an array file restores as other weights. Laws: a
manifest is there whole or not at all, after everything that it names is on the disk; `fault` gives a sentence or None
for whatever a folder holds, and never raises for what is in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dora_jax.base import state_files

MANIFEST = "manifest.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
CHUNK_BYTES = 1 << 22

Files = dict[str, list[int]]  # name -> [bytes, crc32]
Held = tuple[int | None, int | None]  # bytes and crc32; None: it is not looked at


def steps(directory: str | os.PathLike) -> list[int]:
    """Steps with a manifest, oldest first."""
    return sorted(int(path.parent.name) for path in Path(directory).glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def write(root: Path) -> None:
    """Reads every file once, makes it durable, then puts the manifest in place."""
    paths = sorted(path for path in root.rglob("*") if path.is_file() and MANIFEST not in path.name)  # nor half a one
    files = {str(path.relative_to(root)): [path.stat().st_size, checksum(path, durable=True)] for path in paths}
    state_files.replace(root / MANIFEST, text(int(root.name), files).encode())
    for folder in [root.parent, root, *(path for path in root.rglob("*") if path.is_dir())]:
        sync_folder(folder)


def fault(root: Path, full: bool) -> str | None:
    """What is wrong with a step's folder. `full` reads every byte; otherwise names and sizes."""

    def held(name: str) -> Held | None:
        path = root / name
        return (path.stat().st_size, checksum(path) if full else None) if path.is_file() else None

    try:
        return fault_of((root / MANIFEST).read_bytes(), int(root.name), held)
    except FileNotFoundError:
        return "it has no manifest"
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EISDIR):
            raise
        return f"{error.filename or root} cannot be read: {error.strerror}"


def fault_of(vouched: bytes, step: int, held: Callable[[str], Held | None]) -> str | None:
    """Like `fault`, for files that lie anywhere: `held(name)` is what is there of one, None where nothing is."""
    try:
        manifest = json.loads(vouched)
        files = _listing(manifest)
    except (ValueError, RecursionError):
        return "its manifest is not what was written"
    if manifest["tree"] != tree_hash(files) or manifest["step"] != step:
        return "its manifest does not match its own hash"
    for name, (size, crc) in files.items():
        found = held(name)
        if found is None:
            return f"{name} is missing"
        if found[0] not in (None, size):
            return f"{name} has {found[0]} bytes, not {size}"
        if found[1] not in (None, crc):
            return f"{name} does not match its checksum"
    return None


def text(step: int, files: Files) -> str:
    return json.dumps({"step": step, "files": files, "tree": tree_hash(files)})


def listing(root: Path) -> Files:
    """The listing of a step that verifies."""
    return _listing(json.loads((root / MANIFEST).read_bytes()))


def tree_hash(files: Files) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def checksum(path: Path, durable: bool = False) -> int:
    """crc32 of a file's bytes; durable: they are on the disk on return."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
        if durable:
            os.fsync(file.fileno())
    return crc


def _listing(manifest: Any) -> Files:
    if not isinstance(manifest, dict) or set(manifest) != {"step", "files", "tree"}:
        raise ValueError("not a manifest")
    files = manifest["files"]
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise ValueError("not a listing")
    return files


def sync_folder(folder: Path) -> None:
    """A rename is durable once the folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
