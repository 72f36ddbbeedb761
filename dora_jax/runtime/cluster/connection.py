"""The connections of a process: to its controller, and to the other processes of its gang; records in, records out.

    joined ... the connection ends -> alone: looks for the next controller -> found -> Rejoin -> `rejoin` -> joined

`RecordConnection` carries records of messages.py over a channel (runtime/common/channel.py), many records a frame.
`ControllerConnection` is a process's connection to its controller, and to the next controller after that one is killed.
`Turns` gives every process of a gang the same commands before each tick. `HeartbeatSender` tells the controller every
second that the process is alive, and how far it is.

Laws: nothing is unpickled; `send` never blocks, so a peer that has stopped reading stops nobody; `ended` is called
once.
A process that is alone sends nothing of its role until the role has settled what the earlier controller asked for. A
process ends where the run has ended, where no controller comes in time, and where it is not wanted any more. What one
process of a gang does, all do: the connection between them outlives the controller. In a rollout gang every process
makes one tick after each batch of commands if its engine is busy; the engines are equal, so all of them tick or none.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgpack

from dora_jax.base.lanes import Lane
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.run_registry import address_in
from dora_jax.runtime.common.channel import Channel
from dora_jax.runtime.common.codec import CodecError
from dora_jax.runtime.common.credentials import CONTROLLER, Credential
from dora_jax.runtime.common.listener import Listener, dial

MAX_FRAME_BYTES = 1 << 31
BATCH_RECORDS = 256  # records that wait are sent together, so many at most
LOOK_S = 0.5
BEAT_S = 1.0
BATCH_BYTES = 1 << 20  # and none are added to so much: records with KV are large

Receive = Callable[["RecordConnection", Any], None]  # of a record
Ended = Callable[["RecordConnection", str], None]  # with the reason


class RecordConnection:
    """Use `start` once `receive` may be called; it runs on the link's own thread, as does `ended`."""

    def __init__(self, channel: Channel, receive: Receive, ended: Ended):
        self.channel = channel
        self._receive = receive
        self._ended = ended
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = threading.Lock()  # held for ever by the first to end it
        self._writer = threading.Thread(target=self._write, name="link writer", daemon=True)

    def start(self) -> None:
        self._writer.start()
        threading.Thread(target=self._read, name="link reader", daemon=True).start()

    def adopt(self, receive: Receive, ended: Ended) -> None:
        """Replaces both callbacks; called from `receive`, or before `start`."""
        self._receive, self._ended = receive, ended

    def send(self, record: Any) -> None:
        """Encodes the record on the caller's thread, so that a record that cannot be encoded raises there."""
        self._out.put(messages.CODEC.encode(record))

    def flush(self, timeout_s: float) -> None:
        """Sends what waits, then closes: the last thing a process does."""
        self._out.put(None)
        self._writer.join(timeout_s)

    def close(self, reason: str = "closed") -> None:
        """Ends the connection at once; what waits to be sent is lost."""
        if not self._closed.acquire(blocking=False):
            return
        self._out.put(None)
        self.channel.hang_up()
        self._ended(self, reason)

    # ------------------------------------------------------------ private

    def _read(self) -> None:
        try:
            while True:
                frame = msgpack.unpackb(self.channel.receive(MAX_FRAME_BYTES))
                if not isinstance(frame, list):
                    raise CodecError(f"a {type(frame).__name__} stands where records are expected")
                for data in frame:
                    self._receive(self, messages.CODEC.decode(data))
        except OSError as error:
            self.close(f"the connection ended: {type(error).__name__}")
        except BaseException as error:  # of this peer's bytes, or of what they led to: it is the link that ends
            self.close(f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        try:
            while (data := self._out.get()) is not None:
                batch, size = [data], len(data)
                while len(batch) < BATCH_RECORDS and size < BATCH_BYTES and not self._out.empty():
                    if (data := self._out.get()) is None:
                        self.channel.send(msgpack.packb(batch))
                        return
                    batch.append(data)
                    size += len(data)
                self.channel.send(msgpack.packb(batch))
        except OSError as error:
            self.close(f"the connection ended: {type(error).__name__}")


class ControllerConnection:
    """Any thread may use it. end: ends the process and does not return."""

    def __init__(self, address: str, credential: Credential, end: Callable[[], None] = lambda: os._exit(0)):
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.credential, self._end = credential, end
        self._hello: messages.Hello | None = None
        self._place = ""
        self._patience_s = 0.0
        self._controller = 0  # the newest incarnation of it that this process has seen
        self.alone = False  # until Rejoin nobody listens: what could be sent is of an earlier controller's time
        self.own_ip = ""  # of this machine, as the controller sees it
        self.records = self._linked(address)

    def hello(self, hello: messages.Hello) -> None:
        self._hello = hello
        self.send(hello)

    def wait_for_another(self, place: str, rank: int, patience_s: float) -> None:
        """From now on this process waits so long for another controller where this one goes; 0: it ends with this one.
        place: the workdir."""
        self._place, self._patience_s = place, patience_s
        if self._hello is not None:
            self._hello = dataclasses.replace(self._hello, rank=rank)

    def send(self, record: Any) -> None:
        always = messages.Heartbeat, messages.ProcessFailed, messages.PreemptionNotice
        if not self.alone or isinstance(record, always):
            self.records.send(record)

    def part(self) -> None:
        """The role has ended: this process ends with its controller, or now if there is none."""
        self._patience_s = 0.0
        if self.alone:
            self._end()

    # ------------------------------------------------------------ private

    def _linked(self, address: str) -> RecordConnection:
        channel = dial(
            address, self.credential, lambda peer: peer.role == CONTROLLER and peer.incarnation >= self._controller
        )
        self._controller, self.own_ip = channel.peer.incarnation, channel.socket.getsockname()[0]
        link = RecordConnection(channel, lambda _, item: self.inbox.put(item), self._lost)
        link.start()
        return link

    def _lost(self, link: RecordConnection, reason: str) -> None:
        if not self._patience_s or self.alone:  # the second: it sent Hello, and is not wanted
            return self._end()
        self.alone = True
        threading.Thread(target=self._look, name="uplink", daemon=True).start()

    def _look(self) -> None:
        print("the controller is gone; this process goes on and waits for the next", file=sys.stderr, flush=True)
        until = time.monotonic() + self._patience_s
        while time.monotonic() < until:
            try:
                if (address := address_in(self._place)) is None:
                    break
                link = self._linked(address)
            except (OSError, ValueError):  # nobody is there yet
                time.sleep(LOOK_S)
                continue
            link.send(self._hello)  # before anything else is
            self.records = link
            return
        self._end()


class HeartbeatSender:
    """What a role tells of its progress, once a second."""

    def __init__(self, link: ControllerConnection):
        self.progress = 0
        self.busy = False
        self.lane = Lane()  # of the role's thread
        self._link = link
        self.ended = threading.Event()  # set by the owner

    def start(self) -> None:
        threading.Thread(target=self._beat, name="status", daemon=True).start()

    def _beat(self) -> None:
        while not self.ended.is_set():
            self._link.send(messages.Heartbeat(progress=self.progress, busy=self.busy, spent_s=self.lane.read()))
            self.ended.wait(BEAT_S)


def join(
    link: ControllerConnection, worker: int, coordinator: str = ""
) -> tuple[Listener, queue.SimpleQueue[Channel], HeartbeatSender]:
    """Sends Hello; the process is watched from now on. Returns where the others of the gang connect, should this
    process be the first, their connections, and the heartbeats."""
    arrivals: queue.SimpleQueue[Channel] = queue.SimpleQueue()
    own = link.credential
    listener, status = Listener(link.own_ip, own, own.member.__eq__, arrivals.put), HeartbeatSender(link)
    pid, leader = os.getpid(), listener.address
    link.hello(messages.Hello(pid=pid, worker=worker, coordinator=coordinator, leader=leader))
    status.start()
    return listener, arrivals, status


@dataclasses.dataclass
class Turns:
    """led: what the first process of the gang sends to this one; None: this one is the first."""

    followers: list[RecordConnection]
    led: queue.SimpleQueue[messages.TickCommands] | None = None

    def next(self, posts: queue.SimpleQueue, wait: bool) -> tuple[messages.GangCommand, ...]:
        """The commands that came since the last tick. wait: the engine is idle, so this waits for a command."""
        if self.led is not None:
            return self.led.get().posts
        turn = [posts.get()] if wait else []
        while not posts.empty():
            turn.append(posts.get())
        for follower in self.followers:
            follower.send(messages.TickCommands(posts=tuple(turn)))
        return tuple(turn)


def turns_of(begin: messages.Begin, own: Credential, arrivals: queue.SimpleQueue) -> Turns:
    """`arrivals`: connections that the others have opened. A lost one needs no answer: the controller ends the gang."""
    turns: queue.SimpleQueue = queue.SimpleQueue()
    if begin.rank == 0:
        channels = [arrivals.get() for _ in range(begin.hosts - 1)]
    else:
        channels = [dial(begin.leader, own, own.member.__eq__)]
    links = [RecordConnection(channel, lambda _, item: turns.put(item), lambda _, reason: None) for channel in channels]
    for link in links:
        link.start()
    return Turns(links) if begin.rank == 0 else Turns([], turns)
