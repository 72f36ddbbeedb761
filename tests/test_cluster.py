"""A whole run over gangs: the same world, orchestrator, journal; threads stand for processes, arithmetic for a model.

Gangs are of two processes: what the second one does shows that it does as the first."""

import dataclasses
import queue
import random
import threading

import numpy as np
import pytest

from dora_jax.buffer.store import MemoryGroupStore
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.loop import run
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Hub
from dora_jax.runtime.cluster.gang_supervisor import Keeper
from dora_jax.runtime.cluster.kv_endpoint import Porter
from dora_jax.runtime.cluster.remote_rollout import RemoteInstance
from dora_jax.runtime.cluster.run_registry import Roster
from dora_jax.runtime.cluster.tick_broadcast import Follower, Leader
from dora_jax.runtime.cluster.weight_publisher import Publisher
from dora_jax.runtime.cluster.worker_roles import RolloutRole
from dora_jax.runtime.coordinator import LocalWorld
from dora_jax.runtime.durability.event_log import Journal
from dora_jax.runtime.durability.file_log import FileLog
from dora_jax.runtime.durability.journal_audit import ReadOnly, audit
from dora_jax.runtime.durability.journaled_world import DurableWorld
from dora_jax.runtime.durability.payload_state import CODEC, Book, Fact, Partial
from dora_jax.runtime.idle_timer import Waits
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import Lent
from dora_jax.runtime.transfer.weight_distribution import STORAGE
from dora_jax.runtime.transfer.weight_receiver import Versions, WeightHost
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.runtime.workers import InstanceReady, TrainerWorker
from dora_jax.types import SampleId
from tests.fakes.cluster import LIMITS, FakeLauncher, eventually
from tests.test_runtime import SECTION, STEPS, G, P, Scorer, SlowEngine, Task, Trainer, Weights, expected, trained_by


class Pulse:
    """A Pulse whose beats are sent as they change."""

    def __init__(self, link):
        self.busy, self.waits, self._link, self._progress = False, Waits(), link, 0

    @property
    def progress(self):
        return self._progress

    @progress.setter
    def progress(self, value):
        self._progress = value
        self._link.send(messages.Beat(progress=value, busy=self.busy, waited_s=0.0))


class Wire:
    """The link from the first process of a gang to another, without a socket."""

    def __init__(self, turns):
        self._turns = turns

    def send(self, turn):
        self._turns.put(turn)


class Brought(Versions):
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

    def put(self, version, params):
        super().put(version, params)
        self._publisher.begin(version)
        self._publisher.tell(ex.Stored(version=version, there=True))

    def drop(self, version):
        super().drop(version)
        self._publisher.drop(version)


class Oracles(FakeLauncher):
    """Rollout gangs whose engines are arithmetic, over the weights of one store. `porter(instance, host)`: for KV."""

    def __init__(self, length, partial_s, porter):
        super().__init__(life=self.live_as_rollout)
        self.place = None  # where gangs that are left alone look for another controller
        self.engines = {}  # (gang, epoch) -> engines by rank
        self.imported = []  # parcels, by any engine
        self._partial_s, self._porter = partial_s, porter
        self.weights, self._length, self._turns = None, length, {}
        self._lock = threading.Lock()

    def live_as_rollout(self, host):
        host.join()
        if self.place is not None:
            host.link.wait_for_another(self.place, host.began.rank, 20.0)
        name = host._hello.gang, host._hello.epoch
        with self._lock:
            turns = self._turns.setdefault(name, queue.SimpleQueue())
            engines = self.engines.setdefault(name, {})
        engine = engines[host.began.rank] = SlowEngine(SECTION, length=self._length, version_in=int)
        engine.import_ = lambda parcel, then=engine.import_: (self.imported.append(parcel), then(parcel))
        led = [Wire(turns)] * (host.began.hosts - 1)
        weights = WeightHost(host.began.rank, None, Brought(), {}, self._read)
        role = RolloutRole(
            host.began,
            engine,
            weights,
            host.link,
            Pulse(host.link),
            Follower(turns) if host.began.rank else Leader(led),
            self._partial_s,
            self._porter(host.began.instance, host.began.rank),
        )
        host.ready()
        role.run(host.inbox)

    def _read(self, version, shardings):
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
        porter=lambda instance, host: Porter(instance, host, None, None),
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
        )
        self.folder, self.said = folder, []
        self._hosts, self._instances, self._mode = hosts, instances, mode
        length = length or (lambda version, group, index, limit: 60 if (group + index) % 5 == 0 else 2 + index % 5)
        self.launcher = Oracles(length, partial_s, porter)
        self.open()

    def new_roster(self):
        return Roster()

    def open(self, found=None):
        """A controller, on what the journal told it, if it told anything."""
        self.roster, self.outbox, self.remotes = self.new_roster(), queue.SimpleQueue(), {}
        self.hub = Hub("127.0.0.1", self.roster)
        self.publisher = Publisher(
            StoredWeights(self.folder.parent / "weights"), (STORAGE,), self.said.append, past=found is not None
        )
        self.weights = self.launcher.weights = Published(self.publisher)
        for i in range(self._instances):
            up = ev.InstanceUp(instance=i, slots=8, pages=96, page_size=8)
            self.remotes[i] = RemoteInstance(
                i, up, self.outbox, self.remotes, self.publisher, self._keeper(i), self.said.append
            )
        groups = MemoryGroupStore()
        self.orchestrator, self.book = (
            (found.orchestrator, found.book) if found else (Orchestrator(self.config), Book())
        )
        trainer = TrainerWorker(
            Trainer(), lambda groups, base: None, groups, self.weights, self.config.decisions.max_lag, self.outbox
        )
        self.world = LocalWorld(
            instances=list(self.remotes.values()),
            trainer=trainer,
            task=Task(),
            scorer=Scorer(mixed=self._mode == "partial"),
            groups=groups,
            weights=self.weights,
            outbox=self.outbox,
            group_size=G,
            eval_samples=2,
        )
        self.world.recall(self.book)
        self.records = []
        self.world.listen(self.records.append)
        self.durable = DurableWorld(self.world, Journal(FileLog(self.folder)), self.orchestrator, self.book)

    def run(self, observers=()):
        for remote in self.remotes.values():
            remote.open()
        self.world.start([])
        try:
            return run(self.orchestrator, self.durable, observers)
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

        return lambda name, **hooks: Keeper(
            self.hub,
            self.launcher,
            name,
            self._hosts,
            "",
            begin=begin,
            notify=self.said.append,
            limits=dataclasses.replace(LIMITS, restarts=20),
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
            if world.remotes[instance]._gang is not None:  # a gang that never comes up ends the run
                struck.append(instance)
                blow(draw.choice(world.hosts(instance)))

    return strike, struck


@pytest.mark.parametrize("mode, max_versions", [("dora", 3), ("partial", 2), ("sync", 1)])
def test_a_run_over_gangs_is_a_run(tmp_path, mode, max_versions):
    world = World(tmp_path / "journal", mode, max_versions)
    check(world, world.run())
    for engines in world.launcher.engines.values():
        eventually(lambda: not engines[1]._samples)  # the second process did what the first did
        assert engines[0].versions == engines[1].versions


@pytest.mark.parametrize("mode, max_versions, seed", [("dora", 3, 0), ("dora", 2, 2), ("partial", 2, 3)])
def test_gangs_that_are_killed_lose_nothing_and_repeat_nothing(tmp_path, mode, max_versions, seed):
    world = World(tmp_path / "journal", mode, max_versions)
    killer, kills = at_random(world, seed, lambda host: host.die())
    check(world, world.run([killer]))
    lost = [text for text in world.said if "is lost" in text]
    assert len(kills) > 1 and lost, (kills, world.said)


def test_samples_of_a_lost_gang_go_on_from_their_tokens(tmp_path):
    world = World(tmp_path / "journal", length=lambda version, group, index, limit: 60, instances=2)
    begun, seen = set(), []

    def note(record):
        if isinstance(record, Partial) and record.id in begun and not seen:
            seen.append(record)
            world.hosts(0)[1].die()

    def watch(event, commands):
        if isinstance(event, ev.SampleStarted) and event.instance == 0:
            begun.add(event.id)

    world.world.listen(note)
    check(world, world.run([watch]))
    resumed = [event for event in events(world.folder) if isinstance(event, ev.SampleResumed)]
    assert seen and resumed


def entries(folder):
    journal = Journal(ReadOnly(folder))
    return [CODEC.decode(data) for n in journal.segments() for data in journal.read(n).records]


def events(folder):
    return [entry.event for entry in entries(folder) if isinstance(entry, Fact)]


# ---------------------------------------------------------- one stand-in


class Nobody:
    """A keeper that keeps nothing; the test plays the gang."""

    def __init__(self, name, **hooks):
        self.hooks = hooks

    def close(self):
        pass


class Publishing:
    """A publisher that nobody asks anything."""

    def up(self, gang):
        pass

    def down(self, gang):
        pass

    def recognise(self, gang):
        return False


class Posted:
    def __init__(self, epoch=1):
        self.epoch, self.posts, self.reason, self.waited_s, self.hosts = epoch, [], "killed", 0.0, 2
        self.dead = threading.Event()

    def post(self, what):
        self.posts.append(what)

    tell_all = post

    def tell_each(self, what):
        self.posts += what


@pytest.fixture
def pair():
    """Two stand-ins whose gangs are up: (remotes, gangs, outbox)."""
    outbox, remotes, said = queue.SimpleQueue(), {}, []
    for i in range(2):
        up = ev.InstanceUp(instance=i, slots=8, pages=96, page_size=8)
        remotes[i] = RemoteInstance(i, up, outbox, remotes, Publishing(), Nobody, said.append)
    gangs = [rise(remotes[i], outbox) for i in range(2)]
    gangs[1].said = said
    return remotes, gangs, outbox


def rise(remote, outbox, epoch=1):
    gang = Posted(epoch)
    remote._keeper.hooks["up"](gang)
    item = outbox.get_nowait()
    assert isinstance(item, InstanceReady)
    item.admit()
    return gang


def drained(outbox):
    items = []
    while not outbox.empty():
        items.append(outbox.get())
    return items


A = SampleId(3, 1)
PARCEL = InFlightSample(
    id=A,
    version=0,
    prompt_ids=np.zeros(1, np.int32),
    out_ids=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    max_new_tokens=9,
)


def test_commands_reach_a_gang_only_after_its_coming_was_heard(pair):
    remotes, gangs, outbox = pair
    remotes[0]._keeper.hooks["down"](gangs[0])
    again = Posted(2)
    remotes[0]._keeper.hooks["up"](again)
    remotes[0].cancel(A, "meant for the lost one")
    down, risen = drained(outbox)
    assert isinstance(down, ev.InstanceDown)
    risen.admit()
    remotes[0].cancel(A, "meant for this one")
    assert [post.reason for post in again.posts] == ["meant for this one"] and not gangs[0].posts


def test_a_move_out_of_a_lost_gang_fails_right_behind_its_loss(pair):
    remotes, gangs, outbox = pair
    remotes[0].move(A, remotes[1], 1)
    remotes[0]._keeper.hooks["down"](gangs[0])
    down, failed = drained(outbox)
    assert isinstance(down, ev.InstanceDown) and (failed.id, failed.src, failed.dst) == (A, 0, 1)
    remotes[0].move(A, remotes[1], 1)  # asked for before the orchestrator has heard
    assert isinstance(drained(outbox)[0], ev.MoveFailed)


def moving(number=1, host=0, hosts=1, manifest=None):
    lent = Lent(parcel=PARCEL, kv_len=0, page_size=0, manifest=manifest)
    return messages.Moving(lent=lent, src=0, dst=1, attempt=1, number=number, host=host, hosts=hosts)


def test_a_sample_on_its_way_to_a_lost_gang_counts_as_moved(pair):
    remotes, gangs, outbox = pair
    remotes[0].move(A, remotes[1], 1)
    remotes[0]._keeper.hooks["heard"](moving())
    assert isinstance(gangs[1].posts[-1], messages.Receive)
    remotes[1]._keeper.hooks["down"](gangs[1])
    down, moved = drained(outbox)
    assert isinstance(down, ev.InstanceDown) and (moved.id, moved.dst) == (A, 1)


def test_a_sample_is_not_handed_to_a_later_epoch_of_its_destination(pair):
    remotes, gangs, outbox = pair
    remotes[0].move(A, remotes[1], 1)
    remotes[1]._keeper.hooks["down"](gangs[1])
    drained(outbox)
    later = rise(remotes[1], outbox, 2)
    remotes[0]._keeper.hooks["heard"](moving())
    assert not later.posts and isinstance(drained(outbox)[0], ev.SampleMoved)


def test_a_move_that_arrives_is_owed_no_more(pair):
    remotes, gangs, outbox = pair
    remotes[0].move(A, remotes[1], 1)
    remotes[0]._keeper.hooks["heard"](moving())
    remotes[1]._keeper.hooks["heard"](ev.SampleMoved(id=A, src=0, dst=1, attempt=1))
    for i in (0, 1):
        remotes[i]._keeper.hooks["down"](gangs[i])
    assert [type(item) for item in drained(outbox)] == [ev.SampleMoved, ev.InstanceDown, ev.InstanceDown]
