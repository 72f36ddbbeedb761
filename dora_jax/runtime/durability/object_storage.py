"""A workdir in object storage (gs://, s3://, file://): the store is the run, a scratch folder here stands for it.

    URL/journal/                   the event log, written through (log_stores.py)
    URL/checkpoints/STEP/...       each completed step, its manifest put last
    URL/config.json, metrics.jsonl, ...     copies of the scratch folder's files, every now and then
    URL/weights/, wanted_instances  of a cluster, whose processes share no more than the store (cluster/parts.py)

Consumes a scratch folder that Checkpoints and the writers of logs fill as ever; produces its mirror. Laws: the store
alone decides: a step that it does not hold, byte for byte, is removed from the scratch folder when a run begins; no
fact is acknowledged before the batch that holds it is in the store (journal.sync_s is the batch; while the store
refuses, the run goes on with an alarm); the journal forgets nothing that a step still on its way would need; a store
that cannot be reached is an alarm while the run lasts, and never a step that is half there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import json
import math
import os
import shutil
import stat
import tempfile
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorstore

from dora_jax.config import ConfigError
from dora_jax.exits import Stop
from dora_jax.runtime.durability.log_stores import ANSWER_S
from dora_jax.trainer import manifest
from dora_jax.trainer.manifest import MANIFEST, TEMPORARY, Files

MARK = ".store"  # in a scratch folder: the URL that it stands for
STEPS, JOURNAL, WEIGHTS, WANTED, ROSTER = "checkpoints", "journal", "weights", "wanted_instances", "controller.json"
LOGS = ("tensorboard", "logs")  # folders of files that are copied as those of the workdir itself
CONFIG = ("config.json", "overrides.json")
STREAMS = 8  # whole objects at a time
LOGS_PERIOD_S = 30.0  # a log is copied whole
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}  # a thread with other work waits


def attach(url: str, purpose: str) -> Path:
    """The scratch folder of this URL, with the config.json of the run that the store holds, if one has begun. ConfigError:
    it cannot be read."""
    folder, store = scratch(url, purpose), Objects(url)
    try:
        found = store.get("config.json")
        begun = purpose == "evaluate" or any(store.keys(folder) for folder in (JOURNAL, STEPS))
    except OSError as error:
        raise ConfigError(f"workdir: {url} cannot be read: {_line(error)}") from error
    _own(folder.parent.parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(url)
    (folder / "config.json").unlink(missing_ok=True)
    if found is not None and begun:
        (folder / "config.json").write_bytes(found)
    return folder


def scratch(url: str, purpose: str) -> Path:
    """On this machine, where other users may be: the folder is this one's alone."""
    mine = Path(tempfile.gettempdir()) / f"dora_jax-{os.getuid()}"
    return mine / purpose / urllib.parse.quote(url.rstrip("/"), safe="")


def _own(folder: Path) -> None:
    """Makes this folder; ConfigError where it is there and is another user's, a link, or writable by others."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"workdir: a run in a bucket works in {folder}, which is not a folder of this user's alone: remove "
            f"it, or set TMPDIR"
        )


def claim(workdir: Path) -> None:
    """The store gets the run's config; ConfigError: it cannot be written."""
    url = url_of(workdir)
    try:
        _Copy(Objects(url), workdir).push_files(CONFIG)
    except OSError as error:
        raise ConfigError(f"workdir: {url} cannot be written: {_line(error)}") from error


def url_of(workdir: Path) -> str | None:
    """What a scratch folder stands for; None: it is a workdir of its own."""
    mark = workdir / MARK
    return mark.read_text() if mark.is_file() else None


def opened(url: str) -> tensorstore.KvStore:
    """The store at a URL, or in a local folder. ConfigError: it cannot be opened."""
    context = tensorstore.Context({"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})
    local = {"driver": "file", "path": os.path.abspath(url) + "/"}
    try:
        spec = url.rstrip("/") + "/" if "://" in url else local
        return tensorstore.KvStore.open(spec, context=context).result(timeout=ANSWER_S)
    except (ValueError, OSError) as error:
        raise ConfigError(f"workdir: {url} cannot be opened: {_line(error)}") from error


def fetch(workdir: Path) -> None:
    """For a reader: all of the store's steps, in the scratch folder of an evaluation."""
    if url := url_of(workdir):
        _Copy(Objects(url), workdir).pull_steps()


@contextlib.contextmanager
def mirrored(workdir: Path, notify: Callable[[str], None], steps: bool = True) -> Iterator[Mirror | None]:
    """The mirror of a scratch folder while a run lasts; None where the workdir is a local folder. `steps`: they are
    saved here; else others put them into the store themselves."""
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
    """Of one run; used by one thread. Copies on a thread of its own."""

    def __init__(self, url: str, workdir: Path, notify: Callable[[str], None], steps: bool = True):
        self.copies_steps = steps
        self._url, self._notify = url, notify
        self._copy = _Copy(Objects(url), workdir, steps)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._under_way: concurrent.futures.Future | None = None
        self._failing = False
        try:
            if steps:
                self._copy.pull_steps()
                self._copy.steps.sweep()
            self._copy.pull_files()
        except OSError as error:
            raise ConfigError(f"workdir: {url} cannot be used: {_line(error)}") from error

    def steps(self) -> list[int]:
        """Whole in the store, oldest first."""
        return self._copy.steps.steps()

    def poll(self) -> None:
        """Cheap; call it every step."""
        if self._under_way is None or self._under_way.done():
            self._heard()
            self._under_way = self._pool.submit(self._copy.push)

    def settle(self) -> None:
        """Blocks until the store holds what the scratch folder holds; Stop: it does not, and another start may help."""
        concurrent.futures.wait([self._under_way] if self._under_way else [])  # it may have begun too early
        self.poll()
        concurrent.futures.wait([self._under_way])
        if fault := self._heard():
            raise Stop(
                f"{self._url} does not take the newest checkpoint ({fault}); the same command goes on from its journal"
            )

    def close(self) -> None:
        """The logs once more; a step that is under way is abandoned, and is no step."""
        self._copy.abandoned = True
        self._pool.shutdown()
        try:
            self._copy.push_files()
        except OSError as error:
            self._notify(f"{self._url} does not take the last lines of the logs: {_line(error)}")

    def _heard(self) -> str | None:
        """What the last pass failed of; said when it begins and when it ends."""
        error = self._under_way.exception() if self._under_way else None
        self._under_way = None
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None and not self._failing:
            newest = f"; the newest step there: {max(self.steps(), default=None)}" if self.copies_steps else ""
            self._notify(f"{self._url} cannot be written ({_line(error)}){newest}")
        if error is None and self._failing:
            self._notify(f"{self._url} is written again")
        self._failing = error is not None
        return _line(error) if error is not None else None


class StoreError(OSError, Stop):
    """The store did not do it: an alarm where the run can go on without, and where it cannot, its end for now."""


class Objects:
    """What is under a URL, or in a local folder: whole objects by name. All of it may raise StoreError."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._store = opened(url)

    def spec(self, folder: str) -> dict[str, Any]:
        """What tensorstore opens this folder by."""
        return (self._store / folder).spec().to_json()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self, folder: str = "") -> list[str]:
        return sorted(key.decode() for key in self._done(self._store.list(_within(folder) if folder else None)))

    def get(self, key: str) -> bytes | None:
        found = self._done(self._store.read(key))
        return bytes(found.value) if found.state == "value" else None

    def put(self, key: str, data: bytes) -> None:
        self._done(self._store.write(key, data))

    def drop(self, key: str) -> None:
        self._done(self._store.write(key, None))

    def drop_folder(self, folder: str) -> None:
        self._done(self._store.delete_range(_within(folder)))
        if "://" not in self.url:  # tensorstore leaves the folder itself, empty
            shutil.rmtree(Path(self.url) / folder, ignore_errors=True)

    def _done(self, asked: tensorstore.Future) -> Any:
        try:
            return asked.result(timeout=ANSWER_S)
        except (ValueError, OSError) as error:  # tensorstore's statuses: no space, no route, no permission
            raise StoreError(f"{self.url}: {_line(error)}") from error


class StoredSteps:
    """The steps that the store holds; knows those that it has looked for or put itself. StoreError as of `Objects`."""

    def __init__(self, store: Objects):
        self._store = store
        self._whole: dict[int, bytes] = {}  # step -> its manifest

    def look(self) -> list[str]:
        """The names of all that is there, also of steps that are not whole."""
        keys = self._store.keys(STEPS)
        self._whole = {int(key.split("/")[1]): self._store.get(key) for key in keys if key.endswith(f"/{MANIFEST}")}
        return keys

    def sweep(self, before: float = math.inf) -> None:
        """What is left of steps that were never whole; those from `before` on may be under way."""
        for step in {int(key.split("/")[1]) for key in self._store.keys(STEPS)} - set(self._whole):
            if step < before:
                self._store.drop_folder(f"{STEPS}/{step}")

    def steps(self) -> list[int]:
        return sorted(self._whole)

    def manifest(self, step: int) -> bytes | None:
        return self._whole.get(step)

    def seal(self, step: int, vouched: bytes) -> None:
        """All of it is there: from now on it is a step."""
        self._store.put(f"{STEPS}/{step}/{MANIFEST}", vouched)
        self._whole[step] = vouched

    def drop(self, step: int) -> None:
        del self._whole[step]
        self._store.drop(f"{STEPS}/{step}/{MANIFEST}")
        self._store.drop_folder(f"{STEPS}/{step}")


class _Copy:
    """Files <-> objects. OSError: the store did not do it."""

    def __init__(self, store: Objects, workdir: Path, copies_steps: bool = True):
        self._store, self._dir, self._copies_steps = store, workdir, copies_steps
        self.abandoned = False
        self._pushed: dict[str, tuple[int, int]] = {}  # name -> size and time, as they were
        self._pushed_s = 0.0
        self.steps = StoredSteps(store)

    # ------------------------------------------------------------ from the store

    def pull_steps(self) -> None:
        """What is here and not there is removed."""
        keys = self.steps.look()
        folder = self._dir / STEPS
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            step = int(path.name) if path.name.isdigit() else None
            same = step is None or self._same(path)
            if not same or (step is not None and manifest.fault(path, full=True)):
                shutil.rmtree(path)
        for step in self.steps.steps():
            if not (folder / str(step)).exists():
                part = folder / f"{step}{TEMPORARY}.pulled"
                names = [key.split("/", 2)[2] for key in keys if key.startswith(f"{STEPS}/{step}/")]
                side_by_side(functools.partial(self._pull, step, part), names)
                part.rename(folder / str(step))

    def _pull(self, step: int, folder: Path, name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(self._get(f"{STEPS}/{step}/{name}"))

    def pull_files(self) -> None:
        for key in self._store.keys():
            if key.split("/")[0] not in (STEPS, JOURNAL, WEIGHTS, WANTED, ROSTER, *CONFIG):
                (self._dir / key).parent.mkdir(exist_ok=True)
                (self._dir / key).write_bytes(self._get(key))

    # ------------------------------------------------------------ to the store

    def push(self) -> None:
        """A pass: new steps, then the end of old ones, then the logs."""
        if self._copies_steps:
            self._push_steps()
        if time.monotonic() - self._pushed_s > LOGS_PERIOD_S:
            self._pushed_s = time.monotonic()
            self.push_files()

    def push_files(self, names: Sequence[str] = ()) -> None:
        """Those that have changed; all of them, without `names`."""
        logs = [path for folder in LOGS for path in (self._dir / folder).glob("*")]
        files = [self._dir / name for name in names] or [*self._dir.glob("[!.]*.*"), *logs]
        for path in filter(Path.is_file, files):
            stat, name = path.stat(), str(path.relative_to(self._dir))
            if self._pushed.get(name) != (stat.st_size, stat.st_mtime_ns):
                self._put(name, path.read_bytes())
                self._pushed[name] = stat.st_size, stat.st_mtime_ns

    def _push_steps(self) -> None:
        here = manifest.steps(self._dir / STEPS)
        for step in here:
            if not self._same(self._dir / STEPS / str(step)):
                self._push_step(step)
        for step in [step for step in self.steps.steps() if step not in here]:
            self.steps.drop(step)

    def _push_step(self, step: int) -> None:
        root = self._dir / STEPS / str(step)
        if step in self.steps.steps():
            self.steps.drop(step)  # it was made again
        try:
            vouched = (root / MANIFEST).read_bytes()
            push_part(self._put, root, json.loads(vouched)["files"])
        except FileNotFoundError:
            if root.exists():
                raise
            return  # a newer step has taken its place meanwhile
        self.steps.seal(step, vouched)

    # ------------------------------------------------------------ private

    def _same(self, root: Path) -> bool:
        vouched = self.steps.manifest(int(root.name))
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


def push_part(put: Callable[[str, bytes], None], root: Path, files: Files) -> None:
    """These files of a step, as they were when its manifest was written."""

    def push(name: str) -> None:
        data = (root / name).read_bytes()
        if [len(data), zlib.crc32(data)] != files[name]:
            raise OSError(f"{root / name} does not match its checksum")
        put(f"{STEPS}/{root.name}/{name}", data)

    side_by_side(push, files)


def side_by_side(do: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """`do` of each name, several at a time: one stream to a bucket is slow."""
    pool = concurrent.futures.ThreadPoolExecutor(STREAMS, "stream")
    try:
        return list(pool.map(do, names))
    finally:
        pool.shutdown(cancel_futures=True)


def _within(folder: str) -> tensorstore.KvStore.KeyRange:
    return tensorstore.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" is what follows "/"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
