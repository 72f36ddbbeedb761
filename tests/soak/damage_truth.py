"""The true history of a run, and the judge of what a resume makes of a damaged workdir.

    python -m tests.soak.damage_truth TRUTH --config=... --workdir=...    dora_jax.train, observed into the file TRUTH

The observer stands around the run's own seams: it writes what the trainer holds after each step, which groups went into
it, every sample as its instance reported it, and how long the journal's files were when a fact had been taken in. The
judge compares with that, byte by byte. Law: neither uses recovery, digests, manifests, or readers of the run's files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from dora_jax.orchestrate import lending
from tests.fakes import faults

Hashes = dict[str, str]  # leaf -> sha256
OLDER_COPY, OLDER_AT = "older", 6  # the folder beside a workdir that it is copied to when this version is published
Key = tuple[int, int]  # group, index of a sample


def lends_always(*expected: float) -> bool:
    """In the place of `worth_lending`, so that a short run lends; also where its journal is followed."""
    return True


def sha(array: Any) -> str:
    array = np.ascontiguousarray(array)
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()


def hashes(tree: Any) -> Hashes:
    return {jax.tree_util.keystr(path): sha(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def one_bit_off(tree: Any) -> Any:
    """The last bit of one number of the largest array is another."""
    leaves, shape = jax.tree.flatten(tree)
    i = max(range(len(leaves)), key=lambda i: leaves[i].size)
    array = np.array(leaves[i])
    array.reshape(-1).view(np.uint8)[0] ^= 1
    leaves[i] = jax.device_put(array, leaves[i].sharding)
    return jax.tree.unflatten(shape, leaves)


def sample_of(sample: Any) -> list[str]:
    """Hashes of a finished sample's tokens and log-probs."""
    return [sha(np.asarray(sample.out_ids, np.int32)), sha(np.asarray(sample.logprobs, np.float32))]


def batch_of(groups: Iterable[Any]) -> list[list[Any]]:
    """The groups of a step, in order: [group, rewards, samples]."""
    return [
        [group.group_id, sha(np.asarray(group.rewards, np.float32)), [sample_of(sample) for sample in group.samples]]
        for group in groups
    ]


# ---------------------------------------------------------------- the observer


class Observer:
    """Writes the history of the run in this process, a line a fact."""

    def __init__(self, file: TextIO, planted: str = ""):
        """planted: the version whose weights get one bit wrong before the next step is made of them."""
        self._file, self._planted = file, planted
        self._journal = Path()

    def install(self) -> None:
        """Stands around trainer, checkpoints and log of the run that begins in this process."""
        from dora_jax.runtime import job
        from dora_jax.runtime.local_backend import LocalBackend
        from dora_jax.runtime.observe.metrics_log import RunLog

        trainer_side, log_record, log_event, run_stages = (
            LocalBackend.trainer_side,
            RunLog.record,
            RunLog.event,
            job.run_stages,
        )

        def observed_side(backend: LocalBackend) -> Any:
            return self._around(trainer_side(backend))

        def observed_record(log: RunLog, record: Any) -> None:
            self._record(record)
            log_record(log, record)

        def observed_event(log: RunLog, event: Any, commands: Any) -> None:
            self._event(event)
            log_event(log, event, commands)

        def observed_stages(parts: Any, *args: Any, **named: Any) -> Any:
            self._journal = parts.workdir / "journal"
            return run_stages(parts, *args, **named)

        patched: list[tuple[Any, str, Any]] = [
            (LocalBackend, "trainer_side", observed_side),
            (RunLog, "record", observed_record),
            (RunLog, "event", observed_event),
            (job, "run_stages", observed_stages),
            (lending, "worth_lending", lends_always),
        ]
        for owner, name, observed in patched:
            setattr(owner, name, observed)

    def _around(self, side: Any) -> Any:
        trainer, step, save, pack = side.trainer, side.trainer.step, side.checkpoints.save, side.pack

        def observed_step(*args: Any, **named: Any) -> Any:
            if str(int(trainer.state.step)) == self._planted:
                trainer.state = trainer.state._replace(params=one_bit_off(trainer.state.params))
            metrics = step(*args, **named)
            self._version(trainer)
            return metrics

        def observed_pack(groups: Any, base: int) -> Any:
            self._write("trained", base=base, groups=batch_of(groups))
            return pack(groups, base)

        def observed_save(version: int, params: Any, opt_state: Any, rl_state: Any, metrics: Any) -> Any:
            self._write("saved", version=version, rl_state=json.loads(json.dumps(rl_state)))
            return save(version, params, opt_state, rl_state, metrics)

        trainer.step, side.checkpoints.save = observed_step, observed_save
        self._version(trainer)
        return dataclasses.replace(side, pack=observed_pack)

    def _version(self, trainer: Any) -> None:
        state = trainer.state
        self._write("version", version=int(state.step), params=hashes(state.params), opt_state=hashes(state.opt_state))

    def _record(self, record: Any) -> None:
        match type(record).__name__:
            case "Finished":
                self._write("finished", id=list(record.sample.id), sample=sample_of(record.sample))
            case "Partial":
                self._write(
                    "partial", id=list(record.id), start=record.start, tokens=np.asarray(record.out_ids).tolist()
                )

    def _event(self, event: Any) -> None:
        """A fact that the orchestrator has stepped is in the journal."""
        match type(event).__name__:
            case "StepPublished":
                self._fact("published", event.version)
                if event.version == OLDER_AT:
                    workdir = self._journal.parent
                    with contextlib.suppress(OSError):  # what the run deletes meanwhile
                        shutil.copytree(workdir, workdir.with_name(OLDER_COPY))
            case "SampleDone":
                self._fact("done", list(event.id))
            case "GroupFailed":
                self._fact("failed", event.group_id)

    def _fact(self, what: str, about: Any) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(self._journal.glob("*.log"))}
        self._write("fact", what=what, about=about, sizes=sizes)

    def _write(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._file.flush()


# ---------------------------------------------------------------- the history


@dataclasses.dataclass(frozen=True)
class Fact:
    what: str  # published, done, failed
    about: Any
    sizes: Mapping[str, int]  # bytes of the journal's files when the fact was in one of them

    def behind(self, segment: str, offset: int) -> bool:
        """Whether the fact lies in that segment, from that byte on, at least in part."""
        return segment == max(self.sizes, default="") and self.sizes[segment] > offset


class Truth:
    """What the observer wrote."""

    def __init__(self, path: Path):
        self.params: dict[int, Hashes] = {}
        self.opt_state: dict[int, Hashes] = {}
        self.trained: dict[int, list[Any]] = {}  # base -> groups
        self.saved: dict[int, Any] = {}  # version -> rl_state
        self.finished: dict[Key, list[list[str]]] = {}  # every time that a sample has ended
        self.tokens: dict[Key, list[list[int]]] = {}  # every way in which a running sample has grown
        self.facts: list[Fact] = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            getattr(self, f"_{row.pop('kind')}")(**row)
        self.newest = max(fact.about for fact in self.facts if fact.what == "published")

    def _version(self, version: int, params: Hashes, opt_state: Hashes) -> None:
        self.params[version], self.opt_state[version] = params, opt_state

    def _trained(self, base: int, groups: list[Any]) -> None:
        self.trained.setdefault(base, []).extend(groups)  # a step may come in parts

    def _saved(self, version: int, rl_state: Any) -> None:
        self.saved[version] = rl_state

    def _finished(self, id: list[int], sample: list[str]) -> None:
        self.finished.setdefault((id[0], id[1]), []).append(sample)

    def _partial(self, id: list[int], start: int, tokens: list[int]) -> None:
        ways = self.tokens.setdefault((id[0], id[1]), [[]])
        if len(ways[-1]) >= start:
            ways.append(ways[-1][:start] + tokens)

    def _fact(self, what: str, about: Any, sizes: dict[str, int]) -> None:
        self.facts.append(Fact(what, about, sizes))

    def published_behind(self, segment: str, offset: int) -> list[int]:
        return [fact.about for fact in self.facts if fact.what == "published" and fact.behind(segment, offset)]


# ---------------------------------------------------------------- the judge


@dataclasses.dataclass
class Resumed:
    """What a resume has ended in, as plain data."""

    version: int
    params: Hashes
    opt_state: Hashes
    remade: dict[int, list[Any]]  # base -> groups, of the steps that were made again
    samples: dict[Key, list[str]]  # finished, not yet trained
    tokens: dict[Key, list[int]]  # of running samples
    stored: dict[int, Hashes]  # versions that instances can load
    notes: list[str]

    @classmethod
    def of(
        cls, trainer: Any, begun: Any, stored: dict[int, Hashes], remade: dict[int, Any], notes: list[str]
    ) -> Resumed:
        payloads = begun.payloads
        samples = {
            (s.id.group_id, s.id.index): sample_of(s)
            for group in (
                *(done.values() for done in payloads.samples.values()),
                *(group.samples for group in payloads.scored.values()),
            )
            for s in group
        }
        tokens = {(id.group_id, id.index): np.asarray(payloads.tokens(id)[0]).tolist() for id in payloads.partial}
        return cls(
            version=int(trainer.state.step),
            params=hashes(trainer.state.params),
            opt_state=hashes(trainer.state.opt_state),
            remade=remade,
            samples=samples,
            tokens=tokens,
            stored=stored,
            notes=notes,
        )


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The least that a resume of a damaged workdir must reach."""

    version: int  # it goes on from this one or a later one
    all_samples: bool  # and with everything that was unfinished
    samples: frozenset[Key] = frozenset()  # or at least with these, where it goes on from the newest version
    refusal: bool = False  # nothing good is there: a sentence is right
    silent: bool = False  # what is left is a whole prefix of the history: nothing shows that there was more


EXACT, OLDER, REFUSED, WRONG, TRACE = "exact", "older", "refused", "wrong", "trace"
VERDICTS = (EXACT, OLDER, REFUSED, WRONG, TRACE)


def judge(truth: Truth, undamaged: Resumed, found: Resumed, allowed: Allowed) -> tuple[str, str]:
    """(verdict, why)."""
    # A step that was under way may be made of other groups where the journal has lost which they were.
    settled = {base: groups for base, groups in found.remade.items() if base < truth.newest or allowed.all_samples}
    if faults := list(_differences(truth, dataclasses.replace(found, remade=settled))):
        return WRONG, "; ".join(faults[:3])
    if found.version < allowed.version:
        return WRONG, f"goes on from version {found.version}, though {allowed.version} could be had"
    if found.version == truth.newest and allowed.all_samples:
        lost = set(undamaged.samples) - set(found.samples)
        shorter = [key for key, tokens in undamaged.tokens.items() if found.tokens.get(key) != tokens]
        if lost or shorter:
            return WRONG, f"finished samples {sorted(lost)[:3]} or tokens of {shorter[:3]} are lost without need"
        if set(found.samples) != set(undamaged.samples):
            return WRONG, "it holds finished samples that the undamaged workdir does not hold"
        return EXACT, ""
    if found.version == truth.newest and (gone := allowed.samples - set(found.samples)):
        return WRONG, f"finished samples {sorted(gone)[:3]} were recorded before the damage, and are lost"
    if found.version == truth.newest and found.samples == undamaged.samples and found.tokens == undamaged.tokens:
        return EXACT, ""
    notes = [note for note in found.notes if not note.startswith("resuming") and note not in undamaged.notes]
    if not notes and not allowed.silent:
        return WRONG, f"goes on from version {found.version} with less than was there, and no sentence says so"
    return OLDER, f"version {found.version}"


def _differences(truth: Truth, found: Resumed) -> Iterable[str]:
    """Sentences on whatever is not of the true history."""
    version = found.version
    if version not in truth.params:
        yield f"version {version} never was"
        return
    for what, true, held in (
        ("params", truth.params[version], found.params),
        ("opt_state", truth.opt_state[version], found.opt_state),
        *(("stored weights", truth.params[v], held) for v, held in found.stored.items() if v in truth.params),
    ):
        if wrong := [name for name in sorted(set(true) | set(held)) if true.get(name) != held.get(name)]:
            yield f"{what} of version {version} differ in {len(wrong)} arrays, as {wrong[0]}"
    for base, groups in found.remade.items():
        if truth.trained.get(base) != groups:
            yield f"the step after version {base} was made again of other groups"
    for key, sample in found.samples.items():
        if sample not in truth.finished.get(key, []):
            yield f"finished sample {key} has other tokens or log-probs"
    for key, tokens in found.tokens.items():
        if not any(way[: len(tokens)] == tokens for way in truth.tokens.get(key, [[]])):
            yield f"running sample {key} has other tokens"


def other_versions(truth: Truth, again: Truth) -> str:
    """A sentence on the versions that two runs have both made, where they differ, or the second lacks the last one."""
    made = again.params.keys() & truth.params.keys()
    other = [v for v in made if (truth.params[v], truth.opt_state[v]) != (again.params[v], again.opt_state[v])]
    if other:
        return f"versions {sorted(other)} have other weights or optimizer states than those of an undisturbed run"
    return "" if max(truth.params) in made else f"version {max(truth.params)} was not made"


def main() -> None:
    """Runs dora_jax.train, observed."""
    truth, sys.argv = sys.argv[1], ["dora_jax.train", *sys.argv[2:]]
    from dora_jax import train
    from dora_jax.cli import flags

    faults.arm(os.environ.get("DORA_FAULT", ""))
    with open(truth, "a") as file:
        Observer(file, os.environ.get("DAMAGE_PLANTED", "")).install()
        flags.run(train.main)


if __name__ == "__main__":
    main()
