"""KV of running samples from one gang to another, one process's part in it: host i of the one to host i of the other.

    source       lend -> Moving ................................ GiveBack -> it is forgotten
    destination             Carry -> fetch -> Carried ... Receive -> take, in every process; or Leave, in every process
                            Bring -> keep  -> Carried ... GoOn ...: of a source that had to leave, by the controller

Consumes parcels with the pages of this process's heads; produces the same in the process of the same number. Laws:
pages are taken into an engine by every process of its gang or by none; whatever fails, the sample goes on from its
tokens.
"""

from __future__ import annotations

import threading

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import Layout
from dora_jax.runtime.transfer.transfer_manifest import EXPECTED_BYTES_PER_S, Key, Lent, WireError
from dora_jax.types import InstanceId

GRACE_S = 5.0  # of a sample that waits longer the KV is sooner made again


class Porter:
    """Any thread may use it. `wire` None: nothing is lent; `layout` of this process's
    pages."""

    def __init__(self, instance: InstanceId, host: int, wire: Wire | None, layout: Layout):
        self._instance, self._host, self._wire, self._layout = instance, host, wire, layout
        self._lent: dict[int, Key] = {}
        self._fetched: dict[int, InFlightSample] = {}
        self._lock = threading.Lock()

    @property
    def lends(self) -> bool:
        return self._wire is not None

    # --------------------------------------------------------- as a source

    def lend(self, parcel: InFlightSample, move: messages.MoveOut) -> Lent:
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

    def fetch(self, carry: messages.Carry) -> messages.Carried:
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
            return messages.Carried(number=carry.number, host=self._host, fault=fault)
        with self._lock:
            self._fetched[carry.number] = parcel
        return messages.Carried(number=carry.number, host=self._host, fault="")

    def keep(self, bring: messages.Bring) -> messages.Carried:
        with self._lock:
            self._fetched[bring.number] = bring.parcel
        return messages.Carried(number=bring.number, host=self._host, fault="")

    def take(self, number: int) -> InFlightSample:
        with self._lock:
            return self._fetched.pop(number)

    def leave(self, number: int) -> None:
        with self._lock:
            self._fetched.pop(number, None)

    # ------------------------------------------------------------ private

    def _key(self, receiver: InstanceId, epoch: int, parcel: InFlightSample, number: int) -> Key:
        return Key(epoch=epoch, version=parcel.version, receiver=f"rollout {receiver}/{self._host}", sequence=number)
