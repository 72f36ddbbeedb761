"""What a power cut must not undo reaches the disk in this order: the bytes, then the name, then the folder of the
name."""

import os

import pytest

from dora_jax.runtime.journal import event_log as jn
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.trainer import manifest
from tests.fakes.checkpoints import store_of


@pytest.fixture
def calls(monkeypatch):
    """The calls that order writes: (call, name of the file or folder), ("rename", old name, new name)."""
    seen, sync, data_sync, rename = [], os.fsync, os.fdatasync, os.rename

    def name(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    def renamed(old, new):
        seen.append(("rename", os.path.basename(old), os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(("sync", name(fd))), sync(fd)))
    monkeypatch.setattr(os, "fdatasync", lambda fd: (seen.append(("data", name(fd))), data_sync(fd)))
    for name_of_it in ("rename", "replace"):
        monkeypatch.setattr(os, name_of_it, renamed)
    return seen


def test_a_segment_is_durable_before_it_has_its_name_and_the_name_before_records_follow(tmp_path, calls):
    journal = EventLog(FileLogStore(folder := tmp_path / "journal"))
    journal.rotate([b"head"])
    part = f"000001.{os.getpid()}.part"
    assert calls.pop(0) == ("sync", tmp_path.name), "the folder's own name is durable first"
    assert calls == [("sync", part), ("rename", part, "000001.log"), ("sync", "journal")]
    calls.clear()
    journal.append(b"x")
    journal.commit()
    assert calls == [("data", "000001.log")]
    assert sorted(path.name for path in folder.iterdir()) == ["000001.log", "lock"]
    journal.close()


def test_a_segment_that_a_child_began_is_durable_before_it_has_its_name(tmp_path, calls, monkeypatch):
    class InThisProcess:
        def __init__(self, work):
            work()

        def ended(self):
            return True

    monkeypatch.setattr(jn, "fork", InThisProcess)
    journal = EventLog(FileLogStore(tmp_path / "journal"))
    journal.rotate([b"head"])
    calls.clear()
    journal.rotate_behind(lambda: [b"head", b"snapshot"])
    journal.append(b"late")
    journal.commit()
    while journal.rotated() is None:
        pass
    part = f"000002.{os.getpid()}.part"
    begun = [call for call in calls if call[0] != "data"]
    assert begun == [("sync", part), ("sync", part), ("rename", part, "000002.log"), ("sync", "journal")]
    journal.close()


def test_a_manifest_is_put_after_the_files_that_it_names_and_before_their_folders(tmp_path, calls):
    root = tmp_path / "checkpoints/7"
    (root / "params").mkdir(parents=True)
    (root / "params/a").write_bytes(b"a")
    (root / "b").write_bytes(b"b")
    manifest.write(root)
    files, put, folders = calls[:3], calls[3], calls[4:]
    assert files == [("sync", "b"), ("sync", "a"), ("sync", ".manifest.json.partial")]
    assert put == ("rename", ".manifest.json.partial", "manifest.json")
    assert sorted(folders) == [("sync", "7"), ("sync", "checkpoints"), ("sync", "params")]


def test_the_name_of_the_folder_of_checkpoints_is_durable_before_a_step_is_saved(tmp_path, calls):
    store_of(tmp_path / "run" / "checkpoints").close()
    assert calls == [("sync", "run")]
