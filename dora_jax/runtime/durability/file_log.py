"""The journal as files of one folder: NUMBER.log. A lock keeps a second run out."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

from dora_jax.fault_injection import armed, point
from dora_jax.runtime.durability.event_log import JournalError
from dora_jax.trainer.manifest import sync_folder


class FileLog:
    """`Log` in a folder; see `runtime.durability.event_log`."""

    lasting = True

    def __init__(self, directory: str | os.PathLike):
        self._dir = Path(directory)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self._dir / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise JournalError(f"another run writes {self._dir}: end it first") from error
        for part in self._dir.glob("*.part"):  # a segment that a killed run never finished
            part.unlink()
        self._fd: int | None = None
        self._size = 0
        self._recent: list[bytes] = []  # appended, perhaps not durable
        self._doubtful = False  # a sync has failed: nobody knows what of `_recent` is on the disk

    def segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self._dir.glob("*.log") if path.stem.isdigit())

    def read(self, segment: int) -> bytes:
        return self._path(segment).read_bytes()

    def head(self, segment: int) -> Path:
        return self._path(segment).with_suffix(".part")

    def stage(self, segment: int) -> None:
        """Its head is where it belongs."""

    def begin(self, segment: int, data: bytes, staged: bool = False) -> None:
        path, part = self._path(segment), self.head(segment)
        try:
            how = os.O_APPEND if staged else os.O_CREAT | os.O_TRUNC
            fd = os.open(part, os.O_WRONLY | how | os.O_CLOEXEC, 0o644)
            try:
                _write_all(fd, data)
                os.fsync(fd)
                point("journal.half_segment")
                os.rename(part, path)
                sync_folder(self._dir)
            except BaseException:
                os.close(fd)
                raise
        except OSError:
            part.unlink(missing_ok=True)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size, self._recent, self._doubtful = fd, os.fstat(fd).st_size, [], False
        point("journal.after_segment")

    def append(self, data: bytes) -> None:
        if self._doubtful:
            self._write_again()
        try:
            if armed("journal.half_commit"):
                _write_all(self._fd, data[: len(data) // 2 + 1])
                os.kill(os.getpid(), signal.SIGKILL)
            _write_all(self._fd, data)
        except OSError:
            self._cut(self._size)  # half a frame would hide what follows it
            raise
        self._size += len(data)
        self._recent.append(data)

    def sync(self) -> None:
        if self._doubtful:
            raise OSError("what was written before is not on the disk")
        covered = len(self._recent)
        try:
            os.fdatasync(self._fd)
        except OSError:
            self._doubtful = True
            raise
        del self._recent[:covered]

    def drop(self, segment: int) -> None:
        self._path(segment).unlink()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._lock.close()

    def _path(self, segment: int) -> Path:
        return self._dir / f"{segment:06d}.log"

    def _write_again(self) -> None:
        """After a failed sync the kernel may have forgotten pages that it could not write."""
        recent = b"".join(self._recent)
        self._cut(self._size - len(recent))
        _write_all(self._fd, recent)
        self._doubtful = False

    def _cut(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
