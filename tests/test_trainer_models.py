"""The other models of a step: reference, value model; the gradient norms and the step scaling of VCPO."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import sharding
from dora_jax.models.families import new_config
from dora_jax.models.families.config import Experts
from dora_jax.trainer import optim, score, step
from dora_jax.trainer.model import Model
from tests.fakes import trainer_cases as cases

pytestmark = pytest.mark.slow  # many compilations
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def one_device():
    return sharding.make_mesh(jax.devices()[:1], 1, 1, 1)


@pytest.fixture(scope="module")
def trainer():
    section = cases.section(
        advantage="gae",
        advantage_params={"gamma": 1.0, "lam": 0.9},
        value_learning_rate=3e-2,
        kl="k3",
        kl_coef=0.1,
        ref_refresh_steps=2,
        micro_batches=2,
        anchor="proximal",
    )
    return step.Trainer(cases.MODEL, section, one_device(), cases.params(), total_steps=20)


def test_value_model_and_reference_through_steps(trainer):
    """V starts at 0 and comes nearer to the returns; the reference is the first policy until it is refreshed."""
    first = cases.batch(trainer, score=trainer.score)
    assert not first.values.any() and first.returns[first.mask].any()
    np.testing.assert_array_equal(first.ref_logprobs, first.old_logprobs)
    losses = []
    for n in range(1, 5):
        batch = cases.batch(trainer, score=trainer.score)
        metrics = trainer.step(batch)
        losses.append(metrics["trainer/value_loss"])
        gap = np.abs(batch.ref_logprobs - batch.old_logprobs).max()
        assert (gap == 0) == (n in (1, 3)), n  # refreshed after step 2: equal again when step 3 begins
        assert metrics["trainer/ratio_mean"] == pytest.approx(1, abs=1e-4)  # proximal: first update of its step
    assert losses[-1] < 0.8 * losses[0]
    critic = trainer.state.opt_state["critic"]
    assert int(optim.updates_done(critic.opt_state)) == 4
    assert np.abs(np.asarray(critic.params["head"])).max() > 0


def test_a_value_gradient_that_is_not_finite_counts_and_moves_no_value(trainer):
    batch = cases.batch(trainer, score=trainer.score)
    before = np.array(trainer.state.opt_state["critic"].params["head"])
    bad = dataclasses.replace(batch, returns=np.where(batch.mask, np.inf, 0).astype(np.float32))
    assert trainer.step(bad)["trainer/updates_skipped"] == 1
    np.testing.assert_array_equal(before, np.asarray(trainer.state.opt_state["critic"].params["head"]))


def test_resume_refuses_a_step_whose_reference_is_lost(trainer):
    state = trainer.state
    with pytest.raises(ValueError, match="checkpoint.every must be a multiple of trainer.ref_refresh_steps=2"):
        trainer.load(state.params, state.opt_state, 3)
    trainer.load(state.params, state.opt_state, 4)
    assert int(trainer.state.step) == 4


def test_gradient_norms_are_those_of_each_trajectory_alone():
    batch = cases.batch(type("Shape", (), {"section": cases.SECTION, "shards": 1}), cases.groups(2, 3))
    model = Model(cases.MODEL, one_device(), jnp.float32, "none", 1.0, None)
    params, segments = cases.params(), score.segments_of(batch)
    assert len(segments) == 6
    got = jax.jit(functools.partial(score.grad_norms_sq, model), compiler_options=FAST_COMPILE)(
        params, score.one_a_row(batch, segments)
    )

    def log_prob(params, chosen):
        return jnp.sum(jnp.where(chosen, model.logprobs(params, batch.arrays())[0], 0.0))

    gradient = jax.jit(jax.grad(log_prob), compiler_options=FAST_COMPILE)
    for i, (row, start, stop) in enumerate(segments):
        alone = np.zeros_like(batch.mask)
        alone[row, start:stop] = batch.mask[row, start:stop]
        want = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient(params, alone)))
        assert float(got[i]) == pytest.approx(want, rel=1e-4)
    covered = np.zeros(batch.tokens.shape, int)
    for row, start, stop in segments:
        covered[row, start:stop] += 1
    assert np.array_equal(covered, batch.segment_ids > 0) and np.all(np.asarray(got) > 0)


def test_vcpo_scales_the_step_by_its_effective_samples():
    """Two runs that differ in what the engine reported: the same direction, a step shorter by lr_scale."""
    section = cases.section(policy_loss="reinforce", loss_params={}, correction="vcpo_lr", warmup_steps=0)
    trainer = step.Trainer(cases.MODEL, section, one_device(), cases.params(), total_steps=5)
    batch = cases.batch(trainer)
    first = jax.tree.map(np.array, trainer.state)
    stale = np.where(batch.segment_ids == 1, np.float32(0.3), 0) * batch.mask
    moves, scales = [], []
    for shift in (0, stale):
        own = np.where(batch.mask, trainer.logprobs(batch), 0)
        metrics = trainer.step(type(batch)(**{**vars(batch), "behavior_logprobs": own + shift}))
        moves.append(np.asarray(trainer.params["embed"]) - first.params["embed"])
        scales.append(metrics["trainer/lr_scale"])
        trainer.load(first.params, first.opt_state, 0)
    assert scales[0] == pytest.approx(1, abs=1e-4) and scales[1] < 0.95
    np.testing.assert_allclose(moves[1], moves[0] * scales[1], atol=1e-7)


def test_matrices_of_a_mixture_are_rounded_once_and_their_gradients_are_the_same():
    """Over a mesh, in bfloat16: what computes in float32 is as it was, and so are all gradients."""
    e = Experts(count=4, per_token=2, width=16)
    cfg = new_config(
        "qwen3_moe", vocab_size=48, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=16, experts=e
    )
    mesh = sharding.make_mesh(jax.devices()[:2], 1, 1, 1, expert=2)
    model = Model(cfg, mesh, jnp.bfloat16, "none", 1.0, None)
    params = cases.params(model=cfg)
    rounded = model.rounded(params)
    wide = {name for name, x in rounded["layers"].items() if x.dtype == jnp.float32}
    assert wide == {"router", "attn_norm", "mlp_norm", "q_norm", "k_norm"} and rounded["embed"].dtype == np.float32
    arrays = {name: jnp.zeros((2, 8), jnp.int32) + 1 for name in ("tokens", "targets", "segment_ids")}
    arrays["positions"] = jnp.broadcast_to(jnp.arange(8), (2, 8))
    gradient = jax.jit(jax.grad(lambda p: model.logprobs(p, arrays)[0].sum()), compiler_options=FAST_COMPILE)
    found, expected = gradient(rounded), gradient(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x.astype(np.float32), y, rtol=1e-6), found, expected)
