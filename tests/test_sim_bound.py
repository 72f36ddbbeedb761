"""The floor of the step time: no run is below it, and only a larger K lowers it."""

import runpy

import pytest

from dora_jax.sim import bound, config
from dora_jax.sim.config import Row
from dora_jax.sim.run import simulate

DEMO = config.from_config_dict(runpy.run_path("configs/sim/demo.py")["get_config"]())


@pytest.mark.parametrize("max_versions", [1, 2, 3])
def test_no_run_is_below_the_floor(max_versions):
    """The 6 steps that are measured are whole windows of each K."""
    one_length = {
        "workload.sigma": 0.0,
        "workload.mean_tokens": 2000.0,
        "steps": 7,
        "warmup_steps": 1,
        "orchestrator.max_versions": max_versions,
        "orchestrator.groups_per_step": 8,
    }
    told = config.replace(DEMO, one_length)
    result = simulate(Row(label="", mode="dora", config=told, published={}))
    floor_s = bound.step_floor_s(told, 2000)
    assert result.step_s >= floor_s
    if max_versions == 1:  # one version after the other, a few samples an instance: nothing else takes time
        assert result.step_s < 2 * floor_s


def test_chips_do_not_lower_the_floor_and_versions_do():
    floor_s = bound.step_floor_s(DEMO)
    assert bound.step_floor_s(config.replace(DEMO, {"hardware.chips": 64, "hardware.rollout_chips": 48})) <= floor_s
    assert (
        bound.step_floor_s(config.replace(DEMO, {"hardware.chips": 64, "hardware.rollout_chips": 48})) > 0.9 * floor_s
    )
    assert bound.step_floor_s(config.replace(DEMO, {"orchestrator.max_versions": 6})) == pytest.approx(floor_s / 2)
