"""The records of the journal, and the formats in which earlier runs wrote them.

    Head                    begins a segment: the orchestrator's snapshot, then records of the payload state
    Batch(entries, last)    what came in together, in order; the orchestrator decided on all of it once
        Fact(event, payload)    one event that the orchestrator consumed
        Partial                 tokens that a running sample has grown by
        Saved                   digests of a checkpoint

Law: a segment that any format from OLDEST on wrote reads as the records of today (`reader`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.config import UnknownFormat
from dora_jax.config.changes import Settings
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.codec import Codec, CodecError
from dora_jax.types import Sample, SampleId, ScoredGroup, TokenTable, Version

FORMAT = 14  # of the records that this version writes; the head of a segment says its own
OLDEST = 3  # the first format that `upgrade` knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Digests of a version (digest.py)."""

    epoch: int
    digest: int  # of the trainer's params
    copy: int = 0  # of the copy in the engines' dtype that travels, stacked; 0: an older format took none, or another


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Digests of the items of a checkpoint, taken of what was given to the save."""

    version: Version
    params: int
    opt_state: int
    rl_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    format: int
    epoch: int  # rises where a replay could not reproduce a version
    config: Any  # OrchestratorConfig as plain data
    orchestrator: Any  # snapshot, as plain data
    digests: dict[str, Published]  # of the live versions
    payload_records: int  # records that follow and belong to the snapshot
    saved: dict[str, Saved]  # of the checkpoints that the journal reaches back to
    settings: Settings  # of the run's configuration, as asked: config/changes.py; empty: an older format had none


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    event: ev.Event
    payload: Sample | ScoredGroup | Published | None  # a group without its samples: facts before it carry them


SAMPLED, OBSERVED, REWRITTEN = "sampled", "observed", "rewritten"  # kinds of a Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Tokens [start, start + len) of a running sample, and the rows of its table from `row` on.

    kind: "sampled", or "observed": an environment wrote them. "rewritten": they are observed and begin a new branch, in
    the place of those from `start` on."""

    id: SampleId
    version: Version
    start: int
    out_ids: np.ndarray  # i32
    logprobs: np.ndarray  # f32
    kind: str = SAMPLED
    row: int = 0
    table: TokenTable = dataclasses.field(default_factory=TokenTable)


Entry = Fact | Partial | Saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    entries: tuple[Fact | Partial | Saved, ...]
    last: bool  # False: more of the same batch follow in the next record, which would else be too large


CODEC = Codec(Head, Published, Fact, Partial, Saved, Batch)
TOKENS_A_RECORD = 1 << 20
NO_TABLE = [TokenTable.__name__, None]  # the row of an empty one, up to format 12


def batches(entries: Sequence[Entry]) -> Iterator[Batch]:
    """The records of one batch: several where it carries more than TOKENS_A_RECORD tokens."""
    part: list[Entry] = []
    tokens = 0
    for entry in entries:
        if tokens >= TOKENS_A_RECORD:
            yield Batch(entries=tuple(part), last=False)
            part, tokens = [], 0
        part.append(entry)
        payload = entry.payload if isinstance(entry, Fact) else entry
        tokens += len(payload.out_ids) if isinstance(payload, Partial | Sample) else 0
    if part:
        yield Batch(entries=tuple(part), last=True)


def upgrade(row: Any, written: int) -> Any:
    """The row of a record in format `written` -> its row in FORMAT. UnknownFormat: this version does not read that
    format. CodecError: it is no record of it.

    A row is [class name, field, ...], and so are the records within it. A change of a record raises FORMAT and adds a
    step here, from one format to the next; no other code knows the older formats."""
    if type(written) is not int:
        raise CodecError("it does not say its format")
    if not OLDEST <= written <= FORMAT:
        raise UnknownFormat(f"it is of format {written}, and this version of dora_jax reads {OLDEST} to {FORMAT}")
    try:
        if written == 3:  # a sample had no table, and each event was decided on by itself
            row = _with_tables(row)
            row = [Batch.__name__, [row], True] if _is(row, Fact) else row
        for older in range(written, FORMAT):
            if older == 5:
                row = _with_episodes(row)
            if older in (12, 13):  # 13: with temperatures, 14: with rungs
                row = _with_column(row)
            if _is(row, Head) and older in CONFIGURED:
                row = [*row[:3], CONFIGURED[older] | row[3], *row[4:]]
            if _is(row, Head) and older in (8, 10) and isinstance(row[5], dict):
                digests = {version: _with_added(published, older) for version, published in row[5].items()}
                row = [*row[:5], digests, *row[6:], *([{}] if older == 8 else [])]
            if _is(row, Head) and older == 9:
                row = [*row, {}]
            if _is(row, Batch) and isinstance(row[1], list):
                row = [row[0], [_entry(entry, older) for entry in row[1]], *row[2:]]
        return row
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise CodecError(f"it is no record of format {written}: {type(error).__name__} {error}") from error


NAME_ATTEMPTS = (ev.SampleStarted, ev.SampleParked, ev.SampleResumed, ev.SampleWaiting, ev.SampleReady, ev.RequestCame)
# format -> what the next one added to the end of a record's row
ADDED: dict[int, dict[type, list[Any]]] = {
    4: {ev.InstanceReported: [0, 0.0, 0.0]},  # what its decoding took
    7: {ev.InstanceReported: [None]},  # what drafts did
    8: {Published: [0]}
    | {event: [None] for event in NAME_ATTEMPTS},  # the copy that travels; the attempt that placed it
    11: {ev.WeightsLoaded: [None]},  # the attempt to load it
}
# format -> what the next one added to the configuration in a head: the values under which nothing changes
CONFIGURED: dict[int, dict[str, Any]] = {
    5: {"task_lead": 0.0},  # a task was ahead of another by any number of prompts
    6: {"hold_versions": 0, "hold_s": 0.0},  # it kept no version for sessions
    7: {"lendable": [], "switch_s": 0.0},  # it lent no chips; late runs of format 7 say so themselves
    11: {"stride": 1, "max_mean_lag": 0.0},  # rollouts took every version
}


def _with_added(row: Any, older: int) -> Any:
    if older == 10 and _is(row, Published):  # a copy in a narrow type had its gains and routers rounded too
        row = [*row[:3], row[3] if row[3] == row[2] else 0]
    return [*row, *next((added for record, added in ADDED.get(older, {}).items() if _is(row, record)), ())]


def _entry(row: Any, older: int) -> Any:
    """The row of an entry of a batch, one format later."""
    match row if older == 4 else None:
        case [name, [_, group_id, *_] as event, ["Scores", version, rewards, parts]]:  # of a group without its samples
            row = [name, event, [ScoredGroup.__name__, group_id, version, [], rewards, parts]]
    if not _is(row, Fact):
        return row
    return [row[0], *(_with_added(field, older) if isinstance(field, list) else field for field in row[1:])]


def _with_episodes(row: Any) -> Any:
    """The row of a record, as samples have branches and reward terms, tables one column, and chunks a kind."""
    if not isinstance(row, list):
        return row
    row = [_with_episodes(field) for field in row]
    match row[:1]:
        case [name] if name == TokenTable.__name__:
            return row[:2]
        case [name] if name == Sample.__name__:
            return [*row, [], None]
        case [name] if name == Partial.__name__:
            return [*row, SAMPLED, 0, NO_TABLE]
    return row


def _with_column(row: object) -> object:
    """The row of a record, as tables have a column more, which is empty."""
    if not isinstance(row, list):
        return row
    return [*map(_with_column, row), *([None] if row[:1] == [TokenTable.__name__] else [])]


def _with_tables(row: Any) -> Any:
    """The samples of a record, as a table follows their other fields."""
    if _is(row, Sample):
        return [*row, NO_TABLE]
    if _is(row, ScoredGroup) or _is(row, Fact):
        return [_with_tables(field) for field in row]
    if isinstance(row, list) and row and all(_is(each, Sample) for each in row):  # of a group
        return [_with_tables(sample) for sample in row]
    return row


def _is(row: Any, record: type) -> bool:
    return isinstance(row, list) and len(row) > 1 and row[0] == record.__name__


def reader(head: bytes) -> Callable[[bytes], Any]:
    """Decodes the records of a segment that begins with this head, whatever format it was written in. CodecError: this
    is no head. UnknownFormat: this version does not read its format."""
    formats: list[Any] = []

    def note(row: Any) -> Any:
        if not formats:
            formats.append(row[1] if isinstance(row, list) and row[1:] and row[0] == Head.__name__ else None)
        return upgrade(row, formats[0])

    CODEC.decode(head, note)
    return CODEC.decode if formats == [FORMAT] else functools.partial(CODEC.decode, upgrade=note)
