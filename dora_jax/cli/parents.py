"""A run's workdir where a model's folder is meant: `model.path=runs/x`, or `runs/x@40` for the checkpoint of step 40.

Consumes that field; produces the Hugging Face folder of the run's policy, runs/x/hf/STEP, which `make` writes where it
is not there yet. Laws: a run that goes on keeps the step that it started from, however far the other one has come
since; nothing else in the other run's folder is touched; a folder that is no run's is left as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from dora_jax.config import ConfigError, RunError, workdirs
from dora_jax.trainer import manifest

MARK = "overrides.json"  # every workdir has it, and no model's folder


class Parent(NamedTuple):
    """The checkpoint that a run starts from."""

    run: Path
    step: int
    model: str  # the folder that the run itself started from: it has the same sizes and tokenizer
    folder: Path  # of the exported policy
    merged: bool  # it trained an adapter, which is added up into its base

    def __str__(self) -> str:
        return f"checkpoint {self.step} of {self.run}"


def settle(tree: MutableMapping[str, Any], workdir: Path) -> Parent | None:
    """Replaces a run's workdir in `model.path` by the folder of its policy; None: it names no run.

    ConfigError: the run holds no checkpoint that verifies, or not that of the step.
    """
    try:
        named = str(tree["model"]["path"])
    except (KeyError, TypeError):
        return None  # which is refused by name, a little later
    plain, _, number = named.rpartition("@")
    run = Path(plain if number.isdigit() and (Path(plain) / MARK).is_file() else named)
    if not named or not (run / MARK).is_file():
        return None
    try:
        saved = workdirs.read(run)
        merged = bool(saved["lora"]["rank"])
        model = str(saved["model"]["path"])
    except (ConfigError, KeyError, TypeError) as error:
        raise ConfigError(f"model.path: {run} is the workdir of a run that cannot be read: {error}") from error
    checkpoints = run / "checkpoints"
    known = manifest.steps(checkpoints)
    exported = {run / "hf" / f"{step}{'.merged' * merged}": step for step in known}
    if number.isdigit() and str(run) == plain:
        if (step := int(number)) not in known:
            raise ConfigError(f"model.path: {run} holds no checkpoint of step {step}; it holds {known}")
    elif (before := _began_from(workdir)) and before.parent == run / "hf":
        step = int(before.name.partition(".")[0])
        exported[before] = step
    else:
        whole = (step for step in reversed(known) if manifest.fault(checkpoints / str(step), full=True) is None)
        if (newest := next(whole, None)) is None:
            raise ConfigError(
                f"model.path: {run} is the workdir of a run and holds no checkpoint that verifies: let the run come to "
                "one, or name a model's folder"
            )
        step = newest
    folder = next(path for path, at in exported.items() if at == step)
    tree["model"]["path"] = str(folder)
    return Parent(run, step, model, folder, merged)


def make(parent: Parent) -> None:
    """Writes the folder, in a process of its own, unless it is there. RunError: it could not be written."""
    if parent.folder.exists():
        return
    print(f"model.path: {parent} is exported to {parent.folder}", file=sys.stderr, flush=True)
    command = ["-m", "dora_jax.export_hf", f"--workdir={parent.run}", f"--step={parent.step}", f"--out={parent.folder}"]
    done = subprocess.run(
        [sys.executable, *command, *["--merged"] * parent.merged],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
        raise RunError(f"model.path: {parent} cannot be exported: {why}")


def _began_from(workdir: Path) -> Path | None:
    """model.path of the run that left something in this folder; None: none has."""
    if not workdirs.begun(workdir) or not (workdir / "config.json").is_file():
        return None
    try:
        return Path(workdirs.read(workdir)["model"]["path"])
    except (ConfigError, KeyError, TypeError):
        return None  # which is refused by name, a little later
