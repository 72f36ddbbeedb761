"""The start of a run: new, after a checkpoint, or exactly where a killed run was.

Consumes the workdir's journal and checkpoints; produces the orchestrator, its payloads, the trainer's state, and the
weights of every live version in the store. Laws: a step is made again from the journal's groups and must give the
digest that was published; where it does not (another machine, another compiler), a new epoch begins, a note says so,
and running samples start over at their version, so that no trajectory holds tokens of two weights.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError, JournalSection
from dora_jax.fault_injection import point
from dora_jax.metrics import Writer
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.restart import Debts
from dora_jax.runtime.durability import object_storage, workdir_mirror
from dora_jax.runtime.durability.event_log import EventLog
from dora_jax.runtime.durability.log_stores import FileLogStore, JournalError, ObjectLogStore
from dora_jax.runtime.durability.payload_state import PayloadState
from dora_jax.runtime.durability.records import Published
from dora_jax.runtime.durability.recovery import Recovered, recover
from dora_jax.runtime.seams import CheckpointStore, Digest, Pack, PolicyTrainer, WeightStore
from dora_jax.types import Version

INITIAL = 0  # this version needs no checkpoint: it is model.path


@dataclasses.dataclass
class Begun:
    orchestrator: Orchestrator
    payloads: PayloadState
    epoch: int = 0
    debts: Debts | None = None  # of a killed process
    segments: dict[int, Version] = dataclasses.field(default_factory=dict)


def open_journal(workdir: Path, section: JournalSection, writer: Writer) -> EventLog | None:
    """The event log of a workdir; None: `section.on` is False. Then an earlier journal is put aside, because it would
    not know what this run does. ConfigError: the journal cannot be opened."""
    folder = workdir / "journal"
    if url := workdir_mirror.url_of(workdir):
        if not section.on:
            raise ConfigError("journal.on: a run in a bucket is what its journal says: leave it on")
        try:
            return EventLog(
                ObjectLogStore(object_storage.opened(f"{url}/{object_storage.JOURNAL}")), writer.note, section.sync_s
            )
        except (JournalError, OSError) as error:
            raise ConfigError(f"workdir: {error}") from error
    if not section.on:
        if folder.exists():
            folder.rename(workdir / f"journal.{time.time():.0f}.ended")
        return None
    try:
        return EventLog(FileLogStore(folder), writer.note, section.sync_s)
    except JournalError as error:
        raise ConfigError(f"workdir: {error}") from error


def begin(
    journal: EventLog | None,
    checkpoints: CheckpointStore,
    trainer: PolicyTrainer,
    weights: WeightStore,
    pack: Pack,
    digest: Digest,
    config: OrchestratorConfig,
    writer: Writer,
) -> Begun:
    """Where the run begins. On return the trainer holds the newest version, and the weight store every live one."""
    found = None
    if journal is not None:
        versions = [INITIAL, *checkpoints.steps()]
        try:
            found = recover(journal, config, versions, lambda v: v == INITIAL or checkpoints.usable(v), writer.note)
        except JournalError as error:
            writer.note(
                f"{error}; the run goes on from its newest checkpoint, and what was in flight is generated again"
            )
    if found is None:
        return _from_checkpoint(checkpoints, trainer, weights, digest, config, writer)
    return _again(found, checkpoints, trainer, weights, pack, digest, writer)


# ---------------------------------------------------------------- private


def _from_checkpoint(
    checkpoints: CheckpointStore,
    trainer: PolicyTrainer,
    weights: WeightStore,
    digest: Digest,
    config: OrchestratorConfig,
    writer: Writer,
) -> Begun:
    """Starts after the newest checkpoint. Every group that was issued and has not ended is issued again."""
    step = next((step for step in reversed(checkpoints.steps()) if checkpoints.usable(step)), None)
    rl_state: dict[str, Any] = {}
    if step is not None:
        rl_state = _load(step, checkpoints, trainer)
        checkpoints.undo_after(step)
        writer.resume(step)
        writer.note(f"resuming from step {step}")
    version = int(trainer.state.step)
    weights.put(version, trainer.params)
    payloads = PayloadState()
    payloads.digests[version] = Published(epoch=0, digest=digest(trainer.params))
    return Begun(Orchestrator(config, **rl_state), payloads)


def _again(
    found: Recovered,
    checkpoints: CheckpointStore,
    trainer: PolicyTrainer,
    weights: WeightStore,
    pack: Pack,
    digest: Digest,
    writer: Writer,
) -> Begun:
    """Makes the steps since the checkpoint again, from the groups of the journal."""
    if found.start != INITIAL:
        _load(found.start, checkpoints, trainer)
    _check_start(found, digest(trainer.params))
    checkpoints.undo_after(found.base)
    writer.resume(found.base)
    live, epoch = found.debts.versions, found.epoch
    if found.start in live:
        weights.put(found.start, trainer.params)
    for step in found.steps:
        version = step.base + 1
        writer.phase("trainer", f"making step {version} again")
        trainer.step(pack(step.groups, step.base))
        point("resume.replaying")
        made = digest(trainer.params)
        if made != step.published.digest and epoch == found.epoch:
            epoch += 1
            found.payloads.forget_partials()
            checkpoints.undo_after(found.start)
            writer.note(
                f"version {version} came out with other weights ({made:016x}, not {step.published.digest:016x}): "
                f"epoch {epoch} begins, and running samples start over"
            )
        found.payloads.digests[version] = Published(epoch=epoch, digest=made)
        if version in live:
            weights.put(version, trainer.params)
    samples = sum(len(done) for done in found.payloads.samples.values())
    tokens = sum(len(found.payloads.tokens(id)[0]) for id in found.debts.recorded)
    writer.note(
        f"resuming at step {found.base}, {len(found.steps)} after its checkpoint: {len(found.payloads.scored)} scored groups "
        f"and {samples} finished samples kept, {len(found.debts.recorded)} samples go on with {tokens} tokens"
    )
    return Begun(found.orchestrator, found.payloads, epoch, found.debts, dict(found.segments))


def _load(step: int, checkpoints: CheckpointStore, trainer: PolicyTrainer) -> dict[str, Any]:
    abstract = trainer.abstract_state()
    restored = checkpoints.restore(step, abstract.params, abstract.opt_state)
    trainer.load(restored.params, restored.opt_state, step)
    return restored.rl_state


def _check_start(found: Recovered, held: int) -> None:
    published = found.payloads.digests.get(found.start)
    if published is not None and published.epoch == found.epoch and published.digest != held:
        where = "model.path holds" if found.start == INITIAL else f"checkpoint {found.start} holds"
        raise ConfigError(f"model.path: {where} other weights than the run of this workdir began with")
