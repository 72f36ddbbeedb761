"""Checkpoints of a cluster in a bucket: parts of processes that see no folder of each other, and the manifest, last."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import zlib

import jax
import numpy as np
import pytest

from dora_jax.config import CheckpointSection, ConfigError
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.checkpoint_shards import CheckpointWriter, StepBucket, steps_at
from dora_jax.runtime.cluster.gang import CallRefused
from dora_jax.runtime.cluster.remote_trainer import RemoteCheckpoints
from dora_jax.runtime.cluster_backend import wish_at
from dora_jax.runtime.journal import workdir_mirror
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.runtime.journal.object_storage import Objects, StoreError
from dora_jax.trainer import checkpoint
from tests.fakes.sharded_state import like_on, values_of
from tests.fakes.tiny_run import CONFIG
from tests.fakes.two_processes import alone_and_together


def test_the_parts_of_two_processes_are_a_step_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("DORA_TEST_URL", f"file://{tmp_path}/store")
    (tmp_path / "scratch").mkdir()
    alone, together = alone_and_together("checkpoint_process")
    assert all(all(process["same"]) for process in (alone, *together))
    assert alone["digests"] == together[0]["digests"] == together[1]["digests"] and len(alone["digests"]) == 2
    for processes, parts in ((1, [alone]), (2, together)):
        url = f"file://{tmp_path}/store/{processes}"
        names = [set(part["files"]) for part in parts]
        assert sum(map(len, names)) == len(set.union(*names)), "no two put the same"
        for name in ("params/embed", "opt_state/0.mu.layers.w"):
            assert all(any(re.fullmatch(rf"{name}/[0-9.]+", each) for each in mine) for mine in names)
        steps = StepBucket(url)
        steps.tidy()
        assert steps.steps() == [], "a step without a manifest is none, and is swept"
        assert not any("/2/" in key or "/3/" in key for key in Objects(url).keys())


def test_a_step_is_read_on_any_mesh_by_a_cluster_and_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    url = f"file://{tmp_path}/store"
    home, like = CheckpointWriter(url, 0), like_on(jax.devices()[:4])
    values = values_of(like)
    saver = home.checkpoints(CheckpointSection(), print)
    steps = StepBucket(url)
    saver.save(7, values["params"], values["opt_state"], {"cursors": [1, 2]}, {"reward/mean": 0.5})
    saver.wait()
    saver.close()
    steps.seal(7, [saver.part[1]])
    assert StepBucket(url).steps() == [7] and steps.fault(7) is None
    assert steps.read_json(7, "rl_state") == {"cursors": [1, 2]}
    shutil.rmtree(home.folder)
    other = like_on(jax.devices()[2:4])
    back = home.restore(7, other["params"], other["opt_state"])
    jax.tree.map(np.testing.assert_array_equal, back, (values["params"], values["opt_state"]))
    assert jax.tree.map(lambda x: x.sharding, back[0]) == jax.tree.map(lambda x: x.sharding, other["params"])
    wrong = jax.tree.map(lambda x: x.update(dtype=np.float16), other["params"])
    with pytest.raises(ValueError, match=r"params/embed is float32\[8, 4\], and was asked for as float16"):
        home.restore(7, wrong, other["opt_state"])
    folder = workdir_mirror.attach(url, "evaluate")
    workdir_mirror.fetch(folder)  # as a run in one process does, which reads it by Orbax
    assert checkpoint.latest(folder / "checkpoints", full=True) == 7
    restored = checkpoint.restore(folder / "checkpoints", 7, other["params"], other["opt_state"])
    jax.tree.map(np.testing.assert_array_equal, restored.params, values["params"])


def test_a_step_that_a_run_in_one_process_saved_is_gone_on_from(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    url, like = f"file://{tmp_path}/store", like_on(jax.devices()[:2])
    values = values_of(like)
    folder = workdir_mirror.attach(url, "train")
    saver = checkpoint.Checkpoints(folder / "checkpoints", CheckpointSection(), print)
    with workdir_mirror.mirrored(folder, print) as mirror:
        saver.save(4, values["params"], values["opt_state"], {}, {})
        saver.wait()
        mirror.settle()
    steps = steps_at(url, print)
    assert steps.steps() == [4] and steps.fault(4) is None
    back = CheckpointWriter(url, 0).restore(4, like["params"], like["opt_state"])
    jax.tree.map(np.testing.assert_array_equal, back, (values["params"], values["opt_state"]))


def sealed(tmp_path, step=5, name="params/w/0"):
    url = f"file://{tmp_path}/store"
    store, steps = Objects(url), StepBucket(url)
    store.put(f"checkpoints/{step}/{name}", b"weights")
    steps.seal(step, [{name: [7, zlib.crc32(b"weights")]}])
    return store, steps


def test_what_a_gang_ended_over_is_left_for_a_person(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    url = f"file://{tmp_path}/store"
    (CheckpointWriter(url, 1).folder / "bad_batch_3.npz").write_bytes(b"batch")
    assert list(CheckpointWriter(url, 1).folder.iterdir()) == [] and Objects(url).get("bad_batch_3.npz") == b"batch"


def test_what_was_damaged_or_is_missing_in_the_bucket_is_found(tmp_path):
    store, steps = sealed(tmp_path)
    assert steps.fault(5) is None and "no manifest" in steps.fault(6)
    store.put("checkpoints/5/params/w/0", b"WEIGHTS")
    assert "checksum" in steps.fault(5)
    store.put("checkpoints/5/params/w/0", b"weight")
    assert "has 6 bytes, not 7" in steps.fault(5)
    store.drop("checkpoints/5/params/w/0")
    assert "missing" in steps.fault(5)
    steps.set_aside(5, "broken")
    assert StepBucket(store.url).steps() == steps.steps() == [] and store.keys() == []


def test_no_step_without_all_that_its_manifest_would_name(tmp_path):
    store, steps = sealed(tmp_path)
    store.put("checkpoints/8/params/w/0", b"weights")
    with pytest.raises(StoreError, match="params/w/1 was put, and is not there"):
        steps.seal(8, [{"params/w/0": [7, 1]}, {"params/w/1": [7, 1]}])
    with pytest.raises(RuntimeError, match="two processes put params/w/0 of step 8"):
        steps.seal(8, [{"params/w/0": [7, 1]}, {"params/w/0": [7, 1]}])
    assert steps.steps() == StepBucket(store.url).steps() == [5]


def test_a_bucket_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="workdir: file://.* cannot be used"):
        steps_at(f"file://{tmp_path}/file/store", print)


class Trainer:
    """A gang of two processes that answer at once: `put`, the newest step of each."""

    def __init__(self, store):
        self.store, self.put, self.gang = store, [None, None], self

    def cast(self, what):
        answers = [
            messages.Done(value=0)
            if step is None
            else messages.CheckpointFiles(step=step, files={f"params/w/{rank}": [7, 1]})
            for rank, step in enumerate(self.put)
        ]
        done = threading.Event()
        done.set()
        return types.SimpleNamespace(done=done, wait=lambda: answers)

    def saved(self, rank, step):
        self.store.put(f"checkpoints/{step}/params/w/{rank}", b"weights")
        if rank == 0:
            self.store.put(f"checkpoints/{step}/metrics/metrics", b'{"reward/mean": 1.0}')
        self.put[rank] = step


def test_a_step_is_one_when_all_processes_have_put_it_and_old_ones_make_room(tmp_path):
    store, notes = Objects(f"file://{tmp_path}/store"), []
    trainer, steps = Trainer(store), StepBucket(store.url)
    checkpoints = RemoteCheckpoints(steps, CheckpointSection(keep=2, keep_best=0), trainer, notes.append)
    checkpoints.protect(2)
    for step in (1, 2, 3):
        trainer.saved(0, step)
        checkpoints.wait()
        assert step not in checkpoints.steps(), "the other process is not so far"
        trainer.saved(1, step)
        checkpoints.wait()
    assert checkpoints.steps() == StepBucket(store.url).steps() == [2, 3] and not notes
    for rank, step in ((0, 4), (1, 5), (0, 6), (1, 6), (0, 7), (1, 7)):
        trainer.saved(rank, step)
        checkpoints.wait()
    assert checkpoints.steps() == [2, 6, 7], "samples still run at version 2"
    assert {key.split("/")[1] for key in store.keys()} == {"2", "6", "7"}, "nor is anything left of steps 4 and 5"


def test_a_store_that_fails_is_an_alarm_and_the_step_comes_later(tmp_path, monkeypatch):
    store, notes = Objects(f"file://{tmp_path}/store"), []
    trainer, steps = Trainer(store), StepBucket(store.url)
    checkpoints = RemoteCheckpoints(steps, CheckpointSection(), trainer, notes.append)
    trainer.saved(0, 1), trainer.saved(1, 1)

    def fail(store, key, data):
        raise StoreError("UNAVAILABLE: 503")

    monkeypatch.setattr(Objects, "put", fail)
    checkpoints.wait(), checkpoints.wait()
    assert len(notes) == 1 and "kept up (UNAVAILABLE: 503): the newest that is whole is None" in notes[0]
    monkeypatch.undo()
    checkpoints.close()
    assert checkpoints.steps() == [1] and len(notes) == 1


def test_the_number_of_instances_is_an_object_too(tmp_path):
    wish = wish_at(f"file://{tmp_path}/store")
    assert wish() is None
    Objects(f"file://{tmp_path}/store").put("wanted_instances", b" 2\n")
    assert wish() == "2"


def train(tmp_path, console):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dora_jax.train",
            f"--config={tmp_path}/config.py",
            f"--workdir=file://{tmp_path}/store",
            "--config.steps=6",
            "--config.rollout.instances=1",
            "--config.cluster.wire=storage",
            "--config.trainer.overlong_cache=24",
        ],
        stdout=console.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch"), "DORA_COMPILE_CACHE": str(tmp_path / "cache")},
    )


@pytest.mark.slow
@pytest.mark.alone  # a process that sends nothing for ten seconds is taken for dead
def test_a_cluster_that_is_killed_goes_on_from_the_bucket_alone(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    (tmp_path / "scratch").mkdir()
    url, console = f"file://{tmp_path}/store", tmp_path / "console.log"
    run = train(tmp_path, console)
    try:
        while not list((tmp_path / "store").glob("checkpoints/*/manifest.json")) and run.poll() is None:
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGKILL)  # controller, trainer and instance at once
        assert run.wait() == -signal.SIGKILL, console.read_text()
        shutil.rmtree(tmp_path / "scratch")  # other machines
        (tmp_path / "scratch").mkdir()
        run = train(tmp_path, console)
        assert run.wait(400) == 0, console.read_text()
    finally:
        run.kill()
    assert "resuming at step" in console.read_text()
    books = audit(f"{url}/journal")
    assert books.ok and books.trained == 12 and books.epochs == 1 and books.weights == 6, books
    steps = StepBucket(url)
    assert steps.steps()[-1] == 6 and all(steps.fault(step) is None for step in steps.steps())


class Holder:
    """A gang whose arrays have the params digest of their step; else it declines."""

    def __init__(self):
        self.digests, self.restored = {}, []

    def check(self, step):
        if self.digests[step].params != step:
            raise CallRefused("params came back with other values than were saved")

    def restore(self, step):
        self.check(step)
        self.restored.append(step)


def test_a_checkpoint_is_restored_and_adopted_only_with_the_digests_of_its_save(tmp_path):
    saver = checkpoint.Checkpoints(tmp_path / "checkpoints", CheckpointSection(), print)
    saver.save(3, {"w": np.ones(3, np.float32)}, {"count": np.int32(1)}, {"cursors": (1, 2)}, {})
    saver.wait()
    ((_, digests),) = saver.take_saves()
    saver.close()
    good, folder = digests._replace(params=3), tmp_path / "checkpoints" / "3"
    steps, gang = steps_at(str(tmp_path), print), Holder()
    store = RemoteCheckpoints(steps, CheckpointSection(), gang, print)
    for wrong in ("params", "rl_state"):
        with pytest.raises(checkpoint.UnusableCheckpoint, match=f"{wrong} came back with other values"):
            store.restore(3, None, None, good._replace(**{wrong: 5}))
    assert gang.restored == [] and store.restore(3, None, None, good).rl_state == {"cursors": [1, 2]}
    (folder / "manifest.json").unlink()
    assert store.unsealed() == [3] and store.steps() == []
    for wrong in ("params", "rl_state"):
        with pytest.raises(checkpoint.UnusableCheckpoint, match=f"{wrong} came back with other values"):
            store.adopt(3, None, None, good._replace(**{wrong: 5}))
    assert store.unsealed() == [3], "nothing has changed"
    store.adopt(3, None, None, good)
    assert store.steps() == [3] and steps.fault(3) is None


def test_metadata_by_which_others_find_the_arrays_is_checked_before_a_step_is_adopted(tmp_path):
    like = like_on(jax.devices()[:2])
    values, home = values_of(like), CheckpointWriter(str(tmp_path), 0)
    saver = home.checkpoints(CheckpointSection(), print)
    saver.save(3, values["params"], values["opt_state"], {}, {})
    saver.wait()
    saver.close()
    args = 3, like["params"], like["opt_state"]
    jax.tree.map(
        np.testing.assert_array_equal, home.restore(*args, unsealed=True), (values["params"], values["opt_state"])
    )
    (tmp_path / "checkpoints/3/params/_METADATA").write_text("")
    with pytest.raises(ValueError, match="its metadata cannot be read"):
        home.restore(*args, unsealed=True)
