"""What --config names: a Python file, or a config that comes with dora_jax, and the ConfigDict that it gives.

Consumes path.py[:argument] or name[:argument]. Law: whatever the file raises is one sentence with its line.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import re
import traceback
import types
from pathlib import Path

import ml_collections

from dora_jax import config as configs
from dora_jax.base import config_tree
from dora_jax.base.config_tree import nearest
from dora_jax.config import Config, ConfigError


def config_file(path: str) -> str:
    """A path to a file, or the name of a config that comes with dora_jax, such as quickstart; ConfigError: neither."""
    if Path(path).is_file():
        return path
    here = Path(__file__).parents[1]
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"  # installed, or a checkout
    if path.endswith(".py") or not folder.is_dir():
        raise ConfigError(f"config: {path} does not exist")
    known = {file.relative_to(folder).with_suffix("").as_posix(): file for file in sorted(folder.rglob("*.py"))}
    if path not in known:
        raise ConfigError(f"config: {path} does not exist; what comes with dora_jax is {', '.join(known)}")
    return str(known[path])


def load_file(spec: str, cls: type | None = None) -> ml_collections.ConfigDict:
    """get_config(arg) of path.py[:arg], locked; whatever the file raises is reported with its line.

    cls: the dataclass of the configuration, all of whose fields it must have and a sentence may suggest; None: a
    configuration of any program, for a file that builds on another.
    """
    path, colon, arg = spec.partition(":")
    module = load_module(path, cls or Config)
    try:
        tree = module.get_config(arg) if colon else module.get_config()
    except Exception as error:  # the file is the user's: anything may come out of it
        raise ConfigError(field_context(config_file(path), error, cls or Config)) from error
    if not isinstance(tree, ml_collections.ConfigDict):
        raise ConfigError(f"config: get_config of {path} returned {type(tree).__name__}, not config.defaults()")
    if cls and (absent := [each.name for each in dataclasses.fields(cls) if each.name not in tree]):
        raise ConfigError(f"config: {path} is a configuration of another program, for it has no {absent[-1]}")
    return tree.lock()


def load_module(path: str, cls: type = Config) -> types.ModuleType:
    """The config file, run; whatever it raises is reported with its line."""
    if not path:
        raise ConfigError("config: missing; name a file, e.g. --config=configs/quickstart.py")
    file = config_file(path)
    if not file.endswith(".py"):
        raise ConfigError(f"config: {path} is no Python file; a config is path.py with get_config()")
    loader = importlib.machinery.SourceFileLoader(f"config_{Path(path).stem}", file)
    module = types.ModuleType(loader.name)
    module.__file__ = file
    try:
        loader.exec_module(module)
    except Exception as error:  # the file is the user's
        raise ConfigError(field_context(file, error, cls)) from error
    return module


def field_context(path: str, error: Exception, cls: type = Config) -> str:
    """Where in the config file it happened, and what; an unknown field with its nearest known one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
    line = error.lineno if isinstance(error, SyntaxError) else (frames[-1].lineno if frames else None)
    unknown = re.match(r"\W*Key \"(\w+)\" does not exist", str(error))
    if unknown:
        known = list(config_tree.fields(cls))
        # the section as the line of the file names it: c.trainer.lr
        written = re.search(rf"\.((?:\w+\.)*{unknown[1]})\b", (frames[-1].line or "") if frames else "")
        name = written[1] if written else unknown[1]
        inside = [each for each in known if each.startswith(f"{name.rpartition('.')[0]}.")]
        former = {old.rpartition(".")[2]: new for old, new in configs.RENAMED.items()}
        renamed = f"renamed to {former[unknown[1]]}" if unknown[1] in former else ""
        what = f"unknown field {name}; {renamed or f'the nearest is {nearest(name, inside or known)}'}"
    else:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{path}{f':{line}' if line else ''}: {what}"


def run_name(spec: str) -> str:
    """configs/x.py:arg -> x_arg"""
    path, _, arg = spec.partition(":")
    return re.sub(r"[^\w.=,-]", "_", "_".join(filter(None, (Path(path).stem, arg))))
