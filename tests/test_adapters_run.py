"""Runs whose versions are adapters, from the config down: in one process that is killed, and in many."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dora_jax import export_hf
from dora_jax.config import workdirs
from dora_jax.models import hf, lora, peft
from dora_jax.models.lora_config import Lora
from dora_jax.plan import validate
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.runtime.journal.log_stores import log_at
from dora_jax.runtime.journal.recovery import replay
from dora_jax.trainer import checkpoint
from tests.fakes.tiny_run import CONFIG

LORA = Lora(rank=2, alpha=4.0)
ONE_PROCESS = """
from dora_jax import config

def get_config():
    c = base()
    c.steps, c.cpu_devices, c.placement, c.rollout.instances = 10, 1, "shared", 1
    c.cluster.launcher, c.cluster.trainer_hosts, c.cluster.devices_per_host = "", 1, 0
    c.rollout.slots, c.rollout.pages, c.rollout.decode_steps = 24, 0, 1
    c.orchestrator.groups_per_step, c.orchestrator.max_versions, c.orchestrator.inflight = 1, 5, 5.0
    c.lora.rank, c.lora.alpha, c.checkpoint.every = 2, 4.0, 2
    c.task.rewards = ("marks.odd",)
    return c
"""
# an answer takes as long as the steps that publish the next four versions
COUNTED = """
import os, runpy
import time
from pathlib import Path
from dora_jax.rollout.device import Device
from dora_jax.rollout.shapes import ADAPTER, REMAINING
from dora_jax.trainer.step import Trainer
from tests.fakes import faults

generate, step = Device.generate, Trainer.step

def slow(*args, **options):
    time.sleep(0.2)
    return step(*args, **options)

def counted(self, params, control, blocks, *options):
    time.sleep(0.04)
    with Path("versions_in_calls").open("a") as file:
        print(len(set(control[control[:, REMAINING] > 0, ADAPTER].tolist())), file=file)
    return generate(self, params, control, blocks, *options)

if __name__ == "__main__":
    faults.arm(os.environ["DORA_FAULT"])
    Device.generate, Trainer.step = counted, slow
    runpy.run_module("dora_jax.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_run_of_adapters_is_killed_goes_on_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG.format(base="base").replace("def get_config", "def base") + ONE_PROCESS)
    Path("counted.py").write_text(COUNTED)
    Path("marks.py").write_text("def odd(prompt, response, answer):\n    return len(response) % 2\n")
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{tmp_path}"}

    def train(fault):
        command = [sys.executable, "counted.py", "--config=tiny.py", "--workdir=run"]
        run = subprocess.run(command, capture_output=True, text=True, env=env | {"DORA_FAULT": fault}, check=False)
        return run.returncode, run.stdout + run.stderr

    code, output = train("trainer.after_put:7")
    assert code == -signal.SIGKILL and "rollout.residents=6" in output, output
    code, output = train("")
    assert code == 0 and "resuming at step 6" in output, output
    assert max(map(int, Path("versions_in_calls").read_text().split())) >= 4
    assert_nothing_is_lost_or_mixed(tmp_path / "run")
    assert_exported(tmp_path)


def assert_nothing_is_lost_or_mixed(workdir):
    books = audit(workdir / "journal")
    assert books.ok and books.trained == 10 and books.epochs == 1, books
    journal = EventLog(log_at(workdir / "journal", read_only=True))
    groups = [group for step in replay(journal, journal.segments(), print).steps for group in step.groups]
    for group in groups:
        assert all([span.version for span in sample.spans] == [group.version] for sample in group.samples)
    assert len({group.version for group in groups}) >= 4


def assert_exported(folder):
    """The checkpoint holds an adapter alone, of which both folders are made."""
    trained = checkpoint.read_arrays(folder / "run/checkpoints", 10, "params")
    cfg = hf.read_config(folder / "base")
    assert jax.tree.map(np.shape, trained) == jax.tree.map(np.shape, lora.abstract(cfg, LORA))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(trained))
    run = validate.from_config_dict(workdirs.read(folder / "run"), "evaluate")
    for adapter in (True, False):
        out = folder / f"exported-{adapter}"
        assert export_hf.export(folder / "run", None, run, out, "float32", adapter=adapter) == 10
    jax.tree.map(np.testing.assert_array_equal, peft.load(folder / "exported-True", cfg, LORA, 0), trained)
    merged = lora.merge(hf.load(folder / "base")[1], trained, LORA.gain)
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder / "exported-False")[1], merged)


@pytest.mark.slow
def test_a_cluster_trains_publishes_and_serves_adapters(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    asked = [f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run", "--config.lora.rank=4"]
    command = [sys.executable, "-m", "dora_jax.train", *asked]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output
    assert "rollout.residents=4" in output and "version 4 is published" in output
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.trained == 8, books
