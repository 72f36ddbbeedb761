"""Unequal instances in the simulator: what the fast ones have over the slow ones is used."""

import runpy

import pytest

from dora_jax.sim import config
from dora_jax.sim.config import Row
from dora_jax.sim.run import simulate

DEMO = config.from_config_dict(runpy.run_path("configs/sim/demo.py")["get_config"]())


def step_s(speeds):
    given = {"steps": 8, "warmup_steps": 2, "orchestrator.updates": 4, "hardware.speeds": speeds}
    return simulate(Row(label="", mode="dora", config=config.replace(DEMO, given), published={})).step_s


@pytest.mark.parametrize("speeds", [(1.5, 0.5), (1.1, 1.0, 0.9, 1.0)])
def test_instances_of_unequal_speed_are_no_slower_than_equal_ones_of_the_same_sum(speeds):
    assert step_s(speeds) < 1.05 * step_s((1.0,))
