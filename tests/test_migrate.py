"""Parcels: pages arrive bit-equal, also cut into other pages; without pages the tokens are prefilled again."""

import dataclasses

import numpy as np
import pytest

from dora_jax.rollout.migrate import ended, observed, repaged, without_pages
from dora_jax.types import SampleId, Span, TokenTable
from tests.fakes.engine_rig import assert_undisturbed, finish, ids, loaded, shared_engine, submit, undisturbed
from tests.fakes.requests import request


def contiguous(one):
    """K [layers, K, D, kv_len] and V [layers, K, kv_len, D], as the pages say."""
    k = np.concatenate(list(np.moveaxis(one.k_pages, 1, 0)), axis=-1)
    v = np.concatenate(list(np.moveaxis(one.v_pages, 1, 0)), axis=-2)
    return k[..., : one.kv_len], v[..., : one.kv_len, :]


def test_other_page_sizes_hold_the_same_kv():
    here = request()
    for size in (1, 2, 8, 16):
        there = repaged(here, size)
        assert there.page_size == size and there.n_pages == -(-11 // size)
        for x, y in zip(contiguous(here), contiguous(there), strict=True):
            np.testing.assert_array_equal(x, y)
    assert repaged(here, 4) is here
    assert here.kv_bytes == 4 * 2 * (2 * 3 * 2 * 8 * 4)


def test_pages_arrive_bit_equal():
    """Out of one engine, into another for one tick, and out again."""
    id = SampleId(3, 1)
    with loaded("a", "small") as (a, small):
        submit(a, id)
        for _ in range(4):
            a.tick()
        sent = a.export(id)
        small.import_(sent)
        small.tick()
        got = small.export(id)
    assert sent.kv_len == 27 and got.kv_len == 31
    got = dataclasses.replace(got, kv_len=27)
    for x, y in zip(contiguous(sent), contiguous(got), strict=True):
        np.testing.assert_array_equal(x.view(np.int32), y.view(np.int32))


def test_samples_of_a_lost_instance_are_prefilled_again():
    """Their tokens so far are kept; what follows agrees within rounding until a near-tie."""
    id = SampleId(3, 1)
    with loaded("a", "small") as (a, small):
        submit(a, id)
        for _ in range(4):  # 20 prompt tokens: 3 ticks; the third decodes too
            a.tick()
        request = without_pages(a.export(id))
        assert request.kv_bytes == 0 and len(request.out_ids) == 8
        small.import_(request)
        sample = finish(small)[id]
    same = undisturbed(id)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs[:8], same.logprobs[:8])
    np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=1e-5)


def test_a_group_that_moves_shares_its_prompt_again():
    with loaded("a", "small") as (a, small):
        for id in ids((21,), size=3):
            submit(a, id)
        for _ in range(4):
            a.tick()
        for id in ids((21,), size=3):
            small.import_(a.export(id))
        small.tick()
        tables = [small.scheduler.seqs[id].table.tolist() for id in ids((21,), size=3)]
        assert tables[0][:4] == tables[1][:4] == tables[2][:4]  # 16 positions of two whole chunks
        done = finish(small)
    for sample in done.values():
        assert_undisturbed(sample)


def test_waiting_samples_travel_without_pages():
    with loaded("a", "small") as (a, small):
        submit(a, SampleId(2, 0))
        request = a.export(SampleId(2, 0))
        assert request.n_pages == 0 and a.idle
        small.import_(request)
        done = finish(small)
    assert_undisturbed(done[SampleId(2, 0)])
    assert shared_engine("a").free_pages == 96


def test_a_long_sample_moves_in_pieces_while_the_others_decode(monkeypatch):
    """Seven pages, two a step, out of one engine and into the other; no bit of anybody changes."""
    moved, others, there = SampleId(21, 2), [SampleId(2, 0), SampleId(4, 0), SampleId(4, 1)], ids((1, 5), size=1)
    with loaded("a", "small") as (a, small):
        for engine in (a, small):
            pieces = dataclasses.replace(engine.shapes, copy_pages=2)
            for part in (engine, engine.device, engine.scheduler):
                monkeypatch.setattr(part, "shapes", pieces)
        for id in (moved, *others):
            submit(a, id)
        done = {sample.id: sample for _ in range(4) for sample in a.tick().finished}
        before = {id: len(a.sampled(id)[0]) for id in others if id not in done}
        request = a.export(moved)
        assert request.n_pages == 7 and request.kv_len == 27
        result = a.tick()
        assert any(result.progress[id] - n > a.shapes.steps for id, n in before.items()), "nobody decoded meanwhile"
        for id in there:
            submit(small, id)
        first = small.tick()
        small.import_(request)
        ticks = [small.tick() for _ in range(4)]
        assert [moved in tick.progress for tick in ticks] == [False, False, False, True] and ticks[0].tokens > 0
        done |= {sample.id: sample for tick in (result, first, *ticks) for sample in tick.finished}
        done |= finish(a, small)
    assert set(done) == {moved, *others, *there}
    for sample in done.values():
        assert_undisturbed(sample)


def test_a_sample_that_nobody_decodes_beside_moves_in_larger_pieces(monkeypatch):
    """Five pages and then two, in calls that `warmup` has compiled; no bit changes."""
    moved = SampleId(21, 2)
    with loaded("a", "small") as (a, small):
        for engine in (a, small):
            pieces = dataclasses.replace(engine.shapes, copy_pages=2, alone_pages=5)
            for part in (engine, engine.device, engine.scheduler):
                monkeypatch.setattr(part, "shapes", pieces)
            engine.warmup()
        compiled = a.compiled, small.compiled
        submit(a, moved)
        for _ in range(4):
            a.tick()
        request = a.export(moved)
        assert request.n_pages == 7 and request.kv_len == 27
        small.import_(request)
        assert [moved in small.tick().progress for _ in range(2)] == [False, True]
        assert_undisturbed(finish(small)[moved])
        assert (a.compiled, small.compiled) == compiled


def test_what_is_observed_follows_the_exact_tokens_and_keeps_their_kv():
    turn = dataclasses.replace(request(), kept=np.ones((5, 2), np.int32), spans=(Span(version=2, start=0, stop=3),))
    there = observed(turn, np.array([50, 51, 52]))
    assert there.out_ids.tolist() == [0, 1, 2, 3, 4, 50, 51, 52] and there.out_ids.dtype == np.int32
    assert there.mask.tolist() == [True] * 5 + [False] * 3 and there.logprobs.tolist() == [0.0] * 8
    assert there.kept.tolist() == [[1, 1]] * 5 + [[-1, -1]] * 3
    assert (there.kv_len, there.n_pages, there.sampled, there.dropped) == (11, 3, 5, 0)
    assert bits_of(there) == bits_of(turn) and there.spans == turn.spans
    for nothing in (np.zeros(0, np.int32), np.zeros(0, np.int64)):
        with pytest.raises(ValueError, match="observes 0 tokens behind 12 of 12"):
            observed(turn, nothing)


@pytest.mark.parametrize("keep", [3, 7, 9, 12])
def test_a_rewritten_turn_keeps_the_tokens_and_the_kv_in_front_of_it(keep):
    routes = np.arange(2 * 11, dtype=np.uint8).reshape(11, 1, 2)
    table = TokenTable(routes=routes, rungs=np.array([[0, 16, 4], [6, 3, 2]], np.int32))
    turn = dataclasses.replace(request(), table=table, spans=(Span(version=2, start=0, stop=3),))
    there = observed(turn, np.array([50]), keep)
    assert np.repeat(*there.table.rungs).tolist() == [0, 0, 0, 0, 0, 0, 16, 16, 16, 4, 4][:keep]
    assert [*there.prompt_ids, *there.out_ids] == [*turn.prompt_ids, *turn.out_ids][:keep] + [50]
    assert there.kv_len == min(keep, 11) and there.n_pages == -(-there.kv_len // 4)
    assert there.sampled == 5, "those of the branch before count as sampled"
    assert len(there.table.routes) == min(keep, 11)
    assert there.spans == tuple(s for s in (Span(version=2, start=0, stop=min(3, keep - 7)),) if s.stop > 0)


def test_an_episode_ends_with_its_last_sampled_token():
    table = TokenTable(routes=np.zeros((11, 1, 2), np.uint8), rungs=np.array([[0, 4], [6, 5]], np.int32))
    turn = dataclasses.replace(request(), table=table)
    for whole in (turn, observed(turn, np.array([50, 51]))):
        sample = ended(whole, "length")
        assert sample.out_ids.tolist() == list(range(5)) and sample.mask.all() and len(sample.mask) == 5
        assert sample.spans == (Span(version=3, start=0, stop=5),) and sample.finish == "length"
        assert len(sample.table.routes) == 7 + 5 - 1 and sample.table.rungs.tolist() == [[0, 4], [6, 5]]


def bits_of(request):
    return {name: pages.tobytes() for name, pages in request.pages.items()}
