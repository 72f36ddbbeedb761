"""Requests with sampling values of their own: what they draw, what they report, and that nobody else notices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder
from dora_jax.models.logits import MASKED
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.episodes import RunPrompts
from dora_jax.types import MAX_TOP_LOGPROBS, Prompt, SampleId, Sampling
from tests.fakes.engine_rig import CFG, EOS, VOCAB, finish, loaded, params

PROMPT = np.array([7, 11, 13, 17, 19], np.int32)
NEW = 12


@jax.jit
def forward(params, tokens):
    positions = jnp.arange(len(tokens))[None]
    attend = segment_attention(jnp.ones_like(positions), positions)
    hidden = decoder.forward(CFG, params, tokens[None], positions, attend)
    return decoder.logits(CFG, params, hidden)[0]


def logits_of(sample):
    """f32[U, V]: the policy's logits at each token of the response, by one forward pass."""
    tokens = np.concatenate([sample.prompt_ids, sample.out_ids])
    padded = np.pad(tokens, (0, 2 * NEW - len(tokens)))
    logits = np.asarray(forward(params(), padded))[len(sample.prompt_ids) - 1 : len(tokens) - 1]
    return np.where(np.arange(CFG.vocab_size) < VOCAB, logits, MASKED)


def changed(logits, sample, own):
    """f32[U, V]: the logits that vLLM would draw from, before temperature."""
    found = logits.astype(np.float64)
    for i in range(len(sample.out_ids)):
        for id, bias in zip(own.biased_ids, own.biases, strict=True):
            found[i, id] += bias
        counts = np.bincount(sample.out_ids[:i], minlength=CFG.vocab_size)
        seen = counts + np.bincount(sample.prompt_ids, minlength=CFG.vocab_size) > 0
        scaled = np.where(found[i] > 0, found[i] / own.repetition_penalty, found[i] * own.repetition_penalty)
        found[i] = np.where(seen, scaled, found[i])
        found[i] -= own.frequency_penalty * counts + own.presence_penalty * (counts > 0)
        if i < own.min_tokens:
            found[i, list(EOS)] = MASKED
    return found


def sampled(engine, samplings):
    """One sample a value, at once; by their order."""
    for i, own in enumerate(samplings):
        engine.submit(SampleId(i, 0), PROMPT, 0, NEW, sampling=own)
    done = finish(engine)
    return [done[SampleId(i, 0)] for i in range(len(samplings))]


GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.3)


@pytest.mark.parametrize(
    "own",
    [
        GREEDY,
        dataclasses.replace(GREEDY, min_tokens=NEW),
        dataclasses.replace(GREEDY, biased_ids=(21, 22), biases=(3.0, -2.5)),
        PENALISED,
        dataclasses.replace(PENALISED, min_tokens=6, biased_ids=(9,), biases=(1.5,)),
    ],
)
def test_the_most_likely_token_after_biases_and_penalties(own):
    with loaded("a") as engine:
        (sample,) = sampled(engine, [own])
    logits = changed(logits_of(sample), sample, own)
    best = logits.max(-1)
    np.testing.assert_allclose(logits[np.arange(len(logits)), sample.out_ids], best, rtol=0, atol=1e-4)
    plain = jax.nn.log_softmax(logits_of(sample), axis=-1)
    np.testing.assert_allclose(sample.logprobs, plain[np.arange(len(plain)), sample.out_ids], rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_log_probs_are_those_of_a_rescoring_at_the_requests_temperature(temperature):
    with loaded("a") as engine:
        (sample,) = sampled(engine, [Sampling(temperature=temperature, top_p=0.9)])
    plain = jax.nn.log_softmax(logits_of(sample) / temperature, axis=-1)
    np.testing.assert_allclose(sample.logprobs, plain[np.arange(len(plain)), sample.out_ids], rtol=0, atol=1e-4)


@pytest.mark.parametrize("own", [Sampling(top_k=2), Sampling(top_p=0.3), Sampling(min_p=0.5), Sampling(top_k=1)])
def test_no_token_is_drawn_that_a_cut_takes_away(own):
    with loaded("a") as engine:
        samples = sampled(engine, [own] * 4)
    drawn = set()
    for sample in samples:
        probs = np.asarray(jax.nn.softmax(logits_of(sample), axis=-1))
        for row, id in zip(probs, sample.out_ids, strict=True):
            order = np.sort(row)[::-1]
            ahead = order[order > row[id] * (1 + 1e-5)]
            assert len(ahead) < (own.top_k or len(order))
            assert ahead.sum() < (own.top_p or 1.0) + 1e-5
            assert row[id] >= (own.min_p or 0.0) * order[0] - 1e-6
        drawn |= {tuple(sample.out_ids.tolist())}
    assert len(drawn) == (1 if own.top_k == 1 else 4)


def test_rows_that_ask_for_nothing_draw_the_same_bits_beside_those_that_do():
    with loaded("a") as engine:
        alone = sampled(engine, [None] * 3)
        beside = sampled(engine, [None, PENALISED, None])
    for i in (0, 2):
        np.testing.assert_array_equal(alone[i].out_ids, beside[i].out_ids)
        np.testing.assert_array_equal(alone[i].logprobs, beside[i].logprobs)
    assert not np.array_equal(alone[1].out_ids, beside[1].out_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_the_most_likely_tokens_are_those_of_the_reported_distribution(temperature):
    with loaded("a") as engine:
        engine.submit(SampleId(0, 0), PROMPT, 0, NEW, sampling=Sampling(temperature=temperature, top_logprobs=3))
        while not engine.idle:
            result = engine.tick()
        (sample,), (top,) = result.finished, result.tops.values()
    plain = np.asarray(jax.nn.log_softmax(logits_of(sample) / (temperature or 1.0), axis=-1))
    best = np.sort(plain, axis=-1)[:, ::-1][:, :MAX_TOP_LOGPROBS]
    ids, logprobs = top[:, :MAX_TOP_LOGPROBS], top[:, MAX_TOP_LOGPROBS:].copy().view(np.float32)
    assert len(top) == len(sample.out_ids)
    np.testing.assert_allclose(logprobs, best, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(plain, ids, axis=1), best, rtol=0, atol=1e-4)


def test_given_tokens_are_scored_and_what_follows_is_drawn_as_behind_a_prompt():
    """A stop token among them ends nothing, and noise, penalties and min_tokens count from behind them."""
    given = [7, EOS[0], 11, 11, 13]
    own = dataclasses.replace(PENALISED, temperature=0.7, min_tokens=3)
    with loaded("a") as engine:
        engine.submit(SampleId(0, 0), [5, *given], 0, NEW, sampling=own)
        engine.submit(SampleId(0, 1), [5, *given], 0, NEW)
        behind = finish(engine)
        with_given = dataclasses.replace(own, given=tuple(given))
        engine.submit(SampleId(0, 0), [5], 0, NEW + len(given), sampling=with_given)
        engine.submit(SampleId(0, 1), [5], 0, NEW + len(given), sampling=Sampling(given=tuple(given)))
        scored = finish(engine)
    for id, sample in scored.items():
        assert sample.out_ids[: len(given)].tolist() == given
        np.testing.assert_array_equal(sample.out_ids[len(given) :], behind[id].out_ids)
        np.testing.assert_allclose(sample.logprobs[len(given) :], behind[id].logprobs, rtol=0, atol=1e-4)
    plain = jax.nn.log_softmax(logits_of(scored[SampleId(0, 1)]), axis=-1)
    scores = scored[SampleId(0, 1)].logprobs[: len(given)]
    np.testing.assert_allclose(scores, plain[np.arange(len(given)), given], rtol=0, atol=1e-4)


def test_values_of_the_run_asked_for_by_name_give_its_distribution():
    with loaded("a") as engine:
        as_run, same = sampled(engine, [None]), sampled(engine, [Sampling(temperature=1.0)])
    np.testing.assert_array_equal(as_run[0].out_ids, same[0].out_ids)


@pytest.mark.parametrize(
    "own", [PENALISED, dataclasses.replace(PENALISED, top_logprobs=2, given=(7, 9, 9, 7, 8, 6, 7))]
)
def test_a_sample_with_values_of_its_own_moves_between_engines(own):
    with loaded("a", "small") as (a, small):
        (whole,) = sampled(a, [own])
        a.submit(SampleId(0, 0), PROMPT, 0, NEW, sampling=own)
        while not a.holds(SampleId(0, 0)) or a.sampled(SampleId(0, 0)).out_ids.size < 5:
            a.tick()
        moved = a.export(SampleId(0, 0))
        assert moved.sampling is not None and 5 <= len(moved.out_ids) < len(whole.out_ids)
        small.import_(moved)
        assert (moved.top is None) == (not own.top_logprobs)
        (there,) = finish(small).values()
    np.testing.assert_array_equal(there.out_ids, whole.out_ids)
    np.testing.assert_array_equal(there.logprobs, whole.logprobs)


def test_held_out_samples_are_drawn_as_the_evaluation_says():
    class Prompts:
        def prompt_at(self, group_id):
            return Prompt(group_id=group_id, task="", uid="", text="", token_ids=PROMPT, answer=None, max_new_tokens=3)

    prompts = RunPrompts(Prompts(), 4, GREEDY)
    assert prompts.prompt_at(-3).sampling == GREEDY and prompts.prompt_at(3).sampling is None
    assert prompts.prompt_at(3).turn_tokens == 4


def test_sampling_values_travel_with_a_prompt():
    prompt = Prompt(
        group_id=1, task="", uid="", text="", token_ids=PROMPT, answer=None, max_new_tokens=3, sampling=PENALISED
    )
    biased = dataclasses.replace(prompt, sampling=Sampling(top_k=3, biased_ids=(5, 6), biases=(1.0, -2.0)))
    for each in (prompt, biased):
        assert Codec().decode(Codec().encode(each)).sampling == each.sampling
