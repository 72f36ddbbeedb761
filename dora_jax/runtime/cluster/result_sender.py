"""What leaves a rollout process: facts to the controller, samples to other gangs.

Consumes the outbox items of an InstanceWorker; produces records on the uplink, and keeps what only this process can
give: its part of the pages of samples that may come back, and samples that finished when nobody may have listened. Law:
the first process of a gang speaks for all, but of pages each gives its own part, once the gang leaves.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dora_jax.rollout.migrate import InFlightSample, without_pages
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import MAX_FRAME_BYTES
from dora_jax.runtime.cluster.controller_connection import Uplink
from dora_jax.runtime.cluster.kv_endpoint import Porter
from dora_jax.runtime.transfer.transfer_manifest import Lent
from dora_jax.runtime.workers import Ended, Exported, Finished, HandedOver
from dora_jax.types import Sample, SampleId, Version

MAX_KV_BYTES = 3 * MAX_FRAME_BYTES // 4  # of one record: more would end the link, and with it all that still waits
UNHEARD_S = 5.0  # what was said so long before a controller's end may not be in its journal


class Outlet:
    """The outbox of an InstanceWorker."""

    def __init__(self, link: Uplink, host: int, hosts: int, alike: int = 1):
        """alike: neighbouring processes that hold the same KV heads."""
        self._link, self._host, self._hosts, self._alike = link, host, hosts, alike
        self._whole = hosts == 1  # of a sample's pages; a part is of no use elsewhere without the others
        self._pages: dict[SampleId, InFlightSample] = {}  # of samples that have left, and may come back
        self._finished: collections.deque[tuple[float, Sample]] = collections.deque()  # that may not have been heard
        self._recalled: list[HandedOver | Ended] | None = None

    def put(self, item: Any) -> None:
        match item:
            case HandedOver(parcel=parcel) if self._recalled is None and not self._whole:
                part = messages.PartHanded(
                    parcel=self._limited(parcel), host=self._host, hosts=self._hosts, alike=self._alike
                )
                return self._link.send(part)
            case Exported(parcel=parcel) | HandedOver(parcel=parcel) if self._recalled is None and self._whole:
                item = dataclasses.replace(item, parcel=self._limited(parcel))
            case Exported(parcel=parcel) | HandedOver(parcel=parcel):  # it may come back
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
        self._link.send(messages.Left(hosts=self._hosts))

    def recall(self, hand_over: Callable[[], None]) -> list[HandedOver | Ended]:
        """What the next controller may not know of: what is running, and what has finished when nobody listened."""
        self._recalled = []
        hand_over()
        handed, self._recalled = self._recalled, None
        return [*(Ended(sample=sample) for _, sample in self._finished), *handed]

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


class Elsewhere:
    """Where a sample goes, as its instance sees it: through the controller."""

    def __init__(self, move: messages.MoveOut, outlet: Outlet):
        self.instance = move.dst
        self._number, self._outlet = move.number, outlet

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: InFlightSample, src: int, attempt: int) -> None:
        lent = Lent(parcel=self._outlet.fit(parcel), kv_len=0, page_size=0, manifest=None)
        self._outlet.put(
            messages.Moving(
                lent=lent, src=src, dst=self.instance, attempt=attempt, number=self._number, host=0, hosts=1
            )
        )


class Lender:
    """As `Elsewhere`; its KV goes from process to process."""

    def __init__(self, move: messages.MoveOut, link: Uplink, porter: Porter, host: int, hosts: int):
        self.instance = move.dst
        self._move, self._link, self._porter, self._host, self._hosts = move, link, porter, host, hosts

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: InFlightSample, src: int, attempt: int) -> None:
        lent = self._porter.lend(parcel, self._move)
        self._link.send(
            messages.Moving(
                lent=lent,
                src=src,
                dst=self.instance,
                attempt=attempt,
                number=self._move.number,
                host=self._host,
                hosts=self._hosts,
            )
        )
