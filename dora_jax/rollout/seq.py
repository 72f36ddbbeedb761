"""Stage 2, pure: one sample as the scheduler sees it: what it has sampled, which pages it holds, what is on its way.

Consumes a request; plan.py changes it, engine.py appends what comes back from the device. No JAX.
Law: what has been sampled is written once, behind what there was; nothing copies the past until the sample ends.

Stage 2, pure: where a sample's text first contains a stop string. Standard library only.

Consumes a sample's tokens, old and new; produces how many of the new ones count. The tokens that complete the string
stay, as a stop token does.
Law: the answer depends on the sample's tokens alone, not on how they were cut into calls: a token completes a stop
string where the text of the last few tokens up to it contains one.

Stage 2, pure: which experts the tokens of one running sample went to, row by row as results come back. numpy only.

Consumes rows of its request, of the prefix nodes that hold its prompt, and of decode calls; produces the rows that
travel with it. A row that is there stays: a sample that is prefilled again keeps the experts that sampled its tokens.
Of tokens whose rows did not come along, it takes those of the call that computed their KV again.
Law: rows are contiguous from the first token on; a gap raises.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from dora_jax.models.grammar import Matcher
from dora_jax.models.routes import RouteShape
from dora_jax.rollout.migrate import InFlightSample, response_room, runs_of
from dora_jax.rollout.pages import Node
from dora_jax.rollout.shapes import TOP_COLUMNS
from dora_jax.types import TokenTable

SLACK = 8  # tokens without text of their own (parts of a character, special ones) that may stand in a stop string


class StopStrings:
    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str] | None):
        if strings and decode is None:
            raise ValueError("rollout.stop_strings needs a tokenizer: the engine was given no `decode`")
        self._strings = tuple(strings)
        self._decode = decode or (lambda tokens: "")  # without strings nothing is decoded
        # a token is at least one byte of text, but for SLACK of them
        self._window = max((len(text.encode()) for text in strings), default=0) + SLACK

    def end(self, old: Sequence[int] | np.ndarray, new: Sequence[int] | np.ndarray) -> tuple[int, bool]:
        """(how many of the new tokens count, whether the last of them completes a stop string)."""
        if not self._strings or not len(new):
            return len(new), False
        tokens = [*map(int, old[-self._window :]), *map(int, new)]
        if not self._contains(tokens):  # most calls: one look at all of it
            return len(new), False
        first = len(tokens) - len(new)
        for n in range(1, len(new) + 1):
            if self._contains(tokens[max(0, first + n - self._window) : first + n]):
                return n, True
        return len(new), False

    def ends_turn(self, request: InFlightSample, stop_ids: Sequence[int]) -> bool:
        """Whether the last turn of this episode is over, and nothing has been observed since."""
        turn = request.out_ids[request.turn_start :].tolist()
        if not turn:
            return False
        full = len(turn) == request.turn_tokens and request.sampled < request.max_new_tokens
        return full or turn[-1] in stop_ids or self.end((), turn)[1]

    def _contains(self, tokens: list[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._strings)


class RouteLog:
    def __init__(self, shape: RouteShape, request: InFlightSample, most: int):
        """most: rows at the end. ValueError where what the request carries is no route of this model."""
        self._id = request.id
        self._rows = np.empty((most, shape.layers, shape.per_token), shape.dtype)
        self._n = 0
        if (known := request.table.routes) is not None:
            self.append(0, shape.check(known, len(known), str(request.id)))

    @property
    def rows(self) -> np.ndarray:
        """[n, M, k], a view."""
        return self._rows[: self._n]

    def take(self, prefix: Sequence[Node]) -> None:
        """What the nodes of its prefix know beyond its own rows."""
        for node in prefix:
            if node.routes is None:
                return
            if node.stop > self._n:
                self.append(self._n, node.routes[self._n - node.start :])

    def append(self, start: int, rows: np.ndarray) -> None:
        if start > self._n:
            raise RuntimeError(f"{self._id} has the experts of {self._n} tokens, and the next ones begin at {start}")
        new = rows[self._n - start :]
        self._rows[self._n : self._n + len(new)] = new
        self._n += len(new)


@dataclasses.dataclass(frozen=True)
class Upload:
    """Write request pages [start, start + len(pages)) into these pages."""

    request: InFlightSample
    start: int
    pages: list[int]
    state: int = 0  # the place that its recurrent state goes to; 0: to none

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)


class Seq:
    """One sample in this engine. `sequence` is prompt + response; all but its last token have KV once it decodes."""

    def __init__(
        self,
        request: InFlightSample,
        arrival: int,
        announce: bool,
        max_context: int,
        kept: int = 0,
        routes: RouteShape | None = None,
        rungs: bool = False,
    ):
        """max_context: tokens that an episode may have in all. kept: ids of the keep set that come along with each
        token. routes: what the experts of a token look like, where they come along. rungs: whether those do."""
        self.id = request.id
        self.version = request.version
        self.arrival = arrival
        self.announce = announce  # report it as started when it gets a slot
        self.prompt_ids = request.prompt_ids
        self.spans = request.spans  # of earlier versions
        self.max_new_tokens = request.max_new_tokens
        self.n_prompt = len(request.prompt_ids)
        self.n_out = 0
        self.turn_tokens = request.turn_tokens
        self.dropped = request.dropped
        self.sampling = request.sampling
        self.n_given = (
            len(request.sampling.given) if request.sampling else 0
        )  # of its first tokens, which are not drawn
        most = response_room(request, max_context)
        self._tokens = np.empty(self.n_prompt + most, np.int32)  # memory that nothing has touched takes none
        self._tokens[: self.n_prompt] = request.prompt_ids
        self._logprobs = np.empty(most, np.float32)
        self._kept = np.empty((most, kept), np.int32)  # ids of the keep set a sampled token
        ranked = request.sampling is not None and request.sampling.top_logprobs > 0
        self._top = (
            np.empty((most, TOP_COLUMNS), np.int32) if ranked else None
        )  # the most likely tokens at a sampled token
        self._mask = request.mask  # of what it has come with
        self.matcher: Matcher | None = None  # of its grammar
        self.turn_start = request.turn_start
        self.unsampled = len(request.out_ids) - request.sampled  # of n_out: observed, less those of earlier branches
        self.budget = min(most, request.max_new_tokens + self.unsampled)  # of n_out: there the sample is over
        self.limit = min(self.budget, self.turn_start + self.turn_tokens) if self.turn_tokens else self.budget
        self._rungs = np.zeros(most, np.int32) if rungs else None  # rows of the call that drew each token; 0: none did
        if self._rungs is not None and request.table.rungs is not None:
            known = np.repeat(*request.table.rungs)[self.n_prompt - 1 :][: len(request.out_ids)]
            self._rungs[: len(known)] = known if self._mask is None else known * self._mask[: len(known)]
        absent = np.full((len(request.out_ids), kept), -1, np.int32)
        self.extend(request.out_ids, request.logprobs, absent if request.kept is None else request.kept, request.top)
        self.request: InFlightSample | None = request  # its KV in host memory, while it waits or is uploaded
        self.uploads: deque[tuple[Upload, Node | None]] = deque()  # not yet planned; the prefix node that each fills
        self.leaving = False  # is being exported, in pieces: it decodes no more
        self._routes = None if routes is None else RouteLog(routes, request, len(self._tokens) - 1)
        self.prefix: tuple[Node, ...] = ()  # of its last admission: the nodes hold the experts of its first tokens
        self.slot: int | None = None
        self.path: list[Node] = []  # shared prefix
        # page of each page-sized stretch: the path's, then its own from first_private
        self.table = np.zeros(0, np.int32)
        self.first_private = 0
        self.shed = 0  # of its own pages, those before it hold nothing of layers with a window
        self.filled = self.fill_to = 0  # of an episode's new tokens: positions with KV in its own pages, and to have it
        self.state = self.source = 0  # the places of its recurrent state: its own, and where it lies until it decodes
        self.tail_page: int | None = None  # the shared page to read in the place of the first private one, once
        self.fresh = True  # the device does not hold its next token yet
        self.inflight = 0  # decode steps launched and not yet read back
        self.forced = np.zeros(0, np.int32)  # tokens that it takes in the place of its first draws: see EngineReplay
        self.forced_rungs = np.zeros(0, np.int32)  # and rows of the calls that draw them; 0: the widest's

    def extend(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        kept: np.ndarray,
        top: np.ndarray | None = None,
        rung: int | None = None,
    ) -> None:
        """Newly sampled: i32[n], f32[n], i32[n, top_k], i32[n, TOP_COLUMNS]; top: None: nobody knows them. rung: rows
        of the call that drew them; None: it is known already."""
        start, self.n_out = self.n_out, self.n_out + len(tokens)
        if self._rungs is not None and rung is not None:
            self._rungs[start : self.n_out] = rung
        self._tokens[self.n_prompt + start : self.n_prompt + self.n_out] = tokens
        self._logprobs[start : self.n_out] = logprobs
        if kept.shape[1]:
            self._kept[start : self.n_out] = kept
        if self._top is not None:
            self._top[start : self.n_out] = -1 if top is None else top

    def top_from(self, start: int) -> np.ndarray | None:
        """The most likely tokens at its tokens from `start` on; None: it does not ask for them."""
        return None if self._top is None else self._top[start : self.n_out].copy()

    def route(self, start: int, rows: np.ndarray) -> None:
        """The experts of the tokens from `start` on, [n, M, k]; the prefix's nodes hold those of the ones before."""
        if self._routes is not None:
            self._routes.take(self.prefix)
            self._routes.append(start, rows)

    def table_from(self, row: int) -> TokenTable:
        """Rows of the tokens that ran forward, as far as results have come back."""
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
    def mask(self) -> np.ndarray | None:
        """bool[U]; None: nothing is observed."""
        if self._mask is None:
            return None
        return np.concatenate([self._mask, np.ones(self.n_out - len(self._mask), bool)])

    @property
    def drawn(self) -> int:
        """Tokens sampled once what is in flight has come back: the number of the next draw; negative while its tokens
        are given."""
        return self.n_out - self.unsampled + self.inflight - self.n_given

    def next_forced(self, steps: int) -> np.ndarray:
        """i32[steps]: what its next call is to draw, -1 where that is free."""
        out = np.full(steps, -1, np.int32)
        known = self.forced[self.drawn : self.drawn + steps]
        out[: len(known)] = known
        return out

    @property
    def next_rung(self) -> int:
        """Rows of its next call; 0: the widest's, or any where nothing is forced."""
        return int(self.forced_rungs[self.drawn]) if len(self.forced_rungs) else 0

    @property
    def in_flight(self) -> InFlightSample:
        """It without its KV, to go on anywhere."""
        table = self.table_from(0)
        if self._rungs is not None:
            rungs = np.concatenate([np.zeros(self.n_prompt - 1, np.int32), self._rungs[: self.n_out]])
            table = dataclasses.replace(table, rungs=runs_of(rungs))
        return InFlightSample(
            id=self.id,
            version=self.version,
            prompt_ids=self.prompt_ids,
            out_ids=self.out_ids.copy(),
            logprobs=self.logprobs.copy(),
            max_new_tokens=self.max_new_tokens,
            spans=self.spans,
            table=table,
            kept=self._kept[: self.n_out].copy() if self._kept.shape[1] else None,
            mask=self.mask,
            turn_tokens=self.turn_tokens,
            dropped=self.dropped,
            sampling=self.sampling,
            top=self.top_from(0),
        )

    @property
    def row(self) -> int:
        """Its slot; RuntimeError while it has none."""
        if self.slot is None:
            raise RuntimeError(f"{self.id} has no slot")
        return self.slot

    @property
    def position(self) -> int:
        """The position of the next token to feed, once what is in flight has come back."""
        return self.n_prompt + self.n_out - 1 + self.inflight

    @property
    def remaining(self) -> int:
        return self.limit - self.n_out - self.inflight

    @property
    def computed(self) -> bool:
        """Its prefix has KV, or will have before any later call reads it. Nodes become ready in order."""
        return not self.path or self.path[-1].ready

    @property
    def ready(self) -> bool:
        """It can decode."""
        return self.slot is not None and not self.uploads and self.computed and self.filled == self.fill_to

    @property
    def kv_len(self) -> int:
        """Leading positions that have KV, as far as its request does not hold it."""
        if self.slot is None or self.uploads:
            return 0
        if self.ready:
            return self.position
        return self.filled if self.computed else next(node.start for node in self.path if not node.ready)

    def repeats(self, limit: int) -> int:
        """How many of the turn's last sampled tokens are the same, counted up to a limit."""
        last = self.out_ids[max(self.turn_start, self.n_given, self.n_out - limit) :]
        other = np.flatnonzero(last != last[-1:])
        return len(last) - (int(other[-1]) + 1 if len(other) else 0)

    @property
    def private(self) -> list[int]:
        return self.table[self.first_private :].tolist()

    def pages_to_read(self, n: int) -> list[int]:
        """The first n of those that hold its KV."""
        pages = self.table.tolist()
        if self.tail_page is not None:
            pages[self.first_private] = self.tail_page
        return pages[:n]
