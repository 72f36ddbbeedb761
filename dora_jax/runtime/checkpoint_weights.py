"""The weights of a checkpoint, whatever the run trained: all of them, or an adapter beside the base of model.path.

    WORKDIR/checkpoints/base.json   of a run that trains an adapter: the folder of its base, and the digest of its weights

Laws: a reader gets whole weights, stacked; an adapter is never added to other weights than it was trained beside.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax

from dora_jax.config import Config, ConfigError, blame
from dora_jax.digest import digest
from dora_jax.models import hf, lora
from dora_jax.trainer import checkpoint
from dora_jax.types import Version

BASE = "base.json"


def read(run: Config, directory: Path, version: Version, like: Any = None) -> Any:
    """The policy of a checkpoint, float32, an adapter added up into its base; like: shapes and shardings of whole weights,
    None: on the first device. ConfigError: the base is missing, or another."""
    if not run.lora.on:
        return checkpoint.read_params(directory, version, like)
    adapter = checkpoint.read_params(directory, version)
    base = _base(run)
    check_base(run, directory, base)
    merge = jax.jit(functools.partial(lora.merge, gain=run.lora.gain))
    merged = merge(base, adapter)
    return merged if like is None else jax.device_put(merged, jax.tree.map(lambda x: x.sharding, like))


def check_base(run: Config, directory: Path, base: Any) -> None:
    """ConfigError: the adapters of this folder were trained beside other weights. Where none are yet, it is written down
    which ones they will be. base: f32, stacked."""
    file, found = directory / BASE, f"{digest(base):016x}"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"path": run.model.path, "digest": found}) + "\n")
        return
    trained = json.loads(file.read_text())
    if trained["digest"] != found:
        raise ConfigError(
            f"model.path: {run.model.path} holds other weights than the base of the adapters in {directory}, "
            f"which was {trained['path']}"
        )


def _base(run: Config) -> Any:
    path = run.model.path
    if not Path(path).exists():
        raise ConfigError(f"model.path: {path}, the base that the run's adapters stand beside, does not exist")
    with blame("model.path"):
        return hf.load(path)[1]
