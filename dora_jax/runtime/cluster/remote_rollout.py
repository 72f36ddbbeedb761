"""A rollout gang as the coordinator sees it: an instance worker whose work is done elsewhere.

`RemoteInstance` is an InstanceProxy whose incarnations are gangs; `GangWorker` is the worker of one incarnation: it
turns commands into
messages to the gang, and the messages of the gang's processes into outbox items. Laws: commands reach a gang only after
the orchestrator knows that it is there, so none meant for an earlier epoch does; weights are used only once every
process of the gang holds them, as is the KV of a sample that comes: where one process cannot fetch its shard, all of
them make it again from the tokens.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, is_power_of_ten, joined, parted, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.common.seams import Notify, Outbox
from dora_jax.runtime.common.worker import CalledHere, Crashed, FinishedUnheard, HandedOver
from dora_jax.runtime.instances.instance_proxy import Destination, ForwardTarget, InstanceProxy, garbage_in
from dora_jax.runtime.transfer.weight_messages import Accepted, Committed, Dropped, Offered, Staged, TransferFailed
from dora_jax.types import InstanceId, Prompt, SampleId, Version

NUMBERS = itertools.count(time.time_ns())  # of moves: higher than those of any controller before


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """A sample that has left a gang for another one: what each of its processes reported of its own shard, by rank."""

    id: SampleId
    number: int
    shards: Sequence[messages.MoveStarted]
    source: Gang
    by_wire: bool  # the processes of the two gangs transfer its KV; else it is in the message, or made again

    def finish(self, number: int) -> messages.FinishMove:
        """number: of the KV that the destination has fetched; 0: the sample goes on with what is in the message."""
        first = self.shards[0]
        return messages.FinishMove(
            in_flight=first.offered.in_flight, src=first.src, attempt=first.attempt, number=number
        )

    def release(self) -> None:
        if self.by_wire:
            self.source.tell_all(messages.ReleaseKV(number=self.number))


@dataclass
class _Staging:
    """KV on its way to every process of this gang."""

    id: SampleId
    take_in: Callable[[int], messages.FinishMove | messages.ResumeSample]  # by the number of the KV, or 0: without it
    departed: Departed | None = None  # None: the controller offers the KV
    answers: dict[int, str] = field(default_factory=dict)  # by process: what went wrong; empty: nothing
    later: list[messages.CancelSample] = field(default_factory=list)  # what the gang receives once the sample is in


class GangWorker(CalledHere):
    """The worker of one gang. The main thread calls the commands, the gang's connections call `on_message`."""

    def __init__(self, owner: RemoteInstance, gang: Gang, publisher: WeightPublisher, notify: Notify):
        self.incarnation = gang.epoch
        self.gang = gang
        self._owner, self._publisher, self._notify = owner, publisher, notify
        self._moves: dict[SampleId, Destination[GangWorker]] = {}  # asked for and not under way
        self._shards: dict[int, dict[int, messages.MoveStarted]] = {}  # by move: of those that not all have spoken of
        self._stagings: dict[int, _Staging] = {}
        self._remade = 0  # episodes that went on at another gang without the KV that is here
        self._handed: dict[SampleId, dict[int, InFlightSample]] = {}  # by process: shards of samples handed over
        self._lock = threading.Lock()

    @property
    def wait_s(self) -> float:
        return self.gang.waited_s

    @property
    def state(self) -> str:
        return f"{self._owner.role} is up (epoch {self.incarnation})"

    # -------------------------------------------------------------- commands

    def load(self, version: Version, drop: Version | None) -> None:
        def use() -> None:
            """Every process of the gang holds the version."""
            self.gang.post(messages.UseWeights(version=version, drop=drop))
            if drop is not None:
                self._publisher.tell(Dropped(world=self.gang.name, version=drop))

        self._publisher.want(self.gang, version, use)

    def submit(self, sample: SampleId, prompt: Prompt, version: Version, attempt: int) -> None:
        self.gang.post(messages.StartSample(id=sample, prompt=prompt, version=version, attempt=attempt))

    def cancel(self, sample: SampleId, reason: str) -> None:
        message = messages.CancelSample(id=sample, reason=reason)
        with self._lock:
            for staging in self._stagings.values():
                if staging.id == sample:
                    return staging.later.append(message)
        self.gang.post(message)

    def park(self, sample: SampleId) -> None:
        self.gang.post(messages.ParkSample(id=sample))

    def resume(self, in_flight: InFlightSample, attempt: int) -> None:
        if self.gang.hosts == 1 or not in_flight.n_pages:
            return self.gang.post(messages.ResumeSample(in_flight=in_flight, number=0, attempt=attempt))
        number, tokens = next(NUMBERS), without_pages(in_flight)
        shards = [messages.StageKV(number=number, in_flight=shard) for shard in parted(in_flight, self.gang.hosts)]
        with self._lock:
            self._stagings[number] = _Staging(
                in_flight.id, lambda number: messages.ResumeSample(in_flight=tokens, number=number, attempt=attempt)
            )
            self.gang.tell_each(shards)

    def forward(self, in_flight: InFlightSample, dst: ForwardTarget[GangWorker], attempt: int) -> None:
        """KV that a gang has kept does not leave it: the other one makes it again."""
        self.forget(in_flight.id)
        dst.resume(in_flight, attempt)
        self._remade += 1
        if is_power_of_ten(self._remade):
            self._notify(
                f"sample {tuple(in_flight.id)} leaves {self._owner.role}, which kept its KV, and is prefilled again "
                f"({self._remade} samples so far)"
            )

    def forget(self, sample: SampleId) -> None:
        self.gang.post(messages.ForgetKept(id=sample))

    def know(self, sample: SampleId, tokens: np.ndarray) -> None:
        self.gang.post(messages.KnowSibling(id=sample, tokens=tokens))

    def move(self, sample: SampleId, dst: Destination[GangWorker], attempt: int) -> None:
        epoch = dst.worker.incarnation if dst.worker else 0
        with self._lock:
            self._moves[sample] = dst
        self.gang.post(
            messages.MoveSample(id=sample, dst=dst.instance, epoch=epoch, number=next(NUMBERS), attempt=attempt)
        )

    def receive(self, departed: Departed, src: InstanceId, attempt: int) -> None:
        if not departed.by_wire:
            return self.gang.post(departed.finish(0))
        with self._lock:
            self._stagings[departed.number] = _Staging(departed.id, departed.finish, departed)
            offered = tuple(shard.offered for shard in departed.shards)
            self.gang.tell_all(messages.FetchKV(number=departed.number, epoch=self.incarnation, offered=offered))

    def pause(self) -> None:
        raise NotImplementedError("colocated roles are for a run in one process")

    unpause = pause

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
                    dst = self._moves.pop(id)
                departed = Departed(
                    id=id,
                    number=item.number,
                    shards=[shards[host] for host in range(item.hosts)],
                    source=self.gang,
                    by_wire=all(shard.offered.manifest is not None for shard in shards.values()),
                )
                if not dst.deliver(id, departed, item.src, item.attempt):
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
                    for message in (staging.take_in(0 if fault else item.number), *staging.later):
                        self.gang.post(message)
                    if fault:
                        self.gang.tell_all(messages.DropStagedKV(number=item.number))
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
                self._owner.on_message(self, HandedOver(in_flight=whole))
            case _:
                if isinstance(item, ev.MoveFailed):
                    with self._lock:
                        self._moves.pop(item.id, None)
                self._owner.on_message(self, item)

    def end(self) -> list[HandedOver]:
        """The gang is lost. Returns samples whose shards did not all come in time, without their KV; what the first
        process hands over is in the journal."""
        with self._lock:
            stagings, self._stagings = self._stagings, {}
            handed, self._handed = self._handed, {}
        for staging in stagings.values():
            if staging.departed is not None:
                staging.departed.release()
        return [HandedOver(in_flight=without_pages(shards[0])) for shards in handed.values() if 0 in shards]


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
    ):
        super().__init__(up, outbox)
        self._publisher = publisher
        self._notify = notify
        self._found: list[HandedOver | FinishedUnheard] = []  # samples of a gang that is taken over
        self.supervisor = new_supervisor(
            self.role, on_message=self._on_message, up=self._up, down=self.gang_down, failed=self._failed
        )

    def start(self) -> None:
        """The gang has been on its way since the cluster was opened."""

    def mark_unhealthy(self, incarnation: int, reason: str) -> None:
        if (present := self._worker) is not None and present.incarnation == incarnation:
            self._unhealthy(present, reason)
        else:  # what it has left is not believed either
            self._outbox.put(ev.InstanceUnhealthy(instance=self.instance, reason=reason, incarnation=incarnation))

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends the gang, without waiting for what it does."""
        self.supervisor.close()

    # -------------------------------------------------------------- private

    def _on_message(self, item: Any) -> None:
        match item:
            case Accepted() | Offered() | Staged() | Committed() | TransferFailed():
                self._publisher.tell(item)
            case HandedOver() | FinishedUnheard() if self._worker is None:
                self._found.append(item)
            case _:
                if (worker := self._worker) is None:
                    return
                if fault := garbage_in(item):
                    self._unhealthy(worker, f"it returned garbage: {fault}")
                else:
                    worker.on_message(item)

    def _unhealthy(self, worker: GangWorker, reason: str) -> None:
        """Nothing of this incarnation is accepted from now on."""
        with self._lock:
            self._outbox.put(
                ev.InstanceUnhealthy(instance=self.instance, reason=reason, incarnation=worker.incarnation)
            )
            if self._worker is not worker:
                return
            worker.end()
            self.incarnation_down(worker, worker.incarnation, reason)
        worker.gang.die(reason)

    def _up(self, gang: Gang) -> None:
        self._publisher.up(gang)
        worker = GangWorker(self, gang, self._publisher, self._notify)
        self.incarnation_ready(worker, lambda: self._admit(worker))

    def _admit(self, worker: GangWorker) -> Sequence[HandedOver | FinishedUnheard]:
        trusted = self._publisher.recognise(worker.gang)
        with self._lock:
            found, self._found = self._found, []
            if worker.gang.dead.is_set():
                return ()
            self._worker = worker
        return found if trusted else ()

    def gang_down(self, gang: Gang) -> None:
        self._publisher.down(gang)
        with self._lock:
            self._found = []
            worker = self._worker
            self.incarnation_down(worker, gang.epoch, gang.reason, worker.end() if worker else ())

    def _failed(self, error: RunError) -> None:
        self._outbox.put(Crashed(role=self.role, error=error))
