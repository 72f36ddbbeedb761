"""What a process of a gang does: one part of the trainer, or of a rollout instance.

Consumes calls and posts of the controller; produces answers and facts. The stages are those of one machine, unchanged:
`Trainer`, `Checkpoints`, `Engine`, `EngineWorker`. Laws: every process of a gang makes the same jitted calls in the
same order (the first process decides what comes next, in a rollout before each tick, and tells the others); only the
first process speaks for an instance; a process that hands over has then done its last; a role that is
taken over by another controller has ended all that the earlier one asked for before it says so.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from dora_jax import devices
from dora_jax.config import Config, ConfigError
from dora_jax.digest import digest
from dora_jax.models import hf, sharding
from dora_jax.publish import HostWeights, Slices
from dora_jax.rollout.host_kv import HostKV
from dora_jax.rollout.migrate import holders_alike
from dora_jax.runtime import run as build
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.checkpoint_shards import home
from dora_jax.runtime.cluster.connection import ControllerConnection, Follower, Leader
from dora_jax.runtime.cluster.messages import Begin
from dora_jax.runtime.cluster.sample_transfer import (
    KVEndpoint,
    MoveBetweenProcesses,
    MoveThroughController,
    ResultSender,
    TransferThreads,
)
from dora_jax.runtime.cluster.step_cache import StepCache
from dora_jax.runtime.idle_time import IdleTimer
from dora_jax.runtime.rollout_worker import (
    REPORT_PERIOD_S,
    EngineWorker,
    MoveTarget,
    progress_period_s,
    report_period_s,
)
from dora_jax.runtime.sample_gaps import SampleGaps
from dora_jax.runtime.sample_log import TokenViews
from dora_jax.runtime.seams import RolloutEngine, Tree
from dora_jax.runtime.trainer_worker import MismatchProbe
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import layout_of
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint, like
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.tokenizer import Tokenizer
from dora_jax.trainer.checkpoint import Checkpoints
from dora_jax.types import InstanceId, ScoredGroup, Version


class ProcessStatus(Protocol):
    """What a role tells of its progress, once a second: process_main.HeartbeatSender."""

    waits: IdleTimer  # of the main thread
    busy: bool
    progress: int


class TrainerRole:
    """Answers calls one after the other, on the main thread."""

    def __init__(
        self, begin: Begin, config: Config, link: ControllerConnection, status: ProcessStatus, turns: Leader | Follower
    ):
        devices.check_slice("cluster.trainer_slice", "" if config.cpu_devices else config.cluster.trainer_slice)
        self._config = config
        self._link, self._status, self._turns = link, status, turns
        self._home = home(begin)
        mesh = sharding.make_mesh(jax.devices(), *devices.trainer_mesh(len(jax.devices()), config))
        self._trainer = build.new_trainer(config, Tokenizer.load(config.model.path), mesh, self._home.folder)
        self._views = TokenViews(self._trainer, config.trainer.show_every)
        self._pack = self._views.watching(build.packer(config, self._trainer))
        probe = build.prober(config, self._trainer)
        self._gap = MismatchProbe(probe if not config.orchestrator.synchronous else None)
        self._gaps = SampleGaps(self._trainer, probe, self._at_hand) if config.trainer.max_instance_mismatch else None
        if self._gaps:
            self._pack = self._gaps.watching(self._pack)
        self._newest: tuple[Version, Tree] | None = None  # published last, on the trainer's shards, for the gap
        self._copy = build.publishing_copy(config, hf.read_config(config.model.path), mesh)
        self._stored, self._kept = StoredWeights(begin.workdir), HostWeights()
        wire = Wire(link.own_ip, link.token) if config.cluster.wire == "transfer" else None
        self._transfers = TransferThreads(WeightEndpoint(begin.rank, wire, self._kept), link, self._write)
        self._checkpoints: Checkpoints | None = None  # opened by the first save: nothing else writes there by then
        self._cache = StepCache()
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
            with self._status.waits:
                turn = self._turns.next(mine, wait=True)
            self._status.busy = True
            for call in turn:
                match call:
                    case messages.HandOver():  # what waits for a later call asks the next gang
                        return self._link.send(messages.HandOverDone(hosts=1))
                    case messages.Rejoin():
                        self._settle()
                    case messages.Call(number=number, what=what):
                        self._link.send(messages.Answer(number=number, what=self._answer(what)))
                self._status.progress += 1
            self._status.busy = False

    def _settle(self) -> None:
        """Another controller has come: it starts from a checkpoint, and asks for the steps since."""
        holds = self._transfers.settle()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        self._cache.doubt()
        self._link.rejoin()
        self._link.send(messages.Ready(holds=holds))

    def _answer(self, what: messages.TrainerCall) -> messages.CallResult:
        match what:
            case messages.TrainGroups(base=base) | messages.FinishStep(base=base) if base != self._version:
                raise RuntimeError(f"a step at base {base} was asked of a trainer at version {self._version}")
            case messages.TrainGroups(base=base, groups=groups):
                self._learn(base, groups)
            case messages.FinishStep(base=base):
                return self._make(base)
            case messages.PublishWeights(version=version) if version < self._held or self._cache.mid_step:
                if version not in self._kept.versions:
                    raise RuntimeError(f"version {version} is asked for of a trainer that is beyond it")
            case messages.PublishWeights(version=version):
                self._publish(version)
            case messages.RestoreCheckpoint(step=step):
                if not self._cache.rewind(step, self._held):
                    like = self._trainer.abstract_state()
                    self._trainer.load(*self._home.restore(step, like.params, like.opt_state), step)
                    self._cache.restored()
            case messages.SaveCheckpoint(version=version, rl_state=rl_state, metrics=metrics):
                if version != self._version or self._cache.mid_step:
                    return messages.CallDeclined(error=f"the trainer is at version {self._version}, or beyond it")
                state = self._trainer.state
                self._saver().save(version, state.params, state.opt_state, rl_state, metrics)
            case messages.PollCheckpoint(floor=floor, wait=wait):
                if self._checkpoints is not None:
                    self._checkpoints.protect(floor)
                    (self._checkpoints.wait if wait else self._checkpoints.poll)()
                    if self._checkpoints.part is not None:
                        step, files = self._checkpoints.part
                        return messages.CheckpointFiles(step=step, files=files)
            case messages.ComputeDigest():
                return messages.Done(value=self._digest())
        return messages.Done(value=self._version)

    def _learn(self, base: Version, groups: Sequence[ScoredGroup]) -> None:
        self._digest()  # while the weights are those of a version
        began = self._cache.mid_step
        if new := self._cache.new(base, groups):
            self._trainer.learn(self._pack(new, base), **({} if began else self._gap.among(new, base)))

    def _make(self, base: Version) -> messages.StepFinished:
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

    def _at_hand(self, version: Version) -> Tree | None:
        """The weights of a version that was published, if they are kept for the gap."""
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None

    def _digest(self) -> int:
        """Of the version where the controller has it."""
        digests, version = self._cache.digests, self._version
        if version not in digests and version < self._held:
            raise RuntimeError(f"the weights of version {version} are gone from a trainer at version {self._held}")
        if version not in digests:
            digests[version] = digest(self._trainer.params)
        return digests[version]

    def _publish(self, version: Version) -> None:
        if self._newest is not None:
            self._gap.keep(*self._newest)  # before the next copy is made: two at most are on the devices
        copy = jax.block_until_ready(self._copy(self._trainer.params))
        self._newest = (version, copy) if self._gap.wanted else None
        given = slices.offered(copy)
        self._kept.put(version, given)
        self._transfers.soon(functools.partial(jax.tree.map, Slices.bring_home, given))

    def _write(self, version: Version) -> None:
        self._stored.put(version, self._kept.get(version, None))
        if self._config.cluster.wire == "storage":
            self._kept.drop(version)

    def _saver(self) -> Checkpoints:
        if self._checkpoints is None:

            def notify(text: str, *_: Any) -> None:
                if self._home.speaks:
                    self._link.send(messages.Note(text=text))

            self._checkpoints = self._home.checkpoints(self._config.checkpoint, notify)
        return self._checkpoints


def open_rollout(
    begin: Begin, config: Config, link: ControllerConnection, status: ProcessStatus, turns: Leader | Follower
) -> RolloutRole:
    """Its engine is compiled on return."""
    devices.check_slice("cluster.instance_slice", "" if config.cpu_devices else config.cluster.instance_slice)
    n_devices = len(jax.devices())
    if n_devices != config.rollout.tensor:
        raise ConfigError(
            f"rollout.tensor: {config.rollout.tensor} is not the {n_devices} devices of an instance of "
            f"{begin.hosts} processes"
        )
    mesh = sharding.make_mesh(jax.devices(), 1, 1, n_devices)
    model = hf.read_config(config.model.path)

    def say(text: str) -> None:
        if begin.rank == 0:  # it speaks for all
            link.send(messages.Note(text=text))

    host = HostKV(config.rollout.host_kv_bytes, say)
    engine = build.new_engine(config, Tokenizer.load(config.model.path), model, mesh, host)
    engine.warmup()
    stored, versions = StoredWeights(begin.workdir), HostWeights()
    wire = Wire(link.own_ip, link.token) if config.cluster.wire == "transfer" else None
    wanted = like(model, engine.param_shardings, build.published(config, model))
    weights = WeightEndpoint(begin.rank, wire, versions, wanted, stored)
    kv = KVEndpoint(_instance(begin), begin.rank, wire and Wire(link.own_ip, link.token), layout_of(engine.page()))
    return RolloutRole(
        begin,
        engine,
        weights,
        link,
        status,
        turns,
        build.partial_s(config),
        kv,
        holders_alike(begin.hosts, model.cache_heads),
        report_period_s(config.rollout.instances),
        progress_period_s(config.rollout.instances, config.rollout.slots),
    )


def _instance(begin: Begin) -> InstanceId:
    if begin.instance is None:
        raise ValueError("a process of the trainer's gang cannot be one of an instance")
    return begin.instance


class RolloutRole:
    """Ticks on the main thread; weights and KV come in on others."""

    def __init__(
        self,
        begin: Begin,
        engine: RolloutEngine,
        weights: WeightEndpoint,
        link: ControllerConnection,
        status: ProcessStatus,
        turns: Leader | Follower,
        partial_s: float,
        kv: KVEndpoint,
        alike: int = 1,
        report_s: float = REPORT_PERIOD_S,
        progress_s: float = 0.0,
    ):
        """alike: neighbouring processes that hold the same KV heads."""
        self._engine, self._status, self._turns, self._weights, self._kv = engine, status, turns, weights, kv
        self._transfers = TransferThreads(weights, link, kv=kv)
        self._link = link
        self._sender = sender = ResultSender(link, begin.rank, begin.hosts, alike)
        self._worker = EngineWorker(
            _instance(begin), engine, weights.weights, sender, partial_s, begin.epoch, report_s, progress_s
        )
        self._lends = kv.lends
        self._rank, self._hosts = begin.rank, begin.hosts

    def run(self, inbox: queue.SimpleQueue) -> None:
        posts = self._transfers.sort(inbox)
        while True:
            with self._status.waits:
                turn = self._turns.next(posts, wait=not self._worker.busy)
            self._status.busy = True
            for post in turn:
                if isinstance(post, messages.HandOver):
                    return self._leave()
                self._do(post)
            if self._worker.busy:
                self._worker.work()
            self._status.progress += 1
            self._status.busy = self._worker.busy

    def _leave(self) -> None:
        self._sender.leave(self._worker.hand_over)
        self._status.busy = False

    def _settle(self) -> None:
        """Another controller has come, and takes it for a new gang that has samples and weights from before."""
        samples = self._sender.recall(self._worker.hand_over)  # the first process tells of all
        for version in tuple(self._engine.versions):
            self._engine.drop(version)
        holds = self._transfers.settle()
        self._link.rejoin()
        for sample in samples:
            self._link.send(sample)
        self._link.send(messages.Ready(holds=holds))

    def _do(self, post: messages.GangCommand) -> None:
        worker = self._worker
        match post:
            case messages.UseWeights(version=version, drop=drop):
                worker.load(version, drop)
                if drop is not None:
                    self._weights.weights.drop(drop)
                    self._sender.forget(drop)
            case messages.StartSample(id=id, prompt=prompt, version=version):
                worker.submit(id, prompt, version)
            case messages.CancelSample(id=id, reason=reason):
                worker.cancel(id, reason)
            case messages.MoveSample(id=id, attempt=attempt):
                worker.move(id, self._target(post), attempt)
            case messages.FinishMove(in_flight=in_flight, src=src, attempt=attempt, number=number):
                worker.receive(self._kv.take(number) if number else in_flight, src, attempt)
            case messages.ParkSample(id=id):
                worker.park(id)
            case messages.ResumeSample(in_flight=in_flight, number=number):
                worker.resume(self._kv.take(number) if number else self._sender.with_own_pages(in_flight))
            case messages.ForgetKept(id=id):
                worker.forget(id)
                self._sender.forget_sample(id)
            case messages.KnowSibling(id=id, tokens=tokens):
                worker.know(id, tokens)
            case messages.Rejoin():
                self._settle()

    def _target(self, move: messages.MoveSample) -> MoveTarget:
        if self._lends:
            return MoveBetweenProcesses(move, self._link, self._kv, self._rank, self._hosts)
        return MoveThroughController(move, self._sender)
