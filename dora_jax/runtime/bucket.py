"""A workdir in object storage (gs://, s3://, file://): the store is the run, a scratch folder here stands for it.

    URL/journal/                   the event log, written through (objects.py)
    URL/checkpoints/STEP/...       each completed step, its manifest put last
    URL/config.json, metrics.jsonl, ...     copies of the scratch folder's files, every now and then

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
import json
import shutil
import tempfile
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tensorstore

from dora_jax.config import ConfigError
from dora_jax.runtime.guard import Stop
from dora_jax.runtime.objects import ANSWER_S
from dora_jax.trainer import manifest
from dora_jax.trainer.manifest import MANIFEST, TEMPORARY

MARK = ".store"  # in a scratch folder: the URL that it stands for
STEPS, JOURNAL, BOARD = "checkpoints", "journal", "tensorboard"
CONFIG = ("config.json", "overrides.json")
LOGS_PERIOD_S = 30.0  # a log is copied whole
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}  # a main thread waits for them


def attach(url: str, purpose: str) -> Path:
    """The scratch folder of this URL, with the config.json that the store holds. ConfigError: it cannot be read."""
    folder = Path(tempfile.gettempdir()) / "dora_jax" / purpose / urllib.parse.quote(url.rstrip("/"), safe="")
    store = opened(url)
    try:
        found = store.read("config.json").result(timeout=ANSWER_S)
    except (ValueError, OSError) as error:
        raise ConfigError(f"workdir: {url} cannot be read: {_line(error)}") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(url)
    (folder / "config.json").unlink(missing_ok=True)
    if found.state == "value":
        (folder / "config.json").write_bytes(found.value)
    return folder


def claim(workdir: Path) -> None:
    """The store gets the run's config; ConfigError: it cannot be written."""
    url = url_of(workdir)
    try:
        _Copy(opened(url), workdir).push_files(CONFIG)
    except (ValueError, OSError) as error:
        raise ConfigError(f"workdir: {url} cannot be written: {_line(error)}") from error


def url_of(workdir: Path) -> str | None:
    """What a scratch folder stands for; None: it is a workdir of its own."""
    mark = workdir / MARK
    return mark.read_text() if mark.is_file() else None


def opened(url: str) -> tensorstore.KvStore:
    context = tensorstore.Context({"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})
    try:
        return tensorstore.KvStore.open(url.rstrip("/") + "/", context=context).result(timeout=ANSWER_S)
    except (ValueError, OSError) as error:
        raise ConfigError(f"workdir: {url} cannot be opened: {_line(error)}") from error


def fetch(workdir: Path) -> None:
    """For a reader: all of the store's steps, in the scratch folder of an evaluation."""
    if url := url_of(workdir):
        _Copy(opened(url), workdir).pull_steps()


@contextlib.contextmanager
def mirrored(workdir: Path, say: Callable[[str], None]) -> Iterator[Mirror | None]:
    """The mirror of a scratch folder while a run lasts; None where the workdir is a local folder."""
    url = url_of(workdir)
    if url is None:
        yield None
        return
    with (workdir / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"workdir: another run on this machine writes {url}: end it first") from error
        mirror = Mirror(url, workdir, say)
        try:
            yield mirror
        finally:
            mirror.close()


class Mirror:
    """Of one run; used by one thread. Copies on a thread of its own."""

    def __init__(self, url: str, workdir: Path, say: Callable[[str], None]):
        self._url, self._say = url, say
        self._copy = _Copy(opened(url), workdir)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "mirror")
        self._under_way: concurrent.futures.Future | None = None
        self._failing = False
        try:
            self._copy.pull_steps()
            self._copy.sweep()
            self._copy.pull_files()
        except (ValueError, OSError) as error:
            raise ConfigError(f"workdir: {url} cannot be used: {_line(error)}") from error

    def steps(self) -> list[int]:
        """Whole in the store, oldest first."""
        return sorted(self._copy.stored)

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
            raise Stop(f"{self._url} does not take the newest checkpoint ({fault}); the same command goes on from its "
                       f"journal")

    def close(self) -> None:
        """The logs once more; a step that is under way is abandoned, and is no step."""
        self._copy.abandoned = True
        self._pool.shutdown()
        try:
            self._copy.push_files()
        except (ValueError, OSError) as error:
            self._say(f"{self._url} does not take the last lines of the logs: {_line(error)}")

    def _heard(self) -> str | None:
        """What the last pass failed of; said when it begins and when it ends."""
        error = self._under_way.exception() if self._under_way else None
        self._under_way = None
        if error is not None and not isinstance(error, ValueError | OSError):
            raise error
        if error is not None and not self._failing:
            self._say(f"{self._url} cannot be written ({_line(error)}): the newest step that it holds is "
                      f"{max(self.steps(), default=None)}")
        if error is None and self._failing:
            self._say(f"{self._url} is written again")
        self._failing = error is not None
        return _line(error) if error is not None else None


class _Copy:
    """Files <-> objects. ValueError, OSError: the store did not do it."""

    def __init__(self, store: tensorstore.KvStore, workdir: Path):
        self._store, self._dir = store, workdir
        self.abandoned = False
        self._pushed: dict[str, tuple[int, int]] = {}  # name -> size and time, as they were
        self._pushed_s = 0.0
        self.stored: dict[int, bytes] = {}  # step -> its manifest

    # ------------------------------------------------------------ from the store

    def pull_steps(self) -> None:
        """What is here and not there is removed."""
        keys = self._keys(STEPS)
        self.stored = {int(key.split("/")[1]): self._get(key) for key in keys if key.endswith(f"/{MANIFEST}")}
        folder = self._dir / STEPS
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            step = int(path.name) if path.name.isdigit() else None
            same = step is None or self._same(path, self.stored.get(step))
            if not same or (step is not None and manifest.fault(path, full=True)):
                shutil.rmtree(path)
        for step in self.stored:
            if not (folder / str(step)).exists():
                part = folder / f"{step}{TEMPORARY}.pulled"
                for key in [key for key in keys if key.startswith(f"{STEPS}/{step}/")]:
                    path = part / key.split("/", 2)[2]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self._get(key))
                part.rename(folder / str(step))

    def sweep(self) -> None:
        """What is left of steps that were never whole."""
        for key in self._keys(STEPS):
            if int(key.split("/")[1]) not in self.stored:
                self._store.write(key, None).result(timeout=ANSWER_S)

    def pull_files(self) -> None:
        for key in self._keys():
            if not key.startswith((f"{STEPS}/", f"{JOURNAL}/")) and key not in CONFIG:
                (self._dir / key).parent.mkdir(exist_ok=True)
                (self._dir / key).write_bytes(self._get(key))

    # ------------------------------------------------------------ to the store

    def push(self) -> None:
        """A pass: new steps, then the end of old ones, then the logs."""
        here = manifest.steps(self._dir / STEPS)
        for step in here:
            if not self._same(self._dir / STEPS / str(step), self.stored.get(step)):
                self._push_step(step)
        for step in [step for step in self.stored if step not in here]:
            self._drop_step(step)
        if time.monotonic() - self._pushed_s > LOGS_PERIOD_S:
            self._pushed_s = time.monotonic()
            self.push_files()

    def push_files(self, names: Sequence[str] = ()) -> None:
        """Those that have changed; all of them, without `names`."""
        files = [self._dir / name for name in names] or [*self._dir.glob("[!.]*.*"), *(self._dir / BOARD).glob("*")]
        for path in filter(Path.is_file, files):
            stat, name = path.stat(), str(path.relative_to(self._dir))
            if self._pushed.get(name) != (stat.st_size, stat.st_mtime_ns):
                self._put(name, path.read_bytes())
                self._pushed[name] = stat.st_size, stat.st_mtime_ns

    def _push_step(self, step: int) -> None:
        root = self._dir / STEPS / str(step)
        if step in self.stored:
            self._drop_step(step)  # it was made again
        try:
            vouched = (root / MANIFEST).read_bytes()
            for name, (size, crc) in json.loads(vouched)["files"].items():
                data = (root / name).read_bytes()
                if len(data) != size or zlib.crc32(data) != crc:
                    raise OSError(f"{root / name} does not match its checksum")
                self._put(f"{STEPS}/{step}/{name}", data)
        except FileNotFoundError:
            if root.exists():
                raise
            return  # a newer step has taken its place meanwhile
        self._put(f"{STEPS}/{step}/{MANIFEST}", vouched)
        self.stored[step] = vouched

    def _drop_step(self, step: int) -> None:
        del self.stored[step]
        self._store.write(f"{STEPS}/{step}/{MANIFEST}", None).result(timeout=ANSWER_S)
        for key in self._keys(f"{STEPS}/{step}"):
            self._store.write(key, None).result(timeout=ANSWER_S)

    # ------------------------------------------------------------ private

    def _same(self, root: Path, vouched: bytes | None) -> bool:
        return vouched is not None and (root / MANIFEST).is_file() and (root / MANIFEST).read_bytes() == vouched

    def _keys(self, folder: str = "") -> list[str]:
        within = tensorstore.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else None
        return sorted(key.decode() for key in self._store.list(within).result(timeout=ANSWER_S))

    def _get(self, key: str) -> bytes:
        return bytes(self._store.read(key).result(timeout=ANSWER_S).value)

    def _put(self, key: str, data: bytes) -> None:
        if self.abandoned and key.startswith(f"{STEPS}/"):
            raise OSError("the run ends")
        self._store.write(key, data).result(timeout=ANSWER_S)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
