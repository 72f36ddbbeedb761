"""The one-process world with real threads and an arithmetic engine: every token proves the version that made it."""

import dataclasses
import queue
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import each
from dora_jax.rollout.migrate import observed
from dora_jax.runtime import coordinator
from dora_jax.runtime.common.worker import Exported, Finished, ForgetSample, InstanceReady
from dora_jax.runtime.instances import rollout_worker
from dora_jax.runtime.instances.instance_proxy import InstanceProxy
from dora_jax.runtime.instances.rollout_worker import EngineWorker, progress_period_s, report_period_s
from dora_jax.runtime.journal.records import Partial
from dora_jax.runtime.sample_registry import KeptKV
from dora_jax.types import RENEWAL, SampleId, ScoredGroup, is_eval
from tests.fakes.coordinator_world import (
    SECTION,
    STEPS,
    P,
    Task,
    Weights,
    expected,
    long_tailed,
    make,
    play,
    trained_by,
)
from tests.fakes.oracle import OracleEngine
from tests.fakes.remote_pair import REQUEST

LOAD = ev.LoadWeights(instance=0, version=0)


def start(*ids):
    return ev.Start(ids=ids, instance=0, version=0, attempt=1)


@pytest.mark.parametrize(
    ("mode", "max_versions", "bound"),
    [
        ("sync", 1, 0),
        ("one_step", 2, 1),
        ("dora_paper", 3, 2),
        ("dora", 2, 1),
        ("dora", 3, 2),
        ("evict", 2, 1),
        ("partial", 2, None),
        ("rollpacker", 2, 0),
        ("staleflow", 2, 1),
    ],
)
def test_every_group_is_trained_once_by_the_versions_it_claims(mode, max_versions, bound):
    halt, records = play(*make(mode, max_versions=max_versions)[:3])
    trained = trained_by(records)
    assert halt.ok and len(trained) == STEPS * P
    assert len({group.group_id for _, group in trained}) == STEPS * P
    for base, group in trained:
        assert base >= group.version
        assert bound is None or base - group.version <= bound
        for sample in group.samples:
            np.testing.assert_array_equal(sample.out_ids, expected(sample))
            assert mode in ("partial", "staleflow") or len(sample.spans) == 1


def test_in_mode_partial_a_long_sample_goes_on_under_the_new_weights():
    halt, records = play(*make("partial", length=long_tailed, inflight=2.0)[:3])
    samples = [sample for _, group in trained_by(records) for sample in group.samples]
    mixed = [sample for sample in samples if len(sample.spans) > 1]
    assert halt.ok and mixed
    for sample in mixed:
        assert [s.start for s in sample.spans] == [0, *(s.stop for s in sample.spans[:-1])]
        assert sample.spans[-1].stop == len(sample.out_ids) == len(sample.logprobs)


def test_in_mode_evict_a_group_that_grew_too_old_is_made_again():
    orchestrator, world, ups, _ = make("evict", max_versions=1, length=long_tailed, inflight=3.0)
    cancelled = set()

    def watch(event, commands):
        if isinstance(event, ev.SampleCancelled):
            cancelled.add(event.id.group_id)

    halt, records = play(orchestrator, world, ups, [each(watch)])
    trained = {group.group_id: group for _, group in trained_by(records)}
    again = [group for group in trained.values() if group.group_id >= RENEWAL]
    assert halt.ok and again and not cancelled & set(trained)
    for group in again:
        assert {sample.version for sample in group.samples} == {group.version}


def test_moved_samples_go_on_to_finish():
    moved, finished = set(), set()

    def watch(event, commands):
        if isinstance(event, ev.SampleMoved):
            moved.add(event.id)
        if isinstance(event, ev.SampleDone):
            finished.add(event.id)

    for _ in range(5):  # threads decide which is behind: a run in which nobody was says nothing
        orchestrator, world, ups, _ = make("dora", instances=3, inflight=3.0, length=long_tailed)
        halt, _ = play(orchestrator, world, ups, [each(watch)])
        assert halt.ok
        if moved & finished:
            return
        moved.clear(), finished.clear()
    raise AssertionError("five runs, and no sample moved and went on to its end")


def test_a_prompt_over_the_limit_is_skipped_and_its_credit_returns():
    orchestrator, world, ups, _ = make("dora", too_long=(0, 5))
    halt, records = play(orchestrator, world, ups)
    trained = {group.group_id for _, group in trained_by(records)}
    assert halt.ok and len(trained) == STEPS * P and not trained & {0, 5}


def test_evaluations_are_pinned_to_their_version_and_never_trained():
    orchestrator, world, ups, weights = make("dora", eval_every=3)
    halt, records = play(orchestrator, world, ups)
    evaluated = sorted(r.version for r in records if isinstance(r, ScoredGroup) and is_eval(r.group_id))
    assert halt.ok and evaluated == [v for v in (0, 3, 6) for _ in range(3)]
    assert len(weights.held) <= 3


def test_an_error_in_a_worker_ends_the_run_with_its_role():
    orchestrator, world, ups, weights = make("sync")
    weights.held.clear()
    with pytest.raises(RuntimeError, match=r"rollout \d failed: version 0 was dropped"):
        play(orchestrator, world, ups)


def test_an_instance_says_how_far_all_its_samples_are_in_one_report():
    outbox = queue.SimpleQueue()
    worker = EngineWorker(
        0, OracleEngine(SECTION, length=lambda v, g, i, limit: 6 + 6 * i), Weights(), outbox, report_s=0.0
    )
    worker.execute(LOAD)
    for i in range(2):
        worker.execute(start(SampleId(0, i)), Task().prompt_at(0))
    while worker.busy:
        worker.work()
    reported = [outbox.get() for _ in range(outbox.qsize())]
    reports = [item for item in reported if isinstance(item, ev.InstanceReported)]
    ended = reported.index(next(item for item in reported if isinstance(item, Finished)))
    assert any(report.indices == (0, 1) for report in reports)
    assert all(0 not in report.indices for report in reported[ended:] if isinstance(report, ev.InstanceReported))
    assert report_period_s(2) == 0.1 and report_period_s(10_000) == 1.0


def test_a_turn_s_end_is_reported_behind_its_start_and_its_tokens():
    """Move and cancel of an episode that waits are answered; it goes on from where it was."""
    outbox, id, other = queue.SimpleQueue(), SampleId(0, 0), SampleId(0, 1)
    engine = OracleEngine(SECTION, length=lambda v, g, i, limit: limit)
    worker = EngineWorker(0, engine, Weights(), outbox, partial_s=60.0)
    worker.execute(LOAD)
    prompt = dataclasses.replace(Task().prompt_at(0), turn_tokens=5)
    worker.execute(start(id, other), prompt)

    def reported():
        while worker.busy:
            worker.work()
        items = [outbox.get() for _ in range(outbox.qsize())]
        return [item for item in items if not isinstance(item, ev.InstanceReported | ev.WeightsLoaded)]

    first = reported()
    assert [type(item) for item in first] == [ev.SampleStarted] * 2 + [Partial, Exported] * 2 and first[
        2
    ].out_ids.shape == (5,)
    in_flight = first[3].in_flight
    worker.execute(ev.Move(ids=(id,), src=0, dst=1, attempt=1), dst=mock.Mock())
    worker.execute(ev.Park(ids=(id,), instance=0))
    worker.execute(ev.Cancel(ids=(other,), instance=0, reason="not needed"))
    assert [type(item) for item in reported()] == [ev.MoveFailed, ev.SampleCancelled]
    worker.execute(ev.Resume(ids=(id,), instance=0, version=0, attempt=2), observed(in_flight, np.array([9, 9])))
    resumed, partial, waiting = reported()
    assert (first[0].attempt, first[3].attempt, resumed.attempt, waiting.attempt) == (1, 1, 2, 2)
    assert isinstance(resumed, ev.SampleResumed) and (partial.start, len(partial.out_ids)) == (7, 5)
    assert (
        len(waiting.in_flight.out_ids) == 12
        and waiting.in_flight.mask.tolist() == [True] * 5 + [False] * 2 + [True] * 5
    )


def test_siblings_that_start_together_are_one_message_with_one_prompt():
    worker = mock.Mock(instance=0)
    world = coordinator.Coordinator(
        instances=[worker],
        trainer=None,
        task=Task(too_long=(2,)),
        scorer=None,
        groups=mock.Mock(),
        weights=Weights(),
        outbox=(outbox := queue.SimpleQueue()),
        group_size=2,
        eval_samples=1,
    )
    world.execute(start(SampleId(0, 0), SampleId(0, 1), SampleId(2, 0), SampleId(2, 1), SampleId(3, 0)))
    sent = [(command.ids, prompt.group_id) for (command, prompt), _ in worker.send.call_args_list]
    assert sent == [((SampleId(0, 0), SampleId(0, 1)), 0), ((SampleId(3, 0),), 3)]
    failed = [outbox.get() for _ in range(outbox.qsize())]
    assert [event.group_id for event in failed] == [2]


class Keeper:
    """An instance that keeps KV: what it was asked."""

    def __init__(self, instance):
        self.instance, self.asked = instance, []

    def send(self, message, payload=None, dst=None):
        id = message.id if payload is None else payload.id
        self.asked.append((type(message), id) if dst is None else ("forward", id))
        if dst is not None:
            dst.send(message, payload)


def test_an_episode_goes_on_with_the_kv_that_an_instance_keeps():
    keepers = [Keeper(0), Keeper(1)]
    kept = KeptKV(dict(enumerate(keepers)))
    held = [dataclasses.replace(REQUEST, id=SampleId(i % 2, i)) for i in range(6)]
    assert all(kept.keep(each, 0) for each in held)
    here, there = (ev.Resume(ids=(), instance=i, version=0, attempt=1) for i in (0, 1))
    kept.resume(here, held[0])
    kept.resume(there, held[1])
    assert keepers[0].asked == [(ev.Resume, (0, 0)), ("forward", (1, 1))]
    assert keepers[1].asked == [(ev.Resume, (1, 1))]
    keepers[0].asked.clear()
    kept.forget([held[0].id, held[2].id])
    kept.forget_group(1)
    assert keepers[0].asked == [(ForgetSample, (0, 2)), (ForgetSample, (1, 3)), (ForgetSample, (1, 5))]
    kept.resume(there, held[2])
    assert keepers[1].asked[-1] == (ev.Resume, (0, 2)), "nothing is kept of it any more"


class OneWorker(InstanceProxy):
    """Its incarnation begins and ends where the test says so."""

    def begin(self, worker):
        self._worker = worker

    def lose(self, worker):
        with self._lock:
            self.incarnation_down(worker, 0, "gone")


@pytest.mark.parametrize("lost", [False, True])
def test_an_episode_that_is_forwarded_goes_on_though_its_keeper_is_lost(lost):
    """With the KV where the incarnation that keeps it answers, else from its tokens; once either way."""
    source, there, outbox, later, resumed = Keeper(0), Keeper(1), queue.SimpleQueue(), [], []
    source.incarnation, source.spent = 0, dict
    source.send = lambda message, payload, dst: later.append(
        lambda: dst.send(message, dataclasses.replace(payload, kv_len=7))
    )
    there.send = lambda message, payload: resumed.append((payload.kv_len, message.attempt))
    up = ev.InstanceUp(instance=0, slots=1, pages=1, page_size=4)
    proxy, other = OneWorker(up, outbox), OneWorker(dataclasses.replace(up, instance=1), outbox)
    resume = ev.Resume(ids=(REQUEST.id,), instance=1, version=0, attempt=5)
    proxy.begin(source)
    other.begin(there)
    proxy.send(resume, REQUEST, other)
    if lost:
        proxy.lose(source)
    later[0]()
    assert resumed == [(0 if lost else 7, 5)]
    proxy.begin(None)
    proxy.send(resume, REQUEST, other)
    assert len(resumed) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_move_whose_sample_ended_its_turn_takes_nothing_from_the_resume_behind_it(lost):
    """The source fails the move after the episode was asked to go on elsewhere; both are answered, also if the source
    is lost in between."""
    source, there, outbox, resumed, asked = Keeper(0), Keeper(1), queue.SimpleQueue(), [], []
    source.incarnation, source.spent = 0, dict
    source.send = lambda message, payload, dst: asked.append((message, payload, dst))
    there.send = lambda message, payload: resumed.append(message.attempt)
    up = ev.InstanceUp(instance=0, slots=1, pages=1, page_size=4)
    proxy, other = OneWorker(up, outbox), OneWorker(dataclasses.replace(up, instance=1), outbox)
    proxy.begin(source)
    other.begin(there)
    proxy.send(move := ev.Move(ids=(REQUEST.id,), src=0, dst=1, attempt=3), None, other)
    proxy.send(ev.Resume(ids=(REQUEST.id,), instance=1, version=0, attempt=9), REQUEST, other)
    failed = ev.MoveFailed(id=REQUEST.id, src=move.src, dst=move.dst, attempt=move.attempt, reason="its turn has ended")
    if lost:
        proxy.lose(source)
    proxy.on_message(source, failed)
    message, payload, dst = asked[1]
    dst.send(message, payload)
    assert resumed == [9]
    failures = [item for item in (outbox.get() for _ in range(outbox.qsize())) if isinstance(item, ev.MoveFailed)]
    assert [each.attempt for each in failures] == [3]


def test_an_instance_of_a_large_fleet_lists_its_samples_in_some_of_its_reports():
    now, outbox = [100.0], queue.SimpleQueue()
    engine = OracleEngine(SECTION, length=lambda *_: 60)
    worker = EngineWorker(0, engine, Weights(), outbox, report_s=1.0, progress_s=progress_period_s(3000, 100))
    worker.execute(LOAD)
    worker.execute(start(SampleId(0, 0)), Task().prompt_at(0))
    with mock.patch.object(rollout_worker.time, "monotonic", lambda: now[0]):
        for _ in range(7):
            worker.work()
            now[0] += 1.0
    reported = [outbox.get() for _ in range(outbox.qsize())]
    reports = [item for item in reported if isinstance(item, ev.InstanceReported)]
    assert [bool(report.tokens) for report in reports] == [True, False, False, True, False, False, True]
    assert [report.sampled for report in reports[1:4]] == [0, 0, 3 * SECTION.decode_steps]  # since the report before
    assert progress_period_s(100, 100) <= 0.1 and progress_period_s(10_000, 100) == 10.0


def test_the_facts_of_a_large_fleet_come_together(monkeypatch):
    assert coordinator.gather_s(10_000) == 0.02 and coordinator.gather_s(100) == 0.0
    slept, batches = [], []
    monkeypatch.setattr(coordinator, "SMALL_FLEET", 1)
    monkeypatch.setattr(coordinator, "GATHERED_S", 1e-3)
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    halt, _ = play(*make("dora", instances=2)[:3], [lambda events, commands: batches.append(len(events))])
    assert halt.ok and set(slept) == {2e-3} and max(batches) > 1


def test_an_end_that_is_reported_again_does_not_hide_the_next_incarnation():
    outboxes = []

    def listened(task, outbox, orchestrator):
        outboxes.append(outbox)
        task.record = lambda record: None
        return task

    _, world, (up,), _ = make(instances=1, requests=listened)
    ready = InstanceReady(event=dataclasses.replace(up, incarnation=2), admit=lambda: ())
    for item in (ready, ev.InstanceDown(instance=0, reason="reported again", incarnation=1)):
        outboxes[0].put(item)
    list(world.events())
    assert ready.event in list(world.events())
