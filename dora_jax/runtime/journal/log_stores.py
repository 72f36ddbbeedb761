"""Where the segments of the event log lie: files of one folder, or objects in a bucket.

    FileLogStore      FOLDER/NUMBER.log; a lock keeps a second run out
    ObjectLogStore    the `Objects` under a URL (object_storage.py)
        NUMBER-RUN/000000, NUMBER-RUN/000001, ...    one immutable object a commit; they follow without a gap
        MANIFEST                                     {"format", "segments": {NUMBER: folder}, "crc32" of these}: one
                                                     conditional put

Laws of objects: a segment exists from the moment the manifest names it; an object is put where none is, or not at all.
Opening the store seals its last segment, so a run that was taken for dead is refused at its next commit, not believed.
Where the manifest is damaged or missing, a writer takes the segments that lie there, and a note names the damage.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import json
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import IO, Any

from dora_jax.base.state_files import set_aside
from dora_jax.config import RunError, UnknownFormat
from dora_jax.runtime.journal.object_storage import ABSENT, Objects
from dora_jax.trainer.manifest import sync_folder

MANIFEST = "MANIFEST"
MANIFEST_FORMAT = 2
FOLDER = re.compile(r"(\d{6,})-[0-9a-f]{8}", re.ASCII)  # of a segment
GIVEN_UP = b"given up"  # the last object of a segment that its writer does not use


class JournalError(RunError):
    """The journal can no longer keep its promise."""


class FileLogStore:
    """Keeps segments in a folder, for one writer. `read_only`: another process may be writing it. JournalError: another
    run writes it."""

    lasting = True  # appended bytes outlive this process before they are synced; else `append` takes long, and syncs
    repaired = ""  # why the segments are those that lie there, not those that a manifest names

    def __init__(self, directory: str | os.PathLike, read_only: bool = False):
        self._dir = Path(directory)
        self._lock: IO[str] | None = None
        self._file = -1  # of the last segment
        self._size = 0
        self._recent: list[bytes] = []  # appended, perhaps not durable
        self._doubtful = False  # a sync has failed: `_recent` may be on the disk in part
        if not read_only:
            try:
                self._dir.mkdir(parents=True, exist_ok=True)
                sync_folder(self._dir.parent)
                path = self._dir / "lock"
                if path.is_dir():  # no run made that, and it says nothing of the journal
                    set_aside(path)
                self._lock = path.open("a+")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                raise JournalError(f"another run writes {self._dir}: end it first") from error
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise JournalError(f"{error.filename}: {error.strerror}: no run wrote that, move it away") from error
            for part in self._dir.glob("*.part"):  # a segment that a killed run never finished
                with contextlib.suppress(IsADirectoryError):  # no run has made that one: it stays
                    part.unlink()

    def segments(self) -> list[int]:
        """Numbers of the segments that are there, oldest first."""
        names = (path.stem for path in self._dir.glob("*.log") if path.stem.isascii() and path.stem.isdigit())
        return sorted(int(name) for name in names if int(name) and name == self._path(int(name)).stem)

    def read(self, segment: int) -> bytes:
        """The bytes that were written to a segment, perhaps with a torn end."""
        return self._path(segment).read_bytes()

    def head(self, segment: int) -> Path:
        """The file in which the head of a segment to come is written. It is not yet part of the log."""
        return self._path(segment).with_suffix(f".{os.getpid()}.part")

    def stage(self, segment: int) -> None:
        """Brings the file of the head to where `begin` needs it: it is there. Elsewhere it may take long, beside
        `append`."""

    def begin(self, segment: int, data: bytes, staged: bool = False) -> None:
        """Begins a new last segment with this content: durable, whole or not at all. `staged`: the content follows the
        head that `stage` has brought."""
        path, part = self._path(segment), self.head(segment)
        try:
            fd = os.open(part, os.O_WRONLY | (0 if staged else os.O_CREAT | os.O_TRUNC) | os.O_CLOEXEC, 0o644)
            try:
                os.lseek(fd, 0, os.SEEK_END)
                write_all(fd, data)
                os.fsync(fd)
                os.rename(part, path)
                sync_folder(self._dir)
            except BaseException:
                os.close(fd)
                raise
        except OSError:
            part.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # renamed, but not durable: the present segment goes on and must be the last
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._recent, self._doubtful = fd, os.fstat(fd).st_size, [], False

    def append(self, data: bytes) -> None:
        """Adds to the last segment, behind the bytes that a failed sync has left unproved. OSError: nothing was
        added."""
        if self._doubtful:
            # after a failed sync the kernel may have forgotten pages that it could not write. They are written over
            # and not cut off first: a kill would take what has been reported
            recent = b"".join(self._recent)
            view = memoryview(recent)
            while view:
                view = view[os.pwrite(self._file, view, self._size - len(view)) :]
            self._doubtful = False
        try:
            write_all(self._file, data)
        except OSError:
            self._cut(self._size)  # half a frame would hide what follows it
            raise
        self._size += len(data)
        self._recent.append(data)

    def sync(self) -> None:
        """Makes durable what had been appended; may run beside `append`. OSError: it is unproved."""
        if self._doubtful:
            raise OSError("what was written before is not on the disk")
        covered = len(self._recent)
        try:
            os.fdatasync(self._file)
        except OSError:
            self._doubtful = True
            raise
        del self._recent[:covered]

    def drop(self, segment: int) -> None:
        """Forgets an old segment."""
        with contextlib.suppress(IsADirectoryError):  # no run has made that one: it stays
            self._path(segment).unlink()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock is not None:
            self._lock.close()

    def _path(self, segment: int) -> Path:
        return self._dir / f"{segment:06d}.log"

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)


class ObjectLogStore:
    """Like FileLogStore, over the objects under a URL. `read_only`: another process may be writing it."""

    lasting = False

    def __init__(self, store: Objects, read_only: bool = False):
        self._store = store
        found, self._generation = store.stamped(MANIFEST)
        self._unanswered: set[bytes] = set()  # manifests that were put, or not, or not yet
        self._given_up: list[str] = []  # the next objects of segments that only those name
        self.repaired = ""
        self._folders: dict[int, str] = {}
        try:
            if found is not None:
                self._folders = _folders(found)
        except JournalError as error:
            if read_only:
                raise
            self.repaired = f"{error}; what lies there of segments is read"
        if not read_only and (self.repaired or found is None):
            objects = collections.Counter(key.partition("/")[0] for key in store.keys())
            for folder, _ in reversed(objects.most_common()):  # of two of a number, the one that was written further
                if named := FOLDER.fullmatch(folder):
                    self._folders[int(named[1])] = folder
            if self._folders and not self.repaired:
                self.repaired = f"the journal's {MANIFEST} is missing; what lies there of segments is read"
        self._folder = self._staged = ""
        self._next = 0
        self._done = self._tried = 0  # bytes of the append that was refused: put, and put or perhaps put
        if self._folders and not read_only:
            folder = self._folders[max(self._folders)]
            # puts an empty object where the writer of the segment would put its next one
            while not store.replace(f"{folder}/{len(self._keys(folder)):06d}", b"", ABSENT):
                continue

    def segments(self) -> list[int]:
        return sorted(self._folders)

    def read(self, segment: int) -> bytes:
        return b"".join(data or b"" for data in self._store.several(self._keys(self._folders[segment])))

    def head(self, segment: int) -> Path:
        return Path(tempfile.gettempdir()) / f"dora_jax-{os.getpid()}-{segment:06d}.part"

    def stage(self, segment: int) -> None:
        head, self._staged = self.head(segment), _folder(segment)
        self._put(f"{self._staged}/{0:06d}", head.read_bytes(), ABSENT)
        head.unlink()

    def begin(self, segment: int, data: bytes, staged: bool = False) -> None:
        folder, objects = self._staged if staged else _folder(segment), int(staged)
        if data or not staged:
            self._put(f"{folder}/{objects:06d}", data, ABSENT)
            objects += 1
        self._name({**self._folders, segment: folder}, f"{folder}/{objects:06d}")
        self._folder, self._staged, self._next = folder, "", objects
        with contextlib.suppress(OSError):  # what is left is swept with the next segment
            self._tidy()

    def append(self, data: bytes) -> None:
        """Puts one object. `data` begins with the bytes that were refused before: they are put as they were then,
        because perhaps only the answer was lost."""
        if self._unanswered:  # it may name another segment as the last, and what follows in this one would not be read
            self._name(self._folders)
        for end in (self._tried, len(data)):
            if end > self._done:
                self._tried = end
                self._put(f"{self._folder}/{self._next:06d}", data[self._done : end], ABSENT)
                self._done = end
                self._next += 1
        self._done = self._tried = 0

    def sync(self) -> None:
        """An object is durable once it is put."""

    def drop(self, segment: int) -> None:
        self._name({number: folder for number, folder in self._folders.items() if number != segment})
        self._tidy()

    def close(self) -> None:
        """The store holds nothing open."""

    # ------------------------------------------------------------ private

    def _keys(self, folder: str) -> list[str]:
        """The objects of a segment, up to the first that is missing."""
        there = set(self._store.keys(folder))
        return list(itertools.takewhile(there.__contains__, (f"{folder}/{n:06d}" for n in itertools.count())))

    def _name(self, folders: dict[int, str], following: str = "") -> None:
        """Puts the manifest, if the one that is there is still the one that was read or written last. following: the
        next object of a segment that it names first."""
        names = {str(number): folder for number, folder in folders.items()}
        content = {"format": MANIFEST_FORMAT, "segments": names}
        data = json.dumps({**content, "crc32": _checksum(content)}).encode()
        while True:
            before, given_up = self._unanswered.copy(), self._given_up.copy()
            held, generation = self._store.stamped(MANIFEST) if before else (None, b"")
            if held in before:
                for key in given_up:  # JournalError: who opened the store since has sealed it
                    self._put(key, GIVEN_UP, ABSENT)
                self._generation = generation
            self._unanswered.add(data)
            self._given_up += [following] if following and following not in given_up else []
            try:
                self._generation = self._put(MANIFEST, data, self._generation)
                break
            except JournalError:
                if self._store.get(MANIFEST) not in before:  # else one of ours came meanwhile
                    raise
        self._unanswered, self._given_up, self._folders = set(), [], folders

    def _put(self, key: str, data: bytes, generation: bytes) -> bytes:
        """The new generation."""
        if written := self._store.replace(key, data, generation):
            return written
        held, found = self._store.stamped(key)
        if held != data:  # else it is ours: the answer to an earlier try was lost
            raise JournalError(f"{key} has another writer: this run was taken for dead and is over")
        return found

    def _tidy(self) -> None:
        """Deletes the objects that no manifest names: of dropped segments, and of runs that died before they named
        theirs."""
        there = {key.partition("/")[0] for key in self._store.keys() if "/" in key}
        for folder in sorted(there.difference(self._folders.values(), [self._staged])):
            self._store.drop_folder(folder)


LogStore = FileLogStore | ObjectLogStore


def log_at(place: str | os.PathLike, read_only: bool = False) -> LogStore:
    """The segments in a folder or under a URL. `read_only`: another process may be writing them."""
    if "://" in str(place):
        return ObjectLogStore(Objects(str(place)), read_only)
    return FileLogStore(place, read_only)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- private


def _folder(segment: int) -> str:
    """The folder of a new segment. The manifest does not name it yet."""
    return f"{segment:06d}-{os.urandom(4).hex()}"


def _folders(data: bytes) -> dict[int, str]:
    """The folders that a manifest names. Format 1 has no checksum and does not say its format."""
    try:
        manifest = json.loads(bytes(data))
        folders = {int(number): str(folder) for number, folder in manifest["segments"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JournalError(f"the journal's {MANIFEST} is damaged: {bytes(data[:60])!r}") from error
    if "crc32" in manifest and manifest.pop("crc32") != _checksum(manifest):
        raise JournalError(f"the journal's {MANIFEST} does not match its checksum")
    written = manifest.get("format", 1)
    if written not in (1, MANIFEST_FORMAT):
        raise UnknownFormat(
            f"workdir: the journal's {MANIFEST} is of format {written}, and this version of dora_jax reads 1 to "
            f"{MANIFEST_FORMAT}"
        )
    return folders


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
