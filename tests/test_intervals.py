"""Intervals of shares: Wilson's, and of several samples a prompt."""

import numpy as np
import pytest

from dora_jax.base import metrics


@pytest.mark.parametrize(
    "share, trials, ends",
    [(0.5, 100, (0.4038, 0.5962)), (0.0, 10, (0.0, 0.2775)), (1.0, 10, (0.7225, 1.0)), (0.3, 0, (0.0, 1.0))],
)
def test_wilson_s_interval(share, trials, ends):
    assert metrics.wilson(share, trials) == pytest.approx(ends, abs=1e-4)


def test_samples_of_a_prompt_that_are_all_alike_count_once_and_independent_ones_each():
    alike = [0.0, 1.0] * 50
    assert metrics.of_prompts(alike, 8) == pytest.approx(metrics.wilson(0.5, 100), abs=1e-2)
    even = [0.5] * 100
    assert metrics.of_prompts(even, 8) == metrics.wilson(0.5, 100), "of no spread the prompts count"
    assert metrics.of_prompts([0.5, 0.375] * 50, 8) == metrics.wilson(0.4375, 800)
    assert metrics.of_prompts([], 8) == (0.0, 1.0)


def test_nineteen_intervals_in_twenty_hold_the_truth():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        difficulty = rng.beta(0.5, 0.5, 64)
        low, high = metrics.of_prompts(list(rng.binomial(4, difficulty) / 4), 4)
        held += low <= 0.5 <= high
    assert 0.92 <= held / 400 <= 0.98
