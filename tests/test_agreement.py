"""Whether an instance agrees with the trainer at the same version: whose gap it is, on what it is measured, who is
blamed."""

import itertools
import queue
import types

import numpy as np
import pytest

from dora_jax.buffer import layout, pack
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.sample_gaps import SampleGap, SampleGaps
from dora_jax.runtime.common.worker import StepDone
from dora_jax.runtime.instances.supervised_worker import LocalInstance, RestartPolicy
from dora_jax.runtime.training.agreement import Agreement
from dora_jax.trainer.advantage import ZeroWeights
from dora_jax.trainer.step import Probe
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes.coordinator_world import SECTION, Weights
from tests.fakes.oracle import OracleEngine


def scored(group_id, version, samples=2, tokens=4):
    made = tuple(
        Sample(
            id=SampleId(group_id, i),
            prompt_ids=np.array([1, 2], np.int32),
            out_ids=np.arange(10 * i, 10 * i + tokens, dtype=np.int32),
            logprobs=np.full(tokens, -1 - group_id / 10 - i, np.float32),
            mask=np.array([True] * (tokens - 1) + [False]),
            spans=(Span(version=version, start=0, stop=tokens),),
            finish="stop",
        )
        for i in range(samples)
    )
    return ScoredGroup(
        group_id=group_id, version=version, samples=made, rewards=np.zeros(samples, np.float32), parts={}
    )


class Trainer:
    """Its log-probs are those of the engines, but for a tenth of the number of the weights; its own are number 9."""

    def probed(self, probe):
        return probe.batch.behavior_logprobs + np.float32((probe.weights or 9) / 10)


def probe(group, version, weights):
    shape = layout.layout(pack_tokens=8, rows=0, micro_batches=1, samples=len(group.samples), max_tokens=8)
    return Probe(pack.pack_step([[group]], shape, ZeroWeights())[0], version, weights)


def measured(*steps, known=range(100)):
    """The gaps of the last step; a step: its groups. The weights of version v are the number v + 1."""
    weights = lambda version: version + 1 if version in known else None
    gaps = SampleGaps(Trainer(), probe, weights, lambda groups, base: groups)
    for base, groups in enumerate(steps):
        assert gaps.pack(groups, base) is groups, "what is packed stays what it was"
    return gaps.gaps(len(steps))


def test_the_gap_of_each_sample_is_measured_under_the_weights_that_sampled_it():
    assert measured([scored(5, 0)]) == (
        SampleGap(id=SampleId(5, 0), version=0, gap=pytest.approx(0.1), tokens=3),
        SampleGap(id=SampleId(5, 1), version=0, gap=pytest.approx(0.1), tokens=3),
    )
    of_the_version_before = measured([scored(5, 0)], [scored(6, 0)])
    assert [(g.version, g.gap) for g in of_the_version_before] == [(0, pytest.approx(0.1))] * 2
    of_the_base = measured([scored(5, 0)], [scored(6, 1)])
    assert [(g.version, g.gap) for g in of_the_base] == [(1, pytest.approx(0.2))] * 2


def test_older_versions_are_never_compared_and_staleness_is_no_gap():
    assert measured([scored(5, 0)], [scored(6, 0)], [scored(7, 0)]) == ()


def test_where_the_published_weights_are_not_at_hand_the_trainers_own_serve_at_lag_0():
    assert [g.gap for g in measured([scored(5, 0)], known=())] == [pytest.approx(0.9)] * 2
    assert measured([scored(5, 0)], [scored(6, 0)], known=()) == ()


def test_one_group_in_sixteen_is_measured_and_they_take_turns():
    first, second = ([scored(i, base, samples=1) for i in range(32)] for base in (0, 1))
    assert {g.id.group_id for g in measured(first)} == {0, 1}
    assert {g.id.group_id for g in measured(first, second)} == {2, 3}


# ------------------------------------------------------------------- who is blamed


class Fleet:
    """Instances that are doubted; `step` ends a step of samples of so many instances, with these gaps."""

    def __init__(self, instances=3):
        self.notes, self.suspicions, self._versions, self._groups = [], [], itertools.count(1), itertools.count()
        self.pool = [types.SimpleNamespace(instance=i, incarnation=0) for i in range(instances)]
        for worker in self.pool:
            worker.mark_unhealthy = lambda incarnation, reason, i=worker.instance: self.suspicions.append(
                (i, incarnation, reason)
            )
        self._gaps = {}
        self.agreement = Agreement(0.2, self.gaps, self.pool, self.notes.append, [].append)

    def gaps(self, version):
        return self._gaps[version]

    def step(self, *gaps, tokens=64, then=lambda id: ()):
        """gaps: of a sample of instance 0, 1, ...; None: it sampled none. then: what else happened to a sample."""
        version, found = next(self._versions), []
        for worker, gap in zip(self.pool, gaps):
            id = SampleId(next(self._groups), 0)
            if gap is not None:
                started = ev.SampleStarted(id=id, instance=worker.instance, version=0, incarnation=worker.incarnation)
                for event in (started, *then(id)):
                    self.agreement.event(event, ())
                found.append(SampleGap(id=id, version=0, gap=gap, tokens=tokens))
        self._gaps[version] = found
        self.agreement.record(StepDone(version=version, groups=(), metrics={}, wait_s=0, step_s=0))


def test_the_instance_that_is_far_from_the_trainer_is_named_with_the_figures():
    fleet = Fleet()
    fleet.step(0.001, 0.02, 1.0)
    ((instance, incarnation, reason),) = fleet.suspicions
    assert (instance, incarnation) == (2, 0)
    assert reason == (
        "its log-probs differ from the trainer's by 1 nats a token at the same version, measured on 64 tokens of "
        "version 0, above trainer.max_instance_mismatch=0.2"
    )
    fleet.pool[2].incarnation = 1
    fleet.step(0.001, 0.02, 0.001)
    fleet.step(0.001, 0.02, 0.001)
    assert len(fleet.suspicions) == 1, "its next incarnation begins without a history"


def test_a_few_tokens_condemn_nobody_and_what_is_old_does_not_count():
    fleet = Fleet()
    fleet.step(0.01, 0.01, 5.0, tokens=8)
    assert not fleet.suspicions, "one sample in which a token went wrong"
    for _ in range(8):
        fleet.step(0.01, 0.01, 0.01, tokens=16)
    assert not fleet.suspicions
    fleet.step(0.01, 0.01, 1.0, tokens=32)
    assert [i for i, _, _ in fleet.suspicions] == [2], "half of its newest tokens are off by a nat"


def test_where_no_instance_agrees_none_is_blamed_and_it_is_reported_once():
    fleet = Fleet()
    for _ in range(3):
        fleet.step(0.5, 0.4, 0.3)
    assert not fleet.suspicions and len(fleet.notes) == 1 and "no instance is blamed" in fleet.notes[0]
    Fleet().step(0.5, None, None)  # what the others sample is not known yet
    fleet = Fleet(1)
    fleet.step(0.5)
    assert not fleet.suspicions and fleet.notes


@pytest.mark.parametrize(
    "event",
    [
        lambda id: ev.SampleMoved(id=id, src=0, dst=1, attempt=1),
        lambda id: ev.SampleResumed(id=id, instance=7, incarnation=0),
        lambda id: ev.SampleCancelled(id=id, reason=""),
        lambda id: ev.GroupFailed(group_id=id.group_id, reason=""),
    ],
)
def test_a_sample_that_others_ran_too_says_nothing(event):
    fleet = Fleet(2)
    fleet.step(0.001, 0.001)
    fleet.step(None, 9.0, then=lambda id: [event(id)])
    assert not fleet.suspicions


def test_a_sample_of_an_earlier_incarnation_does_not_count_for_this_one():
    fleet = Fleet(2)
    fleet.step(0.001, 9.0, tokens=32)
    fleet.pool[1].incarnation = 1
    fleet.step(0.001, 9.0, tokens=32)
    assert not fleet.suspicions


def test_an_incarnation_that_is_over_is_judged_while_groups_of_it_wait_to_be_trained():
    fleet = Fleet(2)
    fleet.agreement.event(ev.SampleStarted(id=SampleId(99, 0), instance=1, version=0, incarnation=0), ())

    def lost(id):
        fleet.pool[1].incarnation = id.group_id  # after it has sampled group 1
        return ()

    fleet.step(0.001, 9.0, then=lost)
    assert [(i, incarnation) for i, incarnation, _ in fleet.suspicions] == [(1, 0)]
    fleet.step(0.001, 0.001)
    assert len(fleet.suspicions) == 1


def test_a_suspicion_about_an_incarnation_that_is_over_is_reported_and_ends_nothing():
    outbox = queue.SimpleQueue()
    spare = RestartPolicy(new_engine=None, vocab_size=256, hung_s=0.0)
    up = ev.InstanceUp(instance=0, incarnation=3, slots=8, pages=96, page_size=8)
    instance = LocalInstance(up, OracleEngine(SECTION), Weights(), outbox, 0.0, spare, {}, print)
    present = instance.worker
    instance.mark_unhealthy(1, "found out late")
    assert outbox.get_nowait() == ev.InstanceUnhealthy(instance=0, reason="found out late", incarnation=1)
    assert outbox.empty() and instance.worker is present
