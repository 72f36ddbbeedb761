"""Versions between worlds: whole or not at all, whatever fails, comes twice or comes late.

Hosts are real (`WeightEndpoint`); the wire under them is real in some tests and counts its offers in the others.
"""

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE, WeightDistribution
from tests.fakes.publication_world import Net

# ---------------------------------------------------------- the machine


def test_every_process_stages_before_any_commits_and_the_source_is_released():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5)
    seen = []
    while net.messages:
        message = net.messages.pop(0)
        seen.append(type(message[3] if isinstance(message, tuple) else message).__name__)
        net.deliver(message)
    assert (
        seen
        == ["Offer"] * 2
        + ["Offered"] * 2
        + ["Pull"] * 2
        + ["Staged"] * 2
        + ["Commit"] * 2
        + ["Release"] * 2
        + ["Committed"] * 2
    )
    assert net.outcomes == [ex.Loaded(world="r0", version=5)]
    assert net.offers() == [] and not net.brain.busy


def test_one_replica_that_fails_keeps_what_it_had_and_the_others_go_on():
    net = Net(replicas=2)
    net.publish(4)
    net.want("r0", 4), net.want("r1", 4), net.run()
    net.publish(5)
    net.worlds["r0"].wires[1].failing = True  # one process of two
    net.want("r0", 5), net.want("r1", 5), net.run()
    refused, loaded = net.outcomes[2:]
    assert loaded == ex.Loaded(world="r1", version=5)
    assert refused.world == "r0" and refused.reason.startswith("from trainer: process 1: the peer is gone")
    assert all(host.weights.versions == (4,) and host.staged is None for host in net.worlds["r0"].hosts)
    assert all(host.weights.versions == (4, 5) for host in net.worlds["r1"].hosts)
    assert net.offers() == []
    net.worlds["r0"].wires[1].failing = False
    net.want("r0", 5), net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r0", version=5)


def test_the_third_replica_is_served_by_one_that_has_it():
    net = Net(replicas=4)
    net.publish(5)
    for i in range(4):
        net.want(f"r{i}", 5)
    sources = []
    while net.messages:
        message = net.messages.pop(0)
        if isinstance(message, tuple) and isinstance(message[3], ex.Offer) and message[2] == 0:
            sources.append((message[3].world, message[3].key.receiver))
        net.deliver(message)
    assert sources == [("trainer", "r0"), ("trainer", "r1"), ("r0", "r2"), ("r0", "r3")]
    assert len(net.outcomes) == 4 and net.offers() == []


def test_a_late_joiner_is_served_by_a_replica_when_the_trainer_is_gone():
    net = Net(replicas=2)
    net.publish(5)
    net.want("r0", 5), net.run()
    net.kill("trainer", rebuild=False)
    net.want("r1", 5), net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r1", version=5)
    net.start("r2", 1)
    net.tell(ex.Dropped(world="r0", version=5)), net.tell(ex.Dropped(world="r1", version=5))
    net.want("r2", 5), net.run()
    assert net.outcomes[-1] == ex.NotLoaded(world="r2", version=5, reason="no process holds version 5")


def test_storage_is_a_path_only_where_it_was_chosen():
    for paths, loaded in (((WIRE,), False), ((WIRE, STORAGE), True), ((STORAGE,), True)):
        net = Net(replicas=1, paths=paths)
        net.publish(5, store=True)
        for wire in net.worlds["r0"].wires:
            wire.failing = True
        net.want("r0", 5), net.run()
        assert isinstance(net.outcomes[-1], ex.Loaded if loaded else ex.NotLoaded), paths
    with pytest.raises(ValueError, match=r"by wire, by storage or by both, not by \('pigeon',\)"):
        WeightDistribution(("pigeon",))


@pytest.mark.parametrize("paths", [(WIRE,), (WIRE, STORAGE)])
def test_a_version_that_is_due_is_waited_for_while_its_trainer_is_lost(paths):
    net = Net(replicas=2, paths=paths)
    net.tell(ex.VersionDue(version=5, due=True))
    net.publish(5)
    net.want("r0", 5)
    while not net.commands(ex.Pull):
        net.deliver(net.messages.pop(0))
    net.kill("trainer")
    net.want("r1", 5), net.run()
    assert net.outcomes == [] and net.brain.busy
    net.publish(5), net.run()
    assert [type(o) for o in net.outcomes] == [ex.Loaded] * 2


def test_what_is_due_no_more_and_what_everybody_failed_to_bring_is_given_up():
    net = Net(replicas=1)
    net.tell(ex.VersionDue(version=5, due=True))
    net.want("r0", 5), net.run()
    assert net.outcomes == []
    net.tell(ex.VersionDue(version=5, due=False))
    assert isinstance(net.outcomes[-1], ex.NotLoaded)
    net.tell(ex.VersionDue(version=6, due=True))
    net.publish(6)
    for wire in net.worlds["r0"].wires:
        wire.failing = True
    net.want("r0", 6), net.run()
    assert net.outcomes[-1].version == 6 and "the peer is gone" in net.outcomes[-1].reason


def test_storage_is_waited_for_where_the_wire_fails_and_it_is_still_being_written():
    net = Net(replicas=1, paths=(WIRE, STORAGE))
    net.tell(ex.VersionDue(version=5, due=True))
    net.publish(5)
    for wire in net.worlds["r0"].wires:
        wire.failing = True
    net.want("r0", 5), net.run()
    assert net.outcomes == [] and net.brain.busy
    net.publish(5, store=True), net.run()
    assert net.outcomes == [ex.Loaded(world="r0", version=5)]


def test_storage_serves_a_late_joiner_with_nobody_there():
    net = Net(replicas=1, paths=(WIRE, STORAGE))
    net.publish(5, store=True, wire=False)
    net.kill("trainer", rebuild=False)
    net.want("r0", 5), net.run()
    assert net.outcomes == [ex.Loaded(world="r0", version=5)]
    del net.stored[5]
    net.start("r1", 1)
    net.tell(ex.Dropped(world="r0", version=5))
    net.want("r1", 5), net.run()
    assert "from storage: process 0: version 5 is not there" in net.outcomes[-1].reason


@pytest.mark.parametrize(
    ("phase", "late"),
    [(ex.Offer, "process 1 of trainer is late with Offered"), (ex.Pull, "process 1 of r0 is late with Staged")],
)
def test_whoever_is_late_is_named_and_the_rest_is_undone(phase, late):
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5)
    while not net.commands(phase):
        net.deliver(net.messages.pop(0))
    net.messages = [m for m in net.messages if m[2] == 0]  # process 1 hears nothing
    net.run()
    net.tell(TimePassed(now_s=1000.0))
    net.run()
    assert net.outcomes == [ex.NotLoaded(world="r0", version=5, reason=f"from trainer: {late}")]
    assert net.offers() == [] and all(host.staged is None for host in net.worlds["r0"].hosts)
    net.want("r0", 5), net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r0", version=5)


def test_a_replica_of_which_a_part_may_have_committed_must_be_built_again():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5)
    while not net.commands(ex.Commit):
        net.deliver(net.messages.pop(0))
    net.messages = [m for m in net.messages if m[2] == 0]
    net.run()
    net.tell(TimePassed(now_s=1000.0))
    broken = net.outcomes[-1]
    assert isinstance(broken, ex.Broken) and (broken.world, broken.epoch) == ("r0", 1)
    net.kill("r0")
    net.want("r0", 5), net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r0", version=5)


def test_answers_of_another_epoch_or_transfer_change_nothing():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5)
    key = net.messages[0][3].key
    for wrong in (dict(epoch=2), dict(sequence=7), dict(version=4), dict(receiver="r9")):
        other = dataclasses.replace(key, **wrong)
        for fact in (
            ex.Staged(key=other, host=0, sums=()),
            ex.Committed(key=other, host=0),
            ex.TransferFailed(key=other, host=0, reason="x"),
        ):
            assert net.brain.step(fact) == ()
    assert net.brain.step(ex.Committed(key=key, host=0)) == ()  # of a phase that has not come
    assert (
        net.brain.step(ex.WorldDown(world="r0", epoch=9)) == ()
        and net.brain.step(ex.Holds(world="r0", epoch=9, version=5)) == ()
    )
    net.run()
    assert net.brain.step(net.worlds["r0"].up()) == ()  # sent twice: it stays what it was
    net.want("r0", 5)
    assert net.outcomes == [ex.Loaded(world="r0", version=5)] * 2 and not net.messages


def test_what_is_there_already_is_loaded_at_once_and_what_nobody_knows_is_refused():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5), net.run(), net.want("r0", 5)
    assert net.outcomes == [ex.Loaded(world="r0", version=5)] * 2 and not net.messages
    net.want("r0", 6), net.want("nobody", 5)
    assert [o.reason for o in net.outcomes[2:]] == ["no process holds version 6", "nobody is not up"]


def test_a_source_that_dies_is_replaced_by_another():
    net = Net(replicas=3)
    net.publish(5)
    net.want("r0", 5), net.run()
    net.want("r1", 5)
    while not net.commands(ex.Pull):
        net.deliver(net.messages.pop(0))
    assert net.brain.transfers["r1"][0] == "r0"
    net.kill("r0")
    assert net.brain.transfers["r1"][0] == "trainer"
    net.run()
    assert net.outcomes[-1] == ex.Loaded(world="r1", version=5) and net.offers() == []


def scenario(seed, steps):
    """Anything may happen for a while; then everything that is left is carried, and what was wanted is there."""
    draw = random.Random(seed)
    net = Net(replicas=3, paths=draw.choice([(WIRE,), (WIRE, STORAGE)]), fanout=draw.choice([1, 2]))
    version, now_s = 0, 0.0
    net.publish(version)
    for _ in range(steps):
        dice = draw.random()
        name = f"r{draw.randrange(3)}"
        if dice < 0.60 and net.messages:
            net.deliver(net.messages.pop(draw.randrange(len(net.messages))))
        elif dice < 0.75 and net.messages:
            net.deliver(draw.choice(net.messages))  # it will come again
        elif dice < 0.78 and net.messages:
            lost = draw.randrange(len(net.messages))
            if not (isinstance(net.messages[lost], tuple) and isinstance(net.messages[lost][3], ex.Release)):
                net.messages.pop(lost)
        elif dice < 0.88:
            net.want(name, draw.randrange(version + 1))
        elif dice < 0.91:
            version += 1
            net.publish(version, store=draw.random() < 0.5)
        elif dice < 0.93:
            now_s += draw.choice([1.0, 40.0])
            net.tell(TimePassed(now_s=now_s))
        elif dice < 0.95:
            wire = draw.choice(net.worlds[name].wires)
            wire.failing = not wire.failing
        elif dice < 0.96:
            net.kill(draw.choice([name, name, "trainer"]))
        for broken in [o for o in net.outcomes if isinstance(o, ex.Broken)]:
            if net.worlds[broken.world].epoch == broken.epoch:
                net.kill(broken.world)
    settle(net, now_s)


def settle(net, now_s):
    for world in net.worlds.values():
        for wire in world.wires:
            wire.failing = False
    for _ in range(20):
        net.run()
        now_s += 100.0
        net.tell(TimePassed(now_s=now_s))
        for broken in [o for o in net.outcomes if isinstance(o, ex.Broken)]:
            if net.worlds[broken.world].epoch == broken.epoch:
                net.kill(broken.world)
    assert not net.messages and not net.brain.busy
    assert net.offers() == [], "an offer was never released"
    newest = 1000
    net.publish(newest)
    for name in ("r0", "r1", "r2"):
        net.want(name, newest)
    net.run()
    assert net.outcomes[-3:] != [] and {o.world for o in net.outcomes[-3:] if isinstance(o, ex.Loaded)} == {
        "r0",
        "r1",
        "r2",
    }


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.integers(0, 1 << 30), st.integers(0, 250))
def test_no_order_repetition_loss_or_death_gives_half_an_update(seed, steps):
    scenario(seed, steps)
