"""The fingerprint of weights: the same bits give the same number anywhere, any other bit another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.base.digest import digest, digest_json
from dora_jax.models import sharding


def tree():
    draw = np.random.default_rng(0)
    return {
        "a": draw.normal(size=(8, 6)).astype(np.float32),
        "b": draw.normal(size=5).astype(np.float32),
        "half": jnp.asarray(draw.normal(size=(4, 2)), jnp.bfloat16),
    }


def test_no_mesh_changes_it():
    want = digest(tree())
    for n in (2, 4):
        mesh = sharding.make_mesh(jax.devices()[:n], 1, n, 1)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        placed = {**tree(), "a": jax.device_put(tree()["a"], rows)}
        assert digest(placed) == want


def test_every_flipped_bit_changes_it():
    want, draw = digest(tree()), np.random.default_rng(1)
    for _ in range(100):
        bad = tree()
        bits = bad["a"].view(np.uint32)
        bits[draw.integers(8), draw.integers(6)] ^= np.uint32(1) << np.uint32(draw.integers(32))
        assert digest(bad) != want


def test_leaves_of_known_shapes_compile_nothing():
    """An optimizer's moments, of the shapes of the weights, at the first checkpoint: while samples wait."""
    compiled = []
    weights = jax.tree.map(jnp.asarray, tree())
    digest(weights)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    digest({"mu": weights, "nu": weights})
    jax.monitoring.clear_event_listeners()
    assert not compiled


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"a": t["a"][::-1].copy()},
        lambda t: t | {"a": t["a"].T.copy()},
        lambda t: t | {"a": np.roll(t["a"], 1, 1)},
        lambda t: t | {"b": -t["b"]},
        lambda t: t | {"b": t["b"] * 0},
        lambda t: {"a": t["b"], "b": t["a"], "half": t["half"]},
    ],
)
def test_order_and_sign_count(change):
    assert digest(change(tree())) != digest(tree())


def test_what_rests_in_host_memory_has_the_same_digest():
    device = jax.devices()[0]
    resting = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    assert digest(tree() | {"a": jax.device_put(tree()["a"], resting)}) == digest(tree())


def test_counts_switches_and_wide_numbers_have_one_too():
    state = {"count": jnp.int32(3), "on": jnp.array([True, False]), "none": jnp.zeros((0, 3)), "n": 4}
    want = digest(state)
    for other in ({"count": jnp.int32(4)}, {"on": jnp.array([False, True])}, {"n": 5}):
        assert digest(state | other) != want
    with jax.enable_x64(True):
        wide = jnp.arange(5, dtype=jnp.int64)
        assert len({digest([wide]), digest([wide.at[4].add(1 << 40)]), digest([wide.at[4].add(1)])}) == 3


def test_plain_data_keeps_its_digest_through_json():
    value = {"cursors": (1, 2), "rates": {3: 0.1}, "mean": np.float64(0.3)}
    back = {"mean": 0.3, "rates": {"3": 0.1}, "cursors": [1, 2]}
    assert digest_json(value) == digest_json(back) != digest_json(back | {"mean": 0.4})
    assert 0 <= digest_json(value) < 1 << 64
