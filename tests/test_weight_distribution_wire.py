"""Weights from a trainer to replicas in their own layouts, over a real wire."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models import decoder, sharding
from dora_jax.publish import HostWeights, offered_copy
from dora_jax.runtime.transfer import slices, weight_receiver
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.runtime.transfer.weight_distribution import WeightDistribution
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
from tests.fakes import trainer_cases as cases
from tests.fakes.publication_world import LIKE, ONE
from tests.fakes.wire_peer import new_wire


def meshed(devices, tensor):
    return sharding.param_specs(cases.MODEL, sharding.make_mesh(devices, 1, len(devices) // tensor, tensor), "serving")


def carry(brain, worlds, *facts):
    """A controller of its own: every command is executed, every answer handed on."""
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
    worlds = {"trainer": [WeightEndpoint(0, new_wire(role="trainer"), trainer)]}
    brain = WeightDistribution()
    up = ex.WorldUp(world="trainer", epoch=1, shards=((),), trainer=True)
    facts = [up, ex.Holds(world="trainer", epoch=1, version=3)]
    shardings = {}
    for i in range(3):
        shardings[f"r{i}"] = meshed(devices[2:4] if i == 0 else devices[4:8], 4 if i else 2)  # four share two KV heads
        like = weight_receiver.like(cases.MODEL, shardings[f"r{i}"], decoder.abstract_params(cases.MODEL, jnp.bfloat16))
        worlds[f"r{i}"] = [WeightEndpoint(0, new_wire(role=f"r{i}"), HostWeights(), like)]
        wanted = (worlds[f"r{i}"][0].wanted,)
        facts += [ex.WorldUp(world=f"r{i}", epoch=1, shards=wanted), ex.Wanted(world=f"r{i}", version=3)]
    outcomes = carry(brain, worlds, *facts)
    assert outcomes == [ex.Loaded(world=f"r{i}", version=3) for i in range(3)]
    served = decoder.serving_layout(copy)
    for name, sharded in shardings.items():
        got = worlds[name][0].weights.get(3, sharded)
        for x, y, s in zip(*map(jax.tree.leaves, (got, served, sharded)), strict=True):
            assert x.dtype == y.dtype and x.sharding == s and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_replica_with_another_model_is_refused_and_the_version_stays_whole():
    one = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    store = HostWeights()
    store.put(0, slices.offered(jax.device_put(cases.params(), sharding.param_specs(cases.MODEL, one))))
    smaller = dataclasses.replace(cases.MODEL, n_layers=1)
    published = decoder.abstract_params(smaller, jnp.bfloat16)
    like = weight_receiver.like(smaller, sharding.param_specs(smaller, one, "serving"), published)
    worlds = {
        "trainer": [WeightEndpoint(0, new_wire(), store)],
        "r0": [WeightEndpoint(0, new_wire(), HostWeights(), like)],
    }
    up = [
        ex.WorldUp(world="trainer", epoch=1, shards=((),)),
        ex.Holds(world="trainer", epoch=1, version=0),
        ex.WorldUp(world="r0", epoch=4, shards=(worlds["r0"][0].wanted,)),
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
    assert wire.offers == {}
    assert np.asarray(source.weights.get(1, None)["w"].at(((0,), (4,)))).tolist() == [1, 1, 1, 1]
    source.weights.drop(1)
    assert source.weights.versions == ()
    late = Key(epoch=1, version=2, receiver="r0", sequence=1)
    late_offer = ex.Offer(world="t", key=late, wanted=(slices.wanted(LIKE),))
    assert source.execute(late_offer) is None  # it is released already
