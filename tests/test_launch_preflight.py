"""What is found before a job starts: locks that a process holds and that none does, storage, clocks, chips, meshes."""

import importlib.util
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.error
from pathlib import Path

import pytest

from dora_jax.cli import parents
from dora_jax.config import ConfigError

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("preflight", ROOT / "launch/preflight.py")
preflight = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(preflight)

CONFIG = f"--config={ROOT / 'configs/quickstart.py'}:tiny"
CLUSTER = (
    CONFIG,
    "--config.cluster.launcher=ray",
    "--config.rollout.instances=2",
    "--config.cluster.trainer_hosts=2",
    "--config.trainer.rows=8",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DORA_DEVICES", "1")


def test_a_lock_is_removed_when_its_process_is_gone_and_not_before(tmp_path):
    lock = tmp_path / "libtpu_lockfile"
    assert preflight.check_lock(lock).endswith("not there")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
        import fcntl, sys
        file = open({str(lock)!r}, "w")
        fcntl.lockf(file, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
        """),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    holder.stdout.readline()
    try:
        with pytest.raises(preflight.Unfit, match=f"process {holder.pid} has the TPU"):
            preflight.check_lock(lock)
        (tmp_path / "none").write_text("")  # /proc/locks of a container that may not see the holder
        with pytest.raises(preflight.Unfit, match="has the TPU"):
            preflight.check_lock(lock, locks=tmp_path / "none")
        assert lock.exists()
    finally:
        holder.kill()
        holder.wait()
    assert preflight.check_lock(lock, dry_run=True).endswith("stale, would be removed") and lock.exists()
    assert preflight.check_lock(lock).endswith("stale, removed") and not lock.exists()


def test_a_workdir_is_written_renamed_and_left_empty(tmp_path):
    assert "written, renamed and read" in preflight.check_folder(tmp_path / "runs/a")
    assert list((tmp_path / "runs/a").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(preflight.Unfit, match="Not a directory"):
        preflight.check_folder(tmp_path / "file/runs")


@pytest.mark.parametrize("ahead_s", [60.0, -60.0])
def test_a_clock_that_differs_from_the_storages_is_found(tmp_path, monkeypatch, ahead_s):
    now_s = time.time()
    monkeypatch.setattr(preflight.time, "time", lambda: now_s + ahead_s)
    with pytest.raises(preflight.Unfit, match="clock differs from its storage's by"):
        preflight.check_folder(tmp_path)


def test_a_bucket_is_written_read_and_left_empty(tmp_path):
    url = f"file://{tmp_path}/bucket"
    assert preflight.check_bucket(url) == f"{url}: written, read and deleted"
    assert list((tmp_path / "bucket").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(preflight.Unfit, match="file/runs"):
        preflight.check_bucket(f"file://{tmp_path}/file/runs")


def test_googles_storage_tells_the_time_even_to_who_may_not_ask(monkeypatch):
    def refuse(url, timeout):
        raise urllib.error.HTTPError(url, 400, "Bad Request", {"Date": "Sat, 21 Nov 2026 15:00:00 GMT"}, None)

    monkeypatch.setattr(preflight.urllib.request, "urlopen", refuse)
    assert preflight.bucket_time_s() == 1795273200.0


def test_chips_are_counted_by_their_device_files(tmp_path):
    (tmp_path / "vfio").mkdir()
    for name in ("vfio/vfio", "vfio/0", "vfio/1", "accelerator"):
        (tmp_path / name).write_text("")
    assert preflight.check_chips(2, tmp_path) == preflight.check_chips(0, tmp_path) == "2 TPU chips"
    with pytest.raises(preflight.Unfit, match="2 TPU chips, not the 4"):
        preflight.check_chips(4, tmp_path)


def test_versions_are_equal_where_the_code_is(tmp_path):
    code = tmp_path / "dora_jax/a.py"
    code.parent.mkdir()
    code.write_text("x = 1")
    line = preflight.versions()
    assert line.startswith(f"versions: python={sys.version.split()[0]} jax=") and line == preflight.versions()
    code.write_text("x = 2")
    assert preflight.versions() != line


@pytest.mark.parametrize(
    "hosts, trainer, replica, args, says",
    [
        (1, 4, 0, (CONFIG,), "devices: 4, trainer and instances own theirs"),
        (4, 4, 1, CLUSTER, "4 machines; trainer: 2 of 4 devices"),
        (4, 4, 1, (*CLUSTER, "--workdir=gs://of-others/run"), "4 machines"),  # where nobody is logged in yet
        (
            6,
            4,
            4,
            (*CLUSTER, "--config.cluster.hosts_per_instance=2", "--config.rollout.tensor=8"),
            "2 instances: 2 of 4",
        ),
    ],
)
def test_meshes_that_fit(hosts, trainer, replica, args, says):
    assert says in preflight.plan(hosts, trainer, replica, args)


@pytest.mark.parametrize(
    "hosts, trainer, replica, args, says",
    [
        (2, 4, 4, (CONFIG,), "cluster.launcher: empty, so the run is of one machine, not of 2"),
        (5, 4, 1, CLUSTER, "cluster.trainer_hosts: 2, and 2 instances of 1, are 4 machines, not 5"),
        (4, 4, 4, CLUSTER, "rollout.tensor: 1 is not an instance's 1 * 4 devices"),
        (4, 4, 1, (*CLUSTER, "--config.trainer.fsdp=4"), "1 * 4 * 1 * 1 * 1 is not the trainer's 2 * 4 devices"),
        (4, 4, 1, (*CLUSTER, "--config.trainer.tensor=3"), "trainer.fsdp: 8 devices are not divisible"),
        (4, 4, 1, (*CLUSTER, "--config.stepz=1"), "config.stepz: unknown field"),
    ],
)
def test_meshes_that_do_not_fit(hosts, trainer, replica, args, says):
    with pytest.raises(ConfigError) as caught:
        preflight.plan(hosts, trainer, replica, args)
    assert says in str(caught.value)


def committed(folder, *names):
    for command in (
        ["init", "-q"],
        ["add", "-f", *names],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)


def test_what_a_configuration_reads_here_and_the_commit_lacks_is_found(tmp_path, monkeypatch):
    model = tmp_path / "models/tiny"
    shutil.copytree(ROOT / "tests/data/golden/qwen3", model)
    (tmp_path / ".gitignore").write_text("models\n")
    for name in ("sent.jsonl", "changed.jsonl", "new.jsonl"):
        (tmp_path / name).write_text("{}\n")
    committed(tmp_path, ".gitignore", "sent.jsonl", "changed.jsonl")
    (tmp_path / "changed.jsonl").write_text("{} \n")

    def found(*flags):
        rows = f"--config={ROOT / 'configs/rows.py'}"
        return list(
            preflight.inputs(
                (
                    rows,
                    "--config.model.path=models/tiny",
                    "--config.rollout.max_prompt_tokens=64",
                    "--config.rollout.max_new_tokens=32",
                    *flags,
                )
            )
        )

    assert found("--config.task.path=sent.jsonl") == [("model.path", "tiny", "models/tiny")]
    assert found("--config.task.path=gs://a/b.jsonl") == [("model.path", "tiny", "models/tiny")]
    task = ("--config.task.path=new.jsonl", "--config.task.heldout_path=changed.jsonl")
    assert sorted(found(*task)) == [
        ("model.path", "tiny", "models/tiny"),
        ("task.heldout_path", "changed.jsonl", "changed.jsonl"),
        ("task.path", "new.jsonl", "new.jsonl"),
    ]
    shards = [tmp_path / f"train-0000{i}-of-00002.parquet" for i in range(2)]
    for shard in shards:
        shard.write_bytes(b"")
    assert found(f"--config.task.path={tmp_path}/train")[:-1] == [
        ("task.path", "train", str(shard)) for shard in shards
    ]
    committed(tmp_path, "models")
    assert found("--config.task.path=/mnt/of/the/machine.jsonl") == []

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rewards.py").write_text("def short(prompt, response, answer):\n    return 1.0\n")
    reward = ("--config.task.path=sent.jsonl", "--config.task.rewards=('my_rewards.short',)")
    with pytest.raises(ConfigError, match=r"^task.rewards: my_rewards.py is not in the commit that is checked out"):
        found(*reward)
    committed(tmp_path, "my_rewards.py")
    assert found(*reward) == []


def test_a_run_of_this_machine_is_exported_before_another_machine_starts_from_it(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("")
    committed(tmp_path, "a")
    parent = parents.Parent(Path("runs/x"), 40, "models/base", Path("runs/x/hf/40"), False)
    monkeypatch.setattr(parents, "settle", lambda tree, workdir: parent)
    with pytest.raises(ConfigError, match=r"^model.path: checkpoint 40 of runs/x is on this .*--out=runs/x/hf/40$"):
        list(preflight.inputs((CONFIG,)))
    shutil.copytree(ROOT / "tests/data/golden/qwen3", parent.folder)
    (field, name, source), *rest = preflight.inputs((CONFIG, "--config.model.path=runs/x/hf/40", "--config.sft.out="))
    assert (field, name, source, rest) == ("model.path", "40", "runs/x/hf/40", [])


def test_inputs_of_a_folder_without_a_commit_are_refused():
    with pytest.raises(ConfigError, match="^git ls-tree: fatal: not a git repository"):
        list(preflight.inputs((CONFIG,)))


def test_a_host_is_asked_for_everything_and_a_dry_run_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "LOCK", tmp_path / "libtpu_lockfile")  # another program may hold the machine's
    chips, lock, workdir, versions = preflight.host("runs/a", 0, dry_run=True)
    assert (chips, lock) == (preflight.check_chips(0), f"{tmp_path}/libtpu_lockfile: not there")
    assert workdir == "runs/a: not written to (dry run)" and versions.startswith("versions: python=")


@pytest.mark.parametrize(
    "args, code, says",
    [
        (("host", "--chips=64"), 1, "0 TPU chips, not the 64"),
        (("plan", "--hosts=2", CONFIG), 2, "error: cluster.launcher: empty"),
        (("inputs", f"{CONFIG}x"), 2, "the argument 'tinyx' is unknown"),
        (("dance",), 2, "error: dance: the first argument is plan, inputs or host"),
    ],
)
def test_exit_codes(args, code, says):
    done = subprocess.run(
        [sys.executable, ROOT / "launch/preflight.py", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "."},
        timeout=60,
        check=False,
    )
    assert done.returncode == code and says in done.stdout + done.stderr
