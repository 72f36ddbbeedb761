"""The journal in object storage: whose it is, what it holds back, and what an answer that is lost costs."""

import pytest
import tensorstore

from dora_jax.runtime.journal import event_log as jn
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import ABSENT, JournalError, ObjectLogStore


def test_the_generation_of_an_absent_key_is_what_we_think(tmp_path):
    for url in ("memory://x/", f"file://{tmp_path}/"):
        store = tensorstore.KvStore.open(url).result()
        assert store.read("nothing").result().stamp.generation == ABSENT


def test_a_batch_for_object_storage_is_held_until_it_is_due(monkeypatch):
    now, store = [100.0], tensorstore.KvStore.open("memory://j/").result()
    monkeypatch.setattr(jn.time, "monotonic", lambda: now[0])
    journal = EventLog(ObjectLogStore(store), sync_s=0.5)
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


class Unanswering:
    """A store of which `lost` says that its writes get no answer: False, and are not done; True, and are done."""

    lost = None

    def __init__(self):
        self._store = tensorstore.KvStore.open("memory://j/").result()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def write(self, *args, **options):
        if self.lost is None:
            return self._store.write(*args, **options)
        if self.lost:
            self._store.write(*args, **options).result()
        raise OSError("503")


def test_a_put_whose_answer_was_lost_is_not_taken_for_another_writers(monkeypatch):
    store = Unanswering()
    monkeypatch.setattr(jn, "RETRY_PERIOD_S", 0.0)
    log = ObjectLogStore(store)
    journal = EventLog(log, (notes := []).append)
    journal.rotate([b"head"])
    for store.lost in (True, False):
        journal.append(b"one")
        assert not journal.commit() and not journal.holds, "the run goes on without"
        store.lost = None
        journal.append(b"two")
        assert journal.commit()
    assert journal.read(1).records == (b"head", b"one", b"two", b"one", b"two") and len(notes) == 4


@pytest.mark.parametrize("arrives", ["before the next record", "behind it", "never"])
def test_a_manifest_that_had_no_answer_takes_no_later_record_with_it(arrives):
    """It names a segment that the writer has given up; what it puts into the one before would not be read."""
    store, held, holds = tensorstore.KvStore.open("memory://j/").result(), [], []

    class Unanswered:
        def result(self, timeout=None):
            raise TimeoutError

    class Late:
        def __getattr__(self, name):
            return getattr(store, name)

        def write(self, key, *args, **options):
            if key != "MANIFEST" or not holds:
                return store.write(key, *args, **options)
            held.append(lambda: store.write(key, *args, **options).result())
            return Unanswered()

    journal = EventLog(ObjectLogStore(Late()))
    journal.rotate([b"head"])
    holds.append(True)
    with pytest.raises(OSError, match="did not answer"):
        journal.rotate([b"given up"])
    holds.clear()
    if arrives.startswith("before"):
        held.pop()()
    journal.append(b"record")
    assert journal.commit(sync=True)
    if arrives.startswith("behind"):
        held.pop()()
    again = EventLog(ObjectLogStore(store))
    assert again.segments() == [1] and again.read(1).records == (b"head", b"record")


def test_a_writer_that_was_paused_at_a_manifest_does_not_take_back_what_its_successor_has_sealed():
    store, holds = tensorstore.KvStore.open("memory://j/").result(), []

    class Lost:
        def __getattr__(self, name):
            return getattr(store, name)

        def write(self, key, *args, **options):
            done = store.write(key, *args, **options)
            if key == "MANIFEST" and holds:
                raise OSError("paused behind the put")
            return done

    paused = EventLog(ObjectLogStore(Lost()))
    paused.rotate([b"head"])
    holds.append(True)
    with pytest.raises(OSError, match="paused"):
        paused.rotate([b"next"])
    holds.clear()
    successor = EventLog(ObjectLogStore(store))
    paused.append(b"late")
    with pytest.raises(JournalError, match="taken for dead"):
        paused.commit(sync=True)
    assert successor.rotate([b"mine"]) == 3
    assert [EventLog(ObjectLogStore(store)).read(n).records for n in (1, 2, 3)] == [(b"head",), (b"next",), (b"mine",)]
