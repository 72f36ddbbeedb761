"""The journal in object storage: whose it is, what it holds back, and what an answer that is lost costs."""

import pytest
import tensorstore

from dora_jax.runtime.journal import event_log as jn
from dora_jax.runtime.journal import object_storage
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import JournalError, ObjectLogStore
from dora_jax.runtime.journal.object_storage import ABSENT, Objects


@pytest.fixture
def put(monkeypatch):
    """Objects in one memory; `put.by` takes the place of tensorstore's `write`, and is called with it first."""

    class Memory:
        by = staticmethod(lambda write, *args, **options: write(*args, **options))
        store = tensorstore.KvStore.open("memory://j/").result()

        def __getattr__(self, name):
            return getattr(self.store, name)

        def write(self, *args, **options):
            return self.by(self.store.write, *args, **options)

    memory = Memory()
    monkeypatch.setattr(object_storage, "opened", lambda *_: memory)
    return memory


def test_the_generation_of_an_absent_key_is_what_we_think(tmp_path):
    for url in ("memory://x/", f"file://{tmp_path}/"):
        store = tensorstore.KvStore.open(url).result()
        assert store.read("nothing").result().stamp.generation == ABSENT


def test_a_batch_for_object_storage_is_held_until_it_is_due(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(jn.time, "monotonic", lambda: now[0])
    journal = EventLog(ObjectLogStore(Objects("memory://j")), sync_s=0.5)
    journal.rotate([b"head"])
    for now[0] in (100.1, 100.2):
        journal.append(b"%d" % (10 * now[0]))
        assert journal.commit() and journal.holds
    assert journal.read(1).records == (b"head",)
    now[0] = 100.6
    assert journal.commit() and not journal.holds and journal.read(1).records == (b"head", b"1001", b"1002")
    now[0] = 100.7
    journal.append(b"a step")
    assert journal.commit() and journal.holds, "the next batch has begun"
    assert journal.commit(urgent=True) and not journal.holds and journal.read(1).records[3:] == (b"a step",)


def test_a_put_whose_answer_was_lost_is_not_taken_for_another_writers(put, monkeypatch):
    monkeypatch.setattr(jn, "RETRY_PERIOD_S", 0.0)
    whole = put.by
    journal = EventLog(ObjectLogStore(Objects("memory://j")), (notes := []).append)
    journal.rotate([b"head"])
    for done in (True, False):

        def unanswered(write, *args, done=done, **options):
            if done:
                write(*args, **options).result()
            raise OSError("503")

        put.by = unanswered
        journal.append(b"one")
        assert not journal.commit() and not journal.holds, "the run goes on without"
        put.by = whole
        journal.append(b"two")
        assert journal.commit()
    assert journal.read(1).records == (b"head", b"one", b"two", b"one", b"two") and len(notes) == 4


@pytest.mark.parametrize("arrives", ["before the next record", "behind it", "never"])
def test_a_manifest_that_had_no_answer_takes_no_later_record_with_it(put, arrives):
    """It names a segment that the writer has given up; what it puts into the one before would not be read."""
    store, held, whole = Objects("memory://j"), [], put.by

    class Unanswered:
        def result(self, timeout=None):
            raise TimeoutError

    def late(write, key, *args, **options):
        if key != "MANIFEST":
            return write(key, *args, **options)
        held.append(lambda: write(key, *args, **options).result())
        return Unanswered()

    journal = EventLog(ObjectLogStore(store))
    journal.rotate([b"head"])
    put.by = late
    with pytest.raises(OSError, match="memory://j: no answer within"):
        journal.rotate([b"given up"])
    put.by = whole
    if arrives.startswith("before"):
        held.pop()()
    journal.append(b"record")
    assert journal.commit(sync=True)
    if arrives.startswith("behind"):
        held.pop()()
    again = EventLog(ObjectLogStore(store))
    assert again.segments() == [1] and again.read(1).records == (b"head", b"record")


def test_a_writer_that_was_paused_at_a_manifest_does_not_take_back_what_its_successor_has_sealed(put):
    store, whole = Objects("memory://j"), put.by

    def lost(write, key, *args, **options):
        done = write(key, *args, **options)
        if key == "MANIFEST":
            raise OSError("paused behind the put")
        return done

    paused = EventLog(ObjectLogStore(store))
    paused.rotate([b"head"])
    put.by = lost
    with pytest.raises(OSError, match="paused"):
        paused.rotate([b"next"])
    put.by = whole
    successor = EventLog(ObjectLogStore(store))
    paused.append(b"late")
    with pytest.raises(JournalError, match="taken for dead"):
        paused.commit(sync=True)
    assert successor.rotate([b"mine"]) == 3
    assert [EventLog(ObjectLogStore(store)).read(n).records for n in (1, 2, 3)] == [(b"head",), (b"next",), (b"mine",)]
