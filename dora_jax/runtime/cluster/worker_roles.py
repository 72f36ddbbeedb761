"""What a process of the trainer's gang does: one part of the trainer, and of an instance while its devices are lent.

Consumes calls of the controller; produces answers. The stages are those of one machine, unchanged: `Trainer`,
`Checkpoints`. Laws: every process of a gang makes the same jitted calls in the same order (the first process decides
what comes next and tells the others); nothing is computed while the devices are lent (lent_role.py); a process that
hands over has then done its last; a role that is taken over by another controller has ended all that the earlier one
asked for before it says so.
"""

from __future__ import annotations

import functools
import queue
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dora_jax.base.digest import digest
from dora_jax.base.lanes import WAITING
from dora_jax.config import Config
from dora_jax.models import hf, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import devices
from dora_jax.publish import HostWeights, Slices, same_types
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.checkpoint_shards import CheckpointWriter
from dora_jax.runtime.cluster.connection import ControllerConnection, HeartbeatSender, Turns
from dora_jax.runtime.cluster.lent_role import LentRole
from dora_jax.runtime.cluster.sample_transfer import TransferThreads
from dora_jax.runtime.cluster.step_cache import StepCache
from dora_jax.runtime.common.sample_gaps import SampleGaps
from dora_jax.runtime.common.sample_log import TokenViews
from dora_jax.runtime.common.seams import Pack, Tree
from dora_jax.runtime.journal.object_storage import StoreError
from dora_jax.runtime.journal.records import Saved
from dora_jax.runtime.training.trainer_worker import MismatchProbe
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.trainer import checkpoint
from dora_jax.types import Version


class TrainerRole:
    """Answers calls one after the other, on the main thread."""

    wanted = ()  # of versions: it is sent none

    def __init__(
        self, begin: messages.Begin, config: Config, link: ControllerConnection, status: HeartbeatSender, turns: Turns
    ):
        devices.check_slice("cluster.trainer_slice", "" if config.cpu_devices else config.cluster.trainer_slice)
        self._config = config
        self._link, self._status, self._turns = link, status, turns
        self._home = CheckpointWriter(begin.workdir, begin.rank)
        mesh = sharding.make_mesh(jax.devices(), *devices.trainer_mesh(len(jax.devices()), config))
        self._trainer = build.new_trainer(config, Tokenizer.load(config.model.path), mesh, self._home.folder)
        part, whole = (build.packer(config, self._trainer, whole=whole) for whole in (False, True))
        self._views = TokenViews(self._trainer, config.trainer.show_every, part, whole)
        self._pack: Pack = self._views.pack
        probe = build.prober(config, self._trainer)
        self._gap = MismatchProbe(probe if not config.orchestrator.synchronous else None)
        self._gaps: SampleGaps | None = None
        if config.trainer.max_instance_mismatch:
            self._gaps = SampleGaps(self._trainer, probe, self._at_hand, self._pack)
            self._pack = self._gaps.pack
        self._newest: tuple[Version, Tree] | None = None  # published last, on the trainer's shards, for the gap
        self._copy = build.publishing_copy(config, hf.read_config(config.model.path), mesh)
        self._stored, self._kept = StoredWeights(begin.workdir), HostWeights()
        self._copies: dict[Version, int] = {}  # digests of what was published
        wire = None
        if config.cluster.wire == "transfer":
            wire = Wire(link.own_ip, link.credential, config.cluster.encrypt == "all")
        self._transfers = TransferThreads(WeightEndpoint(begin.rank, wire, self._kept), link, self._write)
        # opened by the first save: nothing else writes there by then
        self._checkpoints: checkpoint.Checkpoints | None = None
        self._cache = StepCache()
        self._lent = LentRole(begin, config, link, self._trainer) if config.orchestrator.elastic else None
        shape = build.batch_layout(config, self._trainer.shards)
        self._trainer.warmup(shape.rows, shape.tokens)

    @property
    def _version(self) -> Version:
        """Where the controller has it."""
        return self._cache.at(self._held)

    @property
    def _held(self) -> Version:
        return int(self._trainer.state.step)

    def run(self, inbox: queue.SimpleQueue) -> None:
        mine = self._transfers.sort(inbox)
        while True:
            self._status.lane.turn(WAITING)
            turn = self._turns.next(mine, wait=True)
            self._status.lane.turn("commands")
            self._status.busy = True
            for call in turn:
                match call:
                    case messages.HandOver():  # what waits for a later call asks the next gang
                        return self._link.send(
                            messages.HandOverDone(hosts=1 if self._lent is None else self._lent.leave())
                        )
                    case messages.Rejoin():
                        # another controller has come: it starts from a checkpoint, and asks for the steps since
                        self._reload()
                        holds = self._transfers.settle()
                        if self._checkpoints is not None:
                            self._checkpoints.wait()
                        self._cache.new_controller()
                        self._link.alone = False
                        self._link.send(messages.Ready(holds=holds))
                    case messages.Call(number=number, what=what):
                        self._link.send(messages.CallAnswer(number=number, what=self._answer(what)))
                self._status.progress += 1
            self._status.busy = False

    def _reload(self) -> None:
        if self._lent is not None:
            self._lent.reload()

    def _answer(self, what: messages.TrainerCall) -> messages.CallResult:
        if not isinstance(what, messages.PollCheckpoint | messages.LendDevices):
            self._reload()
        match what:
            case messages.LendDevices():
                if self._lent is None:
                    raise RuntimeError("devices are lent of a trainer without orchestrator.elastic")
                self._lent.lend(what)
                return messages.Done(value=0)  # the state may be on its way off the devices: nothing reads it now
            case messages.TrainGroups(base=base) | messages.FinishStep(base=base) if base != self._version:
                raise RuntimeError(f"a step at base {base} was asked of a trainer at version {self._version}")
            case messages.TrainGroups(base=base, groups=groups):
                self._digest()  # while the weights are those of a version
                began = bool(self._cache.begun)
                if new := self._cache.new(base, groups):
                    self._trainer.learn(self._pack(new, base), **({} if began else self._gap.among(new, base)))
            case messages.FinishStep(base=base):
                if (known := self._cache.recall(base)) is not None:
                    return known
                metrics = self._trainer.finish()
                made = messages.StepFinished(
                    digest=digest(self._trainer.params),
                    metrics={name: float(value) for name, value in metrics.items()},
                    views=tuple(self._views.take(base + 1).values()),
                    gaps=self._gaps.gaps(base + 1) if self._gaps else (),
                )
                self._cache.made(base, made)
                return made
            case messages.PublishWeights(version=version) if version < self._held or self._cache.begun:
                if version not in self._kept.versions:
                    raise RuntimeError(f"version {version} is asked for of a trainer that is beyond it")
                return messages.Done(value=self._copies[version])
            case messages.PublishWeights(version=version):
                return messages.Done(value=self._publish(version))
            case messages.RestoreCheckpoint(step=step) if self._cache.rewind(step, self._held):
                pass  # the steps since are remembered
            case messages.RestoreCheckpoint() | messages.CheckCheckpoint():
                read = self._read(what)
                if isinstance(read, messages.CallDeclined):
                    return read
                if isinstance(what, messages.RestoreCheckpoint):
                    self._trainer.load(*read, what.step)
                    self._cache = StepCache()
            case messages.SaveCheckpoint(version=version, rl_state=rl_state, metrics=metrics):
                if version != self._version or self._cache.begun:
                    return messages.CallDeclined(error=f"the trainer is at version {self._version}, or beyond it")
                state = self._trainer.state
                self._saver().save(version, state.params, state.opt_state, rl_state, metrics)
                for saved, digests in self._saver().take_saves():
                    return Saved(version=saved, **digests._asdict())
            case messages.PollCheckpoint(floor=floor, wait=wait):
                if self._checkpoints is not None:
                    self._checkpoints.protect(floor)
                    (self._checkpoints.wait if wait else self._checkpoints.poll)()
                    if self._checkpoints.part is not None:
                        step, files = self._checkpoints.part
                        return messages.CheckpointFiles(step=step, files=files)
                return messages.Done(value=0)
            case messages.ComputeDigest():
                return messages.Done(value=self._digest())
        return messages.Done(value=self._version)

    def _read(
        self, what: messages.RestoreCheckpoint | messages.CheckCheckpoint
    ) -> tuple[Tree, Tree] | messages.CallDeclined:
        """(params, opt_state) of a checkpoint, if all processes can read it and it has the digests that are asked
        for."""
        like = self._trainer.abstract_state()
        state, error = None, ""
        try:
            unsealed = isinstance(what, messages.CheckCheckpoint)
            state = self._home.restore(what.step, like.params, like.opt_state, unsealed)
        except StoreError:
            raise  # the store's trouble, and no damage
        except Exception as fault:  # of Orbax, tensorstore or the file system: whatever the damage leads to
            error = checkpoint.why(fault)
        failed = multihost_utils.process_allgather(np.array(bool(error)))  # a digest takes all processes
        if state is None or np.any(failed):
            return messages.CallDeclined(error=error or "another process of the trainer cannot read it")
        if other := checkpoint.difference((what.params, what.opt_state, 0), (*map(digest, state), 0)):
            return messages.CallDeclined(error=other)
        return state

    def _at_hand(self, version: Version) -> Tree | None:
        """The weights of a version that was published, if they are kept for the gap."""
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None

    def _digest(self) -> int:
        """The digest of the version, where the controller has it."""
        digests, version = self._cache.digests, self._version
        if version not in digests and version < self._held:
            raise RuntimeError(f"the weights of version {version} are gone from a trainer at version {self._held}")
        if version not in digests:
            digests[version] = digest(self._trainer.params)
        return digests[version]

    def _publish(self, version: Version) -> int:
        """Returns the digest of the copy."""
        if self._newest is not None:
            self._gap.keep(*self._newest)  # before the next copy is made: two at most are on the devices
        copy = jax.block_until_ready(self._copy(self._trainer.params))
        self._newest = (version, copy) if self._gap.wanted else None
        given = slices.offered(copy)
        self._kept.put(version, given)
        self._copies = {old: self._copies[old] for old in self._copies if old in self._kept.versions}
        self._copies[version] = self._digest() if same_types(self._trainer.params, copy) else digest(copy)
        self._transfers.jobs.put(functools.partial(jax.tree.map, Slices.bring_home, given))
        return self._copies[version]

    def _write(self, version: Version) -> None:
        self._stored.put(version, self._kept.get(version, None))
        if self._config.cluster.wire == "storage":
            self._kept.drop(version)

    def _saver(self) -> checkpoint.Checkpoints:
        if self._checkpoints is None:

            def notify(text: str, *_: Any) -> None:
                if self._home.speaks:
                    self._link.send(messages.Note(text=text))

            self._checkpoints = self._home.checkpoints(self._config.checkpoint, notify)
        return self._checkpoints
