"""Storage that fails under a whole workdir, in virtual time: does every run go on exactly, or from the best that is left?

    python -m tests.soak.storage_faults [--trials=10000] [--first=0] [--planted=reader|restore]

A trial is a run with the real journal, recovery, checkpoints, metrics and mirror, and nothing that compiles
(tests/fakes/virtual_workdir.py). Of the first kinds a fault comes while it runs (tests/fakes/faulty_storage.py); it is
begun again after each, then goes to its end. Of the others a kept workdir is damaged, resumed, and goes to its end.

    folder    killed    at any write, sync, rename or deletion, which is done, or not, or in part
              power     is lost at any of them: of what was not synced any part is there, of renames any
              sync      fails; full: writes and new names find no room; errors: any operation, now and then
              slow      operations take minutes; clock: jumps by seconds, hours, years
    bucket    killed, errors, slow (a put without an answer is done later), clock
              refused   operations are not done, and say so; lost: puts are done, and their answers are lost
              zombie    an earlier writer, paused, goes on behind its successor
    at rest   flip, short, zeros, missing, extra, swapped, stale (older files among newer ones), manifest
              of journal, checkpoints, metrics, in a folder and in a bucket

Two judges share no code with recovery: an outsider, who keeps what the run reported and reads the bytes of the end itself,
and for damage tests/soak/damage_truth.py, which says what could still be had. Verdicts: `exact`; `older`, where nothing
better was left; `refused`, where nothing at all was; `wrong`: bytes or books are others, or something better was left;
`trace`: any exception but a sentence. `stopped` counts processes that ended in a sentence while their storage failed.
--planted makes a reader lose its last frame, or a restore lie by one bit, which the judges must find. A trial depends
on its number alone. The exit code is 1 where one is wrong or a trace.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dora_jax.base import exits
from dora_jax.config import ConfigError, RunError
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal.log_stores import FileLogStore, JournalError, ObjectLogStore
from tests.fakes.faulty_storage import Bucket, Faults
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.virtual_workdir import History, Trainer
from tests.soak import damage_kinds
from tests.soak.damage_kinds import Damage, kind_of
from tests.soak.damage_truth import EXACT, OLDER, REFUSED, TRACE, WRONG, Allowed, Truth, judge

LIVE = {
    "folder": ("killed", "power", "sync", "full", "errors", "slow", "clock"),
    "bucket": ("killed", "refused", "lost", "errors", "slow", "clock", "zombie"),
}
AT_REST = ("journal", "checkpoint", "metrics", "stale")
MODES = ("dora", "dora_paper", "sync", "one_step")
VERDICTS = (EXACT, OLDER, REFUSED, WRONG, TRACE)
OPERATIONS = 250  # within so many a fault comes; a run has as many or more
SENTENCES = (ConfigError, RunError, JournalError, exits.Stop)


class Refused(Exception):
    """The process ended in a sentence."""


class Trial(NamedTuple):
    place: str
    mode: str
    kind: str
    verdict: str
    why: str = ""
    happened: int = 0  # faults
    stopped: int = 0  # processes that ended in a sentence while their storage failed


def trial(number: int, planted: str = "") -> Trial:
    """The trial of this number."""
    draw = random.Random(number)
    kinds = [(place, kind) for place, kinds in LIVE.items() for kind in kinds]
    kinds += [(place, kind) for place in LIVE for kind in (*AT_REST, *AT_REST[:2])] + [("bucket", "manifest")]
    place, kind = kinds[number % len(kinds)]
    mode = MODES[number // len(kinds) % len(MODES)]
    config = OrchestratorConfig(
        mode=mode, groups_per_step=draw.randint(1, 3), group_size=draw.choice((1, 2, 4)), max_filtered_rounds=50,
        total_steps=draw.randint(5, 7), max_versions=draw.randint(1, 3), eval_every=draw.randint(0, 2), eval_groups=3,
    )  # fmt: skip
    shape = Shape(
        instances=tuple((draw.choice((1, 2, 5)), 1.0, 1) for _ in range(draw.randint(1, 3))), seed=number,
        train_s=draw.choice((0.1, 1.0)), filtered=draw.choice((0.0, 0.2)), deaths=draw.choice((0.0, 0.3)),
    )  # fmt: skip
    root = Path(tempfile.mkdtemp(prefix="storage_faults-", dir=Path("/dev/shm") if Path("/dev/shm").is_dir() else None))
    history = History(config, shape, root, Bucket() if place == "bucket" else None, draw)
    try:
        with _planted(history, planted):
            if kind in LIVE[place]:
                return Trial(place, mode, kind, EXACT, "", *_live(history, kind, draw))
            found, verdict, why = _at_rest(history, kind, draw, root)
            return Trial(place, mode, found, verdict, why.replace(str(root), ""), 1)
    except AssertionError as error:
        return Trial(place, mode, kind, WRONG, f"{error}"[:300])
    except Refused as error:  # a good state was there
        return Trial(place, mode, kind, WRONG, f"refused: {error}"[:300])
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Trial(place, mode, kind, TRACE, f"{type(error).__name__}: {error} ({where.name})"[:300])
    finally:
        shutil.rmtree(root)


def _live(history: History, kind: str, draw: random.Random) -> tuple[int, int]:
    """Incarnation after incarnation, the last without a fault; (faults that came, processes that stopped)."""
    halt: Any = None
    happened, stopped, paused = 0, 0, None
    for faults_to_come in reversed(range(draw.randint(2, 5))):
        at = draw.randint(1, OPERATIONS)
        faults = Faults(kind, draw, at, at + draw.randint(0, OPERATIONS)) if faults_to_come else Faults("", draw)
        try:
            halt = _life(history, faults)
        except Refused:
            if kind == "slow" and not faults_to_come and stopped < 10:  # what a dead process had put has arrived
                stopped += 1
                halt = _life(history, Faults("", draw))
            elif not faults.happened or kind in ("killed", "power", "clock", "zombie"):
                raise
            stopped += 1
        if kind == "power" and faults.dead and faults.happened and halt is None:
            history.disk.cut()
            if history.sync_s:  # the last of it is made again, a step of the same groups
                history.known, history.published = set(), max(0, history.published - 1)
        if history.journal is not None and kind == "zombie":  # else it died before it took anything over
            if paused is not None:
                _wake(history, *paused)
            paused = history.journal, history.mirror, faults
        happened += faults.happened
        if halt is not None:
            break
    history.look_at_the_end(halt, whole=history.bucket is None and kind not in ("power", "full", "errors"))
    history.books()
    return happened, stopped


def _life(history: History, faults: Faults, begin_only: bool = False) -> Any:
    """Refused: the process ended in a sentence."""
    try:
        return history.life(faults, begin_only)
    except (*SENTENCES, OSError) as error:
        sentence = str(error) if isinstance(error, SENTENCES) else exits.refusal(error)
        if sentence is None or "\n" in sentence:
            raise AssertionError(f"no sentence, but {type(error).__name__}: {error}") from error
        raise Refused(sentence) from error


def _wake(history: History, journal: Any, mirror: Any, faults: Faults) -> None:
    """A writer that was taken for dead goes on behind its successor: it must not change what is there."""
    assert history.bucket is not None
    faults.dead, faults.last, faults.kind = False, 0, ""
    held = {key: data for key, data in history.bucket.content().items()}
    with contextlib.suppress(*SENTENCES, OSError):
        journal.append(b"late")
        journal.commit(sync=True)
        journal.rotate([b"late"])
    with contextlib.suppress(*SENTENCES, OSError):
        mirror.poll()
        mirror.settle()
    with contextlib.suppress(*SENTENCES, OSError):
        mirror.close()
    faults.dead = True
    named = json.loads(held["journal/MANIFEST"])["segments"].values()  # what no segment names is swept later

    def readable(content: dict[str, bytes]) -> dict[str, bytes]:
        return {
            key: data
            for key, data in content.items()
            if not key.startswith("journal/") or key.split("/")[1] in (*named, "MANIFEST")
        }

    now = readable(history.bucket.content())
    changed = sorted(key for key in {*now, *readable(held)} if now.get(key) != readable(held).get(key))
    assert not changed, f"a writer that was taken for dead changed {changed[:3]}"


# ---------------------------------------------------------------- at rest


def _at_rest(history: History, kind: str, draw: random.Random, root: Path) -> tuple[str, str, str]:
    """(kind of damage, verdict, why)"""
    history.large = 20_000  # what a child copies into its segment stands in the one before, too
    history.checkpoint = dataclasses.replace(history.checkpoint, every=1, keep=draw.randint(2, 3))
    facts, version = draw.randint(0, 25), draw.randint(4, history.config.total_steps - 1)
    older_at = draw.randint(1, version)
    true, older = root / "true", root / "older"

    def since(passed: int) -> bool:
        if history.published == older_at and not older.exists():
            _to_files(history, older)
        return history.published >= version and passed >= facts

    history.since = since
    history.keep_rows()
    _life(history, Faults("", draw))
    history.since = lambda passed: False
    _to_files(history, true)
    assert history.rows is not None
    (root / "truth.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history.rows))
    truth, scratch = Truth(root / "truth.jsonl"), root / "scratch"
    shutil.copytree(history.folder, scratch)
    history.judged = False
    history.rows = None
    _life(history, Faults("", draw), begin_only=True)
    undamaged = history.resumed
    assert undamaged is not None
    verdict, why = judge(truth, undamaged, undamaged, Allowed(truth.newest, all_samples=True))
    assert verdict == EXACT, f"undamaged: {why}"
    work = root / "work"
    shutil.copytree(true, work)
    if kind == "stale":
        damage = damage_kinds.stale(work, older, truth, undamaged, draw)
    elif kind == "manifest":
        damage = _manifest(work, truth, draw)
    else:
        if kind == "metrics" and not (work / "metrics.jsonl").is_file():
            kind = "journal"  # a bucket gets them now and then
        damage = damage_kinds.SUBJECTS[kind][1](work, truth, undamaged, draw)
    if damage.subject == "checkpoint" and (true / "journal" / "000001.log").exists():  # all of it is made again
        damage = dataclasses.replace(damage, allowed=Allowed(truth.newest, all_samples=True))
    shutil.rmtree(history.folder)
    if history.bucket:
        _to_bucket(history, work)
        if draw.random() < 0.5:  # on the same machine
            shutil.copytree(scratch, history.folder)
    else:
        work.rename(history.folder)
    found: Any = None
    label = kind if kind in ("stale", "manifest") else kind_of(damage)
    try:
        for _ in range(2 if draw.random() < 0.3 else 1):  # what the first resume has left is resumed too
            _life(history, Faults("", draw), begin_only=True)
            found = history.resumed
            verdict, why = judge(truth, undamaged, found, damage.allowed)
            if verdict not in (EXACT, OLDER):
                return label, verdict, f"{damage.what}: {why}"
    except Refused as error:
        return label, REFUSED if damage.allowed.refusal else WRONG, f"{damage.what}: refused: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return label, TRACE, f"{damage.what}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    strict = verdict == EXACT and damage.allowed.all_samples
    if not strict:
        history.cut_to(found.version)
        history.made = {version: made for version, made in history.made.items() if version <= found.version}
        history.known = set()
    try:
        halt = _life(history, Faults("", draw))
        history.look_at_the_end(halt, False, found.version)
        if strict:
            history.books()
    except (AssertionError, Refused) as error:
        return label, WRONG, f"{damage.what}: at the end: {error}"
    trained = [group for batch in history.batches.values() for group in batch]
    if len(set(trained)) != len(trained):
        return label, WRONG, f"{damage.what}: a group is trained twice"
    return label, verdict, ""


def _manifest(work: Path, truth: Truth, draw: random.Random) -> Damage:
    """What says which objects count is damaged: the journal's manifest, or the lease."""
    steps = [int(path.parent.name) for path in (work / "checkpoints").glob("*/manifest.json")]
    if draw.random() < 0.3:
        what = damage_kinds.edit(work / "lease", draw)[0]
        return Damage("lease", f"lease: {what}", Allowed(truth.newest, all_samples=True))
    path, roll = work / "journal" / "MANIFEST", draw.random()
    if roll < 0.2:
        path.unlink()
        what = "missing"
    else:
        what = damage_kinds.edit(path, draw)[0]
    allowed = Allowed(max(steps, default=0), all_samples=False, refusal=not steps)
    return Damage("manifest", f"journal/MANIFEST: {what}", allowed)


def _to_files(history: History, folder: Path) -> None:
    """What the run has kept, as a workdir in a folder: a segment is one file."""
    if history.bucket is None:
        shutil.copytree(history.folder, folder)
        return
    for key, data in sorted(history.bucket.content().items()):
        parts = key.split("/")
        segment = parts[0] == "journal" and len(parts) == 3
        path = folder / "journal" / f"{parts[1][:6]}.log" if segment else folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)


def _to_bucket(history: History, folder: Path) -> None:
    """The other way: a segment is one object, where the manifest had it."""
    assert history.bucket is not None
    folders = json.loads(history.bucket.content()["journal/MANIFEST"])["segments"]
    history.bucket = Bucket()
    store = history.bucket.store()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key, number = str(path.relative_to(folder)), path.name.removesuffix(".log")
        if path.parent.name == "journal" and path.suffix == ".log" and number.isascii() and number.isdigit():
            inside = folders.get(str(int(number)))
            key = f"journal/{inside}/000000" if inside and path.name == f"{int(number):06d}.log" else key
        store.write(key, path.read_bytes()).result()


# ---------------------------------------------------------------- planted faults


@contextlib.contextmanager
def _planted(history: History, planted: str) -> Iterator[None]:
    """reader: segments are read without their last frame's last byte. restore: the trainer's state is one bit off."""

    def one_bit_off(trainer: Trainer) -> None:
        if not history.published:
            return
        words = np.array(trainer.opt_state["w"])
        words[-1] ^= np.uint64(1)
        trainer.opt_state = {"w": words}

    with contextlib.ExitStack() as undo:
        if planted == "restore":
            history.planted = one_bit_off
        elif planted:
            for kind in (FileLogStore, ObjectLogStore):
                read = kind.read
                undo.enter_context(
                    mock.patch.object(kind, "read", lambda log, segment, read=read: read(log, segment)[:-1])
                )
        yield


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--planted", default="", choices=("", "reader", "restore"))
    asked = parser.parse_args(argv)
    rows: collections.defaultdict[tuple[str, str, str], collections.Counter[str]]
    rows = collections.defaultdict(collections.Counter)
    bad = 0
    for number in range(asked.first, asked.first + asked.trials):
        each = trial(number, asked.planted)
        counted = collections.Counter({each.verdict: 1, "faults": each.happened, "stopped": each.stopped, "trials": 1})
        for about in ((each.place, each.kind, each.mode), (each.place, each.kind, "all"), ("", "", "all")):
            rows[about] += counted
        bad += each.verdict in (WRONG, TRACE)
        if each.verdict in (WRONG, TRACE) and bad < 40:
            print(f"--first={number} --trials=1 ({each.place}, {each.kind}, {each.mode}): {each.verdict}: {each.why}")
    columns = ("trials", "faults", "stopped", *VERDICTS)
    print(f"{'':26}" + "".join(f"{column:>9}" for column in columns))
    for (place, kind, mode), row in sorted(rows.items(), key=lambda item: (item[0][2] != "all", item[0])):
        print(f"{place:7}{kind:9}{mode:10}" + "".join(f"{row[column]:9}" for column in columns))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
