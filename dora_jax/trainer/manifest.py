"""Stage 5, train: what a checkpoint folder must hold to be believed.

    <step>/manifest.json    {"step", "files": {name: [bytes, crc32]}, "tree": sha256 of that listing}, written last

Orbax checks its own metadata but not the payload: a flipped bit in an array file restores as other weights. Laws: a
manifest is there whole or not at all, after everything that it names is on the disk; `fault` gives a sentence or None
for whatever a folder holds, and never raises for what is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

from dora_jax.fault import point

MANIFEST = "manifest.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
CHUNK_BYTES = 1 << 22


def steps(directory: str | os.PathLike) -> list[int]:
    """Steps with a manifest, oldest first."""
    return sorted(int(path.parent.name) for path in Path(directory).glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def write(root: Path) -> None:
    """Reads every file once, makes it durable, then puts the manifest in place."""
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {str(path.relative_to(root)): [path.stat().st_size, checksum(path, durable=True)] for path in paths}
    part = root / (MANIFEST + ".part")
    with part.open("w") as out:
        json.dump({"step": int(root.name), "files": files, "tree": tree_hash(files)}, out)
        out.flush()
        os.fsync(out.fileno())
    point("checkpoint.half_manifest")
    part.rename(root / MANIFEST)
    for folder in [root.parent, root, *(path for path in root.rglob("*") if path.is_dir())]:
        _sync(folder)


def fault(root: Path, full: bool) -> str | None:
    """What is wrong with a step's folder. `full` reads every byte; otherwise names and sizes."""
    try:
        manifest = json.loads((root / MANIFEST).read_bytes())
        files = _listing(manifest)
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, RecursionError):
        return "its manifest is not what was written"
    if manifest["tree"] != tree_hash(files) or manifest["step"] != int(root.name):
        return "its manifest does not match its own hash"
    for name, (size, crc) in files.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if full and checksum(path) != crc:
            return f"{name} does not match its checksum"
    return None


def tree_hash(files: dict[str, list[int]]) -> str:
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


def _listing(manifest: Any) -> dict[str, list[int]]:
    if not isinstance(manifest, dict) or set(manifest) != {"step", "files", "tree"}:
        raise ValueError("not a manifest")
    files = manifest["files"]
    if not isinstance(files, dict) or not all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()):
        raise ValueError("not a listing")
    return files


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
