"""Every sample that has started and every group ends once, and a fact of an attempt that is over counts no more."""

import dataclasses
import json

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import quarantine
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.snapshot import restart
from dora_jax.types import EARLIER, SERVED, SampleId
from tests.fakes.older_snapshots import before_attempts
from tests.fakes.orchestrator_by_hand import A, B, begin, make, ready, up
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World


def started(brain: Orchestrator, *ids: SampleId) -> None:
    for id in ids:
        unit = brain.state.unit(id)
        brain.step(where(brain, ev.SampleStarted, id, version=unit.version))


def where(brain: Orchestrator, kind: type, id: SampleId, **fields) -> ev.Event:
    """What the incarnation that has the sample reports of it."""
    unit = brain.state.unit(id)
    incarnation = brain.state.fleet.instances[unit.instance].incarnation
    return kind(id=id, instance=unit.instance, incarnation=incarnation, attempt=unit.placed, **fields)


def done(brain: Orchestrator, *ids: SampleId) -> tuple[ev.Command, ...]:
    answer = ()
    for id in ids:
        instance = brain.state.unit(id).instance
        incarnation = brain.state.fleet.instances[instance].incarnation
        answer += brain.step(ev.SampleDone(id=id, instance=instance, tokens=5, finish="stop", incarnation=incarnation))
    return answer


def of(kind: type, commands: tuple[ev.Command, ...]) -> list:
    return [command for command in commands if isinstance(command, kind)]


# ---------------------------------------------------------------- one end each


def test_a_sample_that_begins_again_is_cancelled_where_its_group_fails():
    brain = make()
    ready(brain)
    started(brain, A)
    brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    answer = brain.step(ev.GroupFailed(group_id=0, reason="its environment broke"))
    assert answer == (ev.Cancel(ids=(A,), instance=None, reason="its environment broke"),)  # B has never started
    assert brain.step(ev.SampleCancelled(id=A, reason="")) == (
        ev.Discard(group_id=0, reason="its last sample has ended"),
    )
    assert not brain.counts(ev.SampleCancelled(id=A, reason="")) and 0 not in brain.state.groups


def test_a_group_whose_other_samples_never_started_is_discarded_when_it_is_given_up():
    brain = make(groups_per_step=1, total_steps=3)
    brain.step(up(0, slots=1))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    started(brain, A)
    done(brain, A)
    answer = brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    assert [command.group_id for command in of(ev.Discard, answer)] == [0] and not of(ev.Cancel, answer)
    assert brain.state.redo == [100_000_000]


@pytest.mark.parametrize("trainable", [True, False])
def test_a_group_that_was_scored_is_discarded_only_where_it_is_given_up(trainable):
    brain = make()
    ready(brain)
    started(brain, A, B)
    done(brain, A, B)
    brain.step(ev.GroupScored(group_id=0, trainable=trainable))
    answer = brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    assert [command.group_id for command in of(ev.Discard, answer)] == [0] * trainable


def test_a_prompt_that_was_given_up_is_not_displaced_by_a_new_one_near_the_end():
    """The slot of the group is free at once, but its prompt is issued again when its samples have been cancelled."""
    brain = make(groups_per_step=1, total_steps=1, inflight=1.0)
    for instance in (0, 1):
        brain.step(up(instance, slots=1))
        brain.step(ev.WeightsLoaded(instance=instance, version=0))
    started(brain, A, B)
    done(brain, A)  # on instance 0
    answer = brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    assert of(ev.Cancel, answer) == [ev.Cancel(ids=(B,), instance=1, reason="instance 0 is in quarantine: NaN")]
    answer = brain.step(up(0, slots=1, versions=(0,), incarnation=1))
    assert not of(ev.Start, answer), "of group 1, which the only step would train in the place of prompt 0"
    answer = brain.step(ev.SampleCancelled(id=B, reason=""))
    assert {id.group_id for start in of(ev.Start, answer) for id in start.ids} == {100_000_000}


@pytest.mark.parametrize("mode", ["evict", "rollpacker"])
def test_no_prompt_that_was_given_up_is_left_at_the_end(mode):
    config = make(mode=mode, total_steps=5, inflight=3.0, max_versions=1).state.config
    for seed in range(12):
        shape = Shape(instances=((3, 1.0, 1), (2, 3.0, 1)), filtered=0.2, failed=0.1, deaths=0.5, seed=seed)
        World(config, shape).run().audit()


# ---------------------------------------------------------------- an answer names its attempt


def roomy() -> Orchestrator:
    brain = make()
    brain.step(up(0, 32, residents=2))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    started(brain, A, B)
    return brain


def test_what_is_repeated_of_an_earlier_stay_at_the_same_incarnation_is_dropped():
    """A sample waits for its environment and comes back, twice; every fact of the first time is repeated in the
    second."""
    brain = roomy()
    first: list[ev.Event] = []
    for turn in (1, 2):
        facts = [where(brain, ev.SampleWaiting, A, tokens=8 * turn)]
        brain.step(facts[0])
        facts.append(ev.SampleReady(id=A, tokens=0, attempt=brain.state.unit(A).placed))
        assert not any(brain.counts(event) for event in first), "while it waits"
        brain.step(facts[1])
        assert not any(brain.counts(event) for event in first), "while it resumes"
        facts.append(where(brain, ev.SampleResumed, A))
        brain.step(facts[2])
        assert not any(brain.counts(event) for event in first), "while it runs"
        first = first or facts
    dropped = sum(brain.state.dropped.values())
    before = brain.snapshot()
    assert brain.step(*first) == () and sum(brain.state.dropped.values()) == dropped + 3
    assert brain.snapshot() | {"dropped": 0} == before | {"dropped": 0}


def test_a_start_that_is_repeated_is_not_that_of_the_sample_which_begins_again():
    brain = make()
    brain.step(up(0, 2))
    brain.step(up(1, 6))
    for instance in (0, 1):
        brain.step(ev.WeightsLoaded(instance=instance, version=0))
    first = where(brain, ev.SampleStarted, A, version=0)
    brain.step(first)
    unit, src = brain.state.unit(A), brain.state.unit(A).instance
    there = brain.state.fleet.instances[1 - src]
    brain.state.attempts += 1
    brain.state.fleet.reserve_move(unit, there, brain.state.attempts, 0.0)
    brain.step(ev.SampleMoved(id=A, src=src, dst=there.id, attempt=unit.attempt))
    brain.step(ev.InstanceUnhealthy(instance=there.id, reason="NaN"))
    while unit.state == "pending":
        id = next(iter(brain.state.fleet.instances[src].units))
        started(brain, *([id] if brain.state.unit(id).state == "starting" else []))
        done(brain, id)
    assert (unit.state, unit.instance) == ("starting", src) and not brain.counts(first)


def test_a_request_that_is_repeated_is_dropped_and_one_under_the_same_id_comes():
    brain = make()
    brain.step(up(0, 32))
    brain.step(ev.WeightsLoaded(instance=0, version=0))
    came = ev.RequestCame(group_id=SERVED, version=0, attempt=1)
    brain.step(came)
    id = SampleId(SERVED, 0)
    started(brain, id)
    assert done(brain, id) == () and SERVED not in brain.state.groups
    assert not brain.counts(came)
    assert brain.counts(dataclasses.replace(came, attempt=2))
    restart(brain.state, brain.step)
    assert brain.counts(came), "the next endpoint counts anew"


def test_a_move_is_answered_under_its_own_attempt():
    brain = roomy()
    brain.step(up(1, 32, versions=(0,)))
    unit = brain.state.unit(A)
    for _ in range(2):
        brain.state.attempts += 1
        brain.state.fleet.reserve_move(unit, brain.state.fleet.instances[1], brain.state.attempts, 0.0)
        failed = ev.MoveFailed(id=A, src=0, dst=1, attempt=brain.state.attempts, reason="cut off")
        if unit.failed_moves:
            assert not brain.counts(dataclasses.replace(failed, attempt=failed.attempt - 1))
            assert not brain.counts(ev.SampleMoved(id=A, src=0, dst=1, attempt=failed.attempt - 1))
        brain.step(failed)
    again = Orchestrator.restore(brain.state.config, json.loads(json.dumps(brain.snapshot())))
    assert again.state.unit(A).failed_moves == unit.failed_moves == 2


# ---------------------------------------------------------------- suspicion by incarnation


def two_incarnations() -> Orchestrator:
    """Instance 0 has sampled all of group 0, which is ready, and A's sibling group 1 in part; then it was lost, and is
    up again with samples of its next incarnation."""
    brain = make(inflight=3.0)
    ready(brain)
    started(brain, A, B, SampleId(1, 0), SampleId(1, 1))
    done(brain, A, B, SampleId(1, 0))
    brain.step(ev.GroupScored(group_id=0, trainable=True))
    brain.step(ev.InstanceDown(instance=0, reason="lost"))
    brain.step(up(0, slots=6, incarnation=1, versions=(0,)))
    return brain


def test_what_an_incarnation_that_is_over_has_left_is_not_trained():
    brain = two_incarnations()
    healthy = [u.id for g in brain.state.groups.values() for u in g.units if u is not None and u.state == "starting"]
    started(brain, *healthy)
    late = ev.InstanceUnhealthy(instance=0, reason="its log-probs are far off", incarnation=0)
    answer = brain.step(late)
    (named,) = of(ev.Quarantine, answer)
    assert named.instance == 0 and {command.group_id for command in of(ev.Discard, answer)} == {0}
    assert brain.state.groups[1].abandoned == "evicted", "a sample of it had ended there"
    assert brain.state.fleet.instances[0].incarnation == 1, "its next incarnation goes on"
    assert all(brain.state.unit(id).state == "running" for id in healthy if id.group_id != 1)
    assert not brain.counts(late), "sent twice"
    assert brain.counts(ev.InstanceUnhealthy(instance=0, reason="NaN", incarnation=1))
    assert not brain.counts(ev.InstanceUnhealthy(instance=0, reason="NaN", incarnation=2)), "which has not come up"


def test_a_sample_that_moved_away_is_not_trained_with_tokens_of_where_it_was():
    brain = roomy()
    brain.step(up(1, 32, versions=(0,)))
    brain.state.attempts += 1
    unit = brain.state.unit(A)
    brain.state.fleet.reserve_move(unit, brain.state.fleet.instances[1], brain.state.attempts, 0.0)
    brain.step(ev.SampleMoved(id=A, src=0, dst=1, attempt=unit.attempt))
    assert unit.ran == ((0, 0), (1, 0))
    brain = Orchestrator.restore(brain.state.config, json.loads(json.dumps(brain.snapshot())))
    brain.step(ev.InstanceDown(instance=0, reason="lost"))
    brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    assert brain.state.unit(A).restarts and brain.state.unit(A).state == "parking"


def test_incarnations_of_an_earlier_process_are_others():
    brain = two_incarnations()
    restart(brain.state, brain.step)
    assert brain.state.sampled_by[0] == ((0, EARLIER),)
    brain.step(up(0, slots=6, versions=(0,)))
    assert brain.counts(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    brain.step(ev.InstanceUnhealthy(instance=0, reason="NaN"))
    assert 0 not in brain.state.sampled_by, "what it sampled before is of the same devices"


def test_a_snapshot_without_attempts_and_incarnations_is_read():
    brain = two_incarnations()
    quarantine.remember(brain.state, 0)
    data = before_attempts(json.loads(json.dumps(brain.snapshot())))
    again = Orchestrator.restore(brain.state.config, data)
    assert again.state.sampled_by[0] == ((0, EARLIER),) and again.state.groups[1].ran == ((0, EARLIER),)
    assert again.state.unit(SampleId(1, 1)).started
    assert again.counts(ev.SampleResumed(id=SampleId(1, 1), instance=0, incarnation=1)), (
        "a journal of then names no attempt"
    )
    again.step(ev.InstanceUnhealthy(instance=0, reason="NaN", incarnation=1))
    assert 0 not in again.state.sampled_by and again.state.groups[1].abandoned == "evicted"


def test_a_version_stays_while_a_sample_runs_at_it():
    brain = make(groups_per_step=1, group_size=2, max_versions=2)
    ready(brain)
    started = [unit.id for group in brain.state.groups.values() for unit in group.units if unit.instance is not None]
    begin(brain, *started)
    for id in (A, B):
        brain.step(ev.SampleDone(id=id, instance=0, tokens=5, finish="stop"))
    brain.step(ev.GroupScored(group_id=0, trainable=True))
    commands = brain.step(ev.StepPublished(version=1))
    assert brain.state.ledger.base == 1 and any(group.version == 0 for group in brain.state.groups.values())
    assert not [command for command in commands if isinstance(command, ev.Retire)] and 0 in brain.state.alive


def test_a_load_is_answered_under_its_own_attempt():
    """An instance that goes back to a version is not there because it has had it before."""
    brain = make(groups_per_step=1, group_size=1, total_steps=6, max_versions=3)
    (first,) = [c for c in brain.step(up(0, slots=1)) if isinstance(c, ev.LoadWeights)]
    loaded = ev.WeightsLoaded(instance=0, version=0, attempt=first.attempt)
    assert brain.counts(loaded) and not brain.counts(dataclasses.replace(loaded, attempt=first.attempt + 1))
    brain.step(loaded)
    instance = brain.state.fleet.instances[0]
    brain.state.fleet.begin_load(instance, 0, 0)  # the same version once more
    brain.state.fleet.asked[0] = first.attempt + 1, 0.0
    assert not brain.counts(loaded) and brain.counts(dataclasses.replace(loaded, attempt=first.attempt + 1))
    assert brain.counts(dataclasses.replace(loaded, attempt=None)), "a journal of before names no attempt"
