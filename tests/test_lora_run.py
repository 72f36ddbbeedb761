"""A whole run that trains adapters: cut short and gone on with, evaluated, exported, sampled from, its base taken away."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dora_jax
from dora_jax.models import hf, lora, peft
from dora_jax.models.lora_config import Lora
from dora_jax.trainer import checkpoint
from tests.fakes.tiny_run import CONFIG

ADAPTED = """
from dora_jax import config

def get_config():
    c = base()
    c.cpu_devices, c.cluster.launcher = 2, ""
    c.cluster.trainer_hosts, c.cluster.devices_per_host, c.cluster.silence_s = 1, 0, 10.0
    c.rollout.instances, c.placement = 1, "shared"
    c.orchestrator.mode = "sync"
    c.rollout.pages = 0
    c.lora.rank, c.lora.alpha = 2, 4.0
    c.task.rewards = ("dora_jax.tasks.rewards.regex",)  # a random policy hits a digit now and then
    c.task.params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return c
"""
LORA = Lora(rank=2, alpha=4.0)


@pytest.fixture
def call(tmp_path):
    """Runs a program of the package in tmp_path; its output."""
    text = CONFIG.format(base="base").replace("def get_config", "def base")
    (tmp_path / "tiny.py").write_text(text + ADAPTED)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(program, *arguments, code=0):
        command = [sys.executable, "-m", f"dora_jax.{program}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_run_of_adapters_from_its_first_step_to_what_others_load(call, tmp_path, monkeypatch):
    call("train", "--config=tiny.py", "--config.steps=2", "--workdir=run")
    assert "resuming at step 2" in call("train", "--config=tiny.py", "--config.steps=3", "--workdir=run")
    trained = checkpoint.read_params(tmp_path / "run/checkpoints", 3)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(trained))

    call("export_hf", "--workdir=run", "--out=adapter")
    call("export_hf", "--workdir=run", "--out=merged", "--merged")
    cfg, base = hf.load(tmp_path / "base")
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "adapter", cfg, LORA, 0), trained)
    merged = lora.merge(base, trained, LORA.gain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), hf.load(tmp_path / "merged")[1], merged)
    call("evaluate", "--workdir=run")
    assert (tmp_path / "run/evaluations/3.json").exists()
    monkeypatch.chdir(tmp_path)
    policy = dora_jax.load_policy("run")
    assert len(policy.generate("1 + 1 = ", max_new_tokens=4).pop().token_ids) > 0

    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    said = call("evaluate", "--workdir=run", code=2)
    assert "model.path: base" in said and "does not exist" in said and said.count("\n") == 1, said
    shutil.move(tmp_path / "merged", tmp_path / "base")
    said = call("train", "--config=tiny.py", "--config.steps=4", "--workdir=run", code=2)
    assert "holds other weights than the base of the adapters in" in said.splitlines()[-1]
    assert json.loads((tmp_path / "run/checkpoints/base.json").read_text())["path"] == "base"
