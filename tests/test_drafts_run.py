"""A run with drafts that is killed while they are on the device goes on, and its tokens are those of a run without
drafts."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit, facts
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.types import is_training

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
DRAFTS = {"rollout.drafts": 4, "rollout.draft_rows": 4, "rollout.draft_cost": 0.05}  # as good as free: always tried
SMALL = {
    "steps": 2,
    "sft.steps": 2,
    "sft.examples": 16,
    "rollout.slots": 4,
    "rollout.context_block": 160,
    "rollout.temperature": 0.2,  # siblings are alike
    "rollout.max_new_tokens": 128,
    "orchestrator.groups_per_step": 4,
    "orchestrator.filter_zero_variance": False,
    "trainer.pack_tokens": 160,
    "eval.prompts": 4,
    "task.heldout": 4,
    "journal.keep_all": True,
    "journal.partial_s": 0.001,
}


def train(folder, name, fault="", **changes):
    overrides = SMALL | {"sft.out": folder / "base", "model.path": folder / "base"} | changes
    arguments = [f"--config={ROOT}/configs/quickstart.py:tiny", f"--workdir={folder / name}"]
    arguments += [f"--config.{field}={value}" for field, value in overrides.items()]
    return subprocess.run(
        [sys.executable, "-m", "tests.fakes.faults", "dora_jax.train", *arguments],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"DORA_COMPILE_CACHE": str(folder / "cache"), "DORA_FAULT": fault},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def sampled(folder):
    """{sample: its tokens} of the training samples that ended at version 0."""
    journal = EventLog(FileLogStore(folder / "journal", read_only=True))
    ends = [
        fact.payload
        for number in journal.segments()
        for fact in facts(journal.read(number).records)
        if isinstance(fact.event, ev.SampleDone) and is_training(fact.event.id.group_id)
    ]
    return {sample.id: sample.out_ids for sample in ends if sample.version == 0}


@pytest.mark.slow
def test_a_run_that_is_killed_while_drafts_are_verified_has_the_tokens_of_one_without(tmp_path):
    killed = train(tmp_path, "run", fault="rollout.verifying:200", **DRAFTS)
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-2000:]
    done = train(tmp_path, "run", **DRAFTS)
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"[1-9]\d* finished samples kept|go on with [1-9]\d* tokens", done.stdout), done.stdout[-2000:]
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.trained == 8 and not books.generated_again, books

    plain = train(tmp_path, "plain")
    assert plain.returncode == 0, plain.stdout[-2000:]
    found, want = sampled(tmp_path / "run"), sampled(tmp_path / "plain")
    both = found.keys() & want.keys()
    assert len(both) >= 8
    for id in both:
        np.testing.assert_array_equal(found[id], want[id])
