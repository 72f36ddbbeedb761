"""Inputs of a run that are named by URL (gs://, s3://, file://): models, adapters and files of rows, copied to this
machine before they are read.

    TMPDIR/dora_jax-UID/inputs/URL/...    the copy, with the store's generation of each file in .staged.json

Consumes a configuration; produces the same one with local paths, which only the processes of the run see: config.json
has the URL. Laws: each start reads what the store has replaced since the last one, and nothing else; a file of the copy
is there whole or not at all; of several processes one copies, and the others wait.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from dora_jax.base import state_files
from dora_jax.config import Config, ConfigError, RunError
from dora_jax.config.task import ROW_FILES
from dora_jax.runtime.journal.object_storage import Objects, one_line, side_by_side
from dora_jax.runtime.journal.workdir_mirror import private_folder

ENDINGS = (*ROW_FILES, ".safetensors", ".jinja", ".model", ".txt")  # weights and texts, never code
INPUTS, GENERATIONS = "inputs", ".staged.json"
COPY_S = 3600.0  # of one object, which is read as a whole


def url_of(path: str) -> str:
    """The URL of a local copy, of this machine or of another one; empty: it is none."""
    match = re.fullmatch(rf".*/dora_jax-\d+/{INPUTS}/([^/]+)/?(.*)", path)
    return f"{urllib.parse.unquote(match[1])}/{match[2]}" if match else ""


def staged(config: Config, urls: Mapping[str, str]) -> Config:
    """The configuration with local copies in the place of these fields.

    ConfigError: nothing is there that a run reads. RunError: the store does not answer.
    """
    for field, url in urls.items():
        section, *entry, leaf = field.split(".")
        changed = getattr(config, section)
        value: dict[str, object] = {leaf: str(_copy(field, url))}
        if entry:  # of task.mix
            value = {"mix": {**changed.mix, entry[1]: dataclasses.replace(changed.mix[entry[1]], **value)}}
        config = dataclasses.replace(config, **{section: dataclasses.replace(changed, **value)})
    return config


def _copy(field: str, url: str) -> Path:
    """The local copy of a file, of a folder, or of the files that begin with this name."""
    base, _, name = url.rstrip("/").rpartition("/")
    if not base.partition("://")[2]:  # a whole bucket
        base, name = f"{base}/{name}", ""
    folder = private_folder(field) / INPUTS / urllib.parse.quote(base, safe="")
    folder.mkdir(parents=True, exist_ok=True)
    store = Objects(base, field=field)
    try:
        keys = [key for key in store.beginning(name) if key.endswith(ENDINGS)]
        keys = [key for key in keys if not name or key == name or key.startswith(f"{name}/")] or keys
        if not keys:
            raise ConfigError(f"{field}: there is nothing at {url} that a run reads, which is {', '.join(ENDINGS)}")
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = folder / GENERATIONS
            known = json.loads(record.read_text()) if record.exists() else {}
            for gone in [key for key in known if key.startswith(name) and key not in keys]:
                (folder / gone).unlink(missing_ok=True)
                del known[gone]

            def bring(key: str) -> None:
                local = folder / key
                here = bytes.fromhex(known[key]) if key in known and local.is_file() else None
                data, generation = store.stamped(key, here, COPY_S)
                if data is not None:
                    local.parent.mkdir(parents=True, exist_ok=True)
                    state_files.replace(local, data)
                    known[key] = generation.hex()

            side_by_side(bring, keys)
            state_files.replace(record, json.dumps(known).encode())
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise RunError(f"{field}: {url} cannot be read: {one_line(error)}; the same command goes on") from error
    return folder / name
