"""A controller that was paused wakes behind its successor: what it still writes into the bucket changes nothing there."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dora_jax.config import ConfigError
from dora_jax.runtime.cluster.checkpoint_shards import StepBucket
from dora_jax.runtime.cluster.run_registry import RunRegistry, address_in
from dora_jax.runtime.journal import workdir_mirror
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.object_storage import LEASE, Lease, Objects, StoreError
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.trainer import manifest

OVER = "has another controller: this one was taken for dead and is over"


@pytest.fixture
def url(tmp_path):
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store"


def held(url):
    """All that the bucket holds."""
    return {key: Objects(url).get(key) for key in Objects(url).keys()}


def test_each_controller_has_a_higher_number_and_the_last_one_the_lease(url):
    leases = [Lease(url) for _ in range(3)]
    assert [lease.number for lease in leases] == [1, 2, 3] and json.loads(Objects(url).get(LEASE))["number"] == 3
    leases[2].check()
    for lease in leases[:2]:
        with pytest.raises(StoreError, match=OVER):
            lease.check()


def test_of_two_that_begin_at_once_one_has_it(url, monkeypatch):
    replace, others = Objects.replace, []

    def late(self, key, data, generation):
        if not others:
            others.append(None)
            others.append(Lease(url))
        return replace(self, key, data, generation)

    monkeypatch.setattr(Objects, "replace", late)
    mine = Lease(url)
    assert (others[1].number, mine.number) == (1, 2)
    mine.check()
    with pytest.raises(StoreError, match=OVER):
        others[1].check()


@pytest.mark.parametrize("damaged", [b"", b"[]", b"x", b'{"number": 1e999}', b'{"number": "a"}', b"[" * 9000])
def test_a_damaged_lease_is_taken_and_still_ends_what_was_before(url, damaged):
    first = Lease(url)
    Objects(url).put(LEASE, damaged)
    second = Lease(url)
    second.check()
    with pytest.raises(StoreError, match=OVER):
        first.check()


@pytest.mark.parametrize("before", [None, b"of the first", b"of neither"])
@pytest.mark.parametrize("what", ["put", "drop"])
def test_a_pause_between_a_look_at_the_lease_and_the_write_changes_nothing(url, monkeypatch, before, what):
    """The worst place to be paused: the lease was still there, and the successor has written the object since."""
    first = Lease(url)
    mine, check = Objects(url, first), Lease.check
    if before == b"of neither":
        Objects(url).put("checkpoints/8/manifest.json", before)
    elif before:
        mine.put("checkpoints/8/manifest.json", before)

    def paused(lease):
        check(lease)
        if lease is first:
            monkeypatch.setattr(Lease, "check", check)
            Objects(url, Lease(url)).put("checkpoints/8/manifest.json", b"of the second")

    monkeypatch.setattr(Lease, "check", paused)
    if what == "drop" and not before:
        mine.drop("checkpoints/8/manifest.json")  # there was nothing to drop
    else:
        with pytest.raises(StoreError, match=OVER):
            mine.put("checkpoints/8/manifest.json", None if what == "drop" else b"of the first, late")
    assert Objects(url).get("checkpoints/8/manifest.json") == b"of the second"


def test_who_has_the_lease_overwrites_what_another_left_and_what_it_wrote_itself(url):
    Objects(url).put("metrics.jsonl", b"of an earlier run")
    mine = Objects(url, Lease(url))
    for data in (b"one", b"two", b"two", b"three"):
        mine.put("metrics.jsonl", data)
        assert Objects(url).get("metrics.jsonl") == data
    mine.drop("metrics.jsonl")
    mine.drop("metrics.jsonl")
    assert Objects(url).get("metrics.jsonl") is None


def test_a_mirror_whose_successor_has_begun_writes_no_step_no_log_and_deletes_nothing(url, tmp_path, monkeypatch):
    def folder(machine):
        monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / machine))
        return workdir_mirror.attach(url, "train")

    def save(at, step, content):
        root = at / "checkpoints" / str(step)
        root.mkdir(parents=True)
        (root / "params").write_bytes(content)
        manifest.write(root)

    notes, one = [], folder("one")
    with workdir_mirror.mirrored(one, notes.append) as first:
        save(one, 4, b"four")
        (one / "metrics.jsonl").write_text("1\n")
        first.settle()
        two = folder("two")
        with workdir_mirror.mirrored(two, notes.append) as second:
            save(two, 8, b"eight of the second")
            (two / "metrics.jsonl").write_text("1\n2\n")
            second.settle()
            before = held(url)
            save(one, 8, b"eight of the first")  # it wakes
            (one / "checkpoints/4/params").unlink()
            (one / "checkpoints/4/manifest.json").unlink()
            (one / "checkpoints/4").rmdir()
            (one / "metrics.jsonl").write_text("1\nx\n")
            with pytest.raises(JournalError, match=OVER):
                first.settle()
            first.close()
            assert held(url) == before and second.steps() == [4, 8] and any(OVER in note for note in notes)
            save(two, 12, b"twelve")
            second.settle()
    assert sorted(StepBucket(url).steps()) == [4, 8, 12]


def test_a_controller_that_was_taken_for_dead_seals_no_step_and_no_version_and_leaves_the_roster(url):
    first = Lease(url)
    notes, steps, weights = [], StepBucket(url, first), StoredWeights(url, first)
    roster = RunRegistry(url, "build", notes.append, first)
    roster.announce("127.0.0.1:1")
    Objects(url, first).put("checkpoints/8/params", b"w")
    weights.seal(1)
    second = Lease(url)
    RunRegistry(url, "build", notes.append, second).announce("127.0.0.1:2")
    Objects(url, second).put("weights/v2.whole", b"")
    before = held(url)
    with pytest.raises(StoreError, match=OVER):
        steps.seal(8, [{"params": [1, 1]}])
    with pytest.raises(StoreError, match=OVER):
        weights.clear()
    for attempt in (lambda: roster.enter("trainer", 1, ()), roster.close):
        attempt()
        assert OVER in notes.pop() and address_in(url) == "127.0.0.1:2"
    assert held(url) == before


def test_a_lease_that_cannot_be_had_is_a_sentence(url, monkeypatch, tmp_path):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    folder = workdir_mirror.attach(url, "train")
    monkeypatch.setattr(Objects, "replace", lambda *args: b"")
    sentence = "workdir: .* cannot be used: .*lease is taken by others again and again"
    with pytest.raises(ConfigError, match=sentence), workdir_mirror.mirrored(folder, print):
        pass


@pytest.mark.slow
def test_a_run_that_is_stopped_while_another_takes_it_over_ends_in_a_sentence_and_changes_nothing(url, tmp_path):
    command = [
        *(sys.executable, "-m", "dora_jax.train", "--config=configs/quickstart.py:tiny", f"--workdir={url}"),
        *("--config.steps=12", "--config.checkpoint.every=3", f"--config.model.path={tmp_path}/base"),
        f"--config.sft.out={tmp_path}/base",
    ]

    def started(machine):
        (tmp_path / machine).mkdir()
        env = {**os.environ, "TMPDIR": str(tmp_path / machine)}
        log = (tmp_path / machine / "log").open("w")
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    first = started("one")
    try:
        while not any(key.startswith("checkpoints/3/manifest") for key in Objects(url).keys()):
            assert first.poll() is None, (tmp_path / "one/log").read_text()
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)
        while list(Path(url.removeprefix("file://")).rglob("*.__lock")):  # of tensorstore's files, held while it stands
            first.send_signal(signal.SIGCONT)
            time.sleep(0.01)
            first.send_signal(signal.SIGSTOP)
        second = started("two")
        assert second.wait(300) == 0, (tmp_path / "two/log").read_text()
        before = held(url)
        first.send_signal(signal.SIGCONT)
        code, text = first.wait(120), (tmp_path / "one/log").read_text()
    finally:
        first.kill()
    assert code == 1 and "taken for dead and is over" in text and "Traceback" not in text, text
    assert held(url) == before and StepBucket(url).steps()[-1] == 12
    assert json.loads(before[LEASE])["number"] == 2
