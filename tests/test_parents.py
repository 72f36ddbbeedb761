"""A run that starts from another run's checkpoint: `model.path` names its workdir."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.cli import flags, parents
from dora_jax.config import CheckpointSection, RunError
from dora_jax.models import hf
from dora_jax.plan import validate
from dora_jax.trainer import manifest
from dora_jax.trainer.checkpoint import Checkpoints
from tests.fakes.command_line import ROOT, parse, refusal, write_workspace
from tests.fakes.hf_folder import QWEN3, add_tokenizer, draw, folder

CONFIG = """
from dora_jax import config
def get_config(arg=None):
    c = config.defaults()
    c.model.path, c.task.name = "model", "reasoning_gym:chain_sum"
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 8, 8
    return c
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs/x with checkpoints of the steps 3 and 6, which hold a file each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    write_workspace()
    flags.record(parse("--config=c.py", "--workdir=runs/x"))
    save(3)
    save(6)
    return tmp_path


def save(step, run="runs/x"):
    place = Path(run, "checkpoints", str(step))
    place.mkdir(parents=True)
    (place / "weights").write_text(str(step))
    manifest.write(place)


def child(path="runs/x", *args):
    return parse("--config=c.py", "--workdir=w", f"--config.model.path={path}", *args)


@pytest.mark.parametrize("path, step", [("runs/x", 6), ("runs/x/", 6), ("runs/x@3", 3)])
def test_the_workdir_of_a_run_stands_for_the_policy_of_its_newest_checkpoint_or_of_a_step(runs, path, step):
    asked = child(path)
    assert asked.config.model.path == f"runs/x/hf/{step}" and str(asked.parent) == f"checkpoint {step} of runs/x"
    Path("runs/x/checkpoints/6/weights").write_text("7")
    assert child(path).config.model.path == "runs/x/hf/3", "a damaged checkpoint is passed over" if step == 6 else ""


def test_what_is_no_run_is_left_as_it_is(runs):
    asked = parse("--config=c.py", "--workdir=w")
    assert asked.config.model.path == "model" and asked.parent is None


@pytest.mark.parametrize(
    "path, why",
    [
        ("runs/x@4", "model.path: runs/x holds no checkpoint of step 4; it holds [3, 6]"),
        (
            "runs/y",
            "model.path: runs/y is the workdir of a run and holds no checkpoint that verifies: let the run come to one",
        ),
        (
            "runs/z",
            "model.path: runs/z is the workdir of a run that cannot be read: workdir: runs/z/config.json is not",
        ),
    ],
)
def test_a_run_without_that_checkpoint_is_refused_in_one_sentence(runs, path, why):
    for name in ("y", "z"):
        flags.record(parse("--config=c.py", f"--workdir=runs/{name}"))
    Path("runs/z/config.json").write_text("{")
    (problem,) = refusal("--config=c.py", "--workdir=w", f"--config.model.path={path}")
    assert problem.startswith(why)


def test_a_run_that_has_begun_keeps_the_step_that_it_began_from(runs):
    flags.record(child())
    Path("w/metrics.jsonl").touch()
    save(9)
    assert child().config.model.path == "runs/x/hf/6" and child().parent.step == 6
    assert parse("--config=c.py", "--workdir=v", "--config.model.path=runs/x").config.model.path == "runs/x/hf/9"
    (problem,) = refusal("--config=c.py", "--workdir=w", "--config.model.path=runs/x@9")
    assert "model.path cannot change there" in problem


def test_a_dry_run_plans_for_the_model_of_that_run_and_exports_nothing(runs):
    asked = child("runs/x", "--dry_run", "--config.slice=laptop")
    description = flags.describe(asked)
    assert "note: model.path: a start exports checkpoint 6 of runs/x to runs/x/hf/6" in description
    assert (
        "memory: not planned" not in description
        and "does not exist" not in description
        and not Path("runs/x/hf").exists()
    )
    (problem,) = refusal("--config=c.py", "--workdir=w", "--config.model.path=runs/x", "--config.rollout.max_new_tokens=99999",
                         "--config.trainer.pack_tokens=200000")  # fmt: skip
    assert "is longer than the model's" in problem


def test_the_export_is_made_once_and_what_it_fails_of_is_a_sentence(runs, monkeypatch):
    parent = child().parent
    Path("exporter").write_text('#!/bin/sh\necho "error: step: it cannot be trusted" >&2; echo $@ > asked; exit 2\n')
    Path("exporter").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(Path("exporter").resolve()))
    with pytest.raises(RunError, match="model.path: checkpoint 6 of runs/x cannot be exported: step: it cannot be tr"):
        parents.make(parent._replace(merged=True))
    assert Path("asked").read_text().split()[1:] == [
        *("dora_jax.export_hf", "--workdir=runs/x", "--step=6", "--out=runs/x/hf/6", "--merged")
    ]
    parent.folder.mkdir(parents=True)
    parents.make(parent)


def test_an_adapter_is_exported_added_up_into_its_base_beside_exports_of_its_own(runs):
    flags.record(parse("--config=c.py", "--workdir=runs/l", "--config.lora.rank=2"))
    save(6, "runs/l")
    asked = child("runs/l")
    assert asked.config.model.path == "runs/l/hf/6.merged" and asked.parent.merged


@pytest.mark.slow
def test_what_is_exported_are_the_weights_of_the_checkpoint_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    add_tokenizer(folder(tmp_path / "model"))
    Path("c.py").write_text(CONFIG)
    flags.record(parse("--config=c.py", "--workdir=runs/x"))
    params = jax.tree.map(lambda x: jnp.asarray(x) + 1, draw(QWEN3))
    checkpoints = Checkpoints("runs/x/checkpoints", CheckpointSection())
    checkpoints.save(5, params, {"count": jnp.zeros(())}, {"step": 5}, {"loss": 1.0})
    checkpoints.close()
    parent = child().parent
    parents.make(parent)
    jax.tree.map(np.testing.assert_array_equal, hf.load(parent.folder)[1], params)
    assert child().config.model.path == "runs/x/hf/5" and validate.model_problems(child().config) == []
