"""The event log, which makes a resume exact. Bytes of records go in; the same bytes come out after any crash.

    append(record) ... commit()     writes a group of records with one call: no death of a process undoes that
    commit(sync=True)               also makes it durable, with all before it: no power cut undoes that
    sync_soon(), and every sync_s   makes durable what was written, on another thread: the disk delays no fact
    rotate(records)                 begins a new segment with a snapshot, whole or not at all
    rotate_behind(records)          the same, of the state as it is now, written by a forked child; `rotated` says when
    read(segment)                   the records of a segment, up to the first that is torn, damaged or out of place

Consumes encoded records (codec.py) and does not look into them. frames.py gives each its number and its checksum;
log_stores.py keeps the bytes, in a folder or in object storage. Laws: a record is read back once `commit` has returned,
unless the log `holds` it: a store that is slow to write to (object storage) takes one batch every sync_s; what is read
is a prefix of what was appended, record for record; a run never appends to the segment of an earlier run, so a torn
tail stays where it is and is reported each time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dora_jax.runtime.journal import frames
from dora_jax.runtime.journal.forked_writer import Child, fork
from dora_jax.runtime.journal.log_stores import JournalError, LogStore, write_all

# Of a segment that is no file, is gone, or lies on a damaged disk. Any other error is not the segment's fault.
UNREADABLE = (errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO)
MAX_BACKLOG_BYTES = 1 << 30  # records held in memory while the disk is full; beyond it the run stops
RETRY_PERIOD_S = 1.0  # how often a full disk is tried again
ALARM_PERIOD_S = 30.0  # how often a disk that stays full is reported


@dataclasses.dataclass
class _Rotation:
    """A segment that a forked child is beginning."""

    number: int
    head: Path
    child: Child
    late: list[bytes] = dataclasses.field(default_factory=list)  # records that were written since the fork
    late_bytes: int = 0
    frames: int = 0  # that the child has written
    staged: concurrent.futures.Future | None = None


def unheard(sentence: str) -> None:
    """The alarm of a log, and the note of a replay, where nobody reads them."""


class EventLog:
    """One writer of one log; used by one thread. `sync_s`: so many seconds after it was written a record is durable; 0:
    at once. JournalError: the log can no longer keep its promise."""

    def __init__(self, log: LogStore, alarm: Callable[[str], None] = unheard, sync_s: float = 0.0):
        self._log = log
        self._alarm = alarm
        self._sync_s = sync_s
        self._synced_s = time.monotonic()
        self._unsynced = False
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "journal")
        self._syncing: concurrent.futures.Future | None = None
        self._rotation: _Rotation | None = None
        self._buffer: list[bytes] = []
        self._bytes = 0  # of their frames
        self._segment = self._index = 0  # of the next frame
        self._alarmed_s = -ALARM_PERIOD_S
        self._degraded_since: float | None = None
        self._tried_s = 0.0
        self._open = False
        self.commits = 0

    @property
    def durable(self) -> bool:
        """Whether all that was appended has reached the store."""
        return not self._buffer

    @property
    def holds(self) -> bool:
        """Whether records wait for their batch and must not be acknowledged yet. False while the store refuses: the
        alarm has reported so, and the run goes on without it."""
        return bool(self._buffer) and not self._log.lasting and self._degraded_since is None

    def segments(self) -> list[int]:
        return self._log.segments()

    def read(self, segment: int) -> frames.Segment:
        """UnknownFormat: another version of dora_jax wrote its frames. OSError: it could not be read for now."""
        if segment > frames.MAX_SEGMENT:
            return frames.Segment((), "has a number that no run reaches", 0)
        try:
            return frames.unframe(self._log.read(segment), segment)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            return frames.Segment((), f"cannot be read: {os.strerror(error.errno)}", 0)

    def rotate(self, records: Iterable[bytes]) -> int:
        """Begins the next segment with these records and returns its number; later appends go there. OSError: it could
        not be begun, and the present segment goes on."""
        number, head = self._next_number(sync=True), list(records)
        self._log.begin(number, frames.preamble(len(head)) + frames.frames(head, number))
        self._open, self._segment, self._index = True, number, len(head)
        return number

    def rotate_behind(self, records: Callable[[], Iterable[bytes]]) -> None:
        """Like `rotate`, but a forked child makes the records and writes them, while appends go to the present segment:
        the new one begins with both."""
        if self._rotation is not None:
            return
        number = self._next_number(sync=not self._log.lasting)
        head = self._log.head(number)

        def write() -> None:
            """Write in the child, without a buffer that a thread of the parent could have left locked."""
            fd = os.open(head, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            write_all(fd, bytes(frames.PREAMBLE.size))
            count = 0
            for record in records():
                write_all(fd, frames.frame(record, number, count))
                count += 1
            os.pwrite(fd, frames.preamble(count), 0)
            os.fsync(fd)

        self._rotation = _Rotation(number, head, fork(write))

    @property
    def rotating(self) -> bool:
        """Whether a segment is being begun by a forked child."""
        return self._rotation is not None

    def rotated(self) -> int | None:
        """Begins the segment that `rotate_behind` asked for, once its head is written, and returns its number; None:
        not yet. Where that fails, an alarm says so and the present segment goes on."""
        rotation = self._rotation
        if rotation is None or (written := rotation.child.ended()) is None:
            return None
        if not written:
            self._drop_rotation("its child ended early")
            return None
        try:
            if rotation.staged is None:
                with rotation.head.open("rb") as head:
                    rotation.frames = frames.PREAMBLE.unpack(head.read(frames.PREAMBLE.size))[2]
                rotation.staged = self._pool.submit(self._log.stage, rotation.number)
            syncs = self._syncing is not None and not self._syncing.done()
            if syncs or not rotation.staged.done() or self._degraded_since is not None:
                return None
            rotation.staged.result()
            self._syncing = None  # of the old segment, which the new one holds: `begin` makes that durable
            late = frames.frames(rotation.late, rotation.number, rotation.frames)
            self._log.begin(rotation.number, late, staged=True)
        except OSError as error:
            self._drop_rotation(str(error))
            return None
        self._rotation = None
        self._segment, self._index = rotation.number, rotation.frames + len(rotation.late)
        self._synced_s, self._unsynced = time.monotonic(), False
        return rotation.number

    def _drop_rotation(self, why: str | None = None) -> None:
        """why: what the alarm says; None: the log ends."""
        if self._rotation is not None:
            self._rotation.child.kill()
            self._rotation.head.unlink(missing_ok=True)
            self._rotation = None
        if why is not None:
            self._alarm(f"the journal's next segment could not be begun ({why}): this one goes on")

    def append(self, record: bytes) -> None:
        """Keeps a record for the next commit."""
        if not self._open:
            raise JournalError("the journal has no segment of this run yet: rotate first")
        if len(record) > frames.MAX_RECORD_BYTES:
            raise JournalError(f"a record of {len(record)} bytes is over the limit of {frames.MAX_RECORD_BYTES}")
        self._bytes += frames.FRAME.size + len(record)
        self._buffer.append(record)
        if self._bytes > MAX_BACKLOG_BYTES:
            raise JournalError(
                f"the journal holds {self._bytes >> 20} MiB that it cannot write: the disk has been full "
                f"for {time.monotonic() - (self._degraded_since or time.monotonic()):.0f} s"
            )

    @property
    def sync_due(self) -> bool:
        """Whether a record has waited for `sync_s` to be written or made durable."""
        waits = self._unsynced or (bool(self._buffer) and not self._log.lasting)
        return waits and time.monotonic() - self._synced_s >= self._sync_s

    def commit(self, sync: bool = False, urgent: bool = False) -> bool:
        """Writes what was appended. False: the store refused; the records are kept and tried again later. `urgent`: a
        store that takes batches takes this one now."""
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
            if self._buffer or self._degraded_since is not None:
                self._log.append(frames.frames(self._buffer, self._segment, self._index))
                self._index += len(self._buffer)
                self._unsynced = True
                self.commits += 1
                if self._rotation is not None:
                    self._rotation.late += self._buffer
                    self._rotation.late_bytes += self._bytes
                    if self._rotation.late_bytes > MAX_BACKLOG_BYTES:
                        self._drop_rotation(f"{self._rotation.late_bytes >> 20} MiB were written meanwhile")
                self._buffer.clear()
                self._bytes = 0
            if sync or not self._sync_s or not self._log.lasting or self._degraded_since is not None:
                # blocks until everything that was written is durable
                self._end_sync()
                self._synced_s, self._unsynced = time.monotonic(), False
                try:
                    self._log.sync()
                except OSError:
                    self._unsynced = True
                    raise
            elif due and (self._syncing is None or self._syncing.done()):
                self._end_sync()  # else the disk is slow: the next sync covers what is written meanwhile
                self.sync_soon()
        except OSError as error:
            now = self._tried_s = time.monotonic()
            self._degraded_since = self._degraded_since or now
            if now - self._alarmed_s >= ALARM_PERIOD_S:
                self._alarmed_s = now
                self._alarm(
                    f"the journal cannot be written ({error}): {len(self._buffer)} records wait in memory, and "
                    f"what they tell of would be generated again after a kill"
                )
            return False
        if self._degraded_since is not None:
            self._alarm(f"the journal is durable again after {time.monotonic() - self._degraded_since:.0f} s")
            self._degraded_since, self._alarmed_s = None, -ALARM_PERIOD_S
        return True

    def sync_soon(self) -> None:
        """Makes durable what was committed so far, on another thread."""
        if self._log.lasting and self._unsynced and self._degraded_since is None:
            self._synced_s, self._unsynced = time.monotonic(), False
            self._syncing = self._pool.submit(self._log.sync)  # behind an earlier one, whose failure fails it too

    def wait_synced(self) -> None:
        """Blocks until the last `sync_soon` has ended. The next commit raises what it failed of."""
        if self._syncing is not None:
            concurrent.futures.wait([self._syncing])

    def drop_before(self, segment: int) -> None:
        """Segments older than this one are no longer needed."""
        for old in self._log.segments():
            if old < segment:
                try:
                    self._log.drop(old)
                except OSError:
                    return  # the next call drops it

    def close(self) -> None:
        """Commits. Where that fails, an alarm says so: what is lost then will be generated again."""
        try:
            self._tried_s = 0.0
            self._drop_rotation()
            if not self.commit(sync=True):
                self._alarm(
                    "the last journal records could not be made durable before the end: what they tell of may "
                    "be generated again"
                )
        finally:
            self._pool.shutdown()
            self._log.close()

    # ------------------------------------------------------------ private

    def _next_number(self, sync: bool) -> int:
        """The number of the next segment. OSError: records of the present one wait to be written."""
        if not self.commit(sync=sync) or self._buffer:
            raise OSError("the journal cannot begin a segment while older records wait for space")
        return max((number for number in self._log.segments() if number < frames.MAX_SEGMENT), default=0) + 1

    def _end_sync(self) -> None:
        """Raises what the last sync on the other thread failed of."""
        syncing, self._syncing = self._syncing, None
        if syncing is not None and (error := syncing.exception()):
            self._unsynced = True
            raise error
