"""The wire: exactly what was expected arrives, bit for bit; whatever else may happen is a sentence before the deadline,
and what a stranger sends to its port ends the stranger's connection alone."""

import dataclasses
import random
import socket
import struct
import threading
import time

import jax
import ml_dtypes
import numpy as np
import pytest

from dora_jax.runtime.common.codec import CodecError
from dora_jax.runtime.common.listener import dial
from dora_jax.runtime.transfer import device_transfer, slices
from dora_jax.runtime.transfer.transfer_manifest import CODEC, Manifest, Shard, WireError, check, deadline_s
from tests.fakes.members import ANOTHER_RUN, anyone, credential, new_listener
from tests.fakes.wire_peer import NAMED, key, new_wire, takes, whole

P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def ends():
    return new_wire(), new_wire()


def mesh(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, ("a", "b")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def placed(x, *spec, on=(2, 2)):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh(*on), P(*spec)))


def like(tree, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


@pytest.fixture(scope="module")
def works(ends):
    """After whatever a test did to it, the wire still carries an offer."""

    def check():
        sender, receiver = ends
        x, k = {"x": np.arange(8.0)}, key(receiver="rollout0/again")
        takes(receiver, sender.give(k, whole(x)), x, k)
        sender.release(k)

    return check


# ------------------------------------------------------- what arrives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int32", "bool", "float8_e4m3fn", "uint8"])
def test_every_dtype_and_shape_arrives_bit_for_bit(ends, dtype):
    sender, receiver = ends
    x = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (6, 5, 4)).astype(np.dtype(dtype))
    named, k = {"cube": x, "scalar": np.array(1, x.dtype), "turned": x.T}, key()
    takes(receiver, CODEC.decode(CODEC.encode(sender.give(k, whole(named)))), named, k)
    sender.release(k)


def test_not_a_number_and_the_sign_of_zero_arrive(ends):
    sender, receiver = ends
    named = {
        d.__name__: np.array([np.nan, -0.0, np.inf, -np.nan, 1e-40]).astype(d) for d in (np.float32, ml_dtypes.bfloat16)
    }
    k = key()
    takes(receiver, sender.give(k, whole(named)), named, k)


def test_what_is_large_comes_over_several_connections(ends, monkeypatch):
    monkeypatch.setattr(device_transfer, "STREAM_BYTES", 1000)
    sender, receiver = ends
    draw, dialled = np.random.default_rng(0), []
    monkeypatch.setattr(
        device_transfer, "dial", lambda *args, then=device_transfer.dial: (dialled.append(args), then(*args))[1]
    )
    named = {f"{i}": draw.integers(0, 255, size, np.uint8) for i, size in enumerate((1, 1700, 3, 900, 2500))}
    k = key()
    takes(receiver, sender.give(k, whole(named)), named, k)
    assert len(dialled) == device_transfer.STREAMS
    dialled.clear()
    named, k = {"less than two parts": draw.integers(0, 255, 1999, np.uint8)}, key()
    takes(receiver, sender.give(k, whole(named)), named, k)
    assert len(dialled) == 1


def cut(tree, want):
    return slices.pieces(slices.offered(tree), want)


def test_a_shard_that_lies_nowhere_in_one_piece_is_put_together(ends):
    sender, receiver = ends
    tree = {"x": placed(np.arange(64, dtype=np.float32).reshape(8, 8), "a")}
    halves = like(tree, {"x": jax.sharding.NamedSharding(mesh(2, 2), P(None, "a"))})
    left = Shard(path="x", shape=(8, 8), dtype="float32", start=(0, 0), stop=(8, 4), bytes=128)
    want = (left, dataclasses.replace(left, start=(0, 4), stop=(8, 8)))
    assert slices.wanted(halves) == (dataclasses.replace(left, stop=(8, 8), bytes=256),)  # one process wants both
    k = key()
    manifest = sender.give(k, cut(tree, want))
    assert [shard.bytes for shard in manifest.shards] == [64] * 4
    got = receiver.take(manifest, want, k, 20)
    assert [x.tolist() for x in got.values()] == [
        np.asarray(tree["x"])[:, half].tolist() for half in (np.s_[0:4], np.s_[4:8])
    ]
    k = key()
    part = dataclasses.replace(manifest, key=k, shards=manifest.shards[:3], crc32=manifest.crc32[:3])
    with pytest.raises(WireError, match=r"x\[0:4, 0:4\].* among 3 pieces where x\[0:8, 4:8\] .* is expected"):
        receiver.take(part, want, k, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(path="y"), "nothing of that name"),
        (dict(shape=(4, 4)), r"it is float32\[8, 8\] here"),
        (dict(dtype="bfloat16"), r"it is float32\[8, 8\] here"),
        (dict(start=(0, 9)), "no part of it"),
        (dict(stop=(8,)), "no part of it"),
        (dict(bytes=4), "no part of it"),
        (dict(stop=(8, 9), bytes=288), "no part of it"),
    ],
)
def test_what_the_sender_does_not_have_is_not_offered(change, message):
    tree = {"x": placed(np.zeros((8, 8), np.float32), on=(1,))}
    shard = slices.wanted(tree)[0]
    with pytest.raises(WireError, match=message):
        slices.pieces(slices.offered(tree), [dataclasses.replace(shard, **change)])


# ------------------------------------- what is refused before it is taken


def offered(sender, **changes):
    k = key()
    return k, dataclasses.replace(sender.give(k, whole(NAMED)), **changes)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (
            dict(w=np.zeros((3, 4), ml_dtypes.bfloat16)),
            (
                r"w\[0:3, 0:4\] of float32\[3, 4\] with 48 bytes is offered where "
                r"w\[0:3, 0:4\] of bfloat16\[3, 4\] with 24 bytes is expected"
            ),
        ),
        (dict(w=np.zeros((3, 4), np.int32)), r"of int32\[3, 4\] with 48 bytes is expected"),  # the same bytes
        (dict(w=np.zeros((4, 3), np.float32)), r"w\[0:4, 0:3\] of float32\[4, 3\] with 48 bytes is expected"),
        (dict(w=np.zeros((2, 4), np.float32)), "with 32 bytes is expected"),
        (dict(w=np.zeros((6, 4), np.float32)), "with 96 bytes is expected"),
        (dict(w=None), r"w\[0:3, 0:4\] of float32\[3, 4\] is offered and was not asked for"),  # a subset
        (dict(v=np.zeros(2, np.float32)), "no v is offered where v"),
        (dict(v=np.zeros(0, np.float32)), "v has no elements"),
    ],
)
def test_another_dtype_shape_or_tree_is_refused(ends, works, mine, message):
    k, manifest = offered(ends[0])
    expected = {name: x for name, x in {**NAMED, **mine}.items() if x is not None}
    with pytest.raises(WireError, match=message):  # and not that it has not come
        ends[1].take(manifest, tuple(whole(expected)), k, 5)
    takes(ends[1], manifest, NAMED, k)
    works()


@pytest.mark.parametrize("change", [dict(epoch=2), dict(version=4), dict(receiver="rollout1/0"), dict(sequence=0)])
def test_another_epoch_version_receiver_or_transfer_is_refused(ends, change):
    k, manifest = offered(ends[0])
    with pytest.raises(WireError, match=r"version 3 for rollout0/0 \(epoch 1, transfer \d+\) is offered where"):
        ends[1].take(manifest, tuple(whole(NAMED)), dataclasses.replace(k, **change), 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(number=0), "cannot be"),
        (dict(number=1 << 63), "cannot"),
        (dict(number=12345), "is not offered there any more"),
        (dict(address="nowhere"), "'nowhere' is no address"),
        (dict(address="127.0.0.1:99999"), "is no address|failed"),
        (dict(address="127.0.0.1:1"), "from 127.0.0.1:1 failed: ConnectionRefusedError"),
    ],
)
def test_a_manifest_that_leads_nowhere_is_refused(ends, works, change, message):
    k, manifest = offered(ends[0], **change)
    with pytest.raises(WireError, match=message):
        ends[1].take(manifest, tuple(whole(NAMED)), k, 5)
    works()


def test_a_shard_offered_by_two_processes_is_refused(ends):
    k, manifest = offered(ends[0])
    with pytest.raises(WireError, match=r"w\[0:3, 0:4\] of float32\[3, 4\] is offered twice"):
        ends[1].take([manifest, manifest], tuple(whole(NAMED)), k, 5)


def test_the_shards_of_several_processes_are_one_tree(ends):
    """Offers of two hosts of one world, a half each."""
    k = key()
    halves = [sender.give(k, whole({name: x})) for (name, x), sender in zip(NAMED.items(), (ends[0], new_wire()))]
    takes(ends[1], halves, NAMED, k)
    with pytest.raises(WireError, match="no z is offered"):
        ends[1].take(halves[:1], tuple(whole(NAMED)), k, 10)


def test_arrays_without_elements_are_not_offered(ends, works):
    with pytest.raises(WireError, match="y has no elements: it cannot be sent, and both sides can make it"):
        ends[0].give(key(), whole({"x": np.zeros(3), "y": np.zeros((0, 4))}))
    works()


def test_a_transfer_is_offered_once(ends, works):
    k, _ = offered(ends[0])
    for again in (k, dataclasses.replace(k, sequence=k.sequence - 1), dataclasses.replace(k, version=4)):
        with pytest.raises(WireError, match=f"transfer {again.sequence}.* not offered again: the last .* {k.sequence}"):
            ends[0].give(again, whole(NAMED))
    ends[0].release(k)
    ends[0].release(k)
    overtaken = key()
    ends[0].release(overtaken)  # before it was offered
    for late in (k, overtaken):
        with pytest.raises(WireError, match="is not offered again"):
            ends[0].give(late, whole(NAMED))
    works()


# ---------------------------------------------------- what ends in time


def test_an_offer_is_there_until_it_is_released_and_lets_its_arrays_go_then(ends, works):
    k, manifest = offered(ends[0])
    for _ in range(2):
        takes(ends[1], manifest, NAMED, k)
    ends[0].release(k)
    assert k not in ends[0].offers
    with pytest.raises(WireError, match="is not offered there any more"):
        ends[1].take(manifest, tuple(whole(NAMED)), k, 5)
    works()


@pytest.mark.parametrize("speaks", [False, True])
def test_a_sender_that_stands_still_ends_the_transfer_at_its_deadline(ends, speaks):
    k, let_in = key(), []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = new_listener(let_in.append, "rollout0")  # it lets the receiver in, and sends nothing
        address = host.address if speaks else f"127.0.0.1:{mute.getsockname()[1]}"
        manifest = dataclasses.replace(ends[0].give(k, whole(NAMED)), address=address)
        began = time.monotonic()
        with pytest.raises(WireError, match="has not come within 0.5 s"):
            ends[1].take(manifest, tuple(whole(NAMED)), k, 0.5)
        assert 0.4 < time.monotonic() - began < 15
    host.close()
    assert bool(let_in) == speaks
    ends[0].release(k)


def test_transfers_of_several_threads_do_not_disturb_each_other(ends):
    got = {}

    def pull(number):
        named, k = {"x": np.full(1 << 16, number, np.float32)}, key(receiver=f"rollout0/thread{number}")
        (got[number],) = ends[1].take(ends[0].give(k, whole(named)), tuple(whole(named)), k, 20).values()

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: (float(x[0]), float(x[-1])) for number, x in got.items()} == {n: (n, n) for n in range(8)}


def test_deadlines_grow_with_the_bytes():
    assert deadline_s(0) == 30 and deadline_s(1 << 30) == pytest.approx(35)


# --------------------------------------------------- callers that are not served


def test_a_process_of_another_run_is_given_nothing(ends, works):
    k, manifest = offered(ends[0])
    with pytest.raises(WireError, match="failed: SSLCertVerificationError"):
        new_wire(authority=ANOTHER_RUN).take(manifest, tuple(whole(NAMED)), k, 5)
    works()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        struct.pack("!i", -1) * 9,
        b"\0\0\0\x14" + b"#CHALLENGE#" + b"x" * 20,
        random.Random(0).randbytes(1 << 16),
    ],
)
def test_garbage_on_the_port_ends_the_unverified_peers_connection_alone(ends, works, garbage):
    """64 zeros on a port of `jax.experimental.transfer` abort the process."""
    ip, port = ends[0].address.split(":")
    with socket.create_connection((ip, int(port)), timeout=20) as unverified:
        try:
            unverified.sendall(garbage)
            unverified.shutdown(socket.SHUT_WR)
            while unverified.recv(1 << 16):
                pass
        except OSError as error:  # it is hung up on, and not left to wait
            assert not isinstance(error, TimeoutError)
    works()


def test_a_member_that_asks_for_what_is_not_there_is_answered_so(ends, works):
    _k, manifest = offered(ends[0])
    size = sum(x.nbytes for x in NAMED.values())
    for number, start, stop, answer in (
        (5, 0, 1, b"\0"),
        (manifest.number, size, 0, b"\1"),
        (manifest.number, size, 1 << 63, b"\1"),
        (1 << 63, 0, 0, b"\0"),
    ):
        channel = dial(manifest.address, credential("rollout0"), anyone)
        channel.write(device_transfer.ASK.pack(number, start, stop))
        assert channel.read(bytearray(1)) == answer
        with pytest.raises(ConnectionError):
            channel.read(bytearray(1))
    works()


# --------------------------------------------------------- the manifest


def example():
    shard = Shard(path="layers/0/q", shape=(8, 4), dtype="bfloat16", start=(0, 2), stop=(8, 4), bytes=32)
    return Manifest(
        key=key(),
        sender="trainer",
        incarnation=3,
        address="127.0.0.1:1234",
        number=17,
        shards=(shard, dataclasses.replace(shard, path="scalar", shape=(), start=(), stop=(), bytes=2)),
        crc32=(5, 2**32 - 1),
    )


def test_fuzzed_manifests_are_refused_with_a_sentence():
    """1,000 of them: not a manifest, or not what is expected; what still passes is the very same offer."""
    good = example()
    data, draw, undecoded, unexpected = CODEC.encode(good), random.Random(0), 0, 0
    for number in range(2000):
        wrong = bytearray(data)
        if number % 3 == 0:
            del wrong[draw.randrange(len(wrong)) :]
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
            given = "sender", "incarnation", "address", "number", "crc32"  # which the bytes are to fit
            carried = {name: getattr(good, name) for name in given}
            assert dataclasses.replace(manifest, **carried) == good
    assert undecoded > 600 and unexpected > 50
