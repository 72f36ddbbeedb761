"""Gangs without processes: threads that speak the protocol over real links, and a launcher that starts them."""

import threading
import time

import numpy as np

from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import ControllerConnection
from dora_jax.runtime.cluster.gang import GangLimits, GangListener
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.run_registry import RunRegistry
from dora_jax.runtime.common.credentials import Credential
from dora_jax.types import ScoredGroup

LIMITS = GangLimits(heartbeat_timeout_s=60.0, stall_timeout_s=60.0, start_s=60.0, restarts=2)


def eventually(done, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


class FakeHost:
    """One process: says Hello, then `answer`s calls; `incarnation(host)` replaces that."""

    def __init__(self, ticket, worker, answer, incarnation):
        self.done = threading.Event()
        self.link = ControllerConnection(ticket.controller, Credential(ticket.credential), self.done.set)
        self.inbox, self.ticket = self.link.inbox, ticket
        self.began = None
        self.received = []  # calls and posts
        self.gang = []  # of its launcher's making
        self._answer = answer
        self.hello = messages.Hello(
            pid=1000 + worker, worker=worker, coordinator=f"coordinator of {worker}", leader=f"leader of {worker}"
        )
        threading.Thread(target=incarnation or FakeHost.live, args=(self,), daemon=True).start()

    def join(self):
        self.link.hello(self.hello)
        self.began = self.inbox.get()

    def ready(self):
        self.link.send(messages.Ready())

    def beat(self, progress, busy=False):
        self.link.send(messages.Heartbeat(progress=progress, busy=busy, spent_s={}))

    def live(self):
        self.join()
        self.ready()
        while True:
            item = self.inbox.get()
            self.received.append(item)
            if (
                isinstance(item, messages.Call)
                and not isinstance(item.what, messages.WriteWeights)
                and not self.began.rank
            ):
                for other in self.gang:
                    if other.began.rank:
                        other.inbox.put(item)
            if isinstance(item, messages.Call) and (answer := self._answer(self, item.what)) is not None:
                self.link.send(messages.CallAnswer(number=item.number, what=answer))
                self.beat(len(self.received))

    def die(self):
        self.link.records.close("killed")


class FakeLauncher:
    """`answer(host, what)`: what a call is answered with, None: nothing. `workers`: TPU worker ids, as they arrive."""

    ip = "127.0.0.1"

    def __init__(self, answer=lambda host, what: messages.Done(value=0), workers=range(100), incarnation=None):
        self.answer, self.workers, self.incarnation = answer, list(workers), incarnation
        self.gangs = {}  # (name, epoch) -> hosts
        self.started, self.killed = [], []
        self.spares = False  # as a controller that is killed

    def start(self, ticket, hosts, slice_type):
        started = [FakeHost(ticket, worker, self.answer, self.incarnation) for worker in self.workers[:hosts]]
        self.gangs[ticket.gang, ticket.epoch] = started
        for host in started:
            host.gang = started
        self.started.append(FakeStarted(self, ticket, started))
        return self.started[-1]

    def find(self, ticket, hosts, slice_type, pids):
        started = self.gangs.get((ticket.gang, ticket.epoch), [])
        return FakeStarted(self, ticket, started) if len(started) == hosts else None

    def close(self):
        pass


class FakeStarted:
    placed, needs, pids = True, "", (1, 2)

    def __init__(self, launcher, ticket, hosts):
        self.launcher, self.ticket, self.hosts = launcher, ticket, hosts

    def ended(self):
        return None

    notice = ended

    def kill(self):
        if self.launcher.spares:
            return
        self.launcher.killed.append((self.ticket.gang, self.ticket.epoch))
        for host in self.hosts:
            host.die()


class Kept:
    """A keeper under test, and what it did."""

    def __init__(self, launcher, name="rollout 0", hosts=2, limits=LIMITS):
        self.launcher = launcher
        self.events, self.notes, self.gangs = [], [], []
        self.hub = GangListener("127.0.0.1", RunRegistry())
        self.keeper = GangSupervisor(
            self.hub,
            launcher,
            name,
            hosts,
            "",
            begin=begin,
            on_message=self.events.append,
            up=self._up,
            down=lambda gang: self.events.append(f"down {gang.epoch}"),
            failed=self.events.append,
            notify=self.notes.append,
            limits=limits,
        )

    def __enter__(self):
        self.keeper.start()
        return self

    def __exit__(self, *error):
        self.keeper.close()
        self.hub.close()

    def up(self, epoch=1):
        eventually(lambda: len(self.gangs) >= epoch)
        return self.gangs[epoch - 1]

    def hosts(self, epoch=1, name="rollout 0"):
        return self.launcher.gangs[name, epoch]

    def _up(self, gang):
        self.gangs.append(gang)
        self.events.append(f"up {gang.epoch}")


def begin(rank, coordinator, leader):
    return messages.Begin(config={}, workdir="", instance=0, rank=rank, hosts=2, coordinator=coordinator, leader=leader)


def scored_group(group_id):
    return ScoredGroup(group_id=group_id, version=0, samples=(), rewards=np.zeros(1, np.float32), parts={})
