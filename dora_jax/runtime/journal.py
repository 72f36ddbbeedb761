"""The event log: what makes a resume exact. Bytes of records in, the same bytes out after any crash.

    append(record) ... commit()     a group of records is written with one call: no death of a process undoes that
    commit(sync=True)               and is durable on return, with all before it: no power cut undoes that
    sync_soon(), and every sync_s   what was written becomes durable behind the writer's back: the disk holds up nobody
    rotate(records)                 a new segment, there whole or not at all; it begins with a snapshot
    read(segment)                   its records, up to the first that is torn or damaged

Consumes encoded records (codec.py), knows nothing of what is in them. A record is framed as
    size u32 | crc32 of size and data u32 | data
and a segment is one run of frames. Laws: what `commit` returned from is read back, unless the journal `holds` it: a log
that is slow to write to (object storage) takes one batch every sync_s; what is read is a prefix of what was appended,
record for record; a run never appends to the segment of an earlier run, so a torn tail stays where it is and is
reported each time. Where bytes go is behind `Log`: a folder here, object storage in objects.py.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from dora_jax.fault import armed, point

FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 30  # a snapshot is many records; none comes near this
MAX_BACKLOG_BYTES = 1 << 30  # records held in memory while the disk is full; beyond it the run stops
RETRY_PERIOD_S = 1.0  # how often a full disk is tried again
ALARM_PERIOD_S = 30.0  # how often a disk that stays full is spoken of


class Log(Protocol):
    """Where segments are kept; one writer."""

    lasting: bool  # what was appended outlives this process before it is synced; else `append` takes long, and syncs

    def segments(self) -> list[int]:
        """Numbers of the segments that are there, oldest first."""

    def read(self, segment: int) -> bytes:
        """Everything that was written to it, perhaps with a torn end."""

    def begin(self, segment: int, data: bytes) -> None:
        """A new last segment with this content, durable, whole or not at all."""

    def append(self, data: bytes) -> None:
        """Adds to the last segment, after what a failed sync has left in doubt. OSError: nothing was added."""

    def sync(self) -> None:
        """What had been appended is durable on return; may run beside `append`. OSError: it is in doubt."""

    def drop(self, segment: int) -> None:
        """Forgets an old segment."""

    def close(self) -> None: ...


class Segment(NamedTuple):
    records: tuple[bytes, ...]
    fault: str | None  # what ended the reading early: a sentence
    lost_bytes: int  # behind that


class JournalError(RuntimeError):
    """The journal can no longer keep its promise."""


class Journal:
    """One writer of one log; used by one thread. `sync_s`: what was written is durable so many seconds later; 0: at once."""

    def __init__(self, log: Log, alarm: Callable[[str], None] = lambda sentence: None, sync_s: float = 0.0):
        self._log = log
        self._alarm = alarm
        self._sync_s = sync_s
        self._synced_s = time.monotonic()
        self._unsynced = False
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "journal")
        self._syncing: concurrent.futures.Future | None = None
        self._buffer: list[bytes] = []
        self._bytes = 0
        self._alarmed_s = -ALARM_PERIOD_S
        self._degraded_since: float | None = None
        self._tried_s = 0.0
        self._open = False
        self.commits = 0

    @property
    def durable(self) -> bool:
        """Everything appended has reached the log."""
        return not self._buffer

    @property
    def holds(self) -> bool:
        """What was appended waits for its batch, and must not be acknowledged yet. Not while the storage refuses: then
        the run goes on without, which has been said."""
        return bool(self._buffer) and not self._log.lasting and self._degraded_since is None

    def segments(self) -> list[int]:
        return self._log.segments()

    def read(self, segment: int) -> Segment:
        return unframe(self._log.read(segment))

    def rotate(self, records: Iterable[bytes]) -> int:
        """Begins the next segment with these records and returns its number; later appends go there."""
        if not self.commit(sync=True):
            raise OSError("the journal cannot begin a segment while older records wait for space")
        number = max(self._log.segments(), default=0) + 1
        self._log.begin(number, b"".join(frame(record) for record in records))
        self._open = True
        return number

    def append(self, record: bytes) -> None:
        """Keeps a record for the next commit."""
        if not self._open:
            raise JournalError("the journal has no segment of this run yet: rotate first")
        data = frame(record)
        self._bytes += len(data)
        self._buffer.append(data)
        if self._bytes > MAX_BACKLOG_BYTES:
            raise JournalError(f"the journal holds {self._bytes >> 20} MiB that it cannot write: the disk has been full "
                               f"for {time.monotonic() - (self._degraded_since or time.monotonic()):.0f} s")

    @property
    def sync_due(self) -> bool:
        """Something waits to be written or made durable since `sync_s`."""
        waits = self._unsynced or (bool(self._buffer) and not self._log.lasting)
        return waits and time.monotonic() - self._synced_s >= self._sync_s

    def commit(self, sync: bool = False, urgent: bool = False) -> bool:
        """Writes what was appended; False where the storage refused: it is kept and tried again later. `urgent`: a log
        that takes batches takes this one now."""
        now = time.monotonic()
        due = now - self._synced_s >= self._sync_s or (urgent and not self._log.lasting)
        if not (self._log.lasting or sync or due):
            return True
        if not self._buffer and not ((sync or due) and (self._unsynced or self._syncing)):
            return True
        if self._degraded_since is not None and now - self._tried_s < RETRY_PERIOD_S:
            return False
        try:
            if self._syncing is not None and self._syncing.done():
                self._end_sync()
            self._write()
            if sync or not self._sync_s or not self._log.lasting or self._degraded_since is not None:
                self._make_durable()
            elif due:
                self._begin_sync()
        except OSError as error:
            self._refused(error)
            return False
        if self._degraded_since is not None:
            self._alarm(f"the journal is durable again after {time.monotonic() - self._degraded_since:.0f} s")
            self._degraded_since, self._alarmed_s = None, -ALARM_PERIOD_S
        return True

    def sync_soon(self) -> None:
        """What was committed so far becomes durable behind the writer's back, as soon as the disk can."""
        if self._log.lasting and self._unsynced and self._degraded_since is None:
            self._synced_s, self._unsynced = time.monotonic(), False
            self._syncing = self._pool.submit(self._log.sync)  # behind an earlier one, whose failure fails it too

    def wait_synced(self) -> None:
        """Until the last `sync_soon` has come to its end; what it failed of is heard at the next commit."""
        if self._syncing is not None:
            concurrent.futures.wait([self._syncing])

    def drop_before(self, segment: int) -> None:
        """Segments older than this one are no longer needed."""
        for old in self._log.segments():
            if old < segment:
                try:
                    self._log.drop(old)
                except OSError:
                    return  # it goes with the next

    def close(self) -> None:
        """Commits; where that fails it is said, because what is lost then will be generated again."""
        try:
            self._tried_s = 0.0
            if not self.commit(sync=True):
                self._alarm("the last journal records could not be made durable before the end: what they tell of may "
                            "be generated again")
        finally:
            self._pool.shutdown()
            self._log.close()

    # ------------------------------------------------------------ private

    def _write(self) -> None:
        if not self._buffer and self._degraded_since is None:
            return
        self._log.append(b"".join(self._buffer))
        self._unsynced = True
        self.commits += 1
        self._buffer.clear()
        self._bytes = 0

    def _make_durable(self) -> None:
        """Waits for it."""
        self._end_sync()
        self._synced_s, self._unsynced = time.monotonic(), False
        try:
            self._log.sync()
        except OSError:
            self._unsynced = True
            raise

    def _begin_sync(self) -> None:
        if self._syncing is not None and not self._syncing.done():
            return  # the disk is slow: what is written meanwhile has its turn next
        self._end_sync()
        self.sync_soon()

    def _end_sync(self) -> None:
        """Raises what the sync behind failed of."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None and (error := syncing.exception()):
            self._unsynced = True
            raise error

    def _refused(self, error: OSError) -> None:
        now = self._tried_s = time.monotonic()
        self._degraded_since = self._degraded_since or now
        if now - self._alarmed_s >= ALARM_PERIOD_S:
            self._alarmed_s = now
            self._alarm(f"the journal cannot be written ({error}): {len(self._buffer)} records wait in memory, and "
                        f"what they tell of would be generated again after a kill")


# ---------------------------------------------------------------- frames


def frame(record: bytes) -> bytes:
    if len(record) > MAX_RECORD_BYTES:
        raise JournalError(f"a record of {len(record)} bytes is over the limit of {MAX_RECORD_BYTES}")
    size = len(record)
    return FRAME.pack(size, _checksum(size, record)) + record


def unframe(data: bytes) -> Segment:
    """The records of a segment's bytes, up to the first frame that is not whole."""
    records, view, at = [], memoryview(data), 0
    fault = None
    while at < len(data):
        fault = _fault(view, at)
        if fault:
            break
        size, _ = FRAME.unpack_from(view, at)
        at += FRAME.size
        records.append(bytes(view[at : at + size]))
        at += size
    if fault:
        fault = f"record {len(records) + 1} at byte {at} {fault}"
    return Segment(tuple(records), fault, len(data) - at)


def _fault(view: memoryview, at: int) -> str | None:
    if len(view) - at < FRAME.size:
        return "is torn"
    size, crc = FRAME.unpack_from(view, at)
    if size > len(view) - at - FRAME.size:
        return f"is torn: {size} bytes were announced, {len(view) - at - FRAME.size} are there"
    if _checksum(size, view[at + FRAME.size : at + FRAME.size + size]) != crc:
        return "does not match its checksum"
    return None


def _checksum(size: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(size.to_bytes(4, "little")))


# ----------------------------------------------------------------- files


class FileLog:
    """Segments as files of one folder: NUMBER.log. A lock keeps a second run out."""

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

    def begin(self, segment: int, data: bytes) -> None:
        path = self._path(segment)
        part = path.with_suffix(".part")
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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
        self._fd, self._size, self._recent, self._doubtful = fd, len(data), [], False
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


def sync_folder(path: Path) -> None:
    """A rename is durable once the folder is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
