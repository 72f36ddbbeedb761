"""The weights of a checkpoint, whatever the run trained: all of them, or an adapter beside the base of model.path.

    WORKDIR/checkpoints/base.json   of a run that trains an adapter: the folder of its base, and the digest of its
                                    weights

Laws: a reader gets whole weights, stacked; an adapter is never added to other weights than it was trained beside; what
was trained has the digest that the journal of the workdir has for it, where there is one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax

from dora_jax.base import state_files
from dora_jax.base.digest import digest
from dora_jax.config import Config, ConfigError, field_context
from dora_jax.models import hf, lora
from dora_jax.runtime.journal.journal_audit import params_digest
from dora_jax.trainer import checkpoint
from dora_jax.types import Version

BASE = "base.json"
FORMAT = 2  # of base.json


class ParamsChanged(ConfigError):
    """A checkpoint whose manifest is right does not hold the params that the run saved."""


def read(run: Config, directory: Path, version: Version, like: Any = None) -> Any:
    """The policy of a checkpoint, float32, an adapter added up into its base; like: shapes and shardings of whole
    weights, None: on the first device. ConfigError: the base is missing, or another; the checkpoint is not what the run
    saved."""
    if not run.lora.on:
        return read_trained(directory, version, like)
    adapter = read_trained(directory, version)
    path = run.model.path
    if not Path(path).exists():
        raise ConfigError(f"model.path: {path}, the base that the run's adapters stand beside, does not exist")
    with field_context("model.path"):
        base = hf.load(path)[1]
    check_base(run, directory, base)
    merge = jax.jit(functools.partial(lora.merge, gain=run.lora.gain))
    merged = merge(base, adapter)
    return merged if like is None else jax.device_put(merged, jax.tree.map(lambda x: x.sharding, like))


def read_trained(directory: Path, version: Version, like: Any = None) -> Any:
    """The params of a checkpoint as they were trained, weights or an adapter. ParamsChanged: they are not what the
    journal of the workdir has for this version."""
    params = checkpoint.read_arrays(directory, version, "params", like)
    known = params_digest(directory.parent, version)
    if known is not None and (found := digest(params)) != known:
        raise ParamsChanged(
            f"step: checkpoint {version} cannot be trusted: its params have the digest {found:016x}, and the journal "
            f"has {known:016x} for them; --step names another one"
        )
    return params


def check_base(run: Config, directory: Path, base: Any) -> None:
    """ConfigError: the adapters of this folder were trained beside other weights. Where none are yet, it is written
    down which ones they will be. base: f32, stacked."""
    file, found = directory / BASE, f"{digest(base):016x}"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        state_files.replace(file, state_files.encode({"path": run.model.path, "digest": found}, FORMAT))
        return
    try:
        trained = state_files.read(file, FORMAT)
        if not isinstance(trained.get("digest"), str):
            raise state_files.StateError(f"{file} names no digest")
    except state_files.NewerFormat as error:
        raise ConfigError(f"workdir: {error}") from error
    except state_files.StateError as error:
        raise ConfigError(
            f"workdir: {error}; where {run.model.path} is the base that the adapters were trained beside, remove that "
            "file, and it is written anew"
        ) from error
    if trained["digest"] != found:
        raise ConfigError(
            f"model.path: {run.model.path} holds other weights than the base of the adapters in {directory}, "
            f"which was {trained.get('path')}"
        )
