"""A rollout gang as Coordinator sees it: an instance worker whose work is done elsewhere.

Consumes the calls that an EngineWorker takes; produces its outbox items. Laws: commands reach a gang only after the
orchestrator has heard that it is there, so none meant for an earlier epoch does; what a lost gang still owed an answer
to is answered here, right after its InstanceDown; weights are used only once every process of the gang holds them, as
is the KV of a sample that comes: where one process cannot fetch its part, all of them make it again from the tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, joined, parted, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.transfer.weight_messages import Accepted, Committed, Offered, Staged, TransferFailed
from dora_jax.runtime.worker import Crashed, FinishedUnheard, HandedOver, InstanceReady
from dora_jax.types import InstanceId, Prompt, SampleId, Version

NUMBERS = itertools.count(time.time_ns())  # of moves: higher than those of any controller before


@dataclasses.dataclass
class _Carry:
    """KV on its way here: what takes it in, by its number or 0, and the process that offers it, if not the controller."""

    id: SampleId
    take_in: Callable[[int], messages.FinishMove | messages.ResumeSample]
    source: Gang | None = None
    answers: dict[int, str] = dataclasses.field(default_factory=dict)  # by process: what went wrong; empty: nothing
    later: list[messages.CancelSample] = dataclasses.field(default_factory=list)  # what it is told once it is in

    def give_back(self, number: int) -> None:
        if self.source is not None:
            self.source.tell_all(messages.ReleaseKV(number=number))


class RemoteInstance:
    """Called by the main thread, but for `_heard`, `_up`, `_down` (links and keeper) and `_swap` (publisher)."""

    def __init__(
        self,
        instance: InstanceId,
        up: ev.InstanceUp,
        outbox: queue.SimpleQueue,
        peers: Mapping[InstanceId, RemoteInstance],
        publisher: WeightPublisher,
        new_keeper: Callable[..., GangSupervisor],
        notify: Callable[[str], None],
    ):
        self.instance = instance
        self.role = f"rollout {instance}"
        self._event = up
        self._outbox = outbox
        self._peers = peers
        self._publisher = publisher
        self._notify = notify
        self._lock = threading.Lock()
        self._gang: Gang | None = None  # that the orchestrator knows of
        self._leaving: dict[SampleId, tuple[ev.MoveFailed, Gang | None]] = {}  # not yet out; the answer that they get
        # where this gang is lost, and the gang that they go to
        self._parts: dict[
            int, dict[int, messages.MoveStarted]
        ] = {}  # of moves out that not every process has spoken of
        self._arriving: dict[SampleId, ev.SampleMoved] = {}  # handed over, not yet in; the answer that they get
        self._carries: dict[int, _Carry] = {}
        self._handed: dict[
            SampleId, dict[int, InFlightSample]
        ] = {}  # parts of samples that are handed over, by process
        self._brought: list[HandedOver | FinishedUnheard] = []  # samples of a gang that is taken over
        self._waited_s = 0.0  # of earlier epochs
        self.life = 0  # the latest: its gang's epoch
        self._keeper = new_keeper(self.role, heard=self._heard, up=self._up, down=self._down, failed=self._failed)

    # ---------------------------------------------------------- as a worker

    def start(self) -> None:
        """Its gang has been on its way since the cluster was opened."""

    def open(self) -> None:
        self._keeper.start()

    def want(self, wanted: bool) -> None:
        self._keeper.want(wanted)

    def stop(self, timeout_s: float = 0.0) -> None:
        """A gang is not waited for: it is ended."""
        self._keeper.close()

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    @property
    def wait_s(self) -> float:
        gang = self._gang
        return self._waited_s + (gang.waited_s if gang else 0.0)

    @property
    def state(self) -> str:
        gang = self._gang
        return f"{self.role} is down" if gang is None else f"{self.role} is up (epoch {gang.epoch})"

    def load(self, version: Version, drop: Version | None) -> None:
        if gang := self._gang:
            self._publisher.want(gang, version, lambda: self._swap(gang, version, drop))

    def submit(self, sample: SampleId, prompt: Prompt, version: Version) -> None:
        self._send(messages.StartSample(id=sample, prompt=prompt, version=version))

    def cancel(self, sample: SampleId, reason: str) -> None:
        post = messages.CancelSample(id=sample, reason=reason)
        with self._lock:
            for carry in self._carries.values():
                if carry.id == sample:
                    return carry.later.append(post)
        self._send(post)

    def park(self, sample: SampleId) -> None:
        self._send(messages.ParkSample(id=sample))

    def resume(self, parcel: InFlightSample) -> None:
        if (gang := self._gang) is None:
            return
        if gang.hosts == 1 or not parcel.n_pages:
            return gang.post(messages.ResumeSample(parcel=parcel, number=0))
        number, tokens = next(NUMBERS), without_pages(parcel)
        parts = [messages.StageKV(number=number, parcel=part) for part in parted(parcel, gang.hosts)]
        with self._lock:
            if gang is self._gang:
                self._carries[number] = _Carry(
                    parcel.id, lambda number: messages.ResumeSample(parcel=tokens, number=number)
                )
                gang.tell_each(parts)

    def move(self, sample: SampleId, dst: RemoteInstance, attempt: int) -> None:
        failed = ev.MoveFailed(
            id=sample, src=self.instance, dst=dst.instance, attempt=attempt, reason="its instance is lost"
        )
        with self._lock:
            if self._gang is not None:
                gang = dst._gang
                self._leaving[sample] = failed, gang
                self._gang.post(
                    messages.MoveSample(
                        id=sample,
                        dst=dst.instance,
                        epoch=gang.epoch if gang else 0,
                        number=next(NUMBERS),
                        attempt=attempt,
                    )
                )
                return
        self._outbox.put(failed)

    # -------------------------------------------------------------- private

    def _send(self, post: Any) -> None:
        """To nobody where the gang is lost: InstanceDown is on its way, and gives back what was asked for."""
        if gang := self._gang:
            gang.post(post)

    def _swap(self, gang: Gang, version: Version, drop: Version | None) -> None:
        gang.post(messages.UseWeights(version=version, drop=drop))
        if drop is not None:
            self._publisher.dropped(gang, drop)

    def _heard(self, item: Any) -> None:
        match item:
            case Accepted() | Offered() | Staged() | Committed() | TransferFailed():
                self._publisher.tell(item)
                return
            case messages.MoveStarted():
                self._part(item)
                return
            case messages.KVStaged():
                self._carried(item)
                return
            case messages.HandedOverShard():
                self._part_handed(item)
                return
            case HandedOver() | FinishedUnheard() if self._gang is None:
                self._brought.append(item)
                return
            case ev.MoveFailed(id=id):
                with self._lock:
                    self._leaving.pop(id)
            case ev.SampleMoved(id=id):
                with self._lock:
                    self._arriving.pop(id)
        self._outbox.put(item)

    def _part(self, part: messages.MoveStarted) -> None:
        """One process's word that a sample has left."""
        with self._lock:
            parts = self._parts.setdefault(part.number, {})
            parts[part.host] = part
            if len(parts) < part.hosts:
                return
            del self._parts[part.number]
            _, gang = self._leaving.pop(part.lent.parcel.id)
            source = self._gang
        self._peers[part.dst]._take([parts[host] for host in range(part.hosts)], source, gang)

    def _take(self, parts: Sequence[messages.MoveStarted], source: Gang, gang: Gang | None) -> None:
        """A sample from another instance, meant for this gang; where that is lost, the journal's tokens go on."""
        first, lent = parts[0], tuple(part.lent for part in parts)
        id = first.lent.parcel.id
        moved = ev.SampleMoved(id=id, src=first.src, dst=self.instance, attempt=first.attempt)
        by_wire = all(each.manifest is not None for each in lent)
        with self._lock:
            there = gang is not None and gang is self._gang
            if there:
                self._arriving[id] = moved
            if there and by_wire:
                self._carries[first.number] = _Carry(id, lambda number: _receive(first, number), source)
                gang.tell_all(messages.FetchKV(number=first.number, epoch=gang.epoch, lent=lent))
            elif there:
                gang.post(_receive(first, 0))
        if not there:
            if by_wire:
                source.tell_all(messages.ReleaseKV(number=first.number))
            self._outbox.put(moved)

    def _carried(self, answer: messages.KVStaged) -> None:
        with self._lock:
            carry, gang = self._carries.get(answer.number), self._gang
            if carry is None:
                return  # an earlier controller asked for it
            carry.answers[answer.host] = answer.fault
            if len(carry.answers) < gang.hosts:
                return
            del self._carries[answer.number]
            fault = next(filter(None, carry.answers.values()), "")
            for post in (carry.take_in(0 if fault else answer.number), *carry.later):
                gang.post(post)
            if fault:
                gang.tell_all(messages.DropStagedKV(number=answer.number))
        carry.give_back(answer.number)
        if fault:
            self._notify(
                f"the KV of sample {tuple(carry.id)} did not reach {self.role}, where it is made again: {fault}"
            )

    def _part_handed(self, part: messages.HandedOverShard) -> None:
        with self._lock:
            parts = self._handed.setdefault(part.parcel.id, {})
            parts[part.host] = part.parcel
            if len(parts) < part.hosts:
                return
            del self._handed[part.parcel.id]
        self._heard(HandedOver(parcel=joined([parts[host] for host in range(0, part.hosts, part.alike)])))

    def _up(self, gang: Gang) -> None:
        self._publisher.up(gang)
        self.life = gang.epoch
        event = dataclasses.replace(self._event, life=gang.epoch)
        self._outbox.put(InstanceReady(event=event, admit=lambda: self._admit(gang)))

    def _admit(self, gang: Gang) -> Sequence[HandedOver | FinishedUnheard]:
        trusted = self._publisher.recognise(gang)
        with self._lock:
            brought, self._brought = self._brought, []
            if gang.dead.is_set():
                return ()
            self._gang = gang
        return brought if trusted else ()

    def _down(self, gang: Gang) -> None:
        with self._lock:
            if was_known := self._gang is gang:
                self._waited_s += gang.waited_s
            self._gang = None
            leaving, self._leaving = self._leaving, {}
            arriving, self._arriving = self._arriving, {}
            carries, self._carries, self._parts = self._carries, {}, {}
            handed, self._handed = self._handed if was_known else {}, {}
            self._brought = []
        self._publisher.down(gang)
        for number, carry in carries.items():
            carry.give_back(number)
        for parts in handed.values():  # not all of it came in time; what the first process hands over is in the journal
            if 0 in parts:
                self._outbox.put(HandedOver(parcel=without_pages(parts[0])))
        self._outbox.put(ev.InstanceDown(instance=self.instance, reason=gang.reason, life=gang.epoch))
        for answer in (*(failed for failed, _ in leaving.values()), *arriving.values()):
            self._outbox.put(answer)

    def _failed(self, error: RunError) -> None:
        self._outbox.put(Crashed(role=self.role, error=error))


def _receive(sample: messages.MoveStarted, number: int) -> messages.FinishMove:
    return messages.FinishMove(parcel=sample.lent.parcel, src=sample.src, attempt=sample.attempt, number=number)
