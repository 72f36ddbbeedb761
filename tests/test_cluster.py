"""A whole run over gangs: the same world, orchestrator, journal; threads stand for processes, arithmetic for a model.

Gangs are of two processes: what the second one does shows that it does as the first."""

import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.journal.records import Partial
from tests.fakes.cluster import eventually
from tests.fakes.cluster_world import World, at_random, check, events


@pytest.mark.parametrize("mode, max_versions", [("dora", 3), ("partial", 2), ("sync", 1)])
def test_a_run_over_gangs_is_a_run(tmp_path, mode, max_versions):
    world = World(tmp_path / "journal", mode, max_versions)
    check(world, world.run())
    for engines in world.launcher.engines.values():
        eventually(lambda engines=engines: not engines[1].samples)  # the second process did what the first did
        assert engines[0].versions == engines[1].versions


@pytest.mark.parametrize("mode, max_versions, seed", [("dora", 3, 0), ("dora", 2, 2), ("partial", 2, 3)])
def test_gangs_that_are_killed_lose_nothing_and_repeat_nothing(tmp_path, mode, max_versions, seed):
    world = World(tmp_path / "journal", mode, max_versions)
    killer, kills = at_random(world, seed, lambda host: host.die())
    check(world, world.run([killer]))
    lost = [text for text in world.notes if "is lost" in text]
    assert len(kills) > 1 and lost, (kills, world.notes)


def test_samples_of_a_lost_gang_go_on_from_their_tokens(tmp_path):
    world = World(tmp_path / "journal", length=lambda version, group, index, limit: 60, instances=2)
    begun, seen = set(), []

    def note(record):
        if isinstance(record, Partial) and record.id in begun and not seen:
            seen.append(record)
            world.hosts(0)[1].die()

    def watch(event, commands):
        if isinstance(event, ev.SampleStarted) and event.instance == 0:
            begun.add(event.id)

    world.world.listen(note)
    check(world, world.run([watch]))
    notes = events(world.folder)
    assert seen and any(isinstance(event, ev.SampleResumed) for event in notes)
    reports = [event for event in notes if isinstance(event, ev.InstanceReported)]
    assert {event.instance for event in reports if event.sampled and event.row_s >= event.busy_s > 0} == {0, 1}


def test_a_gang_that_says_nan_is_in_quarantine(tmp_path):
    world = World(tmp_path / "journal", length=lambda version, group, index, limit: 60, instances=2)
    begun, notes, quarantined = [], [], []

    def watch(event, commands):
        if isinstance(event, ev.SampleStarted) and event.instance == 0 and not begun:
            begun.append(event.id)
            nan = np.full(1, np.nan, np.float32)
            out_ids = np.ones(1, np.int32)
            garbage = Partial(id=event.id, version=event.version, start=0, out_ids=out_ids, logprobs=nan)
            world.hosts(0)[0].link.send(garbage)
        notes.extend([event] if isinstance(event, ev.InstanceUnhealthy) else [])
        quarantined.extend(command for command in commands if isinstance(command, ev.Quarantine))

    check(world, world.run([watch]))
    assert [event.instance for event in notes] == [command.instance for command in quarantined] == [0]
    assert "log-probs are not finite" in notes[0].reason
    starts = [event for event in events(world.folder) if isinstance(event, ev.SampleStarted) and event.id == begun[0]]
    assert len(starts) == 2  # it began again
