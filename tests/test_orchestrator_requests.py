"""Requests of a run's endpoint, as the orchestrator hears of them: placed like samples, counted nowhere, bounded in
time."""

import json

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import MODES
from dora_jax.orchestrate.snapshot import restart
from dora_jax.types import SERVED, SampleId, is_eval, is_served, is_training
from tests.fakes.older_snapshots import before_requests, forget_attempts
from tests.fakes.orchestrator_by_hand import make, ready, unnumbered, up

FIRST = SERVED - 5
ID = SampleId(FIRST, 0)
CAME = ev.RequestCame(group_id=FIRST, version=0)


def test_an_id_is_of_one_kind():
    for group_id, kind in ((0, is_training), (-1, is_eval), (SERVED + 1, is_eval), (SERVED, is_served)):
        assert [each(group_id) for each in (is_training, is_eval, is_served)].count(True) == 1 and kind(group_id)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_takes_a_slot_and_leaves_no_trace(mode):
    brain = make(mode=mode)
    brain.step(up(0, 32))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    ledger, measured = json.dumps(vars(brain.state.ledger), default=str), brain.state.fleet.measured.mean_tokens
    assert unnumbered(*brain.step(CAME)) == (ev.Start(ids=(ID,), instance=0, version=0),)
    assert not brain.counts(CAME)  # sent twice
    brain.step(ev.SampleStarted(id=ID, instance=0, version=0))
    brain.step(ev.SampleDone(id=ID, instance=0, tokens=40, finish="stop"))
    assert FIRST not in brain.state.groups and not brain.state.queue.untrained_unfinished
    assert json.dumps(vars(brain.state.ledger), default=str) == ledger
    assert brain.state.fleet.measured.mean_tokens == measured


def test_a_request_goes_before_samples_that_wait_for_their_first_slot():
    brain = make(group_size=4)
    ready(brain)  # six slots: a sample of the second group waits
    brain.step(CAME)
    first = next(iter(brain.state.fleet.instances[0].units))
    brain.step(ev.SampleStarted(id=first, instance=0, version=0))
    commands = brain.step(ev.SampleDone(id=first, instance=0, tokens=3, finish="stop"))
    assert [c.ids for c in commands if isinstance(c, ev.Start)] == [(ID,)]


def test_a_client_that_leaves_frees_the_slot():
    brain = make()
    brain.step(up(0, 32))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    brain.step(CAME)
    brain.step(ev.SampleStarted(id=ID, instance=0, version=0))
    gone = ev.GroupFailed(group_id=FIRST, reason="its client left")
    assert brain.step(gone) == (ev.Cancel(ids=(ID,), instance=0, reason="its client left"),)
    used = brain.state.fleet.instances[0].used
    brain.step(ev.SampleCancelled(id=ID, reason=""))
    assert brain.state.fleet.instances[0].used == used - 1 and FIRST not in brain.state.groups


def published(brain: Orchestrator, version: int) -> tuple[ev.Command, ...]:
    """All that the trainer asks for until this version is there; then the commands of that moment."""
    commands: list[ev.Command] = []
    while brain.state.ledger.base < version:
        for unit in [u for g in list(brain.state.groups.values()) for u in g.units if u and u.id != ID]:
            if unit.state == "starting":
                brain.step(ev.SampleStarted(id=unit.id, instance=unit.instance, version=unit.version))
            if unit.state == "running":
                brain.step(ev.SampleDone(id=unit.id, instance=unit.instance, tokens=3, finish="stop"))
        for group in [g for g in brain.state.groups.values() if not g.left]:
            brain.step(ev.GroupScored(group_id=group.id, trainable=True))
        if not brain.state.ledger.missing:
            commands = list(brain.step(ev.StepPublished(version=brain.state.ledger.base + 1)))
        for instance in brain.state.fleet.instances.values():
            if instance.phase == "loading":
                commands += brain.step(ev.WeightsLoaded(instance=instance.id, version=instance.coming))
    return tuple(commands)


def answered(hold_versions: int) -> Orchestrator:
    """Version 0 has answered a request, and version 2 is there."""
    brain = make(max_versions=1, hold_versions=hold_versions, hold_s=60.0)
    brain.step(up(0, 32, residents=3))
    brain.step(ev.WeightsLoaded(instance=0, version=0), ev.TimePassed(now_s=1.0))
    brain.step(CAME)
    brain.step(ev.SampleStarted(id=ID, instance=0, version=0))
    brain.step(ev.SampleDone(id=ID, instance=0, tokens=3, finish="stop"))
    published(brain, 2)
    return brain


def test_a_version_retires_under_its_sessions_where_none_is_held():
    brain = answered(hold_versions=0)
    assert 0 not in brain.state.alive
    commands = brain.step(ev.RequestCame(group_id=FIRST - 1, version=0))
    assert commands == (ev.Discard(group_id=FIRST - 1, reason="version 0 has retired"),)


def test_a_version_is_held_for_its_sessions_so_long_and_no_longer():
    brain = answered(hold_versions=1)
    assert 0 in brain.state.alive and brain.state.held == (0,)
    brain.step(ev.TimePassed(now_s=60.0))
    brain.step(ev.RequestCame(group_id=FIRST - 1, version=0))  # which does not make the time longer
    brain.step(ev.GroupFailed(group_id=FIRST - 1, reason="its client left"))
    for unit in [u for g in brain.state.groups.values() if is_served(g.id) for u in g.units]:
        brain.step(ev.SampleCancelled(id=unit.id, reason=""))
    assert 0 in brain.state.alive
    assert ev.Retire(version=0) in brain.step(ev.TimePassed(now_s=62.0))


def test_of_more_versions_than_are_held_those_asked_for_last_stay():
    brain = answered(hold_versions=1)
    brain.step(ev.TimePassed(now_s=2.0))
    brain.step(ev.RequestCame(group_id=FIRST - 1, version=2))
    unit = brain.state.unit(SampleId(FIRST - 1, 0))
    brain.step(ev.SampleStarted(id=unit.id, instance=0, version=2))
    brain.step(ev.SampleDone(id=unit.id, instance=0, tokens=3, finish="stop"))
    assert brain.state.held == (0,)  # the newest needs no holding
    assert ev.Retire(version=0) in published(brain, 3) and brain.state.held == (2,)


def test_a_run_ends_whatever_its_clients_wait_for():
    brain = make(total_steps=1, max_versions=1)
    brain.step(up(0, 32))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    brain.step(CAME)
    brain.step(ev.SampleStarted(id=ID, instance=0, version=0))
    assert [type(c) for c in published(brain, 1)][-1] is ev.Halt


def test_after_a_restart_no_request_is_left_and_no_version_held():
    brain = answered(hold_versions=1)
    brain.step(ev.RequestCame(group_id=FIRST - 1, version=0))
    data = json.loads(json.dumps(brain.snapshot()))
    again = Orchestrator.restore(brain.state.config, data)
    assert json.loads(json.dumps(again.snapshot())) == data
    outstanding = restart(again.state, again.step)
    assert outstanding.cancel.ids == (SampleId(FIRST - 1, 0),) and not again.state.asked_s
    assert not any(map(is_served, outstanding.groups)), "whose prompt nobody knows any more"
    again.step(ev.SampleCancelled(id=outstanding.cancel.ids[0], reason=""))
    assert not any(map(is_served, again.state.groups)) and 0 not in again.state.alive


def test_a_snapshot_from_before_there_were_requests_is_read():
    brain = make()
    ready(brain)
    forget_attempts(brain)
    data = json.loads(json.dumps(brain.snapshot()))
    restored = Orchestrator.restore(brain.state.config, before_requests(data))
    assert json.loads(json.dumps(restored.snapshot())) == data
