"""Stage 2, pure: one sample as the scheduler sees it: what it has sampled, which pages it holds, what is on its way.

Consumes a parcel; plan.py changes it, engine.py appends what comes back from the device. No JAX.
Law: what has been sampled is written once, behind what there was; nothing copies the past until the sample ends.
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from dora_jax.models.routes import RouteShape
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.pages import Node
from dora_jax.rollout.route_log import RouteLog
from dora_jax.types import TokenTable


@dataclasses.dataclass(frozen=True)
class Upload:
    """Write parcel pages [start, start + len(pages)) into these pages."""

    parcel: InFlightSample
    start: int
    pages: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)


class Seq:
    """One sample in this engine. `sequence` is prompt + sampled; all but its last token have KV once it decodes."""

    def __init__(
        self, parcel: InFlightSample, arrival: int, announce: bool, kept: int = 0, routes: RouteShape | None = None
    ):
        """kept: ids of the keep set that come along with each token. routes: what the experts of a token look like,
        where they come along."""
        self.id = parcel.id
        self.version = parcel.version
        self.arrival = arrival
        self.announce = announce  # report it as started when it gets a slot
        self.prompt_ids = parcel.prompt_ids
        self.spans = parcel.spans  # of earlier versions
        self.max_new_tokens = parcel.max_new_tokens
        self.n_prompt = len(parcel.prompt_ids)
        self.n_out = 0
        self._tokens = np.empty(self.n_prompt + parcel.max_new_tokens, np.int32)  # memory that nothing has touched
        self._tokens[: self.n_prompt] = parcel.prompt_ids  # takes none
        self._logprobs = np.empty(parcel.max_new_tokens, np.float32)
        self._kept = np.empty((parcel.max_new_tokens, kept), np.int32)  # ids of the keep set a sampled token
        absent = np.full((len(parcel.out_ids), kept), -1, np.int32)
        self.extend(parcel.out_ids, parcel.logprobs, absent if parcel.kept is None else parcel.kept)
        self.parcel: InFlightSample | None = parcel  # its KV in host memory, while it waits or is uploaded
        self.uploads: deque[tuple[Upload, Node | None]] = deque()  # not yet planned; the prefix node that each fills
        self.leaving = False  # is being exported, in pieces: it decodes no more
        self._routes = None if routes is None else RouteLog(routes, parcel, len(self._tokens) - 1)
        self.prefix: tuple[Node, ...] = ()  # of its last admission: the nodes hold the experts of its first tokens
        self.slot: int | None = None
        self.path: list[Node] = []  # shared prefix
        self.table = np.zeros(
            0, np.int32
        )  # page of each page-sized stretch: the path's, then its own from first_private
        self.first_private = 0
        self.tail_page: int | None = None  # the shared page to read in the place of the first private one, once
        self.fresh = True  # the device does not hold its next token yet
        self.inflight = 0  # decode steps launched and not yet read back

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray) -> None:
        """Newly sampled: i32[n], f32[n], i32[n, top_k]."""
        start, self.n_out = self.n_out, self.n_out + len(tokens)
        self._tokens[self.n_prompt + start : self.n_prompt + self.n_out] = tokens
        self._logprobs[start : self.n_out] = logprobs
        if kept.shape[1]:
            self._kept[start : self.n_out] = kept

    def route(self, start: int, rows: np.ndarray) -> None:
        """The experts of the tokens from `start` on, [n, M, k]; the prefix's nodes hold those of the ones before."""
        if self._routes is not None:
            self._routes.take(self.prefix)
            self._routes.append(start, rows)

    @property
    def token_table(self) -> TokenTable:
        """Rows of the tokens that ran forward, as far as results have come back."""
        return self.table_from(0)

    def table_from(self, row: int) -> TokenTable:
        if self._routes is None:
            return TokenTable()
        self._routes.take(self.prefix)
        return TokenTable(routes=self._routes.rows[row:].copy())

    def known_routes(self, start: int, stop: int) -> np.ndarray | None:
        if self._routes is None or len(self._routes.rows) < stop:
            return None
        return self._routes.rows[start:stop].copy()

    @property
    def sequence(self) -> np.ndarray:
        """A view, as those below."""
        return self._tokens[: self.n_prompt + self.n_out]

    @property
    def out_ids(self) -> np.ndarray:
        return self._tokens[self.n_prompt : self.n_prompt + self.n_out]

    @property
    def logprobs(self) -> np.ndarray:
        return self._logprobs[: self.n_out]

    @property
    def kept(self) -> np.ndarray:
        return self._kept[: self.n_out]

    @property
    def row(self) -> int:
        """Its slot; RuntimeError while it has none."""
        if self.slot is None:
            raise RuntimeError(f"{self.id} has no slot")
        return self.slot

    @property
    def position(self) -> int:
        """Of the next token to feed, once what is in flight has come back."""
        return self.n_prompt + self.n_out - 1 + self.inflight

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - self.n_out - self.inflight

    @property
    def computed(self) -> bool:
        """Its prefix has KV, or will have before any later call reads it. Nodes become ready in order."""
        return not self.path or self.path[-1].ready

    @property
    def ready(self) -> bool:
        """It can decode."""
        return self.slot is not None and not self.uploads and self.computed

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
        last = self.out_ids[max(0, self.n_out - limit) :]
        other = np.flatnonzero(last != last[-1:])
        return len(last) - (int(other[-1]) + 1 if len(other) else 0)

    @property
    def private(self) -> list[int]:
        return self.table[self.first_private :].tolist()

    def take_tail(self) -> int | None:
        """The shared page to read in the place of the first private one: in the first call only."""
        tail, self.tail_page = self.tail_page, None
        return tail

    def pages_to_read(self) -> list[int]:
        """Those that hold its KV."""
        pages = self.table.tolist()
        if self.tail_page is not None:
            pages[self.first_private] = self.tail_page
        return pages
