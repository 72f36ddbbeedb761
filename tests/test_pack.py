"""Packing: every token where its trajectory says, static shape, nothing lost, and the group store."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_jax.buffer import layout, pack
from dora_jax.trainer.advantage import Prepare, estimate
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes import trainer_cases as cases


def packed(scored, section=cases.SECTION, shards=1, **changes):
    shape = layout.layout(
        **(
            {
                "pack_tokens": section.pack_tokens,
                "rows": 0,
                "micro_batches": section.micro_batches,
                "samples": sum(len(g.samples) for g in scored),
                "shards": shards,
                "max_tokens": cases.MAX_PROMPT + cases.MAX_NEW,
            }
            | changes
        )
    )
    return pack.pack(scored, shape, Prepare(section, cases.MAX_NEW)), shape


def trajectories(batch):
    """(tokens with the last target, mask, log-probs, advantage, version) of every segment, as a set to compare."""
    found = []
    for row in range(len(batch.tokens)):
        ids = batch.segment_ids[row]
        prefixes = ids if batch.prefix_ids is None else batch.prefix_ids[row]
        continued = set(prefixes[prefixes != ids].tolist())  # of prompts that are shared: no trajectories
        for segment in sorted(set(range(1, ids.max() + 1)) - continued):
            at = np.flatnonzero(ids == segment)
            if prefixes[at[0]] != segment:
                at = np.concatenate([np.flatnonzero(ids == prefixes[at[0]]), at])
            assert (np.diff(at) >= 1).all() and (batch.positions[row, at] == np.arange(len(at))).all()
            assert (batch.targets[row, at[:-1]] == batch.tokens[row, at[1:]]).all()
            sampled = at[batch.mask[row, at]]
            text = (*batch.tokens[row, at], batch.targets[row, at[-1]])
            found.append(
                (
                    tuple(map(int, text)),
                    len(sampled),
                    tuple(batch.behavior_logprobs[row, sampled]),
                    tuple(batch.advantages[row, sampled]),
                    tuple(batch.version[row, sampled]),
                )
            )
    return sorted(found)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 6),
    size=st.integers(1, 5),
    shards=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2, 4]),
    share=st.booleans(),
    splits=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_every_trajectory_stands_once_in_one_row(seed, n, size, shards, micro, share, splits):
    scored = cases.groups(n, size, seed)
    section = cases.section(micro_batches=micro)
    batch, shape = packed(scored, section, shards, share_prompts=share, splits=1 if share else splits)
    advantages = estimate(
        "grpo", np.concatenate([g.rewards for g in scored]), np.repeat([g.group_id for g in scored], size)
    )
    samples = [s for g in scored for s in g.samples]
    want = sorted(
        (
            tuple(map(int, [*s.prompt_ids, *s.out_ids])),
            len(s.out_ids),
            tuple(s.logprobs),
            (a,) * len(s.out_ids),
            (0,) * len(s.out_ids),
        )
        for s, a in zip(samples, advantages)
    )
    assert trajectories(batch) == want
    prefixes = batch.segment_ids if batch.prefix_ids is None else batch.prefix_ids
    counted = [  # tokens of each segment, and of the one that it continues
        (int((ids == segment).sum()), int((ids == prefix).sum()) * int(prefix != segment))
        for ids, before in zip(batch.segment_ids, prefixes)
        for segment, prefix in sorted(set(zip(ids[ids > 0].tolist(), before[ids > 0].tolist())))
    ]
    assert sorted(map(tuple, batch.lengths.T.tolist())) == sorted(counted)
    assert batch.tokens.shape == (shape.rows, shape.tokens) and shape.rows % (shards * micro) == 0
    weighed = batch.loss_weights > 0
    np.testing.assert_array_equal(weighed, batch.mask)
    assert batch.loss_weights.sum() == pytest.approx(1.0, abs=1e-5)
    per_micro = (batch.segment_ids > 0).any(1).reshape(-1, micro).sum(0)
    filled = per_micro > 0
    assert filled[: filled.sum()].all()  # empty micro-batches come last
    assert (per_micro[: max(filled.sum() - 1, 0)] == shape.rows // micro).all()


@given(seed=st.integers(0, 10_000), n=st.integers(1, 40), rows=st.integers(1, 12), tokens=st.integers(12, 40))
@settings(max_examples=60, deadline=None)
def test_each_sample_stands_in_the_first_row_with_room(seed, n, rows, tokens):
    draw = np.random.default_rng(seed)
    shared = draw.integers(0, 6, 5)
    items = [layout.Item(bytes([p]), int(shared[p]), int(draw.integers(1, 7))) for p in draw.integers(0, 5, n)]
    shape = layout.BatchShape(rows=rows, tokens=tokens, micro_batches=1, share_prompts=True)
    free, holding, want = [tokens] * rows, {i.prompt: [] for i in items}, {}
    total = {i.prompt: sum(j.length for j in items if j.prompt == i.prompt and j.shared) for i in items}
    for i in sorted(range(n), key=lambda i: (-total[items[i].prompt], items[i].prompt, -items[i].length, i)):
        prompt, own, length = items[i]
        first = [r for r in holding[prompt] if free[r] >= length]
        first += [r for r in range(rows) if free[r] >= own + length]
        if not first:
            with pytest.raises(ValueError, match="do not fit"):
                layout.places_of(items, shape)
            return
        want[i] = first[0]
        free[first[0]] -= length + (own if first[0] not in holding[prompt] else 0)
        holding[prompt] += [first[0]] if own and first[0] not in holding[prompt] else []
    assert [place.row for place in layout.places_of(items, shape)[0]] == [want[i] for i in range(n)]


def crossing(places, items, size):
    """Rows with an item that stands in two short rows of this size."""
    return {
        place.row
        for place, item in zip(places, items)
        if place.start // size != (place.start + item.length - 1) // size
    }


def test_short_samples_stand_in_short_rows_behind_the_long_ones():
    items = [layout.Item(b"", 0, n) for n in (3, 9, 4, 2, 4, 16, 3, 4, 1, 4, 4, 2)]
    shape = layout.BatchShape(rows=8, tokens=16, micro_batches=4, splits=4)
    places, _ = layout.places_of(items, shape)
    order = shape.row_order().tolist()  # rows 0 and 1 of it are the first micro-batch
    assert {order.index(row) for row in crossing(places, items, 4)} == {0, 1}
    assert (order.index(places[5].row), order.index(places[1].row)) == (0, 1)
    for row in {place.row for place in places}:
        mine = sorted(
            (place.start, item.length, place.segment) for place, item in zip(places, items) if place.row == row
        )
        assert all(a + n <= b for (a, n, _), (b, _, _) in itertools.pairwise(mine))
        assert [segment for _, _, segment in mine] == list(range(1, len(mine) + 1))  # from left to right


def test_rows_are_whole_where_short_ones_do_not_hold_all_samples():
    items = [layout.Item(b"", 0, 5)] * 6  # a short row of 8 holds one, a row of 16 three
    few, enough = (layout.BatchShape(rows=rows, tokens=16, micro_batches=1, splits=2) for rows in (2, 3))
    assert crossing(layout.places_of(items, few)[0], items, 8) == {0, 1}
    assert crossing(layout.places_of(items, enough)[0], items, 8) == set()


@pytest.mark.parametrize("micro,shards,sent", [(2, 1, 1), (6, 2, 2), (24, 1, 6), (1, 2, 1)])
def test_only_micro_batches_that_hold_tokens_are_made_of_a_large_batch(micro, shards, sent, monkeypatch):
    """What is left out is empty, and what stands is the whole batch's, micro-batch by micro-batch."""
    scored, sizes = cases.groups(5, 4), {"rows": 24, "micro_batches": micro, "share_prompts": True}
    whole, shape = packed(scored, shards=shards, **sizes)
    assert not whole.arrays().keys() & {"rows", "group_ids", "sent", "lengths"}
    monkeypatch.setattr(layout, "WHOLE_PLACES", 0)
    part, _ = packed(scored, shards=shards, **sizes)
    assert part.shape == whole.shape == whole.tokens.shape == (24, shape.tokens)
    assert part.tokens.shape[0] == sent * 24 // micro
    for name, x in part.arrays().items():
        split = whole.arrays()[name].reshape(24 // micro, micro, -1)
        np.testing.assert_array_equal(x, split[:, :sent].reshape(x.shape))
        assert not whole.segment_ids.reshape(24 // micro, micro, -1)[:, sent:].any()


@pytest.mark.parametrize("changes", [{}, {"share_prompts": True}, {"skip_zero_advantage": True}, {"pack_tokens": 64}])
@pytest.mark.parametrize("scores", [False, True])
def test_the_parts_of_the_processes_are_the_rows_of_the_whole(scores, changes, monkeypatch):
    """Each process packs the rows of its shards, and all of them what one process packs, also of a step of two updates
    that the models have scored, and where the last micro-batches are left out."""
    monkeypatch.setattr(layout, "WHOLE_PLACES", 0)
    section = cases.section(
        advantage="gae" if scores else "grpo", value_learning_rate=0.1 * scores, overlong_filter=True, micro_batches=6
    )
    groups = cases.groups(6, 5, seed=7)
    equal = dataclasses.replace(cases.groups(7, 5)[6], rewards=np.ones(5, np.float32))
    every = [truncate(groups[0], 2), *groups[1:], equal]
    shape = layout.layout(
        **{"pack_tokens": section.pack_tokens, "rows": 48, "micro_batches": 6, "samples": 35, "shards": 4,
           "max_tokens": cases.MAX_PROMPT + cases.MAX_NEW} | changes
    )  # fmt: skip

    def score(batch):
        """A value of every place of all rows, whichever this process packs."""
        values = np.random.default_rng(1).normal(size=(batch.sent.rows, batch.sent.tokens)).astype(np.float32)
        return {"old_logprobs": values, "values": -values}

    def parts(held):
        here = dataclasses.replace(shape, held=held)
        return pack.pack_step(
            [every[::2], every[1::2]], here, Prepare(section, cases.MAX_NEW), score if scores else None
        )

    whole = parts(None)
    assert whole[0].sent.rows < 48 and ("returns" in whole[0].arrays()) == scores
    seen = [np.zeros(len(update.tokens), int) for update in whole]
    for held in ((1,), (0, 3), (2,)):
        for update, (one, part) in enumerate(zip(whole, parts(held), strict=True)):
            assert part.shape == one.shape and part.group_ids == one.group_ids
            np.testing.assert_array_equal(part.lengths, one.lengths)
            rows = part.sent.local_rows()
            mine = np.flatnonzero(rows >= 0)
            assert rows[mine].tolist() == list(range(len(part.tokens))), "in their order"
            seen[update][mine] += 1
            assert part.arrays().keys() == one.arrays().keys()
            for name, x in part.arrays().items():
                np.testing.assert_array_equal(x, one.arrays()[name][mine], name)
    assert all((times == 1).all() for times in seen)


def test_rows_of_a_micro_batch_are_dealt_over_the_shards():
    order = layout.BatchShape(rows=16, tokens=8, micro_batches=2, shards=4).row_order()
    assert sorted(order) == list(range(16))
    first = order[:8]
    assert (first % 2 == 0).all()  # micro-batch 0 = even rows
    assert (first[:4] // 4).tolist() == [0, 1, 2, 3]  # one row for each shard before a second for any


def test_the_order_of_groups_and_their_neighbours_do_not_matter():
    scored = cases.groups(5, 3)
    a, _ = packed(scored)
    b, _ = packed(scored[::-1])
    for name, x in a.arrays().items():
        np.testing.assert_array_equal(x, b.arrays()[name])
    assert a.group_ids == b.group_ids == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "grpo"])
def test_advantages_are_of_the_whole_step_and_denominators_of_each_update(advantage):
    section = cases.section(advantage=advantage)
    groups = cases.groups(6, seed=5)
    whole, shape = packed(groups, section)
    parts = pack.pack_step([groups[0::2], groups[1::2]], shape, Prepare(section, cases.MAX_NEW))
    assert sorted(t for part in parts for t in trajectories(part)) == trajectories(whole)
    assert [part.group_ids for part in parts] == [(0, 2, 4), (1, 3, 5)]
    for part in parts:
        assert part.loss_weights.sum() == pytest.approx(1.0, rel=1e-5)


def test_observed_tokens_and_spans():
    """Observed tokens are no targets and no version's; that of a sampled one is its span's, not the newest."""
    sample = Sample(
        id=SampleId(0, 0),
        prompt_ids=np.array([1, 2], np.int32),
        out_ids=np.array([3, 4, 5, 6], np.int32),
        logprobs=np.array([-1, np.nan, -2, -3], np.float32),
        mask=np.array([True, False, True, True]),
        spans=(Span(version=3, start=0, stop=3), Span(version=5, start=3, stop=4)),
        finish="stop",
    )
    group = ScoredGroup(group_id=0, version=3, samples=(sample,), rewards=np.float32([2.0]), parts={})
    batch, _ = packed([group])
    assert batch.mask[0, :6].tolist() == [False, True, False, True, True, False]
    assert batch.behavior_logprobs[0, :6].tolist() == [0, -1, 0, -2, -3, 0]
    assert batch.version[0, :6].tolist() == [-1, 3, -1, 3, 5, -1]
    assert batch.targets[0, :5].tolist() == [2, 3, 4, 5, 6]


def test_padding_equal_to_the_end_token_is_no_target():
    """Token 0 is both padding and the end id: only the sampled one counts."""
    sample = Sample(
        id=SampleId(0, 0),
        prompt_ids=np.array([7], np.int32),
        out_ids=np.array([4, 0], np.int32),
        logprobs=np.float32([-1, -2]),
        mask=np.ones(2, bool),
        finish="stop",
        spans=(Span(version=0, start=0, stop=2),),
    )
    batch, _ = packed([ScoredGroup(group_id=0, version=0, samples=(sample,), rewards=np.float32([1.0]), parts={})])
    assert batch.mask.sum() == 2 and batch.targets[0, 1] == 0 and batch.mask[0, 1] and not batch.mask[0, 2]


def truncate(group, index):
    samples = tuple(dataclasses.replace(s, finish="length") if i == index else s for i, s in enumerate(group.samples))
    return dataclasses.replace(group, samples=samples)


def test_overlong_filter_keeps_group_statistics():
    scored = [truncate(cases.groups(1, 4)[0], 2)]
    plain, _ = packed(scored)
    filtered, _ = packed(scored, cases.section(overlong_filter=True))
    lengths = [len(s.out_ids) for s in scored[0].samples]
    assert filtered.mask.sum() == plain.mask.sum() - lengths[2]
    np.testing.assert_array_equal(filtered.advantages[filtered.mask], plain.advantages[filtered.mask])
    assert filtered.loss_weights.sum() == pytest.approx(1.0, abs=1e-5)


def test_overlong_penalty_lowers_the_reward_of_long_samples():
    group = cases.groups(1, 2)[0]
    rng = np.random.default_rng(0)
    samples = tuple(cases.sample(rng, 0, i, group.samples[0].prompt_ids, length=n) for i, n in enumerate((4, 12)))
    group = dataclasses.replace(group, samples=samples, rewards=np.float32([1.0, 1.0]))
    batch, _ = packed([group], cases.section(overlong_cache=4, advantage="rloo"))
    got = sorted(set(batch.advantages[batch.mask].tolist()))
    assert got == [-1.0, 1.0]  # the penalty of the full length is -1


def test_too_much_and_too_long_are_refused():
    scored = cases.groups(4, 4)
    with pytest.raises(ValueError, match="do not fit into 1 rows of 32: raise trainer.rows"):
        packed(scored, rows=1)
    with pytest.raises(ValueError, match="pack_tokens=16 is shorter than the longest sample: 19 tokens"):
        packed(scored, pack_tokens=16)
    with pytest.raises(ValueError, match="rows=6 is not a multiple of micro_batches x data-parallel shards = 4"):
        packed(scored, rows=6, shards=4)


def test_worst_case_fits_the_derived_shape():
    rng = np.random.default_rng(0)
    prompt = np.ones(cases.MAX_PROMPT, np.int32)
    samples = tuple(cases.sample(rng, 0, i, prompt, length=cases.MAX_NEW) for i in range(7))
    group = ScoredGroup(group_id=0, version=0, samples=samples, rewards=rng.normal(size=7).astype(np.float32), parts={})
    batch, shape = packed([group])
    assert shape.rows == 7 and batch.mask.sum() == 7 * cases.MAX_NEW


def test_store_gives_each_group_once():
    groups = pack.MemoryGroupStore()
    scored = cases.groups(3, 1)
    for group in scored:
        groups.put(group)
    with pytest.raises(ValueError, match="group 1 is already in the store"):
        groups.put(cases.groups(3, 1)[1])
    assert groups.take((2, 0)) == (scored[2], scored[0])
    with pytest.raises(ValueError, match=r"cannot take groups \(1, 0\): not in the store \[0\]"):
        groups.take((1, 0))
    assert len(groups) == 1  # a refused take removes nothing
    with pytest.raises(ValueError, match="named twice"):
        groups.take((1, 1))


def test_a_shared_prompt_stands_once_a_row():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, cases.MODEL.vocab_size, 6).astype(np.int32)
    samples = tuple(cases.sample(rng, 0, i, prompt, length=9) for i in range(4))
    group = ScoredGroup(group_id=0, version=0, samples=samples, rewards=np.arange(4, dtype=np.float32), parts={})
    batch, _ = packed([group], max_tokens=15, share_prompts=True)
    # rows of 32: 5 tokens of the prompt and 9 of each sample, so three samples in the first row and one in the second
    assert [int((row > 0).sum()) for row in batch.segment_ids] == [5 + 3 * 9, 5 + 9]
    assert batch.prefix_ids[0].tolist() == [1] * 32 and batch.positions[0, 5:14].tolist() == list(range(5, 14))
    alone, _ = packed([group], max_tokens=15)
    assert alone.prefix_ids is None and trajectories(batch) == trajectories(alone)


def test_where_no_sample_moves_the_weights_one_is_kept_for_its_metrics():
    scored = [dataclasses.replace(g, rewards=np.ones(4, np.float32)) for g in cases.groups(3, 4)]
    batch, _ = packed(scored, skip_zero_advantage=True)
    every, _ = packed(scored)
    assert len(trajectories(batch)) == 1 and batch.group_ids == every.group_ids
    assert not batch.advantages.any() and batch.loss_weights.sum() < every.loss_weights.sum()
