"""Rollouts that pass over versions: which they take, what that costs in lag, and what they never do."""

import dataclasses
import json

import pytest

from dora_jax.costs import open_costs
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.measured import Lengths
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.sim.bound import fragment_s
from dora_jax.sim.drafts import DecodeTimes
from dora_jax.sim.workload import Workload
from dora_jax.types import SampleId
from tests.fakes.older_snapshots import before_strides
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World
from tests.fakes.sim_runs import row, simulate

CONFIG = OrchestratorConfig(
    groups_per_step=4, group_size=4, total_steps=40, max_versions=6, stride=0, inflight=1.0, max_prompt_tokens=16
)
SHAPE = Shape(instances=((8, 1.0, 1),) * 4, train_s=0.3, load_s=1.0, pages=400)  # the trainer waits, and loads are dear


def played(config=CONFIG, shape=SHAPE):
    """(world, versions that were loaded, (stride, mean lag of the last steps) at each publication)"""
    loaded, steps = set(), []

    def watch(world, event, commands):
        world.brain.state.ledger.check()
        loaded.update(c.version for c in commands if isinstance(c, ev.LoadWeights))
        if isinstance(event, ev.StepPublished):
            strides = world.brain.state.strides
            steps.append((strides.stride, strides.mean_lag))

    world = World(config, shape).run(after=watch)
    world.audit()
    assert not world.mixed() and not world.broken() and max(world.lags()) < config.max_versions
    return world, loaded, steps


@pytest.mark.parametrize(("stride", "bound"), [(1, 3), (2, 3), (3, 3), (3, 6), (6, 6)])
def test_rollouts_take_every_nth_version_alone(stride, bound):
    world, loaded, _ = played(dataclasses.replace(CONFIG, stride=stride, max_versions=bound))
    assert loaded <= set(range(0, 40, stride)) and len(loaded) >= 40 // stride - 1
    assert world.retired == set(range(40)) - {world.brain.state.ledger.taken}


def test_a_stride_costs_lag_and_saves_loads():
    config = dataclasses.replace(CONFIG, max_versions=6)
    (one, _, one_steps), (three, _, three_steps) = (
        played(dataclasses.replace(config, stride=stride)) for stride in (1, 3)
    )
    assert three.now_s < 0.8 * one.now_s
    assert one_steps[-1][1] + 0.7 < three_steps[-1][1] < one_steps[-1][1] + 1.3  # (s - 1) / 2 and a quarter


def test_the_stride_follows_what_was_measured():
    world, loaded, steps = played()
    strides = [stride for stride, _ in steps]
    assert strides[:9] == [1] * 9 and max(strides) > 2 and len(loaded) < 25
    assert world.now_s < 0.9 * played(dataclasses.replace(CONFIG, stride=1))[0].now_s


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, {"train_s": 20.0}),  # the trainer never waits
        ({}, {"load_s": 0.01, "token_s": 0.2, "instances": ((64, 1.0, 1),)}),  # a version costs nothing to speak of
        ({"max_versions": 2}, {"token_s": 0.2}),  # the longest sample takes what K allows
        ({"max_mean_lag": 1.2}, {}),  # the load alone makes this lag
    ],
)
def test_no_version_is_passed_over_where_nothing_is_gained_or_nothing_is_left(config, shape):
    *_, steps = played(dataclasses.replace(CONFIG, **config), dataclasses.replace(SHAPE, **shape))
    assert {stride for stride, _ in steps} == {1}


@pytest.mark.parametrize("budget", [1.6, 2.0, 2.6])
def test_a_budget_of_the_mean_lag_is_kept(budget):
    raised = 0
    for seed in range(8):
        config = dataclasses.replace(CONFIG, total_steps=60, max_mean_lag=budget)
        _, _, steps = played(config, dataclasses.replace(SHAPE, seed=seed))
        assert max(lag for _, lag in steps) <= budget, seed
        raised += max(stride for stride, _ in steps) > 1
    assert raised == 8


def test_a_smaller_stride_is_tried_when_the_trainer_waits_no_more():
    """Its steps take ten times as long from the thirtieth on."""
    strides = []
    world = World(dataclasses.replace(CONFIG, total_steps=220), SHAPE)

    def watch(world, event, commands):
        if isinstance(event, ev.StepPublished):
            strides.append(world.brain.state.strides.stride)
            if event.version == 30:
                world.shape = dataclasses.replace(SHAPE, train_s=10.0)

    world.run(after=watch)
    assert max(strides[:40]) > 1 == strides[-1]


def test_an_instance_has_a_version_that_is_passed_over_for_its_evaluation_alone():
    config = dataclasses.replace(CONFIG, total_steps=12, stride=3, eval_every=1, eval_groups=2, eval_samples=2)
    world, loaded, _ = played(config)
    assert loaded == set(range(13)) and sorted(world.evaluated) == list(range(13))
    trained = {world.group_version[g] for _, groups in world.trained for g in groups}
    assert trained <= {0, 3, 6, 9}


def test_a_snapshot_at_any_point_goes_on_with_the_same_stride():
    snapshots = []
    world = World(CONFIG, SHAPE)
    world.run(after=lambda world, *_: snapshots.append(json.dumps(world.brain.snapshot())))
    for at in range(97, len(world.log) - 1, len(world.log) // 5):
        again = Orchestrator.restore(CONFIG, json.loads(snapshots[at]))
        assert all(again.step(event) == commands for event, commands in world.log[at + 1 :])
        assert again.state.strides.stride > 1


def test_a_snapshot_from_before_there_were_strides_goes_on():
    """With the same commands, where every version is taken."""
    config, snapshots = dataclasses.replace(CONFIG, stride=1, total_steps=8), []
    world = World(config, SHAPE)
    world.run(after=lambda world, *_: snapshots.append(json.dumps(world.brain.snapshot())))
    for at in range(40, len(world.log) - 1, len(world.log) // 5):
        data = before_strides(json.loads(snapshots[at]))
        assert data["format"] == 16
        again = Orchestrator.restore(config, data)
        assert all(again.step(event) == commands for event, commands in world.log[at + 1 :])


def test_what_tails_cost_is_known_from_the_lengths_of_ended_samples():
    for mean, instances in ((300.0, 4), (600.0, 8), (1200.0, 12)):
        config = row(
            "dora", workload__mean_tokens=mean, hardware__chips=32, hardware__rollout_chips=2 * instances,
            workload__prompt_tokens=1.0, orchestrator__groups_per_step=256,
        ).config  # fmt: skip
        lengths, work = Lengths(), Workload(config.workload)
        for group in range(256):
            for index in range(4):
                lengths.observe(work.length(SampleId(group, index)))
        # by buckets of a quarter of an octave, for what sim/bound.py counts by each length
        token_s, _ = DecodeTimes(open_costs(config.model, config.hardware, config.cost), config.draft).token(1)
        exact = fragment_s(config) * instances / token_s
        longest, unused = lengths.tail(instances)
        assert exact < unused < 1.25 * exact and 3000 <= longest < 3600


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stride": 7}, "stride is 7: it must be between 0 and max_versions, 6"),
        ({"stride": 2, "mode": "partial"}, "stride is 2: mode partial takes every version, and has a stride of 1"),
        (
            {"stride": 2, "max_mean_lag": 2.0},
            "max_mean_lag bounds the stride that follows what is measured: stride is 2",
        ),
        ({"max_mean_lag": 0.5}, "max_mean_lag is 0.5: with inflight 1 the mean lag is about that"),
    ],
)
def test_a_stride_that_cannot_be_is_refused(changes, sentence):
    assert any(sentence in problem for problem in dataclasses.replace(CONFIG, **changes).problems())


def test_the_simulator_passes_over_versions():
    """What a version costs is then paid by fewer of them: balancing, and loads."""
    one, _ = simulate("dora", orchestrator__max_versions=6, cost__balance_s=2.0, steps=9)
    three, audit = simulate("dora", orchestrator__max_versions=6, orchestrator__stride=3, cost__balance_s=2.0, steps=9)
    assert three.reloads < 0.5 * one.reloads and three.rollout["held"] < 0.5 * one.rollout["held"]
    assert {version % 3 for version in audit.version.values()} == {0} and max(audit.lags) < 6
