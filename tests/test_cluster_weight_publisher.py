"""Versions on their way through the controller: a storage that is slow, a version dropped while it is written."""

import threading
import types

import numpy as np
import pytest

from dora_jax.publish import Slices
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import GangDied
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.journal.object_storage import Objects
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from tests.fakes.cluster import eventually

WHOLE = ((0,), (2,))
PART = Slices((2,), np.dtype(np.float32), (2,), {WHOLE: np.ones(2, np.float32)}, frozenset({WHOLE}))


class Gang:
    """One process, whose calls are answered when the test says so."""

    def __init__(self, name, stored, epoch=1):
        self.name, self.epoch, self.wanted = name, epoch, ((),)
        self.received, self.casts, self.reason, self.dead = [], [], None, False
        self.swift = False  # the next write is answered before its caller goes on
        self._stored = stored

    def tell_all(self, what):
        self.received.append(what)

    def cast(self, what, then):
        if self.dead:
            raise GangDied("killed")
        self._stored.put(what.version, {"w": PART})
        self.casts.append((what, then))
        self.call = call = types.SimpleNamespace(done=threading.Event())
        if self.swift:
            self.swift = False
            then()
            call.done.set()
        return call

    def written(self):
        self.casts[-1][1]()

    def writes(self):
        return [what.version for what, _ in self.casts]

    def die(self, reason):
        self.reason = reason


@pytest.fixture
def rig(tmp_path):
    stored = StoredWeights(tmp_path)
    publisher = WeightPublisher(stored, (WIRE, STORAGE), [].append)
    trainer, replica = Gang("trainer", stored), Gang("rollout 0", stored)
    publisher.up(trainer), publisher.up(replica)
    yield publisher, trainer, replica
    publisher.close()


def publish(publisher, trainer, *versions):
    for version in versions:
        publisher.begin(version)
        publisher.kept(trainer, version)


def leaves(tmp_path, *names):
    """What is in storage, once it has done what it was asked."""
    eventually(lambda: {key.split("/")[1] for key in Objects(str(tmp_path)).keys("weights")} == set(names))


def test_a_slow_storage_passes_over_versions_that_nobody_wants_any_more(rig, tmp_path):
    publisher, trainer, _ = rig
    publish(publisher, trainer, 1, 2, 3, 4)
    assert trainer.writes() == [1], "one at a time"
    publisher.drop(2), publisher.drop(3)
    trainer.written()
    assert trainer.writes() == [1, 4] and publisher.nowhere_else() == [4]
    trainer.written()
    assert publisher.nowhere_else() == []
    leaves(tmp_path, "v1", "v1.whole", "v4", "v4.whole")


def test_a_version_that_is_dropped_while_it_is_written_leaves_nothing(rig, tmp_path):
    publisher, trainer, _ = rig
    publish(publisher, trainer, 1, 2)
    publisher.drop(1)
    leaves(tmp_path, "v1")  # its writer is still there
    trainer.written()
    leaves(tmp_path, "v2")
    publisher.drop(2)
    publisher.down(trainer)
    leaves(tmp_path)


def test_a_storage_that_refuses_a_version_gets_the_next_one(rig, tmp_path):
    publisher, trainer, _ = rig
    publish(publisher, trainer, 1)
    trainer.call.done.set()  # without `then`
    publish(publisher, trainer, 2)
    assert trainer.writes() == [1, 2]
    leaves(tmp_path, "v2")
    trainer.written()
    assert publisher.nowhere_else() == [1]
    leaves(tmp_path, "v2", "v2.whole")


def test_a_write_that_is_answered_at_once_is_not_taken_for_refused(rig, tmp_path):
    publisher, trainer, _ = rig
    publish(publisher, trainer, 1, 2, 3)
    trainer.swift = True
    trainer.written()  # 1; then 2 at once, and 3 is begun
    publish(publisher, trainer, 4)
    assert trainer.writes() == [1, 2, 3]
    leaves(tmp_path, "v1", "v1.whole", "v2", "v2.whole", "v3")


def test_a_trainer_lost_over_a_write_leaves_it_to_the_next(rig, tmp_path):
    publisher, trainer, _ = rig
    publish(publisher, trainer, 1)
    trainer.dead = True
    publisher.down(trainer)
    publish(publisher, trainer, 2)
    again = Gang("trainer", publisher.stored, epoch=2)
    publisher.stored.drop(1)
    publisher.up(again)
    publish(publisher, again, *publisher.nowhere_else())
    again.written(), again.written()
    assert again.writes() == [1, 2]
    leaves(tmp_path, "v1", "v1.whole", "v2", "v2.whole")


def test_a_replica_goes_on_where_the_trainer_dies_over_its_first_version(rig):
    publisher, trainer, replica = rig
    loaded = []
    publish(publisher, trainer, 1)
    publisher.want(replica, 1, lambda: loaded.append(1))
    assert isinstance(trainer.received[-1], ex.Offer) and trainer.received[-1].wanted == replica.wanted
    publisher.down(trainer)
    assert isinstance(replica.received[-1], ex.Abort) and "trainer is gone" in replica.received[-1].reason
    publisher.drop(7)  # anything may come meanwhile
    assert replica.reason is None
    again = Gang("trainer", publisher.stored, epoch=2)
    publisher.up(again)
    publish(publisher, again, 1)
    again.written()
    assert isinstance(again.received[-1], ex.Offer)
    publisher.down(again)
    key = replica.received[-1].key
    assert isinstance(replica.received[-1], ex.Read), "storage has it by now"
    publisher.tell(ex.Staged(key=key, host=0, sums=()))
    publisher.tell(ex.Committed(key=key, host=0))
    assert loaded == [1]


def test_a_version_that_nobody_will_ever_bring_ends_the_gang_that_needs_it(rig):
    publisher, trainer, replica = rig
    publisher.want(replica, 3, lambda: None)
    eventually(lambda: replica.reason)
    assert replica.reason == "version 3 cannot be brought to it: no process holds version 3"
    assert not any(isinstance(what, messages.DropWeights) for what in trainer.received)


@pytest.mark.parametrize("found", [False, True])
def test_what_an_instance_staged_must_have_the_digest_that_the_trainer_or_the_journal_gave(rig, found):
    publisher, trainer, replica = rig
    if found:  # in storage, by an earlier controller
        publisher.stored.seal(1)
        publisher.begin(1, digest=5)
    else:
        publisher.begin(1)
        publisher.kept(trainer, 1, digest=5)
    assert publisher.digests[1] == 5
    publisher.want(replica, 1, lambda: pytest.fail("it was taken into use"))
    key = (replica if found else trainer).received[-1].key
    if not found:
        publisher.tell(ex.Offered(key=key, host=0, manifests=((),)))
    publisher.tell(ex.Staged(key=key, host=0, sums=()))
    (abort,) = [what for what in replica.received if isinstance(what, ex.Abort)]
    assert (
        "the digest of what arrived is 0000000000000000, and the version was published with 0000000000000005"
        in abort.reason
    )
    publisher.drop(1)
    assert 1 not in publisher.digests
