"""Samples that wait for their environment, as the orchestrator hears of them: what counts, what it frees, what it
keeps."""

import json

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import MODES
from dora_jax.orchestrate.snapshot import SINCE_ATTEMPTS, UNIT, restart
from tests.fakes.older_snapshots import before_requests, forget_attempts
from tests.fakes.orchestrator_by_hand import A, B, begin, make, unnumbered, up


def roomy(slots: int = 32, **changes) -> Orchestrator:
    """One instance with more slots than there is work; A and B run on it."""
    brain = make(**changes)
    brain.step(up(0, slots))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    begin(brain, A, B)
    return brain


def waits(brain: Orchestrator, *ids, tokens: int = 8) -> tuple[ev.Command, ...]:
    commands = ()
    for id in ids:
        commands += brain.step(ev.SampleWaiting(id=id, instance=brain.state.unit(id).instance, tokens=tokens))
    return commands


@pytest.mark.parametrize("mode", MODES)
def test_a_waiting_sample_holds_no_slot_and_ends_or_goes_on(mode):
    brain = roomy(mode=mode)
    host = brain.state.fleet.instances[0]
    used, pages, admitted = host.used, host.pages_used, brain.state.ledger.admitted
    waits(brain, A, B)
    assert host.used == used - 2 and host.pages_used < pages and brain.state.ledger.admitted == admitted
    assert brain.summary()["in_environment"] == {0: 2} and brain.state.queue.unfinished[0] == used
    (resume,) = [c for c in brain.step(ev.SampleReady(id=A, tokens=12)) if isinstance(c, ev.Resume)]
    assert unnumbered(resume) == (ev.Resume(ids=(A,), instance=0, version=0),)
    brain.step(ev.SampleDone(id=B, instance=None, tokens=9, finish="stop"))
    assert brain.summary()["in_environment"] == {} and brain.state.unit(B) is None
    assert brain.step(ev.SampleDone(id=B, instance=None, tokens=9, finish="stop")) == ()


def test_the_answer_to_an_earlier_wait_is_late():
    brain = roomy()
    waits(brain, A, tokens=8)
    answer = ev.SampleReady(id=A, tokens=12)
    brain.step(answer)
    brain.step(ev.SampleResumed(id=A, instance=0))
    waits(brain, A, tokens=14)
    assert not brain.counts(answer) and brain.state.unit(A).state == "waiting"
    assert brain.counts(ev.SampleReady(id=A, tokens=0))  # its body has lost it, and begins again


def test_a_group_that_fails_gives_up_the_samples_that_wait():
    brain = roomy()
    waits(brain, A)
    cancels = brain.step(ev.GroupFailed(group_id=0, reason="the environment broke"))
    assert {c.instance: c.ids for c in cancels if isinstance(c, ev.Cancel)} == {None: (A,), 0: (B,)}
    assert not brain.counts(ev.SampleReady(id=A, tokens=9)) and brain.summary()["in_environment"] == {}
    assert waits(brain, B) == ()  # it had stopped before it received the Cancel, which it answers all the same
    for id in (A, B):
        brain.step(ev.SampleCancelled(id=id, reason="done"))
    assert 0 not in brain.state.groups


@pytest.mark.parametrize("lost", [False, True])
def test_a_waiting_sample_outlives_its_instance_and_its_orchestrator(lost):
    brain = roomy()
    waits(brain, A)
    if lost:
        brain.step(ev.InstanceDown(instance=0, reason="lost"))
    brain = Orchestrator.restore(brain.state.config, json.loads(json.dumps(brain.snapshot())))
    outstanding = restart(brain.state, brain.step)
    assert outstanding.waiting == {A: 0} and A not in outstanding.recorded
    brain.step(up(0, 32))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    (resume,) = [c for c in brain.step(ev.SampleReady(id=A, tokens=9)) if isinstance(c, ev.Resume)]
    assert unnumbered(resume) == (ev.Resume(ids=(A,), instance=0, version=0),)


def test_time_in_an_environment_is_no_time_of_decoding():
    brain = roomy()
    brain.step(ev.TimePassed(now_s=1.0))
    waits(brain, A, B)
    brain.step(ev.TimePassed(now_s=61.0))
    brain.step(ev.SampleReady(id=A, tokens=9))
    brain.step(ev.SampleResumed(id=A, instance=0), ev.TimePassed(now_s=62.0))
    brain.step(ev.SampleDone(id=B, instance=None, tokens=9, finish="stop"))
    brain.step(ev.SampleDone(id=A, instance=0, tokens=12, finish="stop"))
    assert brain.state.fleet.measured.finished_s == pytest.approx(1.0 + 2.0)


@pytest.mark.parametrize(("format", "later"), [(8, ("home", "waits_s", "ran", "restarts")), (9, ("ran", "restarts"))])
def test_a_snapshot_of_an_older_format_is_read(format, later):
    brain = roomy()
    for unit in (unit for group in brain.state.groups.values() for unit in group.units):
        unit.ran = ()
    forget_attempts(brain)
    data = brain.snapshot()
    old = before_requests(json.loads(json.dumps(data)))
    known = [name for name in UNIT if name not in SINCE_ATTEMPTS]
    for group in old["groups"]:
        del group[-3:-1]
        for unit in group[-1]:
            unit[1] = [value for name, value in zip(known, unit[1], strict=True) if name not in later]
    del old["sampled_by"], old["trained_by"]
    if format == 8:
        del old["queue"]["in_environment"]
    again = Orchestrator.restore(brain.state.config, old | {"format": format})
    assert json.dumps(again.snapshot()) == json.dumps(data)
