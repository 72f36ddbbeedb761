"""Expert routes on their way from a sample into an update, and what the trainer does with its routers."""

import dataclasses

import jax
import numpy as np
import pytest

from dora_jax.bench import train_step
from dora_jax.buffer import layout as batch_layout
from dora_jax.buffer import pack
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Experts
from dora_jax.models.routes import RouteShape
from dora_jax.trainer import loss, step
from dora_jax.trainer.advantage import Prepare
from dora_jax.types import TokenTable
from tests.fakes import trainer_cases as cases

EXPERTS = Experts(count=4, per_token=2, width=8)
SIZES = dict(vocab_size=48, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=32)
MODEL = decoder.new_config("qwen3_moe", **SIZES, experts=EXPERTS)
CORRECTED = dataclasses.replace(MODEL, experts=dataclasses.replace(EXPERTS, corrected=True))
ROUTES = RouteShape.of(MODEL)


def routed(groups, shape=ROUTES):
    """The groups with routes that tell group, sample, position: of a group, prompts have the same."""
    rng = np.random.default_rng(5)

    def table(sample, prompt):
        rows = len(sample.prompt_ids) + len(sample.out_ids) - 1
        scores = rng.random((rows, shape.layers, shape.choices))
        routes = np.argsort(scores, axis=-1)[..., : shape.per_token].astype(shape.dtype)
        routes[: len(prompt)] = prompt
        return TokenTable(routes=routes)

    def one(group):
        length = len(group.samples[0].prompt_ids) - 1
        prompt = np.tile(np.array([3, 1], shape.dtype), (length, shape.layers, 1))
        samples = tuple(dataclasses.replace(s, table=table(s, prompt)) for s in group.samples)
        return dataclasses.replace(group, samples=samples)

    return [one(group) for group in groups]


def layout(share_prompts=False, routes=ROUTES):
    shape = batch_layout.layout(
        pack_tokens=32, rows=0, micro_batches=2, samples=16, max_tokens=20, shards=1, share_prompts=share_prompts
    )
    return dataclasses.replace(shape, routes=routes)


def packed(groups, share_prompts=False, routes=ROUTES):
    objective = Prepare(cases.section(), cases.MAX_NEW)
    return pack.pack(groups, layout(share_prompts, routes), objective)


def trainer(model=MODEL, **changes):
    section = cases.section(micro_batches=2, **changes)
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    return step.Trainer(model, section, mesh, cases.params(model=model), total_steps=10)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_each_token_keeps_its_routes_wherever_it_is_packed(share_prompts):
    groups = routed(cases.groups())
    batch = packed(groups, share_prompts)
    assert batch.routes.shape == (*batch.tokens.shape, 2, 2) and batch.routes.dtype == np.uint8
    assert (batch.routes[batch.segment_ids == 0] == 255).all() and (batch.routes[batch.segment_ids > 0] < 4).all()
    found = {routes.tobytes() for row in batch.routes for routes in row}
    for sample in (s for group in groups for s in group.samples):
        assert {routes.tobytes() for routes in sample.table.routes} <= found
        first = np.flatnonzero((batch.routes == sample.table.routes[-1]).all((-1, -2)) & batch.mask)
        assert len(first)


def test_a_sample_that_lacks_a_route_is_refused_by_name():
    groups = routed(cases.groups())
    bare = dataclasses.replace(groups[2].samples[1], table=TokenTable())
    samples = (groups[2].samples[0], bare, *groups[2].samples[2:])
    with pytest.raises(ValueError, match="sample 1 of group 2 carries no expert routes, which trainer.routing_replay"):
        packed([*groups[:2], dataclasses.replace(groups[2], samples=samples), groups[3]])


@pytest.mark.slow
def test_an_update_takes_the_routes_of_sampling_and_counts_what_it_would_not_have_chosen():
    groups = routed(cases.groups())
    replaying = trainer(routing_replay="rollout")
    assert replaying.routes == ROUTES and trainer().routes is None
    before = jax.tree.map(np.asarray, replaying.params)
    metrics = replaying.step(packed(groups))
    assert metrics["moe/replay_changed"] > 0.1 and metrics["moe/dropped_share"] == 0
    assert np.isfinite(metrics["trainer/loss"])
    moved = np.abs(np.asarray(replaying.params["layers"]["router"]) - before["layers"]["router"]).max()
    assert moved > 0  # the gate learns although it did not choose
    own = trainer().step(packed(groups, routes=None))
    assert own["moe/replay_changed"] == 0 and own["trainer/loss"] != metrics["trainer/loss"]
    assert own["moe/load_max"] > 1 > own["moe/load_min"] and 0 < own["moe/entropy"] < np.log(4)


@pytest.mark.slow
@pytest.mark.slow
def test_the_bias_of_a_busy_expert_falls_and_nothing_else_moves_it():
    balanced = trainer(CORRECTED, router_bias_rate=0.25, learning_rate=1e-3)
    before = np.asarray(balanced.params["layers"]["router_bias"])
    batch = packed(cases.groups(), routes=None)
    _, sums = step.update(balanced.recipe, balanced.state, {name: x for name, x in batch.arrays().items()})
    balanced.step(batch)
    load = np.asarray(sums["expert_load"])
    expected = before + 0.25 * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_allclose(balanced.params["layers"]["router_bias"], expected, atol=1e-6)


def test_the_load_balance_loss_is_one_where_the_load_is_even():
    def of(load, scores):
        load, scores = np.array([load], np.float32), np.array([scores], np.float32)
        return float(loss.load_balance_loss(EXPERTS, decoder.Routed(np.zeros((1, 1, 1, 2)), load, scores, 0, 0)))

    assert of([2, 2, 2, 2], [1, 1, 1, 1]) == pytest.approx(1.0)
    assert of([8, 0, 0, 0], [4, 0, 0, 0]) == pytest.approx(4.0)
    even, pulled = trainer(), trainer(load_balance_coef=0.5)
    batch = packed(cases.groups(), routes=None)
    assert pulled.step(batch)["trainer/loss"] > even.step(batch)["trainer/loss"] + 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"routing_replay": "rollout"},
            "trainer.routing_replay=rollout needs a model with experts, and this qwen3 has",
        ),
        (
            {"load_balance_coef": 0.1},
            "trainer.load_balance_coef=0.1 needs a model with experts, and this qwen3 has none",
        ),
        ({"router_bias_rate": 0.1}, "trainer.router_bias_rate=0.1 needs a model with a router with a selection bias"),
    ],
)
def test_what_a_dense_model_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        trainer(cases.MODEL, **changes)


@pytest.mark.slow
def test_replayed_routes_bring_engine_and_trainer_together_in_bfloat16():
    """Most of the gap between the engine and the trainer of a run in bfloat16 comes from other experts, not from
    rounding."""
    cfg = decoder.new_config("qwen3_moe", **train_step.MIXTURE)
    own, replay, changed = train_step.replayed(cfg, decoder.init_params(cfg, 0), count=8, tokens=32)
    assert changed > 0
    assert np.abs(own).mean() >= 2.5 * np.abs(replay).mean()
    assert np.abs(own).max() >= 4 * np.abs(replay).max()
