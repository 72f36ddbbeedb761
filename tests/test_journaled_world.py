"""The one-process world with real threads behind a journal: killed at any fact, it goes on as if it had not been."""

import dataclasses
from unittest import mock

import pytest

from dora_jax.base.exits import Stop
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.shutdown import Guard
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.log_stores import ObjectLogStore
from dora_jax.runtime.journal.object_storage import Objects
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.recovery import recover
from tests.fakes.coordinator_world import P
from tests.fakes.journal_world import Disk
from tests.fakes.journaled_run import STEPS, Run
from tests.fakes.orchestrator_by_hand import A, make, up


@pytest.mark.parametrize("mode", ["sync", "one_step", "dora", "dora_paper", "partial", "rollpacker", "staleflow"])
def test_a_run_killed_again_and_again_trains_every_group_once(tmp_path, mode):
    job = Run(tmp_path, mode)
    incarnations, halt = 0, None
    while halt is None:
        incarnations += 1
        halt = job.incarnation(kill_at=60 + 12 * incarnations if incarnations < 12 else None)
    assert halt.ok and incarnations > 2
    job.audit()
    assert job.went_on or mode == "sync"


def test_a_run_whose_journal_is_in_object_storage_tells_nothing_before_it_is_there(tmp_path):
    job, store = Run(tmp_path), Objects("memory://j")
    incarnations, halt = 0, None
    while halt is None:
        incarnations += 1
        halt = job.incarnation(kill_at=60 + 37 * incarnations if incarnations < 12 else None, log=ObjectLogStore(store))
    assert halt.ok and incarnations > 2 and job.went_on
    job.audit()
    assert len(store.keys()) < 0.5 * sum(60 + 37 * n for n in range(1, incarnations)), "facts come in batches"


def test_a_run_that_is_stopped_goes_on_and_a_finished_one_ends_at_once(tmp_path):
    job = Run(tmp_path)
    guard = Guard(0.0)
    calls = []

    def look():
        calls.append(0)
        if len(calls) == 20:
            raise Stop("asked to")

    guard.look = look
    with pytest.raises(Stop):
        job.incarnation(guard=guard)
    assert job.incarnation().ok
    job.audit()
    before = len(job.finished)
    assert job.incarnation().ok and len(job.finished) == before


def test_more_steps_go_on_where_a_finished_run_ended(tmp_path):
    job = Run(tmp_path)
    assert job.incarnation().ok
    job.config = dataclasses.replace(job.config, total_steps=STEPS + 2)
    assert job.incarnation().ok
    assert sorted(job.trained) == list(range(1, STEPS + 3))
    ids = [g for groups, _ in job.trained.values() for g in groups]
    assert len(ids) == len(set(ids)) == (STEPS + 2) * P


def test_a_run_in_which_nothing_moves_ends_with_a_diagnosis():
    guard = Guard(0.05, lambda: "everything waits for an instance")
    with guard, pytest.raises(Stop, match="nothing has moved for .*everything waits for an instance"):
        while True:
            guard.look()


def test_a_quarantine_outlives_the_process_that_decided_it():
    """After a restart nobody would report it again."""
    disk, brain = Disk(), make()
    world = mock.Mock()
    started = ev.SampleStarted(id=A, instance=0, version=0)
    batches = [[up(0, versions=(0,))], [started], [ev.InstanceUnhealthy(instance=0, reason="NaN")]]
    world.events.side_effect = batches
    durable = JournaledWorld(world, EventLog(disk), brain, PayloadState())
    for _ in batches:
        for event in durable.events():
            brain.commit(event)
        for command in brain.decide():
            durable.execute(command)
    found = recover(EventLog(disk), brain.state.config, [0], lambda v: True, print)
    unit = found.orchestrator.state.unit(A)
    assert (unit.state, unit.started, unit.ran) == ("pending", True, ())
