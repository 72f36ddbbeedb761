"""One number everywhere: loss and gradient do not move with mesh, micro-batches, packing, row order or remat."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, sharding
from dora_jax.trainer import step
from dora_jax.trainer.model import Model
from tests.fakes import trainer_cases as cases

# every term of the objective takes part: sequence ratios, a rejection, entropy, KL, denominators over prompts
RICH = {
    "policy_loss": "ppo",
    "aggregation": "prompt_mean",
    "correction": "mask",
    "entropy_coef": 0.01,
    "kl": "k3",
    "kl_coef": 0.1,
    "correction_params": {"level": "seq_mean", "lo": 0.01, "hi": 1e9},
}
MODEL = dataclasses.replace(cases.MODEL, n_layers=1)
PARAMS = cases.params(3, MODEL)
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def batch(micro_batches=1, shards=1, objective=RICH, **layout):
    trainer = type("Shape", (), {"section": cases.section(micro_batches=micro_batches, **objective), "shards": shards})

    def score(packed):
        ref = np.random.default_rng(5).normal(-4, 0.3, 48 * 48).astype(np.float32).reshape(48, 48)
        return {"ref_logprobs": ref[packed.tokens, packed.targets]}  # a function of the tokens, wherever they stand

    return cases.batch(trainer, cases.groups(7, 4), score=score, rows=16, **layout)  # 12 of the 16 rows hold tokens


def loss_and_gradient(
    arrays, *, data=1, fsdp=1, tensor=1, context=1, micro_batches=1, splits=1, remat="none", objective=RICH, **more
):
    mesh = sharding.make_mesh(jax.devices()[: data * fsdp * tensor * context], data, fsdp, tensor, context)
    section = cases.section(micro_batches=micro_batches, **objective)
    model = Model(MODEL, mesh, jnp.float32, remat, 0.9, 40, **more)
    specs = sharding.param_specs(MODEL, mesh)
    rows = sharding.batch_spec(mesh)

    def run(params, arrays):
        grads, sums = step.accumulate(
            functools.partial(step.micro_loss, model, section), params, specs, arrays, section.micro_batches, splits
        )
        return sums["loss"], grads

    arrays = {name: jax.device_put(x, rows) for name, x in {**arrays, "lag": arrays["version"]}.items()}
    jitted = jax.jit(run, out_shardings=(None, specs), compiler_options=FAST_COMPILE)
    loss, grads = jitted(jax.device_put(PARAMS, specs), arrays)
    return float(loss), jax.tree.map(np.asarray, grads)


@pytest.fixture(scope="module")
def expected():
    return loss_and_gradient(batch().arrays())


def assert_same(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    assert max(np.abs(x).max() for x in jax.tree.leaves(want[1])) > 1e-2  # not equal because nothing happens
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got[1], want[1])


QUICK = [(2, 1, 1, 1), (1, 1, 1, 2), (1, 4, 1, 1), (2, 2, 1, 2), (1, 1, 4, 1), (1, 2, 2, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize("data,fsdp,context,tensor", QUICK)
def test_meshes(expected, data, fsdp, context, tensor):
    arrays = batch(shards=data * fsdp).arrays()
    assert_same(loss_and_gradient(arrays, data=data, fsdp=fsdp, context=context, tensor=tensor), expected)


@pytest.mark.parametrize("context,micro_batches", [pytest.param(1, 1, marks=pytest.mark.slow), (1, 4), (2, 1)])
def test_prompts_shared_by_the_samples_of_a_group(expected, context, micro_batches):
    shared = batch(micro_batches, share_prompts=True)
    assert (shared.segment_ids > 0).sum() < (batch().segment_ids > 0).sum()
    assert_same(loss_and_gradient(shared.arrays(), context=context, micro_batches=micro_batches), expected)


@pytest.mark.parametrize(
    "objective",
    [
        {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"},
        {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    ],
)
def test_a_shared_prompt_is_no_sequence(objective):
    alone, shared = (batch(objective=objective, share_prompts=share) for share in (False, True))
    assert_same(
        loss_and_gradient(shared.arrays(), objective=objective), loss_and_gradient(alone.arrays(), objective=objective)
    )


@pytest.mark.parametrize("share", [False, True])
def test_samples_of_no_advantage_are_skipped(share):
    objective = {"policy_loss": "ppo", "aggregation": "token_mean"}
    shape = type("Shape", (), {"section": cases.section(**objective), "shards": 1})
    scored = [
        dataclasses.replace(g, rewards=g.rewards if g.group_id % 3 == 0 else np.zeros_like(g.rewards))
        for g in cases.groups(7, 4)
    ]
    every = cases.batch(shape, scored, rows=16, share_prompts=share)
    moving = cases.batch(shape, scored, rows=16, share_prompts=share, skip_zero_advantage=True)
    assert moving.mask.sum() < 0.6 * every.mask.sum() and moving.group_ids == every.group_ids
    got, want = (loss_and_gradient(batch.arrays(), objective=objective) for batch in (moving, every))
    assert_same(got, want)


def every_mesh():
    """All shapes of 1, 2, 4 and 8 devices; two KV heads allow a tensor axis of 2."""
    for n in (1, 2, 4, 8):
        for data, fsdp, context in itertools.product((1, 2, 4, 8), repeat=3):
            for tensor in (1, 2):
                if data * fsdp * context * tensor == n:
                    yield data, fsdp, context, tensor


@pytest.mark.slow
@pytest.mark.parametrize("data,fsdp,context,tensor", [mesh for mesh in every_mesh() if mesh not in QUICK])
def test_every_other_mesh(expected, data, fsdp, context, tensor):
    test_meshes(expected, data, fsdp, context, tensor)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}])
def test_bfloat16_factors(expected, mesh):
    """Near float32, by more than an order of summation and by less than a hundredth, and as near on a mesh."""
    loss, grads = loss_and_gradient(batch(shards=mesh.get("fsdp", 1)).arrays(), narrow=True, **mesh)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected[1]))
    far = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (grads, expected[1])), strict=True))
    assert loss == pytest.approx(expected[0], rel=1e-2) and 1e-4 * largest < far < 1e-2 * largest


@pytest.mark.parametrize("micro_batches", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_micro_batches(expected, micro_batches):
    arrays = batch(micro_batches).arrays()
    assert_same(loss_and_gradient(arrays, micro_batches=micro_batches), expected)


def test_micro_batches_on_a_mesh(expected):
    assert_same(loss_and_gradient(batch(2, 4).arrays(), fsdp=2, data=2, tensor=2, micro_batches=2), expected)


@pytest.mark.parametrize("micro_batches,mesh", [(4, {}), (1, {}), (4, {"fsdp": 2, "tensor": 2})])
def test_short_rows(expected, micro_batches, mesh):
    """Long samples are in the first micro-batches, and the third one's rows hold none."""
    arrays = batch(micro_batches, mesh.get("fsdp", 1), splits=4).arrays()
    splits = arrays["segment_ids"].reshape(-1, micro_batches, 4, 8)
    long = ((splits[:, :, :-1, -1] == splits[:, :, 1:, 0]) & (splits[:, :, 1:, 0] > 0)).any((0, 2))
    if micro_batches == 4:
        assert long.tolist() == [True, True, False, False]
        assert (splits > 0).any((0, 2, 3)).tolist() == [True, True, True, False]
    assert_same(loss_and_gradient(arrays, micro_batches=micro_batches, splits=4, **mesh), expected)


def one_sequence_a_row(packed):
    """Each segment alone in its row, from the first column."""
    names = [name for name in packed if name != "positions"]
    out = {name: np.zeros((28, packed["tokens"].shape[1]), x.dtype) for name, x in packed.items()}
    n = 0
    for row, ids in enumerate(packed["segment_ids"]):
        for segment in range(1, ids.max() + 1):
            at = ids == segment
            for name in names:
                out[name][n, : at.sum()] = packed[name][row, at]
            out["segment_ids"][n, : at.sum()] = 1
            out["positions"][n, : at.sum()] = np.arange(at.sum())
            n += 1
    return out


def test_packing_and_padding(expected):
    padded = one_sequence_a_row(batch().arrays())
    assert (padded["segment_ids"].max(1) > 0).sum() == 28
    assert_same(loss_and_gradient(padded), expected)


def test_logits_of_packed_rows_are_those_of_each_sequence_alone():
    model = Model(MODEL, sharding.make_mesh(jax.devices()[:1], 1, 1, 1), jnp.float32, "none", 1.0, None)

    def logits(arrays):
        run = jax.jit(lambda p, a: decoder.logits(MODEL, p, model.hidden(p, a)[0]), compiler_options=FAST_COMPILE)
        return np.asarray(run(PARAMS, arrays))

    packed = batch().arrays()
    together, alone, n = logits(packed), logits(one_sequence_a_row(packed)), 0
    for row, ids in enumerate(packed["segment_ids"]):
        for segment in range(1, ids.max() + 1):
            at = ids == segment
            np.testing.assert_allclose(together[row, at], alone[n, : at.sum()], atol=1e-5)
            n += 1
    assert n == 28 and (packed["segment_ids"].max(1) > 1).sum() > 4  # rows of several sequences


def test_row_order(expected):
    order = np.random.default_rng(0).permutation(16)
    assert_same(loss_and_gradient({name: x[order] for name, x in batch().arrays().items()}), expected)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat(expected, remat):
    assert_same(loss_and_gradient(batch().arrays(), remat=remat), expected)


def test_scanned_layers(expected, monkeypatch):
    monkeypatch.setattr(step, "UNROLLED_LAYERS", 0)
    assert_same(loss_and_gradient(batch().arrays()), expected)


def test_head_in_chunks(expected):
    eight_of_32 = 4 * 16 * 48 * 8  # positions at once
    assert_same(loss_and_gradient(batch().arrays(), logits_bytes=eight_of_32), expected)


def test_causality_and_segment_isolation_by_gradients():
    """Each position has a token of its own, so the gradient to that token's embedding says which were looked at."""
    cfg = dataclasses.replace(MODEL, tie_embeddings=False)
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    model = Model(cfg, mesh, jnp.float32, "none", 1.0, None)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    arrays = {
        "tokens": np.arange(8, dtype=np.int32)[None],
        "targets": np.full((1, 8), 9, np.int32),
        "segment_ids": segments,
        "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 0]], np.int32),
    }
    params = cases.params(0, cfg)

    def logprobs(embed):
        return model.logprobs({**params, "embed": embed}, arrays)[0][0]

    jacobian = jax.jit(jax.jacrev(logprobs), compiler_options=FAST_COMPILE)(params["embed"])[:, :8]
    looked_at = np.abs(jacobian).max(-1) > 1e-7
    want = (segments.T == segments) & np.tri(8, dtype=bool)
    np.testing.assert_array_equal(looked_at, want)
