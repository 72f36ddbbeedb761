"""Samples between processes: pages arrive bit-equal, the sample goes on as if it had stayed, or nothing has moved."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from dora_jax.rollout.migrate import without_pages
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer.kv_transfer import CODEC, fetch, layout_of, offer
from dora_jax.runtime.transfer.transfer_manifest import Key, WireError
from dora_jax.types import SampleId
from tests.fakes.engine_rig import LAYOUT, assert_undisturbed, bits, finish, loaded, shared_engine, taken_out
from tests.fakes.members import RUN
from tests.fakes.wire_peer import new_wire

NUMBERS = iter(range(1, 1000))


@pytest.fixture(scope="module")
def ends():
    return new_wire(), new_wire()


def key(version=0):
    return Key(epoch=1, version=version, receiver="rollout0/0", sequence=next(NUMBERS))


def carried(offered):
    return CODEC.decode(CODEC.encode(offered))


def test_pages_arrive_bit_equal_and_the_sample_goes_on_as_if_it_had_stayed(ends):
    id = SampleId(3, 1)
    in_flight, k = taken_out(id, others=[SampleId(3, 0)]), key()
    assert layout_of(in_flight.pages) == LAYOUT and in_flight.n_pages == 7
    got = fetch(ends[1], carried(offer(ends[0], k, in_flight)), k, LAYOUT, 20)
    ends[0].release(k)
    assert bits(got.k_pages) == bits(in_flight.k_pages) and bits(got.v_pages) == bits(in_flight.v_pages)
    for field in dataclasses.fields(in_flight):
        np.testing.assert_equal(getattr(got, field.name), getattr(in_flight, field.name))
    with loaded("small") as small:
        small.import_(got)
        assert_undisturbed(finish(small)[id])


def test_a_request_without_pages_needs_no_wire(ends):
    in_flight, k = without_pages(taken_out(SampleId(2, 0))), key()
    offered = carried(offer(ends[0], k, in_flight))
    assert offered.manifest is None
    np.testing.assert_equal(dataclasses.asdict(fetch(None, offered, k, LAYOUT)), dataclasses.asdict(in_flight))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (dict(layers=3), "of float32.3, 7, 2, 16, 4."),
        (dict(heads=1), "of float32.2, 7, 1, 16, 4."),
        (dict(head_dim=8), "of float32.2, 7, 2, 8, 4."),
        (dict(dtype="bfloat16"), "of bfloat16.2, 7, 2, 16, 4."),
    ],
)
def test_an_engine_of_another_layout_refuses(ends, layout, message):
    in_flight, k = taken_out(SampleId(3, 1)), key()
    offered = offer(ends[0], k, in_flight)
    with pytest.raises(WireError, match=f"is offered where .*{message} with .* is expected"):
        fetch(ends[1], offered, k, dataclasses.replace(LAYOUT, **layout), 5)
    assert bits(fetch(ends[1], offered, k, LAYOUT, 20).k_pages) == bits(in_flight.k_pages)  # nothing had been taken


def test_another_version_refuses(ends):
    in_flight, k = taken_out(SampleId(3, 1)), key()
    with pytest.raises(WireError, match="is a sample of version 0"):
        offer(ends[0], key(version=1), in_flight)
    offered = offer(ends[0], k, in_flight)
    with pytest.raises(WireError, match="a sample of version 0 comes where version 1 for rollout0/0"):
        fetch(ends[1], offered, dataclasses.replace(k, version=1), LAYOUT, 5)


@pytest.mark.parametrize("change", [dict(kv_len=0), dict(kv_len=10**9), dict(page_size=0), dict(kv_len=-3)])
def test_sizes_that_cannot_be_are_refused(ends, change):
    k = key()
    offered = offer(ends[0], k, taken_out(SampleId(3, 1)))
    with pytest.raises(WireError, match="are no KV of 28 tokens"):
        fetch(ends[1], dataclasses.replace(offered, **change), k, LAYOUT, 5)


def test_pages_that_nobody_fetches_are_freed(ends):
    k = key()
    offer(ends[0], k, taken_out(SampleId(3, 1)))
    assert k in ends[0].offers
    ends[0].release(k)
    assert k not in ends[0].offers


@pytest.mark.slow
def test_a_sample_goes_on_in_another_process_bit_for_bit(ends):
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.engine_peer"],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "WIRE_PEER_CREDENTIAL": RUN.issue("rollout0", 1)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with peer:
        assert peer.stdout.readline() == "ready\n"
        for id, ticks in ((SampleId(3, 1), 4), (SampleId(4, 0), 2), (SampleId(0, 1), 3)):
            k = key()
            offered = offer(ends[0], k, taken_out(id, ticks, others=[SampleId(1, 0)]))
            peer.stdin.write(f"{CODEC.encode(offered).hex()} {k.sequence}\n")
            peer.stdin.flush()
            assert_undisturbed(Codec().decode(bytes.fromhex(peer.stdout.readline())))
            ends[0].release(k)
        peer.stdin.close()
        assert peer.wait(20) == 0
    assert shared_engine("a").idle
