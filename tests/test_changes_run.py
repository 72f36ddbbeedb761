"""A run that dies of memory goes on with half the slots and ends, and another run starts from its checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dora_jax.config import workdirs
from dora_jax.models import hf
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.trainer import checkpoint
from tests.fakes.tiny_run import CONFIG

ONE_PROCESS = """
from dora_jax import config

def get_config():
    c = base()
    c.steps, c.cpu_devices, c.placement, c.rollout.instances = 6, 1, "shared", 1
    c.cluster.launcher, c.cluster.trainer_hosts, c.cluster.devices_per_host = "", 1, 0
    c.rollout.slots, c.rollout.pages = 16, 0
    return c
"""
# the device has no room for the working memory of more than 8 slots, once versions are trained beside it
FULL = """
import runpy
import jax
from dora_jax.rollout.device import Device
from dora_jax.trainer.step import Trainer

generate, step, trained = Device.generate, Trainer.step, []

def counted(*args, **options):
    trained.append(step(*args, **options))
    return trained[-1]

def full(self, params, control, *rest):
    if len(trained) > 2 and len(control) > 8:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")
    return generate(self, params, control, *rest)

if __name__ == "__main__":
    Device.generate, Trainer.step = full, counted
    runpy.run_module("dora_jax.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_run_that_dies_of_memory_goes_on_with_half_the_slots_and_another_starts_from_its_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG.format(base="base").replace("def get_config", "def base") + ONE_PROCESS)
    Path("full.py").write_text(FULL)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}

    def train(*args, workdir="run"):
        command = [sys.executable, "full.py", "--config=tiny.py", f"--workdir={workdir}", *args]
        run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        return run.returncode, run.stdout + run.stderr

    code, output = train()
    assert code == 1 and "error: out of memory: " in output and "Traceback" not in output, output
    code, output = train("--config.rollout.slots=8")
    assert code == 0 and "changed since the last start: rollout.slots 16 -> 8" in output, output
    assert audit(Path("run/journal")).ok and checkpoint.steps("run/checkpoints")[-1] == 6
    (row,) = map(json.loads, Path("run/changes.jsonl").read_text().splitlines())
    assert row["changed"] == {"rollout.slots": [16, 8]} and 2 <= row["step"] < 6

    code, output = train("--config.rollout.slots=8", "--config.model.path=run", "--config.steps=2", workdir="child")
    assert code == 0 and "model.path: checkpoint 6 of run is exported to run/hf/6" in output, output
    assert workdirs.read(Path("child"))["model"]["path"] == "run/hf/6"
    params = checkpoint.read_arrays("run/checkpoints", 6, "params")
    jax.tree.map(np.testing.assert_array_equal, hf.load("run/hf/6")[1], params)
