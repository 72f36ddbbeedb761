"""Evaluation of a run's checkpoints, one or each as it comes, in a process of its own beside the run or after it.

    WORKDIR/evaluations/STEP.json       the record of one checkpoint
    WORKDIR/evaluations/metrics.jsonl   the same records, in the order in which they were made; tensorboard/ likewise
    WORKDIR/evaluations/samples/        what the policy wrote, as in a run's own samples/

Consumes a workdir, a folder or in a bucket; writes below `evaluations` only, so that it may run beside the run that
writes the rest. A run of no steps: no trainer, the same engines.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from dora_jax.base import state_files
from dora_jax.base.metrics import Writer, is_record
from dora_jax.config import Config, RewardModelSection, RunError
from dora_jax.models.lora_config import OFF
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.plan import devices
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.common import sample_log
from dora_jax.runtime.common.shutdown import Guard
from dora_jax.runtime.job import of_this_machine, opened, pick, run_stages
from dora_jax.runtime.journal.object_storage import Objects
from dora_jax.runtime.journal.workdir_mirror import fetch, url_of
from dora_jax.runtime.local_backend import LocalBackend
from dora_jax.trainer import checkpoint
from dora_jax.types import Version

FOLDER = "evaluations"
PERIOD_S = 5.0  # between two looks for a new checkpoint


def evaluate(config: Config, workdir: Path, step: int | None = None) -> int:
    """avg@k and pass@k of one checkpoint on the held-out prompts; None: of the newest that verifies.

    For a process of its own: it is ended where it is asked to stop and does not end in time.
    """
    config = settled(config)
    version = pick(workdir / "checkpoints", step)
    _pull(workdir)
    evaluate_one(config, workdir, version)
    return 0


def follow(config: Config, workdir: Path, period_s: float = PERIOD_S) -> int:
    """Evaluates each checkpoint that has no record, oldest first, and those to come, until the run's last step has one.

    A checkpoint that the run deletes before its turn is passed over, as is one that cannot be trusted. A damaged record
    is moved aside and made again.
    """
    last, config = config.steps, settled(config)
    changed: set[Version] = set()  # passed over: these are not the params that the run saved
    directory = workdir / "checkpoints"
    _pull(workdir)
    while True:
        fetch(workdir)
        waiting = [step for step in checkpoint.steps(directory) if not _recorded(workdir, step)]
        for step in waiting:
            if step not in changed and checkpoint.verify(directory, step, full=True) is None:
                try:
                    evaluate_one(config, workdir, step)
                except checkpoint_weights.ParamsChanged as error:
                    print(error, flush=True)
                    changed.add(step)
                break  # the list may be old by now
        else:
            if _recorded(workdir, last):
                return 0
            time.sleep(period_s)


def settled(config: Config) -> Config:
    """The run's configuration for this machine, and for held-out groups; starts JAX."""
    devices.setup_platform(config)
    config = of_this_machine(config)
    if config.task.rewards:  # held-out groups have the reward of their task
        config = dataclasses.replace(config, reward_model=RewardModelSection())
    return config


def evaluate_one(config: Config, workdir: Path, version: Version) -> None:
    """Makes the record of one checkpoint. RunError: none of its groups has a score."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    with Writer(folder) as writer, Guard(0.0, owner=True) as guard:
        weights = checkpoint_weights.read(config, workdir / "checkpoints", version)
        config = dataclasses.replace(config, lora=OFF)  # an adapter is added up into them
        parts = opened(config, folder, writer)
        backend = LocalBackend(parts, writer.note)
        backend.weights.put(version, weights)
        orchestrator = Orchestrator(
            build.orchestrator_config(dataclasses.replace(config, steps=version)), start_version=version
        )
        _, log = run_stages(parts, backend, writer, orchestrator, guard)
    if version not in log.evaluations:
        raise RunError(f"version {version} is not evaluated: none of its held-out groups has a score")
    text = json.dumps({"step": version, **log.evaluations[version]})
    state_files.replace(folder / f"{version}.json", text.encode() + b"\n")
    if url := url_of(workdir):
        for file in (folder / f"{version}.json", folder / "metrics.jsonl", *sample_log.files(folder / "samples")):
            Objects(url).put(f"{FOLDER}/{file.relative_to(folder)}", file.read_bytes())
    print(text, flush=True)


# ---------------------------------------------------------------- private


def _recorded(workdir: Path, step: Version) -> bool:
    """Whether a checkpoint has its record. One that is damaged is moved aside."""
    file = workdir / FOLDER / f"{step}.json"
    if not file.exists():
        return False
    rows = state_files.read_lines(file.read_bytes(), is_record).rows if file.is_file() else []
    if [row["step"] for _, row in rows] == [step]:
        return True
    print(f"{file} is damaged: it is moved aside as {state_files.set_aside(file)}", flush=True)
    return False


def _pull(workdir: Path) -> None:
    """For a workdir in a bucket, fetch the records that another machine has made."""
    if url := url_of(workdir):
        store = Objects(url)
        (workdir / FOLDER).mkdir(exist_ok=True)
        for key in store.keys(FOLDER):
            (workdir / key).parent.mkdir(parents=True, exist_ok=True)
            (workdir / key).write_bytes(store.get(key) or b"")
