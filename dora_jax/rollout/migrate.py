"""Stage 2: the record that carries one running sample between engines, or to host memory and back.

Consumes nothing but host arrays; produces nothing but host arrays: the device side is in device.py.
An episode is a sample of several turns. It leaves its slot at the end of a turn and comes back with what its
environment answered (`observed`), whose tokens alone are prefilled.
Laws: a request belongs to one version; its pages arrive bit-equal; a request without pages (a sample of a lost
instance) is prefilled again from its tokens, which costs time and, across shapes, the last bits of its log-probs.

Stage 2: KV in host memory, within a budget: of samples that are preempted, parked, or wait for their environment.

Consumes in-flight samples with their pages; gives each back once. No JAX.
Laws: no more bytes than the budget are held; beyond it the KV that came first is dropped, counted and reported, and its
tokens are prefilled again. Any thread may use it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dora_jax.rollout.shapes import POSITIONS
from dora_jax.types import Sample, SampleId, Sampling, Span, TokenTable, Version

HEADS = 2  # the axis of K in pages


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightSample:
    """One unfinished sample on its way. The sequence is prompt + out; position i has KV where i < kv_len."""

    id: SampleId
    version: Version
    prompt_ids: np.ndarray  # i32[T]
    out_ids: np.ndarray  # i32[U] so far
    logprobs: np.ndarray  # f32[U], 0 where observed
    max_new_tokens: int  # that it may sample in all
    spans: tuple[Span, ...] = ()  # of out_ids by earlier versions; what follows them is of `version`
    kv_len: int = 0  # positions that the pages cover; 0: to be prefilled again
    # (start, stop) where layers with a window have no KV of the positions from `start` on that no query from `stop` on
    # sees: cut to fewer positions than `stop`, those before `start` are all that the pages cover; (): all have it
    hole: tuple[int, ...] = ()
    page_size: int = 0
    k_pages: np.ndarray | None = None  # [layers, pages, K, D, page_size]; see shapes.py
    v_pages: np.ndarray | None = None  # [layers, pages, K, page_size, D]; None too where values are a part of the keys
    k2_pages: np.ndarray | None = None  # the same of layers whose rows have other heads; None: there are none
    v2_pages: np.ndarray | None = None
    # of linear layers, behind kv_len positions: [layers, 1, heads, ...] by the names of kv_states.py
    state: Mapping[str, np.ndarray] | None = None
    # of the tokens that ran forward, as far as their rows are known
    table: TokenTable = dataclasses.field(default_factory=TokenTable)
    kept: np.ndarray | None = None  # i32[U, top_k]: keep sets so far, where the engine sends them along
    mask: np.ndarray | None = None  # bool[U], True where sampled, False where observed: a run of True is a turn.
    # None: all are sampled
    turn_tokens: int = 0  # that one turn of an episode may sample; 0: the sample is one answer
    dropped: int = 0  # sampled tokens of the episode's earlier branches that are not among out_ids
    sampling: Sampling | None = None  # None: as the run samples
    top: np.ndarray | None = None  # i32[U, TOP_COLUMNS]: the most likely tokens at each token, -1 where they are not
    # known. None: not requested

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, those of earlier branches included."""
        return self.dropped + (len(self.out_ids) if self.mask is None else int(self.mask.sum()))

    @property
    def turn_start(self) -> int:
        """Where in out_ids the last turn begins."""
        if self.mask is None or self.mask.all():
            return 0
        return int(np.flatnonzero(~self.mask)[-1]) + 1

    @property
    def pages(self) -> dict[str, np.ndarray]:
        """The pages that it carries, by the names of shapes.py."""
        return {name: x for name in POSITIONS if (x := getattr(self, f"{name}_pages")) is not None}

    @property
    def kv_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.pages.values(), *(self.state or {}).values()))

    @property
    def n_pages(self) -> int:
        return 0 if self.k_pages is None else self.k_pages.shape[1]


class SampledTokens(NamedTuple):
    """What a running sample has grown by."""

    out_ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n]
    table: TokenTable  # of the tokens that ran forward meanwhile: the last of out_ids has not yet
    top: np.ndarray | None = None  # i32[n, TOP_COLUMNS]: the most likely tokens at each; None: not requested


def begun(
    id: SampleId,
    prompt_ids: Any,
    version: Version,
    max_new_tokens: int,
    turn_tokens: int = 0,
    sampling: Sampling | None = None,
) -> InFlightSample:
    """One of which nothing is sampled."""
    return InFlightSample(
        id=id,
        version=version,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        out_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        max_new_tokens=max_new_tokens,
        turn_tokens=turn_tokens,
        sampling=sampling,
    )


def with_pages(request: InFlightSample, pages: Mapping[str, np.ndarray]) -> InFlightSample:
    """The same KV in other arrays."""
    first = dataclasses.replace(request, k_pages=pages.get("k"), v_pages=pages.get("v"))
    return dataclasses.replace(first, k2_pages=pages.get("k2"), v2_pages=pages.get("v2"))


def without_pages(request: InFlightSample) -> InFlightSample:
    """The tokens alone: what a journal keeps."""
    return dataclasses.replace(with_pages(request, {}), kv_len=0, hole=(), page_size=0, state=None)


def joined(parts: Sequence[InFlightSample]) -> InFlightSample:
    """One sample whose processes each hold the pages of some of its heads, in the order of the processes; of those that
    hold the same ones, one part."""
    whole = {name: np.concatenate([part.pages[name] for part in parts], axis=HEADS) for name in parts[0].pages}
    return with_pages(parts[0], whole)


def parted(request: InFlightSample, parts: int) -> list[InFlightSample]:
    """A part for each of so many processes, of which neighbours hold the same head where there are fewer heads; the
    pages are views."""
    alike = holders_alike(parts, min(pages.shape[HEADS] for pages in request.pages.values()))
    cut = {name: np.split(pages, parts // alike, axis=HEADS) for name, pages in request.pages.items()}
    return [with_pages(request, {name: pieces[i // alike] for name, pieces in cut.items()}) for i in range(parts)]


def holders_alike(processes: int, heads: int) -> int:
    """How many processes of an instance hold the same KV heads."""
    return max(processes // heads, 1)


def sampled_from(held: InFlightSample | Sample, start: int, row: int) -> SampledTokens:
    """Its tokens from `start` on, and the rows of its table from `row` on, without rungs: a sample that goes on from
    them is not replayed."""
    table = dataclasses.replace(rows_of(held.table, slice(row, None)), rungs=None)
    top = held.top[start:] if isinstance(held, InFlightSample) and held.top is not None else None
    return SampledTokens(held.out_ids[start:], held.logprobs[start:], table, top)


def rows_of(table: TokenTable, rows: slice) -> TokenTable:
    columns = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    rungs = columns.pop("rungs")
    cut = {name: None if column is None else column[rows] for name, column in columns.items()}
    return TokenTable(**cut, rungs=None if rungs is None else runs_of(np.repeat(*rungs)[rows]))


def runs_of(column: np.ndarray) -> np.ndarray:
    """i32[2, n], as TokenTable.rungs: the values that follow one another, and how often each comes in a row."""
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    return np.stack([column[starts], np.diff(starts, append=len(column))]).astype(np.int32)


def count_rows(table: TokenTable) -> int:
    return 0 if table.routes is None else len(table.routes)


def spans_of(request: InFlightSample) -> tuple[Span, ...]:
    """All of out_ids, by version; no span is empty."""
    start = request.spans[-1].stop if request.spans else 0
    last = (Span(version=request.version, start=start, stop=len(request.out_ids)),)
    return request.spans + (last if start < len(request.out_ids) else ())


def retagged(request: InFlightSample, version: Version) -> InFlightSample:
    """To go on under other weights (mode `partial`): the KV is of the old ones, so it goes; the tokens stay."""
    if version == request.version:
        return request
    return dataclasses.replace(without_pages(request), version=version, spans=spans_of(request))


def response_room(request: InFlightSample, max_context: int) -> int:
    """Tokens that out_ids may hold: of an episode as many as the engine is compiled for, observed ones included."""
    return max_context - len(request.prompt_ids) if request.turn_tokens else request.max_new_tokens


def spent(request: InFlightSample, max_context: int) -> bool:
    """No token is left to sample."""
    return request.sampled >= request.max_new_tokens or len(request.out_ids) >= response_room(request, max_context)


def observed(request: InFlightSample, token_ids: np.ndarray, keep: int | None = None) -> InFlightSample:
    """The episode with what its environment answered behind its tokens.

    token_ids: i32[n]. keep: how many leading tokens of prompt and response stay, with as much of their KV; None: all.
    ValueError: no token is observed or none stays, so that nothing follows the policy's turn."""
    n_prompt, n_out = len(request.prompt_ids), len(request.out_ids)
    keep = n_prompt + n_out if keep is None else keep
    if not len(token_ids) or not 0 < keep <= n_prompt + n_out:
        raise ValueError(f"{request.id} observes {len(token_ids)} tokens behind {keep} of {n_prompt + n_out}")
    stay, n = max(keep - n_prompt, 0), len(token_ids)
    mask = np.ones(n_out, bool) if request.mask is None else request.mask
    kept, top = request.kept, request.top
    whole = dataclasses.replace(
        request,
        prompt_ids=request.prompt_ids[:keep],
        out_ids=np.concatenate([request.out_ids[:stay], np.asarray(token_ids, np.int32)]),
        logprobs=np.concatenate([request.logprobs[:stay], np.zeros(n, np.float32)]),
        mask=np.concatenate([mask[:stay], np.zeros(n, bool)]),
        dropped=request.dropped + int(mask[stay:].sum()),
        spans=_cut_spans(request.spans, stay),
        table=rows_of(request.table, slice(keep)),
        kept=None if kept is None else np.concatenate([kept[:stay], np.full((n, kept.shape[1]), -1, np.int32)]),
        top=None if top is None else np.concatenate([top[:stay], np.full((n, top.shape[1]), -1, np.int32)]),
    )
    return cut_kv(whole, min(request.kv_len, keep))


def cut_kv(request: InFlightSample, kv_len: int) -> InFlightSample:
    """The same tokens with the KV of the first `kv_len` positions, which it has; of fewer, where that of layers with a
    window is not there; of none, where a recurrent state would have to be cut."""
    hole = request.hole
    if request.state and kv_len < request.kv_len:
        return without_pages(request)
    if hole and kv_len < hole[1]:
        kv_len, hole = min(kv_len, hole[0]), ()
    if not kv_len:
        return without_pages(request)
    pages = -(-kv_len // request.page_size)
    cut = {name: x[:, :pages] for name, x in request.pages.items()}
    return dataclasses.replace(with_pages(request, cut), kv_len=kv_len, hole=hole)


def with_kv_of(request: InFlightSample, held: InFlightSample) -> InFlightSample:
    """The sample with the KV, and the rows, of an earlier state of it, as far as the tokens agree."""
    ours, theirs = ((np.concatenate([each.prompt_ids, each.out_ids])) for each in (request, held))
    n = min(len(ours) - 1, len(theirs), held.kv_len)
    other = np.flatnonzero(ours[:n] != theirs[:n])
    kv_len = int(other[0]) if len(other) else n
    if request.kv_len or request.version != held.version or not kv_len:
        return request
    table = request.table if count_rows(request.table) >= kv_len else rows_of(held.table, slice(kv_len))
    table = dataclasses.replace(table, rungs=request.table.rungs)
    whole = with_pages(request, held.pages)
    whole = dataclasses.replace(whole, page_size=held.page_size, hole=held.hole, table=table)
    whole = dataclasses.replace(whole, kv_len=held.kv_len, state=held.state)
    return cut_kv(whole, kv_len)


def ended(request: InFlightSample, finish: str) -> Sample:
    """The sample that it is once it ends here. What was observed behind the last sampled token is no part of it."""
    mask = np.ones(len(request.out_ids), bool) if request.mask is None else request.mask
    n = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
    return Sample(
        id=request.id,
        prompt_ids=request.prompt_ids,
        out_ids=request.out_ids[:n],
        logprobs=request.logprobs[:n],
        mask=mask[:n],
        spans=_cut_spans(spans_of(request), n),
        finish=finish,
        table=rows_of(request.table, slice(len(request.prompt_ids) + n - 1)),
    )


def _cut_spans(spans: Sequence[Span], stop: int) -> tuple[Span, ...]:
    return tuple(dataclasses.replace(span, stop=min(span.stop, stop)) for span in spans if span.start < stop)


def repaged(request: InFlightSample, page_size: int) -> InFlightSample:
    """The same KV cut into pages of another size."""
    if not request.pages or request.page_size == page_size:
        return request
    n, positions = -(-request.kv_len // page_size), request.kv_len
    cut = {}
    for name, pages in request.pages.items():
        axis = POSITIONS[name] % pages.ndim
        long = np.moveaxis(pages, 1, axis - 1)  # the pages stand before their positions now
        long = long.reshape(*long.shape[: axis - 1], -1, *long.shape[axis + 1 :])
        long = long.take(range(positions), axis=axis - 1)
        pad = [(0, 0)] * long.ndim
        pad[axis - 1] = (0, n * page_size - positions)
        long = np.pad(long, pad)
        long = long.reshape(*long.shape[: axis - 1], n, page_size, *long.shape[axis:])
        cut[name] = np.ascontiguousarray(np.moveaxis(long, axis - 1, 1))
    return dataclasses.replace(with_pages(request, cut), page_size=page_size)


class HostKV:
    def __init__(self, budget_bytes: int = 0, notify: Callable[[str], None] = lambda text: None):
        """budget_bytes: 0: as much as comes. notify: hears of the first KV that is dropped, the tenth, the
        hundredth."""
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.dropped = 0  # samples
        self.dropped_tokens = 0
        self._notify = notify
        self._held: dict[SampleId, InFlightSample] = {}  # in the order of their coming
        self._lock = threading.Lock()

    def __contains__(self, id: SampleId) -> bool:
        return id in self._held

    def put(self, request: InFlightSample) -> None:
        """Holds its KV until `take`; what it held of the sample before goes."""
        repeats = []
        with self._lock:
            self._pop(request.id)
            self._held[request.id] = request
            self.bytes += request.kv_bytes
            while self.budget_bytes and self.bytes > self.budget_bytes:
                dropped = self._pop(next(iter(self._held)))
                if dropped is None:
                    continue
                self.dropped += 1
                self.dropped_tokens += dropped.kv_len
                if is_power_of_ten(self.dropped):
                    repeats.append(
                        f"the KV of sample {tuple(dropped.id)} leaves host memory, and its {dropped.kv_len} tokens are "
                        f"prefilled again: rollout.host_kv_bytes is {self.budget_bytes} ({self.dropped} samples so far)"
                    )
        for text in repeats:
            self._notify(text)

    def take(self, request: InFlightSample) -> InFlightSample:
        """The sample with the KV that is held of it, as far as its tokens agree; unchanged where none is."""
        with self._lock:
            held = self._pop(request.id)
        return request if held is None else with_kv_of(request, held)

    def forget(self, id: SampleId) -> None:
        with self._lock:
            self._pop(id)

    # ----------------------------------------------------------- private

    def _pop(self, id: SampleId) -> InFlightSample | None:
        request = self._held.pop(id, None)
        if request is not None:
            self.bytes -= request.kv_bytes
        return request


def is_power_of_ten(count: int) -> bool:
    """The first time, the tenth, the hundredth."""
    return str(count).strip("0") == "1"
