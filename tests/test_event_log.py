"""The journal as bytes: what was committed is read back after any crash; damage is found, reported, and cut off."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from dora_jax.runtime.journal import event_log as jn
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.forked_writer import fork
from dora_jax.runtime.journal.frames import FRAME, PREAMBLE, Segment, unframe
from dora_jax.runtime.journal.log_stores import FileLogStore, JournalError, ObjectLogStore
from dora_jax.runtime.journal.object_storage import Objects
from tests.fakes.segments import segment as segment_of
from tests.fakes.segments import unnumbered

FLIPS = 500


def records(n, seed=0):
    draw = random.Random(seed)
    return [draw.randbytes(draw.randrange(60)) for _ in range(n)]


def filled(log, committed=8, more=3):
    """A journal with `committed` durable records behind a snapshot of two, and `more` appended only."""
    journal = EventLog(log)
    journal.rotate([b"head", b"snapshot"])
    for record in records(committed):
        journal.append(record)
        journal.commit()
    for record in records(more, seed=1):
        journal.append(record)
    return journal


@pytest.fixture(params=["files", "objects"])
def new_log(request, tmp_path):
    """A function that opens the same log again, as the next process would."""
    store = Objects("memory://j")
    return lambda: FileLogStore(tmp_path / "journal") if request.param == "files" else ObjectLogStore(store)


def test_what_was_committed_is_read_back_and_nothing_else(new_log):
    log = new_log()
    filled(log)
    log.close()
    again = EventLog(new_log())
    assert again.segments() == [1]
    assert again.read(1) == Segment((b"head", b"snapshot", *records(8)), None, 0)


def test_a_run_begins_a_segment_of_its_own(new_log):
    filled(log := new_log())
    log.close()
    second = EventLog(new_log())
    with pytest.raises(JournalError, match="rotate first"):
        second.append(b"x")
    assert second.rotate([b"head 2"]) == 2
    second.append(b"y")
    second.close()
    third = EventLog(new_log())
    assert third.segments() == [1, 2] and third.read(2).records == (b"head 2", b"y")
    assert third.read(1).records[0] == b"head"
    third.rotate([b"head 3"])
    third.drop_before(3)
    assert third.segments() == [3] and third.read(3).records == (b"head 3",)


def test_close_commits(new_log):
    journal = filled(new_log())
    journal.close()
    assert len(EventLog(new_log()).read(1).records) == 2 + 8 + 3


def test_every_cut_gives_a_prefix_and_says_where(new_log):
    filled(log := new_log())
    log.close()
    log = new_log()
    data, whole = log.read(1), (b"head", b"snapshot", *records(8))
    ends = {0, PREAMBLE.size}
    for record in whole:
        ends.add(max(ends) + FRAME.size + len(record))
    for size in range(len(data)):
        segment = unframe(data[:size], 1)
        assert segment.records == whole[: len(segment.records)]
        assert (segment.fault is None) == (size in ends)
        if segment.fault:
            assert "torn" in segment.fault and segment.lost_bytes == size - max(e for e in ends if e <= size)


@pytest.mark.parametrize("written", [segment_of, unnumbered], ids=["numbered", "unnumbered"])
def test_every_flipped_bit_is_found(written):
    data = written(records(8))
    whole = unframe(data, 1).records
    draw = random.Random(3)
    for _ in range(FLIPS):
        bad = bytearray(data)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        segment = unframe(bytes(bad), 1)
        assert segment.fault and segment.records == whole[: len(segment.records)] and len(segment.records) < len(whole)


def test_noise_is_no_journal_and_takes_no_memory():
    draw = random.Random(4)
    for _ in range(1000):
        noise = draw.randbytes(draw.randrange(1, 200))
        segment = unframe(noise, 1)
        assert not segment.records and segment.fault and segment.lost_bytes == len(noise)


def test_a_segment_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    journal = EventLog(FileLogStore(tmp_path))
    journal.rotate([b"first"])

    def dies(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(jn.os, "rename", dies)
        journal.rotate([b"second"])
    journal.append(b"goes on")
    journal.close()
    again = EventLog(FileLogStore(tmp_path))
    assert again.segments() == [1] and again.read(1).records == (b"first", b"goes on")
    assert not list(tmp_path.glob("*.part"))


def test_a_second_run_is_refused(tmp_path):
    first = filled(FileLogStore(tmp_path))
    code = "import sys; from dora_jax.runtime.journal.log_stores import FileLogStore; FileLogStore(sys.argv[1])"
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another run writes" in out.stderr
    first.close()


def test_a_run_that_was_taken_for_dead_is_refused_by_the_object_store():
    store = Objects("memory://j")
    zombie = filled(ObjectLogStore(store))
    successor = EventLog(ObjectLogStore(store))
    with pytest.raises(JournalError, match="another writer"):
        zombie.commit()
    successor.rotate([b"head of the successor"])
    zombie = EventLog(ObjectLogStore(store))
    third = EventLog(ObjectLogStore(store))
    third.rotate([b"third"])
    with pytest.raises(JournalError, match="another writer"):
        zombie.rotate([b"late"])
    last = EventLog(ObjectLogStore(store))
    assert [last.read(n).records for n in last.segments()] == [
        (b"head", b"snapshot", *records(8)),
        (b"head of the successor",),
        (b"third",),
    ]


def test_objects_of_a_segment_without_manifest_are_not_read():
    store = Objects("memory://j")
    filled(ObjectLogStore(store))
    store.put("000002-dead/000000", segment_of([b"of a killed run"], 2))
    journal = EventLog(ObjectLogStore(store))
    assert journal.segments() == [1]
    journal.rotate([b"mine"])
    assert EventLog(ObjectLogStore(store)).read(2).records == (b"mine",)
    assert not any("dead" in key for key in store.keys())


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"segments": [2, 1]}', b'{"segments": {"a": "b"}}', b"\xff", None]
)
def test_where_the_manifest_is_damaged_a_writer_takes_the_segments_that_lie_there(content):
    store = Objects("memory://j")
    filled(ObjectLogStore(store))
    before = EventLog(ObjectLogStore(store)).read(1).records
    assert before and not ObjectLogStore(store).repaired
    store.put("000001-00000000/000000", b"of a run that was killed before it was named")
    store.put("MANIFEST", content)
    if content is not None:
        with pytest.raises(JournalError, match="MANIFEST is damaged"):
            ObjectLogStore(store, read_only=True)
    log = ObjectLogStore(store)
    assert ("is damaged" if content is not None else "is missing") in log.repaired
    journal = EventLog(log)
    assert journal.segments() == [1] and journal.read(1).records == before
    journal.rotate([b"mine"])
    again = ObjectLogStore(store)
    assert not again.repaired and EventLog(again).read(2).records == (b"mine",)


def test_a_last_segment_that_is_gone_leaves_the_others():
    store = Objects("memory://j")
    filled(ObjectLogStore(store))
    EventLog(ObjectLogStore(store)).rotate([b"gone"])
    for key in store.keys():
        if key.startswith("000002-"):
            store.drop(key)
    journal = EventLog(ObjectLogStore(store))
    assert journal.segments() == [1, 2] and journal.read(1).records and not journal.read(2).records


def test_a_full_disk_is_alarmed_and_nothing_is_lost_once_space_returns(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(jn, "RETRY_PERIOD_S", 0.0)
    journal = EventLog(FileLogStore(tmp_path), notes.append)
    journal.rotate([b"head"])
    write, room = os.write, [200]

    def full_disk(fd, data):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (n := write(fd, data[: room[0]]))
        return n

    whole = records(20)
    with monkeypatch.context() as full:
        full.setattr(jn.os, "write", full_disk)
        results = []
        for record in whole[:-1]:
            journal.append(record)
            results.append(journal.commit())
        with pytest.raises(OSError, match="wait for space"):
            journal.rotate([b"second"])
    assert results[0] and not results[-1] and not journal.durable
    readable = unframe((tmp_path / "000001.log").read_bytes(), 1)
    assert readable.fault is None and readable.records == (b"head", *whole[: len(readable.records) - 1])
    journal.append(whole[-1])
    assert journal.commit() and journal.durable
    assert journal.read(1).records == (b"head", *whole)
    assert len(notes) == 2 and "No space left" in notes[0] and "durable again" in notes[1]


def test_what_waits_for_space_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(jn, "MAX_BACKLOG_BYTES", 100)
    journal = EventLog(FileLogStore(tmp_path))
    journal.rotate([])
    with pytest.raises(JournalError, match="cannot write"):
        for _ in range(9):
            journal.append(bytes(20))


def test_a_journal_that_cannot_be_written_to_the_end_says_so(tmp_path, monkeypatch):
    journal = EventLog(FileLogStore(tmp_path), (notes := []).append)
    journal.rotate([b"head"])
    journal.append(b"x")
    monkeypatch.setattr(jn.os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    journal.close()
    assert "could not be made durable before the end" in notes[-1]


def test_what_is_written_is_made_durable_in_time(tmp_path, monkeypatch):
    now, synced = [100.0], []
    monkeypatch.setattr(jn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(jn.os, "fdatasync", lambda fd: synced.append(now[0]))
    journal = EventLog(FileLogStore(tmp_path), sync_s=0.5)
    journal.rotate([b"head"])
    for now[0] in (100.1, 100.2, 100.3):
        journal.append(b"x")
        assert journal.commit() and not journal.sync_due
    assert len(journal.read(1).records) == 4 and not synced, "written at once, for any process to read"
    now[0] = 100.6
    assert journal.sync_due and journal.commit() and not journal.sync_due
    wait_until(lambda: synced == [100.6])  # behind the writer's back
    journal.append(b"a step")
    assert journal.commit(sync=True) and len(synced) == 2
    assert journal.commit(sync=True) and len(synced) == 2, "nothing new"
    journal.append(b"last")
    journal.commit()
    journal.close()
    assert len(synced) == 3


def wait_until(true):
    deadline = time.perf_counter() + 5.0
    while not true():
        assert time.perf_counter() < deadline
        time.sleep(0.001)


def test_nobody_waits_for_a_disk_that_is_slow_and_what_it_forgets_is_written_again(tmp_path, monkeypatch):
    now, may_end, failing = [100.0], threading.Event(), [True]

    def slow_then_failing(fd):
        assert may_end.wait(5.0)
        if failing[0]:
            os.ftruncate(fd, os.fstat(fd).st_size - 5)  # pages that the kernel could not write are gone
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(jn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(jn.os, "fdatasync", slow_then_failing)
    journal = EventLog(FileLogStore(tmp_path), (notes := []).append, sync_s=0.5)
    journal.rotate([b"head"])
    for now[0] in (100.6, 100.7, 101.3):  # the second and the third while the first is still on its way
        journal.append(b"%d" % (10 * now[0]))
        assert journal.commit()
    may_end.set()
    journal.wait_synced()
    journal.append(b"later")
    assert not journal.commit() and "Input/output" in notes[-1]
    now[0], failing[0] = 103.0, False
    assert journal.commit() and "durable again" in notes[-1]
    assert journal.read(1) == Segment((b"head", b"1006", b"1007", b"1013", b"later"), None, 0)
    journal.close()


def test_what_a_step_is_made_of_is_synced_while_it_is_made(tmp_path, monkeypatch):
    may_end, synced = threading.Event(), []
    monkeypatch.setattr(jn.os, "fdatasync", lambda fd: (may_end.wait(5.0), synced.append(os.fstat(fd).st_size)))
    journal = EventLog(FileLogStore(tmp_path), sync_s=100.0)
    journal.rotate([b"head"])
    journal.append(b"a scored group")
    journal.commit()
    whole = (tmp_path / "000001.log").stat().st_size
    journal.sync_soon()  # Train
    journal.append(b"other samples go on")
    assert journal.commit(urgent=True) and synced == []
    threading.Timer(0.05, may_end.set).start()
    journal.wait_synced()  # StepPublished
    assert len(synced) == 1 and synced[0] >= whole
    journal.close()
    assert len(synced) == 2


def test_a_segment_that_a_child_begins_holds_the_state_at_the_fork_and_what_came_since(new_log):
    log, state = new_log(), [b"snapshot"]
    journal = EventLog(log, (notes := []).append)
    journal.rotate([b"head", *state])
    journal.append(b"before")
    journal.rotate_behind(lambda: [b"head", *state])
    assert journal.rotating
    state[0] = b"changed"  # in the parent
    journal.append(b"meanwhile")
    journal.commit()
    while (number := journal.rotated()) is None:
        assert journal.rotating
    journal.append(b"later")
    journal.close()
    again = EventLog(new_log())
    assert number == 2 and again.segments() == [1, 2] and not notes
    assert again.read(1).records == (b"head", b"snapshot", b"before", b"meanwhile")
    assert again.read(2).records == (b"head", b"snapshot", b"meanwhile", b"later")


def test_a_child_that_fails_or_is_not_waited_for_leaves_the_present_segment(tmp_path, capfd):
    journal = EventLog(FileLogStore(tmp_path), (notes := []).append)
    journal.rotate([b"head"])
    journal.rotate_behind(lambda: 1 / 0)
    while journal.rotating:
        assert journal.rotated() is None
    assert "ZeroDivisionError" in capfd.readouterr().err and "could not be begun" in notes[0]
    journal.rotate_behind(lambda: iter(lambda: b"without end", b""))
    journal.append(b"goes on")
    journal.close()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["000001.log", "lock"]
    assert EventLog(FileLogStore(tmp_path)).read(1).records == (b"head", b"goes on")


def test_a_child_holds_nothing_of_its_parent(tmp_path):
    """Its parent may be killed and begun again before it ends: the lock and every port are free then."""
    pipe, path = os.pipe(), tmp_path / "seen"

    def look():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        path.write_text(f"{sorted(map(int, os.listdir('/proc/self/fd')))[:3]} {signal.SIGTERM in blocked}")

    child = fork(look)
    while child.ended() is None:
        time.sleep(0.01)
    fds, blocked = path.read_text().rsplit(" ", 1)
    assert child.ended() and child.cpu_s > 0 and fds == "[0, 1, 2]" and blocked == "True"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for fd in pipe:
        os.close(fd)


def test_a_kill_while_what_a_failed_sync_left_is_written_again_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jn, "RETRY_PERIOD_S", 0.0)
    journal = EventLog(FileLogStore(tmp_path))
    journal.rotate([b"head"])

    def fails(*args):
        raise OSError(errno.EIO, "Input/output error")

    def dies(*args):
        raise KeyboardInterrupt

    journal.append(b"reported")
    with monkeypatch.context() as broken:
        broken.setattr(jn.os, "fdatasync", fails)
        assert not journal.commit()
    journal.append(b"next")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        for name in ("write", "pwrite"):
            killed.setattr(jn.os, name, dies)
        journal.commit()
    assert EventLog(FileLogStore(tmp_path, read_only=True)).read(1).records == (b"head", b"reported")
    journal.close()
    assert EventLog(FileLogStore(tmp_path)).read(1).records == (b"head", b"reported", b"next")
