"""The start of a run: new, after a checkpoint, or exactly where a killed run was.

Consumes the workdir's journal and checkpoints; produces the orchestrator, its payloads, the trainer's state, and the
weights of every live version in the store. Laws: the run starts from the newest checkpoint that restores to what was
saved, by the digests in the journal, and says which it steps over and why; where the journal has lost segments and ends
before it, from that checkpoint alone; a run that has a past and nothing to go on
from is refused, and nothing of it is renamed; a step is made again from the journal's groups and must give the digest
that was published; where it does not (another machine, another compiler), a new epoch begins, a note says so, and
running samples start over at their version, so that no trajectory holds tokens of two weights; a version that is
published again with equal weights has the copy that it had, or the run does not begin; what has changed in the
configuration is reported and written to changes.jsonl; steps are made again under today's configuration, and where that
leaves no use for what is in flight, the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dora_jax.base.metrics import Writer
from dora_jax.config import ConfigError, JournalSection, RunError, changes, workdirs
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.snapshot import Outstanding
from dora_jax.runtime.common.seams import CheckpointStore, Digest, Pack, PolicyTrainer, PublishedWeights, Tree
from dora_jax.runtime.journal import workdir_mirror
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import JournalError, log_at
from dora_jax.runtime.journal.object_storage import JOURNAL, StoreError
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import Published, Saved
from dora_jax.runtime.journal.recovery import NO_SETTINGS, Recovered, recover
from dora_jax.trainer.checkpoint import UNPROVED, Digests, Restored, UnusableCheckpoint
from dora_jax.types import Version

CHANGES = "changes.jsonl"
INITIAL = 0  # this version needs no checkpoint: it is model.path
NAMED = 3  # unusable checkpoints that a refusal names


@dataclasses.dataclass
class Begun:
    orchestrator: Orchestrator
    payloads: PayloadState
    epoch: int = 0
    outstanding: Outstanding | None = None  # of a killed process
    segments: dict[int, Version] = dataclasses.field(default_factory=dict)


def open_journal(workdir: Path, section: JournalSection, writer: Writer) -> EventLog | None:
    """The event log of a workdir; None: `section.on` is False. Then an earlier journal is moved aside, because it would
    not know what this run does. ConfigError: the journal cannot be opened."""
    url, folder = workdir_mirror.url_of(workdir), workdir / JOURNAL
    if not section.on:
        if url:
            raise ConfigError("journal.on: a run in a bucket is what its journal says: leave it on")
        if folder.exists():
            folder.rename(workdir / f"{JOURNAL}.{time.time():.0f}.ended")
        return None
    try:
        store = log_at(f"{url}/{JOURNAL}" if url else folder)
    except (JournalError, StoreError) as error:
        raise ConfigError(f"workdir: {error}") from error
    if store.repaired:
        writer.note(store.repaired)
    return EventLog(store, writer.note, section.sync_s)


def begin(
    journal: EventLog | None,
    checkpoints: CheckpointStore,
    trainer: PolicyTrainer,
    weights: PublishedWeights,
    pack: Pack,
    digest: Digest,
    config: OrchestratorConfig,
    writer: Writer,
    settings: changes.Settings = NO_SETTINGS,
) -> Begun:
    """Where the run begins. On return the trainer holds the newest version, and the weight store every live one.
    settings: of the configuration as asked (config/changes.py). ConfigError: the run has a past, and nothing that it
    could go on from."""
    starts = _Starts(checkpoints, trainer, writer)
    past: Recovered | None = None
    fault = ""
    if journal is not None:
        versions = [INITIAL, *checkpoints.steps()]
        try:
            past = recover(journal, config, versions, starts.usable, writer.note, starts.adopt, settings)
        except JournalError as error:
            fault = str(error)
    later = past is not None and not past.afresh and max(checkpoints.steps(), default=INITIAL) > past.base
    if past is not None and journal is not None and later and journal.segments()[-1] > max(past.segments):
        newest = starts.newest()
        if newest is not None and newest > past.base:  # what is between them was in segments that are lost
            fault = f"the journal ends at version {past.base}, before checkpoint {newest}"
            past = None
        else:
            starts.usable(past.start)
    if past is not None and past.changed:
        _tell(past, writer)
    if past is not None and not past.afresh:
        past.payloads.settings = settings
        return make_again(past, starts, weights, pack, digest)
    if past is None and starts.newest() is None:
        starts.refuse_lost(journal, fault)
    elif fault:
        writer.note(f"{fault}; the run goes on from its newest checkpoint, and what was in flight is generated again")
    # starts after the checkpoint that was read last. Every group that was issued and has not ended is issued again
    rl_state = starts.load()
    if starts.step != INITIAL or past is not None:
        checkpoints.undo_after(starts.step)
        writer.resume(starts.step)
        writer.note(f"resuming from step {starts.step}")
    version, made, payloads = int(trainer.state.step), digest(trainer.params), PayloadState()
    payloads.settings = settings
    epoch, segments = 0, dict[int, Version]()
    if past is not None:
        _refuse_another_model(past, made)
        past.payloads.forget_saved(INITIAL, version)
        payloads.saved, epoch, segments = past.payloads.saved, past.epoch + 1, dict(past.segments)
    payloads.digests[version] = _publish(version, trainer.params, made, None, weights, epoch)
    return Begun(Orchestrator(config, **rl_state), payloads, epoch, segments=segments)


# ---------------------------------------------------------------- private


@dataclasses.dataclass
class _Starts:
    """The checkpoints that a run may start from. Each is read when it is asked for, and what proves good is kept for
    the trainer; those that do not are moved aside once the run has another start."""

    checkpoints: CheckpointStore
    trainer: PolicyTrainer
    writer: Writer
    faults: dict[Version, str] = dataclasses.field(default_factory=dict)  # checkpoint -> why it cannot be used
    step: Version = INITIAL  # read last
    restored: Restored | None = None
    digests: dict[Version, Digests] = dataclasses.field(default_factory=dict)  # what the journal holds of checkpoints

    def adopt(self, saved: Mapping[Version, Saved]) -> list[Version]:
        """Takes what the journal holds of checkpoints; the unsealed ones that restore to it are sealed, and
        returned."""
        self.digests = {v: Digests(each.params, each.opt_state, each.rl_state) for v, each in saved.items()}
        adopted = []
        for step in self.checkpoints.unsealed():
            digests, like = self.digests.get(step), self.trainer.abstract_state()
            if digests is None or not all(digests):
                continue
            try:
                self.checkpoints.adopt(step, like.params, like.opt_state, digests)
            except UnusableCheckpoint as error:
                self._step_over(step, f"it has no manifest, and {error}")
                continue
            self.writer.note(f"checkpoint {step} had no manifest; it restores to what was saved, and is used")
            adopted.append(step)
        return adopted

    def usable(self, step: Version) -> bool:
        self.step, self.restored = step, None
        if step == INITIAL:
            return True
        if step in self.faults:
            return False
        like = self.trainer.abstract_state()
        try:
            self.restored = self.checkpoints.restore(step, like.params, like.opt_state, self.digests.get(step))
        except UnusableCheckpoint as error:
            self._step_over(step, str(error))
            return False
        return True

    def newest(self) -> Version | None:
        """The newest checkpoint that is usable, whatever the journal holds; None: there is none."""
        for step in reversed(self.checkpoints.steps()):
            if self.usable(step):
                return step
        self.step = INITIAL
        return None

    def load(self) -> dict[str, Any]:
        """Loads what proved good last into the trainer. Returns its rl_state; that of the initial weights is empty."""
        restored, self.restored = self.restored, None
        if restored is not None:
            self.trainer.load(restored.params, restored.opt_state, self.step)
        for step in self.checkpoints.steps():
            if step in self.faults:
                self.checkpoints.set_aside(step, "broken")
        for step in self.checkpoints.unsealed():
            if step not in self.faults:
                self.writer.note(
                    f"checkpoint {step} has no manifest, and no journal says what was saved: it is moved aside"
                )
            self.checkpoints.set_aside(step, UNPROVED)
        return restored.rl_state if restored is not None else {}

    def _step_over(self, step: Version, fault: str) -> None:
        self.faults[step] = fault
        self.writer.note(f"checkpoint {step} cannot be trusted and is stepped over: {fault}")

    def refuse_lost(self, journal: EventLog | None, fault: str) -> None:
        """ConfigError: the run is not new, so that beginning at version 0 would give up what it did."""
        metrics = self.writer.file
        lost = [f"checkpoint {step}: {why}" for step, why in sorted(self.faults.items(), reverse=True)[:NAMED]]
        lost += [
            f"checkpoint {step} has no manifest, and no journal says what was saved"
            for step in self.checkpoints.unsealed()
            if step not in self.faults
        ]
        lost += [f"checkpoints/{name} was moved aside" for name in self.checkpoints.aside()]
        if journal is not None and journal.segments():
            lost.append(fault or "its journal cannot be read")
        reached = INITIAL  # the last step in this file, as far as it can be read
        for line in metrics.read_bytes().splitlines() if metrics.is_file() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                step = json.loads(line)["step"]
                reached = max(reached, step) if type(step) is int else reached
        if reached:
            lost.append(f"{metrics.name} reaches step {reached}")
        if not lost:
            return
        workdir = metrics.parent
        url, name = workdir_mirror.url_of(workdir), workdirs.free_history(workdir)
        anew = f"begin at version 0 with --begin_anew={name}, which moves them there"
        raise ConfigError(
            f"workdir: {url or workdir} holds a run that has nothing left to go on from ({'; '.join(lost)}): restore "
            f"its files, or {'choose another --workdir' if url else anew}"
        )


def make_again(found: Recovered, starts: _Starts, weights: PublishedWeights, pack: Pack, digest: Digest) -> Begun:
    """Makes the steps since the checkpoint again, from the groups of the journal."""
    starts.load()
    checkpoints, trainer, writer = starts.checkpoints, starts.trainer, starts.writer
    made = digest(trainer.params)
    _refuse_another_model(found, made)
    checkpoints.undo_after(found.base)
    found.payloads.forget_saved(INITIAL, found.base)
    writer.resume(found.base)
    live, epoch = found.outstanding.versions, found.epoch
    if found.start in live:
        published = found.payloads.digests.get(found.start)
        again = _publish(found.start, trainer.params, made, published, weights, epoch)
        found.payloads.digests[found.start] = published or again
    for step in found.steps:
        version = step.base + 1
        writer.phase("trainer", f"making step {version} again")
        trainer.step(pack(step.groups, step.base))
        made = digest(trainer.params)
        if made != step.published.digest and epoch == found.epoch:
            epoch += 1
            found.payloads.partial.clear()
            checkpoints.undo_after(found.start)
            found.payloads.forget_saved(INITIAL, found.start)
            writer.note(
                f"version {version} came out with other weights ({made:016x}, not {step.published.digest:016x}): "
                f"epoch {epoch} begins, and running samples start over"
            )
        copy = step.published.copy if made == step.published.digest else 0
        found.payloads.digests[version] = Published(epoch=epoch, digest=made, copy=copy)
        if version in live:
            published = _publish(version, trainer.params, made, step.published, weights, epoch)
            found.payloads.digests[version] = published
    samples = sum(len(done) for done in found.payloads.samples.values())
    tokens = sum(len(found.payloads.tokens(id)[0]) for id in found.outstanding.recorded)
    writer.note(
        f"resuming at step {found.base}, {len(found.steps)} after its checkpoint: {len(found.payloads.scored)} scored "
        f"groups and {samples} finished samples kept, {len(found.outstanding.recorded)} samples go on with {tokens} "
        "tokens"
    )
    return Begun(found.orchestrator, found.payloads, epoch, found.outstanding, dict(found.segments))


def _refuse_another_model(past: Recovered, made: int) -> None:
    """ConfigError: the digest `made` of the weights that the trainer starts from is not that of version 0."""
    published = past.payloads.digests.get(INITIAL)
    if past.start == INITIAL and published and published.epoch == past.epoch and published.digest != made:
        raise ConfigError("model.path: model.path holds other weights than the run of this workdir began with")


def _tell(past: Recovered, writer: Writer) -> None:
    """One line on the console, and one in changes.jsonl, unless the last one there is the same: a start that was
    killed before its first facts wrote it."""
    row = {"step": past.start if changes.learned(past.changed) else past.base, "changed": past.changed}
    line, file = json.dumps(row).encode() + b"\n", writer.file.with_name(CHANGES)
    if not file.is_file() or not file.read_bytes().endswith(line):
        with file.open("ab") as out:
            out.write(line)
    effect = f"; of use is only checkpoint {past.start}: what came after it is made anew" if past.afresh else ""
    writer.note(f"changed since the last start: {changes.sentence(past.changed)}{effect}")


def _publish(
    version: Version, params: Tree, made: int, before: Published | None, weights: PublishedWeights, epoch: int
) -> Published:
    """Publishes the params of digest `made`; before: what the journal has of this version. RunError: equal params gave
    another copy than they gave before."""
    expected = before.copy if before is not None and before.digest == made else 0
    copy = weights.put(version, params, digest=made, copy=expected)
    same_type = (expected == made) == (copy == made)  # else model.dtype is another one today
    if expected and copy != expected and same_type:
        raise RunError(
            f"version {version} is not published: the copy of its weights for the engines came out as {copy:016x}, and "
            f"equal weights gave {expected:016x} before; the same command tries it again"
        )
    return Published(epoch=epoch, digest=made, copy=copy)
