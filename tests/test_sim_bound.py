"""The floor of the step time: no run is below it, and only a larger K lowers it."""

import dataclasses
import runpy

import pytest

from dora_jax.costs import open_costs
from dora_jax.sim import bound, config, table
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
    row = Row(label="", mode="dora", config=config.replace(DEMO, one_length), published={})
    result = simulate(row)
    floor_s = bound.step_floor_s(row)
    assert floor_s == bound.latency_floor_s(row.config, 2000, max_versions)
    assert result.step_s >= floor_s
    if max_versions == 1:  # one version after the other, a few samples an instance: nothing else takes time
        assert result.step_s < 2 * floor_s


def test_chips_do_not_lower_the_latency_floor_and_versions_do():
    floor_s = bound.latency_floor_s(DEMO, 2000, 3)
    more = config.replace(DEMO, {"hardware.chips": 64, "hardware.rollout_chips": 48})
    assert 0.9 * floor_s < bound.latency_floor_s(more, 2000, 3) <= floor_s
    assert bound.latency_floor_s(DEMO, 2000, 6) == pytest.approx(floor_s / 2)


FULL = config.replace(
    DEMO,
    {"steps": 6, "warmup_steps": 2, "hardware.hbm_share": 0.55, "workload.mean_tokens": 1000.0, "hardware.slots": 1024},
)


@pytest.mark.parametrize("mode", ["sync", "partial", "dora"])
def test_no_mode_is_below_the_memory_floor(mode):
    row = Row(label="", mode=mode, config=FULL, published={})
    assert simulate(row).step_s >= 0.95 * bound.memory_floor_s(FULL)  # the measured steps are not the first one


def test_fragments_are_what_whole_instances_waste_and_do_not_depend_on_how_many_there_are():
    one_length = config.replace(FULL, {"workload.sigma": 0.0, "hardware.chips": 64, "hardware.rollout_chips": 32})
    more = config.replace(one_length, {"hardware.chips": 128, "hardware.rollout_chips": 64})
    seconds, of_more = bound.fragment_s(one_length), bound.fragment_s(more)
    assert 2 * of_more == pytest.approx(seconds, rel=0.2)  # a step of twice the instances takes half as long
    assert bound.fragment_s(config.replace(one_length, {"workload.sigma": 1.5})) > 2 * seconds


def test_a_version_alone_on_an_instance_leaves_a_third_of_it_unused():
    """Samples of one length L and no prompt: L ticks long the KV that is left falls as 1 - (n / L)^2."""
    two = {"workload.sigma": 0.0, "workload.prompt_tokens": 1.0, "hardware.rollout_chips": 2}
    alone = config.replace(FULL, two)
    tick_s = open_costs(alone.model, alone.hardware, alone.cost).decode_base_s(1)
    assert bound.fragment_s(alone) == pytest.approx(1000 / 3 * tick_s / 2, rel=0.02)  # by both instances


def test_the_table_shows_both():
    rows = [Row(label=mode, mode=mode, config=FULL, published={}) for mode in ("partial", "dora")]
    result = simulate(rows[0])
    partial, dora = table.render([(row, result) for row in rows]).splitlines()[1:3]
    memory, fragments = (f"{seconds / 60:.2f}" for seconds in (bound.memory_floor_s(FULL), bound.fragment_s(FULL)))
    assert partial.split()[-2:] == [memory, "-"]
    assert dora.split()[-1] == fragments and float(dora.split()[-2]) >= float(memory)


def test_the_table_names_the_fastest_that_changes_nothing_and_what_faster_rows_change():
    slow, fast = (dataclasses.replace(simulate(Row(label="dora", mode="dora", config=FULL, published={})), step_s=s)
                  for s in (120.0, 60.0))  # fmt: skip
    lines = [
        (Row(label=mode, mode=mode, config=FULL, published={}), dataclasses.replace(result, mixed=0.25))
        for mode, result in (("sync", slow), ("dora", dataclasses.replace(slow, step_s=90.0)), ("partial", fast))
    ]
    found = table.render(lines).split("\n\n")[1].splitlines()
    assert found[0].endswith("within a bound on its lag: dora, 1.50 min/step")
    assert found[1:] == [
        "faster is partial, 1.00: 25.0% of its samples are of several versions, nothing bounds its lag"
    ]
    alone = table.render([(row, dataclasses.replace(r, step_s=120.0)) for row, r in lines[:2]])
    assert "fastest of" in alone and "faster is" not in alone
    assert "fastest of" not in table.render(lines[2:])
