"""Whole objects under a URL (gs://, s3://, file://) or in a local folder, and the steps that a store holds.

Produces and consumes bytes by name. Laws: a step without its manifest is none, and its manifest is put last; what is
written under a lease is written by the last controller that took it, whatever an earlier one still has on its way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tensorstore

from dora_jax.base.exits import Stop
from dora_jax.config import ConfigError
from dora_jax.trainer.manifest import MANIFEST, Files

STEPS, JOURNAL, WEIGHTS, WANTED, ROSTER = "checkpoints", "journal", "weights", "wanted_instances", "controller.json"
LEASE = "lease"  # {"number", "owner"} of the controller that may write
STEP = re.compile(rf"{STEPS}/(\d+)/.+")  # a name of something else under it is no step's
BLOCK_BYTES = 1 << 20  # the most of a file that grows in its own object; the rest is in blocks of as many
BLOCKS = ".blocks"  # the folder of them, behind the file's name; each is named by where it begins
ABSENT = b"\x02"  # tensorstore's generation of a key that is not there
ANSWER_S = 60.0  # a store that has not answered by then has failed
STREAMS = 8  # whole objects at a time
TRIES = 5  # of a conditional write that meets another one
RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}  # short: a thread with other work waits


class StoreError(OSError, Stop):
    """The store did not do it: an alarm where the run can go on without it, else the end of the run for now."""


class LeaseLost(StoreError):
    """Another controller has taken the lease: nothing of this one is to be written any more."""


class Lease:
    """The right of one controller to write what a run has under a URL: journal, steps, weights and rosters share its
    number, which only rises, from 1 again where the lease is damaged. Taking it ends that of every earlier controller,
    a paused one too. StoreError: it was not to be had."""

    def __init__(self, url: str):
        objects = Objects(url)
        for _ in range(TRIES):
            held, generation = objects.stamped(LEASE)
            self.number = 1
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.number += int(json.loads(held or b"")["number"])
            self._mine = json.dumps({"number": self.number, "owner": os.urandom(8).hex()}).encode()
            if objects.replace(LEASE, self._mine, generation):
                self._objects = objects
                return
        raise StoreError(f"{url}/{LEASE} is taken by others again and again")

    def check(self) -> None:
        """LeaseLost: another controller has it."""
        if self._objects.get(LEASE) != self._mine:
            raise LeaseLost(f"{self._objects.url} has another controller: this one was taken for dead and is over")


class Objects:
    """What is under a URL, or in a local folder: whole objects by name. All of it may raise StoreError.

    With a lease nothing is written over that another controller has written since it was taken: what an object was is
    read, then the lease, and the object is replaced where it still is that."""

    def __init__(self, url: str, lease: Lease | None = None, field: str = "workdir"):
        """ConfigError, about the field that names the URL: it cannot be opened."""
        self.url = url.rstrip("/")
        self._store = opened(url, field)
        self._lease = lease
        self._written: dict[str, bytes] = {}  # under the lease: the generation of what was put last

    def spec(self, folder: str) -> dict[str, Any]:
        """The tensorstore spec of a folder."""
        return (self._store / folder).spec().to_json()

    def keys(self, folder: str = "") -> list[str]:
        return self.beginning(f"{folder}/" if folder else "")

    def beginning(self, prefix: str) -> list[str]:
        """The names that begin so, but for those of empty folders, which end with a slash. StoreError: one leads out of
        a folder."""
        keys = sorted(key.decode() for key in self._done(self._store.list(_beginning(prefix) if prefix else None)))
        for key in keys:
            if {"", ".", ".."} & set(key.removesuffix("/").split("/")):
                raise StoreError(f"it holds an object named {key!r}, which no run writes: remove it")
        return [key for key in keys if not key.endswith("/")]

    def log(self, key: str) -> bytes | None:
        """A file that grew: its object, and the blocks that follow it. An object of another length has none."""
        whole = self.get(key)
        if whole is not None and len(whole) == BLOCK_BYTES:
            for block in self.keys(key + BLOCKS):
                if int(block.rpartition("/")[2]) == len(whole):
                    whole += self.get(block) or b""
        return whole

    def get(self, key: str) -> bytes | None:
        return self.stamped(key)[0]

    def several(self, keys: Iterable[str]) -> list[bytes | None]:
        """All are asked for at once, for they are small."""
        found = [self._done(read) for read in [self._store.read(key) for key in keys]]
        return [bytes(held.value) if held.state == "value" else None for held in found]

    def stamped(self, key: str, known: bytes | None = None, limit_s: float = 0.0) -> tuple[bytes | None, bytes]:
        """(an object, its generation): for `replace`. known: a generation that counts as no object. limit_s: of the
        answer, where it is not ANSWER_S."""
        held = self._done(self._store.read(key, if_not_equal=known), limit_s)
        return (bytes(held.value), held.stamp.generation) if held.state == "value" else (None, ABSENT)

    def replace(self, key: str, data: bytes | None, generation: bytes) -> bytes:
        """Writes where the object is still of this generation, and returns its new one; empty: it was not. None
        deletes."""
        return self._done(self._store.write(key, data, if_equal=generation)).generation

    def put(self, key: str, data: bytes | None) -> None:
        if self._lease is None:
            self._done(self._store.write(key, data))
            return
        generation = self._written.pop(key, ABSENT if data is not None else b"")
        for _ in range(TRIES):
            if generation:
                self._lease.check()
                if written := self.replace(key, data, generation):
                    if data is not None:
                        self._written[key] = written
                    return
            held, generation = self.stamped(key)
            if held == data:  # perhaps only the answer was lost
                self._lease.check()
                return
        raise StoreError(f"{self.url}/{key} is written by others again and again")

    def drop(self, key: str) -> None:
        self.put(key, None)

    def drop_folder(self, folder: str) -> None:
        if self._lease is not None:
            self._lease.check()
        self._done(self._store.delete_range(_beginning(f"{folder}/")))
        if "://" not in self.url:  # tensorstore leaves the folder itself, empty
            shutil.rmtree(Path(self.url) / folder, ignore_errors=True)

    def _done(self, asked: tensorstore.Future, limit_s: float = 0.0) -> Any:
        limit_s = limit_s or ANSWER_S
        try:
            return asked.result(timeout=limit_s)
        except (ValueError, OSError) as error:  # tensorstore's statuses: no space, no route, no permission
            reason = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else one_line(error)
            raise StoreError(f"{self.url}: {reason}") from error


@dataclasses.dataclass
class StoredSteps:
    """The steps that the store holds, as far as this process has looked or put them. StoreError: as of `Objects`."""

    store: Objects
    whole: dict[int, bytes] = dataclasses.field(default_factory=dict)  # step -> its manifest

    def look(self) -> list[str]:
        """Finds the steps that are whole. Returns the names of all objects, also of steps that are not whole."""
        keys = self.store.keys(STEPS)
        found = [(match, key) for key in keys if (match := STEP.fullmatch(key)) and key.endswith(f"/{MANIFEST}")]
        manifests = {int(match[1]): self.store.get(key) for match, key in found}
        self.whole = {step: vouched for step, vouched in manifests.items() if vouched is not None}
        return keys

    def sweep(self, before: float = math.inf) -> None:
        """Deletes the rest of steps that were never whole. Steps from `before` on may be under way."""
        for step in {int(m[1]) for key in self.store.keys(STEPS) if (m := STEP.fullmatch(key))} - set(self.whole):
            if step < before:
                self.store.drop_folder(f"{STEPS}/{step}")

    def seal(self, step: int, vouched: bytes) -> None:
        """All files of the step are there: from now on it is a step."""
        self.store.put(f"{STEPS}/{step}/{MANIFEST}", vouched)
        self.whole[step] = vouched

    def drop(self, step: int) -> None:
        del self.whole[step]
        self.store.drop(f"{STEPS}/{step}/{MANIFEST}")
        self.store.drop_folder(f"{STEPS}/{step}")


def push_part(put: Callable[[str, bytes], None], root: Path, files: Files) -> None:
    """Puts these files of a step. OSError: a file is not what it was when the manifest was written."""

    def push(name: str) -> None:
        data = (root / name).read_bytes()
        if [len(data), zlib.crc32(data)] != files[name]:
            raise OSError(f"{root / name} does not match its checksum")
        put(f"{STEPS}/{root.name}/{name}", data)

    side_by_side(push, files)


def opened(url: str, field: str = "workdir") -> tensorstore.KvStore:
    """The store at a URL, or in a local folder, that a field names. ConfigError: it cannot be opened."""
    context = tensorstore.Context({"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})
    local = {"driver": "file", "path": os.path.abspath(url) + "/"}
    try:
        spec = url.rstrip("/") + "/" if "://" in url else local
        return tensorstore.KvStore.open(spec, context=context).result(timeout=ANSWER_S)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{field}: {url} cannot be opened: {one_line(error)}") from error


def side_by_side(do: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """`do` of each name, several at a time, because one stream to a bucket is slow."""
    pool = concurrent.futures.ThreadPoolExecutor(STREAMS, "stream")
    try:
        return list(pool.map(do, names))
    finally:
        pool.shutdown(cancel_futures=True)


def one_line(error: BaseException) -> str:
    """The message of an error, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _beginning(prefix: str) -> tensorstore.KvStore.KeyRange:
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))  # the first that does not
