"""Adapters as what the trainer trains: the base stays, and one number comes out everywhere, as of all weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, lora, sharding
from dora_jax.models.families.config import Experts
from dora_jax.models.lora_config import Lora
from dora_jax.trainer import recipe, step
from tests.fakes import trainer_cases as cases

LORA = Lora(rank=2, alpha=4.0, targets=("attention", "mlp"))
MODEL = dataclasses.replace(cases.MODEL, n_layers=1)
MIXTURE = decoder.new_config(
    "qwen3_moe", **{name: getattr(MODEL, name) for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads")},
    head_dim=8, d_ff=32, experts=Experts(count=4, per_token=2, width=16),
)  # fmt: skip
OBJECTIVE = {"aggregation": "prompt_mean", "entropy_coef": 0.01, "learning_rate": 1e-2, "warmup_steps": 0}
BASE = cases.params(3)
slow = pytest.mark.slow


def mesh_of(data=1, fsdp=1, tensor=1, context=1, expert=1):
    devices = jax.devices()[: data * fsdp * tensor * context * expert]
    return sharding.make_mesh(devices, data, fsdp, tensor, context, expert)


def adapter(model=MODEL, shape=LORA):
    """Away from its first values: B is not zero."""
    rng = np.random.default_rng(1)
    like = lora.abstract(model, shape)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * x.shape[-2] ** -0.5, x.dtype), like)


def loss_and_gradient(model=MODEL, shape=LORA, micro_batches=1, remat="none", merged=False, **axes):
    """The adapter's loss and gradient; merged: those of all weights, with the adapter added into them."""
    mesh, base, one = mesh_of(**axes), cases.params(3, model), adapter(model, shape)
    section = cases.section(micro_batches=micro_batches, remat=remat, **OBJECTIVE)
    made = recipe.new_recipe(model, section, mesh, total_steps=4, lora=Lora() if merged else shape)
    shards = sharding.row_shards(mesh)
    arrays = cases.batch(type("Shape", (), {"section": section, "shards": shards}), cases.groups(4, 4), rows=8).arrays()
    arrays = {
        name: jax.device_put(x, sharding.batch_spec(mesh)) for name, x in {**arrays, "lag": arrays["version"]}.items()
    }

    def run(trained, arrays, *frozen):
        weights = step.Adapted(*frozen, trained) if frozen else trained
        learned, whole = step.Adapted.learning(weights)
        loss = lambda trained, arrays: step.micro_loss(made.model, section, whole(trained), arrays)
        grads, sums = step.accumulate(loss, learned, made.specs, arrays, micro_batches)
        return sums["loss"], grads

    trained, frozen = (lora.merge(base, one, shape.gain), ()) if merged else (one, (made.frozen_copy(base),))
    loss, grads = jax.jit(run)(jax.device_put(trained, made.specs), arrays, *frozen)
    return float(loss), jax.tree.map(np.asarray, grads)


@functools.cache
def expected(name):
    return loss_and_gradient(*CASES[name])


CASES = {"dense": (MODEL, LORA), "experts": (MIXTURE, dataclasses.replace(LORA, targets=("attention", "experts")))}


def assert_same(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    assert max(np.abs(x).max() for x in jax.tree.leaves(want[1])) > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got[1], want[1])


@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=slow)])
def test_the_gradient_is_that_of_the_merged_weights_through_the_factors(name):
    model, shape = CASES[name]
    loss, grads = expected(name)
    whole_loss, whole = loss_and_gradient(model, shape, merged=True)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for matrix, factors in adapter(model, shape)["layers"].items():
        dense, a, b = whole["layers"][matrix], *(np.asarray(factors[x]) for x in "ab")
        found = grads["layers"][matrix]
        np.testing.assert_allclose(found["a"], shape.gain * dense @ b.swapaxes(-1, -2), atol=2e-5)
        np.testing.assert_allclose(found["b"], shape.gain * a.swapaxes(-1, -2) @ dense, atol=2e-5)


@pytest.mark.parametrize(
    "name,axes",
    [
        pytest.param("dense", {"fsdp": 2, "tensor": 2, "context": 2}, marks=slow),
        pytest.param("dense", {"micro_batches": 2, "remat": "full"}, marks=slow),
        pytest.param("experts", {"expert": 2, "fsdp": 2, "tensor": 2}, marks=slow),
    ],
)
def test_meshes_and_micro_batches(name, axes):
    assert_same(loss_and_gradient(*CASES[name], **axes), expected(name))


def new_trainer(shape=LORA, **section):
    section = cases.section(**{**OBJECTIVE, **section})
    return step.Trainer(cases.MODEL, section, mesh_of(), BASE, total_steps=9, lora=shape, seed=5)


@pytest.fixture(scope="module")
def trained():
    trainer = new_trainer()
    first = jax.device_get((trainer.params, trainer.base))
    before = trainer.logprobs(cases.batch(trainer))
    metrics = [trainer.step(cases.batch(trainer)) for _ in range(2)]
    return trainer, first, before, metrics


@slow
def test_a_step_moves_the_adapter_alone(trained):
    trainer, (adapter, base), _, metrics = trained
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.base), base)
    jax.tree.map(np.testing.assert_array_equal, base, BASE)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), jax.device_get(trainer.params), adapter)
    assert all(m > 1e-3 for m in jax.tree.leaves(moved)) and metrics[-1]["trainer/updates_skipped"] == 0
    held = jax.tree.leaves(trainer.state.opt_state)
    assert sum(x.size for x in held if x.ndim) == 2 * sum(x.size for x in jax.tree.leaves(adapter))


@slow
def test_it_computes_what_the_merged_weights_do(trained):
    trainer, _, before, _ = trained
    batch = cases.batch(trainer)
    plain = step.Trainer(cases.MODEL, trainer.section, mesh_of(), BASE, total_steps=9)
    np.testing.assert_array_equal(before, plain.logprobs(batch))  # a fresh adapter changes nothing
    merged = lora.merge(trainer.base, trainer.params, LORA.gain)
    whole = step.Trainer(cases.MODEL, trainer.section, mesh_of(), merged, total_steps=9)
    np.testing.assert_allclose(trainer.logprobs(batch), whole.logprobs(batch), atol=2e-5)
    assert float(np.abs(trainer.logprobs(batch) - before).max()) > 1e-2


@slow
@pytest.mark.parametrize(
    "section",
    [
        {"kl": "k3", "kl_coef": 0.1, "ref_refresh_steps": 2},
        {"advantage": "vcpo", "correction": "vcpo_lr"},
        {"advantage": "gae", "value_learning_rate": 1e-2},
    ],
    ids=lambda section: next(iter(section)),
)
def test_every_option_trains(section):
    trainer = new_trainer(**section)
    for _ in range(2):
        batch = cases.batch(trainer, score=trainer.score)
        metrics = trainer.step(batch)
    assert metrics["trainer/updates_skipped"] == 0 and metrics["trainer/grad_norm"] > 0


@slow
def test_a_loaded_state_goes_on_to_the_same_bits(trained):
    trainer, *_ = trained
    saved = jax.device_get(trainer.state)
    other = new_trainer()
    other.load(saved.params, saved.opt_state, int(saved.step))
    batch = cases.batch(other)
    other.step(batch)
    trainer.step(batch)
    jax.tree.map(np.testing.assert_array_equal, other.params, trainer.params)
    jax.tree.map(np.testing.assert_array_equal, other.state.opt_state, trainer.state.opt_state)
