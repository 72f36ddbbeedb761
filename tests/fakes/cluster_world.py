"""A whole run over gangs: threads stand for processes, and arithmetic stands for the model."""

import dataclasses
import queue
import random
import threading

import numpy as np

from dora_jax.base.lanes import Lane
from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each, run
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.publish import HostWeights
from dora_jax.rollout.migrate import without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import Turns
from dora_jax.runtime.cluster.gang import GangListener
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.remote_rollout import RemoteInstance
from dora_jax.runtime.cluster.rollout_role import RolloutRole
from dora_jax.runtime.cluster.run_registry import RunRegistry
from dora_jax.runtime.cluster.sample_transfer import KVEndpoint
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.journal import journal_audit
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import Fact
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import Key, KVOffer, Manifest
from dora_jax.runtime.transfer.weight_distribution import STORAGE
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from tests.fakes.cluster import LIMITS, FakeLauncher
from tests.fakes.coordinator_world import (
    SECTION,
    STEPS,
    G,
    P,
    Scorer,
    SlowEngine,
    Task,
    Trainer,
    Weights,
    expected,
    trained_by,
)


class HeartbeatSender:
    """A HeartbeatSender whose beats are sent as they change."""

    def __init__(self, link):
        self.busy, self.lane, self._link, self._progress = False, Lane(), link, 0

    @property
    def progress(self):
        return self._progress

    @progress.setter
    def progress(self, value):
        self._progress = value
        self._link.send(messages.Heartbeat(progress=value, busy=self.busy, spent_s={}))


class Wire:
    """The link from the first process of a gang to another, without a socket."""

    def __init__(self, turns):
        self._turns = turns

    def send(self, turn):
        self._turns.put(turn)


class Brought(HostWeights):
    """Version v's weights are the number v."""

    def get(self, version, shardings):
        assert super().get(version, shardings) == {}
        return version


class Published(Weights):
    """The trainer's side: what is put lies in storage at once."""

    def __init__(self, publisher):
        super().__init__()
        self._publisher = publisher
        publisher.tell(ex.Stored(version=0, there=True))

    def put(self, version, params, digest=0, copy=0):
        digest = super().put(version, params)
        self._publisher.begin(version)
        self._publisher.tell(ex.Stored(version=version, there=True))
        return digest

    def drop(self, version):
        super().drop(version)
        self._publisher.drop(version)


class Oracles(FakeLauncher):
    """Rollout gangs whose engines are arithmetic, over the weights of one store. `porter(instance, host)`: for KV."""

    def __init__(self, length, partial_s, porter):
        super().__init__(incarnation=self.live_as_rollout)
        self.place = None  # where gangs that are left alone look for another controller
        self.engines = {}  # (gang, epoch) -> engines by rank
        self.imported = []  # requests, by any engine
        self._partial_s, self._porter = partial_s, porter
        self.weights, self._length, self._turns = None, length, {}
        self._lock = threading.Lock()

    def live_as_rollout(self, host):
        host.join()
        if self.place is not None:
            host.link.wait_for_another(self.place, host.began.rank, 20.0)
        name = host.ticket.gang, host.ticket.epoch
        with self._lock:
            turns = self._turns.setdefault(name, queue.SimpleQueue())
            engines = self.engines.setdefault(name, {})
        engine = engines[host.began.rank] = SlowEngine(SECTION, length=self._length, version_in=int)
        engine.import_ = lambda in_flight, then=engine.import_: (self.imported.append(in_flight), then(in_flight))
        led = [Wire(turns)] * (host.began.hosts - 1)
        weights = WeightEndpoint(host.began.rank, None, Brought(), {}, self)
        role = RolloutRole(
            host.began,
            engine,
            weights,
            host.link,
            HeartbeatSender(host.link),
            Turns([], turns) if host.began.rank else Turns(led),
            self._partial_s,
            self._porter(host.began.instance, host.began.rank),
        )
        host.ready()
        try:
            role.run(host.inbox)
        except BaseException as error:  # the last word of a process: its gang ends, and nobody waits for it
            host.link.send(messages.ProcessFailed(error=f"{type(error).__name__}: {error}"))
            raise

    def get(self, version, shardings):
        """What storage gives; the weights that it stands for must be there."""
        self.weights.get(version, shardings)
        return {}


class World:
    def __init__(
        self,
        folder,
        mode="dora",
        max_versions=3,
        instances=3,
        length=None,
        partial_s=0.005,
        hosts=2,
        porter=lambda instance, host: KVEndpoint(instance, host, None, None),
        lendable=(),
        restarts=20,
    ):
        self.config = OrchestratorConfig(
            mode=mode,
            max_versions=max_versions,
            groups_per_step=P,
            group_size=G,
            inflight=1.5,
            total_steps=STEPS,
            max_prompt_tokens=8,
            max_new_tokens=64,
            lendable=lendable,
        )
        self.folder, self.notes = folder, []
        self.trusted = True  # what an earlier controller's storage holds
        self._hosts, self._instances, self._mode, self._restarts = hosts, instances, mode, restarts
        length = length or (lambda version, group, index, limit: 60 if (group + index) % 5 == 0 else 2 + index % 5)
        self.launcher = Oracles(length, partial_s, porter)
        self.open()

    def new_roster(self):
        return RunRegistry()

    def open(self, found=None):
        """A controller, on what the journal holds, if it holds anything."""
        self.roster, self.outbox, self.remotes = self.new_roster(), queue.SimpleQueue(), {}
        self.hub = GangListener("127.0.0.1", self.roster)
        self.publisher = WeightPublisher(
            StoredWeights(self.folder.parent), (STORAGE,), self.notes.append, past=found is not None and self.trusted
        )
        self.weights = self.launcher.weights = Published(self.publisher)
        lendable = self.config.lendable
        for i in (*range(self._instances), *lendable):
            up, keeper = ev.InstanceUp(instance=i, slots=8, pages=96, page_size=8), self._keeper(i)
            self.remotes[i] = RemoteInstance(
                up, self.outbox, self.publisher, keeper, self.notes.append, on_demand=i in lendable
            )
        groups = MemoryGroupStore()
        self.orchestrator, self.payloads = (
            (found.orchestrator, found.payloads) if found else (Orchestrator(self.config), PayloadState())
        )
        trainer = TrainerWorker(
            Trainer(), lambda groups, base: None, groups, self.weights, self.config.decisions.max_lag, self.outbox
        )
        self.world = Coordinator(
            instances=list(self.remotes.values()),
            trainer=trainer,
            task=Task(),
            scorer=Scorer(mixed=self._mode in ("partial", "staleflow")),
            groups=groups,
            weights=self.weights,
            outbox=self.outbox,
            group_size=G,
            eval_samples=2,
        )
        self.world.recall(self.payloads)
        self.records = []
        self.world.listen(self.records.append)
        self.log = FileLogStore(self.folder)
        self.durable = JournaledWorld(self.world, EventLog(self.log), self.orchestrator, self.payloads)

    def run(self, observers=()):
        for remote in self.remotes.values():
            remote.supervisor.start()
        self.world.start([])
        try:
            return run(self.orchestrator, self.durable, [each(observe) for observe in observers])
        finally:
            self.durable.close()
            self.world.close()
            self.publisher.close()
            self.hub.close()

    def hosts(self, instance):
        """The processes of its newest gang."""
        gangs = [name for name in list(self.launcher.gangs) if name[0] == f"rollout {instance}"]
        return self.launcher.gangs[max(gangs)]

    def _keeper(self, instance):
        def begin(rank, coordinator, leader):
            return messages.Begin(
                config={}, workdir="", instance=instance, rank=rank, hosts=self._hosts, coordinator="", leader=""
            )

        return lambda name, **hooks: GangSupervisor(
            self.hub,
            self.launcher,
            name,
            self._hosts,
            "",
            begin=begin,
            notify=self.notes.append,
            limits=dataclasses.replace(LIMITS, restarts=self._restarts),
            **hooks,
        )


def check(world, halt):
    assert halt.ok, halt
    trained = trained_by(world.records)
    assert len({group.group_id for _, group in trained}) == len(trained) == STEPS * P
    for base, group in trained:
        for sample in group.samples:
            np.testing.assert_array_equal(sample.out_ids, expected(sample))
    books = audit(world.folder)
    assert books.ok and books.trained == STEPS * P, books


def at_random(world, seed, blow):
    """(an observer that strikes up to eight processes, the instances that it struck)"""
    draw, struck = random.Random(seed), []

    def strike(event, commands):
        if isinstance(event, (ev.SampleDone, ev.SampleMoved)) and draw.random() < 0.15 and len(struck) < 8:
            instance = draw.randrange(3)
            if "is up" in world.remotes[instance].state:  # a gang that never comes up ends the run
                struck.append(instance)
                blow(draw.choice(world.hosts(instance)))

    return strike, struck


def entries(folder):
    journal = EventLog(FileLogStore(folder, read_only=True))
    return [entry for n in journal.segments() for entry in journal_audit.entries(journal.read(n).records)]


def events(folder):
    return [entry.event for entry in entries(folder) if isinstance(entry, Fact)]


class Porters:
    """The KV transfer of all processes; a `share` of the offers cannot be fetched."""

    def __init__(self, share, seed=0):
        self.offered, self.taken, self.all = {}, 0, []
        self._share, self._draw, self._lock = share, random.Random(seed), threading.Lock()

    def __call__(self, instance, host):
        self.all.append(OnePorter(self, host))
        return self.all[-1]

    def fetch(self, number, host):
        with self._lock:
            return None if self._draw.random() < self._share else self.offered.get((number, host))


class OnePorter:
    offers = True

    def __init__(self, all, host):
        self._all, self._host, self.here = all, host, {}

    def offer(self, in_flight, move):
        assert in_flight.n_pages
        self._all.offered[move.number, self._host] = in_flight
        return KVOffer(
            in_flight=without_pages(in_flight), kv_len=in_flight.kv_len, page_size=in_flight.page_size, manifest=OFFER
        )

    def release(self, number):
        self._all.offered.pop((number, self._host), None)
        self.here.pop(number, None)

    def stage(self, item):
        if item.offered.manifest is None:
            in_flight = item.offered.in_flight
        else:
            in_flight = self._all.fetch(item.number, self._host)
        if in_flight:
            self.here[item.number] = in_flight
        return messages.KVStaged(number=item.number, host=self._host, fault="" if in_flight else "it did not come")

    def take(self, number):
        self._all.taken += 1
        return self.here.pop(number)


OFFER = Manifest(
    key=Key(epoch=1, version=0, receiver="rollout 1/0", sequence=1),
    sender="rollout 0",
    incarnation=1,
    address="",
    number=1,
    shards=(),
    crc32=(),
)
