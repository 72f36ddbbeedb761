"""Advantages against hand-made cases and plain numpy."""

import inspect

import numpy as np
import pytest

from dora_jax.trainer import advantage, objective

R = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 2.0, 0.3], np.float32)
G = np.array([4, 4, 4, 9, 9, 9, -2])  # -2: a singleton
RNG = np.random.default_rng(1)


def by_group(rewards, groups, formula):
    out = np.zeros(len(rewards))
    for g in np.unique(groups):
        out[groups == g] = formula(np.asarray(rewards, np.float64)[groups == g])
    return out


FORMULAS = {
    "grpo": lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6) if len(r) > 1 else r / (1 + 1e-6),
    "dr_grpo": lambda r: r - r.mean(),
    "rloo": lambda r: np.array([x - (r.sum() - x) / (len(r) - 1) for x in r]) if len(r) > 1 else 0 * r,
    "max_rl": lambda r: (r - r.mean()) / r.mean() if r.mean() else 0 * r,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_group_advantages_against_numpy(name):
    got = advantage.estimate(name, R, G)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, by_group(R, G, FORMULAS[name]), rtol=1e-5, atol=1e-6)
    order = RNG.permutation(len(R))  # groups need not stand together
    np.testing.assert_allclose(advantage.estimate(name, R[order], G[order]), got[order], rtol=1e-6)


def test_grpo_by_hand():
    np.testing.assert_allclose(advantage.estimate("grpo", [1, 0], [0, 0]), [0.5 / 0.5**0.5, -0.5 / 0.5**0.5], rtol=1e-5)


def test_rloo_by_hand():
    np.testing.assert_allclose(advantage.estimate("rloo", [3, 0, 0], [0, 0, 0]), [3, -1.5, -1.5])


@pytest.mark.parametrize("name", [*FORMULAS, "opo"])
def test_a_group_without_variance_teaches_nothing(name):
    extra = {"lengths": [3, 4, 5]} if name == "opo" else {}
    got = advantage.estimate(name, np.float32([0.1, 0.1, 0.1]), [5, 5, 5], **extra)
    np.testing.assert_allclose(got, 0, atol=1e-7)


@pytest.mark.parametrize("name,want", [("grpo", 0.7), ("dr_grpo", 0), ("rloo", 0), ("max_rl", 0)])
def test_singleton_group(name, want):
    np.testing.assert_allclose(advantage.estimate(name, [0.7], [3]), [want], rtol=1e-5, atol=1e-9)


def test_max_rl_with_mean_zero():
    np.testing.assert_array_equal(advantage.estimate("max_rl", [1.0, -1.0, 0, 0], [0, 0, 1, 1]), np.zeros(4))


def test_opo_weighs_by_length():
    """b = (10 * 1 + 30 * 0) / 40 = 0.25."""
    np.testing.assert_allclose(advantage.estimate("opo", [1, 0], [0, 0], lengths=[10, 30]), [0.75, -0.25])
    mask = np.arange(30)[None, :] < np.array([[10], [30]])
    np.testing.assert_allclose(advantage.estimate("opo", [1, 0], [0, 0], mask=mask), [0.75, -0.25])


def test_vcpo_weighs_by_squared_weight_and_gradient():
    """weights w^2 g^2 = 1*4, 4*1 and 9*0: b = (4 * 1 + 4 * 0) / 8 = 0.5."""
    got = advantage.estimate("vcpo", [1, 0, 5], [0, 0, 0], w=[1, 2, 3], g_sq=[4, 1, 0])
    np.testing.assert_allclose(got, [0.5, -0.5, 4.5])
    np.testing.assert_allclose(advantage.estimate("vcpo", [1, 0], [0, 0], w=[1, 1], g_sq=[0, 0]), [0.5, -0.5])


MASK = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)
REWARDS = np.float32([1.0, -1.0, 3.0, 0.5])


def whiten(x, mask):
    v = x[mask]
    return np.where(mask, (x - v.mean()) / np.sqrt(v.var(ddof=1) + 1e-8), 0)


def test_reinforce_pp_carries_returns_through_observations():
    got = advantage.estimate("reinforce_pp", REWARDS, np.arange(4), mask=MASK, gamma=0.5)
    raw = np.zeros(MASK.shape)
    raw[0, [0, 2, 3]] = [0.25, 0.5, 1.0]  # two sampled tokens follow the first: the observation discounts nothing
    raw[1, [0, 1]] = [-0.5, -1.0]
    raw[3] = 0.5 * 0.5 ** np.arange(4, -1, -1)
    np.testing.assert_allclose(got, whiten(raw, MASK), rtol=1e-5, atol=1e-6)


def test_reinforce_pp_baseline():
    got = advantage.estimate("reinforce_pp_baseline", REWARDS, [0, 0, 1, 1], mask=MASK)
    raw = np.array([1, -1, 1.25, -1.25])[:, None] * np.ones((1, 5))
    np.testing.assert_allclose(got, whiten(raw, MASK), rtol=1e-5, atol=1e-6)
    got = advantage.estimate("reinforce_pp_baseline", [1, 0], [0, 0])
    np.testing.assert_allclose(got, [0.5**0.5, -(0.5**0.5)], rtol=1e-5)


# ---------------------------------------------------------------- GAE


def numpy_gae(rewards, values, mask, gamma, lam, bootstrap):
    """Drops the observations first, then the textbook recursion on what is left."""
    adv = np.zeros(mask.shape)
    for i in range(len(mask)):
        where = np.flatnonzero(mask[i])
        v = list(values[i, where]) + [bootstrap[i]]
        a = 0.0
        for k in reversed(range(len(where))):
            r = rewards[i] if k == len(where) - 1 else 0.0
            a = r + gamma * v[k + 1] - v[k] + gamma * lam * a
            adv[i, where[k]] = a
    return adv, np.where(mask, adv + values, 0)


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.9, 0.8)])
def test_gae_against_numpy_with_observations(gamma, lam):
    values = RNG.normal(size=MASK.shape)
    values[~MASK] = np.nan  # an observation's value must reach nothing
    bootstrap = np.array([0.3, 0, 0, -0.7])
    adv, returns = advantage.gae(REWARDS, values, MASK, gamma, lam, bootstrap)
    clean = np.where(MASK, values, 0)
    want, want_returns = numpy_gae(REWARDS, clean, MASK, gamma, lam, bootstrap)
    np.testing.assert_allclose(adv, whiten(want, MASK), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, want_returns, rtol=1e-5, atol=1e-6)


def test_gae_observations_are_transparent():
    """A trajectory with observations in between equals the same one without them."""
    values = RNG.normal(size=(1, 3))
    plain, _ = advantage.gae([1.0], values, np.ones((1, 3), bool), 0.9, 0.8)
    spread = np.zeros((1, 6))
    spread[0, [0, 3, 5]] = values
    mask = np.zeros((1, 6), bool)
    mask[0, [0, 3, 5]] = True
    got, _ = advantage.gae([1.0], spread, mask, 0.9, 0.8)
    np.testing.assert_allclose(got[mask], plain[0], rtol=1e-5)


def test_gae_by_hand_and_truncated():
    """gamma = lam = 1: A = R - V; a truncated trajectory adds what its state was still worth."""
    _, returns = advantage.gae([2.0], [[0.5, 0.25]], [[True, True]], 1.0, 1.0)
    np.testing.assert_allclose(returns, [[2.0, 2.0]])
    _, returns = advantage.gae([0.0], [[0.5, 0.25]], [[True, True]], 1.0, 1.0, bootstrap=[3.0])
    np.testing.assert_allclose(returns, [[3.0, 3.0]])


def test_gae_with_rewards_per_token():
    per_token = np.zeros(MASK.shape)
    per_token[0, 3], per_token[1, 1], per_token[3, 4] = 1.0, -1.0, 0.5
    values = RNG.normal(size=MASK.shape)
    for a, b in zip(advantage.gae(REWARDS, values, MASK, 0.9, 0.8), advantage.gae(per_token, values, MASK, 0.9, 0.8)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gae_turn_by_hand():
    """Turns of 2 and 1 tokens: V = 0.5 and 1.0 (first tokens), rewards 0 and 2, gamma 0.9, lambda 0.5."""
    mask = np.array([[True, True, False, True]])
    values = np.array([[0.5, 77.0, 55.0, 1.0]])
    adv, returns = advantage.gae_turn([2.0], values, mask, 0.9, 0.5)
    second = 2.0 - 1.0
    first = 0.9 * 1.0 - 0.5 + 0.9 * 0.5 * second
    np.testing.assert_allclose(returns, [[first + 0.5, first + 0.5, 0, second + 1.0]], rtol=1e-6)
    np.testing.assert_allclose(adv, whiten(np.array([[first, first, 0, second]]), mask), rtol=1e-5)
    _, returns = advantage.gae_turn([0.0], values, mask, 0.9, 0.5, bootstrap=[4.0])
    np.testing.assert_allclose(returns[0, 3], 0.9 * 4.0, rtol=1e-6)


def test_gae_turn_of_one_token_turns_is_gae():
    mask = np.array([[1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]], bool)
    values = RNG.normal(size=mask.shape)
    case = ([1.0, 0.0], values, mask, 0.9, 0.7)
    for a, b in zip(advantage.gae(*case), advantage.gae_turn(*case)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_sampled():
    nothing = np.zeros((2, 3), bool)
    for estimator in (advantage.gae, advantage.gae_turn):
        for x in estimator([1.0, 2.0], np.ones((2, 3)), nothing):
            np.testing.assert_array_equal(x, np.zeros((2, 3)))


def test_overlong_penalty_by_hand():
    got = advantage.overlong_penalty([0, 80, 81, 90, 100, 101], 100, 20)
    np.testing.assert_allclose(got, [0, 0, -0.05, -0.5, -1, -1], atol=1e-7)


def test_unknown_and_table():
    with pytest.raises(ValueError, match="unknown advantage 'gpo': known are grpo"):
        advantage.estimate("gpo", R, G)
    assert set(objective.ADVANTAGES) == {*advantage.ESTIMATORS, "gae", "gae_turn"}
    given = {"mask", "lengths", "w", "g_sq", "bootstrap", "rewards", "values"}
    functions = advantage.ESTIMATORS | {"gae": advantage.gae, "gae_turn": advantage.gae_turn}
    for name, function in functions.items():
        keywords = [p for p in inspect.signature(function).parameters if p not in given | {"group_ids"}]
        assert tuple(keywords) == objective.ADVANTAGES[name], name
    with pytest.raises(ValueError, match="opo.*needs lengths"):
        advantage.estimate("opo", R, G)
