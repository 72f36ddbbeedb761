"""Small mixtures of experts from their config down: warm start, decoding, rewards, updates, publication, a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dora_jax.models.hf_config import read_config
from dora_jax.models.routes import RouteShape
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.types import is_eval

ROOT = Path(__file__).parent.parent
SMALL = {
    "steps": 3,
    "sft.steps": 10,
    "sft.examples": 64,
    "sft.batch_rows": 8,
    "sft.d_model": 16,
    "sft.experts": 4,
    "sft.expert_width": 16,
    "rollout.slots": 8,
    "orchestrator.groups_per_step": 2,
    "orchestrator.group_size": 4,
    "trainer.micro_batches": 1,
    "trainer.load_balance_coef": 0.01,
    "eval.prompts": 8,
    "eval.samples": 1,
    "journal.partial_s": 0.001,
}


def train(folder):
    overrides = SMALL | {"sft.out": folder / "base", "model.path": folder / "base"}
    arguments = [f"--config={ROOT}/configs/moe.py:deepseek_v3", "--workdir=run"]
    arguments += [f"--config.{name}={value}" for name, value in overrides.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "dora_jax.train", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begun(log):
    """The half-done training samples of the journal."""
    journal = EventLog(log)
    partial = replay(journal, numbers, print).payloads.partial if (numbers := journal.segments()) else {}
    return {id: chunks for id, chunks in partial.items() if not is_eval(id.group_id)}


@pytest.mark.slow
def test_a_mixture_that_is_killed_goes_on_with_the_routes_of_sampling(tmp_path):
    """Killed while it samples: half-done samples go on from the journal, and each trained sample has its routes."""
    run, log = train(tmp_path), FileLogStore(tmp_path / "run" / "journal", read_only=True)
    while not begun(log) and run.poll() is None:
        time.sleep(0.02)
    run.kill()
    assert run.wait() == -signal.SIGKILL, run.stdout.read()
    model, recorded = read_config(tmp_path / "base"), begun(log)
    assert model.family == "deepseek_v3" and all(
        chunk.table.routes is not None for c in recorded.values() for chunk in c
    )

    reported, _ = (run := train(tmp_path)).communicate()
    assert run.returncode == 0, reported[-2000:]
    assert re.search(r"[1-9]\d* samples go on with [1-9]\d* tokens", reported)
    journal, shape = EventLog(log), RouteShape.of(model)
    steps = replay(journal, journal.segments(), print).steps
    samples = [sample for step in steps for group in step.groups for sample in group.samples]
    assert len(samples) == 3 * 8
    for sample in samples:
        shape.check(sample.table.routes, len(sample.prompt_ids) + len(sample.out_ids) - 1, str(sample.id))

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [record for record in records if "moe/load_max" in record]
    assert len(updates) == 3
    assert all(update["moe/dropped_share"] == 0 and update["moe/load_max"] >= 1 for update in updates)
    gaps = [update["mismatch/max"] for update in updates if "mismatch/max" in update]
    assert gaps and max(gaps) < 1e-4  # the engine's log-probs are the trainer's, token by token
