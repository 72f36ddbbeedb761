"""KV that comes from the host: in pieces, between which the others decode."""

import dataclasses

import pytest

from dora_jax.rollout import plan as p
from dora_jax.rollout import shapes as columns
from dora_jax.types import SampleId
from tests.fakes.plan_device import SECTION, FakeDevice, request


def host_request(group, index=0, kv_len=19, n_prompt=20):
    """A sample that comes with KV."""
    tokens = range(100 * group, 100 * group + n_prompt)
    return dataclasses.replace(
        request(group, index, n_prompt=n_prompt),
        kv_len=kv_len,
        page_size=4,
        k_pages={i: (0, token, i) for i, token in enumerate(tokens) if i < kv_len},
    )


@pytest.fixture
def pieces_of_two(monkeypatch):
    monkeypatch.setattr(columns, "COPY_PAGES", 2)
    monkeypatch.setattr(columns, "ALONE_PAGES", 2)


def test_kv_from_the_host_comes_in_pieces_between_which_the_others_decode(pieces_of_two):
    device = FakeDevice()
    device.add(request(1, n_prompt=1))
    device.tick()
    moved = host_request(0)  # five pages
    device.add(moved, announce=False)
    for pages in (2, 2, 1):
        assert moved.id not in [seq.id for call in device.plans[-1].decodes for seq, _ in call.rows]
        device.tick()
        assert sum(len(upload.pages) for upload in device.plans[-1].uploads) == pages
        assert SampleId(1, 0) in [seq.id for call in device.plans[-1].decodes for seq, _ in call.rows]
    assert moved.id in [seq.id for call in device.plans[-1].decodes for seq, _ in call.rows]
    assert not any(plan.prefills for plan in device.plans)
    device.finish()
    assert len(device.done) == 2


def test_kv_from_the_host_comes_in_larger_pieces_while_nobody_decodes(pieces_of_two, monkeypatch):
    monkeypatch.setattr(columns, "ALONE_PAGES", 4)
    device = FakeDevice()
    device.add(host_request(0), announce=False)  # five pages: two chunks of two, and its own
    device.tick()
    assert [(upload.start, len(upload.pages)) for upload in device.plans[-1].uploads] == [(0, 4)]  # one call for both
    device.add(request(1, n_prompt=1))
    device.add(host_request(2), announce=False)
    device.tick()
    assert [(upload.request.id.group_id, upload.start, len(upload.pages)) for upload in device.plans[-1].uploads] == [
        (0, 4, 1),
        (2, 0, 1),
    ]
    device.finish()
    assert len(device.done) == 3


def test_one_call_never_copies_for_two_samples(monkeypatch):
    """The pages of the one end where those of the other begin, whose first ones are here already."""
    monkeypatch.setattr(columns, "COPY_PAGES", 3)
    device = FakeDevice()
    device.add(host_request(0), announce=False)
    device.tick()
    device.add(host_request(0, 1, n_prompt=16, kv_len=15), announce=False)
    device.add(host_request(0, 2), announce=False)
    device.tick()
    assert [(upload.request.id.index, upload.start, len(upload.pages)) for upload in device.plans[-1].uploads] == [
        (1, 2, 2),
        (2, 4, 1),
    ]
    device.finish()


@pytest.mark.parametrize("ticks", range(1, 4))
def test_who_shares_a_prefix_on_its_way_waits_or_computes_it_when_it_stops_coming(pieces_of_two, ticks):
    device = FakeDevice()
    device.add(host_request(0), announce=False)
    device.add(request(0, 1, n_prompt=20))
    for _ in range(ticks):
        device.tick()
    device.scheduler.remove(device.scheduler.seqs[SampleId(0, 0)])
    device.scheduler.check()
    computed = sum(bool(row[1]) for plan in device.plans for call in plan.prefills for row in call.control)
    assert computed == int(ticks > 1)  # two whole chunks of four pages come with the other; the rest is its own
    device.finish()
    assert list(device.done) == [SampleId(0, 1)] and device.scheduler.index.available == device.s.pages


def test_a_sample_preempted_while_its_kv_comes_starts_over(pieces_of_two):
    device = FakeDevice(dataclasses.replace(SECTION, pages=14))
    device.add(request(1, n_prompt=8))
    device.tick()
    device.add(host_request(0), announce=False)
    device.tick()
    seq = device.scheduler.seqs[SampleId(0, 0)]
    assert seq.uploads and seq.request is not None
    plan = p.TickPlan()
    device.scheduler.preempt(seq, plan)
    assert plan.preempts[0].kv_len == 0 and seq.request.kv_len == 19 and not seq.uploads
    device.scheduler.check()
    device.finish()
    assert len(device.done) == 2
