"""Drafts from siblings: the same tokens as without, through limits, keep sets, few pages and moves; tried only where
measured acceptance and cost say that they pay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_jax.config import RolloutSection
from dora_jax.rollout import drafts
from dora_jax.rollout.drafts import EVERY, NONE, RESTS, SUFFIXES, Drafter
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import shapes_of
from dora_jax.types import SampleId
from tests.fakes.engine_rig import SIZES, finish, ids, new_engine, submit, weights

SHAPES = shapes_of(RolloutSection(**SIZES | dict(prefill_call_tokens=8, drafts=5, draft_cost=0.5)))
COST = SHAPES.draft_cost
tokens = st.lists(st.integers(0, 2), max_size=40)  # few ids, so that suffixes return


def seq_of(index, prompt, out, room=64, group=0):
    return Seq(
        InFlightSample(
            id=SampleId(group, index),
            version=0,
            prompt_ids=np.asarray(prompt, np.int32),
            out_ids=np.asarray(out, np.int32),
            logprobs=np.zeros(len(out), np.float32),
            max_new_tokens=len(out) + room,
        ),
        arrival=0,
        announce=False,
        max_context=len(prompt) + len(out) + room,
    )


def followed(others, sequence, n_prompt):
    """What followed the longest suffix of `sequence` where it was met last: by trying every place."""
    for n in SUFFIXES:
        for other in reversed(others):
            for at in range(len(other) - 1, max(n_prompt, n) - 1, -1):
                if len(sequence) >= n and other[at - n : at] == sequence[-n:]:
                    found = other[at : at + SHAPES.drafts]
                    return (found * SHAPES.drafts)[: SHAPES.drafts] if other is sequence else found
    return []


@settings(max_examples=60, deadline=None)
@given(tokens, tokens, tokens)
def test_a_guess_is_what_followed_the_longest_suffix_where_it_was_met_last(first, second, mine):
    prompt, drafter = [1, 2, 0], Drafter(SHAPES)
    seqs = [seq_of(i, prompt, out) for i, out in enumerate((first, second, mine))]
    found = drafter.decide([seqs[2]], 0.0, seqs)  # a call costs nothing: every guess is worth it
    sequences = [prompt + out for out in (first, second, mine)]
    want = followed(sequences, sequences[-1], len(prompt))
    assert found[0].tolist() == want + [NONE] * (SHAPES.drafts - len(want))


def test_what_never_holds_is_not_tried_again_and_what_holds_is():
    drafter = Drafter(SHAPES)
    seq = seq_of(0, [1, 2], [3, 4, 5] * 6)
    assert drafter.promising([seq], COST)
    for _ in range(20 * EVERY):
        drafter.learn(seq, None, np.array([9, 9], np.int32))  # its guess says 3
    assert not drafter.promising([seq], COST) and drafter.decide([seq], COST, [seq]) is None
    for _ in range(200 * EVERY):  # guesses are compared with what decode calls draw, so that better times are noticed
        drafter.learn(seq, None, np.array([3, 4, 5, 3], np.int32))
    asked = [drafter.decide([seq], COST, [seq]) for _ in range(RESTS + 1)]
    assert asked[:RESTS] == [None] * RESTS and asked[RESTS].tolist() == [[3, 4, 5, 3, 4]]
    assert not drafter.verified  # no call was made for it
    assert not drafter.promising([seq] * (SHAPES.draft_rows + 1), COST)


def test_a_draft_leaves_room_for_the_token_that_is_drawn_behind_it():
    drafter, seq = Drafter(SHAPES), seq_of(0, [1, 2], [3, 4, 5] * 6, room=3)
    assert drafter.decide([seq], 0.0, [seq]).tolist() == [[3, 4, NONE, NONE, NONE]]


def test_samples_that_have_left_draft_until_newer_groups_take_their_room(monkeypatch):
    drafter, left = Drafter(SHAPES), seq_of(0, [1, 2], [3, 4, 5] * 6)
    drafter.end(left)
    fresh = seq_of(1, [1, 2], [])
    assert drafter.decide([fresh], 0.0, [fresh])[0, 0] == 3
    monkeypatch.setattr(drafts, "ENDED_TOKENS", 30)
    drafter.end(seq_of(0, [1, 2], [6] * 20, group=1))
    assert drafter.decide([fresh], 0.0, [fresh])[0, 0] == NONE
    other = seq_of(1, [1, 2], [], group=1)
    assert drafter.decide([other], 0.0, [other])[0, 0] == 6


def test_samples_of_other_engines_draft_and_what_is_reported_again_goes_on(monkeypatch):
    drafter, fresh = Drafter(SHAPES), seq_of(0, [1, 2], [7, 8, 3, 4])
    drafter.know(SampleId(0, 1), np.array([3, 4, 5, 6], np.int32))
    drafter.know(SampleId(0, 2), np.array([7, 8, 3, 4, 9], np.int32))
    assert drafter.draft(fresh).tolist()[:2] == [9, NONE]  # the longest suffix
    drafter.know(SampleId(0, 2), np.array([7, 8, 3, 4, 9, 2, 2], np.int32))
    assert drafter.draft(fresh).tolist() == [9, 2, 2, NONE, NONE]
    for other in ([7, 8], [1, 1, 1, 1, 1, 1, 1, 1]):  # older, or of another branch
        drafter.know(SampleId(0, 2), np.array(other, np.int32))
        assert drafter.draft(fresh).tolist() == [9, 2, 2, NONE, NONE]
    monkeypatch.setattr(drafts, "ENDED_TOKENS", 12)
    drafter.know(SampleId(1, 0), np.arange(12, dtype=np.int32))
    assert drafter.draft(fresh).tolist()[0] == NONE


CASES = {
    "plain": {},
    "a token a call": dict(decode_steps=1),
    "limits and cuts": dict(top_p=0.9, min_new_tokens=4, max_repeats=3),
    "keep sets": dict(top_k=5, keep_set=True),
    "few pages": dict(decode_steps=1, pages=24),
    "greedy": dict(temperature=0.0),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_the_same_tokens_with_and_without(case):
    """A cold policy, whose siblings are alike. Half of the samples move to another engine in the middle."""
    found, drafters = [], []
    for most in (0, 5):
        engines = [
            new_engine(device, **{"temperature": 0.1, "drafts": most, "draft_cost": 0.3, **CASES[case]})
            for device in (0, 1)
        ]
        for engine in engines:
            engine.load(0, weights(engine))
        here, there = engines
        done, held = {}, 0  # tokens of drafts, by what ticks reported
        for group in range(4):
            for id in ids((group,), size=4):
                submit(here, id)
            for _ in range(5):
                result = here.tick()
                done |= {sample.id: sample for sample in result.finished}
                held += result.held
                assert result.drafted or not result.guesses
                assert result.guesses >= result.held
            for id in ids((group,), size=4)[::2]:
                if here.holds(id):
                    there.import_(here.export(id))
            if most:
                assert held <= here.scheduler.decoding.drafter.accepted
            done |= finish(here, there)
        found.append(done)
        drafters += [engine.scheduler.decoding.drafter for engine in engines]
    plain, drafted = found
    assert plain.keys() == drafted.keys() and len(plain) == 16
    for id, sample in plain.items():
        np.testing.assert_array_equal(drafted[id].out_ids, sample.out_ids)
        np.testing.assert_allclose(drafted[id].logprobs, sample.logprobs, rtol=0, atol=1e-4)
        assert drafted[id].finish == sample.finish
    assert drafters[:2] == [None, None] and sum(drafter.accepted for drafter in drafters[2:]) > 0
