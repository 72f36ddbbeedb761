"""A rollout gang as the coordinator sees it: an instance worker whose work is done elsewhere.

`RemoteInstance` is an InstanceProxy whose incarnations are gangs; `GangWorker` is the worker of one incarnation: it
hands commands to the gang, behind the weights and the KV that they need, and the messages of the gang's processes to
the outbox. Laws: commands reach a gang only after
the orchestrator knows that it is there, so none meant for an earlier epoch does; weights are used only once every
process of the gang holds them, as is the KV of a sample that comes: where one process cannot fetch its shard, all of
them make it again from the tokens. An instance on demand is up once its gang has loaded the version that was named.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, is_power_of_ten, joined, parted, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.common.seams import Notify
from dora_jax.runtime.common.worker import Crashed, ForgetSample, Held, Message, Outbox
from dora_jax.runtime.instances.instance_proxy import RETURNED, Destination, InstanceProxy
from dora_jax.runtime.transfer.transfer_manifest import KVOffer
from dora_jax.runtime.transfer.weight_messages import Committed, Dropped, Offered, Staged, TransferFailed
from dora_jax.types import Sample, SampleId, Version

NUMBERS = itertools.count(time.time_ns())  # of moves: higher than those of any controller before


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """A sample that has left a gang for another one: what each of its processes reported of its own shard, by rank."""

    id: SampleId
    number: int
    shards: Sequence[messages.MoveStarted]
    source: Gang
    by_wire: bool  # the processes of the two gangs transfer its KV; else it is in the message, or made again

    def release(self) -> None:
        if self.by_wire:
            self.source.tell_all(messages.ReleaseKV(number=self.number))


@dataclass
class _Staging:
    """KV on its way to every process of this gang."""

    id: SampleId
    command: messages.Command  # that takes the sample in
    departed: Departed | None = None  # None: the controller offers the KV
    answers: dict[int, str] = field(default_factory=dict)  # by process: what went wrong; empty: nothing
    later: list[messages.Command] = field(default_factory=list)  # what the gang receives once the sample is in


class GangWorker:
    """The worker of one gang. The main thread calls `send`, the gang's connections call `on_message`."""

    def __init__(self, owner: RemoteInstance, gang: Gang, publisher: WeightPublisher, notify: Notify):
        self.incarnation = gang.epoch
        self.gang = gang
        self._owner, self._publisher, self._notify = owner, publisher, notify
        self._moves: dict[SampleId, tuple[ev.Move, Destination[GangWorker]]] = {}  # asked for and not under way
        self._shards: dict[int, dict[int, messages.MoveStarted]] = {}  # by move: of those that not all have spoken of
        self._stagings: dict[int, _Staging] = {}
        self._remade = 0  # episodes that went on at another gang without the KV that is here
        self._handed: dict[SampleId, dict[int, InFlightSample]] = {}  # by process: shards of samples handed over
        self._lock = threading.Lock()

    def spent(self) -> Mapping[str, float]:
        return self.gang.spent()

    @property
    def state(self) -> str:
        return f"{self._owner.role} is up (epoch {self.incarnation})"

    def send(self, message: Message, payload: Any = None, dst: Destination[GangWorker] | None = None) -> None:
        """payload of a Move that arrives: Departed. What it needs beside a prompt goes ahead of a command, to every
        process: weights, and KV."""
        command = messages.Command(what=message, payload=None if isinstance(payload, Departed) else payload)
        match message:
            case ev.LoadWeights(version=version, drop=drop):

                def use() -> None:
                    """Every process of the gang holds the version."""
                    self.gang.post(command)
                    if drop is not None:
                        self._publisher.tell(Dropped(world=self.gang.name, version=drop))

                self._publisher.want(self.gang, version, use)
            case ev.Move(ids=ids) if dst is not None:
                epoch = dst.worker.incarnation if dst.worker else 0
                with self._lock:
                    self._moves |= {id: (message, dst) for id in ids}
                for id in ids:
                    one = dataclasses.replace(message, ids=(id,))
                    self.gang.post(messages.Command(what=one, number=next(NUMBERS), epoch=epoch))
            case ev.Move():
                offered = [shard.offered for shard in payload.shards]
                command = dataclasses.replace(command, payload=offered[0].in_flight)
                if payload.by_wire:
                    self._stage(command, payload.number, offered, payload)
                else:
                    self.gang.post(command)
            case ev.Resume() if dst is not None:
                # KV that a gang has kept does not leave it: the other one makes it again
                self.send(ForgetSample(id=payload.id))
                dst.send(message, payload)
                self._remade += 1
                if is_power_of_ten(self._remade):
                    self._notify(
                        f"sample {tuple(payload.id)} leaves {self._owner.role}, which kept its KV, and is prefilled "
                        f"again ({self._remade} samples so far)"
                    )
            case ev.Resume() if self.gang.hosts > 1 and payload.n_pages:
                command = dataclasses.replace(command, payload=without_pages(payload))
                offered = [
                    KVOffer(in_flight=shard, kv_len=shard.kv_len, page_size=shard.page_size, manifest=None)
                    for shard in parted(payload, self.gang.hosts)
                ]
                self._stage(command, next(NUMBERS), offered)
            case ev.Cancel(ids=ids):
                with self._lock:
                    stagings = {staging.id: staging for staging in self._stagings.values()}
                    for id in ids:
                        cancel = messages.Command(what=dataclasses.replace(message, ids=(id,)))
                        (stagings[id].later.append if id in stagings else self.gang.post)(cancel)
            case _:
                self.gang.post(command)

    def _stage(
        self, command: messages.Command, number: int, offered: Sequence[KVOffer], departed: Departed | None = None
    ) -> None:
        """Sends each process its shard of the KV; the command follows once all have it."""
        with self._lock:
            self._stagings[number] = _Staging(offered[0].in_flight.id, command, departed)
            epoch = self.incarnation
            self.gang.tell_each([messages.StageKV(number=number, epoch=epoch, offered=each) for each in offered])

    # ------------------------------------------------------ what the gang says

    def on_message(self, item: Any) -> None:
        match item:
            case messages.MoveStarted():
                # one process's word that a sample has left
                with self._lock:
                    shards = self._shards.setdefault(item.number, {})
                    shards[item.host] = item
                    if len(shards) < item.hosts:
                        return
                    del self._shards[item.number]
                    id = item.offered.in_flight.id
                    move, dst = self._moves.pop(id)
                departed = Departed(
                    id=id,
                    number=item.number,
                    shards=[shards[host] for host in range(item.hosts)],
                    source=self.gang,
                    by_wire=all(shard.offered.manifest is not None for shard in shards.values()),
                )
                if not dst.send(move, departed):
                    departed.release()
            case messages.KVStaged():
                with self._lock:
                    staging = self._stagings.get(item.number)
                    if staging is None:
                        return  # an earlier controller asked for it
                    staging.answers[item.host] = item.fault
                    if len(staging.answers) < self.gang.hosts:
                        return
                    del self._stagings[item.number]
                    fault = next(filter(None, staging.answers.values()), "")
                    command = dataclasses.replace(staging.command, number=0 if fault else item.number)
                    for each in (command, *staging.later):
                        self.gang.post(each)
                    if fault:
                        self.gang.tell_all(messages.ReleaseKV(number=item.number))
                if staging.departed is not None:
                    staging.departed.release()
                if fault:
                    self._notify(
                        f"the KV of sample {tuple(staging.id)} did not reach {self._owner.role}, where it is made "
                        f"again: {fault}"
                    )
            case messages.HandedOverShard():
                with self._lock:
                    parts = self._handed.setdefault(item.in_flight.id, {})
                    parts[item.host] = item.in_flight
                    if len(parts) < item.hosts:
                        return
                    del self._handed[item.in_flight.id]
                whole = joined([parts[host] for host in range(0, item.hosts, item.alike)])
                self._owner.on_message(self, whole)
            case _:
                if isinstance(item, ev.MoveFailed):
                    with self._lock:
                        self._moves.pop(item.id, None)
                self._owner.on_message(self, item)

    def end(self) -> list[InFlightSample]:
        """The gang is lost. Returns samples whose shards did not all come in time, without their KV; what the first
        process hands over is in the journal."""
        with self._lock:
            stagings, self._stagings = self._stagings, {}
            handed, self._handed = self._handed, {}
        for staging in stagings.values():
            if staging.departed is not None:
                staging.departed.release()
        return [without_pages(shards[0]) for shards in handed.values() if 0 in shards]


class RemoteInstance(InstanceProxy[GangWorker]):
    """Called by the main thread, but for `_on_message`, `_up` and `gang_down` (the gang's connections, and its
    supervisor)."""

    def __init__(
        self,
        up: ev.InstanceUp,
        outbox: Outbox,
        publisher: WeightPublisher,
        new_supervisor: Callable[..., GangSupervisor],
        notify: Notify,
        on_demand: bool = False,
    ):
        super().__init__(up, outbox, on_demand=on_demand)
        self._publisher = publisher
        self._notify = notify
        self._found: list[Held] = []  # samples of a gang that is taken over
        self._coming: GangWorker | None = None  # the incarnation on demand that loads its version
        hooks: dict[str, Any] = {"on_message": self._on_message, "up": self._up, "down": self.gang_down}
        self.supervisor = new_supervisor(self.role, failed=self._failed, on_demand=on_demand, **hooks)

    def start(self) -> None:
        """The gang has been on its way since the cluster was opened."""

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends the gang, without waiting for what it does."""
        self.supervisor.close()

    def begin(self, version: Version) -> None:
        self._event = dataclasses.replace(self._event, versions=(version,))
        self.supervisor.want(True)

    def end(self, worker: GangWorker) -> None:
        worker.gang.leave(RETURNED)

    def admit(self, worker: GangWorker) -> Sequence[Held]:
        trusted = self._publisher.recognise(worker.gang)
        with self._lock:
            found, self._found = self._found, []
            if worker.gang.dead.is_set():
                return ()
            super().admit(worker)
        return found if trusted else ()

    # -------------------------------------------------------------- private

    def _on_message(self, item: Any) -> None:
        match item:
            case Offered() | Staged() | Committed() | TransferFailed():
                self._publisher.tell(item)
            case ev.WeightsLoaded(incarnation=number) if (new := self._coming) and number == new.incarnation:
                self._coming = None
                self.incarnation_ready(new)
            case InFlightSample() | Sample() if self._worker is None:
                self._found.append(item)
            case _:
                if worker := self._worker:
                    worker.on_message(item)

    def lost(self, worker: GangWorker, reason: str, *_: object) -> None:
        worker.end()
        worker.gang.die(reason)

    def _up(self, gang: Gang) -> None:
        self._publisher.up(gang)
        worker = GangWorker(self, gang, self._publisher, self._notify)
        if not self.on_demand:
            return self.incarnation_ready(worker)
        self._coming = worker
        for version in self._event.versions:
            load = messages.Command(what=ev.LoadWeights(instance=self.instance, version=version))
            self._publisher.want(gang, version, functools.partial(gang.post, load))

    def gang_down(self, gang: Gang) -> None:
        self._coming = None
        self._publisher.down(gang)
        with self._lock:
            self._found = []
            worker = self._worker
            self.incarnation_down(worker, gang.epoch, gang.reason, worker.end() if worker else ())

    def _failed(self, error: RunError) -> None:
        self._outbox.put(Crashed(role=self.role, error=error))
