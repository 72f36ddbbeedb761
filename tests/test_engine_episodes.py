"""Episodes: a turn's end frees the slot; what is observed is prefilled alone; nothing that happens meanwhile shows."""

import random

import jax
import numpy as np

from dora_jax.models import decoder
from dora_jax.models.logits import target_logprobs
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.rollout.migrate import observed
from dora_jax.types import SampleId
from tests.fakes.engine_rig import CFG, VOCAB, ids, loaded, params, undisturbed
from tests.fakes.episode_rig import TURN, assert_quiet, begin, play, quiet, reply


def test_a_turn_is_sampled_as_an_answer_is_and_what_is_observed_has_no_draw():
    id = SampleId(3, 0)
    sample = quiet(id)
    answer = undisturbed(id)
    first = int(np.flatnonzero(~sample.mask)[0])
    assert first <= TURN and sample.mask.sum() > first
    np.testing.assert_array_equal(sample.out_ids[:first], answer.out_ids[:first])
    np.testing.assert_array_equal(sample.logprobs[:first], answer.logprobs[:first])
    assert (sample.logprobs[~sample.mask] == 0).all() and (sample.logprobs[sample.mask] < 0).all()


def test_log_probs_of_every_turn_are_those_of_the_whole_sequence():
    @jax.jit
    def next_logprobs(params, tokens, segments, positions):
        hidden = decoder.forward(CFG, params, tokens, positions, segment_attention(segments, positions))
        return target_logprobs(CFG, params, hidden[:, :-1], tokens[:, 1:], vocab_limit=VOCAB)[0]

    samples = [quiet(id) for id in ids((2, 3))]
    tokens, segments = np.zeros((2, len(samples), 44), np.int32)
    for row, sample in enumerate(samples):
        whole = np.concatenate([sample.prompt_ids, sample.out_ids])
        tokens[row, : len(whole)], segments[row, : len(whole)] = whole, 1
    of_next = np.asarray(next_logprobs(params(), tokens, segments, np.tile(np.arange(44), (len(samples), 1))))
    for row, sample in enumerate(samples):
        assert 3 < sample.mask.sum() < len(sample.mask)
        first = len(sample.prompt_ids) - 1
        reported_by = np.where(sample.mask, of_next[row, first : first + len(sample.mask)], 0)
        np.testing.assert_allclose(reported_by, sample.logprobs, atol=1e-5)


def test_only_what_is_observed_is_prefilled():
    id = SampleId(3, 0)
    with loaded("a") as engine:
        begin(engine, id)
        prefilled = []
        plan = engine.scheduler.plan
        engine.scheduler.plan = lambda: (
            p := plan(),
            prefilled.extend((c.control[0][:3]).tolist() for c in p.prefills),
        )[0]
        waiting = []
        sample = play(engine, answer=lambda in_flight: waiting.append(in_flight))[id]
        engine.scheduler.plan = plan
    assert_quiet(sample)
    assert [start for start, _, _ in prefilled[:3]] == [0, 8, 16]
    covered = set()
    for start, length, kept in prefilled[3:]:
        new = range(start + kept, start + length)
        assert not covered & {*new}
        covered |= {*new}
    for in_flight in waiting:
        n = len(in_flight.prompt_ids) + len(in_flight.out_ids)
        assert {*range(n - 1, n - 1 + len(reply(in_flight)))} <= covered
    fed = np.flatnonzero(sample.mask[:-1] & sample.mask[1:]) + len(sample.prompt_ids)
    assert not covered & {*fed.tolist()}, "sampled tokens keep their KV"


def test_batch_mates_order_and_preemption_do_not_matter():
    for name in ("a", "small"):
        with loaded(name) as engine:
            order = ids((0, 1, 2, 3, 4, 5))
            random.Random(1).shuffle(order)
            for id in order:
                begin(engine, id)
            done = play(engine)
        assert len(done) == 12
        for sample in done.values():
            assert_quiet(sample)


def test_an_episode_that_goes_on_elsewhere_is_the_same():
    with loaded("a", "small") as (a, b):
        for id in ids((2, 3, 4)):
            begin(a, id)
        done = play(a, b, answer=lambda in_flight: b if in_flight.id.index else a)
    assert len(done) == 6
    for sample in done.values():
        assert_quiet(sample)


def test_an_episode_ends_by_length_and_never_inside_what_is_observed():
    """By its own limit, by the room that its turns have left, and by an answer that takes all of it."""
    long, short, full = SampleId(3, 0), SampleId(3, 1), SampleId(1, 0)
    with loaded("a") as engine:
        begin(engine, long, max_new_tokens=24, turn_tokens=12)
        begin(engine, short, max_new_tokens=3)
        begin(engine, full)
        full_answer = np.full(40, 9)
        done = {}
        while not engine.idle:
            result = engine.tick()
            done |= {sample.id: sample for sample in result.finished}
            for in_flight in result.waiting:
                engine.import_(observed(in_flight, full_answer if in_flight.id == full else reply(in_flight)))
            engine.check()
    assert {sample.finish for sample in done.values()} == {"length"} and len(done) == 3
    for sample in done.values():
        assert sample.mask[-1] and len(sample.prompt_ids) + len(sample.out_ids) <= engine.shapes.max_context
        assert len(sample.mask) == len(sample.out_ids) == len(sample.logprobs)
    assert done[short].mask.sum() == 3 and done[full].mask.all() and len(done[full].out_ids) <= TURN
    assert len(done[long].prompt_ids) + len(done[long].out_ids) > engine.shapes.max_context - 10


def test_a_turn_that_is_over_waits_again_without_a_prefill():
    id = SampleId(2, 0)
    with loaded("a", "small") as (a, b):
        begin(a, id)
        while not (waiting := a.tick().waiting):
            pass
        b.import_(waiting[0])
        result = b.tick()
    assert result.waiting == waiting and not result.tokens


def test_a_rewritten_turn_draws_anew_from_the_tokens_that_stay():
    """Its draws have numbers of their own, and the KV in front of what was rewritten stays."""
    id = SampleId(3, 1)
    with loaded("a") as engine:
        begin(engine, id)
        while not (waiting := engine.tick().waiting):
            pass
        (first,) = waiting
        engine.import_(observed(first, np.array([11, 12]), keep=len(first.prompt_ids) + 1))
        while not (waiting := engine.tick().waiting):
            engine.check()
    second = waiting[0]
    assert second.out_ids[:3].tolist() == [first.out_ids[0], 11, 12] and second.mask[:3].tolist() == [
        True,
        False,
        False,
    ]
    assert second.dropped == len(first.out_ids) - 1
    assert second.sampled == len(first.out_ids) + len(second.out_ids) - 3
