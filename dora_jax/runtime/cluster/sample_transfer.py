"""What leaves a rollout process, and the KV of running samples from one gang to another.

    source       lend -> MoveStarted ........................... ReleaseKV -> it is forgotten
    destination         FetchKV -> fetch -> KVStaged ... FinishMove -> take, in every process; or DropStagedKV in each
                        StageKV -> keep  -> KVStaged ... ResumeSample ...: of a source that had to leave, by the controller

`ResultSender` is the outbox of an EngineWorker: it sends facts to the controller, and keeps what only this process can
give: its shard of the pages of samples that may come back, and samples that finished when nobody may have listened.
`KVEndpoint` lends and fetches the pages of this process's heads: process i of one gang to process i of the other.

Laws: the first process of a gang speaks for all, but of pages each gives its own shard, once the gang leaves; every
process of a gang takes pages into its engine, or none does; whatever fails, the sample goes on from its tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dora_jax.rollout.migrate import InFlightSample, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import MAX_FRAME_BYTES, ControllerConnection
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import PageShape
from dora_jax.runtime.transfer.transfer_manifest import EXPECTED_BYTES_PER_S, Key, Lent, WireError
from dora_jax.runtime.worker import Finished, FinishedUnheard, HandedOver, Parked
from dora_jax.types import InstanceId, Sample, SampleId, Version

GRACE_S = 5.0  # the KV of a sample that waits longer is sooner made again
MAX_KV_BYTES = 3 * MAX_FRAME_BYTES // 4  # of one record: more would end the link, and with it all that still waits
UNHEARD_S = 5.0  # what was said so long before a controller's end may not be in its journal


class ResultSender:
    """The outbox of an EngineWorker."""

    def __init__(self, link: ControllerConnection, host: int, hosts: int, alike: int = 1):
        """alike: neighbouring processes that hold the same KV heads."""
        self._link, self._host, self._hosts, self._alike = link, host, hosts, alike
        self._whole = hosts == 1  # of a sample's pages; a part is of no use elsewhere without the others
        self._pages: dict[SampleId, InFlightSample] = {}  # of samples that have left, and may come back
        self._finished: collections.deque[tuple[float, Sample]] = collections.deque()  # that may not have been heard
        self._recalled: list[HandedOver | FinishedUnheard] | None = None

    def put(self, item: Any) -> None:
        match item:
            case HandedOver(parcel=parcel) if self._recalled is None and not self._whole:
                part = messages.HandedOverShard(
                    parcel=self._limited(parcel), host=self._host, hosts=self._hosts, alike=self._alike
                )
                return self._link.send(part)
            case Parked(parcel=parcel) | HandedOver(parcel=parcel) if self._recalled is None and self._whole:
                item = dataclasses.replace(item, parcel=self._limited(parcel))
            case Parked(parcel=parcel) | HandedOver(parcel=parcel):  # it may come back
                self._pages[parcel.id] = parcel
                item = dataclasses.replace(item, parcel=without_pages(parcel))
        if self._host:
            return
        if isinstance(item, Finished):
            self._remember(item.sample)
        if self._recalled is None:
            self._link.send(item)
        elif isinstance(item, HandedOver):
            self._recalled.append(item)

    def leave(self, hand_over: Callable[[], None]) -> None:
        """Everything that is running goes elsewhere."""
        hand_over()
        self._link.send(messages.HandOverDone(hosts=self._hosts))

    def recall(self, hand_over: Callable[[], None]) -> list[HandedOver | FinishedUnheard]:
        """What the next controller may not know of: what is running, and what has finished when nobody listened."""
        self._recalled = []
        hand_over()
        handed, self._recalled = self._recalled, None
        return [*(FinishedUnheard(sample=sample) for _, sample in self._finished), *handed]

    def with_own_pages(self, parcel: InFlightSample) -> InFlightSample:
        """As it has left, where it comes back so."""
        left = self._pages.pop(parcel.id, None)
        same = left is not None and left.version == parcel.version and np.array_equal(left.out_ids, parcel.out_ids)
        return left if same and not parcel.kv_len else parcel

    def forget(self, version: Version) -> None:
        self._pages = {id: parcel for id, parcel in self._pages.items() if parcel.version != version}

    def fit(self, parcel: InFlightSample) -> InFlightSample:
        return self._limited(parcel) if self._whole else without_pages(parcel)

    def _limited(self, parcel: InFlightSample) -> InFlightSample:
        if parcel.kv_bytes <= MAX_KV_BYTES:
            return parcel
        self._link.send(
            messages.Note(
                text=f"sample {tuple(parcel.id)} leaves without its KV, which is made again: "
                f"{parcel.kv_bytes / 2**30:.1f} GiB are more than one record holds"
            )
        )
        return without_pages(parcel)

    def _remember(self, sample: Sample) -> None:
        now = time.monotonic()
        self._finished.append((now, sample))
        while not self._link.alone and self._finished[0][0] < now - UNHEARD_S:
            self._finished.popleft()


class MoveThroughController:
    """Where a sample goes, as its instance sees it: through the controller."""

    def __init__(self, move: messages.MoveSample, outlet: ResultSender):
        self.instance = move.dst
        self._number, self._outlet = move.number, outlet

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: InFlightSample, src: int, attempt: int) -> None:
        lent = Lent(parcel=self._outlet.fit(parcel), kv_len=0, page_size=0, manifest=None)
        self._outlet.put(
            messages.MoveStarted(
                lent=lent, src=src, dst=self.instance, attempt=attempt, number=self._number, host=0, hosts=1
            )
        )


class MoveBetweenProcesses:
    """As `MoveThroughController`; its KV goes from process to process."""

    def __init__(
        self, move: messages.MoveSample, link: ControllerConnection, porter: KVEndpoint, host: int, hosts: int
    ):
        self.instance = move.dst
        self._move, self._link, self._porter, self._host, self._hosts = move, link, porter, host, hosts

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: InFlightSample, src: int, attempt: int) -> None:
        lent = self._porter.lend(parcel, self._move)
        self._link.send(
            messages.MoveStarted(
                lent=lent,
                src=src,
                dst=self.instance,
                attempt=attempt,
                number=self._move.number,
                host=self._host,
                hosts=self._hosts,
            )
        )


class KVEndpoint:
    """Any thread may use it. `wire` None: nothing is lent; `layout` of this process's
    pages."""

    def __init__(self, instance: InstanceId, host: int, wire: Wire | None, layout: PageShape):
        self._instance, self._host, self._wire, self._layout = instance, host, wire, layout
        self._lent: dict[int, Key] = {}
        self._fetched: dict[int, InFlightSample] = {}
        self._lock = threading.Lock()

    @property
    def lends(self) -> bool:
        return self._wire is not None

    # --------------------------------------------------------- as a source

    def lend(self, parcel: InFlightSample, move: messages.MoveSample) -> Lent:
        key = self._key(move.dst, move.epoch, parcel, move.number)
        lent = kv_transfer.lend(self._wire, key, parcel)
        if lent.manifest is not None:
            with self._lock:
                self._lent[move.number] = key
        return lent

    def give_back(self, number: int) -> None:
        with self._lock:
            key = self._lent.pop(number, None)
        if key is not None:
            self._wire.release(key)

    def settle(self) -> None:
        """Ends all that is under way, for nobody will ask for it any more."""
        for number in tuple(self._lent):
            self.give_back(number)
        with self._lock:
            self._fetched.clear()

    # ----------------------------------------------------- as a destination

    def fetch(self, carry: messages.FetchKV) -> messages.KVStaged:
        """Takes its time; until `take` or `leave` the pages lie in host memory."""
        lent = carry.lent[self._host]
        key = self._key(self._instance, carry.epoch, lent.parcel, carry.number)
        size = sum(shard.bytes for shard in lent.manifest.shards)
        try:
            parcel = kv_transfer.fetch(
                self._wire, lent, key, self._layout, GRACE_S + size / (0.5 * EXPECTED_BYTES_PER_S)
            )
        except WireError as error:  # of this transfer, and of it alone
            fault = f"process {self._host}: {' '.join(str(error).split())}"
            return messages.KVStaged(number=carry.number, host=self._host, fault=fault)
        with self._lock:
            self._fetched[carry.number] = parcel
        return messages.KVStaged(number=carry.number, host=self._host, fault="")

    def keep(self, bring: messages.StageKV) -> messages.KVStaged:
        with self._lock:
            self._fetched[bring.number] = bring.parcel
        return messages.KVStaged(number=bring.number, host=self._host, fault="")

    def take(self, number: int) -> InFlightSample:
        with self._lock:
            return self._fetched.pop(number)

    def leave(self, number: int) -> None:
        with self._lock:
            self._fetched.pop(number, None)

    # ------------------------------------------------------------ private

    def _key(self, receiver: InstanceId, epoch: int, parcel: InFlightSample, number: int) -> Key:
        return Key(epoch=epoch, version=parcel.version, receiver=f"rollout {receiver}/{self._host}", sequence=number)
