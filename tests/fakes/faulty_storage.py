"""Storage that fails: a folder on a disk whose power may be cut, a bucket whose answers get lost, and a clock that jumps.

`Disk` stands under everything that this process does to files, by the system calls it makes; `Bucket` under everything
that it puts through tensorstore. What happens to an operation is up to the `Faults` of the incarnation, by the
number of the operation, so that one draw gives one history. Laws: what was synced is there after a cut, a name once its
folder was synced; of anything else any part may be; an incarnation that is dead changes nothing any more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tensorstore

from dora_jax.base import retrying_file
from tests.fakes.journal_world import Killed

WRITE, SYNC, NAME, PUT, READ = "write", "sync", "name", "put", "read"
# kind of fault -> the operations that fail
FAILING = {
    "sync": (SYNC,),
    "full": (WRITE, NAME, SYNC),
    "errors": (WRITE, NAME, SYNC, PUT, READ),
    "refused": (PUT, READ),
    "lost": (PUT,),
}
NOW_AND_THEN = 0.04  # share of operations, of kind `errors`
CALLS = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "mkdir")
REAL = {name: getattr(os, name) for name in CALLS}


class Faults:
    """at: the first operation that fails, of those that the kind is about. last: the one at which the process dies; 0:
    it does not."""

    def __init__(self, kind: str, draw: random.Random, at: int = 0, last: int = 0):
        self.kind, self.draw, self.at, self.last = kind, draw, at, last
        self.errors = draw.choice((1, 1, 2, 4, 8))
        self.count = self.happened = 0
        self.dead = False
        self.clock = Clock()

    def dies(self) -> bool:
        """Counts an operation; whether it is the last. Killed: it comes behind it."""
        if self.dead:
            raise Killed
        self.count += 1
        self.dead = 0 < self.last <= self.count
        if self.dead and self.kind in ("killed", "power", "zombie"):
            self.happened += 1
        if self.kind == "slow" and self.draw.random() < 0.1:
            self.clock.now_s += self.draw.uniform(1, 100)
            self.happened += 1
        if self.kind == "clock" and self.draw.random() < 0.1:
            self.clock.wall_s += self.draw.choice((-1, 1)) * self.draw.choice((1.0, 3600.0, 1e8))
            self.clock.now_s += self.draw.choice((0.0, 0.0, 1e5))
            self.happened += 1
        return self.dead

    def fails(self, what: str) -> bool:
        if what not in FAILING.get(self.kind, ()) or not self.at:
            return False
        if self.kind == "errors":
            failing = self.draw.random() < NOW_AND_THEN
        else:
            failing = self.count >= self.at and self.errors > 0
            self.errors -= failing
        self.happened += failing
        return failing

    def error(self) -> OSError:
        code = errno.ENOSPC if self.kind == "full" else errno.EIO
        return OSError(code, os.strerror(code))


class Clock:
    """Stands for the module's functions while an incarnation lives: a call takes a moment, a fault much longer."""

    def __init__(self) -> None:
        self.now_s, self.wall_s = 1000.0, 1.8e9

    def monotonic(self) -> float:
        self.now_s += 0.02
        return self.now_s

    def time(self) -> float:
        return self.wall_s + self.monotonic()


class Disk:
    """What lies under a folder: it knows which bytes and which names are durable."""

    def __init__(self, root: Path):
        self.root = root
        self.faults = Faults("", random.Random(0))
        self._bytes: dict[int, bytes] = {}  # of inodes, when they were synced last
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # of folders: name -> inode, whether it is a folder

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Stand under this process's system calls, and give it the clock."""
        disk = self
        tempfile.gettempdir()  # which it tries once, by a write

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                return disk.write(self.fileno(), data)

        def opened(path: Any, mode: str = "r", buffering: int = -1) -> Any:
            return Raw(path, mode.replace("b", "")) if buffering == 0 else open(path, mode, buffering)

        with contextlib.ExitStack() as undo:
            for name in CALLS:
                stand_in: Callable[..., Any] = getattr(self, name, None) or self._naming(REAL[name])
                undo.enter_context(mock.patch.object(os, name, stand_in))
            undo.enter_context(mock.patch.object(retrying_file, "open", opened, create=True))
            undo.enter_context(mock.patch.object(time, "monotonic", lambda: self.faults.clock.monotonic()))
            undo.enter_context(mock.patch.object(os, "urandom", lambda size: self.faults.draw.randbytes(size)))
            undo.enter_context(mock.patch.object(time, "time", lambda: self.faults.clock.time()))
            yield

    def write(self, fd: int, data: Any) -> int:
        faults = self.faults
        if fd <= 2:
            return REAL["write"](fd, data)
        if faults.dies():
            REAL["write"](fd, data[: faults.draw.randrange(len(data) + 1)])
            raise Killed
        if faults.fails(WRITE):
            if faults.draw.random() < 0.5 and len(data) > 1:  # the last bytes that had room
                return REAL["write"](fd, data[: len(data) // 2])
            raise faults.error()
        return REAL["write"](fd, data)

    def fsync(self, fd: int) -> None:
        if self.faults.dies():
            raise Killed
        if self.faults.fails(SYNC):
            raise self.faults.error()
        self.keep(fd)

    fdatasync = fsync

    def keep(self, at: int | Path) -> None:
        """What this file or folder holds now is durable."""
        if self.faults.kind != "power":
            return
        number, place = os.stat(at).st_ino, f"/proc/self/fd/{at}" if isinstance(at, int) else at
        if os.path.isdir(place):
            with os.scandir(place) as entries:
                self._names[number] = {e.name: (e.inode(), e.is_dir()) for e in entries}
        else:
            self._bytes[number] = Path(place).read_bytes()

    def _naming(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Any, **options: Any) -> Any:
            if self.faults.dies():
                if self.faults.draw.random() < 0.5:
                    call(*args, **options)
                raise Killed
            if self.faults.fails(NAME) and not (self.faults.kind == "full" and call is REAL["unlink"]):
                raise self.faults.error()
            return call(*args, **options)

        return stand_in

    def cut(self) -> None:
        """The power is gone and back: what lies there now is durable."""
        self._cut(self.root)
        self._bytes, self._names = {}, {}
        for path in (self.root, *self.root.rglob("*")):
            self.keep(path)

    def _cut(self, folder: Path) -> None:
        draw = self.faults.draw
        with os.scandir(folder) as entries:
            now = {e.name: (e.inode(), e.is_dir()) for e in entries}
        then = self._names.get(os.stat(folder).st_ino, {})
        before = {entry: name for name, entry in then.items()}
        for name, entry in sorted(now.items()):
            if then.get(name) == entry or draw.random() < 0.5:
                continue  # the name is durable, or got there in time
            path = folder / name
            if entry in before and before[entry] not in now:
                REAL["rename"](path, folder / before[entry])
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                REAL["unlink"](path)
            if name in then and not (folder / name).exists():
                self._again(folder / name, then[name])
        kept = {os.stat(path).st_ino for path in folder.iterdir()}
        for name, (number, is_folder) in sorted(then.items()):
            if number not in kept and not (folder / name).exists() and draw.random() < 0.5:  # it was being deleted
                self._again(folder / name, (number, is_folder))
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                self._cut(path)
                continue
            held, durable = path.read_bytes(), self._bytes.get(os.stat(path).st_ino, b"")
            if held == durable:
                continue
            start = len(durable) if held.startswith(durable) else 0
            size = draw.randint(start, len(held))
            path.write_bytes(held[:size] + bytes(draw.choice((0, 0, len(held) - size))))

    def _again(self, path: Path, entry: tuple[int, bool]) -> None:
        number, is_folder = entry
        if not is_folder:
            if number in self._bytes:
                path.write_bytes(self._bytes[number])
            return
        path.mkdir()
        for name, each in self._names.get(number, {}).items():
            if self.faults.draw.random() < 0.7:
                self._again(path / name, each)


class Answer:
    """Stands for tensorstore's future."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self._value, self._error = value, error

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Bucket:
    """tensorstore's memory, as every process finds it; `opened` stands for `object_storage.opened`."""

    URL = "memory://run"

    def __init__(self) -> None:
        self._context = tensorstore.Context()
        self.late: list[Callable[[], Any]] = []  # puts on their way, of processes that are perhaps gone
        self.sizes: dict[str, int] = {}  # of what was put, by one process alone
        self.faults = Faults("", random.Random(0))

    def opened(self, url: str, field: str = "workdir") -> Objects:
        inside = url.rstrip("/").removeprefix(self.URL).strip("/")
        return Objects(self, f"{inside}/" if inside else "")

    def store(self, path: str = "") -> tensorstore.KvStore:
        """The store itself, for a judge."""
        return tensorstore.KvStore.open({"driver": "memory", "path": path}, context=self._context).result()

    def content(self) -> dict[str, bytes]:
        store = self.store()
        return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


class Objects:
    """A `tensorstore.KvStore` of one incarnation."""

    def __init__(self, bucket: Bucket, path: str):
        self._store, self._faults, self._late = bucket.store(path), bucket.faults, bucket.late
        self._sizes, self._path = bucket.sizes, path

    def _asked(self, what: str) -> Answer | None:
        """The answer of an operation that is not done."""
        faults = self._faults
        while self._late and faults.draw.random() < 0.3:
            self._late.pop(0)()
        if faults.dies():
            raise Killed
        if faults.kind != "lost" and faults.fails(what):
            return Answer(error=ValueError("UNAVAILABLE: 503"))
        return None

    def read(self, key: str, **options: Any) -> Any:
        return self._asked(READ) or self._store.read(key, **options)

    def list(self, within: Any = None) -> Any:
        return self._asked(READ) or (self._store.list(within) if within is not None else self._store.list())

    def delete_range(self, within: Any) -> Any:
        return self._asked(PUT) or self._store.delete_range(within)

    def write(self, *args: Any, **options: Any) -> Any:
        faults = self._faults
        try:
            refused = self._asked(PUT)
        except Killed:
            if faults.draw.random() < 0.5 and faults.count == faults.last:
                self._store.write(*args, **options).result()
                faults.count += 1
            raise
        if refused is not None:
            return refused
        if faults.kind == "slow" and faults.draw.random() < 0.04:  # no answer in time: it is done later
            self._late.append(lambda: self._store.write(*args, **options).result())
            faults.happened += 1
            return Answer(error=TimeoutError())
        done = self._store.write(*args, **options)
        key = args[0] if isinstance(args[0], str) else args[0].decode()
        self._sizes[self._path + key] = len(args[1] or b"")
        if faults.kind == "lost" and faults.fails(PUT):
            done.result()
            return Answer(error=ValueError("DEADLINE_EXCEEDED: 504"))
        return done
