"""What leaves a rollout process, and the KV of running samples from one gang to another.

    source       offer -> MoveStarted ............................... ReleaseKV -> it is forgotten
    destination         StageKV -> stage -> KVStaged ... Move or Resume -> take, in every process; or ReleaseKV in each

`ResultSender` is the outbox of an EngineWorker: it sends facts to the controller, and keeps what only this process can
give: its shard of the pages of samples that may come back, and samples that finished when nobody may have listened.
`KVEndpoint` offers and fetches the pages of this process's heads: process i of one gang to process i of the other.
`TransferThreads` carries weights and KV in and out while the main thread computes.

Laws: the first process of a gang speaks for all, but of pages each gives its own shard, once the gang leaves; every
process of a gang takes pages into its engine, or none does; whatever fails, the sample goes on from its tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import time
import typing
from collections.abc import Callable
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample, with_kv_of, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import MAX_FRAME_BYTES, ControllerConnection
from dora_jax.runtime.common.worker import Exported, Finished, Held, Message
from dora_jax.runtime.journal.object_storage import StoreError
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import PageShape
from dora_jax.runtime.transfer.transfer_manifest import Key, KVOffer, WireError, deadline_s
from dora_jax.runtime.transfer.weight_messages import Command, Pull, Read
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from dora_jax.types import InstanceId, Sample, SampleId, Version

OWN = (  # what the threads do beside the role's: the last two of a trainer alone
    *typing.get_args(Command),
    *(messages.ReleaseKV, messages.DropWeights, messages.WriteWeights),
)
GRACE_S = 5.0  # the KV of a sample that waits longer is sooner made again
MAX_KV_BYTES = 3 * MAX_FRAME_BYTES // 4  # of one record: more would end the link, and with it all that still waits
UNHEARD_S = 5.0  # what was sent so long before a controller's end may not be in its journal


class ResultSender:
    """The outbox of an EngineWorker."""

    def __init__(self, link: ControllerConnection, host: int, hosts: int, alike: int = 1):
        """alike: neighbouring processes that hold the same KV heads."""
        self.link, self.host, self.hosts, self._alike = link, host, hosts, alike
        self._whole = hosts == 1  # of a sample's pages; a part is of no use elsewhere without the others
        self.pages: dict[SampleId, InFlightSample] = {}  # of samples that have left, and may come back
        self._finished: collections.deque[tuple[float, Sample]] = collections.deque()  # that may not have arrived
        self._recalled: list[Held] | None = None

    def put(self, item: Any) -> None:
        recalling = self._recalled is not None
        held, waits = (item.in_flight, item.waits) if isinstance(item, Exported) else (item, False)
        if isinstance(held, InFlightSample):
            if self._whole and not recalling and not waits:
                held = self._limited(held)
            elif held is item and not recalling:
                part = messages.HandedOverShard(
                    in_flight=self._limited(held), host=self.host, hosts=self.hosts, alike=self._alike
                )
                return self.link.send(part)
            elif held.n_pages or not waits:  # else the engine keeps its KV
                self.pages[held.id] = held  # it may come back
                held = without_pages(held)
            item = dataclasses.replace(item, in_flight=held) if isinstance(item, Exported) else held
        if self.host:
            return
        if isinstance(item, Finished):
            now = time.monotonic()
            self._finished.append((now, item.sample))
            while not self.link.alone and self._finished[0][0] < now - UNHEARD_S:
                self._finished.popleft()
        if self._recalled is None:
            self.link.send(item)
        elif isinstance(held, InFlightSample):  # what waits for its environment is reported again once it goes on
            self._recalled.append(held)

    def leave(self) -> None:
        """Everything that was running has been put: it goes on elsewhere."""
        self.link.send(messages.HandOverDone(hosts=self.hosts))

    def recall(self, hand_over: Callable[[], None]) -> list[Held]:
        """What the next controller may not know of: what is running, and what has finished when nobody listened."""
        self._recalled = []
        hand_over()
        handed, self._recalled = self._recalled, None
        return [*(sample for _, sample in self._finished), *handed]

    def with_own_pages(self, in_flight: InFlightSample) -> InFlightSample:
        """With the KV that stayed here when it left."""
        left = self.pages.pop(in_flight.id, None)
        return in_flight if left is None else with_kv_of(in_flight, left)

    def fit(self, in_flight: InFlightSample) -> InFlightSample:
        return self._limited(in_flight) if self._whole else without_pages(in_flight)

    def _limited(self, in_flight: InFlightSample) -> InFlightSample:
        if in_flight.kv_bytes <= MAX_KV_BYTES:
            return in_flight
        text = (
            f"sample {tuple(in_flight.id)} leaves without its KV, which is made again: "
            f"{in_flight.kv_bytes / 2**30:.1f} GiB are more than one record holds"
        )
        self.link.send(messages.Note(text=text))
        return without_pages(in_flight)


class MoveDestination:
    """Where a sample goes, as its instance sees it. Its KV goes from process to process where `kv` offers it, and every
    process says so; else in the message of the first one, through the controller."""

    def __init__(self, move: messages.Command, sender: ResultSender, kv: KVEndpoint):
        self._move, self._sender, self._kv = move, sender, kv

    def send(self, message: Message, payload: Any = None, dst: None = None) -> None:
        sender, offers = self._sender, self._kv.offers
        if offers:
            offered = self._kv.offer(payload, self._move)
        else:
            offered = KVOffer(in_flight=sender.fit(payload), kv_len=0, page_size=0, manifest=None)
        shards = sender.hosts if offers else 1
        started = messages.MoveStarted(offered=offered, number=self._move.number, host=sender.host, hosts=shards)
        (sender.link.send if offers else sender.put)(started)


class KVEndpoint:
    """Any thread may use it. wire: None where nothing is offered. layout: of this process's pages."""

    def __init__(self, instance: InstanceId, host: int, wire: Wire | None, layout: PageShape):
        self._instance, self._host, self._wire, self._layout = instance, host, wire, layout
        self.offers = wire is not None
        self._offered: dict[int, Key] = {}
        self._staged: dict[int, InFlightSample] = {}
        self._lock = threading.Lock()

    # --------------------------------------------------------- as a source

    def offer(self, in_flight: InFlightSample, move: messages.Command) -> KVOffer:
        assert isinstance(move.what, ev.Move)
        key = self._key(move.what.dst, move.epoch, in_flight, move.number)
        offered = kv_transfer.offer(self._opened, key, in_flight, self._layout)
        if offered.manifest is not None:
            with self._lock:
                self._offered[move.number] = key
        return offered

    def release(self, number: int) -> None:
        """Drop what was offered or staged under this number."""
        with self._lock:
            self._staged.pop(number, None)
            key = self._offered.pop(number, None)
        if key is not None:
            self._opened.release(key)

    def settle(self) -> None:
        """Ends all that is under way, for nobody will ask for it any more."""
        for number in tuple(self._offered):
            self.release(number)
        with self._lock:
            self._staged.clear()

    # ----------------------------------------------------- as a destination

    def stage(self, item: messages.StageKV) -> messages.KVStaged:
        """Takes its time; until `take` or `release` the pages lie in host memory."""
        offered, in_flight, fault = item.offered, item.offered.in_flight, ""
        if offered.manifest is not None:
            key = self._key(self._instance, item.epoch, in_flight, item.number)
            limit_s = deadline_s(sum(shard.bytes for shard in offered.manifest.shards), GRACE_S)
            try:
                in_flight = kv_transfer.fetch(self._opened, offered, key, self._layout, limit_s)
            except WireError as error:  # of this transfer, and of it alone
                fault = f"process {self._host}: {' '.join(str(error).split())}"
        if not fault:
            with self._lock:
                self._staged[item.number] = in_flight
        return messages.KVStaged(number=item.number, host=self._host, fault=fault)

    def take(self, number: int) -> InFlightSample:
        with self._lock:
            return self._staged.pop(number)

    # ------------------------------------------------------------ private

    @property
    def _opened(self) -> Wire:
        if self._wire is None:
            raise RuntimeError("KV is offered between processes only where cluster.wire is 'transfer'")
        return self._wire

    def _key(self, receiver: InstanceId, epoch: int, in_flight: InFlightSample, number: int) -> Key:
        return Key(epoch=epoch, version=in_flight.version, receiver=f"rollout {receiver}/{self._host}", sequence=number)


class TransferThreads:
    """Weights and KV in and out, beside what the main thread does. `write(version)`: a trainer's, into storage."""

    def __init__(
        self,
        weights: WeightEndpoint,
        link: ControllerConnection,
        write: Callable[[Version], None] | None = None,
        kv: KVEndpoint | None = None,
    ):
        self._weights, self._link, self._write, self._kv = weights, link, write, kv
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()  # records; a partial: any work, between them

    def sort(self, inbox: queue.SimpleQueue) -> queue.SimpleQueue:
        """What is left for the role's thread. None in the inbox ends the threads."""
        rest: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._sort, args=(inbox, rest), name="sorter", daemon=True).start()
        threading.Thread(target=self._run, name="transfers", daemon=True).start()
        return rest

    def settle(self) -> tuple[Version, ...]:
        """Ends what the earlier controller has asked for; the versions that are held."""
        done = threading.Event()
        self.jobs.put(done)
        done.wait()
        if self._kv is not None:
            self._kv.settle()
        return self._weights.settle()

    def _sort(self, inbox: queue.SimpleQueue, rest: queue.SimpleQueue) -> None:
        while (item := inbox.get()) is not None:
            what = item.what if isinstance(item, messages.Call) else item
            if isinstance(what, Pull | Read | messages.StageKV):
                # they take their time, and an Abort may come meanwhile
                threading.Thread(target=self._do, args=(item,), name="pull", daemon=True).start()
            elif isinstance(what, OWN):
                self.jobs.put(item)
            else:
                rest.put(item)
        self.jobs.put(None)

    def _run(self) -> None:
        while (item := self.jobs.get()) is not None:
            self._do(item)

    def _do(self, item: Any) -> None:
        try:
            match item:
                case threading.Event():
                    item.set()
                case functools.partial():
                    item()
                case messages.Call(number=number, what=messages.WriteWeights(version=version)):
                    if self._write is None:
                        raise RuntimeError(f"version {version} cannot be written by a process of an instance")
                    answer: messages.CallResult = messages.Done(value=version)
                    try:
                        self._write(version)
                    except StoreError as error:
                        self._link.send(messages.Note(text=f"version {version} does not come into storage: {error}"))
                        answer = messages.CallDeclined(error=str(error))
                    self._link.send(messages.CallAnswer(number=number, what=answer))
                case messages.DropWeights(version=version):
                    self._weights.weights.drop(version)
                case messages.StageKV() if self._kv:
                    self._link.send(self._kv.stage(item))
                case messages.ReleaseKV(number=number) if self._kv:
                    self._kv.release(number)
                case messages.StageKV() | messages.ReleaseKV():
                    pass  # a trainer has none
                case _:
                    if (fact := self._weights.execute(item)) is not None:
                        self._link.send(fact)
        except BaseException as error:  # a transfers that fell silent would only look slow: its process ends, its gang
            self._link.send(messages.ProcessFailed(error=f"{type(error).__name__}: {error}"))
