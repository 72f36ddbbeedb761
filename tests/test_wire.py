"""The wire: exactly what was expected arrives, bit for bit; whatever else may happen is a sentence before the deadline.

Each row of what the transfer library does when two sides disagree has its test here: it would hang, abort the process
or deliver other numbers.
"""

import dataclasses
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.runtime.codec import CodecError
from dora_jax.runtime import slices
from dora_jax.runtime.shards import CODEC, Key, Manifest, Shard, WireError, check, deadline_s
from dora_jax.runtime.wire import Wire, shards_of
from tests import wire_peer

P = jax.sharding.PartitionSpec
NUMBERS = iter(range(1, 1 << 30))


@pytest.fixture(scope="module")
def ends():
    return Wire(), Wire()


def mesh(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, ("a", "b")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def placed(x, *spec, on=(2, 2)):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh(*on), P(*spec)))


def key(version=3, receiver="rollout0/0", epoch=1):
    return Key(epoch=epoch, version=version, receiver=receiver, sequence=next(NUMBERS))


def like(tree, shardings=None):
    if shardings is None:
        return wire_peer.like(tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def bits(x):
    return np.asarray(x).tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.fixture(scope="module")
def works(ends):
    """After whatever a test did to it, the wire still carries an offer."""
    def check():
        sender, receiver = ends
        x, k = {"x": placed(np.arange(8.0), on=(1,))}, key(receiver="again")
        assert_same(receiver.pull(sender.offer(k, x), like(x), k, 10), x)
        sender.release(k)

    return check


# ------------------------------------------------------- what arrives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int32", "bool", "float8_e4m3fn", "uint8"])
def test_every_dtype_and_shape_arrives_bit_for_bit(ends, dtype):
    sender, receiver = ends
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (6, 5, 4))
    tree = {"cube": jnp.array(x, dtype), "scalar": jnp.array(1, dtype), "turned": jnp.array(x, dtype).T}
    k = key()
    assert_same(receiver.pull(sender.offer(k, tree), like(tree), k, 20), tree)
    sender.release(k)


def test_not_a_number_and_the_sign_of_zero_arrive(ends):
    sender, receiver = ends
    tree = [jnp.array([np.nan, -0.0, np.inf, -np.nan, 1e-40], d) for d in (np.float32, jnp.bfloat16)]
    k = key()
    assert_same(receiver.pull(sender.offer(k, tree), like(tree), k, 20), tree)


def cut(tree, want):
    return slices.pieces(slices.offered(tree), shards_of(want))


def test_the_receivers_layout_is_cut_out_of_the_senders(ends):
    sender, receiver = ends
    tree = {"layers": [{"q": placed(np.arange(64.0).reshape(8, 8), "a")}, {"q": placed(np.eye(8))}]}
    target = jax.sharding.NamedSharding(mesh(2, 2), P("a", "b"))
    want = like(tree, {"layers": [{"q": target}, {"q": jax.sharding.NamedSharding(mesh(4), P(None, "a"))}]})
    k = key()
    manifest = sender.give(k, cut(tree, want))
    got = receiver.pull(CODEC.decode(CODEC.encode(manifest)), want, k, 20)
    assert_same(got, tree)
    assert got["layers"][0]["q"].sharding == target and len(manifest.shards) == 8


def test_a_shard_that_lies_nowhere_in_one_piece_is_put_together(ends):
    sender, receiver = ends
    tree = {"x": placed(np.arange(64, dtype=np.float32).reshape(8, 8), "a")}
    want = like(tree, {"x": jax.sharding.NamedSharding(mesh(2, 2), P(None, "a"))})
    for take in (receiver.pull, lambda m, want, k, s: receiver.take(m, shards_of(want), k, s)):
        k = key()
        manifest = sender.give(k, cut(tree, want))
        assert [shard.bytes for shard in manifest.shards] == [64] * 4
        got = take(manifest, want, k, 20)
        if "x" in got:
            assert_same(got, tree)
        else:
            assert [x.tolist() for x in got.values()] == [np.asarray(tree["x"])[:, half].tolist()
                                                          for half in (np.s_[0:4], np.s_[4:8])]
    k = key()
    part = dataclasses.replace(manifest, key=k, shards=manifest.shards[:3])
    with pytest.raises(WireError, match=r"x\[0:4, 0:4\].* among 3 pieces where x\[0:8, 4:8\] .* is expected"):
        receiver.take(part, shards_of(want), k, 20)


def test_what_several_devices_hold_travels_once(ends):
    sender, receiver = ends
    tree = {"x": placed(np.arange(8.0))}
    k = key()
    manifest = sender.offer(k, tree)
    assert [shard.bytes for shard in manifest.shards] == [32]
    got = receiver.pull(manifest, like(tree), k, 20)["x"]
    assert len(got.addressable_shards) == 4 and all(bits(s.data) == bits(tree["x"]) for s in got.addressable_shards)


@pytest.mark.parametrize(("change", "message"), [
    (dict(path="y"), "nothing of that name"), (dict(shape=(4, 4)), r"it is float32\[8, 8\] here"),
    (dict(dtype="bfloat16"), r"it is float32\[8, 8\] here"), (dict(start=(0, 9)), "no part of it"),
    (dict(stop=(8,)), "no part of it"), (dict(bytes=4), "no part of it"),
    (dict(stop=(8, 9), bytes=288), "no part of it")])
def test_what_the_sender_does_not_have_is_not_offered(change, message):
    tree = {"x": placed(np.zeros((8, 8), np.float32), on=(1,))}
    shard = shards_of(tree)[0]
    with pytest.raises(WireError, match=message):
        slices.pieces(slices.offered(tree), [dataclasses.replace(shard, **change)])


# ------------------------------------- what is refused before it is pulled


TREE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "z": np.zeros(5, np.float32)}


def offered(sender, tree=None, **changes):
    tree = jax.tree.map(jnp.asarray, TREE if tree is None else tree)
    k = key()
    return tree, k, dataclasses.replace(sender.offer(k, tree), **changes)


@pytest.mark.parametrize(("mine", "message"), [
    (dict(w=jnp.zeros((3, 4), jnp.bfloat16)), r"w\[0:3, 0:4\] of float32\[3, 4\] with 48 bytes is offered where "
                                              r"w\[0:3, 0:4\] of bfloat16\[3, 4\] with 24 bytes is expected"),
    (dict(w=jnp.zeros((3, 4), jnp.int32)), r"of int32\[3, 4\] with 48 bytes is expected"),  # the same bytes
    (dict(w=jnp.zeros((4, 3), jnp.float32)), r"w\[0:4, 0:3\] of float32\[4, 3\] with 48 bytes is expected"),
    (dict(w=jnp.zeros((2, 4), jnp.float32)), "with 32 bytes is expected"),  # smaller: it would wedge the sender
    (dict(w=jnp.zeros((6, 4), jnp.float32)), "with 96 bytes is expected"),
    (dict(w=None), r"w\[0:3, 0:4\] of float32\[3, 4\] is offered and was not asked for"),  # a subset
    (dict(v=jnp.zeros(2, jnp.float32)), "no v is offered where v"),
    (dict(v=jnp.zeros(0, jnp.float32)), "v has no elements"),
])
def test_another_dtype_shape_or_tree_is_refused(ends, works, mine, message):
    tree, k, manifest = offered(ends[0])
    expected = {name: x for name, x in {**tree, **mine}.items() if x is not None}
    with pytest.raises(WireError, match=message):  # and not that it has not come
        ends[1].pull(manifest, like(expected), k, 5)
    assert_same(ends[1].pull(manifest, like(tree), k, 10), tree)  # nothing was pulled
    works()


def test_another_layout_is_refused(ends, works):
    tree = {"x": placed(np.zeros((8, 8), np.float32), "a")}
    other = like(tree, {"x": jax.sharding.NamedSharding(mesh(2, 2), P("b", "a"))})
    k = key()
    with pytest.raises(WireError, match=r"x\[0:4, 0:8\].* with 128 bytes is offered .*where x\[0:4, 0:4\].* 64 bytes"):
        ends[1].pull(ends[0].offer(k, tree), other, k, 5)
    works()


@pytest.mark.parametrize("change", [dict(epoch=2), dict(version=4), dict(receiver="rollout1/0"), dict(sequence=0)])
def test_another_epoch_version_receiver_or_transfer_is_refused(ends, change):
    tree, k, manifest = offered(ends[0])
    with pytest.raises(WireError, match=r"version 3 for rollout0/0 \(epoch 1, transfer \d+\) is offered where"):
        ends[1].pull(manifest, like(tree), dataclasses.replace(k, **change), 5)


@pytest.mark.parametrize(("change", "message"), [
    (dict(transports=3), "uses 3 transports, not 4"), (dict(number=0), "cannot be"), (dict(number=1 << 63), "cannot"),
    (dict(address="nowhere"), "'nowhere' is no address"), (dict(address="127.0.0.1:99999"), "is no address")])
def test_a_manifest_that_would_abort_or_lead_nowhere_is_refused(ends, works, change, message):
    tree, k, manifest = offered(ends[0], **change)
    with pytest.raises(WireError, match=message):
        ends[1].pull(manifest, like(tree), k, 5)
    works()


def test_a_shard_offered_by_two_processes_is_refused(ends):
    tree, k, manifest = offered(ends[0])
    with pytest.raises(WireError, match=r"w\[0:3, 0:4\] of float32\[3, 4\] is offered twice"):
        ends[1].pull([manifest, manifest], like(tree), k, 5)


def test_the_shards_of_several_processes_are_one_tree(ends):
    """As two hosts of one world offer them: a half each."""
    tree = {name: jnp.asarray(x) for name, x in TREE.items()}
    k, halves = key(), []
    for name, sender in zip(tree, (ends[0], Wire()), strict=True):
        halves.append(sender.offer(k, {name: tree[name]}))
    assert_same(ends[1].pull(halves, like(tree), k, 10), tree)
    with pytest.raises(WireError, match="no z is offered"):
        ends[1].pull(halves[:1], like(tree), k, 10)


def test_leaves_without_elements_are_not_offered(ends, works):
    with pytest.raises(WireError, match="y has no elements: it cannot be sent, and both sides can make it"):
        ends[0].offer(key(), {"x": jnp.zeros(3), "y": jnp.zeros((0, 4))})
    works()


def test_a_transfer_is_offered_once(ends, works):
    tree, k, _ = offered(ends[0])
    for again in (k, dataclasses.replace(k, sequence=k.sequence - 1), dataclasses.replace(k, version=4)):
        with pytest.raises(WireError, match=f"transfer {again.sequence}.* not offered again: the last .* {k.sequence}"):
            ends[0].offer(again, tree)
    ends[0].release(k)
    ends[0].release(k)
    overtaken = key()
    ends[0].release(overtaken)  # before it was offered
    for late in (k, overtaken):
        with pytest.raises(WireError, match="is not offered again"):
            ends[0].offer(late, tree)
    works()


# ---------------------------------------------------- what ends in time


def test_what_is_not_offered_any_more_ends_at_the_deadline(ends, works):
    tree, k, manifest = offered(ends[0])
    assert_same(ends[1].pull(manifest, like(tree), k, 10), tree)
    began = time.monotonic()
    with pytest.raises(WireError, match="has not come within 0.5 s"):  # offers are one-shot
        ends[1].pull(manifest, like(tree), k, 0.5)
    assert 0.4 < time.monotonic() - began < 20
    with pytest.raises(WireError, match="has not come within 0.5 s"):  # a number that never was
        ends[1].pull(dataclasses.replace(manifest, number=12345), like(tree), k, 0.5)
    works()


def test_nobody_at_the_address(ends, works):
    tree, k, manifest = offered(ends[0], address="127.0.0.1:1")
    with pytest.raises(WireError, match="from 127.0.0.1:1 has not come within 0.5 s|failed"):
        ends[1].pull(manifest, like(tree), k, 0.5)
    works()


def test_an_offer_whose_arrays_are_gone_is_an_error(ends, works):
    tree, k, manifest = offered(ends[0])
    tree["w"].delete()
    with pytest.raises(WireError, match="failed: .*deleted"):
        ends[1].pull(manifest, like(jax.tree.map(jnp.asarray, TREE)), k, 10)
    works()


def test_what_was_cut_for_an_offer_that_nobody_pulls_is_freed(ends):
    x = {"x": placed(np.zeros((8, 8), np.float32), on=(1,))}
    want = like(x, {"x": jax.sharding.NamedSharding(mesh(2), P("a"))})
    k = key()
    ends[0].give(k, cut(x, want))
    pieces, _ = ends[0]._offered[k]
    ends[0].release(k, pulled=False)
    assert pieces and all(array.is_deleted() for array in pieces) and not x["x"].is_deleted()


def test_pulls_of_several_threads_do_not_disturb_each_other(ends):
    got = {}

    def pull(number):
        tree = {"x": placed(np.full(1 << 16, number, np.float32), on=(1,))}
        k = key(receiver=f"thread{number}")
        got[number] = ends[1].pull(ends[0].offer(k, tree), like(tree), k, 20)["x"]

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: (float(x[0]), float(x[-1])) for number, x in got.items()} == {n: (n, n) for n in range(8)}


def test_deadlines_grow_with_the_bytes():
    assert deadline_s(0) == 30 and deadline_s(1 << 30) == pytest.approx(35)


# --------------------------------------------------------- the manifest


def example():
    shard = Shard(path="layers/0/q", shape=(8, 4), dtype="bfloat16", start=(0, 2), stop=(8, 4), bytes=32)
    return Manifest(key=key(), address="127.0.0.1:1234", transports=4, number=17,
                    shards=(shard, dataclasses.replace(shard, path="scalar", shape=(), start=(), stop=(), bytes=2)))


def test_fuzzed_manifests_are_refused_with_a_sentence():
    """1,000 of them: not a manifest, or not what is expected; what still passes is the very same offer."""
    good = example()
    data, draw, undecoded, unexpected = CODEC.encode(good), random.Random(0), 0, 0
    for number in range(1000):
        wrong = bytearray(data)
        if number % 3 == 0:
            del wrong[draw.randrange(len(wrong)):]
        else:
            for _ in range(draw.randrange(1, 1 + number % 5 * 3 + 1)):
                wrong[draw.randrange(len(wrong))] = draw.randrange(256)
        try:
            manifest = CODEC.decode(bytes(wrong))
            if not isinstance(manifest, Manifest):
                raise CodecError(f"a {type(manifest).__name__} is no manifest")
            check([manifest], good.shards, good.key)
        except CodecError as error:
            undecoded += 1
            assert len(str(error)) > 10
        except WireError as error:
            unexpected += 1
            assert len(str(error)) > 10
        else:
            assert dataclasses.replace(manifest, address=good.address, number=good.number) == good
    assert undecoded > 300 and unexpected > 50
