"""What the lengths of ended samples say about those that run."""

import math
import random

import pytest

from dora_jax.orchestrate.measured import LENGTHS_KNOWN, RENEWED_EVERY, Lengths, Measured

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
def test_many_samples_of_one_age_never_hold_more_than_is_reported(tokens):
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


def test_a_bound_and_a_guess_are_reserved_until_lengths_and_prompts_are_known():
    measured = Measured(prompt_bound=512, new_bound=30000, expected_tokens=4000)
    for tokens in log_normal(LENGTHS_KNOWN - 1):
        measured.ended(tokens, 1.0)
    assert measured.response_tokens() == 4001 and measured.pages(16) == -(-(512 + 4001) // 16)
    for tokens in log_normal(4096):
        measured.ended(tokens, 1.0)
    assert measured.response_tokens() < 1200
    assert 5000 < measured.response_tokens(5000) < measured.response_tokens(29000) == 30000


def test_what_reports_say_of_prompts_is_reserved_and_never_more_than_their_bound():
    measured = Measured(prompt_bound=512, new_bound=30000, expected_tokens=1000)
    for _ in range(1000):
        measured.held(samples=100, tokens=50_000, page_tokens=66_000, page_size=16)
    assert measured.prompt_tokens == pytest.approx(160, abs=1)
    assert measured.pages(16) == -(-(160 + 1001) // 16)
    for page_tokens in (900_000, 0):  # pages of samples that the report does not list, and of none that it does
        for _ in range(1000):
            measured.held(samples=100, tokens=50_000, page_tokens=page_tokens, page_size=16)
        assert 0 <= measured.prompt_tokens <= 512 + 16


@pytest.mark.parametrize("refill", [False, True])
def test_an_instance_filled_by_reservations_is_full_and_does_not_overflow(refill):
    """Samples of log-normal length start wherever there is room, in a burst or as others end."""
    measured, draw = Measured(prompt_bound=512, new_bound=30000, expected_tokens=0), random.Random(1)
    for tokens in log_normal(1 << 14):
        measured.ended(tokens, 1.0)
    measured.prompt_tokens = 160
    lengths, capacity, most, mean = iter(log_normal(1 << 14)), 850_000, 0.0, 0.0
    running: list[list[int]] = []  # tokens so far, tokens at the end
    for tick in range(300):
        used = sum(16 * measured.pages(16, has) for has, _ in running)
        while (refill or not tick) and used + 16 * measured.pages(16) <= capacity:
            running.append([0, next(lengths)])
            used += 16 * measured.pages(16)
        draw.shuffle(running)
        running = [[has + 64, end] for has, end in running if has + 64 < end]
        held = sum(160 + has for has, _ in running)
        most = max(most, held / capacity)
        mean += held / capacity / 150 if tick >= 150 else 0.0
    assert most < 1.05
    assert (mean if refill else most) > 0.7
