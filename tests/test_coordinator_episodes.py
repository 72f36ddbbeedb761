"""Episodes through the one-process world: every sampled token proves its version, every observed one its
environment."""

import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import each
from dora_jax.runtime.common.worker import Finished
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import SampleId, ScoredGroup
from tests.fakes.coordinator_world import ORACLE, STEPS, P, make, play, trained_by
from tests.fakes.environments import ScriptedEnvironments
from tests.fakes.journaled_run import Run


def short(version, group, index, limit):
    """Each turn's tokens."""
    return 2 + (group + index) % 4


def played(environments, **options):
    waiting = []

    def watch(event, commands):
        if isinstance(event, ev.SampleWaiting):
            waiting.append(event.id)

    halt, records = play(*make(environments=environments, length=short, **options)[:3], [each(watch)])
    assert halt.ok and environments.closed
    return records, waiting


def check(sample, environments):
    """One version; the tokens in front of each turn are what the environment answered; each sampled one is the oracle's."""
    (span,) = sample.spans
    want = ORACLE.expected(span.version, *sample.id, len(sample.out_ids))
    np.testing.assert_array_equal(sample.out_ids[sample.mask], want[sample.mask])
    assert not sample.logprobs[~sample.mask].any() and (sample.logprobs[sample.mask] < 0).all()
    reported = [environments.opened(sample.id)] if environments.opening else []
    reported += [environments.observed(sample.id, turn) for turn in range(1, environments.turns(sample.id))]
    np.testing.assert_array_equal(sample.out_ids[~sample.mask], np.concatenate([np.zeros(0, int), *reported]))
    assert sample.terms == {"right": float(sample.id.index % 2)} and sample.finish == "stop"


@pytest.mark.parametrize(
    ("mode", "opening"),
    [("dora", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("dora", 0), ("sync", 0), ("evict", 2)))],
)
def test_an_episode_has_one_version_and_the_exact_tokens_of_its_turns(mode, opening):
    environments = ScriptedEnvironments(opening=opening)
    records, waiting = played(environments, mode=mode, eval_every=3)
    trained = trained_by(records)
    assert len({group.group_id for _, group in trained}) == STEPS * P == len(trained)
    for base, group in trained:
        assert base - group.version <= 2
        assert group.parts["right"].tolist() == group.rewards.tolist() == [0, 1, 0, 1]
        for sample in group.samples:
            assert sample.version == group.version
            check(sample, environments)
    finished = [record.sample for record in records if isinstance(record, Finished)]
    assert len(waiting) >= sum(environments.turns(sample.id) for sample in finished)


class Slow(ScriptedEnvironments):
    """Answers the first turn of a version but the first only when `publications` versions have come out meanwhile."""

    def __init__(self, publications, **options):
        super().__init__(**options)
        self.slow, self.left, self.kept = None, publications, None

    def turn(self, prompt, so_far):
        super().turn(prompt, so_far)
        if self.slow is None and so_far.version and self.turns(so_far.id) > 1:
            self.slow, self.kept = so_far.id, self.asked.pop(so_far.id)

    def received(self, event):
        if isinstance(event, ev.StepPublished) and self.kept and self.left:
            self.left -= 1
            if not self.left:
                self.asked[self.slow] = self.kept


def test_other_versions_come_and_go_while_an_episode_waits():
    """It holds no slot meanwhile, and its own version stays until it has gone on and ended."""
    slow = Slow(3, opening=1)
    facts = []

    def watch(event, commands):
        slow.received(event)
        facts.append(event)
        facts.extend(commands)

    halt, records = play(*make(environments=slow, length=short, max_versions=5, inflight=2.0)[:3], [each(watch)])
    assert halt.ok and not slow.left
    began = next(i for i, x in enumerate(facts) if isinstance(x, ev.SampleWaiting) and x.id == slow.slow and x.tokens)
    resumed = next(i for i, x in enumerate(facts[began:], began) if isinstance(x, ev.Resume) and slow.slow in x.ids)
    (sample,) = [r.sample for r in records if isinstance(r, Finished) and r.sample.id == slow.slow]
    check(sample, slow)
    meanwhile = facts[began:resumed]
    assert sum(isinstance(x, ev.StepPublished) for x in meanwhile) >= 2
    retired = [x.version for x in meanwhile if isinstance(x, ev.Retire)]
    assert retired and sample.version not in retired
    others = {x.id for x in meanwhile if isinstance(x, ev.SampleDone)}
    assert len(others) > 8, "more than an instance's slots have gone through meanwhile"


def test_a_controller_that_is_killed_with_fifty_episodes_waiting_loses_none(tmp_path):
    """A third of the waiting ones does not replay: those begin again, the others go on from their recorded tokens."""
    waiting = {}

    def fifty_wait(state):
        held = [unit for group in state.groups.values() for unit in group.units if unit and unit.state == "waiting"]
        waiting.update({unit.id: unit.version for unit in held} if len(held) >= 50 else {})
        return len(held) >= 50

    made = []

    def environments():
        losing = [id for id in waiting if id.index == 1]
        made.append(ScriptedEnvironments(late=10**9 if not made else 3, opening=1, losing=losing))
        return made[-1]

    history = Run(tmp_path, environments=environments, max_versions=5, inflight=5.0)
    assert history.incarnation(kill_when=fifty_wait) is None and len(waiting) >= 50
    halt = history.incarnation()
    assert halt.ok
    history.audit()
    finished = {sample.id: sample for sample in history.finished}
    assert len(finished) == len(history.finished)
    for id, version in waiting.items():  # what began after the last commit begins again, at the version of that time
        if id in finished and id in history.recorded:
            assert finished[id].version == history.recorded[id] == version
    for sample in finished.values():
        check(sample, made[-1])
    assert len(set(waiting) & set(finished)) >= 40
    begun_again = {id for id in waiting if id.index == 1}
    assert begun_again and not begun_again & made[-1].losing


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "opening"), [("dora", 2), ("sync", 2), ("evict", 0)])
def test_a_run_killed_again_and_again_trains_whole_episodes(tmp_path, mode, opening):
    made = ScriptedEnvironments(opening=opening)
    history = Run(tmp_path, mode, environments=lambda: ScriptedEnvironments(opening=opening))
    incarnations, halt = 0, None
    while halt is None:
        incarnations += 1
        halt = history.incarnation(kill_at=90 + 61 * incarnations if incarnations < 10 else None)
    assert halt.ok and incarnations > 2
    history.audit()
    for sample in history.finished:
        check(sample, made)


def test_an_error_fails_its_group_and_is_no_reward():
    environments = ScriptedEnvironments(failing=(1, 6))
    records, _ = played(environments)
    failures = [record for record in records if isinstance(record, GroupFailure)]
    scored = {record.group_id for record in records if isinstance(record, ScoredGroup)}
    assert {failure.group_id for failure in failures} == {1, 6} and not scored & {1, 6}
    assert all(failure.lengths[0] > 0 and failure.reason == "the machine is gone" for failure in failures)
    assert len(trained_by(records)) == STEPS * P


def test_an_episode_that_is_lost_begins_again_at_its_version():
    lost = {SampleId(group, 1) for group in range(8)}
    environments = ScriptedEnvironments(losing=lost, opening=1)
    records, _ = played(environments)
    samples = {sample.id: sample for _, group in trained_by(records) for sample in group.samples}
    assert not environments.losing and lost <= set(samples)
    for id in lost:
        check(samples[id], environments)


def test_a_rewritten_turn_leaves_a_branch_whose_tokens_have_their_loss_once():
    branching = {SampleId(group, index) for group in range(8) for index in range(4) if (group + index) % 3 == 2}
    records, _ = played(ScriptedEnvironments(branching=branching))
    samples = {sample.id: sample for _, group in trained_by(records) for sample in group.samples}
    for id, sample in samples.items():
        assert len(sample.branches) == (id in branching)
        for branch in sample.branches:
            whole = [*branch.prompt_ids, *branch.out_ids]
            kept = len(whole) - 2
            assert [*sample.prompt_ids, *sample.out_ids][:kept] == whole[:kept]
            want = ORACLE.expected(branch.version, *id, len(branch.out_ids))
            np.testing.assert_array_equal(branch.out_ids[branch.mask], want[branch.mask])
            assert branch.mask.all() and not sample.mask[: kept - len(sample.prompt_ids)].any() and sample.mask.any()
