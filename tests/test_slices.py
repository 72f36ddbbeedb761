"""Which part of a version each process gives, and which slices each receiver gets of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from dora_jax import config as configs
from dora_jax.models import decoder, sharding
from dora_jax.models.families import new_config
from dora_jax.publish import sliced
from dora_jax.runtime.assembly import run
from dora_jax.runtime.transfer import slices, weight_receiver
from dora_jax.runtime.transfer.transfer_manifest import turns
from tests.fakes import trainer_cases as cases

GIB = 2**30
QWEN3_8B = new_config(
    "qwen3",
    vocab_size=151936,
    d_model=4096,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    d_ff=12288,
    tie_embeddings=False,
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a slice that is not here."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "none"
    client: None = None


def mesh_of(hosts, chips, *axes):
    return sharding.make_mesh([Chip(i, i // chips) for i in range(hosts * chips)], *axes)


def masters(model, mesh, dtype):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), run.publishing_inputs(model, mesh)
    )


def copy_bytes(cfg, mesh, dtype):
    """Bytes of an offered copy on one device of the trainer. `mesh`: the size of each axis, 1 where it is absent."""

    def size(leaf, axes):
        return math.prod(leaf.shape) // math.prod(
            mesh.get(name, 1) for axis in axes for name in jax.tree.leaves(sharding.TABLE[axis])
        )

    leaves = jax.tree.map(size, decoder.abstract_params(cfg), decoder.logical_axes(cfg))
    return sum(jax.tree.leaves(leaves)) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize("axes", [(1, 64, 1), (1, 16, 4), (4, 16, 1)])
def test_all_hosts_give_as_much_and_each_box_is_given_once(axes):
    given = slices.writers(masters(QWEN3_8B, mesh_of(16, 4, *axes), jnp.bfloat16))
    total = sum(x.size for x in jax.tree.leaves(decoder.abstract_params(QWEN3_8B))) * 2
    assert sorted(given) == list(range(16)) and sum(given.values()) == total
    assert max(given.values()) < 1.001 * total / 16


def test_a_device_of_64_holds_a_64th_of_8b():
    held = copy_bytes(QWEN3_8B, {"data": 1, "fsdp": 64, "context": 1, "tensor": 1}, "bfloat16")
    assert 0.23 * GIB < held < 0.3 * GIB


@given(st.lists(st.tuples(st.integers(1, 1000), st.sets(st.integers(0, 7), min_size=1)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_process_gives_what_it_holds_and_little_more_than_the_others(boxes):
    sizes, holders = [size for size, _ in boxes], [held for _, held in boxes]
    takers = turns(sizes, holders)
    assert all(taker in held for taker, held in zip(takers, holders, strict=True))
    load = {p: sum(s for s, t in zip(sizes, takers, strict=True) if t == p) for p in range(8)}
    for size, held, taker in zip(sizes, holders, takers, strict=True):
        if len(held) == 8:  # a box that every process holds goes to one that gives little
            assert load[taker] <= min(load.values()) + max(sizes)


@pytest.mark.parametrize("axes", [(1, 8, 1), (2, 2, 2), (8, 1, 1)])
def test_the_copy_holds_what_is_counted_and_sends_nothing(axes):
    mesh = sharding.make_mesh(jax.devices(), *axes)
    config = dataclasses.replace(configs.Config(), model=dataclasses.replace(configs.Config().model, dtype="bfloat16"))
    copy = run.publishing_copy(config, cases.MODEL, mesh)
    compiled = copy.lower(run.publishing_inputs(cases.MODEL, mesh)).compile()
    shape = dict(zip(("data", "fsdp", "tensor"), axes, strict=True), context=1)
    assert compiled.memory_analysis().output_size_in_bytes - copy_bytes(cases.MODEL, shape, "bfloat16") in range(1024)
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective"))


def like(model, mesh):
    return weight_receiver.like(
        model, sharding.param_specs(model, mesh, "serving"), decoder.abstract_params(model, jnp.bfloat16)
    )


def test_a_replica_on_one_host_wants_each_tensor_in_one_piece():
    wanted = slices.wanted(like(QWEN3_8B, mesh_of(1, 4, 1, 1, 4)))
    assert len(wanted) == len({shard.path for shard in wanted}) and all(shard.stop == shard.shape for shard in wanted)


def test_a_host_of_two_wants_the_slices_of_its_devices_and_gives_half_of_what_both_have():
    two = like(QWEN3_8B, mesh_of(2, 4, 1, 1, 8))
    wanted = {shard.path: shard for shard in slices.wanted(two)}
    gate = wanted["layers/gate_proj"]
    assert (gate.start, gate.stop) == ((0, 0, 0), (36, 4096, 6144)) and gate.shape == (36, 4096, 12288)
    assert wanted["final_norm"].stop == (4096,)
    got = {
        shard: np.broadcast_to(jnp.bfloat16(0), [b - a for a, b in zip(shard.start, shard.stop, strict=True)])
        for shard in wanted.values()
    }
    kept = slices.received(two, got)
    assert kept["layers"]["gate_proj"].given == {(gate.start, gate.stop)}
    shared = [leaf for leaf in jax.tree.leaves(kept) if list(leaf.boxes) == [((0,) * len(leaf.shape), leaf.shape)]]
    assert 0 < sum(bool(leaf.given) for leaf in shared) < len(shared)


def test_devices_whose_slices_lie_apart_want_them_one_by_one():
    chips = [Chip(i, i % 2) for i in range(4)]  # every other slice is the other host's
    where = jax.sharding.NamedSharding(sharding.make_mesh(chips, 1, 1, 4), P("tensor"))
    wanted = slices.wanted({"x": jax.ShapeDtypeStruct((8, 2), np.float32, sharding=where)})
    assert [(shard.start, shard.stop) for shard in wanted] == [((0, 0), (2, 2)), ((4, 0), (6, 2))]


def test_a_slice_is_put_together_from_the_boxes_that_are_here():
    x = np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6)
    where = jax.sharding.NamedSharding(sharding.make_mesh(jax.devices()[:4], 1, 2, 2), P(None, "fsdp", "tensor"))
    leaf = sliced({"x": jax.device_put(x, where)})["x"]
    assert leaf.part == (2, 2, 3) and len(leaf.boxes) == 4
    np.testing.assert_array_equal(leaf.at(((0, 1, 0), (2, 3, 6))), x[:, 1:3])
    np.testing.assert_array_equal(leaf[1].at(((0, 2), (4, 5))), x[1, :, 2:5])
    half = dataclasses.replace(leaf, boxes={box: a for box, a in leaf.boxes.items() if box[0][1] == 0})
    np.testing.assert_array_equal(half[0].at(((0, 0), (2, 6))), x[0, :2])
    with pytest.raises(ValueError, match=r"of an array \(4, 6\) is not here"):
        half[0].at(((0, 0), (3, 6)))
