"""Narrower decode calls: few rows take the quickest that holds them, with the same tokens."""

import dataclasses
import re
from unittest import mock

import numpy as np
import pytest

from dora_jax.rollout.drafts import PATIENCE, PAYS, CallCosts
from dora_jax.rollout.shapes import shapes_of
from dora_jax.types import SampleId
from tests.fakes.engine_rig import finish, ids, new_engine, submit, weights
from tests.fakes.plan_device import SECTION, FakeDevice, request

BOTH = dataclasses.replace(SECTION, narrow_rows=2, narrow_cost=0.5, drafts=3, draft_cost=0.6)


def test_few_rows_take_the_narrow_call_where_it_is_quicker():
    costs = CallCosts(shapes_of(BOTH))
    assert [costs.rows(samples, 1) for samples in (1, 2, 3)] == [2, 2, 4]
    assert [costs.of_draft(rows, 1) for rows in (2, 3)] == [0.6 / 0.5, 0.6]
    costs.verify[2] = 0.01
    assert costs.of_draft(2, 2) == 1 / SECTION.decode_steps and costs.of_draft(3, 2) == 0.01
    costs.narrow[2, 1] = PAYS + 0.01
    assert costs.rows(1, 1) == 4 and costs.of_draft(1, 1) == 0.6 and costs.rows(1, 2) == 2
    assert CallCosts(shapes_of(dataclasses.replace(BOTH, narrow_cost=0.0))).rows(1, 1) == 4  # not measured yet
    assert CallCosts(shapes_of(SECTION)).rows(1, 1) == 4


def test_narrower_calls_have_a_multiple_of_the_rows_of_the_one_before_and_the_quickest_is_taken():
    wide = dataclasses.replace(SECTION, slots=32, pages=256, narrow_rows=2, narrow_cost=0.2)
    costs = CallCosts(shapes_of(wide))
    assert [costs.rows(samples, 1) for samples in (1, 2, 3, 8, 9, 32)] == [2, 2, 8, 8, 32, 32]
    costs.narrow[2, 1] = costs.narrow[8, 1] + 0.01
    assert costs.rows(1, 1) == 8
    assert shapes_of(dataclasses.replace(wide, narrow_rows=0, ladder="on")).rungs == (1, 2, 4, 8, 16)


def test_a_ladder_compiles_a_narrower_call_once_the_wider_ones_have_cost_as_much():
    costs = CallCosts(shapes_of(dataclasses.replace(SECTION, ladder="on")))
    assert costs.use(1, 1) == 4 and costs.next_rung() is None  # of an engine without a warm-up
    costs.decode_s, costs.compile_s = {1: 2.0, 2: 3.0}, {1: 5.0 / PATIENCE, 2: 5.0 / PATIENCE}
    assert [costs.use(samples, 1) for samples in (1, 1, 2, 3, 4)] == [4] * 5 and costs.next_rung() is None
    assert costs.use(1, 2) == costs.use(1, 2) == 4
    assert costs.next_rung() == (1, 2)
    costs.narrow[1, 2] = 0.5
    assert costs.next_rung() is None and costs.use(1, 2) == 1
    assert costs.use(1, 1) == 4
    assert costs.next_rung() == (1, 1)
    costs.narrow[1, 1] = 2.0  # measured, and no quicker
    assert costs.use(1, 1) == 4 and costs.next_rung() is None


def test_a_ladder_takes_the_shortest_context_that_is_there_and_compiles_the_one_that_is_missed():
    section = dataclasses.replace(SECTION, ladder="on")
    shapes, costs = shapes_of(section), CallCosts(shapes_of(section))
    assert len(shapes.decode_buckets) > 1 and shapes.first_buckets == shapes.decode_buckets[-1:]
    assert shapes_of(dataclasses.replace(section, drafts=3, draft_cost=0.6)).first_buckets == shapes.decode_buckets
    assert costs.context(1) == 1  # of an engine without a warm-up
    longest = shapes.decode_buckets[-1]
    costs.decode_s, costs.compile_s = {longest: 2.0}, {longest: 9.0}
    assert costs.context(longest) == longest and costs.next_rung() is None
    assert costs.context(1) == longest and costs.next_rung() == (4, 1)
    costs.climbed(4, 1, 1.0, 1.0)
    assert costs.context(1) == 1 and costs.next_rung() is None
    assert costs.use(1, 1) == 4 and costs.next_rung() is None  # a narrower one waits as long as any


def test_a_replay_takes_the_context_that_is_there_and_compiles_a_shorter_one_where_it_is_missed():
    section = dataclasses.replace(SECTION, ladder="on")
    costs, longest = CallCosts(shapes_of(section)), shapes_of(section).decode_buckets[-1]
    assert costs.replayed(1, 1) == longest and costs.replayed(4, 1) == 1 and costs.next_rung() is None
    costs.decode_s, costs.compile_s = {longest: 2.0}, {longest: 5.0 / PATIENCE}
    assert [costs.replayed(1, 1) for _ in range(3)] == [longest] * 3 and costs.next_rung() == (1, 1)
    costs.climbed(1, 1, 1.0, 2.0)
    assert costs.replayed(1, 1) == 1 and costs.next_rung() is None
    plain = CallCosts(shapes_of(dataclasses.replace(SECTION, narrow_rows=1)))
    assert plain.replayed(1, 1) == 1  # compiled at start


def test_a_replay_decodes_each_sample_in_calls_of_the_rows_it_wants():
    device = FakeDevice(dataclasses.replace(SECTION, exact=True, narrow_rows=1, narrow_cost=0.5))
    wanted = {0: [1] * 4 + [4] * 8, 1: [4] * 8 + [1] * 4, 2: [0] * 12}  # 0: it does not know
    for group, rows in wanted.items():
        device.add(request(group, n_prompt=5))
        seq = device.scheduler.seqs[SampleId(group, 0)]
        seq.forced, seq.forced_rungs = np.full(30, -1, np.int32), np.array([*rows, *[4] * 18])
    device.finish(lambda id: 12)
    calls = [call for plan in device.plans for call in plan.decodes]
    taken = {group: [] for group in wanted}
    for call in calls:
        for seq, steps in call.rows:
            taken[seq.id.group_id] += [len(call.control)] * steps
    assert taken == wanted | {2: [4] * 12}
    assert any(len(call.rows) == 2 for call in calls)


def test_the_plan_follows_the_live_rows_of_each_version():
    device = FakeDevice(dataclasses.replace(BOTH, drafts=0))
    for index in range(3):
        device.add(request(0, index, n_prompt=5))
    device.add(request(1, 0, version=1, n_prompt=5))
    device.finish(lambda id: 8 if id == SampleId(0, 1) else 30)
    shapes = [{call.version: (len(call.rows), len(call.control)) for call in plan.decodes} for plan in device.plans]
    assert {0: (3, 4), 1: (1, 2)} in shapes and {0: (2, 2), 1: (1, 2)} in shapes


def test_a_narrow_call_is_narrower():
    with pytest.raises(ValueError, match="rollout.narrow_rows 4 is not less than the 4 rows of a decode call"):
        shapes_of(dataclasses.replace(SECTION, narrow_rows=4))


@pytest.mark.slow
def test_the_same_tokens_with_a_narrow_call_and_no_shape_compiled_after_warmup():
    done = []
    for narrow in (0, 2):
        engine = new_engine(narrow_rows=narrow)
        engine.warmup()
        compiled = engine.compiled
        assert all(0 < cost for cost in engine.scheduler.decoding.costs.narrow.values())
        engine.scheduler.decoding.costs.narrow = {(narrow, blocks): 0.5 for blocks in engine.shapes.decode_buckets}
        engine.load(0, weights(engine))
        for id in ids():
            submit(engine, id)
        done.append(finish(engine))
        assert engine.compiled == compiled
    wide, narrow = done
    assert len(wide) == 8
    for id, sample in wide.items():
        np.testing.assert_array_equal(narrow[id].out_ids, sample.out_ids)
        np.testing.assert_allclose(narrow[id].logprobs, sample.logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_ladder_compiles_beside_what_runs_and_samples_the_same_tokens():
    plain, engine = new_engine(), new_engine(ladder="on")
    costs = engine.scheduler.decoding.costs
    engine.warmup()
    longest = engine.shapes.decode_buckets[-1]
    assert engine.shapes.rungs and set(costs.decode_s) == set(costs.compile_s) == {longest}
    costs.compile_s = dict.fromkeys(costs.compile_s, 0.0)  # any call that is wider than it need be is one too many
    wide, narrow, widths = [], [], {1, engine.shapes.rows}

    def sampled(each):
        for id in ids():
            submit(each, id)
        return finish(each)

    for each, done in (plain, wide), (engine, narrow):
        each.load(0, weights(each))
        with mock.patch.object(each.device, "climb", return_value=False):
            done.append(sampled(each))
    for id, sample in wide[0].items():  # whatever the context of their calls
        np.testing.assert_array_equal(narrow[0][id].logprobs, sample.logprobs)
    while {rows for rows, _ in engine.calls.rungs} != widths:  # compiled by then
        narrow.append(sampled(engine))
    assert set(engine.calls.rungs) == set(costs.narrow)
    assert {blocks for rows, blocks in costs.narrow if rows > 1} == set(costs.decode_s) - {longest}
    costs.narrow = dict.fromkeys(costs.narrow, 0.5)
    with mock.patch.object(engine.device, "generate", wraps=engine.device.generate) as generate:
        narrow.append(sampled(engine))
    assert {len(call.args[1]) for call in generate.mock_calls if call.args} == {1, engine.shapes.rows}
    for again in narrow:
        for id, sample in wide[0].items():
            np.testing.assert_array_equal(again[id].out_ids, sample.out_ids)
            np.testing.assert_allclose(again[id].logprobs, sample.logprobs, rtol=0, atol=1e-4)


def test_a_prefill_call_copies_no_pool():
    """Here a prompt with a past, whose call reads pages of the pool that it writes to."""
    calls = new_engine(pages=97).calls
    call, arguments, static = calls.programs()[f"prefill {calls.shapes.prefill_buckets[-1]}"]
    text = call.lower(*arguments, **static).compile().as_text()
    assert static["blocks"] and text.count("scatter") > 1
    assert not re.findall(r"= f32\[98,\S* copy\(", text)
