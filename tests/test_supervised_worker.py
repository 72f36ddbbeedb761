"""Instances that die, hang or return garbage: their samples go on elsewhere, at the same version, and nothing is
lost."""

import dataclasses
import queue
import random
import threading
import time

import numpy as np
import pytest

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each, run
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.common.sample_gaps import SampleGap
from dora_jax.runtime.common.worker import Exported, Finished, StepDone
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.instances.supervised_worker import LocalInstance, RestartPolicy
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.training.agreement import Agreement
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.types import SampleId
from tests.fakes.coordinator_adversary import kill
from tests.fakes.coordinator_world import (
    SECTION,
    STEPS,
    G,
    P,
    Scorer,
    Task,
    Trainer,
    Weights,
    expected,
    long_tailed,
    trained_by,
)
from tests.fakes.faults import SKEW
from tests.fakes.journal_world import Disk
from tests.fakes.oracle import OracleEngine
from tests.fakes.remote_pair import REQUEST

UP = {"slots": 8, "pages": 96, "page_size": 8}


class Dies(Exception):
    pass


class Engine(OracleEngine):
    """`trouble(tick)` is called in every tick with its results and may raise, hang or change them."""

    def __init__(self, length, trouble=None):
        super().__init__(SECTION, length=length, version_in=int)
        self._trouble = trouble or (lambda result: result)

    def tick(self):
        time.sleep(0.002)
        return self._trouble(super().tick())


def mixed(version, group, index, limit):
    return 60 if (group + index) % 7 == 0 else 2 + (group + index) % 9


class Job:
    def __init__(
        self,
        mode="dora",
        instances=2,
        troubles=(),
        hung_s=0.0,
        again=True,
        max_versions=3,
        inflight=2.0,
        length=mixed,
        steps=STEPS,
    ):
        self.config = OrchestratorConfig(
            mode=mode,
            max_versions={"sync": 1, "one_step": 2}.get(mode, max_versions),
            groups_per_step=P,
            group_size=G,
            inflight=inflight,
            total_steps=steps,
            max_prompt_tokens=8,
            max_new_tokens=64,
        )
        self.notes, self.records, self.downs, self.resumed = [], [], [], {}
        self.outbox, weights, groups = queue.SimpleQueue(), Weights(), MemoryGroupStore()
        troubles = {i: list(trouble) for i, trouble in enumerate(troubles)}
        self.pool = {}
        for i in range(instances):

            def new_engine(i=i):
                return Engine(length, troubles[i].pop(0) if troubles.get(i) else None)

            spare = RestartPolicy(new_engine=new_engine if again else None, vocab_size=256, hung_s=hung_s)
            self.pool[i] = LocalInstance(
                ev.InstanceUp(instance=i, **UP),
                new_engine(),
                weights,
                self.outbox,
                0.005,
                spare,
                self.pool,
                self.notes.append,
            )
        trainer = TrainerWorker(
            Trainer(), lambda groups, base: None, groups, weights, self.config.decisions.max_lag, self.outbox
        )
        self.world = Coordinator(
            instances=list(self.pool.values()),
            trainer=trainer,
            task=Task(),
            scorer=Scorer(mixed=mode == "partial"),
            groups=groups,
            weights=weights,
            outbox=self.outbox,
            group_size=G,
            eval_samples=2,
        )
        self.world.listen(self.records.append)
        self.brain, self.payloads = Orchestrator(self.config), PayloadState()
        self.world.recall(self.payloads)
        self.durable = JournaledWorld(self.world, EventLog(Disk()), self.brain, self.payloads)

    def play(self, watch=lambda event: None):
        def observe(event, commands):
            if isinstance(event, ev.InstanceDown):
                self.downs.append(event)
            for command in commands:
                if isinstance(command, ev.Resume):
                    self.resumed |= {id: len(self.payloads.tokens(id)[0]) for id in command.ids}
            watch(event)

        try:
            self.world.start([ev.InstanceUp(instance=i, **UP) for i in self.pool])
            return run(self.brain, self.durable, [each(observe)])
        finally:
            self.durable.close()
            self.world.close()

    def audit(self):
        """Every group once, every token by the version that is claimed, no sample reported twice."""
        ids = [group.group_id for _, group in trained_by(self.records)]
        assert len(ids) == len(set(ids)) == self.config.total_steps * P
        finished = [r.sample for r in self.records if isinstance(r, Finished)]
        assert len({sample.id for sample in finished}) == len(finished)
        for sample in finished:
            np.testing.assert_array_equal(sample.out_ids, expected(sample))


def after(ticks, act):
    count = iter(range(1, 10**9))

    def trouble(result):
        return act(result) if next(count) == ticks else result

    return trouble


def dies(result):
    raise Dies("out of memory")


@pytest.mark.parametrize("mode", ["sync", "one_step", "dora", "dora_paper", "partial"])
def test_an_instance_that_dies_again_and_again_costs_no_sample(mode):
    job = Job(mode, troubles=[[after(9, dies), after(14, dies), after(11, dies)], [after(25, dies)]])
    assert job.play().ok
    job.audit()
    assert job.downs and all("Dies: out of memory" in down.reason for down in job.downs)
    assert "is lost (Dies" in job.notes[0] and "it is made again" in job.notes[0]
    assert any(job.resumed.values()), "no sample went on from recorded tokens"


def test_what_is_lost_stays_away_where_nothing_can_make_it_again():
    job = Job(troubles=[[after(9, dies)]], again=False)
    assert job.play().ok
    job.audit()
    assert len(job.downs) == 1 and "stays away" in job.notes[0]


def test_without_an_instance_left_the_run_ends_with_the_error():
    job = Job(troubles=[[after(9, dies)], [after(14, dies)]], again=False)
    with pytest.raises(RuntimeError, match=r"rollout \d failed: out of memory"):
        job.play()


def test_incarnations_that_come_to_nothing_are_counted():
    job = Job(troubles=[[after(1, dies) for _ in range(9)] for _ in range(2)])
    with pytest.raises(RuntimeError, match=r"rollout \d failed: out of memory"):
        job.play()
    assert len(job.notes) == 6 and "stays away" in job.notes[-1]


class Counted(LocalInstance):
    """Its incarnations that came to nothing, in a row."""

    @property
    def losses(self):
        return self._losses

    @losses.setter
    def losses(self, number):
        self._losses = number


def test_a_incarnation_that_ended_a_turn_has_come_to_something():
    """Episodes end in their environment: their instance tells of no finished sample."""
    spare = RestartPolicy(new_engine=None, vocab_size=256, hung_s=0.0)
    instance = Counted(
        ev.InstanceUp(instance=0, **UP), OracleEngine(SECTION), Weights(), queue.SimpleQueue(), 0.0, spare, {}, print
    )
    instance.losses = 2
    instance.on_message(instance.worker, Exported(in_flight=REQUEST, instance=0, waits=True))
    assert instance.losses == 0


def test_an_instance_that_hangs_leaves_the_pool_and_is_not_received_when_it_wakes():
    wake, versions_to_fill = threading.Event(), threading.Event()

    def hangs(result):
        assert wake.wait(60)
        versions_to_fill.set()
        return result

    job = Job(troubles=[[after(12, hangs)]], hung_s=1.5)

    def watch(event):
        if isinstance(event, ev.InstanceDown):
            wake.set()
            versions_to_fill.wait(10)
            time.sleep(0.05)  # it has reported what it had

    assert job.play(watch).ok
    job.audit()
    assert len(job.downs) == 1 and "in one call for" in job.downs[0].reason and "stays away" in job.notes[0]


def change_finished(**change):
    def trouble(result):
        if not result.finished:
            return result
        return dataclasses.replace(
            result,
            finished=tuple(dataclasses.replace(s, **{k: f(s) for k, f in change.items()}) for s in result.finished),
        )

    return trouble


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (change_finished(logprobs=lambda s: np.full(len(s.out_ids), np.nan, np.float32)), "log-probs are not finite"),
        (change_finished(logprobs=lambda s: np.full(len(s.out_ids), 3.0, np.float32)), "a log-prob of 3.0"),
        (change_finished(out_ids=lambda s: s.out_ids + 300), "token .* of 256"),
        (change_finished(out_ids=lambda s: s.out_ids - 300), "token -.* of 256"),
        (change_finished(logprobs=lambda s: s.logprobs[1:]), "tokens have"),
        (change_finished(finish=lambda s: "error"), "not finite"),
    ],
)
def test_garbage_is_never_reported_and_its_maker_leaves_the_pool(trouble, sentence):
    job = Job(troubles=[[trouble]])
    assert job.play().ok
    job.audit()
    assert len(job.downs) == 1
    with pytest.raises(AssertionError, match="garbage: .*" + sentence):
        raise AssertionError(job.downs[0].reason)


def test_deaths_at_any_moment_of_moves_and_loads():
    jobs = [play_with_deaths(random.Random(seed)) for seed in range(4)]
    assert sum(len(job.downs) for job in jobs) > 10 and any(job.moved for job in jobs)


def play_with_deaths(draw):
    job = Job(instances=3, max_versions=4, inflight=3.0, length=long_tailed)
    due, job.moved = [draw.randrange(20, 60)], set()

    def watch(event):
        if isinstance(event, ev.SampleMoved):
            job.moved.add(event.id)
        due[0] -= 1
        if due[0] == 0:
            kill(job.pool[draw.randrange(3)])
            due[0] = draw.randrange(20, 90)

    assert job.play(watch).ok
    job.audit()
    return job


class SlowWeights(Weights):
    """Version 1 takes as long as an engine takes for `ticks` ticks; version 2 cannot be had."""

    def __init__(self, ticks):
        super().__init__()
        self.held |= {1, 2}
        self.ticks = ticks

    def get(self, version, shardings):
        if version == 1:
            for _ in range(4):
                assert self.ticks.acquire(timeout=20), "the engine stood still while its weights came"
        if version == 2:
            raise Dies("no such weights")
        return super().get(version, shardings)


def test_samples_go_on_while_weights_come():
    ticks, outbox = threading.Semaphore(0), queue.SimpleQueue()

    def ticked(result):
        ticks.release()
        return result

    engine = Engine(lambda *which: 60, ticked)
    engine.section = dataclasses.replace(SECTION, residents=2)
    spare = RestartPolicy(new_engine=None, vocab_size=256, hung_s=0.0)
    instance = LocalInstance(
        ev.InstanceUp(instance=0, **UP), engine, SlowWeights(ticks), outbox, 0.0, spare, peers := {}, print
    )
    peers[0] = instance
    instance.start()
    instance.send(ev.LoadWeights(instance=0, version=0))
    for index in range(8):
        instance.send(ev.Start(ids=(SampleId(0, index),), instance=0, version=0, attempt=1), Task().prompt_at(0))
    instance.send(ev.LoadWeights(instance=0, version=1))
    received = []
    while not any(isinstance(item, ev.WeightsLoaded) and item.version == 1 for item in received):
        received.append(outbox.get(timeout=20))
    assert engine.versions == (0, 1)
    instance.send(
        ev.LoadWeights(instance=0, version=2, drop=1)
    )  # it ends this incarnation, as on the worker's own thread
    while not isinstance(received[-1], ev.InstanceDown):
        received.append(outbox.get(timeout=20))
    assert "Dies: no such weights" in received[-1].reason
    instance.stop()


class WholeSteps:
    """A trainer that has measured each sample of a step: an oracle says log-probs above -2 where they are not
    skewed."""

    def __init__(self, records):
        self._records = records

    def gaps(self, version):
        (groups,) = (r.groups for r in self._records if isinstance(r, StepDone) and r.version == version)
        for sample in (sample for group in groups for sample in group.samples):
            gap = float(np.mean(sample.logprobs <= -1 - SKEW))
            yield SampleGap(id=sample.id, version=sample.version, gap=gap, tokens=len(sample.out_ids))


@pytest.mark.parametrize("mode", ["sync", "dora", "partial"])
@pytest.mark.parametrize(
    ("logprobs", "sentence"),
    [
        (lambda s: np.full(len(s.out_ids), np.nan, np.float32), "log-probs are not finite"),
        (lambda s: s.logprobs - np.float32(SKEW), "nats a token at the same version"),
    ],
)
def test_an_instance_that_cannot_be_believed_is_named_and_nothing_of_it_is_trained(mode, logprobs, sentence):
    wrong, ticks = change_finished(logprobs=logprobs), iter(range(1, 10**9))
    trouble = [lambda result: wrong(result) if next(ticks) >= 10 else result]
    job = Job(mode, instances=3, troubles=[trouble], steps=4 * STEPS)  # many, that some come after the quarantine
    quarantined, sampled, trained, suspected = [], {}, [], set()
    job.world.listen(lambda record: quarantined.append(record) if isinstance(record, ev.Quarantine) else None)
    agreement = Agreement(0.2, WholeSteps(job.records).gaps, list(job.pool.values()), job.notes.append, [].append)
    job.world.listen(agreement.record)

    def watch(event):
        agreement.event(event, ())
        match event:
            case ev.SampleStarted(id=id, instance=i):
                sampled[id] = {i}
            case ev.SampleResumed(id=id, instance=i) | ev.SampleMoved(id=id, dst=i):
                sampled[id].add(i)
            case ev.InstanceUnhealthy(instance=0):
                trained.extend(job.brain.state.ledger.batch)
                trained.extend(g for groups in job.brain.state.trained_by.values() for g in groups)
                suspected.update(id for id, ran in sampled.items() if 0 in ran)

    assert job.play(watch).ok
    job.audit()
    (command,) = quarantined
    assert command.instance == 0 and sentence in command.reason
    assert set(command.group_ids) == {id.group_id for id in suspected} & set(trained)
    done = {r.sample.id: r for r in job.records if isinstance(r, Finished)}
    later = {group.group_id for _, group in trained_by(job.records)} - set(trained)
    assert later and suspected
    for id in suspected:
        if id.group_id in later:  # it has begun again: on a healthy instance, or on the next incarnation of this one
            assert (done[id].instance, done[id].incarnation) != (0, 0)
    assert "begin again elsewhere" in job.notes[0]
