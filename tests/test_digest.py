"""The fingerprint of weights: the same bits give the same number anywhere, any other bit another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.digest import digest
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
