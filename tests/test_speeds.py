"""How fast each instance decodes, measured: at equal load, against the fleet's median."""

import dataclasses
import json
import queue
import random
import statistics

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import snapshot
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.rollout.ticks import TickResult
from dora_jax.runtime.instances import rollout_worker
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.sim import run
from dora_jax.sim.world import SimWorld
from dora_jax.types import SampleId
from tests.fakes.coordinator_world import SECTION, Task, Weights
from tests.fakes.older_snapshots import BEFORE_LENDING, before_requests
from tests.fakes.oracle import OracleEngine
from tests.fakes.sim_runs import row

CONFIG = OrchestratorConfig(
    groups_per_step=4, group_size=4, total_steps=8, max_prompt_tokens=16, max_new_tokens=4096, inflight=1.0,
    rebalance_period_s=1.0,
)  # fmt: skip
PAGES, SIZE = 1 << 14, 16


def fleet_of(instances):
    brain = Orchestrator(CONFIG)
    for i in range(instances):
        brain.step(ev.InstanceUp(instance=i, slots=32, pages=PAGES, page_size=SIZE, versions=(0,)))
    return brain


def reports(brain, speeds, rows, tokens, times=40, steps=32, noise=0.0):
    """Each instance decodes so many rows of so many tokens, and says what that took."""
    draw = random.Random(0)
    for _ in range(times):
        for i, speed in enumerate(speeds):
            batch, context = rows[i](draw), tokens[i](draw)
            step_s = (0.01 + 1e-4 * batch + 1e-6 * batch * context) / speed * (1 + noise * draw.gauss(0, 1))
            brain.step(
                ev.InstanceReported(
                    instance=i, free=PAGES - batch * context // SIZE, sampled=steps * batch, busy_s=steps * step_s,
                    row_s=steps * step_s * batch,
                )
            )  # fmt: skip
    brain.step(ev.TimePassed(now_s=brain.state.now_s + 10.0))
    return [host.speed for host in brain.state.fleet.instances.values()]


def between(least, most):
    return lambda draw: draw.randint(least, most)


def test_equal_instances_under_unequal_load_are_equally_fast():
    speeds = reports(
        fleet_of(2), (1.0, 1.0), (between(1, 4), between(20, 32)), (between(1000, 2000), between(100, 400)), noise=0.1
    )
    assert speeds == [1.0, 1.0]


def test_unequal_instances_are_distinguished_whatever_they_run():
    speeds = reports(fleet_of(3), (1.5, 1.0, 0.5), [between(1, 32)] * 3, [between(100, 2000)] * 3, times=100, noise=0.1)
    assert speeds == pytest.approx([1.5, 1.0, 0.5], rel=0.2)


def test_a_fast_instance_that_has_most_of_the_rows_is_still_seen_as_fast():
    rows, tokens = (between(14, 32), between(2, 18)), [between(100, 2000)] * 2
    fast, slow = reports(fleet_of(2), (1.5, 0.5), rows, tokens, times=200, steps=64)
    assert 2.5 < fast / slow < 3.5


def test_a_compilation_in_a_tick_changes_no_speed():
    brain = fleet_of(2)
    loads = [between(8, 8)] * 2, [between(500, 500)] * 2
    assert reports(brain, (1.0, 1.0), *loads) == [1.0, 1.0]
    brain.step(ev.InstanceReported(instance=0, free=PAGES, sampled=256, busy_s=20.0, row_s=160.0))
    assert reports(brain, (1.0, 1.0), *loads, times=1) == [1.0, 1.0]


def test_new_groups_go_where_they_are_decoded_faster():
    brain = fleet_of(2)
    reports(brain, (1.5, 0.5), [between(8, 24)] * 2, [between(100, 1000)] * 2)
    for i, host in brain.state.fleet.instances.items():
        for id in list(host.units):
            brain.commit(ev.SampleDone(id=id, instance=i, tokens=10, finish="stop"))
    brain.step(*(ev.GroupScored(group_id=group_id, trainable=False) for group_id in list(brain.state.groups)))
    after = [len(host.units) for host in brain.state.fleet.instances.values()]
    assert after == [24, 8]


LATER = ("home", "waits_s", "ran", "restarts")  # what a unit did not have yet


def test_speeds_outlive_a_snapshot_and_an_older_snapshot_is_read():
    brain = fleet_of(2)
    reports(brain, (1.5, 0.5), [between(8, 24)] * 2, [between(100, 1000)] * 2)
    data = json.loads(json.dumps(brain.snapshot()))
    again = Orchestrator.restore(CONFIG, data)
    assert again.snapshot() == brain.snapshot()
    data = before_requests(data)
    known = [name for name in snapshot.UNIT if name not in snapshot.SINCE_ATTEMPTS]
    older = [name for name in BEFORE_LENDING if name not in ("pace", "paced_steps")]
    data["hosts"] = data.pop("instances")
    for entry in data["hosts"]:
        named = dict(zip(BEFORE_LENDING, entry[0], strict=True))
        entry[0] = [named[name] for name in older]
    for group in data["groups"]:
        del group[-3:-1]
        for unit in group[-1]:
            unit[1] = [x for name, x in zip(known, unit[1], strict=True) if name not in LATER]
    for name in ("sampled_by", "trained_by"):
        del data[name]
    del data["queue"]["in_environment"]
    measured = data["fleet"].pop("measured")
    del measured["line"], measured["prompt_tokens"]
    flat = data["fleet"] | measured | {"likely_tokens": measured.pop("new_tokens")}
    for format, fleet in ((7, data["fleet"] | {"measured": again.snapshot()["fleet"]["measured"]}), (6, flat)):
        restored = Orchestrator.restore(CONFIG, data | {"format": format, "fleet": fleet})
        host = restored.state.fleet.instances[0]
        assert (host.pace, host.paced_steps, host.speed) == (0.0, 0.0, brain.state.fleet.instances[0].speed)
        assert restored.state.fleet.measured.line.reports == 0
        assert restored.state.fleet.measured.new_tokens == again.state.fleet.measured.new_tokens


def test_an_instance_reports_what_ticks_took_that_only_decoded(monkeypatch):
    now, outbox = [0.0], queue.SimpleQueue()
    monkeypatch.setattr(rollout_worker.time, "monotonic", lambda: now[0])

    class Engine(OracleEngine):
        def tick(self) -> TickResult:
            now[0] += 0.5
            return super().tick()

    worker = EngineWorker(0, Engine(SECTION, length=lambda *_: 60), Weights(), outbox, report_s=1.9)
    worker.execute(ev.LoadWeights(instance=0, version=0))
    ids = tuple(SampleId(0, i) for i in range(2))
    worker.execute(ev.Start(ids=ids, instance=0, version=0, attempt=1), Task().prompt_at(0))
    for _ in range(4):
        worker.work()
    reported = [outbox.get() for _ in range(outbox.qsize())]
    (report,) = [item for item in reported if isinstance(item, ev.InstanceReported)]
    assert (report.busy_s, report.row_s) == (
        1.5,
        3.0,
    ) and report.sampled == 6 * SECTION.decode_steps  # the first tick began two samples
    assert report.drafted is None


def test_an_instance_reports_ticks_with_drafts_apart(monkeypatch):
    now, outbox = [0.0], queue.SimpleQueue()
    monkeypatch.setattr(rollout_worker.time, "monotonic", lambda: now[0])

    class Engine(OracleEngine):
        """Every second tick verifies a draft of 4 tokens for each of two samples, of which one holds."""

        def tick(self) -> TickResult:
            now[0] += 0.5
            verifies = now[0] % 1.0 == 0.0
            return dataclasses.replace(
                super().tick(), rows=2, drafted=verifies, guesses=8 * verifies, held=4 * verifies
            )

    worker = EngineWorker(0, Engine(SECTION, length=lambda *_: 60), Weights(), outbox, report_s=1.9)
    worker.execute(ev.LoadWeights(instance=0, version=0))
    ids = tuple(SampleId(0, i) for i in range(2))
    worker.execute(ev.Start(ids=ids, instance=0, version=0, attempt=1), Task().prompt_at(0))
    for _ in range(8):
        worker.work()
    reported = [outbox.get() for _ in range(outbox.qsize())]
    for report in [item for item in reported if isinstance(item, ev.InstanceReported)]:
        sampled, steps = report.sampled, SECTION.decode_steps
        assert (sampled, report.busy_s, report.row_s) == (4 * steps, 1.0, 2.0)
        assert report.drafted == ev.Drafted(sampled=4 * steps, busy_s=1.0, row_s=2.0, guesses=16, held=8)


@pytest.mark.parametrize("declared", [(1.0,), (1.5, 0.5)])
def test_the_simulator_reports_as_an_engine_does(declared):
    config = row("dora", hardware__speeds=declared).config
    policy = run.orchestrator_config(config, "dora")
    brain = Orchestrator(policy, evaluate_start=False)
    with pytest.raises(run.EndOfMeasurement):
        run.run(brain, SimWorld(config, policy.decisions, until=5))
    speeds = [host.speed for host in brain.state.fleet.instances.values()]
    true = [declared[i % len(declared)] for i in range(len(speeds))]
    assert speeds == pytest.approx([speed / statistics.geometric_mean(true) for speed in true], rel=0.25)
