"""What a process of a rollout gang does: one part of an instance.

Consumes posts of the controller; produces facts. The stages are those of one machine, unchanged: `Engine`,
`EngineWorker`. Laws: every process of a gang makes the same jitted calls in the same order (the first process decides
before each tick what comes next, and tells the others); only the first process speaks for an instance; a process that
hands over has then done its last; a role that is taken over by another controller has ended all that the earlier one
asked for before it says so.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import jax

from dora_jax.base.lanes import WAITING
from dora_jax.config import Config, ConfigError
from dora_jax.models import hf, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.orchestrate import events as ev
from dora_jax.plan import devices
from dora_jax.publish import HostWeights
from dora_jax.rollout.migrate import HostKV, InFlightSample, holders_alike
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import ControllerConnection, HeartbeatSender, Turns
from dora_jax.runtime.cluster.sample_transfer import KVEndpoint, MoveDestination, ResultSender, TransferThreads
from dora_jax.runtime.common.seams import RolloutEngine
from dora_jax.runtime.common.worker import ForgetSample
from dora_jax.runtime.instances.rollout_worker import REPORT_PERIOD_S, EngineWorker, progress_period_s, report_period_s
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import layout_of
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint, like
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.types import InstanceId


def open_rollout(
    begin: messages.Begin, config: Config, link: ControllerConnection, status: HeartbeatSender, turns: Turns
) -> RolloutRole:
    """Its engine is compiled on return."""
    devices.check_slice("cluster.instance_slice", "" if config.cpu_devices else config.cluster.instance_slice)
    n_devices = len(jax.devices())
    if n_devices != config.rollout.tensor:
        raise ConfigError(
            f"rollout.tensor: {config.rollout.tensor} is not the {n_devices} devices of an instance of "
            f"{begin.hosts} processes"
        )
    parts = InstanceParts(config, jax.devices(), begin, link)
    return parts.role(begin, link, status, turns)


class InstanceParts:
    """What the incarnations of an instance have in this process: its engine, which is compiled, and the present one's
    wires."""

    def __init__(self, config: Config, own: Sequence[jax.Device], begin: messages.Begin, link: ControllerConnection):
        """own: the devices of the instance, of all its processes."""
        self._config = config

        def say(text: str) -> None:
            if begin.rank == 0:  # it speaks for all
                link.send(messages.Note(text=text))

        mesh = sharding.make_mesh(own, 1, 1, len(own))
        self._model = hf.read_config(config.model.path)
        host = HostKV(config.rollout.host_kv_bytes, say)
        self.engine = build.new_engine(config, Tokenizer.load(config.model.path), self._model, mesh, host)
        self.engine.warmup()
        self._wanted = like(self._model, self.engine.param_shardings, build.published(config, self._model))
        self._layout = layout_of(self.engine.page(), self.engine.calls.kv, self.engine.device.no_state())
        self._stored = StoredWeights(begin.workdir)
        self._wires: list[Wire] = []  # for weights, and for KV

    def role(
        self,
        begin: messages.Begin,
        link: ControllerConnection,
        status: HeartbeatSender,
        turns: Turns,
        free: Callable[[], None] = lambda: None,
    ) -> RolloutRole:
        """The role of one incarnation, until `close`. free: see RolloutRole."""
        rollout, cluster = self._config.rollout, self._config.cluster
        if cluster.wire == "transfer":
            self._wires = [Wire(link.own_ip, link.credential, cluster.encrypt == "all") for _ in range(2)]
        weights_wire, kv_wire = self._wires or (None, None)
        return RolloutRole(
            begin,
            self.engine,
            WeightEndpoint(begin.rank, weights_wire, HostWeights(), self._wanted, self._stored),
            link,
            status,
            turns,
            build.partial_s(self._config),
            KVEndpoint(_instance(begin), begin.rank, kv_wire, self._layout),
            holders_alike(begin.hosts, self._model.cache_heads),
            report_period_s(rollout.instances),
            progress_period_s(rollout.instances, rollout.slots),
            free,
        )

    def close(self) -> None:
        """Ends what the incarnation offers to others."""
        for wire in self._wires:
            wire.close()


def _instance(begin: messages.Begin) -> InstanceId:
    if begin.instance is None:
        raise ValueError("a process of the trainer's gang cannot be one of an instance")
    return begin.instance


class RolloutRole:
    """Ticks on the main thread; weights and KV come in on others."""

    def __init__(
        self,
        begin: messages.Begin,
        engine: RolloutEngine,
        weights: WeightEndpoint,
        link: ControllerConnection,
        status: HeartbeatSender,
        turns: Turns,
        partial_s: float,
        kv: KVEndpoint,
        alike: int = 1,
        report_s: float = REPORT_PERIOD_S,
        progress_s: float = 0.0,
        free: Callable[[], None] = lambda: None,
    ):
        """alike: neighbouring processes that hold the same KV heads. free: what is done when all samples are out,
        before they are reported as such."""
        self._engine, self._status, self._turns, self._weights, self._kv = engine, status, turns, weights, kv
        self._transfers = TransferThreads(weights, link, kv=kv)
        self._link = link
        self._sender = sender = ResultSender(link, begin.rank, begin.hosts, alike)
        self._worker = EngineWorker(
            _instance(begin), engine, weights.weights, sender, partial_s, begin.epoch, report_s, progress_s
        )
        status.lane = self._worker.lane
        self._free = free
        self.wanted = weights.wanted  # shards of a version, that this process is sent

    def run(self, inbox: queue.SimpleQueue) -> None:
        posts = self._transfers.sort(inbox)
        while True:
            self._status.lane.turn(WAITING)
            turn = self._turns.next(posts, wait=not self._worker.busy)
            self._status.lane.turn("commands")
            self._status.busy = True
            for post in turn:
                if isinstance(post, messages.HandOver):
                    self._worker.hand_over()
                    self._free()
                    self._sender.leave()
                    self._status.busy = False
                    return
                worker = self._worker
                match post:
                    case messages.Command(what=what, payload=payload, number=number):
                        dst = None
                        if isinstance(payload, InFlightSample):
                            payload = self._kv.take(number) if number else self._sender.with_own_pages(payload)
                        elif number:
                            dst = MoveDestination(post, self._sender, self._kv)
                        worker.execute(what, payload, dst)
                        match what:
                            case ev.LoadWeights(drop=int() as drop):
                                self._weights.weights.drop(drop)
                                for id in [id for id, left in self._sender.pages.items() if left.version == drop]:
                                    del self._sender.pages[id]
                            case ForgetSample(id=id):
                                self._sender.pages.pop(id, None)
                    case messages.Rejoin():
                        # another controller has come, and takes it for a new gang that has samples and weights from
                        # before
                        samples = self._sender.recall(self._worker.hand_over)  # the first process tells of all
                        for version in tuple(self._engine.versions):
                            self._engine.drop(version)
                        holds = self._transfers.settle()
                        self._link.alone = False
                        for sample in samples:
                            self._link.send(sample)
                        self._link.send(messages.Ready(holds=holds, wanted=self.wanted))
            if self._worker.busy:
                self._worker.work()
            self._status.progress += 1
            self._status.busy = self._worker.busy
