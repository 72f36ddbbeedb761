"""What the lengths of ended samples say about those that run."""

import math
import random

import pytest

from dora_jax.orchestrate.fleet import LENGTHS_KNOWN, Fleet
from dora_jax.orchestrate.lengths import RENEWED_EVERY, Lengths

OCTAVE_QUARTER = 2**0.25  # how far a bucket's edge is from what is in it


def lengths_of(samples):
    lengths = Lengths()
    for n in samples:
        lengths.observe(n)
    return lengths


def log_normal(n, mean=2400.0):
    draw = random.Random(0)
    return [max(1, round(mean * math.exp(draw.gauss(-0.5, 1.0)))) for _ in range(n)]


def test_samples_of_one_length_hold_it_and_lack_the_rest():
    lengths = lengths_of([1000] * RENEWED_EVERY)
    for tokens in (0, 100, 800):
        assert 1000 <= lengths.held(tokens) <= 1000 * OCTAVE_QUARTER
    assert 700 <= lengths.left(200) <= 1000


@pytest.mark.parametrize("tokens", [0, 500, 2400, 9000])
def test_many_samples_of_one_age_never_hold_more_than_is_said(tokens):
    samples = log_normal(1 << 14)
    running = sorted(n for n in samples if n > tokens)
    most = max(n * (len(running) - i) for i, n in enumerate(running)) / len(running)
    lengths = lengths_of(samples)
    # the sample's own bucket begins up to a quarter of an octave before it
    assert most / OCTAVE_QUARTER <= lengths.held(tokens) <= most * OCTAVE_QUARTER**2


def test_a_new_sample_of_a_long_tail_holds_less_than_the_mean():
    samples = log_normal(1 << 14)
    mean = sum(samples) / len(samples)
    assert lengths_of(samples).held(0) < 0.5 * mean < mean < lengths_of(samples).left(3000)


def test_what_is_longer_than_any_before_holds_its_tokens_and_goes_on_for_as_long_again():
    lengths = lengths_of([100] * RENEWED_EVERY)
    assert lengths.held(5000) == lengths.left(5000) == 5000


def test_a_fleet_reserves_by_the_guess_until_lengths_are_known():
    fleet = Fleet(prompt_tokens=0, new_tokens=30000, expected_tokens=4000)
    for tokens in log_normal(LENGTHS_KNOWN - 1):
        fleet.observe(tokens, 1.0)
    assert fleet.expected_tokens() == 4001
    for tokens in log_normal(4096):
        fleet.observe(tokens, 1.0)
    assert fleet.expected_tokens() < 2000 < fleet.expected_tokens(5000) < fleet.expected_tokens(29000) == 30000
