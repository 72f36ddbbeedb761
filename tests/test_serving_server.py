"""The endpoint's process: what it serves of a folder and of a run that goes on, and what it refuses before it
starts."""

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dora_jax import config as configs
from dora_jax.config import CheckpointSection, Config, ConfigError, ModelSection
from dora_jax.models import hf, lora, peft, sharding
from dora_jax.models.lora_config import Lora
from dora_jax.serving import server
from dora_jax.trainer.checkpoint import Checkpoints
from tests.fakes import hf_folder

ROOT = Path(__file__).parent.parent
OPTIONS = server.Options(host="127.0.0.1", port=0, name="policy", session_idle_s=60.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.7", "a.example"])
def test_an_address_that_others_reach_wants_a_secret(host):
    with pytest.raises(ConfigError, match=f"^host: {host} .* DORA_SERVE_TOKEN"):
        server.serve(Config(), dataclasses.replace(OPTIONS, host=host), None)


def test_a_port_that_is_taken_is_refused_before_the_model_is_read():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="^port: .* in use"):
        server.serve(Config(), dataclasses.replace(OPTIONS, port=taken.getsockname()[1]), None)


@pytest.mark.parametrize("address, url", [(("127.0.0.1", 80), "127.0.0.1:80"), (("::1", 80, 0, 0), "[::1]:80")])
def test_the_address_that_is_printed_can_be_opened(address, url):
    endpoint = SimpleNamespace(limits=SimpleNamespace(context=128))
    sentence = server.where(endpoint, SimpleNamespace(getsockname=lambda: address), "policy@3")
    assert sentence == f"policy@3 is served at http://{url}/v1, 128 tokens a request"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, sentence",
    [(["--model=a", "--workdir=b"], "error: model: name either a folder"),
     (["--model=MODEL", "--step=3"], "error: step: "),
     (["--model=nothing"], "error: model: nothing holds no config.json")],
)  # fmt: skip
def test_the_command_says_what_it_serves(flags, sentence, tmp_path):
    folder = hf_folder.folder(tmp_path / "model")
    command = [sys.executable, "-m", "dora_jax.serve", "--port=0", *(f.replace("MODEL", str(folder)) for f in flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(sentence) and "Traceback" not in done.stderr, done.stderr


def test_a_run_offers_its_newest_checkpoint_and_those_that_follow(tmp_path):
    folder, directory = hf_folder.folder(tmp_path / "model"), tmp_path / "run/checkpoints"
    section = configs.ModelSection(path=str(folder), dtype="float32")
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    first = server.read_folder(Config(model=section), mesh)
    store = Checkpoints(directory, CheckpointSection(keep=3), lambda sentence: None)
    second = jax.tree.map(lambda x: x + 1, first)
    store.save(2, first, {"step": np.ones(1, np.float32)}, {}, {})
    store.wait()
    following = server.RunSource(Config(model=section), hf_folder.QWEN3, mesh, tmp_path / "run", None)
    pinned = server.RunSource(Config(model=section), hf_folder.QWEN3, mesh, tmp_path / "run", 2)
    store.save(4, second, {"step": np.ones(1, np.float32)}, {}, {})
    store.close()
    assert (following.first, following.newest(), pinned.newest()) == (2, 4, None)
    for version, expected in ((2, first), (4, second)):
        jax.tree.map(np.testing.assert_array_equal, following.read(version), expected)
    with pytest.raises(ConfigError, match=r"step: .* holds no checkpoint of step 3; it holds \[2, 4\]"):
        server.RunSource(Config(model=section), hf_folder.QWEN3, mesh, tmp_path / "run", 3)


@pytest.mark.slow
def test_a_folder_is_served_with_the_adapter_that_is_named(tmp_path):
    shape = Lora(rank=2, alpha=4.0, path=str(tmp_path / "adapter"))
    base, cfg = hf_folder.folder(tmp_path / "base"), hf_folder.QWEN3
    adapter = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), lora.abstract(cfg, shape))
    peft.save(tmp_path / "adapter", cfg, shape, adapter, "base")
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    asked = Config(model=ModelSection(path=str(base)), lora=shape)
    served = server.read_folder(asked, mesh)
    jax.tree.map(np.testing.assert_array_equal, served, lora.merge(hf.load(base)[1], adapter, shape.gain))
    wrong = dataclasses.replace(asked, lora=dataclasses.replace(shape, rank=3))
    with pytest.raises(ConfigError, match=r"lora\.path: .* has r=2, and lora\.rank is 3: they must be equal"):
        server.read_folder(wrong, mesh)
