"""What a workdir remembers of its run's configuration: config.json (resolved, secrets blanked) and overrides.json.

Consumes a `Config` and a folder; produces the two files, or the sentence that says why the folder is not this run's.
Law: a file is there whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_jax import config as configs
from dora_jax.config import Config

MAY_CHANGE = (  # between two runs of one workdir: how long, how often, and on which machine
    "steps", "slice", "cpu_devices", "placement", "model.size", "checkpoint.", "journal.", "eval.", "cluster.",
    "rollout.instances", "rollout.tensor", "rollout.memory_share", "rollout.compiler_options", "trainer.compiler_options", "trainer.data",
    "trainer.fsdp", "trainer.tensor", "trainer.context", "trainer.optimizer_memory",
    "trainer.peak_tflops", "task.reward_workers", "task.reward_timeout_s", "task.reward_retries",
    "reward_model.placement", "reward_model.data", "reward_model.fsdp", "reward_model.tensor", "reward_model.rows")


def record(workdir: Path, config: Config, overrides: Mapping[str, Any]) -> None:
    """Writes both files, each whole or not at all; overrides: what the command line changed."""
    workdir.mkdir(parents=True, exist_ok=True)
    for name, tree in (("config.json", configs.to_json(config)), ("overrides.json", configs.redact(overrides))):
        partial = workdir / f".{name}.partial"
        partial.write_text(json.dumps(tree, indent=2, default=dict) + "\n")
        os.replace(partial, workdir / name)


def conflicts(workdir: Path, config: Config) -> list[str]:
    """Fields in which the workdir's config differs from this one, but for those that may change between runs."""
    file = workdir / "config.json"
    if not file.is_file():
        return []
    old, new = json.loads(file.read_text()), configs.to_json(config)
    differing = [name for name in configs.fields() if not name.startswith(MAY_CHANGE)
                 and _get(old, name, _get(new, name)) != _get(new, name)]
    if not differing:
        return []
    return [f"workdir: {workdir} belongs to another config, which differs in {', '.join(differing)}; "
            f"choose another --workdir"]


# ---------------------------------------------------------------- private


def _get(tree: Mapping[str, Any], name: str, missing: Any = None) -> Any:
    """A field of a JSON config; `missing` where the config was written before the field existed."""
    for part in name.split("."):
        if part not in tree:
            return missing
        tree = tree[part]
    return tree
