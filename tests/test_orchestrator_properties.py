"""Laws of the orchestrator over random configurations, bodies and faults, in virtual time.

DORA_EXAMPLES sets the number of configurations (500 by default, 2,000 a night).
"""

import dataclasses
import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import MODES, OrchestratorConfig
from dora_jax.types import issued_first_as
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World

EXAMPLES = int(os.environ.get("DORA_EXAMPLES", "2000" if os.environ.get("DORA_NIGHTLY") else "500"))
TASKS = {"task_cycle": ("sums", "proofs", "sums"), "task_ratios": (("proofs", 2.0),)}

configs = st.builds(
    OrchestratorConfig,
    mode=st.sampled_from(MODES),
    groups_per_step=st.integers(1, 5),
    group_size=st.sampled_from([1, 2, 4, 9]),  # 9 is more than most instances and some fleets hold
    total_steps=st.integers(1, 5),
    max_versions=st.integers(1, 4),
    inflight=st.sampled_from([1.0, 1.25, 2.0, 5.0]),
    eval_every=st.integers(0, 2),
    eval_groups=st.sampled_from([0, 0, 3]),
    eval_samples=st.integers(1, 2),
    max_filtered_rounds=st.just(50),
    kv_pressure=st.sampled_from([0.03, 0.3]),
    colocated=st.sampled_from([False, False, True]),
)
instances = st.tuples(st.sampled_from([1, 2, 5, 8]), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1, 1, 2, 3]))
shapes = st.builds(
    Shape,
    instances=st.lists(instances, min_size=1, max_size=5).map(tuple),
    pages=st.sampled_from([16, 17, 40, 64]),
    train_s=st.sampled_from([0.1, 1.0, 4.0]),
    load_s=st.sampled_from([0.05, 0.3, 1.0]),
    move_s=st.sampled_from([0.02, 0.3, 2.0]),
    reports_pages=st.booleans(),
    turns=st.sampled_from([1, 1, 2, 5]),
    environment_s=st.sampled_from([0.02, 1.0, 8.0]),
    seed=st.integers(0, 2**32),
)
faulty = st.builds(
    dict,
    filtered=st.sampled_from([0.0, 0.3]),
    failed=st.sampled_from([0.0, 0.1]),
    breaks=st.sampled_from([0.0, 0.05]),
    refused=st.sampled_from([0.0, 0.05]),
    move_fails=st.sampled_from([0.0, 0.4]),
    deaths=st.sampled_from([0.0, 0.5]),
)


def in_parts(config: OrchestratorConfig, parts: int) -> OrchestratorConfig:
    """A step of as many updates as divide it, up to `parts`."""
    return dataclasses.replace(config, updates=math.gcd(config.groups_per_step, parts))


def with_stride(config: OrchestratorConfig, stride: int) -> OrchestratorConfig:
    """Rollouts take every version, every n-th one, or those that the measured steps say (0)."""
    return dataclasses.replace(config, stride=min(stride, config.max_versions) if config.mode == "dora" else 1)


worlds = st.tuples(
    st.builds(
        with_stride, st.builds(in_parts, configs, st.sampled_from([1, 2, 3, 4, 5])), st.sampled_from([1, 0, 2, 4])
    ),
    st.sampled_from([{}, {}, TASKS, TASKS | {"task_lead": 0.5}, TASKS | {"task_adaptive": True, "task_lead": 0.2}]),
    shapes,
    st.one_of(st.just({}), faulty),
)
many = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))  # fmt: skip


def build(drawn) -> World:
    config, tasks, shape, faults = drawn
    config = OrchestratorConfig(**{**vars_of(config), **tasks})
    return World(config, Shape(**{**vars_of(shape), **faults}))


def vars_of(record) -> dict:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def balanced(world, event, commands):
    """The ledger, and the index of hosts: wherever a version has room for the longest sample, room is found.

    A host short of pages comes back when one of its samples ends, though the expected length, of prompts or of answers,
    may have fallen before.
    """
    world.brain.state.ledger.check()
    fleet = world.brain.state.fleet
    for version, ids in fleet.holders.items():
        serving = [
            host for host in map(fleet.instances.get, ids) if version in host.versions and version != host.leaving
        ]
        found = fleet.best(version)
        assert found is None or (found in serving and fleet.has_room(found)), f"version {version}"
        longest = fleet.measured.prompt_bound + fleet.measured.new_bound
        assert found or not any(
            fleet.has_room(host) and host.pages_used + -(-longest // host.page_size) <= host.pages for host in serving
        ), f"version {version}"


@pytest.mark.slow
@many
@given(worlds, st.integers(1, 150))
def test_every_mode_keeps_its_promises(drawn, at):
    world, written = build(drawn), []
    config = world.config

    def watch(world, event, commands):
        balanced(world, event, commands)
        if len(world.log) == at:
            written.append(json.dumps(world.brain.snapshot()))

    world.run(after=watch, max_events=30_000)
    world.audit()
    decisions = config.decisions
    assert decisions.mixes_versions or not world.mixed()
    assert decisions.max_lag is None or max(world.lags()) <= decisions.max_lag
    if config.mode not in ("evict", "rollpacker"):
        assert not world.broken()
    if written:
        goes_on_as_before(Orchestrator.restore(config, json.loads(written[0])), world.log[at:])
    if world.shape.seed % 4 == 0:
        goes_on_as_before(Orchestrator(config), world.log)


def goes_on_as_before(brain: Orchestrator, log) -> None:
    """The same events give the same commands: from the start, and from a snapshot."""
    for event, commands in log:
        assert brain.step(event) == commands


@settings(many, max_examples=max(1, EXAMPLES // 20))
@given(worlds, st.integers(1, 4))
def test_a_restart_at_a_step_trains_every_group_once(drawn, at):
    """All stages die when a version is published; `resume_state` goes on without skipping or repeating a group."""
    first = build(drawn)
    config, stop = first.config, min(at, first.config.total_steps - 1)

    def kill(world, event, commands):
        if world.published == stop and stop:
            raise Killed

    try:
        first.run(after=kill, max_events=30_000)
    except Killed:
        pass
    resume = json.loads(json.dumps(first.brain.resume_state()))
    if first.stop is not None:
        return
    second = World(config, first.shape, **resume).run(after=balanced, max_events=30_000)
    second.audit()
    done = [issued_first_as(g) for base, groups in first.trained if base < stop for g in groups]
    again = [issued_first_as(g) for _, groups in second.trained for g in groups]
    lost = set(first.filtered_ids) | set(first.failed_ids) | first.refused_ids
    lost |= set(second.filtered_ids) | set(second.failed_ids) | second.refused_ids
    assert not set(done) & set(again)
    state = second.brain.state
    issued = {g for g in range(max(state.cursors.values())) if g < state.cursors[config.task(g)]}
    lost = {issued_first_as(group_id) for group_id in lost if group_id >= 0}  # evaluation aside
    redo = set(map(issued_first_as, state.redo))
    assert (set(done) | set(again) | lost) - redo == issued - redo


class Killed(Exception):
    """The whole job is gone."""
