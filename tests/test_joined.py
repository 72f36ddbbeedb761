"""Projections of one input as one weight: the same products, a device's columns side by side."""

import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models.attention import ADAPTERS, Products
from dora_jax.ops import attention
from dora_jax.rollout import quantize
from tests.fakes.engine_rig import CFG, new_engine, weights

NAMES, WIDTH = quantize.JOINED["gate_up_proj"], 16


def random(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_parts_of_a_joined_product_are_the_products(devices, adapters):
    apart = {name: random(8, WIDTH) * (1 + i) for i, name in enumerate(NAMES)}
    x = random(2, 3, 8)
    beside = {}
    if adapters:
        beside = {ADAPTERS: {"up_proj": {"a": random(8, 2), "b": random(2, WIDTH)}}}
    together = {"gate_up_proj": quantize.joined([apart[name] for name in NAMES], devices)}
    wanted = Products(True).each(apart | beside, x, NAMES, "gate_up_proj")
    found = Products(True, shards=devices).each(together | beside, x, NAMES, "gate_up_proj")
    for part, whole in zip(found, wanted, strict=True):
        assert part.shape == (2, 3, WIDTH)
        np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)
    plain = Products(True).each(apart, x, NAMES, "gate_up_proj")
    assert np.array_equal(plain[1], wanted[1]) is not adapters, "an adapter is of its own part"


def test_a_device_has_its_columns_of_each_part_side_by_side():
    parts = [jnp.arange(4.0)[None], 10 + jnp.arange(2.0)[None]]
    assert quantize.joined(parts, 1).tolist() == [[0, 1, 2, 3, 10, 11]]
    assert quantize.joined(parts, 2).tolist() == [[0, 1, 10, 2, 3, 11]]


def test_a_layer_without_both_stays_as_it_is():
    layers = [{"gate_proj": 1, "up_proj": 2}, {"q_proj": 3}, {"gate_proj": 4}]
    assert quantize.grouped({"layers": layers})["layers"] == [{"gate_up_proj": (1, 2)}, *layers[1:]]


def test_stacked_layers_are_joined_each_for_itself():
    parts = [random(3, 4, 8), random(3, 4, 2)]
    whole = quantize.joined(parts, 2)
    for layer in range(3):
        np.testing.assert_array_equal(whole[layer], quantize.joined([part[layer] for part in parts], 2))


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_engine_whose_kernel_reads_pages_keeps_one_weight_for_what_takes_one_input(monkeypatch, tensor):
    monkeypatch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    monkeypatch.setattr(attention, "check_platform", lambda *args, **latent: None)
    engine = new_engine(attention="tpu", tensor=tensor)
    published = weights(engine)
    layers = engine.calls.stored(published)["layers"]
    assert {"q_proj", "gate_up_proj", "down_proj"} <= layers.keys()
    assert not {"gate_proj", "up_proj"} & layers.keys()
    for name, like in engine.calls.abstract_params["layers"].items():
        assert (layers[name].shape, layers[name].sharding) == (like.shape, like.sharding), name
    half = CFG.d_ff // tensor
    for which, name in enumerate(("gate_proj", "up_proj")):
        found = layers["gate_up_proj"][..., which * half :][..., :half]
        np.testing.assert_array_equal(found, published["layers"][name][..., :half])


def test_a_cpu_keeps_them_apart():
    assert {"q_proj", "gate_proj"} <= new_engine().calls.abstract_params["layers"][0].keys()
