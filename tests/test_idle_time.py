"""Reported waiting time grows during a wait, and never exceeds the time that it is a share of."""

import threading
import types

import numpy as np
import pytest

from dora_jax.base import lanes
from dora_jax.base.lanes import WAITING
from dora_jax.runtime.cluster import connection
from dora_jax.runtime.common import idle_time
from dora_jax.runtime.common.idle_time import StepSeconds
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
    monkeypatch.setattr(lanes, "time", clock)
    monkeypatch.setattr(metrics_log, "time", clock)
    return clock


def test_a_lane_does_one_thing_at_every_moment(clock):
    mine = lanes.Lane()
    clock.now_s += 7  # before its first turn it does nothing that counts
    mine.turn(WAITING)
    clock.now_s += 2
    assert mine.read() == {WAITING: 2} and mine.present_s(WAITING) == 2
    mine.turn("decode")
    clock.now_s += 5
    mine.turn("reports", did="prefill")
    assert mine.read() == {WAITING: 2, "prefill": 5, "reports": 0} and mine.present_s(WAITING) is None
    mine.turn(WAITING)
    clock.now_s += 1
    assert (mine.read()[WAITING], mine.present_s(WAITING)) == (3, 1)


def test_a_part_is_of_the_lane_of_its_thread_alone(clock):
    mine = lanes.Lane("commands")

    def work():
        mine.bind()
        with lanes.doing("pack"):
            clock.now_s += 1
            with lanes.doing("score"):
                clock.now_s += 2
        clock.now_s += 4

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with lanes.doing("pack"):  # this thread has no lane
        clock.now_s += 8
    assert mine.read() == {"pack": 1, "score": 2, "commands": 12}


def test_the_seconds_of_a_step_add_up_to_it_with_each_wait_by_its_causes(clock):
    lane, beats = lanes.Lane("decode"), {"decode": 1.0}
    seconds = StepSeconds({"0": lane.read, "1": lambda: beats})
    lane.turn(WAITING)
    clock.now_s += 3
    lane.turn("decode")
    clock.now_s += 1
    beats.update(decode=2.0, waiting=9.0)  # of another process, and of more time than the step's
    found = seconds.take({"rollouts": {"weights": 2.0, "stragglers": 1.0}})
    assert found["0"] == {"decode": 1, "waiting for weights": 2, "waiting for stragglers": 1}
    assert sum(found["1"].values()) == pytest.approx(4) and found["1"]["decode"] == pytest.approx(0.4)
    clock.now_s += 100
    found = seconds.take({})
    assert found == {
        "0": {"decode": 100},
        "1": {"decode": pytest.approx(0.6), "waiting for commands": pytest.approx(5.4)},
    }


def test_a_process_that_waits_says_so_with_every_beat(monkeypatch):
    monkeypatch.setattr(connection, "BEAT_S", 0.005)
    beats = []

    def send(beat):
        beats.append(beat)
        if len(beats) == 4:
            threading.Event().wait()  # it has reported enough

    pulse = connection.HeartbeatSender(types.SimpleNamespace(send=send))
    pulse.lane.turn(WAITING)
    pulse.start()
    eventually(lambda: len(beats) == 4)
    waited = [beat.spent_s[WAITING] for beat in beats]
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
    instance, rows = {WAITING: 0.0}, []
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
        seconds=StepSeconds({"0": lambda: instance}),
        in_timeline=rows.append,
        decode=lambda ids: "",
        prompt_of=lambda id: types.SimpleNamespace(text="", answer="", task=""),
        solved=None,
        steps=9,
        max_failed_share=1.0,
    )
    shares = []
    for step, beat_s in enumerate([1.0, 1.0, 1.5, 1.5]):  # reported of the process's wait in all
        clock.now_s += 0.5
        instance[WAITING] = beat_s
        log.record(StepDone(version=step + 1, groups=(group,), metrics={}, wait_s=0.0, step_s=0.1))
        shares.append(log.metrics["rollout/idle_share"])
    log.close()
    assert shares == [1.0, 1.0, 1.0, 0.0]
    assert [row["spent"] for row in rows] == [{"0": {"waiting for commands": 0.5}}] * 3 + [{"0": {}}]
    assert {(row["step"], row["seconds"]) for row in rows} == {(step, 0.5) for step in (1, 2, 3, 4)}
