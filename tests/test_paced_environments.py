"""Environments of a paced run: where the turns of the simulator's samples lie, and both ways to wait. No time is
judged."""

import dataclasses

import pytest

from dora_jax.config.files import load_file
from dora_jax.sim import config as sims
from dora_jax.sim.config import SimConfig
from dora_jax.sim.workload import Workload
from dora_jax.types import SampleId
from tests.fakes.pinned_environment import ROOT
from tests.soak import end_to_end


def small(steps, warmup):
    tree = load_file(f"{ROOT}/configs/sim/environments.py:small", SimConfig)
    return end_to_end.environment_rows(sims.from_config_dict(tree), steps, warmup)


def test_turns_lie_behind_each_other_with_what_is_observed_between():
    work = Workload(small(1, 1)[0].config.workload)
    turns, seen = end_to_end.TurnsOf(work), set()
    for id in (SampleId(g, i) for g in range(20) for i in range(4)):
        at = 0
        for turn in work.turns(id):
            assert turns.length(id, at) == turn.tokens
            at += turn.tokens
            behind = turns.behind(id, at)
            assert (behind is None) == (turn is work.turns(id)[-1] or not turn.environment_s)
            at += turn.observation_tokens
        seen.add(len(work.turns(id)))
    assert len(seen) > 2


@pytest.mark.slow
@pytest.mark.parametrize("hold", [False, True])
def test_both_tasks_are_trained_within_the_bound_however_a_sample_waits(hold):
    row = small(2, 1)[hold]
    assert row.config.orchestrator.hold_slots == hold
    found = end_to_end.run(row, pace=1 / 1000)
    assert set(found.tasks) == {"quick", "slow"} and sum(found.tasks.values()) == pytest.approx(1)
    assert found.lag_max <= row.config.orchestrator.max_versions - 1 and not found.mixed
    assert dataclasses.asdict(found)["step_s"] > 0
