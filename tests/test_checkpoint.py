"""Checkpoints: what was saved comes back, elsewhere too; what is broken is never latest."""

import contextlib
import errno
import gc
import logging
import resource
import subprocess
import sys

import jax
import numpy as np
import pytest

from dora_jax import config
from dora_jax.base.digest import digest
from dora_jax.config import RunError
from dora_jax.models import sharding
from dora_jax.trainer import checkpoint, step
from tests.fakes import trainer_cases as cases
from tests.fakes.checkpoints import assert_equal, host, save, small, store_of, tree_on

READER = """
import sys
for name in ("dora_jax", "flax", "optax", "ml_collections", "tensorboardX"):
    sys.modules[name] = None  # an import of it fails
import jax, orbax.checkpoint as ocp
from orbax.checkpoint.experimental import v1
step = sys.argv[1]
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
with ocp.StandardCheckpointer() as reader:
    stored = reader.metadata(step + "/params").item_metadata.tree
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), stored)
    params = reader.restore(step + "/params", like)
again = v1.load(step, like, checkpointable_name="params")
among = v1.load_checkpointables(step, dict(params=like))["params"]
print(*(float(sum(abs(x).sum() for x in jax.tree.leaves(tree))) for tree in (params, again, among)))
"""


def trainer_on(n_devices, fsdp):
    mesh = sharding.make_mesh(jax.devices()[:n_devices], n_devices // fsdp, fsdp, 1)
    return step.Trainer(cases.MODEL, cases.SECTION, mesh, cases.params(), total_steps=9)


@pytest.fixture
def store(tmp_path):
    checkpoints = checkpoint.Checkpoints(tmp_path, config.CheckpointSection(keep=2))
    yield checkpoints
    checkpoints.close()


@pytest.mark.slow
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


def test_both_apis_of_orbax_read_the_policy_with_nothing_of_ours(store, tmp_path):
    trainer = tree_on(4)
    save(store, trainer, 7)
    store.wait()
    out = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "7")],
        capture_output=True,
        text=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
        check=False,
    )
    assert out.returncode == 0, out.stderr
    want = sum(np.abs(x).sum(dtype=np.float64) for x in jax.tree.leaves(host(trainer.params)))
    found = [float(word) for word in out.stdout.split()]  # by Orbax's API, and twice by its v1 API
    assert found == pytest.approx([want] * 3, rel=1e-4)


def test_params_without_a_mesh(store, tmp_path):
    trainer = tree_on(4)
    save(store, trainer, 2)
    store.wait()
    assert_equal(checkpoint.read_arrays(tmp_path, 2, "params"), trainer.params)


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


def test_another_dtype_is_refused(store, tmp_path):
    trainer = tree_on(1)
    save(store, trainer, 1)
    store.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=x.sharding), trainer.params)
    with pytest.raises(ValueError, match="stored as float32 and was asked for as bfloat16"):
        checkpoint.read_arrays(tmp_path, 1, "params", like)


def test_an_older_step_is_refused(store):
    trainer = tree_on(1)
    save(store, trainer, 5)
    with pytest.raises(RuntimeError, match="step 4 was refused"):
        save(store, trainer, 4)


# ------------------------------------------------------------ trust


@pytest.mark.parametrize(
    ("section", "floor", "kept"),
    [
        ({"keep": 1}, None, [7]),
        ({"keep": 2}, None, [6, 7]),
        ({"keep": 1, "keep_every": 3}, None, [3, 6, 7]),
        ({"keep": 1, "keep_best": 2}, None, [2, 4, 7]),
        ({"keep": 1}, 5, [5, 7]),
    ],
)
def test_keeps_the_newest_the_best_every_nth_and_what_is_live(tmp_path, section, floor, kept):
    rewards = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.8, 5: 0.3, 6: 0.0, 7: 0.1}
    store = store_of(tmp_path, **section)
    tree = small()
    for number, reward in rewards.items():
        if floor is not None and number >= floor:
            store.protect(floor)
        store.save(number, tree.params, tree.state.opt_state, {}, {"reward/mean": reward})
    store.close()
    assert store.steps() == kept


def test_a_parameter_that_is_not_finite_is_never_saved(tmp_path):
    store = store_of(tmp_path)
    bad = small()
    bad.params["b"] = bad.params["b"].at[3].set(jax.numpy.nan)
    with pytest.raises(ValueError, match="version 4 has parameters that are not finite"):
        save(store, bad, 4)
    store.close()
    assert store.steps() == []


def test_a_full_disk_keeps_training_with_an_alarm_and_the_last_good_step(tmp_path, monkeypatch):
    notes = []
    store = store_of(tmp_path, notes, keep=1)
    save(store, small(1), 1)
    store.wait()

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    for broken_part in ("start", "write", "manifest"):
        with monkeypatch.context() as broken:
            if broken_part == "start":
                broken.setattr(checkpoint.ocp.CheckpointManager, "save", full_disk)
            elif broken_part == "write":
                broken.setattr(checkpoint.ocp.JsonCheckpointHandler, "finalize", full_disk, raising=False)
            else:
                broken.setattr(checkpoint.manifest, "write", full_disk)
            save(store, small(2), 2)
            with contextlib.suppress(RunError):
                store.wait()
        assert len(notes) == 1 and "no space left" in notes.pop() and checkpoint.latest(tmp_path, full=True) == 1
        assert {p.name for p in tmp_path.iterdir()} == {"1"}
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # a part of the failed save that came late
    save(store, small(2), 3)
    store.close()
    assert not notes and checkpoint.latest(tmp_path, full=True) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"3"}


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_of_a_save_that_the_system_refuses_one_sentence_is_left(tmp_path, caplog):
    """Arrays larger than a file may be, met by the library's own threads."""
    store = store_of(tmp_path, notes := [])
    rng = np.random.default_rng(0)
    params = {f"w{i}": jax.numpy.asarray(rng.normal(size=(100, 100)), np.float32) for i in range(6)}
    digest(params)  # compiled before files may no longer be as large as a compiled program
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        store.save(1, params, params, {}, {})
        with pytest.raises(RunError, match="the same command goes on"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert len(notes) == 1 and "step 1 failed in the background" in notes[0]
    assert [record.getMessage() for record in caplog.records] == []
    store.save(1, params, params, {}, {})  # there is room again
    store.wait()
    assert store.latest(full=True) == 1
    store.close()


def test_writes_that_a_full_disk_leaves_behind_are_not_logged_with_their_traces():
    def logged(error):
        record = logging.makeLogRecord({"msg": "Future exception was never retrieved", "exc_info": (None, error, None)})
        return bool(logging.getLogger("asyncio").filter(record))

    assert not logged(OSError(errno.ENOSPC, "No space left on device"))
    assert logged(OSError(errno.EIO, "Input/output error")) and logged(ValueError("a bug"))
    assert logging.getLogger("asyncio").filter(logging.makeLogRecord({"msg": "slow callback"}))


def test_a_disk_without_room_is_named_and_not_what_was_being_written(tmp_path, monkeypatch):
    store = store_of(tmp_path, notes := [])

    def full_disk(*args, **kwargs):
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "w/0.0" in OCDBT database: No space left on device [...]')

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.ocp.CheckpointManager, "save", full_disk)
        save(store, small(1), 3)
    store.close()
    assert notes == [
        (
            f"the checkpoint of step 3 failed in the background: {tmp_path}: No space left on device; training goes "
            "on, and the newest good one is None"
        )
    ]


def test_another_dtype_on_request(tmp_path):
    store = store_of(tmp_path)
    tree = small()
    save(store, tree, 1)
    store.wait()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16", sharding=x.sharding), (tree.params, tree.state.opt_state)
    )
    for half in ((like[0], tree.state.opt_state), (tree.params, like[1])):
        with pytest.raises(ValueError, match="stored as float32"):
            store.restore(1, *half)
    got = store.restore(1, *like, cast=True)
    assert all(x.dtype == "bfloat16" for x in jax.tree.leaves((got.params, got.opt_state)))
    store.close()
