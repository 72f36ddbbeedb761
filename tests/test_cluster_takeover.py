"""A controller is killed, its gangs live on, the next one takes them over: threads stand for processes."""

import queue
import random
import subprocess
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.publish import HostWeights
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import HeartbeatSender, Turns
from dora_jax.runtime.cluster.gang import Gang, GangListener
from dora_jax.runtime.cluster.launch_process import ProcessLauncher, Ticket, run_of_token
from dora_jax.runtime.cluster.run_registry import RunRegistry, address_in
from dora_jax.runtime.cluster.sample_transfer import TransferThreads
from dora_jax.runtime.cluster.step_cache import StepCache
from dora_jax.runtime.cluster.worker_roles import TrainerRole
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.object_storage import ROSTER, Objects
from dora_jax.runtime.journal.recovery import recover
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from tests.fakes.cluster import LIMITS, FakeHost, begin, eventually
from tests.fakes.cluster_world import World, events
from tests.fakes.coordinator_world import STEPS, P, SlowEngine, expected, trained_by
from tests.fakes.oracle import OracleEngine

IDLE = TickResult(started=(), finished=(), progress={}, tokens=0, free_pages=0)


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.cluster.connection.LOOK_S", 0.02)


class MortalRegistry(RunRegistry):
    """Writes nothing once its controller is dead."""

    dead = False

    def enter(self, *args):
        return None if self.dead else super().enter(*args)

    def strike(self, *args):
        return None if self.dead else super().strike(*args)

    def close(self):
        return None if self.dead else super().close()


class Incarnations(World):
    """One workdir and the controllers that came after each other."""

    def __init__(self, folder, *args, **options):
        super().__init__(folder, *args, **options)
        StoredWeights(folder.parent).clear()
        self.launcher.place = str(folder.parent)
        self.received = []  # by all controllers

    def new_roster(self):
        return MortalRegistry(str(self.folder.parent), "this build")

    def incarnation(self, kill=lambda event: False, found=None, trusted=True):
        """Halt, or None where the controller was killed at a fact."""
        if found is not None:
            self.launcher.spares = False
            self.trusted = trusted
            self.open(found)
            self.weights.held.clear()
            for version in found.outstanding.versions:
                self.weights.put(version, None)
            self.world.adopt(found.outstanding, found.payloads, found.orchestrator.state.now_s)
            self.publisher.settle()
        self.roster.announce(self.hub.address)

        def killer(event, commands):
            if kill(event):
                self.roster.announce("127.0.0.1:1")  # its door is shut before any of its connections ends
                self.launcher.spares = self.roster.dead = True
                self.log.close()
                self.durable.close = lambda: None
                raise Killed

        try:
            return self.run([killer])
        except Killed:
            return None
        finally:
            self.received += self.records

    def again(self, kill=lambda event: False, trusted=True):
        found = recover(
            EventLog(FileLogStore(self.folder, read_only=True)), self.config, [0], lambda v: True, self.notes.append
        )
        return self.incarnation(kill, found, trusted)

    def check(self, halt):
        assert halt.ok, halt
        for base, group in trained_by(self.received):
            for sample in group.samples:
                np.testing.assert_array_equal(sample.out_ids, expected(sample))
        books = audit(self.folder)
        assert books.ok and books.trained == STEPS * P, books


def counted(kind, n):
    seen = []

    def kill(event):
        seen.extend([event] if isinstance(event, kind) else [])
        return len(seen) == n

    return kill


@pytest.mark.parametrize(
    "mode, max_versions, seed", [("dora", 3, 0), ("partial", 2, 1), ("sync", 1, 2), ("dora", 2, 3)]
)
def test_gangs_go_on_and_the_next_controller_takes_them_over(tmp_path, mode, max_versions, seed):
    draw, incarnations = random.Random(seed), Incarnations(tmp_path / "journal", mode, max_versions)
    halt = incarnations.incarnation(counted(ev.SampleDone, draw.randrange(2, 20)))
    for _ in range(4):
        if halt is None:
            time.sleep(draw.choice([0.0, 0.1]))
            halt = incarnations.again(counted(ev.SampleDone, draw.randrange(2, 20)))
    incarnations.check(halt or incarnations.again())
    assert {epoch for _, epoch in incarnations.launcher.gangs} == {1}, incarnations.notes


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_was_sampled_while_nobody_listened_is_kept(tmp_path, hosts, monkeypatch):
    """Also with a journal that holds no token."""
    released = threading.Event()

    def tick(engine):
        time.sleep(0.002)
        long_ones = not any(id.index % 2 for id in engine.samples)
        return OracleEngine.tick(engine) if released.is_set() or not long_ones else IDLE  # these do not end

    monkeypatch.setattr(SlowEngine, "tick", tick)
    incarnations = Incarnations(
        tmp_path / "journal",
        length=lambda version, group, index, limit: (60, 8, 60, 32)[index],
        instances=1,
        partial_s=1e9,
        hosts=hosts,
    )
    assert (
        incarnations.incarnation(counted(ev.SampleDone, 2)) is None
    )  # by then the journal knows of all that has started
    started = {event.id for event in events(incarnations.folder) if isinstance(event, ev.SampleStarted)}
    incarnations.launcher.imported.clear()
    engines = [engine for each in incarnations.launcher.engines.values() for engine in each.values()]
    eventually(lambda: not any(id.index == 3 for engine in engines for id in engine.samples))
    incarnations.check(incarnations.again(lambda event: isinstance(event, ev.SampleResumed) and released.set()))
    imported = {in_flight.id: in_flight for in_flight in reversed(incarnations.launcher.imported)}
    resumed = {event.id for event in events(incarnations.folder) if isinstance(event, ev.SampleResumed)}
    assert resumed - imported.keys(), "one has ended alone, and is only reported"
    went_on = [imported[id] for id in resumed & started & imported.keys()]
    assert went_on and all(len(in_flight.out_ids) for in_flight in went_on)
    assert any(in_flight.kv_len for in_flight in went_on)  # its pages had stayed where it came back to


def test_a_gang_whose_process_ended_meanwhile_is_begun_anew_and_the_others_are_taken_over(tmp_path):
    incarnations = Incarnations(tmp_path / "journal")
    assert incarnations.incarnation(counted(ev.SampleDone, 9)) is None
    eventually(lambda: incarnations.hosts(1)[0].link.alone)
    incarnations.hosts(1)[0].done.set()
    incarnations.launcher.gangs["rollout 1", 1].pop()
    incarnations.check(incarnations.again())
    assert set(incarnations.launcher.gangs) == {("rollout 0", 1), ("rollout 1", 1), ("rollout 1", 2), ("rollout 2", 1)}
    assert "rollout 1 (epoch 1) is not taken over: it has ended" in incarnations.notes


def test_gangs_of_another_build_are_ended_and_begun_anew(tmp_path, monkeypatch):
    incarnations = Incarnations(tmp_path / "journal")
    assert incarnations.incarnation(counted(ev.SampleDone, 9)) is None
    monkeypatch.setattr(Incarnations, "new_roster", lambda self: RunRegistry(str(self.folder.parent), "another build"))
    incarnations.check(incarnations.again())
    assert {epoch for _, epoch in incarnations.launcher.gangs} == {1, 2}
    assert incarnations.launcher.killed.count(("rollout 0", 1)) == 1 and any(
        "by other code" in text for text in incarnations.notes
    )


def test_without_the_trainer_of_before_nothing_but_the_processes_is_used(tmp_path):
    """A trainer that is made again may come to other weights: what gangs hold and have sampled is left."""
    incarnations = Incarnations(
        tmp_path / "journal", length=lambda version, group, index, limit: 9 if index == 1 else 60, partial_s=1e9
    )
    assert incarnations.incarnation(counted(ev.SampleDone, 2)) is None
    started = [event.id for event in events(incarnations.folder) if isinstance(event, ev.SampleStarted)]
    incarnations.launcher.imported.clear()
    incarnations.check(incarnations.again(trusted=False))
    assert {epoch for _, epoch in incarnations.launcher.gangs} == {1}
    again = {in_flight.id: len(in_flight.out_ids) for in_flight in reversed(incarnations.launcher.imported)}
    assert again.keys() & set(started) and not any(again[id] for id in again.keys() & set(started))


# ---------------------------------------------------------------- parts


class Half(TrainerRole):
    """One process of a trainer of two: what it is asked for ends once both are at it, as a collective does."""

    def __init__(self, host, turns, both):
        self._link, self._status, self._turns, self._both = host.link, HeartbeatSender(host.link), turns, both
        self._transfers = TransferThreads(WeightEndpoint(host.began.rank, None, HostWeights()), host.link)
        self._checkpoints, self._cache, self._lent = None, StepCache(), None

    def _answer(self, what):
        self._both.wait(20)
        return messages.Done(value=1)


def halves(hub, place, both):
    """The two processes of a trainer, at work."""
    shared = queue.SimpleQueue()
    follower = SimpleNamespace(send=shared.put)

    def incarnation(host):
        host.join()
        host.link.wait_for_another(place, host.began.rank, 20.0)
        host.ready()
        Half(host, Turns([], shared) if host.began.rank else Turns([follower]), both).run(host.inbox)

    return [FakeHost(hub.ticket("trainer", 4), rank, None, incarnation) for rank in (0, 1)]


def formed(hub, again):
    gang = Gang("trainer", 4, 2, lambda item: None, lambda text: None, LIMITS, again=again)
    hub.expect(gang)
    gang.form(begin)
    return gang


@pytest.mark.parametrize("reached", [(), (0,), (1,), (0, 1)])
def test_a_step_that_is_on_its_way_to_some_of_the_processes_does_not_keep_the_next_controller_out(tmp_path, reached):
    """`reached`: the processes that the killed controller's bytes came to."""
    roster, both = RunRegistry(str(tmp_path), "build"), threading.Barrier(2)
    hub = GangListener("127.0.0.1", roster)
    gang = formed(hub, again=False)
    hosts = halves(hub, str(tmp_path), both)
    eventually(gang.ready.is_set)
    for rank, host in enumerate(gang.processes):
        if rank not in reached:
            host.link.send = lambda record: None
    gang.cast(messages.PublishWeights(version=1))
    time.sleep(0.2)  # until what comes has come
    roster.announce("127.0.0.1:1")
    hub.close()
    for host in gang.processes:
        host.link.close("killed")
    eventually(lambda: all(host.link.alone for host in hosts))

    roster = RunRegistry(str(tmp_path), "build")
    hub = GangListener("127.0.0.1", roster)
    gang = formed(hub, again=True)
    roster.announce(hub.address)
    eventually(gang.ready.is_set)
    assert not gang.dead.is_set()
    hub.close()


def test_a_gang_of_which_one_process_does_not_come_back_is_ended_soon(monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.cluster.gang.RETURN_S", 0.3)
    hub = GangListener("127.0.0.1", RunRegistry())
    gang = Gang("trainer", 4, 2, lambda item: None, lambda text: None, LIMITS, again=True)
    hub.expect(gang)
    hosts = [FakeHost(hub.ticket("trainer", 4), rank, None, lambda host: host.join()) for rank in (0, 1)]
    gang.form(begin)
    eventually(lambda: all(isinstance(host.began, messages.Rejoin) for host in hosts))
    time.sleep(0.4)
    assert gang.fault() is None, "both may be at work"
    hosts[1].ready()
    eventually(lambda: "2 of 2 processes came, 1 were ready" in (gang.fault() or ""))
    hub.close()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_that_ends_itself_leaves_nobody_waiting(tmp_path, scheme):
    place = f"{scheme}{tmp_path}"
    roster = RunRegistry(place, "build")
    roster.announce("127.0.0.1:9")
    assert address_in(place) == "127.0.0.1:9" and (scheme or (tmp_path / ROSTER).stat().st_mode & 0o77 == 0)
    roster.enter("trainer", 3, (7, 8))
    again = RunRegistry(place, "build")
    assert (
        again.fits
        and again.authority.pem == roster.authority.pem
        and again.incarnation == roster.incarnation + 1
        and again.left["trainer"].pids == (7, 8)
    )
    roster.close()
    assert address_in(place) is None


def test_a_storage_that_refuses_is_spoken_of_and_stops_no_keeper(tmp_path):
    notes = []
    roster = RunRegistry(str(tmp_path), "build", notes.append)
    roster.announce("127.0.0.1:9")

    in_its_way = tmp_path / f".{ROSTER}.partial"
    in_its_way.mkdir()
    roster.enter("trainer", 3, (7, 8))
    in_its_way.rmdir()
    assert len(notes) == 1 and "is not up to date" in notes[0] and RunRegistry(str(tmp_path), "build").left == {}
    roster.strike("rollout 0")  # whatever is written next says all of it
    assert RunRegistry(str(tmp_path), "build").left.keys() == {"trainer"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"gangs": {}}',
        '{"authority": "x", "gangs": {}}',
        '{"token": 3}',
        '{"token": "00", "gangs": {"a": 3}}',
    ],
)
def test_what_no_controller_has_written_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / ROSTER).write_text(text)
    with pytest.raises(ConfigError, match=f"{ROSTER} is not what a controller writes"):
        RunRegistry(str(tmp_path), "build")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_of_weights_from_before_what_is_live_is_kept(tmp_path, scheme):
    stored = StoredWeights(f"{scheme}{tmp_path}")
    stored.clear()
    for version in (1, 2, 3):
        stored.put(version, slices.offered({"w": jnp.full(2, version)}))
        if version != 3:
            stored.seal(version)

    def names():
        return {key.split("/")[1] for key in Objects(f"file://{tmp_path}").keys("weights")}

    all_of_them = {"v1", "v1.whole", "v2", "v2.whole", "v3"}
    eventually(lambda: names() == all_of_them)
    stored = StoredWeights(f"{scheme}{tmp_path}")  # of the next controller
    stored.look()
    stored.keep_only([2, 3])
    assert stored.versions == (2,)
    eventually(lambda: names() == all_of_them - {"v1", "v1.whole"})
    stored.clear()  # the trainer was not to be had
    assert stored.versions == () and names() == set()


@pytest.mark.parametrize("environ", [lambda run, token: {"DORA_RUN": run}, lambda run, token: {"DORA_TOKEN": token}])
def test_a_process_is_ended_by_its_number_only_where_it_is_of_this_run(tmp_path, environ):
    """Numbers are given again."""
    processes = ProcessLauncher(tmp_path, "run")
    ticket = Ticket(run=run_of_token("mine"), controller="", gang="trainer", epoch=1, credential="")
    child = subprocess.Popen(["sleep", "60"], env=environ(ticket.run, "mine"))
    other = subprocess.Popen(["sleep", "60"], env=environ("another", "another"))
    try:
        eventually(lambda: processes.find(ticket, 1, "", [child.pid]) is not None)
        found = processes.find(ticket, 1, "", [child.pid])
        assert found.ended() is None
        assert processes.find(ticket, 2, "", [child.pid, other.pid]) is None  # one is gone: so is the gang
        assert child.wait(10) == -9 and found.ended() is not None and other.poll() is None
    finally:
        child.kill()
        other.kill()
