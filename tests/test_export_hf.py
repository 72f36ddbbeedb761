"""A checkpoint becomes a Hugging Face folder; what is wrong with the command line is reported."""

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
from dora_jax.config import CheckpointSection, ConfigError, ModelSection, TaskSection
from dora_jax.models import hf, lora, peft
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.trainer.checkpoint import Checkpoints
from tests.fakes.hf_folder import QWEN3, add_tokenizer, draw, folder


def run_of(source, lora=OFF):
    return configs.Config(
        task=TaskSection(name="reasoning_gym:chain_sum"), model=ModelSection(path=str(source)), lora=lora
    )


def a_run(path):
    """A workdir with its recorded config and one checkpoint, and the folder it started from."""
    source = folder(path / "base")
    add_tokenizer(source)
    workdir = path / "run"
    workdir.mkdir()
    recorded = configs.to_json(run_of(source))
    (workdir / "config.json").write_text(json.dumps(recorded | {"dora_jax": dora_jax.__version__}))
    params = jax.tree.map(lambda x: jnp.asarray(x) + 1, draw(QWEN3))
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointSection())
    checkpoints.save(5, params, {"count": jnp.zeros(())}, {"step": 5}, {"loss": 1.0})
    checkpoints.close()
    return source, workdir, params


def test_a_checkpoint_becomes_a_folder(tmp_path):
    source, workdir, params = a_run(tmp_path)
    assert export_hf.export(workdir, None, run_of(source), tmp_path / "out", "float32") == 5
    cfg, loaded = hf.load(tmp_path / "out")
    assert cfg == QWEN3
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with pytest.raises(ValueError, match="holds no checkpoint of step 7; it holds"):
        export_hf.export(workdir, 7, run_of(source), tmp_path / "other", "float32")


@pytest.mark.slow
def test_a_checkpoint_of_an_adapter_becomes_a_peft_folder_or_a_whole_model(tmp_path):
    """And no other base than its own is added to it."""
    source, shape = folder(tmp_path / "base"), Lora(rank=2, alpha=4.0)
    run, directory = run_of(source, shape), tmp_path / "run" / "checkpoints"
    adapter = jax.tree.map(lambda x: x + 0.5, lora.init(QWEN3, shape, 1))
    checkpoints = Checkpoints(directory, CheckpointSection())
    checkpoints.save(5, adapter, {"count": jnp.zeros(())}, {"step": 5}, {"loss": 1.0})
    checkpoints.close()
    base = hf.load(source)[1]
    checkpoint_weights.check_base(run, directory, base)
    export_hf.export(tmp_path / "run", None, run, tmp_path / "adapter", "float32", adapter=True)
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "adapter", QWEN3, shape, 0), adapter)
    export_hf.export(tmp_path / "run", None, run, tmp_path / "whole", "float32")
    merged = lora.merge(base, adapter, shape.gain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), hf.load(tmp_path / "whole")[1], merged)
    other = run_of(tmp_path / "whole", shape)
    with pytest.raises(ConfigError, match="whole holds other weights than the base of the adapters in .*/base$"):
        checkpoint_weights.read(other, directory, 5)
    with pytest.raises(ConfigError, match="gone, the base that the run's adapters stand beside, does not exist"):
        checkpoint_weights.read(run_of(tmp_path / "gone", shape), directory, 5)


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
