"""Samples that move between gangs: their KV goes from process to process, and where it cannot, their tokens go on."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, holders_alike, observed, parted, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.sample_transfer import KVEndpoint, MoveDestination, ResultSender
from dora_jax.runtime.common.worker import Exported, Finished, ForgetSample, InstanceReady
from dora_jax.types import SampleId
from tests.fakes.cluster import eventually
from tests.fakes.cluster_world import OFFER, Porters, World
from tests.fakes.coordinator_world import Task, expected
from tests.fakes.engine_rig import LAYOUT, assert_undisturbed, bits, finish, loaded, taken_out
from tests.fakes.remote_pair import MOVE, REQUEST, A, drained, moving, new_pair, rise
from tests.fakes.wire_peer import new_wire


@pytest.fixture
def pair():
    return new_pair()


# ---------------------------------------------------------- a whole run


class Driver:
    """Two gangs without an orchestrator: whatever runs is moved to the other one as soon as it has arrived."""

    def __init__(self, world, samples):
        self.world, self.samples, self.left = world, samples, set(samples)
        self.where, self.moves, self.done, self.loaded = {}, 0, {}, set()
        self.moving = {}  # and which incarnation of instance 1 it was then
        self.incarnations, self.there = 0, False

    def run(self, kill_after=None):
        for remote in self.world.remotes.values():
            remote.supervisor.start()
        while self.left:
            self._hear(self.world.outbox.get(timeout=30))
            if kill_after is not None and self.moves >= kill_after:
                kill_after = None
                self.world.hosts(1)[1].die()
        for remote in self.world.remotes.values():
            remote.stop()
        self.world.publisher.close()
        self.world.hub.close()

    def _hear(self, item):
        remotes = self.world.remotes
        match item:
            case InstanceReady():
                item.admit()
                remotes[item.event.instance].send(ev.LoadWeights(instance=item.event.instance, version=0))
            case ev.WeightsLoaded(instance=instance):
                self.loaded.add(instance)
                self.there |= instance == 1  # a sample moves to an instance that holds its version, as in a run
                if len(self.loaded) == 2 and not self.where:
                    for id in self.samples:
                        self._submit(id)
            case ev.SampleStarted(id=id):
                self._move(id)
            case ev.SampleMoved(id=id, dst=dst):
                self.moves += 1
                lost = dst == 1 and self.moving[id] < self.incarnations  # it had left for an earlier incarnation
                del self.moving[id]
                self.where[id] = dst
                if lost:
                    self._submit(id)
                else:
                    self._move(id)
            case ev.MoveFailed(id=id, reason="its instance is lost"):
                self._submit(id)
            case ev.InstanceDown(instance=1):
                self.incarnations, self.there = self.incarnations + 1, False
                for id in [id for id in self.left - set(self.moving) if self.where[id] == 1]:
                    self._submit(id)
            case Finished(sample=sample):
                self.done[sample.id] = sample
                self.left.discard(sample.id)
                self.moving.pop(sample.id, None)

    def _submit(self, id):
        self.moving.pop(id, None)
        self.where[id] = 0
        self.world.remotes[0].send(ev.Start(ids=(id,), instance=0, version=0, attempt=1), PROMPT)

    def _move(self, id):
        src, dst = self.where[id], 1 - self.where[id]
        if src == 1 or self.there:
            self.moving[id] = self.incarnations
            move = ev.Move(ids=(id,), src=src, dst=dst, attempt=self.incarnations)
            self.world.remotes[src].send(move, dst=self.world.remotes[dst])


PROMPT = Task().prompt_at(0)
RESUME = ev.Resume(ids=(A,), instance=1, version=0, attempt=1)
IDS = [SampleId(group, index) for group in range(2) for index in range(4)]


@pytest.mark.parametrize("share, kill_after", [(0.0, None), (0.4, None), (0.2, 6)])
def test_kv_that_comes_and_kv_that_does_not_change_no_token(tmp_path, share, kill_after):
    """The engines refuse KV that is not the sample's own at its version."""
    porters = Porters(share)
    world = World(tmp_path / "journal", instances=2, porter=porters, length=lambda *_: 60)
    driver = Driver(world, IDS)
    driver.run(kill_after)
    for sample in driver.done.values():
        np.testing.assert_array_equal(sample.out_ids, expected(sample))
    notes = [text for text in world.notes if "did not reach" in text]
    assert set(driver.done) == set(IDS) and driver.moves > 5 and porters.taken, (driver.moves, porters.taken)
    assert share or not notes, world.notes
    if kill_after is None:
        assert bool(notes) == bool(share), world.notes
        eventually(lambda: not porters.offered)
        eventually(lambda: not any(porter.here for porter in porters.all))  # what was fetched was taken or left


@pytest.fixture
def carried(pair):
    """The pair, with a sample on its way whose KV both processes of its source offer: (..., its number)."""
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    number = gangs[0].posts[-1].number
    for host in (1, 0):
        assert not gangs[1].posts, "every process speaks of its part first"
        remotes.tell(0, "on_message", moving(number, host, 2, OFFER))
    stages, gangs[1].posts = gangs[1].posts, []
    assert [(type(stage), stage.number, stage.epoch) for stage in stages] == [(messages.StageKV, number, 1)] * 2
    return remotes, gangs, outbox, number


def answer(remotes, number, host, fault=""):
    remotes.tell(1, "on_message", messages.KVStaged(number=number, host=host, fault=fault))


def reported_late(remotes, outbox, number):
    """What the next gang of instance 1 receives where the last answer for KV of the lost one comes to it."""
    drained(outbox)
    later = rise(remotes, 1, outbox, 2)
    answer(remotes, number, 1)
    return later.posts


def test_kv_is_taken_once_every_process_has_its_part(carried):
    remotes, gangs, _outbox, number = carried
    answer(remotes, number, 1)
    assert not gangs[1].posts
    answer(remotes, number, 0)
    (receive,) = gangs[1].posts
    assert (receive.what, receive.number) == (MOVE, number) and not gangs[1].notes
    assert gangs[0].posts[-1] == messages.ReleaseKV(number=number)


def test_where_one_process_cannot_fetch_its_part_all_make_the_kv_again(carried):
    remotes, gangs, _outbox, number = carried
    answer(remotes, number, 0)
    answer(remotes, number, 1, "process 1: the peer is gone")
    receive, leave = gangs[1].posts
    assert (receive.what, receive.number, leave) == (MOVE, 0, messages.ReleaseKV(number=number))
    assert gangs[0].posts[-1] == messages.ReleaseKV(number=number)
    assert gangs[1].notes == [
        "the KV of sample (3, 1) did not reach rollout 1, where it is made again: process 1: the peer is gone"
    ]


def test_kv_on_its_way_to_a_gang_that_is_lost_is_given_back(carried):
    remotes, gangs, outbox, number = carried
    answer(remotes, number, 0)
    remotes.tell(1, "down", gangs[1])
    down, moved = drained(outbox)
    assert isinstance(down, ev.InstanceDown) and (moved.id, moved.dst) == (A, 1)
    assert gangs[0].posts[-1] == messages.ReleaseKV(number=number)
    remotes[0].send(MOVE, dst=remotes[1])
    again = gangs[0].posts[-1].number
    for host in (0, 1):
        remotes.tell(0, "on_message", moving(again, host, 2, OFFER))
    assert gangs[0].posts[-1] == messages.ReleaseKV(number=again), "nobody is there to fetch it"
    assert not reported_late(remotes, outbox, number)


def test_a_source_that_is_lost_before_all_of_it_has_spoken_has_moved_nothing(pair):
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    number = gangs[0].posts[-1].number
    remotes.tell(0, "on_message", moving(number, 1, 2, OFFER))
    remotes.tell(0, "down", gangs[0])
    _down, failed = drained(outbox)
    assert isinstance(failed, ev.MoveFailed)
    rise(remotes, 0, outbox, 2)
    remotes.tell(0, "on_message", moving(number, 0, 2, OFFER))
    assert not gangs[1].posts, "the other part is forgotten"


def test_a_sample_without_kv_is_handed_over_at_once(pair):
    remotes, gangs, _outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    number = gangs[0].posts[-1].number
    for host in (0, 1):
        remotes.tell(0, "on_message", moving(number, host, 2))
    assert [(post.what, post.number) for post in gangs[1].posts] == [(MOVE, 0)]


# ---------------------------------------------------------- the wire


@pytest.fixture(scope="module")
def porters():
    """The KV endpoints of the first processes of instances 0 and 1."""
    return [KVEndpoint(i, 0, new_wire(role=f"rollout {i}", incarnation=2), LAYOUT) for i in (0, 1)]


def offered(porters, in_flight, number, epoch=2):
    what = ev.Move(ids=(in_flight.id,), src=0, dst=1, attempt=1)
    move = messages.Command(what=what, number=number, epoch=epoch)
    offered = messages.CODEC.decode(messages.CODEC.encode(porters[0].offer(in_flight, move)))
    return messages.StageKV(number=number, epoch=2, offered=offered)


@pytest.mark.slow
def test_pages_go_from_process_to_process_and_the_sample_as_if_it_had_stayed(porters):
    id = SampleId(3, 1)
    in_flight = taken_out(id)
    assert porters[1].stage(offered(porters, in_flight, 7)) == messages.KVStaged(number=7, host=0, fault="")
    porters[0].release(7)
    got = porters[1].take(7)
    assert bits(got.k_pages) == bits(in_flight.k_pages) and bits(got.v_pages) == bits(in_flight.v_pages)
    with loaded("small") as small:
        small.import_(got)
        assert_undisturbed(finish(small)[id])
    with pytest.raises(KeyError):
        porters[1].take(7)


def test_kv_of_another_epoch_is_not_fetched_and_what_is_left_is_gone(porters):
    in_flight = taken_out(SampleId(3, 1))
    carried = porters[1].stage(offered(porters, in_flight, 8, epoch=1))
    assert "process 0: version 0 for rollout 1/0 (epoch 1, transfer 8) is offered where" in carried.fault
    porters[0].release(8)
    porters[0].release(8)
    assert porters[1].stage(offered(porters, in_flight, 9)).fault == ""
    porters[1].release(9)
    with pytest.raises(KeyError):
        porters[1].take(9)


def test_a_sample_that_has_no_kv_yet_needs_no_wire(porters):
    carry = offered(porters, without_pages(taken_out(SampleId(2, 0))), 10)
    assert carry.offered.manifest is None


# ---------------------------------------------------------- one process of several


class Sent(list):
    send = list.append


def with_pages(host, heads=1):
    """The tokens of REQUEST; every head's pages hold its number."""
    k = np.full((1, 2, heads, 3, 4), 1.0, ml_dtypes.bfloat16)
    k *= np.arange(host * heads, (host + 1) * heads)[:, None, None]
    return dataclasses.replace(REQUEST, kv_len=7, page_size=4, k_pages=k, v_pages=k.swapaxes(3, 4))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_process_that_holds_a_part_of_the_pages_sends_none(hosts):
    outlet = ResultSender(sent := Sent(), 0, hosts)
    outlet.put(Exported(instance=0, in_flight=with_pages(0)))
    move = messages.Command(what=MOVE, number=1, epoch=1)
    MoveDestination(move, outlet, KVEndpoint(0, 0, None, None)).send(MOVE, with_pages(0))
    assert [bool(in_flight.n_pages) for in_flight in (sent[0].in_flight, sent[1].offered.in_flight)] == [hosts == 1] * 2
    other = ResultSender(silent := Sent(), 1, 2)
    other.put(sent[0])
    assert not silent, "the first process speaks for both"


def test_kv_of_an_episode_that_waits_stays_in_its_process():
    """It meets the tokens again when they come back with what was observed; a controller in between needs no more."""
    outlet = ResultSender(sent := Sent(), 0, 1)
    turn = dataclasses.replace(with_pages(0), turn_tokens=9)
    outlet.put(Exported(in_flight=turn, instance=0, waits=True))
    (waiting,) = (messages.CODEC.decode(messages.CODEC.encode(item)) for item in sent)
    assert not waiting.in_flight.n_pages and waiting.in_flight.turn_tokens == 9
    back = outlet.with_own_pages(observed(waiting.in_flight, np.array([5, 6])))
    assert back.kv_len == 7 and bits(back.k_pages) == bits(turn.k_pages) and back.out_ids[-2:].tolist() == [5, 6]
    outlet.put(Exported(in_flight=turn, instance=0, waits=True))
    other = dataclasses.replace(waiting.in_flight, version=turn.version + 1)
    assert not outlet.with_own_pages(other).n_pages, "KV of another version"
    received = outlet.recall(lambda: outlet.put(Exported(in_flight=turn, instance=0, waits=True)))
    assert [type(item) for item in received] == [InFlightSample] and not received[0].n_pages


def test_kv_that_a_gang_keeps_is_made_again_at_another_and_reported(pair):
    remotes, gangs, _ = pair
    for _ in range(9):
        remotes[0].send(RESUME, REQUEST, remotes[1])
    assert gangs[0].posts == [messages.Command(what=ForgetSample(id=A))] * 9
    assert gangs[1].posts == [messages.Command(what=RESUME, payload=REQUEST)] * 9 and not REQUEST.n_pages
    assert gangs[1].notes == [
        "sample (3, 1) leaves rollout 0, which kept its KV, and is prefilled again (1 samples so far)"
    ]
    remotes[0].send(ForgetSample(id=A))
    assert messages.CODEC.decode(messages.CODEC.encode(gangs[0].posts[-1])).what == ForgetSample(id=A)


# ------------------------------------------- with notice: by the controller


@pytest.fixture
def handed(pair):
    """The pair; a sample of the first one is handed over by both of its processes. (..., what the controller has)"""
    remotes, gangs, outbox = pair
    for host in (1, 0):
        assert not drained(outbox), "every process gives its part first"
        outlet = ResultSender(sent := Sent(), host, 2)
        outlet.put(with_pages(host, 2))
        outlet.leave()
        part, left = (messages.CODEC.decode(messages.CODEC.encode(item)) for item in sent)
        assert left == messages.HandOverDone(hosts=2)
        remotes.tell(0, "on_message", part)
    (handed,) = drained(outbox)
    return remotes, gangs, outbox, handed


def test_a_sample_of_a_gang_that_leaves_goes_on_with_all_of_its_pages(handed):
    remotes, gangs, _outbox, in_flight = handed
    assert in_flight.k_pages.shape == (1, 2, 4, 3, 4) and in_flight.v_pages.shape == (1, 2, 4, 4, 3)
    remotes[1].send(RESUME, in_flight)
    porters = [KVEndpoint(1, host, None, None) for host in range(2)]
    brought, gangs[1].posts = gangs[1].posts, []
    carried = [
        porter.stage(messages.CODEC.decode(messages.CODEC.encode(each)))
        for porter, each in zip(porters, brought, strict=True)
    ]
    remotes[1].send(ev.Cancel(ids=(A,), instance=1, reason="its group failed"))  # which it may be at any time
    answer(remotes, carried[1].number, 1)
    assert not gangs[1].posts, "every process has its part first"
    answer(remotes, carried[0].number, 0)
    go_on, give_up = gangs[1].posts
    assert (go_on.payload.n_pages, go_on.number, type(give_up.what)) == (0, carried[0].number, ev.Cancel)
    for host, porter in enumerate(porters):
        assert bits(porter.take(go_on.number).k_pages) == bits(with_pages(host, 2).k_pages)


def test_a_head_that_several_processes_hold_is_carried_once(pair):
    """Two processes, one KV head: the in_flight has it once, and each process of the next gang gets it."""
    remotes, _gangs, outbox = pair
    for host in range(2):
        ResultSender(sent := Sent(), host, 2, holders_alike(2, 1)).put(with_pages(0))
        remotes.tell(0, "on_message", sent[0])
    (handed,) = drained(outbox)
    assert bits(handed.k_pages) == bits(with_pages(0).k_pages)
    parts = parted(handed, 4)
    assert [bits(part.v_pages) for part in parts] == [bits(with_pages(0).v_pages)] * 4
    assert [part.k_pages[0, 0, 0, 0, 0] for part in parted(with_pages(0, 2), 4)] == [0, 0, 1, 1]


def test_pages_on_their_way_to_a_gang_that_is_lost_are_forgotten(handed):
    remotes, gangs, outbox, in_flight = handed
    remotes[1].send(RESUME, in_flight)
    number = gangs[1].posts[-1].number
    answer(remotes, number, 0)
    remotes.tell(1, "down", gangs[1])
    assert isinstance(drained(outbox)[0], ev.InstanceDown)
    before = len(gangs[1].posts)
    remotes[1].send(RESUME, in_flight)  # asked for before the orchestrator knows
    assert len(gangs[1].posts) == before and not reported_late(remotes, outbox, number)


@pytest.mark.parametrize("hosts", [1, 2])
def test_kv_that_is_more_than_a_record_holds_stays_behind(monkeypatch, hosts):
    monkeypatch.setattr("dora_jax.runtime.cluster.sample_transfer.MAX_KV_BYTES", with_pages(0).kv_bytes)
    outlet = ResultSender(sent := Sent(), 0, hosts)
    for heads in (1, 2):
        outlet.put(with_pages(0, heads))
    sent, note = [item for item in sent if not isinstance(item, messages.Note)], sent[1]
    assert [(item if hosts == 1 else item.in_flight).n_pages for item in sent] == [2, 0]
    assert "sample (3, 1) leaves without its KV" in note.text
    assert outlet.fit(with_pages(0, 2)).n_pages == 0 and outlet.fit(with_pages(0)).n_pages == 2 * (hosts == 1)


@pytest.mark.parametrize("host", [0, 1])
def test_where_a_part_does_not_come_in_time_the_tokens_go_on(pair, host):
    remotes, gangs, outbox = pair
    remotes.tell(0, "on_message", messages.HandedOverShard(in_flight=with_pages(host), host=host, hosts=2))
    remotes.tell(0, "down", gangs[0])
    *found, down = drained(outbox)
    assert isinstance(down, ev.InstanceDown)
    assert [each.n_pages for each in found] == [0] * (host == 0)  # the journal has what the first one gave
