"""A workdir in object storage: the store alone is the run, whatever the scratch folder says or has lost."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import tensorstore

from dora_jax.base.exits import Stop
from dora_jax.config import ConfigError
from dora_jax.runtime.journal import object_storage, workdir_mirror
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.trainer import manifest


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store"


def test_a_scratch_folder_that_others_could_change_is_refused(url, tmp_path):
    mine = tmp_path / f"scratch/dora_jax-{os.getuid()}"
    mine.parent.mkdir()
    (tmp_path / "theirs").mkdir()
    mine.symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=f"workdir: .*{mine.name}, which is not a folder of this user's alone"):
        workdir_mirror.attach(url, "train")
    mine.unlink()
    mine.mkdir()
    mine.chmod(0o777)
    with pytest.raises(ConfigError, match="this user's alone"):
        workdir_mirror.attach(url, "train")
    mine.rmdir()
    assert workdir_mirror.attach(url, "train").is_relative_to(mine) and mine.stat().st_mode & 0o077 == 0


def test_a_run_in_a_bucket_that_never_began_leaves_no_config_to_keep_to(url):
    (workdir_mirror.attach(url, "train") / "config.json").write_text("{}")
    (workdir_mirror.scratch(url, "train") / "overrides.json").write_text("{}")
    workdir_mirror.claim(workdir_mirror.scratch(url, "train"))
    assert not (workdir_mirror.attach(url, "train") / "config.json").exists()
    assert (workdir_mirror.attach(url, "evaluate") / "config.json").exists()


def begun(url):
    """A run's scratch folder, as the command line leaves it."""
    folder = workdir_mirror.attach(url, "train")
    for name in workdir_mirror.CONFIG:
        (folder / name).write_text("{}")
    return folder


def save(folder, step, content=b"weights"):
    root = folder / "checkpoints" / str(step)
    (root / "params").mkdir(parents=True)
    (root / "params" / "d").write_bytes(content * step)
    manifest.write(root)


def test_a_fresh_machine_gets_the_steps_that_are_whole_and_the_logs(url):
    folder = begun(url)
    with workdir_mirror.mirrored(folder, print) as mirror:
        save(folder, 5)
        save(folder, 10)
        (folder / "metrics.jsonl").write_text('{"step": 10}\n')
        mirror.settle()
        shutil.rmtree(folder / "checkpoints" / "5")
        mirror.settle()
        assert mirror.steps() == [10]
    store = object_storage.opened(url)
    store.write("checkpoints/15/params/d", b"of a step that never got its manifest").result()
    shutil.rmtree(folder)
    folder = begun(url)
    save(folder, 20)  # of another machine's past: the store does not know it
    with workdir_mirror.mirrored(folder, print) as mirror:
        assert mirror.steps() == manifest.steps(folder / "checkpoints") == [10]
        assert manifest.fault(folder / "checkpoints" / "10", full=True) is None
        assert (folder / "metrics.jsonl").read_text() == '{"step": 10}\n'
        with pytest.raises(ConfigError, match="another run on this machine"), workdir_mirror.mirrored(folder, print):
            pass
    assert not any(b"/15/" in key or b"/5/" in key for key in store.list().result())


def test_of_a_log_that_grows_only_its_end_is_sent_and_a_new_machine_has_all_of_it(url, monkeypatch):
    for module in (object_storage, workdir_mirror):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    sent, put = [], object_storage.Objects.put
    monkeypatch.setattr(object_storage.Objects, "put", lambda *a: sent.append(len(a[2])) or put(*a))
    folder, store = begun(url), object_storage.Objects(url)
    (folder / "metrics.jsonl").write_bytes(text := b"".join(b"%07d\n" % n for n in range(100)))
    store.put("metrics.jsonl", text[:640])  # as an earlier version left it, whole

    def copied(more):
        nonlocal text
        text += more
        with workdir_mirror.mirrored(folder, print):  # what the store has is brought here first
            sent.clear()
            (folder / "metrics.jsonl").write_bytes(text)
        assert store.log("metrics.jsonl") == (folder / "metrics.jsonl").read_bytes() == text
        return sum(sent)

    text = text[:640]
    assert copied(b"") > 640 and copied(b"") <= 64 + 4  # the last block again, and the configuration
    assert copied(b"another\n") <= 64 + 8 + 4 and copied(b"x" * 100 + b"\n") <= 64 + 101 + 4
    shutil.rmtree(folder)
    begun(url)
    assert copied(b"of another machine\n") <= 64 + 19 + 4
    store.put("metrics.jsonl", text)  # whole, as one whose blocks were sent and which was not
    assert copied(b"more\n") > len(text) - 64 and store.get("metrics.jsonl") == text[:64]
    text = b"another file: " + b"y" * 200
    assert copied(b"\n") > 200
    text = b"a short one"
    assert copied(b"\n") < 20


def test_a_name_that_leads_out_of_the_folder_is_refused_and_a_foreign_one_is_left_alone(url, tmp_path, monkeypatch):
    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory", "path": "run/"}, context=context).result()
    monkeypatch.setattr(object_storage, "opened", lambda *_: memory)
    store, folder = object_storage.Objects(url), begun(url)
    for name in ("checkpoints/", "checkpoints/latest/MANIFEST.json", "checkpoints/notes.txt", "logs/"):
        store.put(name, b"")
    with workdir_mirror.mirrored(folder, print) as mirror:
        assert mirror.steps() == []
        save(folder, 5)
        mirror.settle()
    assert store.get("checkpoints/notes.txt") == b""
    (folder / "metrics.jsonl").write_text("{}\n")
    store.put("metrics.jsonl/x", b"its folder would be where a file is")
    with workdir_mirror.mirrored(folder, print):
        assert (folder / "metrics.jsonl").read_text() == "{}\n"
    for name in ("../../stolen", "/stolen", "checkpoints/5/../../../stolen"):
        store.put(name, b"x")
        with pytest.raises(ConfigError, match="which no run writes: remove it"), workdir_mirror.mirrored(folder, print):
            pass
        store.drop(name)
    assert not list(tmp_path.rglob("stolen"))


def test_what_only_the_store_holds_is_neither_brought_here_nor_overwritten(url):
    theirs = {"controller.json": b"{}", "wanted_instances": b"2", "weights/v1/w/c/0": b"w", "journal/MANIFEST": b"{}"}
    for key, data in theirs.items():
        object_storage.Objects(url).put(key, data)
    folder = begun(url)
    with workdir_mirror.mirrored(folder, print):
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [
            "checkpoints",
            *sorted(workdir_mirror.CONFIG),
        ]
        for key in theirs:
            object_storage.Objects(url).put(key, b"newer")
    assert all(object_storage.Objects(url).get(key) == b"newer" for key in theirs)


def test_a_step_that_was_damaged_here_comes_from_the_store_and_one_made_again_goes_there(url):
    folder = begun(url)
    with workdir_mirror.mirrored(folder, print) as mirror:
        save(folder, 5)
        mirror.settle()
    (folder / "checkpoints" / "5" / "params" / "d").write_bytes(b"WEIGHTS" * 5)
    with workdir_mirror.mirrored(folder, print) as mirror:
        assert (folder / "checkpoints" / "5" / "params" / "d").read_bytes() == b"weights" * 5
        shutil.rmtree(folder / "checkpoints" / "5")
        save(folder, 5, b"others!")
        mirror.settle()
    assert object_storage.opened(url).read("checkpoints/5/params/d").result().value == b"others!" * 5
    object_storage.Objects(url).drop("checkpoints/5/params/d")  # what the store has lost of it is here
    with workdir_mirror.mirrored(folder, print) as mirror:
        assert mirror.steps() == [5]
    assert object_storage.opened(url).read("checkpoints/5/params/d").result().value == b"others!" * 5


def test_a_store_that_fails_is_an_alarm_and_never_half_a_step(url, monkeypatch):
    notes, folder = [], begun(url)
    with workdir_mirror.mirrored(folder, notes.append) as mirror:
        put, left = object_storage.Objects.put, [1]

        def failing(store, key, data):
            left[0] -= 1
            if left[0] < 0:
                raise OSError("UNAVAILABLE: 503")
            put(store, key, data)

        save(folder, 5)
        monkeypatch.setattr(object_storage.Objects, "put", failing)
        with pytest.raises(Stop, match="503.*the same command goes on"):
            mirror.settle()
        assert mirror.steps() == [] and len(notes) == 1 and "cannot be written" in notes[0]
        left[0] = 100
        mirror.settle()
        assert mirror.steps() == [5] and "written again" in notes[1]


def train(url, tmp_path, **env):
    base = tmp_path / "base"
    command = [
        sys.executable,
        "-m",
        "tests.fakes.faults",
        "dora_jax.train",
        "--config=configs/quickstart.py:tiny",
        f"--workdir={url}",
        "--config.steps=12",
        "--config.checkpoint.every=3",
        "--config.journal.keep_all=True",
        "--config.journal.partial_s=0.2",
        "--config.orchestrator.filter_zero_variance=False",
        "--config.trainer.overlong_cache=64",
        f"--config.model.path={base}",
        f"--config.sft.out={base}",
    ]
    return run(command, tmp_path, **env)


def run(command, tmp_path, **env):
    env = {**os.environ, "TMPDIR": str(tmp_path), **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_store_alone(tmp_path):
    url = f"file://{tmp_path}/store"
    (tmp_path / "store").mkdir()
    for point in ("trainer.after_put:8", "journal.before_commit:4"):
        assert train(url, tmp_path, DORA_FAULT=point).returncode == -signal.SIGKILL
        shutil.rmtree(tmp_path / f"dora_jax-{os.getuid()}")  # the scratch folders: another machine
    done = train(url, tmp_path)
    assert done.returncode == 0 and "resuming at step" in done.stdout + done.stderr, done.stdout + done.stderr
    books = audit(f"{url}/journal")
    assert books.ok and books.trained == 24 and books.epochs == 1 and books.weights == 12
    shutil.rmtree(tmp_path / f"dora_jax-{os.getuid()}")
    reader = object_storage.opened(url)
    assert reader.read("checkpoints/12/manifest.json").result().state == "value"
    rows = reader.read("metrics.jsonl").result().value.splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "trainer/step_s" in row][-1] == 12


@pytest.mark.parametrize("workdir", ["file:///proc/no_such_bucket", "gs://"])
def test_a_bucket_that_cannot_be_used_is_one_sentence(workdir, tmp_path):
    out = train(workdir, tmp_path)
    assert out.returncode == 2 and out.stderr.count("error:") == 1, out.stderr
    assert f"error: workdir: {workdir}" in out.stderr and "Traceback" not in out.stderr
