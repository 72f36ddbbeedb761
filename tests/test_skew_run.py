"""A whole run of which one instance's log-probs go wrong."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.fakes.tiny_run import CONFIG
from tests.fakes.trace_rules import faults

ALONE = """
from dora_jax import config

def get_config():
    c = base()
    c.steps, c.cpu_devices, c.rollout.instances = 12, 4, 3
    c.orchestrator.groups_per_step = 6
    c.model.dtype = "bfloat16"
    c.cluster.launcher = ""
    return c
"""


def run(tmp_path, fault=""):
    text = CONFIG.format(base=str(tmp_path / "base")).replace("def get_config", "def base")
    (tmp_path / "tiny.py").write_text(text + ALONE)
    command = [
        sys.executable,
        "-m",
        "tests.fakes.faults",
        "dora_jax.train",
        f"--config={tmp_path}/tiny.py",
        f"--workdir={tmp_path}/run",
    ]
    env = {**os.environ, "DORA_FAULT": fault}
    out = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    return out, {row["step"]: row for row in rows if "lag/mean" in row}


@pytest.mark.slow
def test_an_instance_whose_log_probs_are_off_is_quarantined_and_the_run_goes_on(tmp_path):
    out, steps = run(tmp_path, fault="rollout.skew:60")
    assert out.returncode == 0 and max(steps) == 12, out.stdout + out.stderr
    lines = re.findall(
        r"rollout \d is in quarantine \(its log-probs differ .* by (\S+) nats .*trained in (.*)", out.stdout
    )
    ((gap, trained),) = lines
    assert float(gap) == pytest.approx(1, abs=0.02) and trained.startswith("step ")
    named = max(int(step) for step in re.findall(r"step (\d+)", trained))
    assert all(row["mismatch/mean"] < 0.02 for step, row in steps.items() if step > named and "mismatch/mean" in row)


@pytest.mark.slow
def test_rounding_in_bfloat16_and_staleness_quarantine_nobody(tmp_path):
    out, steps = run(tmp_path)
    assert out.returncode == 0 and "quarantine" not in out.stdout and "differ from the trainer" not in out.stdout
    assert max(row["lag/max"] for row in steps.values()) == 2
    assert not faults(json.loads((tmp_path / "run/trace.json").read_text()))
