"""The orchestrator as its body meets it: races, losses, what it imports, what it says."""

import gc
import subprocess
import sys

import pytest

from dora_jax.orchestrate import balance
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.fleet import REPORTS_A_LOOK
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.view import describe
from tests.fakes.orchestrator_by_hand import A, B, begin, make, ready, unnumbered, up
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World


def test_imports_the_standard_library_and_types_only():
    code = (
        "import importlib, pkgutil, sys; before = set(sys.modules); import dora_jax.orchestrate as package; "
        "[importlib.import_module(f'{package.__name__}.{m.name}') for m in pkgutil.iter_modules(package.__path__)]; "
        "new = set(sys.modules) - before - {'dora_jax', 'dora_jax.types', 'dora_jax.version', 'dora_jax.base', "
        "'dora_jax.base.old_paths'}; alien = [m for m in new if not m.startswith('dora_jax.orchestrate') "
        "and m.split('.')[0] not in sys.stdlib_module_names]; assert len(new) > 15 and not alien, alien"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_facts_that_come_together_are_decided_on_once():
    brain = make(group_size=2, inflight=2.0)
    ready(brain, 0, 1)
    ids = tuple(brain.state.groups[0].units[i].id for i in range(2))
    begin(brain, *ids)
    ends = [ev.SampleDone(id=id, instance=brain.state.unit(id).instance, tokens=5, finish="stop") for id in ids]
    scored = ev.GroupScored(group_id=0, trainable=False)
    copy = Orchestrator.restore(brain.state.config, brain.snapshot())
    alone = [command for event in (*ends, scored) for command in copy.step(event)]
    for event in (*ends, scored):
        brain.commit(event)
        brain.state.ledger.check()
    assert not brain.state.out and brain.summary()["groups"]["filtered"] == 1
    together = brain.decide()
    started = [[id for c in reported if isinstance(c, ev.Start) for id in c.ids] for reported in (together, alone)]
    assert sorted(started[0]) == sorted(started[1]) != [] and len(together) <= len(alone)
    assert brain.decide() == () == brain.step()


def test_the_slots_of_a_failed_group_are_held_until_its_samples_are_cancelled():
    brain = make()
    start = ev.Start(ids=(A, B, (1, 0), (1, 1), (2, 0), (2, 1)), instance=0, version=0)
    assert unnumbered(*ready(brain)) == (start,)
    begin(brain, A)
    (cancel,) = brain.step(ev.GroupFailed(group_id=0, reason="the environment broke"))
    assert cancel == ev.Cancel(ids=(A, B), instance=0, reason="the environment broke")
    assert brain.step(ev.SampleStarted(id=B, instance=0, version=0)) == ()  # sent before it received the Cancel
    brain.step(ev.SampleCancelled(id=A, reason="done"))
    discard, start = unnumbered(*brain.step(ev.SampleCancelled(id=B, reason="done")))
    assert discard == ev.Discard(group_id=0, reason="its last sample has ended")
    assert start == ev.Start(ids=((3, 1),), instance=0, version=0)
    assert 0 not in brain.state.groups and brain.state.fleet.instances[0].used == 6
    assert brain.summary()["groups"]["failed"] == 1 and brain.summary()["dropped"] == {"SampleStarted": 1}


def test_lost_samples_resume_or_start_again_at_their_version():
    brain = make()
    ready(brain)
    begin(brain, A)
    brain.step(ev.InstanceDown(instance=0, reason="lost"))
    brain.step(up(1))
    resume, start = unnumbered(*brain.step(ev.WeightsLoaded(instance=1, version=0)))
    assert resume == ev.Resume(ids=(A,), instance=1, version=0)
    assert isinstance(start, ev.Start) and B in start.ids and A not in start.ids


def test_words_of_a_lost_instance_are_not_received():
    brain = make()
    ready(brain)
    begin(brain, A, B)
    brain.step(ev.InstanceDown(instance=0, reason="lost"))
    for event in (
        ev.SampleDone(id=A, instance=0, tokens=5, finish="stop"),
        ev.WeightsLoaded(instance=0, version=0),
        ev.SampleParked(id=A, instance=0),
        ev.InstanceReported(instance=0, free=1),
        ev.InstanceDown(instance=0, reason="again"),
    ):
        assert brain.step(event) == ()
    assert brain.state.unit(A) is not None
    assert sum(brain.summary()["dropped"].values()) == 5


def test_words_of_an_earlier_incarnation_change_nothing():
    brain = make(inflight=2.0)
    ready(brain)
    begin(brain, A, B)
    brain.step(ev.InstanceDown(instance=0, reason="lost"))
    brain.step(up(0, slots=8, incarnation=1))
    brain.step(ev.WeightsLoaded(instance=0, version=0, incarnation=1))
    host = brain.state.fleet.instances[0]
    assert brain.state.unit(A).state == "resuming" and host.used == 8
    before = brain.snapshot()
    for event in (
        ev.SampleDone(id=A, instance=0, tokens=5, finish="stop"),
        ev.SampleResumed(id=A, instance=0),
        ev.InstanceReported.of(0, 0, {A: 9}),
        ev.WeightsLoaded(instance=0, version=0),
        ev.InstanceDown(instance=0, reason="it arrived late"),
        up(0),
    ):
        assert brain.step(event) == ()
    after = brain.snapshot()
    assert after.pop("dropped") != before.pop("dropped") == ["dict"]
    assert after == before
    brain.step(ev.SampleResumed(id=A, instance=0, incarnation=1))
    assert brain.state.unit(A).state == "running"


def test_an_instance_that_is_up_again_has_lost_its_earlier_incarnation():
    brain = make()
    ready(brain)
    begin(brain, A)
    (load,) = brain.step(up(0, incarnation=1))
    assert load == ev.LoadWeights(instance=0, version=0, attempt=2) and brain.state.unit(A).state == "parked"
    assert brain.step(ev.InstanceDown(instance=0, reason="it arrived late")) == ()
    assert (
        brain.step(ev.InstanceDown(instance=0, reason="lost", incarnation=2)) == () and not brain.state.fleet.instances
    )
    assert brain.step(up(0, incarnation=2)) == () and not brain.state.fleet.instances  # it was over before it was known


def test_what_is_reported_twice_counts_once():
    brain = make()
    ready(brain)
    log = []
    for id in (A, B):
        log.append(ev.SampleStarted(id=id, instance=0, version=0))
        log.append(ev.SampleDone(id=id, instance=0, tokens=5, finish="stop"))
    log.append(ev.GroupScored(group_id=0, trainable=True))
    for event in log:
        brain.step(event)
        before = brain.snapshot()
        assert brain.step(event) == ()
        assert brain.snapshot() | {"dropped": 0} == before | {"dropped": 0}
    assert brain.step(log[0]) == () and 0 not in brain.state.groups  # a start after its end


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.GroupScored(group_id=0, trainable=True), "group 0 is scored"),
        (ev.StepPublished(version=1), "version 1 is published"),
        (ev.WeightsLoaded(instance=0, version=3), "instance 0 loaded version 3"),
        (ev.SampleStarted(id=A, instance=0, version=2), "started at version 2"),
        (ev.SampleCancelled(id=A, reason="?"), "cancelled without a command"),
        (
            ev.InstanceReported(instance=0, free=9, groups=(0, 0), indices=(0, 1), tokens=(3,)),
            "columns of 2, 2 and 1 rows",
        ),
    ],
)
def test_a_fact_that_contradicts_a_command_raises(event, message):
    brain = make()
    ready(brain)
    before = brain.snapshot()
    with pytest.raises(ev.ImpossibleFact, match=message):
        brain.step(event)
    assert brain.snapshot() == before


def test_a_move_that_keeps_failing_is_given_up():
    shape = Shape(instances=((4, 1.0, 1),) * 4, train_s=0.5, move_fails=1.0, seed=2)
    config = OrchestratorConfig(groups_per_step=4, group_size=2, total_steps=8, max_versions=4)
    world = World(config, shape).run()
    world.audit()
    asked = [id for _, commands in world.log for c in commands if isinstance(c, ev.Move) for id in c.ids]
    assert asked and max(map(asked.count, asked)) <= 3


def test_moved_samples_end_where_they_went():
    config = OrchestratorConfig(groups_per_step=4, group_size=2, total_steps=8, max_versions=4)
    world = World(config, Shape(instances=((4, 1.0, 1),) * 4, train_s=0.5, seed=2)).run()
    world.audit()
    moved = {e.id: e.dst for e, _ in world.log if isinstance(e, ev.SampleMoved)}
    ended = {e.id: e.instance for e, _ in world.log if isinstance(e, ev.SampleDone)}
    assert moved and any(ended[id] == dst for id, dst in moved.items())


def test_unequal_instances_share_work_by_slots_and_speed():
    config = OrchestratorConfig(mode="sync", groups_per_step=12, group_size=1, total_steps=2)
    world = World(config, Shape(instances=((12, 1.0, 1), (12, 3.0, 1)), pages=400))
    started = {0: 0, 1: 0}

    def watch(world, event, commands):
        for command in commands:
            if isinstance(command, ev.Start) and world.published == 1:
                started[command.instance] += len(command.ids)

    world.run(after=watch).audit()
    assert started[1] > started[0] > 0


def test_every_version_is_retired_once_and_the_newest_kept():
    world = World(OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=5), Shape()).run()
    retired = [c.version for _, commands in world.log for c in commands if isinstance(c, ev.Retire)]
    assert sorted(retired) == [0, 1, 2, 3, 4]


def test_the_orchestrator_leaves_no_reference_cycles():
    """At ten thousand instances a pass of the cycle collector is the slowest step by far: a controller turns it off."""
    config = OrchestratorConfig(groups_per_step=4, group_size=4, total_steps=6, inflight=2.0)
    world = World(config, Shape(instances=((4, 1.0, 1),) * 4, filtered=0.2, failed=0.1, deaths=0.5, seed=4)).run()
    brain = Orchestrator(config)
    gc.collect()
    gc.disable()
    try:
        for event, _ in world.log:
            brain.step(event)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_rebalance_spreads_a_mass_start_over_steps():
    brain = make(groups_per_step=4000, group_size=2, total_steps=2, mode="sync")
    brain.step(ev.InstanceUp(instance=0, slots=9000, pages=90_000, page_size=16))
    first = brain.step(ev.WeightsLoaded(instance=0, version=0))
    started, steps = sum(len(c.ids) for c in first), 1
    assert 0 < started < 8000
    while started < 8000:
        started += sum(len(c.ids) for c in brain.step(ev.TimePassed(now_s=0.0)))
        steps += 1
    assert steps < 10


def test_what_it_says():
    brain = make()
    brain.step(up(0))
    event = ev.WeightsLoaded(instance=0, version=0)
    line = f"{describe(event)} -> {'; '.join(map(describe, brain.step(event)))}"
    assert line == "WeightsLoaded instance=0 version=0 -> Start ids=0.0-1,1.0-1,2.0-1 instance=0 version=0"
    summary = brain.summary()
    assert summary["versions"] == {0: 6} and summary["waits"].startswith(
        "trainer waits for rollouts (0 of 2 groups ready"
    )
    assert make().summary()["waits"].startswith("trainer waits for a rollout instance")


def test_resume_state_after_a_published_step():
    brain = make()
    assert brain.resume_state() == {"start_version": 0, "next_group_id": 0, "redo": []}
    ready(brain)
    assert brain.resume_state() == {"start_version": 0, "next_group_id": 3, "redo": [0, 1, 2]}
    again = make()
    again = Orchestrator(again.state.config, **brain.resume_state())
    (start,) = ready(again)
    assert [id.group_id for id in start.ids] == [0, 0, 1, 1, 2, 2]


def test_reports_are_reported_when_a_decision_looks_and_reservations_follow_after_some():
    brain = make(max_new_tokens=512, expected_new_tokens=16)
    ready(brain)
    begin(brain, A, B)
    fleet, host = brain.state.fleet, brain.state.fleet.instances[0]
    reserved = host.pages_used
    for n in range(1, REPORTS_A_LOOK):
        brain.step(ev.InstanceReported.of(0, 8, {A: 50 * n, B: n}))
        assert brain.state.unit(A).tokens == 0 and host.tokens == 51 * n and host.pages_used == reserved
    assert {u.id: u.tokens for u in fleet.settle(host) if u.tokens} == {A: 50 * n, B: n}
    brain.step(ev.InstanceReported(instance=0, free=8))  # none has grown
    assert brain.state.unit(A).tokens == 50 * n
    brain.step(ev.InstanceReported.of(0, 8, {A: 400}))
    assert host.pages_used > reserved and brain.state.unit(A).tokens == 400


def test_a_large_fleet_that_comes_up_shares_rebalances(monkeypatch):
    calls = []
    original = balance.rebalance
    monkeypatch.setattr(balance, "rebalance", lambda s: (calls.append(len(s.fleet.instances)), original(s)))
    monkeypatch.setattr(balance, "FREE_INSTANCES", 10)
    brain = make()
    for i in range(60):
        brain.step(up(i))
    assert max(calls) <= 10
    brain.step(ev.TimePassed(now_s=0.004))
    assert max(calls) <= 10, "too early"
    brain.step(ev.TimePassed(now_s=0.006))
    assert calls[-1] == 60 and not brain.state.due.rebalance
