"""From a journal and checkpoints to where the run was: the exact state of the orchestrator, and the steps to redo.

    segment = Head, its payload, then batches
    replay  = restore the head's snapshot, commit each fact, decide on each batch
    start   = the newest checkpoint that verifies and is no newer than the oldest live version
    redo    = the batches trained since: on the way every live version's weights are made again

Consumes an `EventLog`; produces `Recovered`. Laws: snapshot + tail = full replay; a damaged segment or checkpoint is
reported, and an older one is used; a segment is followed up to the first fact that the orchestrator refuses, which is
where the run that wrote it ended; no group is in two of the returned steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.restart import Debts, restart
from dora_jax.runtime.codec import CodecError
from dora_jax.runtime.durability.event_log import EventLog
from dora_jax.runtime.durability.log_stores import JournalError
from dora_jax.runtime.durability.payload_state import PayloadState, Step
from dora_jax.runtime.durability.records import CODEC, FORMAT, Batch, Entry, Fact, Head, Partial, reader
from dora_jax.types import Version

Notify = Callable[[str], None]
# Raised where a replay follows records of other code, or of a run that ended over them. CodecError is a ValueError.
SENSELESS = (TypeError, KeyError, ValueError, AttributeError, IndexError, RuntimeError)


@dataclasses.dataclass
class ReplayedState:
    """The state after the segments that were read so far."""

    orchestrator: Orchestrator
    payloads: PayloadState
    epoch: int
    steps: list[Step] = dataclasses.field(default_factory=list)
    facts: int = 0

    @property
    def base(self) -> Version:
        return self.orchestrator.state.ledger.base


@dataclasses.dataclass(frozen=True)
class Recovered:
    orchestrator: Orchestrator  # under today's configuration; its instances are yet to come
    payloads: PayloadState
    epoch: int
    debts: Debts
    start: Version  # the trainer restores this checkpoint (or the initial weights) ...
    segments: dict[int, Version]  # of the journal -> the version at which each begins
    steps: tuple[Step, ...]  # ... and makes these steps again, to the version that was published last

    @property
    def base(self) -> Version:
        return self.orchestrator.state.ledger.base


def head_records(orchestrator: Orchestrator, payloads: PayloadState, epoch: int) -> Iterator[bytes]:
    """The records that a new segment begins with; to be taken between events."""
    payloads.prune(orchestrator.state)
    records = [CODEC.encode(item) for item in payloads.records()]
    yield CODEC.encode(
        Head(
            format=FORMAT,
            epoch=epoch,
            config=dataclasses.asdict(orchestrator.state.config),
            orchestrator=orchestrator.snapshot(),
            digests={str(v): p for v, p in payloads.digests.items()},
            payload_records=len(records),
        )
    )
    yield from records


def recover(
    journal: EventLog,
    config: OrchestratorConfig,
    checkpoints: Sequence[Version],
    usable: Callable[[Version], bool],
    notify: Notify,
) -> Recovered | None:
    """Where the run was; None: there is no journal. `checkpoints`: steps that the trainer can start from, with the
    initial weights; `usable` verifies one. JournalError: no checkpoint fits the journal."""
    heads = _heads(journal, notify)
    if not heads:
        return None
    newest = max(heads)
    with _sensible(newest):
        end = replay(journal, [newest], notify)
        debts = restart(end.orchestrator)
    floor = min(debts.versions, default=end.base)
    for start in sorted((v for v in checkpoints if v <= floor), reverse=True):
        first = max((n for n, base in heads.items() if base <= start), default=None)
        if first is None or not usable(start):
            continue
        chain = [n for n in sorted(heads) if n >= first]
        with _sensible(first):
            past = end if chain == [newest] else replay(journal, chain, lambda sentence: None)
        steps = tuple(step for step in past.steps if step.base >= start)
        if [step.base for step in steps] == list(range(start, end.base)):
            orchestrator = Orchestrator.restore(config, end.orchestrator.snapshot())
            end.payloads.prune(orchestrator.state)
            return Recovered(orchestrator, end.payloads, end.epoch, debts, start, heads, steps)
        notify(
            f"the batches between version {start} and {end.base} are not all in the journal: an older start is tried"
        )
    raise JournalError(
        f"no checkpoint that verifies fits the journal: live versions are {list(debts.versions)}, "
        f"checkpoints {list(checkpoints)}"
    )


def steps_since(journal: EventLog, version: Version) -> tuple[Step, ...]:
    """The steps made since this version, oldest first. Another thread may be writing the log."""
    heads = _heads(journal, lambda sentence: None)
    if not heads:
        return ()
    first = max((n for n, base in heads.items() if base <= version), default=min(heads))
    end = replay(journal, [n for n in sorted(heads) if n >= first], lambda sentence: None)
    return tuple(step for step in end.steps if step.base >= version)


def replay(journal: EventLog, segments: Sequence[int], notify: Notify) -> ReplayedState:
    """The state after the last record of these segments that can be read. JournalError: there are no segments, or they
    make no sense."""
    state: ReplayedState | None = None
    for number in segments:
        segment = journal.read(number)
        if segment.fault:
            notify(f"journal segment {number}: {segment.fault}; {segment.lost_bytes} bytes behind it are not read")
        state = _replay_one(number, segment.records, state.steps if state else [], notify)
    if state is None:
        raise JournalError("the journal has no segments")
    return state


# ---------------------------------------------------------------- private


def _replay_one(
    number: int, records: Sequence[bytes], steps: list[Step], notify: Notify, rest: Sequence[Entry] = ()
) -> ReplayedState:
    """rest: of a batch behind the last record."""
    head, payloads, tail, read = _open(number, records)
    with _sensible(number):
        orchestrator = Orchestrator.restore(_config(head.config), head.orchestrator)
    state = ReplayedState(orchestrator, payloads, head.epoch)
    state.steps = [step for step in steps if step.base < state.base]  # later ones were undone by a fallback
    for i, data in enumerate(tail, start=1 + head.payload_records):
        followed: list[Entry] = []
        try:
            batch = _batch(read(data))
            for entry in batch.entries:
                _follow(state, entry)
                followed.append(entry)
            if batch.last:
                _decide(state)
        except SENSELESS as error:
            notify(
                f"journal segment {number}: record {i + 1} cannot be followed ({error}); the {len(records) - i} from there "
                f"on are not read"
            )
            return _replay_one(number, records[:i], steps, notify, followed)  # the next was perhaps followed in part
    for entry in rest:
        _follow(state, entry)
    _decide(state)  # where a batch was torn
    return state


def _decide(state: ReplayedState) -> None:
    for command in state.orchestrator.decide():
        state.payloads.follow(command)


def _batch(record: Any) -> Batch:
    if isinstance(record, Partial):  # in format 3 it stood by itself
        return Batch(entries=(record,), last=True)
    if not isinstance(record, Batch):
        raise JournalError(f"a {type(record).__name__} stands among its facts")
    return record


def _follow(state: ReplayedState, entry: Entry) -> None:
    if isinstance(entry, Fact) and not state.orchestrator.counts(entry.event):
        return
    step = state.payloads.apply(entry, state.orchestrator.state)
    if isinstance(entry, Fact):
        state.orchestrator.commit(entry.event)
        state.facts += 1
    if step is not None:
        state.steps.append(step)


def _heads(journal: EventLog, notify: Notify) -> dict[int, Version]:
    """The segments that a replay can begin with -> the version at which they begin."""
    found = {}
    for number in journal.segments():
        try:
            head, *_ = _open(number, journal.read(number).records)
        except JournalError as error:
            notify(f"{error}; the segment is stepped over")
            continue
        base = head.orchestrator["ledger"]["base"]
        if base < 0:
            notify(
                f"segment {number} of the journal begins at version {base}, which never was; the segment is stepped over"
            )
            continue
        found[number] = base
    return found


def _open(number: int, records: Sequence[bytes]) -> tuple[Head, PayloadState, Sequence[bytes], Callable[[bytes], Any]]:
    """(head of a segment, its payload state, the records that follow, their decoder)"""
    try:
        if not records:
            raise JournalError(f"journal segment {number} has no whole head")
        read = reader(records[0])
        head = read(records[0])
        if not isinstance(head, Head) or len(records) <= head.payload_records:
            raise JournalError(f"journal segment {number} has no whole head")
        payloads = PayloadState()
        for data in records[1 : 1 + head.payload_records]:
            payloads.load(read(data))
    except CodecError as error:
        raise JournalError(f"journal segment {number} has no readable head: {error}") from error
    payloads.digests = {int(version): published for version, published in head.digests.items()}
    return head, payloads, records[1 + head.payload_records :], read


@contextlib.contextmanager
def _sensible(number: int) -> Iterator[None]:
    """Turns what a replay raises into a JournalError: another version wrote these records, or a bug."""
    try:
        yield
    except SENSELESS as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(
            f"the journal from segment {number} on cannot be followed by this version of dora_jax: "
            f"{type(error).__name__} {error}"
        ) from error


def _config(data: dict[str, Any]) -> OrchestratorConfig:
    """The configuration under which a segment was written. Its tuples were written as lists."""
    known = {field.name for field in dataclasses.fields(OrchestratorConfig)}
    if set(data) != known:
        raise JournalError(
            f"the journal was written by another version of dora_jax: its configuration differs in "
            f"{', '.join(sorted(map(str, set(data) ^ known)))}"
        )
    data = dict(data)
    data["task_cycle"] = tuple(data["task_cycle"])
    data["task_ratios"] = tuple((task, ratio) for task, ratio in data["task_ratios"])
    return OrchestratorConfig(**data)
