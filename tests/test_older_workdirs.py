"""Workdirs that earlier versions left in the middle of a run: the same command goes on, under today's names.

tests/data/workdirs/VERSION.tar.xz holds small.py, its base model, and `run` as a killed process of that version left it
(DORA_FAULT=trainer.after_put:3, of 4 steps): config.json, journal, one checkpoint and one that was never finished,
metrics.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKDIRS = sorted((ROOT / "tests/data/workdirs").glob("*.tar.xz"))


@pytest.mark.slow
@pytest.mark.parametrize("kept", WORKDIRS, ids=lambda path: path.name)
def test_a_run_goes_on_from_a_workdir_of_an_earlier_version(tmp_path, kept):
    with tarfile.open(kept) as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "dora_jax.train", "--config=small.py", "--workdir=run"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "resuming at step 2" in done.stdout, done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step for step in range(6) if step in steps] == [0, 1, 2, 3, 4], "the rows before the kill stay"
    assert (tmp_path / "run/checkpoints/4/manifest.json").is_file()
