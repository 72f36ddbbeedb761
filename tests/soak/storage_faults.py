"""Storage that fails under the journal and its recovery, in virtual time: does every run go on exactly?

    python -m tests.soak.storage_faults [--trials=10000] [--first=0] [--planted]

A trial is a run of the orchestrator's virtual world (tests/fakes/journal_world.py: no engine, no compile) behind the
real journal in the real stores of segments: `folder`, on a disk, or `bucket`, over tensorstore's memory driver. It is
begun again after each fault, then goes to its end. Faults:

    folder    cut       power is lost in a write: of what was not yet durable any part is there
              sync      fdatasync fails, once or more
              full      writes find no room, once or more
              torn      killed before or after a new segment has got its name
              extra     files and folders that no run wrote lie among the segments
    bucket    refused   puts are not done, and say so
              lost      puts are done, and their answers are lost
              cut       killed before or after a put
              zombie    an earlier writer, paused, goes on behind its successor

An outsider, which shares no code with recovery, holds the books: what was published, trained and known (`History`). The
verdict of a trial is `exact`; `refused`, a sentence; `wrong`, the books do not balance; `trace`, any other exception.
--planted reads segments without their last frame, which the outsider must find. A trial depends on its number alone.
The exit code is 1 where one is wrong or a trace.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import tensorstore

from dora_jax.orchestrate.events import GroupScored
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import event_log, log_stores
from dora_jax.runtime.journal.log_stores import FileLogStore, JournalError, ObjectLogStore
from tests.fakes.journal_world import History, Killed
from tests.fakes.orchestrator_shape import Shape

FAULTS = {"folder": ("cut", "sync", "full", "torn", "extra"), "bucket": ("refused", "lost", "cut", "zombie")}
MODES = ("dora", "dora_paper", "sync", "one_step")
EXACT, REFUSED, WRONG, TRACE = "exact", "refused", "wrong", "trace"
BEGUN, WRITES = 4, 60  # a fault comes behind the writes of a start, within so many


class Faults:
    """When something happens to the writes of one incarnation. at: the number of the first one; none where 0. last: of
    that at which the process is killed, as soon as no record waits in memory: it would be lost."""

    def __init__(self, kind: str, at: int, last: int, draw: random.Random):
        self.kind, self.at, self.last, self.draw = kind, at, last, draw
        self.writes, self.all, self.errors = 0, 0, draw.choice((1, 1, 2, 4))
        self.happened = 0
        self.refusing = False  # records wait in memory

    def end(self) -> None:
        """Counts a write; Killed: it is the last."""
        self.all += 1
        if 0 < self.last <= self.all and not self.refusing:
            self.happened += self.kind in ("extra", "zombie")
            raise Killed

    def due(self, *kinds: str) -> bool:
        """Counts a write of these kinds; whether it is the one."""
        self.writes += self.kind in kinds
        is_due = self.kind in kinds and 0 < self.at <= self.writes and not self.refusing
        self.happened += is_due
        return is_due

    def fails(self, *kinds: str) -> bool:
        if self.due(*kinds) or (self.kind in kinds and self.refusing and self.errors):
            self.errors -= 1
            self.refusing = self.errors >= 0
        return self.kind in kinds and self.refusing and self.errors >= 0


class Folder(FileLogStore):
    """The folder of an incarnation, on a disk whose power may be cut."""

    lasting = True

    def __init__(self, directory: Path, faults: Faults, planted: bool = False):
        super().__init__(directory)
        self._faults, self._planted, self._durable = faults, planted, 0

    def read(self, segment: int) -> bytes:
        data = super().read(segment)
        return data[:-1] if self._planted else data

    def append(self, data: bytes) -> None:
        faults = self._faults
        faults.end()
        if faults.fails("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if faults.due("cut"):
            os.write(self._file, data[: faults.draw.randrange(len(data) + 1)])
            size = os.fstat(self._file).st_size
            os.ftruncate(self._file, faults.draw.randint(self._durable, size))
            raise Killed
        faults.refusing &= faults.kind != "full"
        super().append(data)

    def sync(self) -> None:
        if self._faults.fails("sync"):
            with mock.patch.object(log_stores.os, "fdatasync", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
                super().sync()
        super().sync()
        self._faults.refusing = False
        self._durable = self._size

    def begin(self, segment: int, data: bytes, staged: bool = False) -> None:
        if self._faults.due("torn"):
            if self._faults.draw.random() < 0.5:
                super().begin(segment, data, staged)
            else:
                self.head(segment).write_bytes(data[: self._faults.draw.randrange(len(data) + 1)])
            raise Killed
        super().begin(segment, data, staged)
        self._durable = self._size


class Bucket:
    """tensorstore's store for one incarnation, with faults before and behind its writes."""

    def __init__(self, store: tensorstore.KvStore, faults: Faults):
        self._store, self._faults = store, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *args: Any, **options: Any) -> Any:
        faults = self._faults
        faults.end()
        if faults.fails("refused"):
            raise OSError("503")
        if faults.due("cut"):
            if faults.draw.random() < 0.5:
                self._store.write(*args, **options).result()
            raise Killed
        done = self._store.write(*args, **options)
        if faults.fails("lost"):
            done.result()
            raise OSError("504")
        faults.refusing = False
        return done


class PlantedBucket(ObjectLogStore):
    def read(self, segment: int) -> bytes:
        return super().read(segment)[:-1]


class Trial(NamedTuple):
    place: str
    mode: str
    fault: str
    verdict: str
    why: str = ""
    happened: int = 0  # faults that came, where it is exact


def trial(number: int, planted: bool = False) -> Trial:
    """The trial of this number."""
    draw = random.Random(number)
    place = draw.choice(tuple(FAULTS))
    fault, mode = draw.choice(FAULTS[place]), draw.choice(MODES)
    config = OrchestratorConfig(
        mode=mode, groups_per_step=draw.randint(1, 3), group_size=draw.choice((1, 2, 4)), max_filtered_rounds=50,
        total_steps=draw.randint(2, 5), max_versions=draw.randint(1, 3), eval_every=draw.randint(0, 2), eval_groups=3,
    )  # fmt: skip
    shape = Shape(
        instances=tuple((draw.choice((1, 2, 5)), 1.0, 1) for _ in range(draw.randint(1, 3))), seed=number,
        train_s=draw.choice((0.1, 1.0)), filtered=draw.choice((0.0, 0.2)), deaths=draw.choice((0.0, 0.3)),
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="storage_faults-"))
    try:
        history = History(config, shape, draw.randint(1, 3), draw.randint(1, 3))
        happened = run_through(history, place, fault, draw, folder, planted)
    except AssertionError as error:
        return Trial(place, mode, fault, WRONG, f"{error}"[:200])
    except JournalError as error:
        return Trial(place, mode, fault, REFUSED, f"{error}"[:200])
    except Exception as error:
        return Trial(place, mode, fault, TRACE, f"{type(error).__name__}: {error}"[:200])
    finally:
        shutil.rmtree(folder)
    return Trial(place, mode, fault, EXACT, happened=happened)


def run_through(history: History, place: str, fault: str, draw: random.Random, folder: Path, planted: bool) -> int:
    """Incarnation after incarnation, the last without a fault; returns how many faults came. AssertionError: the books
    do not balance."""
    brains: list[Any] = []
    happened = 0
    arm, bucket = history.arm, tensorstore.KvStore.open("memory://journal/").result()

    filtered: set[int] = set()  # in the world; a kill right behind the write may have kept it from the outsider

    def armed(body: Any, *rest: Any) -> None:
        brains.append(body.brain)
        payload_of = body.payload_of

        def noted(event: Any) -> None:
            if isinstance(event, GroupScored) and not event.trainable:
                filtered.add(event.group_id)
            payload_of(event)

        body.payload_of = noted
        arm(body, *rest)

    history.arm = armed
    faults_to_come, paused, halt = draw.randint(1, 5), None, None
    while halt is None:
        at = draw.randint(1, 5) if fault == "torn" else draw.randint(BEGUN, WRITES)
        last = at + draw.randint(0, WRITES)  # of a process that the fault does not end
        faults = Faults(fault, at, last, draw) if faults_to_come > 0 else Faults("", 0, 0, draw)
        faults_to_come -= 1
        if place == "folder":
            if fault == "extra" and folder.exists():
                (folder / f"{draw.choice(('000000.log', '1.log', 'notes', 'x.part'))}").write_bytes(b"theirs")
                (folder / f"{draw.randint(500, 999):06d}.part").mkdir(exist_ok=True)
            store: Any = Folder(folder, faults, planted)
            with contextlib.suppress(JournalError):
                Folder(folder, faults)
                raise AssertionError("a second writer was let in")
        else:
            kind = PlantedBucket if planted else ObjectLogStore
            store = kind(Bucket(bucket, faults))  # type: ignore[arg-type]
        history.disk = store
        with mock.patch.object(event_log, "RETRY_PERIOD_S", 0.0):
            halt = history.live()
        store.close()
        happened += faults.happened
        if paused is not None:  # it wakes behind its successor; what no segment names is swept
            held = readable(bucket)
            with contextlib.suppress(JournalError):
                paused.append(b"late")
            assert readable(bucket) == held, "a writer that was taken for dead changed the journal"
        paused, faults.last = store if fault == "zombie" else None, 0
    assert halt is not None and halt.ok, halt
    trained = {group for groups in history.batches.values() for group in groups}
    live = {*brains[-1].state.ledger.live, *brains[-1].state.redo}
    for group in filtered - trained - live - set(history.ends):
        history.ends[group] = "filtered"  # the audit compares with what the ledger has counted
    history.audit(brains[-1])
    return happened


def readable(store: tensorstore.KvStore) -> dict[int, bytes]:
    """What a reader finds."""
    log = ObjectLogStore(store, read_only=True)
    return {segment: log.read(segment) for segment in log.segments()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--planted", action="store_true")
    asked = parser.parse_args(argv)
    rows: collections.defaultdict[tuple[str, str], collections.Counter[str]]
    rows = collections.defaultdict(collections.Counter)
    for number in range(asked.first, asked.first + asked.trials):
        place, mode, fault, verdict, why, happened = trial(number, asked.planted)
        rows[place, fault] += collections.Counter({verdict: 1, "faults": happened})
        rows["mode", mode][verdict] += 1
        if verdict != EXACT and sum(row[verdict] for row in rows.values()) < 40:
            print(f"trial {number} ({place}, {mode}, {fault}): {verdict}: {why}")
    print(f"{'':18}{'trials':>8}{'faults':>8}" + "".join(f"{verdict:>9}" for verdict in (EXACT, REFUSED, WRONG, TRACE)))
    for (place, kind), row in sorted(rows.items()):
        counts = "".join(f"{row[verdict]:9}" for verdict in (EXACT, REFUSED, WRONG, TRACE))
        print(f"{place:8}{kind:10}{row.total() - row['faults']:8}{row['faults']:8}{counts}")
    return int(any(row[WRONG] + row[TRACE] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
