"""Stage 2: KV in host memory, within a budget: of samples that are preempted, parked, or wait for their environment.

Consumes in-flight samples with their pages; gives each back once. No JAX.
Laws: no more bytes than the budget are held; beyond it the KV that came first is dropped, counted and said, and its tokens
are prefilled again. Any thread may use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dora_jax.rollout.migrate import InFlightSample, with_kv_of
from dora_jax.types import SampleId


class HostKV:
    def __init__(self, budget_bytes: int = 0, notify: Callable[[str], None] = lambda text: None):
        """budget_bytes: 0: as much as comes. notify: hears of the first KV that is dropped, the tenth, the hundredth."""
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.dropped = 0  # samples
        self.dropped_tokens = 0
        self._notify = notify
        self._held: dict[SampleId, InFlightSample] = {}  # in the order of their coming
        self._lock = threading.Lock()

    def __contains__(self, id: SampleId) -> bool:
        return id in self._held

    def put(self, parcel: InFlightSample) -> None:
        """Holds its KV until `take`; what it held of the sample before goes."""
        said = []
        with self._lock:
            self._pop(parcel.id)
            self._held[parcel.id] = parcel
            self.bytes += parcel.kv_bytes
            while self.budget_bytes and self.bytes > self.budget_bytes:
                said += self._drop(self._pop(next(iter(self._held))))
        for text in said:
            self._notify(text)

    def take(self, parcel: InFlightSample) -> InFlightSample:
        """The sample with the KV that is held of it, as far as its tokens agree; unchanged where none is."""
        with self._lock:
            held = self._pop(parcel.id)
        return parcel if held is None else with_kv_of(parcel, held)

    def forget(self, id: SampleId) -> None:
        with self._lock:
            self._pop(id)

    # ----------------------------------------------------------- private

    def _pop(self, id: SampleId) -> InFlightSample | None:
        parcel = self._held.pop(id, None)
        if parcel is not None:
            self.bytes -= parcel.kv_bytes
        return parcel

    def _drop(self, parcel: InFlightSample | None) -> list[str]:
        if parcel is None:
            return []
        self.dropped += 1
        self.dropped_tokens += parcel.kv_len
        if not worth_saying(self.dropped):
            return []
        text = f"the KV of sample {tuple(parcel.id)} leaves host memory, and its {parcel.kv_len} tokens are prefilled again"
        return [f"{text}: rollout.host_kv_bytes is {self.budget_bytes} ({self.dropped} samples so far)"]


def worth_saying(count: int) -> bool:
    """The first time, the tenth, the hundredth."""
    return str(count).strip("0") == "1"
