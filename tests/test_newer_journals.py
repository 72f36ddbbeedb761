"""What another version of dora_jax wrote is no damage: a resume that needs it is refused, and the journal stays as it
is."""

import types

import msgpack
import pytest

from dora_jax.config import ConfigError, UnknownFormat
from dora_jax.orchestrate import snapshot
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import records, resume
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.frames import LAYOUT
from dora_jax.runtime.journal.recovery import recover
from tests.fakes.journal_world import History
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.segments import segment, segment_of_layout

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=6)


@pytest.fixture
def killed():
    """A run of two incarnations, whose journal has several segments."""
    history = History(CONFIG, Shape(), every=2, keep=9)
    assert history.live(kill_fact=110) is None and history.live(kill_fact=20) is None
    assert len(history.disk.segments()) > 2
    return history


def found(history, notify=pytest.fail):
    return recover(EventLog(history.disk), CONFIG, list(history.checkpoints), lambda version: True, notify)


def of_format(head):
    head[1] = records.FORMAT + 1


def of_snapshot(head):
    head[4]["format"] = snapshot.FORMAT + 1


def of_configuration(head):
    head[3]["a_field_to_come"] = 1


def of_head(change):
    def rewrite(rows):
        change(rows[0])

    return rewrite


def with_record(rows):
    rows.append(["RecordToCome", 1])


def with_event(rows):
    rows.append(["Batch", [["Fact", ["EventToCome", 1], None]], True])


NEWER = {
    "head": (of_head(of_format), f"it is of format {records.FORMAT + 1}, and this version of dora_jax reads"),
    "snapshot": (of_head(of_snapshot), f"its snapshot is of format {snapshot.FORMAT + 1}, and this version"),
    "configuration": (of_head(of_configuration), "its configuration differs in a_field_to_come"),
    "record": (with_record, "'RecordToCome' is no record"),
    "event": (with_event, "Batch.entries: Fact.event: 'EventToCome' is no record"),
}


def rewrite(disk, number, change):
    rows = [msgpack.unpackb(record) for record in EventLog(disk).read(number).records]
    change(rows)
    disk.content[number] = segment([msgpack.packb(row) for row in rows], number)


@pytest.mark.parametrize("what", NEWER)
def test_a_newest_segment_of_another_version_is_refused_and_nothing_changes(killed, what):
    change, sentence = NEWER[what]
    newest = killed.disk.segments()[-1]
    rewrite(killed.disk, newest, change)
    before = dict(killed.disk.content)
    with pytest.raises(UnknownFormat) as refused:
        killed.live()
    assert isinstance(refused.value, ConfigError), "the command ends with this sentence and exit code 2"
    assert str(refused.value).startswith(
        f"workdir: journal segment {newest} was written by another version of dora_jax"
    )
    assert sentence in str(refused.value) and killed.disk.content == before and not killed.notes


def test_frames_of_another_layout_are_refused(killed):
    newest = killed.disk.segments()[-1]
    killed.disk.content[newest] = segment_of_layout(LAYOUT + 1)
    with pytest.raises(
        UnknownFormat, match=f"segment {newest} .*of layout {LAYOUT + 1}, and this version of dora_jax reads"
    ):
        found(killed)


def test_the_start_of_a_run_passes_the_refusal_on(killed):
    rewrite(killed.disk, killed.disk.segments()[-1], of_head(of_format))
    checkpoints = type("Steps", (), {"steps": lambda self: [], "usable": lambda self, step: True})()
    writer = types.SimpleNamespace(note=pytest.fail)
    with pytest.raises(UnknownFormat):
        resume.begin(EventLog(killed.disk), checkpoints, None, None, None, None, CONFIG, writer)


def test_an_older_segment_of_another_version_is_refused_where_a_start_needs_it(killed):
    first, *_ = killed.disk.segments()
    true = found(killed)
    rewrite(killed.disk, first, of_head(of_format))
    assert found(killed).start == true.start > 0, "nothing of it is needed"
    killed.checkpoints = {0: killed.checkpoints[0]}
    with pytest.raises(UnknownFormat, match=f"journal segment {first} "):
        found(killed)


def test_a_damaged_head_is_stepped_over_with_a_note(killed):
    newest, notes = killed.disk.segments()[-1], []
    data = bytearray(killed.disk.content[newest])
    data[40] ^= 1
    killed.disk.content[newest] = bytes(data)
    assert found(killed, notes.append).base >= 0
    assert notes == [
        f"journal segment {newest}: record 1 at byte 16 does not match its checksum; the segment is stepped over"
    ]
    rewrite(killed.disk, newest - 1, lambda rows: rows[0].__setitem__(1, "9"))
    notes.clear()
    found(killed, notes.append)
    assert (
        f"segment {newest - 1} has no readable head: it does not say its format; the segment is stepped over"
        in notes[0]
    )


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("value", [None, 7, [], {}, "x", -1])
def test_a_head_that_makes_no_sense_is_stepped_over_with_a_note(killed, at, value):
    newest, notes = killed.disk.segments()[-1], []
    rewrite(killed.disk, newest, lambda rows: rows[0].__setitem__(at, value))
    try:
        found(killed, notes.append)
    except (RuntimeError, ConfigError) as error:
        notes.append(str(error))
    assert notes or (at, value) in ((2, 7), (2, -1), (5, {}), (6, 0)), "an epoch may be any number, digests may be none"
