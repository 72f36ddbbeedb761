"""A checkpoint becomes a Hugging Face folder; what is wrong with the command line is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dora_jax
from dora_jax import config as configs
from dora_jax import export_hf
from dora_jax.config import CheckpointSection, ModelSection, TaskSection
from dora_jax.models import hf
from dora_jax.trainer.checkpoint import Checkpoints
from tests.fakes.hf_folder import QWEN3, add_tokenizer, draw, folder


def a_run(path):
    """A workdir with its recorded config and one checkpoint, and the folder it started from."""
    source = folder(path / "base")
    add_tokenizer(source)
    workdir = path / "run"
    workdir.mkdir()
    task = TaskSection(name="reasoning_gym:chain_sum")
    recorded = configs.to_json(configs.Config(task=task, model=ModelSection(path=str(source))))
    (workdir / "config.json").write_text(json.dumps(recorded | {"dora_jax": dora_jax.__version__}))
    params = jax.tree.map(lambda x: jnp.asarray(x) + 1, draw(QWEN3))
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointSection())
    checkpoints.save(5, params, {"count": jnp.zeros(())}, {"step": 5}, {"loss": 1.0})
    checkpoints.close()
    return source, workdir, params


def test_a_checkpoint_becomes_a_folder(tmp_path):
    source, workdir, params = a_run(tmp_path)
    assert export_hf.export(workdir, None, str(source), tmp_path / "out", "float32") == 5
    cfg, loaded = hf.load(tmp_path / "out")
    assert cfg == QWEN3
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with pytest.raises(ValueError, match="holds no checkpoint of step 7; it holds"):
        export_hf.export(workdir, 7, str(source), tmp_path / "other", "float32")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out=x"], "error: workdir: missing"),
        (["--workdir=no/such/run", "--out=x"], "error: workdir: no/such/run holds no run"),
        (["--workdir=run"], "error: out: missing; name the folder to write, --out=FOLDER"),
        (["--workdir=run", "--out=base"], "base exists and is not an empty folder"),
    ],
)
def test_export_says_what_is_wrong_and_exits_with_2(arguments, message, tmp_path):
    a_run(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "dora_jax.export_hf", *arguments],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and message in done.stderr
