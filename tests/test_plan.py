"""Continuous batching without a device: a fake one answers each call, and every law is checked at each tick."""

import dataclasses
import random

import numpy as np
import pytest

from dora_jax.rollout.shapes import ADAPTER, PREFILL_HEADER, shapes_of
from dora_jax.types import SampleId
from tests.fakes.plan_device import SECTION, FakeDevice, request


def test_shapes_of_the_configuration():
    s = shapes_of(SECTION)
    assert (s.rows, s.chunk, s.prefill_rows, s.prefill_calls, s.window, s.block_pages) == (4, 8, 2, 1, 2, 4)
    assert s.decode_buckets == (1, 2, 4) and s.prefill_buckets == (0, 4)
    assert [s.bucket(n, s.decode_buckets) for n in (0, 16, 17, 33)] == [1, 1, 2, 4]
    assert s.worst_pages(20, 30) == 14
    assert shapes_of(dataclasses.replace(SECTION, decode_steps=5)).window == 2
    assert shapes_of(dataclasses.replace(SECTION, decode_steps=6)).window == 3


def test_a_kernel_that_reads_pages_has_one_table_and_one_prefill():
    s = shapes_of(dataclasses.replace(SECTION, attention="tpu", prefill_tokens=32))
    pages = -(-(SECTION.max_prompt_tokens + SECTION.max_new_tokens - 1) // SECTION.page_size)
    assert s.decode_buckets == s.prefill_buckets == (pages,) and s.block_pages == 1
    assert (s.prefill_rows, s.prefill_calls) == (4, 1) and s.copy_pages == s.alone_pages == 1024 // SECTION.page_size
    assert s.layout == "scanned" and shapes_of(SECTION).layout == "serving"


def test_a_page_table_that_a_tpu_cannot_hold_is_refused():
    long = dataclasses.replace(
        SECTION,
        attention="tpu",
        slots=256,
        pages=4096,
        page_size=64,
        max_prompt_tokens=1024,
        max_new_tokens=31744,
        prefill_tokens=1024,
        prefill_chunk=512,
    )
    assert shapes_of(long).decode_buckets == (512,)
    with pytest.raises(
        ValueError,
        match="rollout.page_size 32 makes a page table of 1179648 bytes for 256 rows of 32768 "
        "positions, and the kernel has 1032192: raise .*, or lower rollout.decode_rows",
    ):
        shapes_of(dataclasses.replace(long, page_size=32))
    assert shapes_of(dataclasses.replace(long, page_size=32, decode_rows=128)).rows == 128
    assert shapes_of(dataclasses.replace(long, page_size=32, attention="gpu")).rows == 256


def test_a_group_is_prefilled_once_then_decodes_together():
    device = FakeDevice()
    for index in range(4):
        device.add(request(0, index, n_prompt=20))  # 19 positions: chunks of 8, 8, 3
    device.tick()
    assert device.plans[-1].prefills[0].control[0, :2].tolist() == [0, 8] and not device.plans[-1].decodes
    assert device.started == [SampleId(0, i) for i in range(4)]
    device.tick()
    device.tick()
    (call,) = device.plans[-1].decodes
    assert device.plans[-1].prefills[0].control[0, :2].tolist() == [16, 3] and len(call.rows) == 4
    assert not device.plans[-1].prefills[0].control[1:].any()
    seqs = [seq for seq, _ in call.rows]
    assert len({tuple(seq.table[:4]) for seq in seqs}) == 1 and len({seq.table[4] for seq in seqs}) == 4
    device.finish()
    assert len(device.done) == 4


def test_a_tick_prefills_up_to_its_budget_chunk_after_chunk():
    device = FakeDevice(dataclasses.replace(SECTION, prefill_tokens=256))
    device.add(request(0, n_prompt=20))
    device.tick()
    calls = device.plans[-1].prefills
    assert [call.control[0, :2].tolist() for call in calls] == [[0, 8], [8, 8]] and calls[0].control.shape[0] == 16
    assert [call.blocks for call in calls] == [0, 4] and not device.plans[-1].decodes
    device.finish()


def test_prompts_of_a_tick_are_packed_by_version_in_order_of_arrival():
    device = FakeDevice()
    for group, version in enumerate((1, 0, 1)):
        device.add(request(group, version=version))
    device.tick()
    first = device.plans[-1].prefills[0]
    assert first.version == 1 and first.control[:, PREFILL_HEADER].tolist() == [0, 200]
    device.tick()
    assert device.plans[-1].prefills[0].version == 0
    assert [call.version for call in device.plans[-1].decodes] == [0, 1]


def test_rows_of_all_versions_share_calls_where_versions_are_adapters():
    """Prefixes are still shared only within a version."""
    device = FakeDevice(adapters={4: 2, 7: 0})
    for group, version in enumerate((7, 4, 7, 4)):
        device.add(request(group, version=version, prompt=[*range(9)]))
    device.tick()
    first = device.plans[-1].prefills[0]
    assert first.version is None and first.control[:, PREFILL_HEADER - 1].tolist() == [0, 2]
    device.tick()
    (call,) = device.plans[-1].decodes
    assert call.version is None and call.control[:, ADAPTER].tolist() == [0, 2, 0, 2]
    device.finish()


def test_a_second_prompt_shares_the_chunks_it_has_in_common():
    device = FakeDevice()
    device.add(request(0, prompt=[*range(16), 50, 51]))
    device.finish()
    device.add(request(1, prompt=[*range(16), 60, 61, 62]))
    device.tick()
    assert device.plans[-1].prefills[0].control[:, :2].tolist() == [[16, 2], [0, 0]]
    device.finish()


def test_new_samples_wait_for_a_slot_in_order():
    device = FakeDevice()
    for group in range(9):
        device.add(request(group, n_prompt=5))
    device.finish(length=lambda id: 6)
    assert device.started == [SampleId(group, 0) for group in range(9)]


def test_pressure_preempts_the_cheapest_of_the_younger_and_resumes_it_before_new_ones():
    device = FakeDevice(dataclasses.replace(SECTION, pages=20))
    for group in range(7):
        device.add(request(group, n_prompt=6))
    held = []
    while device.scheduler.seqs:
        before = {seq.id: len(seq.private) for seq in device.scheduler.seqs.values() if seq.slot is not None}
        device.tick()
        plan = device.plans[-1]
        held.append(len(plan.preempts))
        victims = [preempt.seq.id for preempt in plan.preempts]
        # never the oldest, and the first victim is the cheapest of the others
        assert not victims or min(before) not in victims and not plan.started
        assert not victims or before[victims[0]] == min(size for id, size in before.items() if id != min(before))
    assert sum(held) > 3 and len(device.done) == 7
    assert [id.group_id for id in device.started] == list(range(7))


@pytest.mark.parametrize("pages", range(14, 26))
def test_a_preempted_sample_goes_before_new_ones(pages):
    device = FakeDevice(dataclasses.replace(SECTION, pages=pages, slots=3))
    for group in range(3):
        device.add(request(group, n_prompt=20))
    while device.scheduler.seqs and not any(plan.preempts for plan in device.plans):
        device.tick()
    waiting = [seq.id for _, seq in device.scheduler.resuming]
    device.add(request(8, n_prompt=1))  # small enough to fit at once
    while SampleId(8, 0) not in device.started:
        device.tick()
    assert all(id in device.done or device.scheduler.seqs[id].slot is not None for id in waiting)


def test_the_victim_came_later_or_is_the_sample_itself():
    device = FakeDevice()
    for group in range(3):
        device.add(request(group, n_prompt=1))
    device.tick()
    scheduler = device.scheduler
    first, second, third = scheduler.seqs.values()
    first.table, second.table, third.table = (np.zeros(n, np.int32) for n in (1, 3, 2))
    assert scheduler.victim(first) is third  # the cheaper one
    assert scheduler.victim(second) is third
    assert scheduler.victim(third) is third


def test_an_admission_leaves_room_to_grow():
    """Else the next tick would throw it out again."""
    device = FakeDevice(dataclasses.replace(SECTION, pages=20))
    for group in range(8):
        device.add(request(group, n_prompt=8))
    device.finish()
    for before, after in zip(device.plans, device.plans[1:], strict=False):
        assert not {preempt.seq.id for preempt in after.preempts} & set(before.started)


def test_a_sample_that_cannot_fit_is_refused():
    device = FakeDevice()
    with pytest.raises(ValueError, match="may reach 51 tokens; the engine is compiled for 50"):
        device.add(request(0, n_prompt=21))
    with pytest.raises(ValueError, match="no token left"):
        device.add(dataclasses.replace(request(0, limit=1), out_ids=np.ones(1, np.int32)))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_conserve_and_finish(seed, recurrent):
    """Pages, slots and recurrent states, which stand for the tokens of their own sample whenever one decodes."""
    rng = random.Random(seed)
    device = FakeDevice(
        dataclasses.replace(
            SECTION,
            pages=rng.choice((16, 24, 60)),
            slots=rng.choice((2, 4, 8)),
            decode_steps=rng.choice((1, 3, 8)),
            decode_rows=rng.choice((0, 2)),
        ),
        adapters={0: 1, 1: 0} if seed % 2 else None,
        recurrent=recurrent,
    )
    lengths = {SampleId(g, i): rng.choice((1, 5, 12, 30)) for g in range(8) for i in range(3)}
    todo = list(lengths)
    cancelled = 0
    while todo or device.scheduler.seqs:
        act = rng.random()
        if act < 0.4 and todo:
            id = todo.pop(rng.randrange(len(todo)))
            device.add(
                request(id.group_id, id.index, version=rng.randrange(2), n_prompt=1 + 19 * id.group_id % 20),
                announce=rng.random() < 0.8,
            )
        elif act < 0.45 and device.scheduler.seqs:
            device.scheduler.remove(rng.choice(list(device.scheduler.seqs.values())))
            cancelled += 1
        else:
            device.tick(lengths.get)
        assert len(device.plans) < 2000
    assert len(device.done) + cancelled == 24
    assert device.scheduler.index.available == device.s.pages
