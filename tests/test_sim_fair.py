"""What every mode pays alike, seeds side by side, and each mode at its best point of one grid."""

import os
import pathlib
import statistics
import subprocess
import sys
import time

import pytest

from dora_jax.sim import config, many, run, table, tune
from tests.fakes.sim_runs import row, simulate

ROOT = pathlib.Path(__file__).resolve().parent.parent


def step_s(mode, **changes):
    return simulate(mode, **changes)[0].step_s


@pytest.mark.parametrize("field", ["cost__publish_s", "cost__control_s"])
@pytest.mark.parametrize("mode", ["sync", "partial", "dora"])
def test_a_latency_lengthens_the_steps_of_every_mode(mode, field):
    assert step_s(mode, **{field: 2.0}) > 0.5 + step_s(mode)


def test_what_balancing_costs_is_charged_to_modes_whose_versions_share_the_instances():
    for mode, pays in (("sync", False), ("one_step", False), ("partial", False), ("dora_paper", True), ("dora", True)):
        result, _ = simulate(mode, cost__balance_s=2.0)
        held = 2.0 / result.step_s if pays else 0.0
        assert result.rollout["held"] == pytest.approx(held, rel=0.3), mode
        assert sum(result.rollout.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["partial", "evict", "dora"])
def test_commands_that_reach_a_lost_instance_lose_no_sample(mode):
    result, audit = simulate(
        mode, cost__control_s=1.0, fault__mtbf_s=30.0, fault__repair_s=10.0, orchestrator__updates=4
    )
    assert audit.lost > 3 and max(audit.ended.values()) == 1 and result.steps == 4
    trained = set(audit.trained)
    assert all(audit.ended[id] == 1 for id in audit.started if id.group_id in trained)


def test_samples_of_several_versions_are_counted():
    assert simulate("partial")[0].mixed > 0 == simulate("dora")[0].mixed


def test_seeds_of_a_row_are_run_side_by_side_and_averaged():
    rows = [row("sync"), row("dora")]
    ran = list(many.run_rows(rows, 2))
    assert [line.row for line in ran] == rows
    for line in ran:
        alone = [run.simulate(row(line.row.mode, workload__seed=seed)) for seed in (0, 1)]
        assert line.results == alone
        both = [result.step_s for result in alone]
        assert line.mean.step_s == statistics.fmean(both)
        assert line.spread(lambda r: r.step_s) == statistics.stdev(both)
        assert sum(line.mean.lags.values()) == pytest.approx(1.0)
    text = table.render([(line.row, line.mean) for line in ran], [line.spread for line in ran])
    assert text.count(" ± ") == 6


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no workers")
def test_workers_end_with_the_command():
    long = [f"--config={ROOT / 'configs' / 'sim' / 'demo.py'}", "--config.steps=100000"]
    command = subprocess.Popen([sys.executable, "-m", "dora_jax.simulate", *long], cwd=ROOT, stderr=subprocess.DEVNULL)
    children = pathlib.Path(f"/proc/{command.pid}/task/{command.pid}/children")
    within(lambda: len(children.read_text().split()) >= 2)
    workers = [pathlib.Path("/proc") / pid for pid in children.read_text().split()]
    command.kill()
    command.wait()
    within(lambda: not any(worker.exists() for worker in workers))


def within(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_mode_is_tuned_along_the_axes_that_it_knows():
    grid = {"grid__rollout_shares": (0.25, 0.5, 0.75), "grid__inflight": (1.0, 2.0), "grid__max_versions": (2, 3)}
    for mode, axes in (("sync", {tune.SPLIT}), ("partial", {tune.SPLIT, tune.INFLIGHT}),
                       ("dora", {tune.SPLIT, tune.INFLIGHT, tune.BOUND})):  # fmt: skip
        best = tune.tune(row(mode, **grid))
        assert best.changes.keys() == axes
        assert best.result == run.simulate(best.row)
        for chips in (0, 4, 8, 12):
            beside = config.replace(best.row.config, {tune.SPLIT: chips})
            result = run.simulate(config.Row(label="", mode=mode, config=beside, published={}))
            assert result.step_s >= best.result.step_s
    assert "colocated" in tune.render([best]) or str(best.changes[tune.SPLIT]) in tune.render([best])


def test_a_row_needs_a_seed():
    tree = config.defaults()
    tree.seeds = 0
    with pytest.raises(config.ConfigError, match="seeds: 0 is less than one run"):
        config.from_config_dict(tree)


def test_what_partial_pays_for_new_weights_is_its_prefill_alone():
    """Samples that go on under other weights leave their KV behind at no cost where it is dropped."""
    again, _ = simulate("partial", cost__train_fixed_s=1.0, orchestrator__swapped_kv="dropped")
    kept, _ = simulate("partial", cost__train_fixed_s=1.0, orchestrator__swapped_kv="reused")
    assert again.mixed > 0 < kept.mixed and again.reprefilled_tokens > 0 == kept.reprefilled_tokens
    assert kept.rollout["prefill"] < 0.8 * again.rollout["prefill"]
    slow = {"cost__train_fixed_s": 1.0, "cost__move_fixed_s": 5.0}
    dropped, parked = (simulate("partial", **slow, orchestrator__swapped_kv=how)[0] for how in ("dropped", "parked"))
    assert dropped.step_s < 1.02 * again.step_s < parked.step_s
