"""A run with a whole workdir and nothing that compiles: the real journal, recovery, checkpoints, metrics and mirror, over
the engines and the trainer of `journal_world`, in virtual time.

An incarnation is what `runtime/job.py` makes of a workdir; only what computes stands in: weights are a hash of all that
they were trained on, written out as an array, and `Orbax` lays files out as Orbax does. `History` is the outsider: it
keeps what was reported, and reads the bytes of the folder or the bucket itself.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import os
import random
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorboardX  # here, because what an import reads and writes is no storage of a run

from dora_jax import config as sections
from dora_jax.base import metrics
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import run
from dora_jax.runtime.common.seams import TrainerSide
from dora_jax.runtime.common.worker import Finished
from dora_jax.runtime.job import RunStorage
from dora_jax.runtime.journal import event_log, journaled_world, object_storage, resume, workdir_mirror
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.records import Partial
from dora_jax.trainer import checkpoint
from dora_jax.trainer.manifest import TEMPORARY
from tests.fakes import journal_world
from tests.fakes.faulty_storage import Bucket, Disk, Faults
from tests.fakes.journal_world import Body, Killed, learned
from tests.soak.damage_truth import Resumed, batch_of, hashes, sample_of

WORDS = 32  # of an item of a checkpoint
FIRST = 1  # the weights of version 0
PRIZE = "reward/mean"


def item(weights: int, what: str) -> dict[str, np.ndarray]:
    """The array of these weights; its first word says which they are."""
    rest = hashlib.shake_128(f"{what} {weights}".encode()).digest(8 * WORDS - 8)
    return {"w": np.frombuffer(weights.to_bytes(8, "little") + rest, np.uint64)}


def weights_of(tree: Any) -> int:
    """The weights that an array of params is of; where it is of none, another number."""
    words = np.asarray(tree["w"])
    found = int(words[0])
    whole = words.tobytes() == item(found, "params")["w"].tobytes()
    return found if whole else 1 << 40 | zlib.crc32(words.tobytes())


class Inline:
    """Stands for an executor: what it is given is done at once."""

    def __init__(self, *args: Any, **options: Any):
        """Takes what an executor takes."""

    def submit(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        try:
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, call: Callable[..., Any], items: Any) -> Any:
        return map(call, items)

    def shutdown(self, **options: Any) -> None:
        """Nothing is under way."""


class InlineChild:
    """Stands for a forked child."""

    def __init__(self, work: Callable[[], None]):
        try:
            work()
            self._ok = True
        except OSError:
            self._ok = False

    def ended(self) -> bool:
        return self._ok

    def kill(self) -> None:
        """It has ended."""


class Orbax:
    """Stands for the methods of `ocp.CheckpointManager`: the folder of a step gets its name when all its files are
    there, some looks after the save began."""

    def __init__(self, directory: Path, **options: Any):
        self.folder, self.looks = directory, 0
        self.under_way: Any = None
        self.reload()

    def reload(self) -> None:
        self.known = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit() and path.is_dir()]

    def latest_step(self) -> int | None:
        return max(self.known, default=None)

    def save(self, step: int, args: Any) -> bool:
        if step <= max(self.known, default=-1):
            return False
        self.under_way, self.looks = (step, dict(args)), step % 3
        os.mkdir(self.folder / f"{step}{TEMPORARY}-0")
        if not self.looks:
            self.wait_until_finished()
        return True

    def is_saving_in_progress(self) -> bool:
        self.looks -= 1
        return self.under_way is not None and self.looks >= 0

    def wait_until_finished(self) -> None:
        if self.under_way is None:
            return
        (step, items), self.under_way = self.under_way, None
        part = self.folder / f"{step}{TEMPORARY}-0"
        files = {checkpoint.STEP_METADATA: b"{}"}
        for name, given in items.items():
            if name in checkpoint.JSON_FILES:
                files[f"{name}/{checkpoint.JSON_FILES[name]}"] = json.dumps(given.item).encode()
            else:
                files[f"{name}/d"] = np.asarray(given.item["w"]).tobytes()
                files[f"{name}/_METADATA"] = json.dumps({"words": WORDS}).encode()
        for name, data in files.items():
            (part / name).parent.mkdir(exist_ok=True)
            fd = os.open(part / name, os.O_WRONLY | os.O_CREAT)
            try:
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
        os.rename(part, self.folder / str(step))
        self.known.append(step)

    def close(self) -> None:
        self.wait_until_finished()


def read_arrays(directory: Any, step: int, name: str, like: Any = None, cast: bool = False) -> Any:
    """Read as Orbax does: metadata is looked at, payload is believed."""
    folder = Path(directory) / str(step) / name
    if json.loads((folder / "_METADATA").read_bytes()) != {"words": WORDS}:
        raise ValueError(f"{folder}: its metadata is of other arrays")
    data = (folder / "d").read_bytes()
    if len(data) != 8 * WORDS:
        raise ValueError(f"{folder}: Encountered error while reading array index")
    return {"w": np.frombuffer(data, np.uint64)}


@contextlib.contextmanager
def stand_ins(disk: Disk, bucket: Bucket | None, large: int) -> Iterator[None]:
    """Nothing computes, nothing waits, and storage fails as its incarnation says."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, stand_in: Any) -> None:
            undo.enter_context(mock.patch.object(owner, name, stand_in))

        assert tensorboardX and not jax.process_index()
        put(concurrent.futures, "ThreadPoolExecutor", Inline)
        put(jax, "jit", lambda call: lambda tree: True)
        for name in ("__init__", *(name for name in vars(Orbax) if not name.startswith("_"))):
            put(ocp.CheckpointManager, name, vars(Orbax)[name])
        for name in ("StandardCheckpointHandler", "JsonCheckpointHandler"):
            put(ocp, name, lambda: None)
        put(checkpoint, "read_arrays", read_arrays)
        put(checkpoint, "digest", weights_of)
        put(event_log, "fork", InlineChild)
        put(journaled_world, "LARGE_SAMPLES", large)
        put(object_storage, "opened", bucket.opened if bucket else object_storage.opened)
        undo.enter_context(disk.mounted())
        yield


class Quiet:
    """A console or a scorer that does nothing, and keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **named: ()


class Trainer:
    """Its params and its optimizer's state are arrays of its weights."""

    def __init__(self) -> None:
        self.set(FIRST, 0)

    def set(self, weights: int, version: int) -> None:
        self.params, self.opt_state, self.version = item(weights, "params"), item(weights, "opt_state"), version

    def load(self, params: Any, opt_state: Any, version: int) -> None:
        self.params, self.opt_state, self.version = params, opt_state, version

    def step(self, groups: Any) -> dict[str, float]:
        self.set(learned(weights_of(self.params), groups), self.version + 1)
        return {}

    @property
    def state(self) -> Any:
        return types.SimpleNamespace(step=self.version, params=self.params, opt_state=self.opt_state)

    def abstract_state(self) -> Any:
        return types.SimpleNamespace(params=None, opt_state=None)


class Store:
    """The versions that instances can load."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}

    def put(self, version: int, params: Any, digest: int = 0, copy: int = 0) -> int:
        self.held[version] = params
        return weights_of(params) ^ 1


class Stages(Body):
    """The fake stages behind the seam of `runtime.job`."""

    def recall(self, payloads: Any) -> None:
        """Prompts are hashes: there is nothing to recall."""

    def adopt(self, outstanding: Any, payloads: Any, now_s: float) -> None:
        self.now_s = now_s
        late: Any = [(now_s + t, n, what) for t, n, what in self.heap]  # type: ignore[has-type]
        self.heap = late
        super().adopt(
            types.SimpleNamespace(
                orchestrator=self.brain, payloads=payloads, outstanding=outstanding, base=self.brain.state.ledger.base
            )
        )

    def follow(self, version: int, redo: Any) -> None:
        """It goes on after a checkpoint alone."""
        self.first_version = self.published = version
        self.retired, self.begun_with = set(range(version)), tuple(redo)


class History(journal_world.History):
    """The outsider of one workdir: a folder, or a bucket with its scratch folder. AssertionError: what it sees is not
    what was reported."""

    def __init__(self, config: Any, shape: Any, root: Path, bucket: Bucket | None, draw: random.Random):
        super().__init__(config, shape)
        self.folder, self.bucket, self.disk = root / "run", bucket, Disk(root / "run")
        self.checkpoint = sections.CheckpointSection(every=draw.randint(1, 2), keep=draw.randint(1, 3))
        self.sync_s = 0.0 if bucket else draw.choice((0.0, 0.0, 0.2))  # stages do not bear commands that come late
        self.large = draw.choice((0, 20_000, 20_000))  # samples from which on a child begins a segment
        self.quiet = Quiet()
        self.journal: Any = None
        self.mirror: Any = None
        self.brain: Any = None
        self.made: dict[int, int] = {0: FIRST}  # version -> weights
        self.published = 0  # the newest version that was published
        self.filtered: set[int] = (
            set()
        )  # in the world; a kill right behind the write may have kept it from the outsider
        self.rows: list[dict[str, Any]] | None = None  # what damage_truth.Truth reads, where it is wanted
        self.since: Callable[[int], bool] = lambda facts: (
            False
        )  # whether the process dies, so many facts behind `published`
        self.resumed: Resumed | None = None
        self.judged = True  # by what was reported; else by damage_truth
        self.planted: Callable[[Trainer], None] = lambda trainer: None
        self._proved: tuple[Any, ...] = set(), {}, 0
        self.lines_lost = self.afresh = False
        self._exposed = False  # what the journal could not write was reported, with an alarm

    def life(self, faults: Faults, begin_only: bool = False) -> Any:
        """One process; Halt, or None where it was killed. Raises what it ends of."""
        self.incarnations += 1
        self.disk.faults, self.journal, self.mirror = faults, None, None
        if self.bucket:
            self.bucket.faults = faults
        with stand_ins(self.disk, self.bucket, self.large):
            try:
                return self._process(begin_only)
            except Killed:
                return None
            finally:
                with contextlib.suppress(Killed, OSError, JournalError):
                    if self.journal is not None:
                        self.journal.close()  # where it is dead, the lock is what it lets go of
                faults.dead = True

    def _process(self, begin_only: bool) -> Any:
        self.quiet = Quiet()
        self.folder.mkdir(parents=True, exist_ok=True)
        writer, notify = metrics.Writer(self.folder, self.quiet), self.quiet.note  # type: ignore[arg-type]
        if self.bucket:
            (self.folder / workdir_mirror.MARK).write_text(self.bucket.URL)
            self.mirror = workdir_mirror.Mirror(self.bucket.URL, self.folder, notify)
        self.journal = resume.open_journal(self.folder, sections.JournalSection(sync_s=self.sync_s), writer)
        trainer, store, remade = Trainer(), Store(), dict[int, Any]()

        def pack(groups: Any, base: int) -> Any:
            remade[base] = batch_of(groups)
            return groups

        checkpoints = checkpoint.Checkpoints(self.folder / "checkpoints", self.checkpoint, notify, adopts=True)
        side: Any = TrainerSide(trainer=trainer, checkpoints=checkpoints, pack=pack, digest=weights_of)  # type: ignore[arg-type]
        begun = resume.begin(self.journal, checkpoints, trainer, store, pack, weights_of, self.config, writer)  # type: ignore[arg-type]
        if self.mirror:
            self.mirror.settle()
        self.planted(trainer)
        stored = {version: hashes(tree) for version, tree in store.held.items()}
        self.resumed = Resumed.of(trainer, begun, stored, remade, self.quiet.notes)
        self.lines_lost |= any("has no record of step" in note for note in self.quiet.notes)
        if self.judged:
            self._look(self.resumed, begun.epoch, begun.outstanding is None and trainer.version > 0)
        if begin_only:
            return None
        weights = {version: weights_of(tree) for version, tree in store.held.items()}
        body = Stages(self.config, self.shape, begun.orchestrator, weights, self.batches)
        self.brain = begun.orchestrator
        if begun.outstanding is None:
            body.follow(trainer.version, begun.orchestrator.state.redo)
        last = self.config.total_steps
        backing = RunStorage(side, self.journal, begun, self.checkpoint.every, last, False, self.mirror)
        facts = 0
        do_train, payload_of, execute = body.do_train, body.payload_of, body.execute

        def trained(command: Any) -> None:
            batch = [body.payload[group_id] for group_id in command.group_ids]
            do_train(command)
            self.made[command.base_version + 1] = body.weights[command.base_version + 1]
            self._row_of(command.base_version + 1, batch)

        def noted(event: Any) -> None:
            if isinstance(event, ev.GroupScored) and not event.trainable:
                self.filtered.add(event.group_id)
            payload_of(event)

        def watched(command: Any) -> None:
            handed = len(body.handed)
            execute(command)
            for id, _ in body.handed[handed:]:
                assert id not in self.known, f"{id} had finished and is generated again"

        def observed(events: Any, commands: Any) -> None:
            nonlocal facts
            for event in events:
                if isinstance(event, ev.StepPublished):
                    trainer.set(body.weights[event.version], event.version)
                    writer.write(event.version, {PRIZE: 0.5, "weights": float(body.weights[event.version])})
            backing.observe(events, commands)
            for event in events:
                facts = 0 if isinstance(event, ev.StepPublished) else facts + 1
                self._tell(event)
            if self.since(facts):
                self.disk.faults.dead = True
                raise Killed

        body.do_train, body.payload_of, body.execute = trained, noted, watched
        log: Any = types.SimpleNamespace(metrics={PRIZE: 0.5})
        body.listen(self._hear)
        world = backing.behind(body, log)
        halt = run(begun.orchestrator, world, [observed])  # type: ignore[arg-type]
        backing.journal_saves(wait=True)
        self.journal.close()
        self.journal = None
        backing.save_last()
        checkpoints.close()
        if self.mirror:
            self.mirror.close()
        writer.__exit__()
        return halt

    def cut_to(self, version: int) -> None:
        """What was trained from this version on may be trained otherwise."""
        kept: Any = {base: batch for base, batch in self.batches.items() if base < version}  # type: ignore[has-type]
        self.batches = kept

    # ------------------------------------------------------------ what is reported

    def _tell(self, event: Any) -> None:
        match event:
            case ev.SampleDone(id=id):
                self.known.add(id)
                self._fact("done", [id.group_id, id.index])
            case ev.GroupFailed(group_id=group_id):
                self.ends[group_id] = "failed"
            case ev.GroupScored(group_id=group_id, trainable=False):
                self.ends[group_id] = "filtered"
            case ev.StepPublished(version=version):
                self.published = version
                self._fact("published", version)
        if self.journal.durable:
            self._exposed = False
        elif isinstance(event, journaled_world.HARD) and not self._exposed:
            self._exposed = True
        if not self._exposed and isinstance(event, journaled_world.HARD):
            self._proved = set(self.known), dict(self.ends), self.published

    def _hear(self, record: Any) -> None:
        if self.rows is None:
            return
        match record:
            case Finished(sample=sample):
                self.rows.append({"kind": "finished", "id": list(sample.id), "sample": sample_of(sample)})
            case Partial(id=id, start=start, out_ids=out):
                self.rows.append({"kind": "partial", "id": list(id), "start": start, "tokens": out.tolist()})

    def keep_rows(self) -> None:
        """From here on it writes down what damage_truth.Truth reads."""
        self.rows = []
        self._row_of(0, ())
        self._fact("published", 0)

    def _row_of(self, version: int, batch: Any) -> None:
        """A version that was made."""
        if self.rows is None:
            return
        weights = self.made[version]
        both = {what: hashes(item(weights, what)) for what in ("params", "opt_state")}
        if version:
            self.rows.append({"kind": "trained", "base": version - 1, "groups": batch_of(batch)})
        self.rows.append({"kind": "version", "version": version, **both})

    def _fact(self, what: str, about: Any) -> None:
        if self.rows is None:
            return
        sizes = collections.Counter[str]()
        if self.bucket:
            for key, size in self.bucket.sizes.items():
                place, _, rest = key.partition("/")
                if place == "journal" and "/" in rest:
                    sizes[f"{rest[:6]}.log"] += size
        else:
            sizes.update({path.name: path.stat().st_size for path in (self.folder / "journal").glob("*.log")})
        self.rows.append({"kind": "fact", "what": what, "about": about, "sizes": dict(sizes)})

    # ------------------------------------------------------------ what it sees

    def _look(self, found: Resumed, epoch: int, afresh: bool) -> None:
        """The trainer holds what was published last, and everything that lives is what was published."""
        assert not afresh or self._exposed, "it goes on from a checkpoint alone"
        self.afresh |= afresh
        if self._exposed:  # an alarm announced that the last of it may be made anew
            known, ends, self.published = self._proved
            self.known, self.ends = set(known), dict(ends)
            self.cut_to(found.version)
            self._exposed = False
        assert found.version >= self.published, (
            f"it goes on from version {found.version}, and {self.published} was published"
        )
        assert not epoch, "the replay gives other weights"
        for what, held in (("params", found.params), ("opt_state", found.opt_state)):
            true = hashes(item(self.made.get(found.version, 0), what))
            assert held == true, f"{what} of version {found.version} differ"
        for version, held in found.stored.items():
            assert held == hashes(item(self.made[version], "params")), f"stored weights of version {version} differ"

    def look_at_the_end(self, halt: Any, whole: bool, since: int = 0) -> None:
        """The bytes of the last checkpoint, and of the metrics behind the version `since`; whole: no line of them may
        be lost."""
        assert halt is not None and halt.ok, halt
        last = self.config.total_steps
        content = self.bucket.content() if self.bucket else {}
        for what in ("params", "opt_state"):
            name = f"checkpoints/{last}/{what}/d"
            data = content[name] if self.bucket else (self.folder / name).read_bytes()
            assert data == item(self.made[last], what)["w"].tobytes(), f"{name} holds other bytes than were made"
        metrics_file = self.folder / "metrics.jsonl"
        assert metrics_file.is_file() or not whole
        data = metrics_file.read_bytes() if metrics_file.is_file() else b""
        lines = [json.loads(line) for line in data.splitlines()]
        steps = [line["step"] for line in lines]
        twice = [step for step in steps if step > since and steps.count(step) > 1]
        assert not twice, f"metrics.jsonl has steps {steps}"
        lost = set(range(1, last + 1)) - set(steps)  # killed between fact and line, which a sentence tells
        assert not whole or not lost or self.lines_lost, f"metrics.jsonl has steps {steps}, and no sentence says so"
        for line in [line for line in lines if line["step"] > since]:
            assert line["weights"] == self.made[line["step"]], f"metrics.jsonl has another step {line['step']}"

    def books(self) -> None:
        """Nothing is lost, nothing is trained twice, and the ledger has counted what the outsider has."""
        trained = {group for groups in self.batches.values() for group in groups}
        live = {*self.brain.state.ledger.live, *self.brain.state.redo}
        for group in self.filtered - trained - live - set(self.ends):
            self.ends[group] = "filtered"
        if not self.afresh:  # where it is, the ledger has begun anew
            self.audit(self.brain)
