"""Policy losses, KL, value loss and aggregation against plain numpy, and the traps of each."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.base import config_tree
from dora_jax.config import TrainerSection
from dora_jax.trainer import loss, objective

RNG = np.random.default_rng(0)
B, T = 4, 6
L = RNG.normal(-1.5, 0.6, (B, T)).astype(np.float32)
ANCHOR = (L + RNG.normal(0, 0.4, (B, T))).astype(np.float32)
BEHAVIOR = (ANCHOR + RNG.normal(0, 0.3, (B, T))).astype(np.float32)
ADV = RNG.normal(0, 1, (B, T)).astype(np.float32)
MASK = RNG.random((B, T)) < 0.7
MASK[2] = False  # an all-masked row
REWARDS = np.array([1.0, -1.0, 0.0, 2.0], np.float32)


def numpy_loss(name, l, a, A, mask, mu=None, R=None, **p):
    """Independent of the code under test: one token at a time, in f64, from the formulas of the objective's papers."""
    l, a, A = (np.asarray(x, np.float64) for x in (l, a, A))
    out = np.zeros(l.shape)
    for i, t in zip(*np.nonzero(mask)):
        x, y, adv = l[i, t], a[i, t], A[i, t]
        r = np.exp(min(max(x - y, -20), 20))
        if name == "ppo":
            v = max(-adv * r, -adv * min(max(r, 1 - p["eps_lo"]), 1 + p["eps_hi"]))
            if p.get("dual_clip") and adv < 0:
                v = min(v, -p["dual_clip"] * adv)
        elif name == "gspo":
            s = np.exp(np.mean((l - a)[i][mask[i]]))
            v = max(-adv * s, -adv * min(max(s, 1 - p["eps_lo"]), 1 + p["eps_hi"]))
        elif name == "cispo":
            v = -min(max(r, 1 - p["eps_lo"]), 1 + p["eps_hi"]) * adv * x
        elif name == "sapo":
            tau = p["tau_pos"] if adv > 0 else p["tau_neg"]
            v = -adv * 4 / tau / (1 + np.exp(-tau * (r - 1)))
        elif name == "topr":
            v = -p["w_pos"] * adv * x if R[i] > 0 else -p["w_neg"] * min(r, 1) * adv * x
        elif name == "reinforce":
            v = -adv * x
        elif name in ("dppo_tv", "dppo_kl"):
            pi, m = np.exp(x), np.exp(np.float64(mu[i, t]))
            d = abs(pi - m) if name == "dppo_tv" else m * np.log(m / pi) + (1 - m) * np.log((1 - m) / (1 - pi))
            out_of_reach = (adv > 0 and pi > m and d > p["d_hi"]) or (adv < 0 and pi < m and d > p["d_lo"])
            v = 0.0 if out_of_reach else -adv * min(r, 20) * x
        elif name == "longcat":
            gain = min(r * adv, min(max(r, 1 - p["eps_neg_lo"]), 1 + p["eps_pos_hi"]) * adv)
            gain = max(gain, p["eps_neg_hi"] * adv) if adv < 0 else gain
            v = -gain * min(np.exp(y - np.float64(mu[i, t])), p["C"])
        out[i, t] = v
    return out


CASES = [
    ("ppo", {"eps_lo": 0.2, "eps_hi": 0.28}),
    ("ppo", {"eps_lo": 0.1, "eps_hi": 0.1, "dual_clip": 1.2}),
    ("gspo", {"eps_lo": 0.05, "eps_hi": 0.02}),
    ("cispo", {"eps_lo": 0.3, "eps_hi": 0.2}),
    ("cispo", {"eps_lo": 1.0, "eps_hi": 4.0}),
    ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("topr", {"w_pos": 1.0, "w_neg": 1.0}),
    ("topr", {"w_pos": 2.0, "w_neg": 0.5}),
    ("reinforce", {}),
    ("dppo_tv", {"d_lo": 0.02, "d_hi": 0.03}),
    ("dppo_kl", {"d_lo": 0.002, "d_hi": 0.001}),
    ("longcat", {"eps_neg_lo": 0.2, "eps_pos_hi": 0.3, "eps_neg_hi": 1.3, "C": 1.1}),
]


@functools.cache
def compiled(name, **params):
    """((its sum, the loss of each token), the gradient to log-probs) of log-probs, anchor, advantages, behavior."""

    def total(l, anchor, adv, behavior):
        got = loss.policy_loss(name, l, anchor, adv, MASK, behavior_logprobs=behavior, rewards=REWARDS, **params)
        return got.sum(), got

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@pytest.mark.parametrize("name,params", CASES)
def test_against_numpy(name, params):
    (_, got), _ = compiled(name, **params)(L, ANCHOR, ADV, BEHAVIOR)
    want = numpy_loss(name, L, ANCHOR, ADV, MASK, BEHAVIOR, REWARDS, **params)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_every_loss_has_a_case_and_the_config_table_names_its_keywords():
    assert {name for name, _ in CASES} == set(loss.POLICY_LOSSES) == set(objective.LOSSES)
    given = {"mask", "segment_ids", "rewards", "behavior"}
    for name, function in loss.POLICY_LOSSES.items():
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
        assert tuple(k for k in keywords if k not in given) == objective.LOSSES[name], name
    assert config_tree.fields_of(TrainerSection)["aggregation"].choices == loss.AGGREGATIONS


@pytest.mark.parametrize("name,params", CASES)
def test_gradients(name, params):
    """What each says the gradient is: through the ratio, or through log pi alone with a detached weight."""
    r = np.exp(L - ANCHOR)
    clip = np.clip(r, 1 - params.get("eps_lo", 0), 1 + params.get("eps_hi", 0))
    detached = {"cispo": clip, "reinforce": np.ones_like(r)}
    if name in detached:
        want = -detached[name] * ADV
    elif name == "topr":
        want = -np.where(REWARDS[:, None] > 0, params["w_pos"], params["w_neg"] * np.minimum(r, 1)) * ADV
    elif name in ("dppo_tv", "dppo_kl"):
        kept = numpy_loss(name, L, ANCHOR, ADV, MASK, BEHAVIOR, **params) != 0
        want = np.where(kept, -np.minimum(r, 20) * ADV, 0)
    elif name == "gspo":
        s = np.array([np.exp(np.mean((L - ANCHOR)[i][MASK[i]])) if MASK[i].any() else 1 for i in range(B)])[:, None]
        free = np.where(ADV > 0, s < 1 + params["eps_hi"], s > 1 - params["eps_lo"])
        want = np.where(free, -ADV * s, 0)  # of each token as if it were alone: the sequence's mean is detached
    else:
        step = 1e-4
        up, down = (
            numpy_loss(name, L.astype(np.float64) + s, ANCHOR, ADV, MASK, BEHAVIOR, REWARDS, **params)
            for s in (step, -step)
        )
        want = (up - down) / (2 * step)
    _, gradient = compiled(name, **params)(L, ANCHOR, ADV, BEHAVIOR)
    np.testing.assert_allclose(gradient, np.where(MASK, want, 0), rtol=2e-3, atol=1e-3)


def test_ppo_by_hand():
    """r = e^0.5 = 1.6487 is clipped to 1.2 for A > 0 only; dual clip bounds A < 0 at c."""
    l, a, m = np.full((1, 1), 0.5 - 2, np.float32), np.full((1, 1), -2, np.float32), np.ones((1, 1), bool)
    assert float(loss.policy_loss("ppo", l, a, [[1.0]], m)[0, 0]) == pytest.approx(-1.2)
    assert float(loss.policy_loss("ppo", l, a, [[-1.0]], m)[0, 0]) == pytest.approx(1.64872, rel=1e-5)
    assert float(loss.policy_loss("ppo", l, a, [[-1.0]], m, dual_clip=1.5)[0, 0]) == pytest.approx(1.5)
    assert float(loss.policy_loss("ppo", l + 100, a, [[-1.0]], m)[0, 0]) == pytest.approx(np.exp(20), rel=1e-5)


def test_cispo_without_lower_clip_keeps_small_weights():
    got = loss.policy_loss("cispo", [[-9.0]], [[-1.0]], [[1.0]], [[True]], eps_lo=1.0, eps_hi=0.2)
    assert float(got[0, 0]) == pytest.approx(9 * np.exp(-8), rel=1e-5)


@pytest.mark.parametrize("name,params", CASES)
@pytest.mark.parametrize("poison", [-np.inf, np.nan, np.inf])
def test_what_lies_under_the_mask_reaches_nothing(name, params, poison):
    l, a, adv, mu = (np.where(MASK, x, poison).astype(np.float32) for x in (L, ANCHOR, ADV, BEHAVIOR))
    (value, _), grad = compiled(name, **params)(l, a, adv, mu)
    (want, _), _ = compiled(name, **params)(L, ANCHOR, ADV, BEHAVIOR)
    assert float(value) == pytest.approx(float(want), rel=1e-6)
    assert np.isfinite(grad).all() and not np.asarray(grad)[~MASK].any()


def test_segments_of_a_packed_row_are_sequences():
    """GSPO of two sequences packed into one row equals each alone; segment 0 is padding."""
    packed = [np.concatenate([x[0, :4], x[1, :4], [0, 0]])[None] for x in (L, ANCHOR, ADV)]
    mask = np.array([[1, 1, 0, 1, 0, 1, 1, 1, 0, 0]], bool)
    ids = np.array([[1] * 4 + [2] * 4 + [0, 0]])
    got = loss.policy_loss("gspo", *packed, mask, segment_ids=ids, eps_lo=0.05, eps_hi=0.05)
    alone = [
        loss.policy_loss(
            "gspo",
            L[i : i + 1, :4],
            ANCHOR[i : i + 1, :4],
            ADV[i : i + 1, :4],
            mask[:, 4 * i : 4 * i + 4],
            eps_lo=0.05,
            eps_hi=0.05,
        )
        for i in (0, 1)
    ]
    np.testing.assert_allclose(got[0, :8], np.concatenate([alone[0][0], alone[1][0]]), rtol=1e-6)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown policy loss 'pppo': known are ppo, gspo"):
        loss.policy_loss("pppo", L, L, L, MASK)
    with pytest.raises(ValueError, match="unknown aggregation 'mean': known are token_mean"):
        loss.token_weights("mean", MASK)
    with pytest.raises(ValueError, match="unknown KL estimator"):
        loss.kl("k4", L, L)
    with pytest.raises(ValueError, match="topr.*needs rewards"):
        loss.policy_loss("topr", L, L, L, MASK)


def test_clipped_counts_what_the_clip_silences():
    r = np.array([[1.5, 0.5, 1.5, 0.5, 1.0, 0.5]], np.float32)
    adv = np.array([[1.0, 1.0, -1.0, -1.0, 1.0, 0.0]], np.float32)
    got = loss.clipped("ppo", np.log(r), np.zeros_like(r), adv, {"eps_lo": 0.2, "eps_hi": 0.2})
    assert np.asarray(got).tolist() == [[True, False, False, True, False, False]]


# ---------------------------------------------------------------- KL, value


@pytest.mark.parametrize(
    "name,formula", [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: np.exp(-d) + d - 1)]
)
def test_kl_against_numpy(name, formula):
    d = np.array([[-3.0, -0.5, 0.0, 0.7, 4.0]])
    got = loss.kl(name, np.float32(d - 1), np.full_like(d, -1, np.float32), output_clamp=None)
    np.testing.assert_allclose(got, formula(d), rtol=1e-6, atol=1e-7)


def test_k3_of_a_tiny_gap_survives_f32():
    """exp(-D) + D - 1 in f32 gives 0 or twice the truth at |D| = 1e-4; the truth is D^2 / 2."""
    for d in (1e-4, -1e-4):
        got = float(loss.kl("k3", np.float32([[d]]), np.float32([[0.0]]))[0, 0])
        assert got == pytest.approx(d * d / 2, rel=5e-3)


def test_kl_clamps():
    assert float(loss.kl("k1", [[50.0]], [[0.0]], output_clamp=None)[0, 0]) == 20
    assert float(loss.kl("k1", [[50.0]], [[0.0]])[0, 0]) == 10
    assert float(loss.kl("k3", [[-15.0]], [[0.0]])[0, 0]) == 10
    assert float(loss.kl("k2", [[30.0]], [[0.0]], input_clamp=None, output_clamp=None)[0, 0]) == 450
    assert float(loss.kl("k3", [[-np.inf]], [[0.0]])[0, 0]) == 10


def test_value_loss_by_hand():
    """V 1.0, old 0.0, return 0.9: unclipped error 0.01, clipped value 0.2 -> error 0.49: the larger counts."""
    assert float(loss.value_loss([[1.0]], [[0.0]], [[0.9]], e=0.2)[0, 0]) == pytest.approx(0.245)
    assert float(loss.value_loss([[1.0]], [[0.0]], [[0.9]], e=None)[0, 0]) == pytest.approx(0.005)
    assert float(loss.value_loss([[1.0]], [[1.0]], [[3.0]], e=0.2)[0, 0]) == pytest.approx(2.0)


# ------------------------------------------------------------- aggregation

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0], [1, 2, 2, 2, 2, 2]])
GROUPS = np.array([[7, 7, 7, 9, 9, -1], [7, 7, 9, 9, 9, 9], [4, 4, 4, 4, -1, -1], [5, 5, 5, 5, 5, 5]])
PACKED_MASK = MASK & (SEGMENTS > 0)
PACKED_MASK[2] = False


def aggregate(name, per_token, mask, segment_ids=None, group_ids=None, max_len=None):
    weights = loss.token_weights(name, mask, segment_ids, group_ids, max_len)
    return jnp.sum(jnp.where(jnp.asarray(mask, bool), jnp.asarray(per_token), 0.0) * weights)


def numpy_aggregate(name, x, mask, ids, groups, max_len):
    rows = [(x[ids == k][mask[ids == k]], groups[ids == k][0]) for k in np.unique(ids) if k >= 0]
    full = [(v, g) for v, g in rows if len(v)]
    if name == "token_mean":
        return np.concatenate([v for v, _ in full]).mean()
    if name == "seq_mean_token_mean":
        return np.mean([v.mean() for v, _ in full])
    if name == "seq_mean_token_sum":
        return np.mean([v.sum() for v, _ in full])
    if name == "seq_mean_token_sum_norm":
        return sum(v.sum() for v, _ in rows) / (len(rows) * max_len)
    per_group = {g: np.concatenate([v for v, h in full if h == g]) for _, g in full}
    return np.mean([v.mean() for v in per_group.values()])


@pytest.mark.parametrize("name", loss.AGGREGATIONS)
def test_aggregation_against_numpy(name):
    x = RNG.normal(size=(B, T)).astype(np.float32)
    rows = np.arange(B)[:, None] + 0 * SEGMENTS
    groups = np.array([3, 3, 8, 1])
    want = numpy_aggregate(name, x, MASK, rows, groups[:, None] + 0 * SEGMENTS, 11)
    got = aggregate(name, x, MASK, group_ids=groups, max_len=11)
    assert float(got) == pytest.approx(want, rel=1e-5)
    packed = np.where(SEGMENTS > 0, 10 * np.arange(B)[:, None] + SEGMENTS, -1)
    want = numpy_aggregate(name, x, PACKED_MASK, packed, GROUPS, 11)
    got = aggregate(name, x, PACKED_MASK, segment_ids=SEGMENTS, group_ids=GROUPS, max_len=11)
    assert float(got) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", loss.AGGREGATIONS)
def test_weights_are_the_same_in_numpy_in_jax_and_under_jit(name):
    plain = loss.token_weights(name, PACKED_MASK, SEGMENTS, GROUPS, 11)
    assert isinstance(plain, np.ndarray) and plain.dtype == np.float32
    in_jit = jax.jit(lambda m: loss.token_weights(name, m, jnp.asarray(SEGMENTS), jnp.asarray(GROUPS), 11))(PACKED_MASK)
    np.testing.assert_allclose(in_jit, plain, rtol=1e-6)


@pytest.mark.parametrize("name", loss.AGGREGATIONS)
def test_micro_batches_padding_and_row_order_do_not_move_the_loss(name):
    x = RNG.normal(size=(B, T)).astype(np.float32)
    whole = aggregate(name, x, PACKED_MASK, SEGMENTS, GROUPS, 11)
    weights = loss.token_weights(name, PACKED_MASK, SEGMENTS, GROUPS, 11)
    in_parts = sum((x[i : i + 1] * weights[i : i + 1]).sum() for i in range(B))
    assert in_parts == pytest.approx(float(whole), rel=1e-5)
    wide = [
        np.pad(a, ((0, 2), (0, 3)), constant_values=c)
        for a, c in ((x, 0), (PACKED_MASK, False), (SEGMENTS, 0), (GROUPS, -1))
    ]
    assert float(aggregate(name, *wide, 11)) == pytest.approx(float(whole), rel=1e-5)
    order = [3, 1, 0, 2]
    mixed = aggregate(name, x[order], PACKED_MASK[order], SEGMENTS[order], GROUPS[order], 11)
    assert float(mixed) == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.parametrize("name", loss.AGGREGATIONS)
def test_nothing_sampled_gives_zero_not_nan(name):
    nothing = np.zeros((2, 3), bool)
    got = aggregate(name, np.full((2, 3), np.nan, np.float32), nothing, group_ids=np.array([1, 2]), max_len=5)
    assert float(got) == 0


def test_aggregations_say_what_they_lack():
    with pytest.raises(ValueError, match="needs max_len"):
        loss.token_weights("seq_mean_token_sum_norm", MASK)
    with pytest.raises(ValueError, match="needs group_ids"):
        loss.token_weights("prompt_mean", MASK)
