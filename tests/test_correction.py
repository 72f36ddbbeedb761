"""Corrections against plain numpy: importance weights, rejections, effective sample size."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.trainer import correction, loss, objective

RNG = np.random.default_rng(2)
B, T = 4, 6
OLD = RNG.normal(-1.5, 0.5, (B, T)).astype(np.float32)
MU = (OLD - RNG.normal(0, 0.5, (B, T))).astype(np.float32)
NOW = (OLD - RNG.normal(0, 0.3, (B, T))).astype(np.float32)
ADV = np.float32([[1], [-1], [-1], [-2]]) * np.ones((B, T), np.float32)
MASK = RNG.random((B, T)) < 0.7
MASK[2] = False
D = (OLD - MU).astype(np.float64)
W = np.exp(D)


def rows(f):
    """Value of each row's sampled gaps, spread over the row."""
    return np.array([f(D[i][MASK[i]]) if MASK[i].any() else np.nan for i in range(B)])[:, None] * np.ones((1, T))


def test_tis():
    w, keep, _ = correction.weights("tis", OLD, MU, MASK, C=1.3)
    np.testing.assert_allclose(np.asarray(w)[MASK], np.minimum(W, 1.3)[MASK], rtol=1e-5)
    np.testing.assert_array_equal(keep, MASK)
    w, _, _ = correction.weights("tis", OLD, MU, MASK, C=1.3, level="sequence")
    np.testing.assert_allclose(np.asarray(w)[MASK], np.minimum(rows(lambda d: np.exp(d.sum())), 1.3)[MASK], rtol=1e-5)


def test_tis_truncates_only_from_above_and_clamps_a_sequence():
    w, _, _ = correction.weights("tis", [[-9.0] * 3], [[-1.0] * 3], [[True] * 3], level="sequence")
    np.testing.assert_allclose(w, np.exp(-20), rtol=1e-4)  # the sum -24 is clamped to -20


def test_icepop_zeroes_outside():
    w, keep, metrics = correction.weights("icepop", OLD, MU, MASK, lo=0.8, hi=1.3)
    want = np.where((W >= 0.8) & (W <= 1.3), W, 0)
    np.testing.assert_allclose(np.asarray(w)[MASK], want[MASK], rtol=1e-5)
    np.testing.assert_array_equal(keep, MASK)
    assert float(metrics["zeroed_share"]) == pytest.approx((want[MASK] == 0).mean())


QUANTITIES = {"ratio": np.exp, "k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(d) - 1 - d}
BOUNDS = {"ratio": (0.8, 1.3), "k1": (-0.3, 0.2), "k2": (0.0, 0.05), "k3": (0.0, 0.06)}


@pytest.mark.parametrize("metric", QUANTITIES)
@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean", "seq_max", "geometric"])
def test_mask(level, metric):
    lo, hi = BOUNDS[metric]
    call = lambda: correction.weights("mask", OLD, MU, MASK, level=level, metric=metric, lo=lo, hi=hi)
    if level == "geometric" and metric != "ratio":
        with pytest.raises(ValueError, match="geometric for the ratio"):
            call()
        return
    q = QUANTITIES[metric]
    value = {
        "token": q(D),
        "seq_mean": rows(lambda d: q(d).mean()),
        "seq_max": rows(lambda d: q(d).max()),
        "seq_sum": rows(lambda d: np.exp(d.sum()) if metric == "ratio" else q(d).sum()),
        "geometric": rows(lambda d: np.exp(d.mean())),
    }[level]
    w, keep, metrics = call()
    want = MASK & (value >= lo) & (value <= hi)
    np.testing.assert_array_equal(keep, want)
    np.testing.assert_array_equal(w, np.ones((B, T)))
    assert float(metrics["rejected_share"]) == pytest.approx(1 - want.sum() / MASK.sum())


def test_opsm_drops_only_bad_sequences_that_drifted():
    """Two tokens of drift 0.3 and 0.1: the mean 0.2 is over delta 0.15, but only where A < 0."""
    old, now = [[-1.0, -1.0]] * 3, [[-1.3, -1.1], [-1.3, -1.1], [-1.1, -1.1]]
    mask = np.ones((3, 2), bool)
    _, keep, _ = correction.weights("opsm", old, old, mask, logprobs=now, advantages=[-1.0, 1.0, -1.0], delta=0.15)
    assert np.asarray(keep).tolist() == [[False, False], [True, True], [True, True]]
    with pytest.raises(ValueError, match="needs logprobs and advantages"):
        correction.weights("opsm", old, old, mask)


def test_vcpo_lr():
    w = np.array([np.exp(D[i][MASK[i]].sum()) for i in range(B) if MASK[i].any()])
    ess = w.sum() ** 2 / (w**2).sum()
    _, _, metrics = correction.weights("vcpo_lr", OLD, MU, MASK, rho_base=0.9)
    assert float(metrics["ess"]) == pytest.approx(ess, rel=1e-4)
    assert float(metrics["rho"]) == pytest.approx(ess / 3, rel=1e-4)
    assert float(metrics["lr_scale"]) == pytest.approx(np.sqrt(min(1, ess / 3 / 0.9)), rel=1e-4)
    _, _, metrics = correction.weights("vcpo_lr", OLD, OLD, MASK)
    assert float(metrics["lr_scale"]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", correction.CORRECTIONS)
@pytest.mark.parametrize("poison", [-np.inf, np.nan])
def test_what_lies_under_the_mask_reaches_nothing(name, poison):
    clean = correction.weights(name, OLD, MU, MASK, logprobs=NOW, advantages=ADV)
    dirty = correction.weights(
        name,
        *(np.where(MASK, x, poison) for x in (OLD, MU)),
        MASK,
        logprobs=np.where(MASK, NOW, poison),
        advantages=np.where(MASK, ADV, poison),
    )
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name,params",
    [
        ("tis", {"level": "sequence"}),
        ("opsm", {}),
        ("vcpo_lr", {}),
        *[
            ("mask", {"level": level, "lo": 0.7, "hi": 1.2})
            for level in ("seq_sum", "seq_mean", "seq_max", "geometric")
        ],
    ],
)
def test_packed_sequences_equal_sequences_alone(name, params):
    ids = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    pack = lambda x: np.concatenate([x[0, :4], x[1, :4], np.zeros(2, x.dtype)])[None]
    stack = lambda x: np.stack([x[0, :4], x[1, :4]])
    extra = lambda f: {"logprobs": f(NOW), "advantages": f(ADV)}
    packed = (pack(OLD), pack(MU), pack(MASK))
    w, keep, metrics = correction.weights(name, *packed, segment_ids=ids, **extra(pack), **params)
    w2, keep2, metrics2 = correction.weights(name, stack(OLD), stack(MU), stack(MASK), **extra(stack), **params)
    np.testing.assert_allclose(np.asarray(w)[0, :8].reshape(2, 4), w2, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(keep)[0, :8].reshape(2, 4), keep2)
    for key in metrics:
        assert float(metrics[key]) == pytest.approx(float(metrics2[key]), rel=1e-5), key


def test_no_gradient_flows_through_a_weight():
    grad = jax.grad(lambda x: correction.weights("tis", x, MU, MASK, C=5.0)[0].sum())(jnp.asarray(OLD))
    assert not np.asarray(grad).any()


def test_a_rejection_does_not_move_the_denominator():
    """Half the tokens rejected: the loss halves, it is not renormalised."""
    mask = np.ones((1, 4), bool)
    old, mu = np.zeros((1, 4), np.float32), np.float32([[0, 0, 9, 9]])
    _, keep, _ = correction.weights("mask", old, mu, mask, lo=0.5, hi=2.0)
    weights = loss.token_weights("token_mean", mask)
    assert float(jnp.sum(jnp.where(keep, 1.0, 0.0) * weights)) == pytest.approx(0.5)


def test_unknown_and_table():
    with pytest.raises(ValueError, match="unknown correction 'is': known are none, tis"):
        correction.weights("is", OLD, MU, MASK)
    with pytest.raises(ValueError, match="unknown level 'seq'"):
        correction.weights("tis", OLD, MU, MASK, level="seq")
    with pytest.raises(ValueError, match="unknown metric 'k9'"):
        correction.weights("mask", OLD, MU, MASK, metric="k9")
    assert set(correction.CORRECTIONS) == set(objective.CORRECTIONS)
    for name, function in correction.CORRECTIONS.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
        assert sorted(k for k in keywords if k not in ("drift", "adv")) == sorted(objective.CORRECTIONS[name]), name
