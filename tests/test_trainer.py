"""The step: it learns, skips what is not finite, counts versions, and sees the policy as the engine samples it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.buffer import layout as batch_layout
from dora_jax.models import decoder, sharding
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.trainer import optim, step
from dora_jax.trainer.advantage import Prepare
from dora_jax.trainer.micro_batch import by_micro_batch
from dora_jax.trainer.model import Model
from tests.fakes import trainer_cases as cases

FAST_COMPILE = {"xla_backend_optimization_level": 0}


def one_device():
    return sharding.make_mesh(jax.devices()[:1], 1, 1, 1)


@pytest.fixture(scope="module")
def shared():
    """One compiled trainer; tests that step it reload its first state."""
    params = jax.tree.map(jnp.asarray, cases.params())
    trainer = step.Trainer(cases.MODEL, cases.SECTION, one_device(), params, total_steps=20)
    return trainer, params, host(trainer.state)


@pytest.fixture
def trainer(shared):
    trainer, _, first = shared
    trainer.load(first.params, first.opt_state, 0)
    trainer.health.skipped = 0
    return trainer


def host(tree):
    return jax.tree.map(np.array, tree)


def on_policy(trainer, scored=None):
    """The same batch with the trainer's own log-probs as the engine's."""
    batch = cases.batch(trainer, scored)
    return dataclasses.replace(batch, behavior_logprobs=np.where(batch.mask, trainer.logprobs(batch), 0))


def test_a_step_moves_towards_what_was_rewarded(trainer):
    batch = on_policy(trainer)
    before = trainer.logprobs(batch)
    for _ in range(3):
        metrics = trainer.step(batch)
    gained = (trainer.logprobs(batch) - before)[batch.mask] * np.sign(batch.advantages[batch.mask])
    assert gained.mean() > 0.02
    assert int(trainer.state.step) == 3
    assert metrics["trainer/learning_rate"] == pytest.approx(1e-2)
    assert 0 < metrics["trainer/clip_fraction"] < 1 and metrics["trainer/tokens"] == batch.mask.sum()


def test_an_update_of_bfloat16_factors_is_near_that_of_float32(trainer):
    batch = on_policy(trainer)
    wide = trainer.step(batch)
    section = cases.section(matmul="bfloat16")
    narrow = step.Trainer(cases.MODEL, section, one_device(), cases.params(), total_steps=20).step(batch)
    for name in ("trainer/grad_norm", "trainer/ratio_mean"):
        assert narrow[name] != wide[name] and narrow[name] == pytest.approx(wide[name], rel=0.02)


def test_first_update_on_policy(trainer):
    """Ratios are 1, nothing is clipped, and the gap to the engine at equal weights is rounding."""
    metrics = trainer.step(on_policy(trainer))
    assert metrics["trainer/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["trainer/clip_fraction"] == 0 and metrics["trainer/ess_share"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch/mean"] < 1e-5 and metrics["mismatch/max"] < 1e-4 and metrics["mismatch/p99"] < 1e-4
    assert metrics["mismatch/tokens"] == metrics["trainer/tokens"]


def test_mismatch_counts_tokens_of_lag_0_only(trainer):
    batch = on_policy(trainer)
    gap = np.where(np.arange(batch.mask.shape[1]) % 2, 0.1, 0.3).astype(np.float32)
    batch = dataclasses.replace(batch, behavior_logprobs=batch.behavior_logprobs + gap * batch.mask)
    old = batch.segment_ids == 2  # claim that these came from another version
    batch = dataclasses.replace(batch, version=np.where(old, -7, batch.version))
    metrics = trainer.step(batch)
    fresh = batch.mask & ~old
    want = (gap * np.ones_like(batch.mask))[fresh]
    assert metrics["mismatch/mean"] == pytest.approx(want.mean(), rel=1e-3)
    assert metrics["mismatch/max"] == pytest.approx(0.3, rel=1e-3)
    assert 0.3 <= metrics["mismatch/p99"] < 0.3 * 10 ** (1 / 8) * 1.001
    assert metrics["mismatch/tokens"] == fresh.sum()
    assert metrics["mismatch/kl"] == pytest.approx((np.exp(-want) - 1 + want).mean(), rel=1e-2)
    batch = dataclasses.replace(batch, version=np.full_like(batch.version, -7))
    assert "mismatch/mean" not in trainer.step(batch)


def test_a_wide_gap_stops_the_run(trainer):
    batch = cases.batch(trainer)  # log-probs around -4 +- 0.1, the model knows nothing of them
    trainer.health.max_mismatch = 1e-3
    try:
        with pytest.raises(RuntimeError, match="trainer and engine disagree by .* above trainer.max_mismatch=0.001"):
            trainer.step(batch)
    finally:
        trainer.health.max_mismatch = 0.0


def test_non_finite_updates_are_skipped_and_three_stop_the_run(trainer, tmp_path):
    trainer.health.dump_dir = str(tmp_path)
    good = on_policy(trainer)
    bad = dataclasses.replace(good, advantages=np.where(good.mask, np.inf, 0).astype(np.float32))
    before = host(trainer.state)
    for n in (1, 2):
        assert trainer.step(bad)["trainer/updates_skipped"] == 1
        assert int(trainer.state.step) == n  # the version is published all the same
    jax.tree.map(np.testing.assert_array_equal, host(trainer.state.params), before.params)
    jax.tree.map(np.testing.assert_array_equal, host(trainer.state.opt_state), before.opt_state)
    assert trainer.step(good)["trainer/updates_skipped"] == 0  # the count starts again
    trainer.step(bad), trainer.step(bad)
    with pytest.raises(RuntimeError, match="3 updates in a row were not finite .*bad_batch_6.npz"):
        trainer.step(bad)
    saved = np.load(tmp_path / "bad_batch_6.npz")
    np.testing.assert_array_equal(saved["tokens"], bad.tokens)


def test_several_updates_make_one_version(trainer):
    scored = cases.groups(4, 4)
    parts = tuple(cases.batch(trainer, scored[i::2], rows=16) for i in (0, 1))
    for part in parts:
        assert part.loss_weights.sum() == pytest.approx(1, abs=1e-5)  # denominators are per update
    metrics = trainer.step(parts)
    assert int(trainer.state.step) == 1 and int(optim.updates_done(trainer.state.opt_state)) == 2
    assert metrics["trainer/tokens"] == sum(p.mask.sum() for p in parts)


def test_the_caller_keeps_its_params_and_a_warm_trainer_gives_the_same_step(trainer, shared):
    batch = cases.batch(trainer, rows=16)
    plain = trainer.step(batch)
    after = host(trainer.params)
    kept = host(shared[1])  # raises if the step donated them
    other = step.Trainer(cases.MODEL, cases.SECTION, one_device(), shared[1], total_steps=20)
    other.warmup(*batch.tokens.shape)
    assert int(other.state.step) == 0
    timed = {"trainer/tokens_per_s"}
    assert {k: v for k, v in other.step(batch).items() if k not in timed} == {
        k: v for k, v in plain.items() if k not in timed
    }
    jax.tree.map(np.testing.assert_array_equal, host(other.params), after)
    jax.tree.map(np.testing.assert_array_equal, host(shared[1]), kept)


# ----------------------------------------------- as the engine sees the policy


@pytest.mark.parametrize("temperature,limit", [(0.7, 40), (1.5, None)])
def test_logprobs_are_after_temperature_without_padding_ids(temperature, limit):
    """Against numpy: scale, cut the rows of the embedding that no tokenizer has, log-softmax."""
    params = cases.params()
    model = Model(cases.MODEL, one_device(), jnp.float32, "none", temperature, limit)
    tokens = np.random.default_rng(0).integers(0, 40, (1, 9)).astype(np.int32)
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((1, 8), np.int32),
        "positions": np.arange(8, dtype=np.int32)[None],
    }
    attend = segment_attention(arrays["segment_ids"], arrays["positions"])

    def head(params):
        return decoder.logits(
            cases.MODEL, params, decoder.forward(cases.MODEL, params, arrays["tokens"], arrays["positions"], attend)
        )

    logits = np.asarray(jax.jit(head)(params), np.float64)[0, :, :limit] / temperature
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got, entropy = jax.jit(model.logprobs)(params, arrays)
    np.testing.assert_allclose(got[0], want[np.arange(8), tokens[0, 1:]], atol=1e-5)
    np.testing.assert_allclose(entropy[0], -(np.exp(want) * want).sum(-1), atol=1e-5)


def forward_sums(section, batch, step_number=0, **arrays):
    model = Model(cases.MODEL, one_device(), jnp.float32, "none", 1.0, None)
    params = cases.params()
    arrays = {**batch.arrays(), "lag": step_number - batch.version, **arrays}
    run = jax.jit(functools.partial(step.micro_loss, model, section), compiler_options=FAST_COMPILE)
    return jax.device_get(run(params, arrays)[1])


def test_proximal_anchor_starts_at_ratio_1_whatever_the_engine_reported():
    section = cases.section(anchor="proximal", correction="tis")
    batch = cases.batch(type("Shape", (), {"section": section, "shards": 1}))
    sums = forward_sums(section, batch)
    assert sums["ratio"] == pytest.approx(batch.mask.sum(), rel=1e-5) and sums["clipped"] == 0
    assert sums["mismatch"] / sums["fresh"] > 0.1  # the gap is still seen
    given = batch.behavior_logprobs + np.float32(0.5)
    sums = forward_sums(section, batch, old_logprobs=given)
    assert sums["ratio"] != pytest.approx(batch.mask.sum(), rel=1e-2)  # given old log-probs are used


def test_packing_never_fills_the_engines_logprobs_from_the_trainer():
    """Else the ratio of a stale group would be 1 by construction."""
    section = cases.section(anchor="proximal", updates=2)
    shape = type("Shape", (), {"section": section, "shards": 1})
    plain = cases.batch(shape)
    scored = cases.batch(shape, score=lambda b: {"old_logprobs": np.full(b.tokens.shape, -9.0, np.float32)})
    np.testing.assert_array_equal(scored.behavior_logprobs, plain.behavior_logprobs)
    np.testing.assert_array_equal(scored.old_logprobs, np.where(scored.segment_ids > 0, np.float32(-9), 0))


# ------------------------------------------------------------- optimizer


def test_schedules():
    rate = optim.schedule("cosine", 1.0, 4, 12)
    assert [round(float(rate(i)), 4) for i in (0, 1, 3, 4, 8, 12)] == [0.25, 0.5, 1.0, 1.0, 0.5, 0.0]
    rate = optim.schedule("linear", 1.0, 0, 10)
    assert [round(float(rate(i)), 4) for i in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert float(optim.schedule("constant", 0.3, 0, 10)(99)) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="unknown schedule 'cos'"):
        optim.schedule("cos", 1.0, 0, 10)


def test_moments_live_where_their_parameters_live():
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 2, 2)
    trainer = step.Trainer(cases.MODEL, cases.SECTION, mesh, cases.params(), total_steps=3)
    states = jax.tree.leaves(trainer.state.opt_state, is_leaf=lambda s: hasattr(s, "mu"))
    adam = next(s for s in states if hasattr(s, "mu"))
    for moment in (adam.mu, adam.nu):
        jax.tree.map(lambda m, p: m.sharding == p.sharding or pytest.fail("elsewhere"), moment, trainer.params)
    assert not adam.mu["layers"]["q_proj"].sharding.is_fully_replicated


def test_only_matrices_decay():
    decays = optim.decays(decoder.abstract_params(dataclasses.replace(cases.MODEL, qkv_bias=True)))
    assert decays["embed"] and decays["layers"]["q_proj"] and decays["layers"]["down_proj"]
    assert not decays["final_norm"] and not decays["layers"]["attn_norm"] and not decays["layers"]["q_bias"]


# ------------------------------------------------------------- objective


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"policy_loss": "pp0"}, "policy_loss='pp0' is unknown: known are ppo, gspo"),
        ({"policy_loss": "gspo"}, "needs aggregation='seq_mean_token_mean'"),
        ({"correction": "tis"}, "counts the engine gap twice"),
        ({"correction": "icepop"}, "counts the engine gap twice"),
        ({"advantage": "dr_grpo"}, "needs aggregation='seq_mean_token_sum_norm'"),
        ({"advantage": "gae"}, "needs a value model"),
        (
            {"policy_loss": "longcat", "loss_params": {}, "aggregation": "seq_mean_token_sum_norm"},
            "needs anchor='proximal'",
        ),
        (
            {"policy_loss": "longcat", "loss_params": {}, "anchor": "proximal"},
            "needs aggregation='seq_mean_token_sum_norm'",
        ),
        (
            {
                "policy_loss": "longcat",
                "loss_params": {},
                "anchor": "proximal",
                "aggregation": "seq_mean_token_sum_norm",
                "correction": "tis",
            },
            "already weighs by the engine gap",
        ),
        (
            {"policy_loss": "sapo", "loss_params": {"eps_lo": 0.2}},
            "eps_lo not known to 'sapo', which takes tau_pos, tau_neg",
        ),
        ({"loss_params": {"eps_lo": "0.2"}}, "loss_params.eps_lo: '0.2' is not a number"),
        ({"loss_params": {"dual_clip": 0.5}}, "0.5 is neither None nor a number above 1"),
        ({"correction": "mask", "correction_params": {"level": "row"}}, "'row' is unknown: known are token, seq_sum"),
        ({"correction": "mask", "correction_params": {"level": "geometric", "metric": "k3"}}, "is of ratios, not of"),
        ({"kl_coef": 0.1}, "trainer.kl is 'none'"),
        ({"row_splits": 3}, "trainer.row_splits=3 does not divide trainer.pack_tokens=32"),
        ({"row_splits": 2, "context": 2}, "trainer.row_splits=2 splits rows that lie on trainer.context=2"),
        ({"row_splits": 2, "share_prompts": "on"}, "trainer.row_splits=2 is not for trainer.share_prompts=on"),
        ({"kl_in": "reward"}, "needs trainer.kl"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(changes, reason):
    from dora_jax.trainer import objective

    errors = objective.check(cases.section(**changes))
    assert any(reason in e for e in errors), errors


def test_what_goes_together_passes():
    from dora_jax.config import RolloutSection
    from dora_jax.trainer import objective

    assert objective.check(cases.SECTION, RolloutSection()) == []
    for changes in (
        {"correction": "mask"},
        {"correction": "tis", "anchor": "proximal"},
        {"correction": "vcpo_lr"},
        {"policy_loss": "sapo"},
        {"loss_params": {"dual_clip": 3.0}},
        {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"},
    ):
        assert objective.check(cases.section(**changes)) == []
    cut = objective.check(cases.SECTION, RolloutSection(top_p=0.9, temperature=0.0))
    assert len(cut) == 2 and "temperature=0.0 must be above 0" in cut[0] and "top_p=0.9" in cut[1]


def test_objective_needs_no_jax():
    import subprocess
    import sys

    code = "import sys, dora_jax.trainer.objective; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prepare_passes_kl_in_the_reward():
    """Two samples of one group, reward 1 each; the first drifted by k1 = 0.5 on each of 2 tokens, coefficient 0.1."""
    section = cases.section(advantage="rloo", kl="k1", kl_coef=0.1, kl_in="reward")
    sequences = type(
        "S",
        (),
        {
            "rewards": np.float32([1, 1]),
            "mask": np.array([[True, True, False], [True, True, True]]),
            "group_ids": np.array([0, 0]),
            "lengths": np.array([2, 3]),
            "truncated": np.zeros(2, bool),
            "old_logprobs": np.float32([[-1, -1, 9], [-1, -1, -1]]),
            "ref_logprobs": np.float32([[-1.5, -1.5, -9], [-1, -1, -1]]),
        },
    )
    got = Prepare(section, 12).estimate(sequences).advantages
    np.testing.assert_allclose(got, [-0.1, 0.1], atol=1e-6)


@pytest.mark.parametrize("data", [1, 2])
def test_a_step_whose_empty_micro_batches_are_not_sent_is_the_same_to_the_bit(data, monkeypatch):
    section = cases.section(micro_batches=4, anchor="proximal", kl="k3", kl_coef=0.1)
    mesh = sharding.make_mesh(jax.devices()[:data], data, 1, 1)
    trainer = step.Trainer(cases.MODEL, section, mesh, cases.params(), total_steps=20)
    first, made = host(trainer.state), []
    trainer.warmup(16, section.pack_tokens)
    for places in (1 << 18, 0):
        monkeypatch.setattr(batch_layout, "WHOLE_PLACES", places)
        trainer.load(first.params, first.opt_state, 0)
        batch = cases.batch(trainer, cases.groups(4, 4), score=trainer.score, rows=16)
        logprobs = trainer.logprobs(batch)[batch.mask]
        metrics = {name: x for name, x in trainer.step(batch).items() if not name.endswith("_per_s")}
        made.append((len(batch.tokens), sorted(logprobs.tolist()), metrics, host(trainer.state)))
    (whole, *wanted), (part, *got) = made
    assert (whole, part) == (16, 8)
    assert got[:2] == wanted[:2]
    jax.tree.map(np.testing.assert_array_equal, got[2], wanted[2])
    assert not np.array_equal(got[2].params["embed"], first.params["embed"])


def test_a_step_whose_short_samples_are_in_short_rows_is_the_same():
    """Scores of two models, values, and the update, by the trainer of a section."""
    mesh, found = sharding.make_mesh(jax.devices()[:1], 1, 1, 1), []
    for splits in (1, 4):
        section = cases.section(row_splits=splits, micro_batches=4, advantage="gae", kl="k3", kl_coef=0.1)
        trainer = step.Trainer(cases.MODEL, section, mesh, cases.params(), total_steps=20)
        batch = cases.batch(trainer, cases.groups(7, 4), score=trainer.score, rows=16, splits=splits)
        scores = [np.sort(getattr(batch, name)[batch.mask]) for name in ("old_logprobs", "ref_logprobs", "values")]
        found.append((scores, trainer.step(batch)["trainer/loss"], host(trainer.state.params)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *found)


def test_scores_are_computed_in_micro_batches_that_hold_tokens():
    segments = np.zeros((8, 3), np.int32)
    segments[[0, 1, 4]] = 1  # row r is of micro-batch r % 4: two hold tokens
    scored = by_micro_batch(lambda params, part: params + part["positions"], 4, 1.0, {
        "segment_ids": jnp.asarray(segments), "positions": jnp.arange(24.0).reshape(8, 3)
    })  # fmt: skip
    want = 1.0 + np.arange(24.0).reshape(8, 3)
    want[[2, 3, 6, 7]] = 0.0
    np.testing.assert_array_equal(scored, want)
