"""Checkpoints: what was saved comes back, elsewhere too; what is broken is never latest."""

import subprocess
import types
import sys

import jax
import numpy as np
import pytest

from dora_jax import config
from dora_jax.models import sharding
from dora_jax.trainer import checkpoint, step
from tests import trainer_cases as cases

READER = """
import sys, jax, orbax.checkpoint as ocp
path = sys.argv[1] + "/params"
with ocp.StandardCheckpointer() as reader:
    stored = reader.metadata(path).item_metadata.tree
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = reader.restore(path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored))
assert not any(name.startswith("dora_jax") for name in sys.modules)
print(float(sum(abs(x).sum() for x in jax.tree.leaves(params))))
"""


def trainer_on(n_devices, fsdp):
    mesh = sharding.make_mesh(jax.devices()[:n_devices], n_devices // fsdp, fsdp, 1)
    return step.Trainer(cases.MODEL, cases.SECTION, mesh, cases.params(), total_steps=9)


def tree_on(n_devices):
    """Something to save without a model: one array over the devices, one on each."""
    mesh = sharding.make_mesh(jax.devices()[:n_devices], 1, n_devices, 1)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    params = {"w": jax.device_put(np.arange(64, dtype=np.float32) + 1, place),
              "layers": {"norm": np.ones((2, 3), np.float32)}}
    params = jax.tree.map(jax.numpy.asarray, params)
    return types.SimpleNamespace(params=params, state=types.SimpleNamespace(opt_state={"mu": params["w"] * 2}))


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, host(a), host(b))


@pytest.fixture
def store(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, config.CheckpointSection(keep=2))
    yield checkpoints
    checkpoints.close()


def save(store, trainer, number):
    store.save(number, trainer.params, trainer.state.opt_state, {"next_group_id": number * 10}, {"reward/mean": 0.5})


def test_restores_on_another_mesh_though_the_next_step_donated_the_buffers(store, tmp_path):
    trainer = trainer_on(4, 2)
    batch = cases.batch(trainer)
    trainer.step(batch)
    before = host(trainer.state)
    save(store, trainer, 1)
    trainer.step(batch)  # donates what is still being written
    store.wait()
    other = trainer_on(2, 1)
    like = other.abstract_state()
    got = store.restore(store.latest(), like.params, like.opt_state)
    assert_equal(got.params, before.params)
    assert_equal(got.opt_state, before.opt_state)
    assert got.rl_state == {"next_group_id": 10} and got.metrics == {"reward/mean": 0.5}
    other.load(got.params, got.opt_state, 1)
    want = trainer.state  # one step on from the same state, on the other mesh
    other.step(cases.batch(other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), host(other.params), host(want.params))


def test_a_reader_with_jax_and_orbax_only(store, tmp_path):
    trainer = tree_on(4)
    save(store, trainer, 7)
    store.wait()
    out = subprocess.run([sys.executable, "-c", READER, str(tmp_path / "7")], capture_output=True, text=True,
                         env={"JAX_PLATFORMS": "cpu", "PATH": ""}, check=False)
    assert out.returncode == 0, out.stderr
    want = sum(np.abs(x).sum(dtype=np.float64) for x in jax.tree.leaves(host(trainer.params)))
    assert float(out.stdout) == pytest.approx(want, rel=1e-4)


def test_params_without_a_mesh(store, tmp_path):
    trainer = tree_on(4)
    save(store, trainer, 2)
    store.wait()
    assert_equal(checkpoint.read_params(tmp_path, 2), trainer.params)


def test_keeps_the_newest_and_counts_no_empty_folder(store, tmp_path):
    trainer = tree_on(1)
    for number in (1, 2, 5):
        save(store, trainer, number)
    store.wait()
    (tmp_path / "9").mkdir()
    assert store.latest() == 5 and checkpoint.steps(tmp_path) == [2, 5]
    store.close()
    again = checkpoint.Checkpoints(tmp_path, config.CheckpointSection(keep=2))
    save(again, trainer, 6)  # the empty folder 9 would make Orbax refuse a lower step
    again.wait()
    assert again.latest() == 6
    again.close()


def test_a_save_that_fails_in_the_background_raises_and_is_never_latest(store, tmp_path, monkeypatch):
    trainer = tree_on(1)
    save(store, trainer, 1)
    store.wait()

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.ocp.JsonCheckpointHandler, "finalize", full_disk, raising=False)
        save(store, trainer, 2)
        with pytest.raises(RuntimeError, match="step 2 failed in the background.*no space left"):
            store.wait()
    assert store.latest() == 1
    save(store, trainer, 3)
    store.wait()
    assert store.latest() == 3


def test_a_flipped_bit_and_a_truncated_file_are_passed_over(store, tmp_path):
    trainer = tree_on(1)
    for number in (1, 2):
        save(store, trainer, number)
    store.wait()
    data = max((tmp_path / "2" / "params").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert store.latest() == 2 and store.latest(full=True) == 1
    data.write_bytes(content[:-1])
    assert store.latest() == 1
    store.close()
    again = checkpoint.Checkpoints(tmp_path, config.CheckpointSection(keep=2))
    assert (tmp_path / "2.broken").is_dir()
    save(again, trainer, 2)
    again.wait()
    assert again.latest(full=True) == 2
    again.close()


def test_a_step_killed_before_its_manifest_is_adopted_and_a_half_written_one_removed(store, tmp_path):
    trainer = tree_on(1)
    save(store, trainer, 4)
    store.wait()
    store.close()
    (tmp_path / "4" / "manifest.json").unlink()
    (tmp_path / "8.orbax-checkpoint-tmp").mkdir()
    assert checkpoint.latest(tmp_path) is None
    again = checkpoint.Checkpoints(tmp_path, config.CheckpointSection(keep=2))
    assert again.latest(full=True) == 4 and not (tmp_path / "8.orbax-checkpoint-tmp").exists()
    again.close()


def test_another_dtype_is_refused(store, tmp_path):
    trainer = tree_on(1)
    save(store, trainer, 1)
    store.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=x.sharding), trainer.params)
    with pytest.raises(ValueError, match="stored as float32 and was asked for as bfloat16"):
        store.restore_params(1, like)


def test_an_older_step_is_refused(store):
    trainer = tree_on(1)
    save(store, trainer, 5)
    with pytest.raises(RuntimeError, match="step 4 was refused"):
        save(store, trainer, 4)
