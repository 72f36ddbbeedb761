"""A file that waits for space: whole, in order, and nothing twice, whatever the disk refuses."""

import errno
import random

import pytest

from dora_jax.base import retrying_file
from dora_jax.base.metrics import Writer
from dora_jax.base.retrying_file import PatientFile
from tests.fakes.sinks import lines, quiet, scalars


class Disk:
    """A file on a disk with room for so many bytes; a write may be taken in part before it is refused."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room[0]])
        self.room[0] -= taken
        return taken

    def fileno(self):
        return self.file.fileno()

    def truncate(self, size):
        self.file.truncate(size)

    def close(self):
        self.file.close()


def on_a_disk(monkeypatch, room):
    """Files that are opened from now on share a disk with so much room."""

    def opened(path, mode, **options):
        return Disk(open(path, mode, **options), room)

    monkeypatch.setattr(retrying_file, "open", opened, raising=False)


def test_what_a_full_disk_refuses_follows_in_order_once_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(retrying_file, "RETRY_PERIOD_S", 0.0)
    notes, draw, room = [], random.Random(0), [100]
    on_a_disk(monkeypatch, room)
    file = PatientFile(tmp_path / "f", notes.append)
    whole = b""
    for i in range(60):
        if i == 40:
            room[0] = 10**9
        data = draw.randbytes(draw.randrange(1, 20))
        whole += data
        file.write(data)
        assert whole.startswith((tmp_path / "f").read_bytes())
    assert (tmp_path / "f").read_bytes() == whole
    assert len(notes) == 2 and "No space left" in notes[0] and "written again" in notes[1]
    file.close()


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(retrying_file, "MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(retrying_file, "RETRY_PERIOD_S", 0.0)
    on_a_disk(monkeypatch, [0])
    file = PatientFile(tmp_path / "f", lambda sentence: None)
    with pytest.raises(OSError, match="No space left"):
        for _ in range(20):
            file.write(bytes(10))


def test_metrics_and_tensorboard_survive_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(retrying_file, "RETRY_PERIOD_S", 0.0)
    room = [10**9]
    on_a_disk(monkeypatch, room)
    with Writer(tmp_path, quiet()) as writer:
        for step in range(9):
            writer.write(step, {"x": step})
            room[0] = 20 if step in (2, 3, 4) else 10**9
    assert [line["x"] for line in lines(tmp_path)] == list(range(9))
    assert [value for _, _, value in scalars(tmp_path / "tensorboard")] == list(range(9))
