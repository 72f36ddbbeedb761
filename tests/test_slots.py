"""JetStream's verbs over the engine: the same samples as by `submit`, one prefill a group, slots freed."""

import numpy as np
import pytest

from dora_jax.rollout.jetstream import Slots
from dora_jax.rollout.pages import OutOfPages
from dora_jax.types import SampleId
from tests.fakes.engine_rig import VOCAB, assert_undisturbed, ids, loaded, prompt


def run(slots, limit=50):
    """Generates until nothing runs: (slot -> (tokens, log-probs) as handed out, samples)."""
    out, done = {}, []
    for _ in range(limit):
        if slots.engine.idle:
            return out, done
        results, finished = slots.generate()
        done += finished
        for slot in range(slots.max_concurrent_decodes):
            data = results.get_result_at_slot(slot)
            tokens, logprobs = out.setdefault(slot, ([], []))
            tokens += data.tokens[data.valid].tolist()
            logprobs += data.logprobs[data.valid].tolist()
            assert data.length in (0, len(tokens))
    raise AssertionError("not idle")


def test_a_group_shares_one_prefill_and_its_samples_are_what_they_are_elsewhere():
    with loaded("a", versions=(0, 1)) as engine:
        calls = []
        launch = engine.device.prefill
        engine.device.prefill = lambda *args: calls.append(args[1]) or launch(*args)
        slots, group = Slots(engine), ids((3,), size=3)
        prefix = slots.prefill(version=0, tokens=prompt(3))
        computed = len(calls)
        other = slots.prefill(version=1, tokens=prompt(3))
        slots.bulk_insert(prefix, (0, 2, 3), ids=group, max_new_tokens=24)
        slots.insert(other, 1, id=SampleId(3, 7), max_new_tokens=24)
        out, done = run(slots)
        engine.device.prefill = launch
        engine.release(prefix)
        engine.release(other)
        assert computed == 3 and len(calls) == 6  # 19 positions in chunks of 8, once a version; none at the insertion
    by_id = {sample.id: sample for sample in done}
    assert len(by_id) == 4 and by_id[SampleId(3, 7)].version == 1
    for slot, id in ((0, group[0]), (1, SampleId(3, 7)), (2, group[1]), (3, group[2])):
        assert_undisturbed(by_id[id])
        assert out[slot][0] == by_id[id].out_ids.tolist()
        np.testing.assert_array_equal(np.float32(out[slot][1]), by_id[id].logprobs)


def test_a_slot_is_one_samples_until_it_is_freed():
    with loaded("a") as engine:
        slots = Slots(engine)
        prefix = slots.prefill(version=0, tokens=prompt(2))
        slots.insert(prefix, 1, id=SampleId(2, 0), max_new_tokens=24)
        with pytest.raises(RuntimeError, match="slot 1 holds"):
            slots.insert(prefix, 1, id=SampleId(2, 1), max_new_tokens=24)
        with pytest.raises(ValueError, match="slot 4 is none of the 4"):
            slots.insert(prefix, 4, id=SampleId(2, 1), max_new_tokens=24)
        with pytest.raises(RuntimeError, match="needs version 5"):
            slots.prefill(version=5, tokens=prompt(2))
        slots.generate()
        slots.free_resource(1)
        slots.free_resource(1)
        assert engine.idle
        slots.insert(prefix, 1, id=SampleId(2, 1), max_new_tokens=24)
        _, (sample,) = run(slots)
        engine.release(prefix)
    assert_undisturbed(sample)


def test_a_pinned_prefix_is_not_evicted_and_is_counted():
    with loaded("small") as engine:  # 20 pages of 4
        tokens = np.arange(6, 6 + 20) % VOCAB
        held = [engine.prefill(np.roll(tokens, i), 0) for i in range(4)]  # 5 pages each
        assert engine.free_pages == 0
        engine.check()
        with pytest.raises(OutOfPages, match="0 are available"):
            engine.prefill(np.roll(tokens, 7), 0)
        with pytest.raises(RuntimeError, match="version 0 has 12 prefix nodes in use"):
            engine.drop(0)
        for prefix in held:
            engine.release(prefix)
        engine.check()
        assert engine.free_pages == 20
