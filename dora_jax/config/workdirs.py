"""What a workdir remembers of its run's configuration: config.json (resolved, secrets blanked) and overrides.json.

    WORKDIR/history.N/      what an earlier run left there, with --begin_anew (`put_history_aside`)

Consumes a `Config` and a folder; produces the two files, or the sentence that says why the folder is not this run's.
Laws: a file is there whole or not at all; a workdir of a version whose journal and checkpoints this one does not read
is refused with the name of the version that does; so is one of a newer format, and a config.json that is damaged;
nothing of a history is deleted.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dora_jax import config as configs
from dora_jax.base import state_files
from dora_jax.base.config_tree import redact
from dora_jax.config import Config, ConfigError, changes
from dora_jax.version import __version__

HISTORY = re.compile(r"history\.[\w-]+")
STAYS = ("config.json", "overrides.json", "wanted_instances")  # of the run that follows, too
READS = (__version__,)  # versions of dora_jax whose workdirs this one goes on with
UNNAMED = "0.1.0"  # the version that wrote a workdir which names none
VERSION = "dora_jax"  # in config.json, beside the fields
FORMAT = 2  # of config.json, and of all files of a workdir that have no number of their own: its logs


def begun(workdir: Path) -> bool:
    """Whether a run left more in the folder than its configuration: a journal, metrics or a checkpoint.

    The scratch folder of a bucket has a config.json only then.
    """
    what = (".store", "journal/*.log", "journal.*.ended", "metrics.jsonl", "checkpoints/[0-9]*")
    return any(True for pattern in what for _ in workdir.glob(pattern))


def record(workdir: Path, config: Config, overrides: Mapping[str, Any]) -> None:
    """Writes both files, each whole or not at all; overrides: what the command line changed.

    ConfigError where the folder cannot be written.
    """
    resolved = {VERSION: __version__, **configs.to_json(config)}
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        files = {
            "config.json": state_files.encode(resolved, FORMAT, indent=2),
            "overrides.json": json.dumps(redact(overrides), indent=2, default=dict).encode() + b"\n",  # read by people
        }
        for name, data in files.items():
            state_files.replace(workdir / name, data)
    except OSError as error:
        raise ConfigError(f"workdir: {workdir} cannot be written: {error.strerror}") from error


def read(workdir: Path) -> dict[str, Any]:
    """The tree in config.json, for `validate.from_config_dict`; fields under former names have their present ones.

    ConfigError where the file is missing or damaged, or another version of dora_jax wrote it.
    """
    file = workdir / "config.json"
    if not file.exists():
        raise ConfigError(f"workdir: {workdir} holds no run: {file} does not exist")
    try:
        tree = state_files.read(file, FORMAT)
    except state_files.NewerFormat as error:
        raise ConfigError(f"workdir: {error}, or choose another --workdir") from error
    except state_files.StateError as error:
        raise ConfigError(f"workdir: {error}; remove it, and the run's own command writes it anew") from error
    version = str(tree.pop(VERSION, UNNAMED))
    if version not in READS:
        raise ConfigError(
            f"workdir: {workdir} was written by dora_jax {version}, and this is {__version__}, which "
            f"does not read it: go on with dora_jax {version}, or choose another --workdir"
        )
    for former, name in configs.RENAMED.items():
        section, _, field = former.partition(".")
        if isinstance(fields := tree.get(section), dict) and field in fields:
            fields[name.partition(".")[2]] = fields.pop(field)
    return tree


def conflicts(workdir: Path, config: Config, accepted: bool = False) -> list[str]:
    """Why a run of this configuration cannot go on in this folder.

    Another version of dora_jax wrote it, or fields have other values that may not change, or only where the user has
    `accepted` that another thing is learned.
    """
    if not begun(workdir) or not (workdir / "config.json").exists():
        return []
    try:
        old = read(workdir)
    except ConfigError as error:
        return list(error.problems)
    if unknown := sorted(_unknown(old)):
        return [
            (
                f"workdir: {workdir} was written by another version of dora_jax: its config.json has "
                f"{', '.join(unknown)}, which this one does not know; choose another --workdir"
            )
        ]
    changed = changes.between(changes.settings(old), changes.settings(configs.to_json(config)))
    return [f"workdir: {workdir} belongs to another config{why}" for why in changes.problems(changed, accepted)]


def free_history(workdir: Path) -> str:
    """The first of history.1, history.2, ... that is not there."""
    return next(name for i in itertools.count(1) if not (workdir / (name := f"history.{i}")).exists())


def put_history_aside(workdir: Path, config: Config, name: str) -> str:
    """Moves what a run left in the folder into its folder `name`; what the configuration names stays, and a copy of
    config.json goes with it. Returns a sentence. A kill on the way leaves it to the next call, and where the folder is
    there already, nothing is moved.

    ConfigError where another run writes the folder.
    """
    history, partial = workdir / name, workdir / f".{name}.partial"
    if history.exists():
        return f"{history} is there already: the run goes on"
    if not begun(workdir) and not partial.exists():
        return f"{workdir} holds no run: this one begins at version 0"
    try:
        if (lock := workdir / "journal" / "lock").is_file():
            with lock.open("a+") as file:  # a run that goes on has locked it
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ConfigError(f"begin_anew: another run writes {workdir}: end it first") from error
        partial.mkdir(exist_ok=True)
        named = {path.resolve() for path in map(Path, _strings(configs.to_json(config))) if path != Path()}
        for path in sorted(workdir.iterdir()):
            inside = any(path.resolve() in (file, *file.parents) for file in named)
            if path.name in STAYS[:2]:
                shutil.copy2(path, partial)
            elif not (inside or path.name in STAYS or path.name.startswith(".") or HISTORY.fullmatch(path.name)):
                path.rename(partial / path.name)
        partial.rename(history)
    except OSError as error:
        raise ConfigError(f"begin_anew: {workdir} cannot be written: {error.strerror}") from error
    return f"what an earlier run left in {workdir} is in {history}; this one begins at version 0"


# ---------------------------------------------------------------- private


def _strings(tree: Any) -> Iterator[str]:
    """All strings of a JSON tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for inside in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _strings(inside)


def _unknown(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Fields of a JSON config that this version does not have."""
    known = configs.fields()
    for name, value in tree.items():
        inside = any(field.startswith(f"{prefix}{name}.") for field in known)
        if inside and isinstance(value, Mapping):
            yield from _unknown(value, f"{prefix}{name}.")
        elif prefix + name not in known:
            yield prefix + name
