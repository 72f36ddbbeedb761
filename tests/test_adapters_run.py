"""A run in many processes whose versions are adapters."""

import subprocess
import sys

import pytest

from dora_jax.runtime.durability.journal_audit import audit
from tests.fakes.tiny_run import CONFIG


@pytest.mark.slow
def test_a_cluster_trains_publishes_and_serves_adapters(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    asked = [f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run", "--config.lora.rank=4"]
    command = [sys.executable, "-m", "dora_jax.train", *asked]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "rollout.residents=4" in said and "version 4 is published" in said
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.trained == 8, books
