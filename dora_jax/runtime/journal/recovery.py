"""From a journal and checkpoints to where the run was: the exact state of the orchestrator, and the steps to redo.

    segment = Head, its payload, then batches
    replay  = restore the head's snapshot, commit each fact, decide on each batch
    start   = the newest checkpoint that verifies and is no newer than the oldest live version
    redo    = the batches trained since: on the way every live version's weights are made again

Consumes an `EventLog`; produces `Recovered`. Laws: snapshot + tail = full replay; a damaged segment or checkpoint is
reported, and an older one is used; a segment that another version of dora_jax wrote is not damaged: where it is needed,
the resume is refused (UnknownFormat); a segment is followed up to the first fact that the orchestrator refuses, which
is where the run that wrote it ended; no group is in two of the returned steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dora_jax.config import UnknownFormat, changes
from dora_jax.config.changes import Changes, Settings
from dora_jax.orchestrate import snapshot
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.snapshot import Outstanding, restart
from dora_jax.runtime.common.codec import CodecError, UnknownRecord
from dora_jax.runtime.journal.event_log import EventLog, unheard
from dora_jax.runtime.journal.frames import Segment
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.payload_state import PayloadState, Step
from dora_jax.runtime.journal.records import CODEC, FORMAT, Batch, Entry, Fact, Head, Partial, Saved, reader
from dora_jax.types import Version

Notify = Callable[[str], None]
NO_SETTINGS: Settings = {}
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
    outstanding: Outstanding
    start: Version  # the trainer restores this checkpoint (or the initial weights) ...
    segments: dict[int, Version]  # of the journal -> the version at which each begins
    steps: tuple[Step, ...]  # ... and makes these steps again, to the version that was published last
    changed: Changes = dataclasses.field(default_factory=dict)  # settings, since the run was here last
    afresh: tuple[str, ...] = ()  # those for which nothing but the checkpoint is of use

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
            saved={str(v): saved for v, saved in payloads.saved.items()},
            settings=payloads.settings,
        )
    )
    yield from records


def recover(
    journal: EventLog,
    config: OrchestratorConfig,
    checkpoints: Sequence[Version],
    usable: Callable[[Version], bool],
    notify: Notify,
    adopt: Callable[[Mapping[Version, Saved]], Sequence[Version]] = lambda saved: (),
    settings: Settings = NO_SETTINGS,
) -> Recovered | None:
    """Where the run was; None: there is no journal. `checkpoints`: steps that the trainer can start from, with the
    initial weights; `usable` verifies one, and is asked last: the run starts from the first that is. `adopt` is given
    what the journal holds of checkpoints, and returns further ones. settings: today's; where they leave no use for what
    is in flight, the start is the newest checkpoint, and the orchestrator as it was under the earlier ones.
    JournalError: no checkpoint fits the journal. UnknownFormat: another version of dora_jax wrote a segment that this
    start needs."""
    heads, unknown = _heads(journal, notify)
    newest = max(heads, default=0)
    if unknown and max(unknown) > newest:
        raise unknown[max(unknown)]
    if not heads:
        return None
    with _sensible(newest):
        end = replay(journal, [newest], notify)
        outstanding = restart(end.orchestrator.state, end.orchestrator.step)
    floor = min(outstanding.versions, default=end.base)
    # what checkpoints must restore to. Of one that was saved in an older format the params may be known
    published = {v: each.digest for v, each in end.payloads.digests.items() if each.epoch == end.epoch}
    params = {v: Saved(version=v, params=digest, opt_state=0, rl_state=0) for v, digest in published.items()}
    checkpoints = sorted({*checkpoints, *adopt(params | end.payloads.saved)})
    changed = changes.between(end.payloads.settings, settings)
    if afresh := tuple(changes.learned(changed, only_afresh=True)):
        for start in filter(usable, reversed(checkpoints)):
            return Recovered(end.orchestrator, end.payloads, end.epoch, outstanding, start, heads, (), changed, afresh)
        raise JournalError(f"no checkpoint verifies, of {checkpoints}")
    for start in sorted((v for v in checkpoints if v <= floor), reverse=True):
        first = max((n for n, base in heads.items() if base <= start), default=None)
        if first is None:
            continue
        chain = [n for n in sorted(heads) if n >= first]
        with _sensible(first):
            past = end if chain == [newest] else replay(journal, chain, unheard)
        steps = tuple(step for step in past.steps if step.base >= start)
        if [step.base for step in steps] != list(range(start, end.base)):
            if unknown:
                raise unknown[max(unknown)]  # of which the missing batches may be
            notify(
                f"the batches between version {start} and {end.base} are not all in the journal: an older start is "
                f"tried"
            )
        elif usable(start):
            orchestrator = Orchestrator.restore(config, end.orchestrator.snapshot())
            end.payloads.prune(orchestrator.state)
            return Recovered(orchestrator, end.payloads, end.epoch, outstanding, start, heads, steps, changed)
    if unknown:
        raise unknown[max(unknown)]
    raise JournalError(
        f"no checkpoint that verifies fits the journal: live versions are {list(outstanding.versions)}, "
        f"checkpoints {list(checkpoints)}"
    )


def steps_since(journal: EventLog, version: Version) -> tuple[Step, ...]:
    """The steps made since this version, oldest first. Another thread may be writing the log."""
    heads, _ = _heads(journal, unheard, back_to=version)
    steps = replay(journal, sorted(heads), unheard).steps if heads else []
    return tuple(step for step in steps if step.base >= version)


def replay(journal: EventLog, segments: Sequence[int], notify: Notify) -> ReplayedState:
    """The state after the last record of these segments that can be read. JournalError: there are no segments, or they
    make no sense."""
    state: ReplayedState | None = None
    for number in segments:
        segment = _read(journal, number)
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
        config = dict(head.config)  # under which the segment was written: its tuples were written as lists
        for name, value in head.config.items():
            if isinstance(value, list):
                config[name] = tuple(tuple(each) if isinstance(each, list) else each for each in value)
        orchestrator = Orchestrator.restore(OrchestratorConfig(**config), head.orchestrator)
    state = ReplayedState(orchestrator, payloads, head.epoch)
    state.steps = [step for step in steps if step.base < state.base]  # later ones were undone by a fallback
    for i, data in enumerate(tail, start=1 + head.payload_records):
        followed: list[Entry] = []
        try:
            batch = read(data)
            if isinstance(batch, Partial):  # in format 3 it stood by itself
                batch = Batch(entries=(batch,), last=True)
            if not isinstance(batch, Batch):
                raise JournalError(f"a {type(batch).__name__} stands among its facts")
            for entry in batch.entries:
                _follow(state, entry)
                followed.append(entry)
            if batch.last:
                for command in state.orchestrator.decide():
                    state.payloads.follow(command)
        except UnknownRecord as error:
            raise _unknown(number, f"record {i + 1}: {error}") from error
        except SENSELESS as error:
            notify(
                f"journal segment {number}: record {i + 1} cannot be followed ({error}); the {len(records) - i} from "
                f"there on are not read"
            )
            return _replay_one(number, records[:i], steps, notify, followed)  # the next was perhaps followed in part
    for entry in rest:
        _follow(state, entry)
    for command in state.orchestrator.decide():  # where a batch was torn
        state.payloads.follow(command)
    return state


def _follow(state: ReplayedState, entry: Entry) -> None:
    if isinstance(entry, Fact) and not state.orchestrator.counts(entry.event):
        return
    step = state.payloads.apply(entry, state.orchestrator.state)
    if isinstance(entry, Fact):
        state.orchestrator.commit(entry.event)
        state.facts += 1
    if step is not None:
        state.steps.append(step)


Heads = tuple[dict[int, Version], dict[int, UnknownFormat]]


def _heads(journal: EventLog, notify: Notify, back_to: Version | None = None) -> Heads:
    """(segments that a replay can begin with -> the version at which they begin, segments that another version of
    dora_jax wrote -> what is unknown about them). back_to: none older than the newest that begins at this version or
    before it is read, so that the time does not grow with a journal that keeps all."""
    found: dict[int, Version] = {}
    unknown: dict[int, UnknownFormat] = {}
    for number in sorted(journal.segments(), reverse=back_to is not None):
        try:
            segment = _read(journal, number)
            if not segment.records and segment.fault:
                raise JournalError(f"journal segment {number}: {segment.fault}")
            head, *_ = _open(number, segment.records)
            with _sensible(number):
                base = head.orchestrator["ledger"]["base"]
                if base < 0:
                    raise JournalError(f"journal segment {number} begins at version {base}, which never was")
        except UnknownFormat as error:
            unknown[number] = error
            continue
        except JournalError as error:
            notify(f"{error}; the segment is stepped over")
            continue
        found[number] = base
        if back_to is not None and base <= back_to:
            break
    return found, unknown


def _read(journal: EventLog, number: int) -> Segment:
    try:
        return journal.read(number)
    except UnknownFormat as error:
        raise _unknown(number, str(error)) from error


def _unknown(number: int, what: str) -> UnknownFormat:
    return UnknownFormat(
        f"workdir: journal segment {number} was written by another version of dora_jax ({what}): go on with that "
        "version; nothing was changed"
    )


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
        payloads.digests = {int(version): published for version, published in head.digests.items()}
        payloads.saved = {int(version): saved for version, saved in head.saved.items()}
        payloads.settings = head.settings
        # raise UnknownFormat where a head of a known format holds a snapshot or a configuration of another one
        written = head.orchestrator["format"]
        if type(written) is int and not snapshot.OLDEST <= written <= snapshot.FORMAT:
            raise UnknownFormat(
                f"its snapshot is of format {written}, and this version of dora_jax reads {snapshot.OLDEST} to "
                f"{snapshot.FORMAT}"
            )
        if differing := {str(name) for name in head.config} ^ {
            field.name for field in dataclasses.fields(OrchestratorConfig)
        }:
            raise UnknownFormat(f"its configuration differs in {', '.join(sorted(differing))}")
    except (UnknownFormat, UnknownRecord) as error:
        raise _unknown(number, str(error)) from error
    except (CodecError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"journal segment {number} has no readable head: {error}") from error
    return head, payloads, records[1 + head.payload_records :], read


@contextlib.contextmanager
def _sensible(number: int) -> Iterator[None]:
    """Turns what a replay raises into a JournalError: a bug wrote these records, or reads them."""
    try:
        yield
    except SENSELESS as error:
        if isinstance(error, JournalError | UnknownFormat):
            raise
        raise JournalError(
            f"the journal from segment {number} on cannot be followed by this version of dora_jax: "
            f"{type(error).__name__} {error}"
        ) from error
