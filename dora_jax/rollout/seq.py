"""Stage 2, pure: one sample as the scheduler sees it: what it has sampled, which pages it holds, what is on its way.

Consumes a parcel; plan.py changes it, engine.py appends what comes back from the device. No JAX.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from dora_jax.rollout.migrate import Parcel
from dora_jax.rollout.pages import Node


@dataclasses.dataclass(frozen=True)
class Upload:
    """Write parcel pages [start, start + len(pages)) into these pages."""

    parcel: Parcel
    start: int
    pages: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)


class Seq:
    """One sample in this engine. `sequence` is prompt + sampled; all but its last token have KV once it decodes."""

    def __init__(self, parcel: Parcel, arrival: int, announce: bool):
        self.id = parcel.id
        self.version = parcel.version
        self.arrival = arrival
        self.announce = announce  # report it as started when it gets a slot
        self.prompt_ids = parcel.prompt_ids
        self.spans = parcel.spans  # of earlier versions
        self.max_new_tokens = parcel.max_new_tokens
        self.sequence: list[int] = [*parcel.prompt_ids.tolist(), *parcel.out_ids.tolist()]
        self.logprobs: list[float] = parcel.logprobs.tolist()
        self.kept: list[np.ndarray] = [] if parcel.kept is None else list(parcel.kept)  # i32[top_k] a sampled token
        self.parcel: Parcel | None = parcel  # its KV in host memory, while it waits or is uploaded
        self.uploads: deque[tuple[Upload, Node | None]] = deque()  # not yet planned; the prefix node that each fills
        self.leaving = False  # is being exported, in pieces: it decodes no more
        self.slot: int | None = None
        self.path: list[Node] = []  # shared prefix
        self.table: list[int] = []  # page of each page-sized stretch: the path's, then its own from first_private on
        self.first_private = 0
        self.tail_page: int | None = None  # the shared page to read in the place of the first private one, once
        self.fresh = True  # the device does not hold its next token yet
        self.inflight = 0  # decode steps launched and not yet read back

    @property
    def n_out(self) -> int:
        return len(self.sequence) - len(self.prompt_ids)

    @property
    def position(self) -> int:
        """Of the next token to feed, once what is in flight has come back."""
        return len(self.sequence) - 1 + self.inflight

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - self.n_out - self.inflight

    @property
    def ready(self) -> bool:
        """Its prefix has KV: it can decode. Nodes become ready in order."""
        return self.slot is not None and not self.uploads and (not self.path or self.path[-1].ready)

    @property
    def decodes(self) -> bool:
        """In the next call of its version."""
        return self.ready and self.remaining > 0 and not self.leaving

    @property
    def kv_len(self) -> int:
        """Leading positions that have KV, as far as its parcel does not hold it."""
        if self.slot is None or self.uploads:
            return 0
        return self.position if self.ready else next(node.start for node in self.path if not node.ready)

    def repeats(self, limit: int) -> int:
        """How many of the last sampled tokens are the same, counted up to a limit."""
        last = self.sequence[len(self.prompt_ids) :][-limit:] if limit else []
        return next((n for n, token in enumerate(reversed(last)) if token != last[-1]), len(last))

    @property
    def private(self) -> list[int]:
        return self.table[self.first_private :]

    def pages_to_read(self) -> list[int]:
        if self.tail_page is None:
            return self.table
        return [*self.table[: self.first_private], self.tail_page, *self.table[self.first_private + 1 :]]
