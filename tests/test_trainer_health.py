"""Probe, meter, moments in host memory, updates that start early: what surrounds the update."""

import dataclasses
import functools
import queue
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import config, publish
from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.costs import update as update_costs
from dora_jax.models import grouped_experts
from dora_jax.runtime.assembly import run
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.trainer import flops, objective, optim, step
from tests.fakes import trainer_cases as cases


@pytest.fixture(scope="module")
def shared():
    section = cases.section(peak_tflops=1e-3)
    trainer = step.Trainer(cases.MODEL, section, cases.mesh(), cases.params(), total_steps=20)
    return trainer, jax.tree.map(np.array, trainer.state)


@pytest.fixture
def trainer(shared):
    trainer, first = shared
    trainer.load(first.params, first.opt_state, 0)
    trainer.health.max_mismatch = 0.0
    return trainer


def shifted(trainer, batch, gap):
    """The batch of an engine whose log-probs are off by `gap` on every token."""
    own = trainer.logprobs(batch)
    return dataclasses.replace(batch, behavior_logprobs=np.where(batch.mask, own - np.float32(gap), 0))


def test_a_row_alone_has_the_log_probs_of_its_batch(trainer):
    batch = cases.batch(trainer, cases.groups(1, 4, seed=9), rows=16)
    row = int(np.flatnonzero(batch.mask.any(1))[-1])
    np.testing.assert_allclose(
        trainer.row_logprobs(batch, row)[batch.mask[row]], trainer.logprobs(batch)[row][batch.mask[row]], atol=1e-4
    )


# ------------------------------------------------------------------- probe


def probe_of(trainer, gap, version=7):
    """One group of `version`, whose weights are the trainer's present ones and those that the engine had, off by
    gap."""
    batch = shifted(trainer, cases.batch(trainer, cases.groups(1, 4, seed=9), rows=16), gap)
    batch = dataclasses.replace(batch, version=np.where(batch.mask, version, -1))
    return step.Probe(batch, version, publish.offered_copy("float32")(trainer.params))


def test_a_step_without_lag_0_measures_the_gap_on_its_probe(trainer):
    stale = dataclasses.replace(cases.batch(trainer), version=np.full((16, 32), -1, np.int32))
    probe = probe_of(trainer, 0.25)
    assert "mismatch/mean" not in trainer.step(stale)
    metrics = trainer.step(stale, probe=probe)  # at other weights by now: the probe's are its own
    assert metrics["mismatch/tokens"] == probe.batch.mask.sum() and metrics["mismatch/max"] == pytest.approx(
        0.25, abs=1e-5
    )
    own = trainer.step(
        shifted(trainer, dataclasses.replace(stale, version=np.where(stale.mask, 2, -1)), 0.0), probe=probe
    )
    assert own["mismatch/mean"] < 1e-5  # lag 0 in the batch itself: the probe is not looked at


def test_the_probes_gap_by_hand_and_its_bound(trainer):
    probe = probe_of(trainer, 0.25)
    got = trainer.probe(probe)
    assert [got[f"mismatch/{name}"] for name in ("mean", "p99", "max")] == pytest.approx([0.25] * 3, abs=1e-5)
    assert got["mismatch/kl"] == pytest.approx(np.exp(0.25) - 1.25, abs=1e-5)
    before = jax.tree.map(np.array, trainer.params)
    trainer.health.max_mismatch = 0.2
    stale = dataclasses.replace(cases.batch(trainer), version=np.full((16, 32), -1, np.int32))
    with pytest.raises(
        config.RunError, match="disagree by 0.25 nats a token at equal weights, above trainer.max_mismatch=0.2"
    ):
        trainer.step(stale, probe=probe)
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.tree.map(np.array, trainer.params)
    )  # stopped before the update


def test_a_probe_of_another_version_is_refused(trainer):
    with pytest.raises(ValueError, match="the probe holds no token of version 5: only equal weights compare"):
        trainer.probe(probe_of(trainer, 0.0)._replace(version=5))


def test_a_probe_in_a_run_is_one_group_of_the_version_before(trainer):
    """Versions are weights here: what a step of base 2 measures is a group of version 1 under the weights of version
    1."""
    seen, store = [], MemoryGroupStore()

    def measured(batches, probe=None):
        seen.append(probe)
        return {}

    worker = TrainerWorker(
        SimpleNamespace(step=measured, params=None),
        lambda groups, base: (),
        store,
        Versions(),
        2,
        queue.SimpleQueue(),
        probe=run.prober(run_config(), trainer),
    )
    for base, version in enumerate((0, 0, 1, 1)):
        scored = dataclasses.replace(cases.groups(1, 4, seed=base, version=version)[0], group_id=base)
        store.put(scored)
        worker.train((base,), base)
    assert [probe and (probe.version, probe.weights) for probe in seen] == [None, (0, 0), (1, 1), None]
    assert (seen[2].batch.version[seen[2].batch.mask] == 1).all() and not seen[2].batch.loss_weights.any()


class Versions:
    """A weight store in which the weights of version v are v."""

    def put(self, version, params, digest=0, copy=0):
        return 0

    def get(self, version, shardings):
        return version


# ------------------------------------------------------------------- meter


def test_model_flops_by_hand():
    """One layer, d = 16, 4 and 2 heads of 8, ff 32, 48 ids; a sequence of 3 tokens looks at 1 + 2 + 3 of them."""
    cfg = dataclasses.replace(cases.MODEL, n_layers=1)
    params = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 32 + 16 * 48
    assert update_costs.matmul_params(cfg) == params
    assert update_costs.model_flops(cfg, [3]) == 3 * (2 * params * 3 + 4 * 4 * 8 * 6)
    assert update_costs.model_flops(cfg, [3, 3]) == 2 * update_costs.model_flops(cfg, [3])
    assert update_costs.model_flops(cfg, [2], [3]) == 3 * (
        2 * params * 2 + 4 * 4 * 8 * (3 + 2 * 3)
    )  # behind a shared prompt


def test_step_reports_its_use_of_the_chip(trainer):
    batch = cases.batch(trainer)
    trainer.step(batch)
    metrics = trainer.step(batch)
    lengths = batch.lengths[0]
    assert sum(lengths) == (batch.segment_ids > 0).sum() and len(lengths) == 16
    seconds = lengths.sum() / metrics["trainer/tokens_per_s"]
    assert metrics["trainer/mfu"] == pytest.approx(update_costs.model_flops(cases.MODEL, lengths) / seconds / 1e9)
    assert metrics["trainer/packed_share"] == pytest.approx(lengths.sum() / batch.tokens.size)
    assert 1 < metrics["trainer/effective_batch"] <= 16
    assert flops.peak_flops("TPU v5 lite") == 197e12 and flops.peak_flops("TPU7x") == 2307e12 / 2
    assert flops.peak_flops("cpu") is None


def test_traced_flops_count_loops_shards_and_recomputation():
    x, w = np.ones((8, 16), np.float32), np.ones((16, 16), np.float32)

    def layers(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]

    assert flops.traced_flops(jax.make_jaxpr(layers)(x, w).jaxpr) == 5 * 2 * 8 * 16 * 16
    times = jax.make_jaxpr(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: x @ w, x))(x, 3)
    assert flops.traced_flops(times.jaxpr, loops=7) == 7 * 2 * 8 * 16 * 16
    rows = jax.sharding.PartitionSpec("fsdp")
    sharded = jax.shard_map(lambda x: x @ w, mesh=cases.mesh(fsdp=4), in_specs=rows, out_specs=rows)
    assert flops.traced_flops(jax.make_jaxpr(sharded)(x).jaxpr) == 2 * 8 * 16 * 16
    again = jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(lambda x: ((x @ w) ** 2).sum())(x)))(x)
    assert flops.traced_flops(again.jaxpr) == 3 * 2 * 8 * 16 * 16  # forward, again, backward to x


def test_traced_flops_of_grouped_products_are_those_of_all_rows():
    """Both XLA's and the kernel's, whose grid depends on the load; a loop over blocks of rows counts once."""
    h, w, sizes = jnp.ones((256, 16)), jnp.ones((4, 16, 32)), jnp.full(4, 64)
    ragged = jax.make_jaxpr(jax.grad(lambda w: jax.lax.ragged_dot(h, w, sizes).sum()))(w)
    assert flops.traced_flops(ragged.jaxpr) == 2 * 2 * 256 * 16 * 32  # the product, and its gradient
    assert flops.kernel_flops(ragged.jaxpr) == {"ragged-dot-none": 2 * 256 * 16 * 32}
    ids, weights = jnp.zeros((256, 2), jnp.int32), jnp.ones((256, 2))

    def mixed(h, parts):
        return grouped_experts.experts(h, weights, ids, w, w, w.swapaxes(1, 2), parts=parts).sum()

    for parts, rows in ((1, 512), (2, 384)):  # 1.25 x 512 / 2 rows are three tiles of 128
        traced = jax.make_jaxpr(jax.grad(functools.partial(mixed, parts=parts)))(h).jaxpr
        assert flops.traced_flops(traced, loops=7) == (3 + 8) * 2 * rows * 16 * 32
        assert flops.kernel_flops(traced) == {"gmm": 2 * rows * 16 * 32, "tgmm": 2 * rows * 16 * 32}


# ------------------------------------------------- devices that are lent


def test_a_step_whose_state_leaves_the_devices_between_its_updates_is_the_same_to_the_bit(trainer, shared, caplog):
    _, first = shared
    batches = [cases.batch(trainer, cases.groups(seed=seed)) for seed in (1, 2)]
    stayed, metrics = cases.ends_of(trainer, first, batches, lambda trainer: None)
    with jax.log_compiles():
        left, again = cases.ends_of(trainer, first, batches, cases.to_host_and_back)
    jax.tree.map(np.testing.assert_array_equal, stayed, left)
    assert metrics and metrics == again and not [line for line in caplog.messages if "update" in line], (
        "programs are kept"
    )


# ------------------------------------------------------------- early updates


def test_the_first_update_runs_before_the_second_batch_exists(trainer):
    scored = cases.groups(4, 4)
    seen = []

    def batches():
        for i in (0, 1):
            seen.append(int(optim.updates_done(trainer.state.opt_state)))
            yield cases.batch(trainer, scored[i::2], rows=16)

    metrics = trainer.step(batches())
    assert seen == [0, 1] and int(trainer.state.step) == 1
    lazily = jax.tree.map(np.array, trainer.params)
    assert metrics["trainer/tokens"] == sum(len(s.out_ids) for g in scored for s in g.samples)
    assert max(np.abs(x).max() for x in jax.tree.leaves(lazily)) > 0


@pytest.mark.parametrize(
    "changes,early",
    [
        ({}, True),
        ({"updates": 1}, False),
        ({"anchor": "proximal"}, False),
        ({"kl": "k3"}, False),
        ({"advantage": "reinforce_pp_baseline"}, False),
        ({"advantage": "rloo"}, True),
        ({"correction": "mask"}, False),
    ],
)
def test_who_may_start_early(changes, early):
    assert objective.may_start_early(cases.section(**({"updates": 4} | changes))) is early


def run_config(**changes):
    return config.Config(
        trainer=cases.section(updates=2),
        rollout=config.RolloutSection(max_prompt_tokens=8, max_new_tokens=12),
        orchestrator=config.OrchestratorSection(groups_per_step=4, group_size=4),
        **changes,
    )


def test_updates_that_take_their_groups_apart_are_made_again_of_the_same_groups(trainer):
    """Parts come one by one; a resume hands over the whole step in the order in which it was taken."""
    pack = run.packer(run_config(), trainer)
    taken = [cases.groups(4)[i] for i in (2, 0, 3, 1)]
    alone = [batch.group_ids for part in (taken[:2], taken[2:]) for batch in pack(part, 0)]
    assert alone == [batch.group_ids for batch in pack(taken, 0)] == [(0, 2), (1, 3)]


def test_a_step_is_one_whole_where_its_updates_cannot_part(trainer):
    assert run.updates_apart(run_config()) == 2
    assert run.updates_apart(run_config(cluster=config.ClusterSection(launcher="process"))) == 2
    shuffled = config.TaskSection(shuffle_rewards=True)
    assert run.updates_apart(run_config(task=shuffled)) == 1
    assert [batch.group_ids for batch in run.packer(run_config(task=shuffled), trainer)(cases.groups(4), 0)] == [
        (0, 2),
        (1, 3),
    ]


def test_rows_must_divide_over_the_context_axis():
    assert objective.check(cases.section(context=4)) == []
    (error,) = objective.check(cases.section(context=5))
    assert error == "trainer.pack_tokens=32 is not divisible by the mesh axis trainer.context=5"


# --------------------------------------------------- scores on sharded batches


@pytest.mark.slow
def test_minimum_variance_baseline_on_a_sharded_packed_batch():
    model = dataclasses.replace(cases.MODEL, n_layers=1)
    section = cases.section(advantage="vcpo", policy_loss="reinforce", loss_params={})
    advantages = []
    for shape in ({}, {"data": 2, "fsdp": 2, "context": 2}):
        trainer = step.Trainer(model, section, cases.mesh(**shape), cases.params(3, model), total_steps=5)
        batch = cases.batch(trainer, cases.groups(2, 3), score=trainer.score, rows=8, shards=1)
        advantages.append(batch.advantages)
    assert np.abs(advantages[0]).max() > 0.1
    np.testing.assert_allclose(advantages[1], advantages[0], atol=1e-5)
