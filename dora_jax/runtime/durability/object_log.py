"""The journal on object storage (gs://, s3://, file://, memory://): whatever tensorstore's key-value layer opens.

    NUMBER-RUN/000000, NUMBER-RUN/000001, ...    one immutable object a commit; they follow without a gap
    MANIFEST                                     {"segments": {NUMBER: folder}}: one conditional put

Laws: a segment exists from the moment the manifest names it; an object is put where none is, or not at all. Opening
the log seals its last segment, so a run that was taken for dead is refused at its next commit, not believed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tensorstore

from dora_jax.runtime.durability.event_log import JournalError

MANIFEST = "MANIFEST"
ABSENT = b"\x02"  # tensorstore's generation of a key that is not there
ANSWER_S = 60.0  # the store has answered by then, or has failed


class ObjectLog:
    """`Log` over a key-value store; see `runtime.durability.event_log`."""

    lasting = False

    def __init__(self, store: tensorstore.KvStore, read_only: bool = False):
        self._store = store
        found = self._answer(store.read(MANIFEST))
        self._unanswered = b""  # a manifest that was put, or not
        self._generation = found.stamp.generation
        self._folders = _folders(found.value) if found.state == "value" else {}
        self._folder = self._staged = ""
        self._next = 0
        self._done = self._tried = 0  # bytes of the append that was refused: put, and put or perhaps put
        if self._folders and not read_only:
            self._seal(self._folders[max(self._folders)])

    def segments(self) -> list[int]:
        return sorted(self._folders)

    def read(self, segment: int) -> bytes:
        reads = [self._store.read(key) for key in self._keys(self._folders[segment])]  # all at once
        return b"".join(bytes(self._answer(read).value) for read in reads)

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
        self._name({**self._folders, segment: folder})
        self._folder, self._staged, self._next = folder, "", objects
        with contextlib.suppress(OSError):  # what is left is swept with the next segment
            self._tidy()

    def append(self, data: bytes) -> None:
        """One object, durable once it is put. `data` begins with what was refused before: that is put as it was then,
        because perhaps only the answer was lost."""
        for end in (self._tried, len(data)):
            if end > self._done:
                self._tried = end
                self._put(f"{self._folder}/{self._next:06d}", data[self._done : end], ABSENT)
                self._done = end
                self._next += 1
        self._done = self._tried = 0

    def sync(self) -> None:
        """Nothing is left to do."""

    def drop(self, segment: int) -> None:
        self._name({number: folder for number, folder in self._folders.items() if number != segment})
        self._tidy()

    def close(self) -> None:
        """Nothing is held open."""

    # ------------------------------------------------------------ private

    def _keys(self, folder: str) -> list[str]:
        """Of its objects, up to the first that is missing."""
        within = tensorstore.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" is what follows "/"
        there = {key.decode() for key in self._answer(self._store.list(within))}
        return list(itertools.takewhile(there.__contains__, (f"{folder}/{n:06d}" for n in itertools.count())))

    def _seal(self, folder: str) -> None:
        """An empty object stands where its writer would put the next one."""
        while keys := self._keys(folder):
            if self._try(f"{folder}/{len(keys):06d}", b"", ABSENT):
                return
        raise JournalError(f"the manifest names {folder}, which is not there")

    def _name(self, folders: dict[int, str]) -> None:
        """The manifest, put where it is still the one that was read or written last."""
        if self._unanswered:
            found = self._answer(self._store.read(MANIFEST))
            if found.value == self._unanswered:
                self._generation = found.stamp.generation
        names = {str(number): folder for number, folder in folders.items()}
        self._unanswered = json.dumps({"segments": names}).encode()
        self._generation = self._put(MANIFEST, self._unanswered, self._generation)
        self._unanswered, self._folders = b"", folders

    def _put(self, key: str, data: bytes, generation: bytes) -> bytes:
        stamp = self._try(key, data, generation)
        if not stamp and (found := self._answer(self._store.read(key))).value == data:
            stamp = found.stamp.generation  # ours: the answer to an earlier try was lost
        if not stamp:
            raise JournalError(f"{key} has another writer: this run was taken for dead and is over")
        return stamp

    def _try(self, key: str, data: bytes, generation: bytes) -> bytes:
        """The new generation; empty where another one was found."""
        return self._answer(self._store.write(key, data, if_equal=generation)).generation

    def _answer(self, asked: tensorstore.Future) -> Any:
        try:
            return asked.result(timeout=ANSWER_S)
        except ValueError as error:  # tensorstore's statuses: no space, no route, no permission
            raise OSError(f"the journal's store did not do it: {error}") from error

    def _tidy(self) -> None:
        """Objects that no manifest names: of dropped segments, and of runs that died before theirs was named."""
        named = {*self._folders.values(), self._staged}
        for key in self._answer(self._store.list()):
            folder, slash, _ = key.decode().partition("/")
            if slash and folder not in named:
                self._answer(self._store.write(key, None))


def _folder(segment: int) -> str:
    """Of a new segment; the manifest does not name it yet."""
    return f"{segment:06d}-{os.urandom(4).hex()}"


def _folders(data: bytes) -> dict[int, str]:
    try:
        return {int(number): str(folder) for number, folder in json.loads(bytes(data))["segments"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"the journal's {MANIFEST} is damaged: {bytes(data[:60])!r}") from error
