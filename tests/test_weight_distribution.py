"""Versions between worlds: whole or not at all, whatever fails, comes twice or comes late.

Hosts are real (`WeightEndpoint`); the wire under them is real in some tests and counts its offers in the others.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_jax.models import decoder, sharding
from dora_jax.orchestrate.events import TimePassed
from dora_jax.publish import HostWeights, offered_copy
from dora_jax.runtime.transfer import slices, weight_receiver
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE, WeightDistribution
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from tests.fakes import trainer_cases as cases
from tests.fakes.publication_world import LIKE, ONE, Net
from tests.fakes.wire_peer import new_wire

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
        == ["Propose"] * 2
        + ["Accepted"] * 2
        + ["Offer"] * 2
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
    assert net.outcomes[-1] == ex.NotLoaded(world="r2", version=5, reason="nobody holds version 5")


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
    [
        (ex.Propose, "process 1 of r0 is late with Accepted"),
        (ex.Offer, "process 1 of trainer is late with Offered"),
        (ex.Pull, "process 1 of r0 is late with Staged"),
    ],
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
            ex.Staged(key=other, host=0),
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
    assert net.brain.step(net.worlds["r0"].up()) == ()  # said twice: it stays what it was
    net.want("r0", 5)
    assert net.outcomes == [ex.Loaded(world="r0", version=5)] * 2 and not net.messages


def test_what_is_there_already_is_loaded_at_once_and_what_nobody_knows_is_refused():
    net = Net(replicas=1)
    net.publish(5)
    net.want("r0", 5), net.run(), net.want("r0", 5)
    assert net.outcomes == [ex.Loaded(world="r0", version=5)] * 2 and not net.messages
    net.want("r0", 6), net.want("nobody", 5)
    assert [o.reason for o in net.outcomes[2:]] == ["nobody holds version 6", "nobody is not up"]


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


# ------------------------------------------------- over a real wire


def meshed(devices, tensor):
    return sharding.param_specs(cases.MODEL, sharding.make_mesh(devices, 1, len(devices) // tensor, tensor), "serving")


def carry(brain, worlds, *facts):
    """A controller of its own: every command is executed, every answer told."""
    outcomes, messages = [], list(facts)
    while messages:
        for item in brain.step(messages.pop(0)):
            if isinstance(item, ex.Outcome):
                outcomes.append(item)
            else:
                answers = [host.execute(item) for host in worlds[item.world]]
                messages += [answer for answer in answers if answer is not None]
    return outcomes


def test_trained_weights_reach_replicas_in_their_layout_and_from_each_other():
    devices = jax.devices()
    on = sharding.make_mesh(devices[:2], 1, 2, 1)
    params = jax.device_put(cases.params(), sharding.param_specs(cases.MODEL, on))
    copy = offered_copy("bfloat16", sharding.param_specs(cases.MODEL, on))(params)
    trainer = HostWeights()
    trainer.put(3, slices.offered(copy))
    worlds = {"trainer": [WeightEndpoint(0, new_wire(), trainer)]}
    brain = WeightDistribution()
    facts = [ex.WorldUp(world="trainer", epoch=1, hosts=1, trainer=True), ex.Holds(world="trainer", epoch=1, version=3)]
    shardings = {}
    for i in range(3):
        shardings[f"r{i}"] = meshed(devices[2:4] if i == 0 else devices[4:8], 4 if i else 2)  # four share two KV heads
        like = weight_receiver.like(cases.MODEL, shardings[f"r{i}"], jnp.bfloat16)
        worlds[f"r{i}"] = [WeightEndpoint(0, new_wire(), HostWeights(), like)]
        facts += [ex.WorldUp(world=f"r{i}", epoch=1, hosts=1), ex.Wanted(world=f"r{i}", version=3)]
    outcomes = carry(brain, worlds, *facts)
    assert outcomes == [ex.Loaded(world=f"r{i}", version=3) for i in range(3)]
    served = decoder.serving_layout(copy)
    for name, sharded in shardings.items():
        got = worlds[name][0].weights.get(3, sharded)
        for x, y, s in zip(*map(jax.tree.leaves, (got, served, sharded)), strict=True):
            assert x.dtype == jnp.bfloat16 and x.sharding == s and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_replica_with_another_model_is_refused_and_the_version_stays_whole():
    one = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    store = HostWeights()
    store.put(0, slices.offered(jax.device_put(cases.params(), sharding.param_specs(cases.MODEL, one))))
    smaller = dataclasses.replace(cases.MODEL, n_layers=1)
    like = weight_receiver.like(smaller, sharding.param_specs(smaller, one, "serving"), jnp.bfloat16)
    worlds = {
        "trainer": [WeightEndpoint(0, new_wire(), store)],
        "r0": [WeightEndpoint(0, new_wire(), HostWeights(), like)],
    }
    up = [
        ex.WorldUp(world="trainer", epoch=1, hosts=1),
        ex.Holds(world="trainer", epoch=1, version=0),
        ex.WorldUp(world="r0", epoch=4, hosts=1),
        ex.Wanted(world="r0", version=0),
    ]
    (outcome,) = carry(WeightDistribution(), worlds, *up)
    assert "bfloat16" in outcome.reason and "is wanted, and it is float32" in outcome.reason
    assert worlds["r0"][0].weights.versions == ()


def test_what_a_dead_receiver_never_took_is_let_go():
    x = {"w": jax.device_put(np.ones(4, np.float32), ONE)}
    source = WeightEndpoint(0, wire := new_wire(), HostWeights())
    source.weights.put(1, slices.offered(x))
    key = Key(epoch=1, version=1, receiver="r0", sequence=1)
    assert isinstance(source.execute(ex.Offer(world="t", key=key, wanted=(slices.wanted(x),))), ex.Offered)
    source.execute(ex.Release(world="t", key=key, hosts=1))
    assert wire.offers == ()
    assert np.asarray(source.weights.get(1, None)["w"].at(((0,), (4,)))).tolist() == [1, 1, 1, 1]
    source.weights.drop(1)
    assert source.weights.versions == ()
    late = Key(epoch=1, version=2, receiver="r0", sequence=1)
    late_offer = ex.Offer(world="t", key=late, wanted=(slices.wanted(LIKE),))
    assert source.execute(late_offer) is None  # it is released already
