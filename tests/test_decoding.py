"""The narrow decode call: few rows take it where it is quicker, with the same tokens."""

import dataclasses

import numpy as np
import pytest

from dora_jax.rollout.drafts import PAYS, CallCosts
from dora_jax.rollout.shapes import shapes_of
from dora_jax.types import SampleId
from tests.fakes.engine_rig import finish, ids, new_engine, submit, weights
from tests.fakes.plan_device import SECTION, FakeDevice, request

BOTH = dataclasses.replace(SECTION, narrow_rows=2, narrow_cost=0.5, drafts=3, draft_cost=0.6)


def test_few_rows_take_the_narrow_call_where_it_is_quicker():
    costs = CallCosts(shapes_of(BOTH))
    assert [costs.is_narrow(rows, 1) for rows in (1, 2, 3)] == [True, True, False]
    assert [costs.of_draft(rows, 1) for rows in (2, 3)] == [0.6 / 0.5, 0.6]
    costs.verify[2] = 0.01
    assert costs.of_draft(2, 2) == 1 / SECTION.decode_steps and costs.of_draft(3, 2) == 0.01
    costs.narrow[1] = PAYS + 0.01
    assert not costs.is_narrow(1, 1) and costs.of_draft(1, 1) == 0.6 and costs.is_narrow(1, 2)
    assert not CallCosts(shapes_of(dataclasses.replace(BOTH, narrow_cost=0.0))).is_narrow(1, 1)  # not measured yet
    assert not CallCosts(shapes_of(SECTION)).is_narrow(1, 1)


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
@pytest.mark.usefixtures("quick_compile")
def test_the_same_tokens_with_a_narrow_call_and_no_shape_compiled_after_warmup():
    done = []
    for narrow in (0, 2):
        engine = new_engine(narrow_rows=narrow)
        engine.warmup()
        compiled = engine.compiled
        assert all(0 < cost for cost in engine.scheduler.decoding.costs.narrow.values())
        engine.scheduler.decoding.costs.narrow = dict.fromkeys(engine.shapes.decode_buckets, 0.5)
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
