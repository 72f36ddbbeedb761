"""Frames of the journal have a number: one that is not in its place ends the reading as damage does. And what else may
lie in the journal's folder."""

import pytest

from dora_jax.config import UnknownFormat
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.frames import LAYOUT, PREAMBLE, frames, unframe
from dora_jax.runtime.journal.log_stores import FileLogStore, JournalError, ObjectLogStore
from dora_jax.runtime.journal.object_storage import Objects
from tests.fakes.segments import segment, segment_of_layout, unnumbered

RECORDS = [b"record %d" % i for i in range(8)]
HEAD = segment(RECORDS)[: PREAMBLE.size]
FRAMES = [frames([record], 3, i) for i, record in enumerate(RECORDS)]


def moved(change):
    order = list(FRAMES)
    change(order)
    return HEAD + b"".join(order)


def swap(order):
    order[4], order[5] = order[5], order[4]


OUT_OF_PLACE = {
    "repeated": (lambda order: order.insert(5, order[4]), "it is record 5 of segment 3"),
    "swapped": (swap, "it is record 6 of segment 3"),
    "left out": (lambda order: order.pop(4), "it is record 6 of segment 3"),
    "of another segment": (
        lambda order: order.__setitem__(4, frames([RECORDS[4]], 2, 4)),
        "it is record 5 of segment 2",
    ),
}


@pytest.mark.parametrize("what", OUT_OF_PLACE)
def test_a_frame_that_is_not_in_its_place_ends_the_reading(what):
    change, place = OUT_OF_PLACE[what]
    read = unframe(data := moved(change), 3)
    whole = 5 if what == "repeated" else 4
    at = len(HEAD) + sum(map(len, FRAMES[:whole]))
    assert read == (tuple(RECORDS[:whole]), f"record {whole + 1} at byte {at} is out of place: {place}", len(data) - at)
    assert unframe(moved(lambda order: None), 3) == (tuple(RECORDS), None, 0)


def test_a_segment_under_another_name_is_not_read():
    read = unframe(segment(RECORDS, 3), 99)
    assert not read.records and read.fault == "record 1 at byte 16 is out of place: it is record 1 of segment 3"


def test_a_segment_of_the_first_layout_is_read_and_its_damage_found():
    assert unframe(unnumbered(RECORDS), 3) == (tuple(RECORDS), None, 0)
    bad = bytearray(unnumbered(RECORDS))
    bad[40] ^= 1
    assert "checksum" in unframe(bytes(bad), 3).fault


def test_a_damaged_preamble_is_damage_and_a_whole_one_of_another_layout_is_refused():
    other = segment_of_layout(LAYOUT + 1)
    with pytest.raises(UnknownFormat, match=f"of layout {LAYOUT + 1}"):
        unframe(other, 1)
    for bit in range(8 * PREAMBLE.size):
        for data in (other, segment(RECORDS)):
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            read = unframe(bytes(bad), 1)
            assert not read.records and read.fault and read.lost_bytes == len(data)


@pytest.fixture(params=["files", "objects"])
def new_log(request, tmp_path):
    store = Objects("memory://j")
    return lambda: FileLogStore(tmp_path) if request.param == "files" else ObjectLogStore(store)


def test_frames_are_numbered_on_behind_a_head_that_a_child_wrote(new_log):
    """Also those that wait for their batch while the segment begins."""
    journal = EventLog(log := new_log(), sync_s=100.0)
    journal.rotate([b"head"])
    journal.rotate_behind(lambda: [b"head", b"snapshot"])
    journal.append(b"meanwhile")
    journal.commit(sync=True)
    journal.append(b"waits")
    while (number := journal.rotated()) is None:
        assert journal.rotating
    for record in (b"later", b"last"):
        journal.append(record)
        assert journal.commit(sync=True)
    assert journal.read(1).records == (b"head", b"meanwhile")
    assert journal.read(number) == ((b"head", b"snapshot", b"meanwhile", b"waits", b"later", b"last"), None, 0)
    log.close()


def test_an_object_that_is_missing_is_noticed():
    store = Objects("memory://j")
    journal = EventLog(ObjectLogStore(store))
    journal.rotate([b"head"])
    for record in RECORDS[:4]:
        journal.append(record)
        journal.commit()
    (third,) = [key for key in store.keys() if key.endswith("/000003")]
    store.drop(third)
    read = EventLog(ObjectLogStore(store)).read(1)  # which seals the hole with an empty object
    assert read.records == (b"head", *RECORDS[:2]) and "is out of place: it is record 5 of segment 1" in read.fault


def test_a_segment_that_could_not_be_made_durable_is_not_there(tmp_path, monkeypatch):
    """Records go on in the present segment, which must be the last."""
    log = FileLogStore(tmp_path)
    journal = EventLog(log)
    journal.rotate([b"head"])

    def fails(folder):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output"):
        broken.setattr("dora_jax.runtime.journal.log_stores.sync_folder", fails)
        journal.rotate([b"second"])
    journal.append(b"goes on")
    journal.close()
    assert EventLog(FileLogStore(tmp_path)).segments() == [1]
    assert EventLog(FileLogStore(tmp_path, read_only=True)).read(1).records == (b"head", b"goes on")


# ---------------------------------------------------------------- what no run wrote


def strange(folder):
    (folder / "000099.log").mkdir()
    (folder / "000098.log").symlink_to(folder / "nowhere")
    (folder / "000097.log").symlink_to(folder / "000097.log")
    (folder / f"{'9' * 200}.log").write_bytes(b"x")
    for name in ("²²²²²².log", "٣٣٣٣٣٣.log", "7.log", "000000.log", "x.log"):
        (folder / name).write_bytes(b"x")
    (folder / "000100.part").mkdir()


def test_what_no_run_wrote_is_stepped_over(tmp_path):
    first = EventLog(FileLogStore(tmp_path))
    first.rotate([b"head"])
    first.close()
    strange(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    log = FileLogStore(tmp_path)
    journal = EventLog(log)
    assert journal.segments() == [1, 97, 98, 99, int("9" * 200)]
    assert journal.read(1) == ((b"head",), None, 0)
    assert [journal.read(n).fault for n in journal.segments()[1:]] == [
        "cannot be read: Too many levels of symbolic links",
        "cannot be read: No such file or directory",
        "cannot be read: Is a directory",
        "has a number that no run reaches",
    ]
    assert journal.rotate([b"second"]) == 100
    journal.append(b"x")
    assert journal.commit() and journal.read(100).records == (b"second", b"x")
    journal.drop_before(100)
    assert 1 not in journal.segments() and (tmp_path / "000099.log").is_dir()
    assert {path.name for path in tmp_path.iterdir()} >= names - {"000001.log", "000097.log", "000098.log"}
    log.close()


def test_a_journal_that_cannot_be_opened_is_a_sentence(tmp_path):
    folder = tmp_path / "journal"
    folder.write_bytes(b"a file")
    with pytest.raises(JournalError, match="no run wrote that, move it away"):
        FileLogStore(folder)


def test_a_folder_in_the_place_of_the_lock_is_set_aside(tmp_path):
    (tmp_path / "lock").mkdir()
    log = FileLogStore(tmp_path)
    assert (tmp_path / "lock").is_file() and (tmp_path / "lock.damaged").is_dir()
    with pytest.raises(JournalError, match="another run writes"):
        FileLogStore(tmp_path)
    log.close()


def test_a_manifest_of_the_object_store_is_checked():
    store = Objects("memory://j")
    for n in range(2):
        EventLog(ObjectLogStore(store)).rotate([b"head %d" % n])
    good = store.get("MANIFEST")
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        store.put("MANIFEST", bytes(bad))
        try:
            log = ObjectLogStore(store, read_only=True)
        except (JournalError, UnknownFormat) as error:
            assert "MANIFEST" in str(error)
        else:  # the name of the checksum is another, as where none was taken
            assert b"crc32" not in bytes(bad) and log.segments() == [1, 2]
    store.put("MANIFEST", b'{"format": 3, "segments": {}}')
    with pytest.raises(UnknownFormat, match="MANIFEST is of format 3, and this version of dora_jax reads 1 to 2"):
        ObjectLogStore(store)
    store.put("MANIFEST", b'{"segments": {}}')  # as 10b51e5 wrote it
    assert ObjectLogStore(store).segments() == []
