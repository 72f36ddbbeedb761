"""A workdir in object storage (gs://, s3://, file://). The store is the run; a scratch folder here is its working copy.

    URL/journal/                   the event log, which is written there directly (log_stores.py)
    URL/checkpoints/STEP/...       each completed step, its manifest put last
    URL/config.json, metrics.jsonl, ...     copies of the scratch folder's files, every now and then; of a file that
                                   grows beyond BLOCK_BYTES, the rest in metrics.jsonl.blocks/
    URL/lease                      of the controller that may write the others (object_storage.py)
    URL/weights/, wanted_instances  of a cluster, whose processes share nothing else (cluster/checkpoint_shards.py)

Consumes a scratch folder that Checkpoints and the writers of logs fill as in a local run; produces its mirror. Laws:
the store decides: a step that it does not hold, byte for byte, is removed from the scratch folder when a run begins; no
fact is acknowledged before the batch that holds it is in the store (journal.sync_s is the batch; while the store
refuses, the run goes on with an alarm); the journal keeps all that a step on its way needs; a store that cannot be
reached raises an alarm while the run lasts, and never holds half a step.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import json
import os
import shutil
import stat
import tempfile
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dora_jax.base.exits import Stop
from dora_jax.config import ConfigError
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.object_storage import (
    BLOCK_BYTES,
    BLOCKS,
    JOURNAL,
    LEASE,
    ROSTER,
    STEPS,
    WANTED,
    WEIGHTS,
    Lease,
    LeaseLost,
    Objects,
    StoredSteps,
    StoreError,
    one_line,
    push_part,
    side_by_side,
)
from dora_jax.trainer import manifest
from dora_jax.trainer.manifest import MANIFEST, TEMPORARY

MARK = ".store"  # a file in the scratch folder: the URL of the workdir
SAMPLES = "samples/"  # a folder whose oldest files a run deletes
LOGS = ("tensorboard", "logs", SAMPLES)  # folders whose files are copied too
CONFIG = ("config.json", "overrides.json")
LOGS_PERIOD_S = 30.0


def attach(url: str, purpose: str) -> Path:
    """The scratch folder of this URL, with the config.json of the run if one has begun. ConfigError: the store cannot
    be read, or the scratch folders' own is another user's, a link, or writable by others."""
    folder, store = scratch(url, purpose), Objects(url)
    try:
        found = store.get("config.json")
        begun = purpose == "evaluate" or any(store.keys(folder) for folder in (JOURNAL, STEPS))
    except OSError as error:
        raise ConfigError(f"workdir: {url} cannot be read: {one_line(error)}") from error
    private_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(url)
    (folder / "config.json").unlink(missing_ok=True)
    if found is not None and begun:
        (folder / "config.json").write_bytes(found)
    return folder


def scratch(url: str, purpose: str) -> Path:
    """The scratch folder of this URL: this user's alone, because the machine may have others."""
    return _mine() / purpose / urllib.parse.quote(url.rstrip("/"), safe="")


def private_folder(field: str = "workdir") -> Path:
    """The folder of this machine for copies of what is in buckets, made where it is missing. ConfigError, about the
    field that needs it: it is not a folder of this user's alone."""
    mine = _mine()
    with contextlib.suppress(FileExistsError):
        mine.mkdir(mode=0o700, parents=True)
    found = mine.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{field}: what is in a bucket is copied to {mine}, which is not a folder of this user's alone: remove "
            f"it, or set TMPDIR"
        )
    return mine


def _mine() -> Path:
    return Path(tempfile.gettempdir()) / f"dora_jax-{os.getuid()}"


def claim(workdir: Path) -> None:
    """Writes the run's config to the store. ConfigError: the store cannot be written."""
    url = url_of(workdir)
    if url is None:
        raise ConfigError(f"workdir: {workdir} stands for no URL")
    try:
        _Copy(Objects(url), workdir).push_files(CONFIG)
    except OSError as error:
        raise ConfigError(f"workdir: {url} cannot be written: {one_line(error)}") from error


def url_of(workdir: Path) -> str | None:
    """The URL of a scratch folder; None: this is a local workdir."""
    mark = workdir / MARK
    return mark.read_text() if mark.is_file() else None


def fetch(workdir: Path) -> None:
    """Brings all steps of the store to the scratch folder of an evaluation."""
    if url := url_of(workdir):
        _Copy(Objects(url), workdir).pull_steps()


@contextlib.contextmanager
def mirrored(workdir: Path, notify: Callable[[str], None], steps: bool = True) -> Iterator[Mirror | None]:
    """The mirror of a scratch folder while a run lasts; None: the workdir is a local folder. `steps`: this process
    saves the steps; else other processes put them into the store."""
    url = url_of(workdir)
    if url is None:
        yield None
        return
    with (workdir / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"workdir: another run on this machine writes {url}: end it first") from error
        mirror = Mirror(url, workdir, notify, steps)
        try:
            yield mirror
        finally:
            mirror.close()


class Mirror:
    """Copies the scratch folder of one run to the store, on another thread. Used by one thread."""

    def __init__(self, url: str, workdir: Path, notify: Callable[[str], None], steps: bool = True):
        self.copies_steps = steps
        self._url, self._notify = url, notify
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._under_way: concurrent.futures.Future | None = None
        self._failing = False
        try:
            self.lease = Lease(url)
            self._copy = _Copy(Objects(url, self.lease), workdir, steps)
            if steps:
                self._copy.pull_steps()
                self._copy.steps.sweep()
            self._copy.pull_files()
        except OSError as error:
            raise ConfigError(f"workdir: {url} cannot be used: {one_line(error)}") from error

    def steps(self) -> list[int]:
        """The steps that are whole in the store, oldest first."""
        return sorted(self._copy.steps.whole)

    def poll(self) -> None:
        """Cheap; call it every step. JournalError: another controller has taken over."""
        if self._under_way is None or self._under_way.done():
            self._last_fault()
            self._under_way = self._pool.submit(self._copy.push)

    def settle(self) -> None:
        """Blocks until the store holds what the scratch folder holds. Stop: it does not, and another start may help."""
        concurrent.futures.wait([self._under_way] if self._under_way else [])  # it may have begun too early
        self.poll()
        concurrent.futures.wait([self._under_way] if self._under_way else [])
        if fault := self._last_fault():
            raise Stop(
                f"{self._url} does not take the newest checkpoint ({fault}); the same command goes on from its journal"
            )

    def close(self) -> None:
        """Copies the logs once more. A step that is under way is abandoned, and is no step."""
        self._copy.abandoned = True
        self._pool.shutdown()
        try:
            self._copy.push_files()
        except OSError as error:
            self._notify(f"{self._url} does not take the last lines of the logs: {one_line(error)}")

    def _last_fault(self) -> str | None:
        """The fault of the last copy. It is reported when copies begin to fail, and when they succeed again."""
        error = self._under_way.exception() if self._under_way else None
        self._under_way = None
        if isinstance(error, LeaseLost):
            raise JournalError(str(error)) from error
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None and not self._failing:
            newest = f"; the newest step there: {max(self.steps(), default=None)}" if self.copies_steps else ""
            self._notify(f"{self._url} cannot be written ({one_line(error)}){newest}")
        if error is None and self._failing:
            self._notify(f"{self._url} is written again")
        self._failing = error is not None
        return one_line(error) if error is not None else None


class _Copy:
    """Files <-> objects. OSError: the store did not copy them."""

    def __init__(self, store: Objects, workdir: Path, copies_steps: bool = True):
        self._store, self._dir, self._copies_steps = store, workdir, copies_steps
        self.abandoned = False
        self._pushed: dict[str, tuple[int, int]] = {}  # name -> size and time, as they were
        self._blocks: dict[str, tuple[int, int]] = {}  # name -> where its last block begins, CRC of what is before
        self._pushed_s = 0.0
        self.steps = StoredSteps(store)

    # ------------------------------------------------------------ from the store

    def pull_steps(self) -> None:
        """Brings the steps of the store here, and removes those that the store does not hold."""
        keys = self.steps.look()
        folder = self._dir / STEPS
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            step = int(path.name) if path.name.isdigit() else None
            same = step is None or self._same(path)
            if not same or (step is not None and manifest.fault(path, full=True)):
                shutil.rmtree(path)
        for step in sorted(self.steps.whole):
            if not (folder / str(step)).exists():
                part = folder / f"{step}{TEMPORARY}.pulled"
                names = [key.split("/", 2)[2] for key in keys if key.startswith(f"{STEPS}/{step}/")]
                side_by_side(functools.partial(self._pull, step, part), names)
                part.rename(folder / str(step))
            else:  # it is whole here, and what the store has lost of it is put again
                files = json.loads(self.steps.whole[step])["files"]
                lost = {name: files[name] for name in files if f"{STEPS}/{step}/{name}" not in keys}
                push_part(self._put, folder / str(step), lost)

    def _pull(self, step: int, folder: Path, name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(self._get(f"{STEPS}/{step}/{name}"))

    def pull_files(self) -> None:
        keys = self._store.keys()
        in_blocks = {key.partition(BLOCKS)[0] for key in keys if BLOCKS in key}
        for key in keys:
            path = self._dir / key
            if key.split("/")[0] in (STEPS, JOURNAL, WEIGHTS, WANTED, ROSTER, LEASE, *CONFIG) or BLOCKS in key:
                continue
            if any(parent.is_file() for parent in path.parents):  # no run wrote it: the name of a file is its folder
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._store.log(key) or b""
            path.write_bytes(whole)
            if key in in_blocks and len(self._get(key)) == BLOCK_BYTES:  # else they were sent for it, and it was not
                at = (len(whole) - 1) // BLOCK_BYTES * BLOCK_BYTES
                self._blocks[key] = at, zlib.crc32(whole[:at])
            if key.startswith(SAMPLES):
                self._pushed[key] = 0, 0

    # ------------------------------------------------------------ to the store

    def push(self) -> None:
        """Copies new steps, then deletes old ones, then copies the logs."""
        if self._copies_steps:
            here = manifest.steps(self._dir / STEPS)
            for step in here:
                root = self._dir / STEPS / str(step)
                if self._same(root):
                    continue
                if step in self.steps.whole:
                    self.steps.drop(step)  # it was made again
                try:
                    vouched = (root / MANIFEST).read_bytes()
                    push_part(self._put, root, json.loads(vouched)["files"])
                except FileNotFoundError:
                    if root.exists():
                        raise
                    continue  # the step was deleted meanwhile, for a newer one
                self.steps.seal(step, vouched)
            for step in sorted(set(self.steps.whole) - set(here)):
                self.steps.drop(step)
        if time.monotonic() - self._pushed_s > LOGS_PERIOD_S:
            self._pushed_s = time.monotonic()
            self.push_files()

    def push_files(self, names: Sequence[str] = ()) -> None:
        """Copies the files that have changed: those of `names`, else all."""
        logs = [path for folder in LOGS for path in (self._dir / folder).glob("*")]
        files = [self._dir / name for name in names] or [*self._dir.glob("[!.]*.*"), *logs]
        for path in filter(Path.is_file, files):
            name = str(path.relative_to(self._dir))
            with contextlib.suppress(FileNotFoundError):  # a file that the run has deleted meanwhile
                stat = path.stat()
                if self._pushed.get(name) != (stat.st_size, stat.st_mtime_ns):
                    self._push(name, path)
                    self._pushed[name] = stat.st_size, stat.st_mtime_ns
        for name in [name for name in self._pushed if name.startswith(SAMPLES) and not (self._dir / name).exists()]:
            self._store.drop(name)
            self._store.drop_folder(name + BLOCKS)
            del self._pushed[name]

    def _push(self, name: str, path: Path) -> None:
        """A file whole, or where it has only grown what has come since its last block began."""
        with path.open("rb") as file:
            at, crc = self._blocks.get(name, (0, 0))
            if (
                at
                and functools.reduce(
                    lambda crc, n: zlib.crc32(file.read(BLOCK_BYTES), crc), range(at // BLOCK_BYTES), 0
                )
                != crc
            ):
                at = 0
                del self._blocks[name]
                self._store.drop_folder(name + BLOCKS)
                self._put(name, b"")  # of which none of the blocks to come is one
            file.seek(0)
            first = b"" if at else file.read(BLOCK_BYTES)
            at, crc = (at, crc) if at else (len(first), zlib.crc32(first))
            file.seek(at)
            while block := file.read(BLOCK_BYTES):
                self._put(f"{name}{BLOCKS}/{at:016d}", block)
                self._blocks[name] = at, crc
                at, crc = at + len(block), zlib.crc32(block, crc)
            if first:  # last: of this length it is what makes blocks count
                self._put(name, first)

    # ------------------------------------------------------------ private

    def _same(self, root: Path) -> bool:
        vouched = self.steps.whole.get(int(root.name))
        return vouched is not None and (root / MANIFEST).is_file() and (root / MANIFEST).read_bytes() == vouched

    def _get(self, key: str) -> bytes:
        found = self._store.get(key)
        if found is None:
            raise StoreError(f"{key} was listed, and is not there")
        return found

    def _put(self, key: str, data: bytes) -> None:
        if self.abandoned and key.startswith(f"{STEPS}/"):
            raise OSError("the run ends")
        self._store.put(key, data)
