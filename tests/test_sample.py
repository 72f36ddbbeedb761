"""Sampling: the noise of a token is its identity's; the cuts keep what they say; log-probs are those of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models.logits import MASKED
from dora_jax.rollout import sample
from dora_jax.rollout.sample import DrawLimits, keep, sample_key

STATIC = ("greedy", "top_k", "top_p", "min_p", "keep_set")


@jax.jit
def keys(group, indices):
    return jax.vmap(lambda index: sample_key(3, group, index))(jnp.asarray(indices))


@functools.partial(jax.jit, static_argnames=STATIC)  # as the engine draws; one operation at a time is compiled slowly
def _draw(logits, keys, positions, **options):
    return sample.draw(logits, sample.noise(keys, positions, logits.shape[-1]), positions, **options)


def draw(logits, keys, positions, limits=None, **options):
    if limits is None:
        return _draw(logits, keys, positions, **options)
    noise = sample.noise(keys, positions, logits.shape[-1])
    return jax.jit(lambda *inputs: sample.draw(*inputs, limits, **options))(logits, noise, positions)


def test_frequencies_follow_the_distribution():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    n = 20_000
    tokens, logprobs, _ = draw(jnp.tile(logits, (n, 1)), keys(0, np.arange(n)), jnp.zeros(n, jnp.int32))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, np.exp(logits), atol=0.012)
    np.testing.assert_allclose(logprobs, logits[tokens], rtol=0, atol=1e-6)


def test_frequencies_where_blocks_hold_several_ids():
    """A vocabulary that the number of blocks does not divide, one that it does; some ids cut away with their block."""
    n, rng = 20_000, np.random.default_rng(0)
    for vocab in (48, 512):
        scores = rng.normal(size=vocab).astype(np.float32)
        scores[: vocab // 4] = MASKED
        probs = np.asarray(jax.nn.softmax(scores))
        tokens, *_ = draw(jnp.tile(scores, (n, 1)), keys(0, np.arange(n)), jnp.zeros(n, jnp.int32))
        found, expected = np.bincount(tokens, minlength=vocab), n * probs
        there = expected > 0
        assert not found[~there].any()
        chi_square = ((found - expected)[there] ** 2 / expected[there]).sum()
        assert chi_square < there.sum() + 4 * np.sqrt(2 * there.sum())  # four standard deviations


def test_noise_is_of_the_identity_not_of_the_row():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32))
    positions = jnp.arange(6)
    tokens, _logprobs, _ = draw(logits, keys(-4, np.arange(6)), positions)
    order = np.array([3, 0, 5, 1, 4, 2])
    shuffled, *_ = draw(logits[order], keys(-4, np.arange(6))[order], positions[order])
    np.testing.assert_array_equal(shuffled, tokens[order])
    flat = jnp.zeros((64, 50))
    draws = [
        draw(flat, keys(group, np.arange(64)), jnp.full(64, position))[0].tolist()
        for group, position in ((-4, 0), (4, 0), (-4, 1))
    ]
    assert draws[0] != draws[1] != draws[2] != draws[0]


@pytest.mark.parametrize(
    "cut,kept",
    [
        (dict(top_k=2), [0, 1]),
        (dict(top_k=9), [0, 1, 2, 3]),
        (dict(top_p=0.5), [0]),
        (dict(top_p=0.51), [0, 1]),
        (dict(top_p=0.9), [0, 1, 2]),
        (dict(min_p=0.25), [0, 1, 2]),
        (dict(min_p=0.5), [0, 1]),
        (dict(top_k=3, top_p=0.6), [0, 1]),
        (dict(), [0, 1, 2, 3]),
    ],
)
def test_cuts_keep_what_they_say(cut, kept):
    logprobs = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    assert np.flatnonzero(keep(logprobs, **settings)[0] > MASKED).tolist() == kept
    n = 500
    tokens, reported, _ = draw(jnp.tile(logprobs, (n, 1)), keys(1, np.arange(n)), jnp.zeros(n, jnp.int32), **settings)
    assert sorted(set(tokens.tolist())) == kept
    np.testing.assert_allclose(reported, logprobs[0, tokens], rtol=0, atol=1e-6)


def test_greedy_ignores_the_noise():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32))
    tokens, logprobs, _ = draw(logits, keys(0, np.arange(6)), jnp.zeros(6, jnp.int32), greedy=True)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits).max(-1), rtol=0, atol=1e-6)


def limits(last, repeats, **changes):
    settings = dict(stop_ids=(1, 3), min_new_tokens=0, max_repeats=0) | changes
    return DrawLimits(last_B=jnp.array(last), repeats_B=jnp.array(repeats), **settings)


def test_no_stop_token_comes_too_early_and_no_token_too_often():
    logprobs = jnp.log(jnp.full((3, 4), 0.25))
    allowed = lambda cut: [np.flatnonzero(row > MASKED).tolist() for row in cut]
    early = limits([0, 0, 0], [1, 1, 1], min_new_tokens=2)
    assert allowed(early.cut(logprobs, jnp.array([0, 1, 2]))) == [[0, 2], [0, 2], [0, 1, 2, 3]]
    often = limits([2, 2, 0], [1, 2, 5], max_repeats=2)
    assert allowed(often.cut(logprobs, jnp.array([5, 5, 5]))) == [[0, 1, 2, 3], [0, 1, 3], [1, 2, 3]]
    n = 500
    many = limits([2] * n, [2] * n, max_repeats=2, min_new_tokens=9)
    tokens, reported, _ = draw(jnp.zeros((n, 4)), keys(0, np.arange(n)), jnp.zeros(n, jnp.int32), many)
    assert set(tokens.tolist()) == {0}
    np.testing.assert_allclose(reported, np.log(0.25), rtol=1e-6)  # before the cut
    greedy, _, _ = draw(
        jnp.array([[0.0, 9.0, 5.0, 7.0]]),
        keys(0, np.arange(1)),
        jnp.zeros(1, jnp.int32),
        limits([0], [1], min_new_tokens=1),
        greedy=True,
    )
    assert greedy.tolist() == [2]


def test_the_keep_set_is_what_is_drawn_from():
    """Five tokens tie for the last place of three: only those that are sent along may be drawn."""
    probs = np.array([0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1], np.float32)
    n = 500
    tokens, _, kept = draw(
        jnp.tile(jnp.log(probs), (n, 1)),
        keys(2, np.arange(n)),
        jnp.zeros(n, jnp.int32),
        top_k=3,
        top_p=1.0,
        keep_set=True,
    )
    assert set(tokens.tolist()) == {0, 1, 2} and (np.asarray(kept) == [0, 1, 2]).all()
    tokens, _, kept = draw(
        jnp.tile(jnp.log(probs), (n, 1)),
        keys(2, np.arange(n)),
        jnp.zeros(n, jnp.int32),
        top_k=3,
        top_p=0.5,
        keep_set=True,
    )
    assert set(tokens.tolist()) == {0, 1} and (np.asarray(kept) == [0, 1, -1]).all()


def test_of_equal_scores_the_first_is_taken_and_nan_gives_an_id_that_exists():
    logits = jnp.asarray(np.random.default_rng(1).integers(0, 3, (20, 7)).astype(np.float32))
    tokens, *_ = draw(logits, keys(0, np.arange(20)), jnp.zeros(20, jnp.int32), greedy=True)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    tokens, logprobs, _ = draw(logits.at[3, 2].set(jnp.nan), keys(0, np.arange(20)), jnp.zeros(20, jnp.int32))
    assert np.isnan(logprobs[3]) and (np.asarray(tokens) < 7).all() and (np.asarray(tokens) >= 0).all()
