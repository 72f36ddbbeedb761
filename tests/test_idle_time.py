"""Reported waiting time grows during a wait, and never exceeds the time that it is a share of."""

import threading
import types

import numpy as np
import pytest

from dora_jax.runtime.cluster import connection
from dora_jax.runtime.common import idle_time
from dora_jax.runtime.common.idle_time import IdleTimer
from dora_jax.runtime.common.worker import StepDone
from dora_jax.runtime.observe import metrics_log
from dora_jax.runtime.observe.metrics_log import RunLog
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes.cluster import eventually


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(idle_time, "time", clock)
    monkeypatch.setattr(metrics_log, "time", clock)
    return clock


def test_a_wait_that_goes_on_counts_up_to_now(clock):
    mine = IdleTimer()
    with mine:
        clock.now_s += 2
        assert mine.total_s == mine.present_s == 2
    clock.now_s += 5
    assert mine.total_s == 2 and mine.present_s is None
    with mine:
        clock.now_s += 1
        assert (mine.total_s, mine.present_s) == (3, 1)


def test_a_process_that_waits_says_so_with_every_beat(monkeypatch):
    monkeypatch.setattr(connection, "BEAT_S", 0.005)
    beats = []

    def send(beat):
        beats.append(beat)
        if len(beats) == 4:
            threading.Event().wait()  # it has reported enough

    pulse = connection.HeartbeatSender(types.SimpleNamespace(send=send))
    with pulse.waits:
        pulse.start()
        eventually(lambda: len(beats) == 4)
    waited = [beat.waited_s for beat in beats]
    assert sorted(set(waited)) == waited


def test_no_step_has_more_waiting_than_time(clock, tmp_path):
    """The wait of another process comes in leaps, once a second; a step may be shorter."""
    sample = Sample(
        id=SampleId(0, 0),
        prompt_ids=np.zeros(1, np.int32),
        out_ids=np.zeros(4, np.int32),
        logprobs=np.zeros(4, np.float32),
        mask=np.ones(4, bool),
        spans=(Span(version=0, start=0, stop=4),),
        finish="stop",
    )
    group = ScoredGroup(group_id=0, version=0, samples=(sample,), rewards=np.zeros(1, np.float32), parts={})
    instance = types.SimpleNamespace(wait_s=0.0)
    writer = types.SimpleNamespace(note=print, phase=lambda *_: None, write=lambda *_, **__: None)
    writer.evaluations, writer.resumed_at = {}, None
    brain = types.SimpleNamespace(
        summary=lambda: {"versions": {}, "stride": 1, "moves": 0, "reloads": 0, "metrics": {}},
        waiting=dict,
        state=types.SimpleNamespace(config=types.SimpleNamespace(task_cycle=())),
    )
    log = RunLog(
        workdir=tmp_path,
        writer=writer,
        orchestrator=brain,
        instances=[instance],
        decode=lambda ids: "",
        prompt_of=lambda id: types.SimpleNamespace(text="", answer="", task=""),
        solved=None,
        steps=9,
        max_failed_share=1.0,
    )
    shares = []
    for step, beat_s in enumerate([1.0, 1.0, 1.5, 1.5]):  # reported of the process's wait in all
        clock.now_s += 0.5
        instance.wait_s = beat_s
        log.record(StepDone(version=step + 1, groups=(group,), metrics={}, wait_s=0.0, step_s=0.1))
        shares.append(log.metrics["rollout/idle_share"])
    log.close()
    assert shares == [1.0, 1.0, 1.0, 0.0]
