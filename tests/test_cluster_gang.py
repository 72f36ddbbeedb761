"""Links and gangs: which callers are let in, what a death does. Threads stand for processes."""

import contextlib
import dataclasses
import os
import queue
import resource
import signal
import socket
import threading
import time
import types

import psutil
import pytest

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import RecordConnection
from dora_jax.runtime.cluster.gang import CallRefused, Gang, GangDied, GangLimits
from dora_jax.runtime.cluster.launch_process import ProcessLauncher, Ticket
from dora_jax.runtime.cluster.process_main import leave_multislice, pass_on_notice
from tests.fakes.cluster import LIMITS, FakeHost, FakeLauncher, Kept, eventually
from tests.fakes.members import RUN, dialled, new_listener


class Ends:
    """Both ends of one link, and what came out of them."""

    def __init__(self):
        self.received, self.ended = {"a": [], "b": []}, {}
        self.links = {}
        self.door = new_listener(lambda channel: self._link("b", channel))
        self._link("a", dialled(self.door))
        eventually(lambda: len(self.links) == 2)

    def _link(self, name, channel):
        link = RecordConnection(
            channel,
            lambda _, item: self.received[name].append(item),
            lambda _, reason: self.ended.setdefault(name, reason),
        )
        link.start()
        self.links[name] = link


def test_records_go_both_ways_in_order():
    ends = Ends()
    sent = [messages.Heartbeat(progress=n, busy=False, spent_s={"decode": 0.5}) for n in range(1000)]
    for item in sent:
        ends.links["a"].send(item)
    ends.links["b"].send(messages.Ready(holds=(3,)))
    eventually(lambda: len(ends.received["b"]) == 1000 and ends.received["a"])
    assert ends.received["b"] == sent and ends.received["a"] == [messages.Ready(holds=(3,))]
    ends.links["a"].close()
    eventually(lambda: len(ends.ended) == 2)


def test_large_records_that_wait_together_are_no_frame_too_large(monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.cluster.connection.MAX_FRAME_BYTES", 3 << 20)
    ends = Ends()
    for _ in range(20):
        ends.links["a"].send(messages.ProcessFailed(error="x" * (1 << 20)))
    eventually(lambda: len(ends.received["b"]) == 20 or ends.ended)
    assert not ends.ended


@pytest.mark.parametrize("frame", [b"\x80\x04K\x01.", b"", b"\x91\xc4\x02\x91\xa1", b"\x01"])
def test_bytes_that_are_no_records_end_the_link(frame):
    ends = Ends()
    ends.links["a"].channel.send(frame)
    eventually(lambda: "b" in ends.ended)
    assert ends.received["b"] == []


def test_a_reader_that_stands_still_does_not_stop_the_sender():
    came = []
    door = new_listener(came.append)  # nobody ever reads
    link = RecordConnection(dialled(door), lambda _, item: None, lambda _, reason: None)
    link.start()
    for _ in range(100):
        link.send(
            messages.ProcessFailed(error="x" * 100_000)
        )  # far more than sockets hold: a call that waited would wait for ever
    link.close()


def test_ranks_follow_the_chips_not_the_order_of_arrival():
    with Kept(FakeLauncher(workers=[1, 0])) as kept:
        kept.up()
        began = {host.hello.worker: host.began for host in kept.hosts()}
    assert {worker: each.rank for worker, each in began.items()} == {0: 0, 1: 1}
    assert {each.coordinator for each in began.values()} == {"coordinator of 0"}


def test_hosts_without_chips_are_ranked_as_they_come():
    with Kept(FakeLauncher(workers=[-1, -1])) as kept:
        kept.up()
        assert sorted(host.began.rank for host in kept.hosts()) == [0, 1]


def test_a_call_is_answered_by_every_process():
    with Kept(FakeLauncher(lambda host, what: messages.Done(value=host.began.rank))) as kept:
        assert kept.up().call(messages.PublishWeights(version=1)) == [messages.Done(value=0), messages.Done(value=1)]


def test_a_call_that_one_process_refuses_is_refused_and_all_live():
    def answer(host, what):
        return messages.CallDeclined(error="no such version") if host.began.rank else messages.Done(value=0)

    with Kept(FakeLauncher(answer)) as kept:
        with pytest.raises(CallRefused, match="no such version"):
            kept.up().call(messages.PublishWeights(version=1))
        assert not kept.gangs[0].dead.is_set()


def test_the_first_death_ends_the_gang_and_another_comes():
    with Kept(FakeLauncher(lambda host, what: None)) as kept:
        pending = kept.up().cast(messages.PublishWeights(version=1))
        kept.hosts()[0].link.send(ev.InstanceReported(instance=0, free=7))
        eventually(lambda: len(kept.events) == 2)
        kept.hosts()[1].die()
        with pytest.raises(GangDied):
            pending.wait()
        assert kept.up(2).epoch == 2
        assert ("rollout 0", 1) in kept.launcher.killed
        kept.hosts()[0].link.send(ev.InstanceReported(instance=0, free=8))  # of the lost epoch: nobody hears it
        kept.hosts(2)[0].link.send(ev.InstanceReported(instance=0, free=9))
        eventually(lambda: len(kept.events) == 5)
        free = [event.free if isinstance(event, ev.InstanceReported) else event for event in kept.events]
        assert free == ["up 1", 7, "down 1", "up 2", 9]
        with pytest.raises(GangDied):
            kept.gangs[0].call(messages.PublishWeights(version=1))


def test_what_a_process_says_last_is_the_reason():
    with Kept(FakeLauncher()) as kept:
        kept.up()
        kept.hosts()[1].link.send(messages.ProcessFailed(error="ValueError: no"))
        kept.up(2)
        assert "ValueError: no" in kept.notes[1] and kept.notes[1].startswith("rollout 0 (epoch 1) is lost")


def beating(busy):
    def incarnation(host):
        host.join()
        host.ready()
        while not host.done.wait(0.01):
            host.beat(1, busy)

    return incarnation


def test_silence_is_a_death():
    def incarnation(host):
        host.join()
        host.ready()

    with Kept(
        FakeLauncher(incarnation=incarnation), limits=dataclasses.replace(LIMITS, heartbeat_timeout_s=0.3)
    ) as kept:
        eventually(lambda: any("has sent nothing" in text for text in kept.notes))


def test_standstill_is_a_death():
    with Kept(
        FakeLauncher(incarnation=beating(busy=True)), limits=dataclasses.replace(LIMITS, stall_timeout_s=0.3)
    ) as kept:
        eventually(lambda: any("has work and has not moved" in text for text in kept.notes))


def test_waiting_for_work_is_no_standstill():
    gang, link = lone_gang()
    for busy, wrong in ((False, False), (True, True)):
        gang.processes[0].moved_s -= 60.0
        link.receive(link, messages.Heartbeat(progress=0, busy=busy, spent_s={}))
        assert bool(gang.fault()) == wrong


def lone_gang():
    limits = GangLimits(heartbeat_timeout_s=1.0, stall_timeout_s=1.0, start_s=99.0, restarts=1)
    gang = Gang("rollout 0", 1, 1, lambda item: None, lambda text: None, limits)
    link = FakeLink()
    gang.join(link, messages.Hello(pid=1, worker=0, coordinator="", leader=""))
    gang.ready.set()
    return gang, link


def test_a_controller_that_slept_blames_nobody():
    gang, _ = lone_gang()
    gang.processes[0].received_s -= 60.0
    assert "has sent nothing" in gang.fault()
    gang.excuse(60.0)
    assert gang.fault() is None


class FakeLink:
    def adopt(self, receive, ended):
        self.receive = receive


def test_a_gang_that_can_never_come_up_ends_the_run_with_its_own_words():
    def incarnation(host):
        host.join()
        host.link.send(messages.ProcessFailed(error="ConfigError: rollout.tensor: 3 is wrong", final=True))

    with Kept(FakeLauncher(incarnation=incarnation)) as kept:
        eventually(lambda: kept.events)
        assert isinstance(kept.events[0], RunError) and "rollout.tensor: 3 is wrong" in str(kept.events[0])
        assert len(kept.launcher.gangs) == 1


@pytest.mark.parametrize("comes_up", [True, False])
def test_restarts_that_come_to_nothing_are_counted(comes_up):
    def incarnation(host):
        host.join()
        if comes_up:
            host.ready()
        time.sleep(0.05)
        host.link.send(messages.ProcessFailed(error="again"))

    with Kept(FakeLauncher(incarnation=incarnation)) as kept:
        eventually(lambda: isinstance(kept.events[-1], RunError) if kept.events else False)
        assert "3 times in a row" in str(kept.events[-1]) and len(kept.launcher.gangs) == LIMITS.restarts + 1


def test_restarts_after_work_are_not_counted():
    def incarnation(host):
        host.join()
        host.ready()
        host.beat(5)
        time.sleep(0.02)
        host.link.send(messages.ProcessFailed(error="again"))

    with Kept(FakeLauncher(incarnation=incarnation)) as kept:
        kept.up(LIMITS.restarts + 3)


def test_a_gang_that_is_reported_to_leave_hands_over_first_and_another_comes():
    def incarnation(host):
        host.join()
        host.ready()
        assert isinstance(host.inbox.get(), messages.HandOver)
        host.link.send(ev.InstanceReported(instance=0, free=3))
        host.link.send(messages.HandOverDone(hosts=1))

    with Kept(FakeLauncher(incarnation=incarnation), limits=dataclasses.replace(LIMITS, restarts=0)) as kept:
        kept.up()
        kept.hosts()[1].link.send(messages.PreemptionNotice(reason="SIGTERM"))
        kept.up(2)
        kept.hosts(2)[0].link.send(messages.PreemptionNotice(reason="SIGTERM"))
        kept.up(3)  # a process that leaves with notice has not come to nothing
        assert kept.events[:4] == ["up 1", ev.InstanceReported(instance=0, free=3), "down 1", "up 2"]
        assert kept.gangs[0].reason == "preempted: process 1 (pid 1001) received SIGTERM"
        assert any(text.startswith("rollout 0 (epoch 1) has left: preempted") for text in kept.notes)


def test_a_notice_is_passed_on_while_an_event_loop_has_the_wake_up_descriptor():
    sent = queue.SimpleQueue()
    handler, descriptor = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    with receiver, sender:
        try:
            pass_on_notice(types.SimpleNamespace(send=sent.put))
            signal.set_wakeup_fd(sender.fileno())  # as an event loop does for as long as it runs
            os.kill(os.getpid(), signal.SIGTERM)
            assert sent.get(timeout=10) == messages.PreemptionNotice(reason="SIGTERM")
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)


def test_who_leaves_has_left_once_every_process_has_reported_so():
    def incarnation(host):
        host.join()
        host.ready()
        if host.began.rank == 0:
            assert isinstance(host.inbox.get(), messages.HandOver)
            host.link.send(messages.HandOverDone(hosts=2))
            host.link.send(messages.Note(text="all is handed over"))

    with Kept(FakeLauncher(incarnation=incarnation)) as kept:
        kept.up().leave("preempted")
        eventually(lambda: "rollout 0: all is handed over" in kept.notes)
        kept.hosts()[1].link.send(ev.InstanceReported(instance=0, free=3))  # its part takes longer
        kept.hosts()[1].link.send(messages.HandOverDone(hosts=2))
        kept.up(2)
        assert kept.events[:3] == ["up 1", ev.InstanceReported(instance=0, free=3), "down 1"]


def test_a_gang_that_does_not_hand_over_in_time_is_ended(monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.cluster.gang.LEAVE_S", 0.2)
    with Kept(FakeLauncher(incarnation=beating(busy=False))) as kept:
        kept.up().leave("preempted")
        kept.up(2)
        assert kept.gangs[0].reason == "preempted; it has not handed over within 0 s"


def test_a_gang_that_is_not_wanted_leaves_and_comes_back_when_it_is():
    with Kept(FakeLauncher(incarnation=leaving)) as kept:
        kept.up()
        kept.keeper.want(False)
        eventually(lambda: "down 1" in kept.events)
        time.sleep(0.3)
        assert len(kept.gangs) == 1
        kept.keeper.want(True)
        assert kept.up(2).epoch == 2


def leaving(host):
    host.join()
    host.ready()
    while not isinstance(host.inbox.get(), messages.HandOver):
        pass
    host.link.send(messages.HandOverDone(hosts=1))


@pytest.mark.parametrize("elastic", [True, False])
def test_only_an_elastic_gang_waits_for_room_without_an_end(elastic, monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.cluster.gang_supervisor.ROOM_S", 0.2)
    launcher = FakeLauncher(incarnation=lambda host: None)
    limits = dataclasses.replace(LIMITS, start_s=0.4, elastic=elastic)
    with Kept(launcher, limits=limits) as kept:
        eventually(lambda: launcher.started)
        launcher.started[0].needs, launcher.started[0].placed = lambda: "it needs a seat", False
        if not elastic:
            eventually(lambda: kept.events)
            assert kept.notes == ["rollout 0 waits for a place: it needs a seat"]
            assert "was not ready" in str(kept.events[0])
            return
        time.sleep(1.0)
        assert len(launcher.started) == 1 and kept.notes == ["rollout 0 waits for a place: it needs a seat"]
        for host in kept.hosts():
            threading.Thread(target=host.live, daemon=True).start()
        kept.up()


def test_nobody_of_another_epoch_is_let_in():
    with Kept(FakeLauncher()) as kept:
        gang = kept.up()
        with pytest.raises(ConnectionError):
            FakeHost(kept.hub.ticket("rollout 0", 7), 0, None, None)
        assert not gang.dead.is_set()


def test_a_rollout_leaves_the_job_that_joins_slices():
    environ = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_COORDINATOR_ADDRESS": "x", "TPU_NAME": "a"}
    leave_multislice(environ)
    assert environ == {"TPU_NAME": "a"}


@contextlib.contextmanager
def a_process(tmp_path):
    """A process of a gang that waits for its first command: (how it was started, what it has sent)."""
    came, sent = queue.SimpleQueue(), []
    door = new_listener(came.put)
    ticket = Ticket(run=RUN.run, controller=door.address, gang="trainer", epoch=1, credential=RUN.issue("trainer", 1))
    started = ProcessLauncher(tmp_path, "run").start(ticket, 1, "")
    try:
        link = RecordConnection(came.get(timeout=60), lambda _, item: sent.append(item), lambda _, reason: None)
        link.start()
        eventually(lambda: len(sent) > 1)
        yield started, sent
    finally:
        started.kill()
        door.close()


def test_ctrl_c_in_a_terminal_is_left_to_the_controller(tmp_path):
    with a_process(tmp_path) as (started, beats):
        os.kill(started.pids[0], signal.SIGINT)
        notes = len(beats)
        eventually(lambda: len(beats) > notes + 1 or started.ended())
        assert not started.ended() and not any(isinstance(item, messages.ProcessFailed) for item in beats)
    assert not next(iter(tmp_path.glob("logs/*.log"))).read_text()


def test_a_process_may_hold_as_many_connections_as_its_machine_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        with a_process(tmp_path) as (started, _):
            assert psutil.Process(started.pids[0]).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
