"""timeline.jsonl and instances.json: what they say of events, and that they stay small."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from dora_jax import top
from dora_jax.base import chrome_trace
from dora_jax.orchestrate import events as ev
from dora_jax.report import findings
from dora_jax.report import timeline as picture
from dora_jax.report.load import load
from dora_jax.report.page import page
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.observe.timeline import ROWS, Timeline, length_bucket
from dora_jax.runtime.training.agreement import Agreement
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes.trace_rules import faults


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def sample_of(id, tokens=4, logprob=-0.5):
    ids = np.arange(tokens, dtype=np.int32)
    return Sample(id=id, prompt_ids=ids, out_ids=ids, logprobs=np.full(tokens, logprob, np.float32),
                  spans=(Span(version=0, start=0, stop=tokens),), finish="stop", mask=np.ones(tokens, bool))  # fmt: skip


def up(instance):
    return ev.InstanceUp(instance=instance, slots=4, pages=8, page_size=16)


def test_what_a_run_did_is_what_the_picture_shows(tmp_path):
    clock = Clock()
    log = Timeline(tmp_path, print, clock)
    id = SampleId(0, 0)

    def at(seconds, event, *commands):
        clock.now = 1000.0 + seconds
        log.event(event, commands)

    at(0, up(0), ev.LoadWeights(instance=0, version=0))
    at(0, up(1))
    at(1, ev.WeightsLoaded(instance=0, version=0))
    at(2, ev.SampleStarted(id=id, instance=0, version=0))
    at(3, ev.TimePassed(now_s=3.0), ev.Train(group_ids=(1,), base_version=0))
    at(4, ev.SampleMoved(id=id, src=0, dst=1, attempt=1))
    at(5, ev.StepPublished(version=1))
    log.record(Finished(sample=sample_of(id), instance=1))
    at(6, ev.SampleDone(id=id, instance=1, tokens=4, finish="stop"))
    log.close()

    data = load(tmp_path, "a")
    bars = picture.bars(data.timeline)
    first, second = (lane["bars"] for lane in bars["instances"])
    assert first == [[0, 1000, -1, []], [1000, 2000, 0, []], [2000, 4000, 4, [[0, 1]]], [4000, 6000, 0, []]]
    assert second == [[0, 4000, 0, []], [4000, 6000, 4, [[0, 1]]]]
    assert bars["trainer"] == [[0, 3000, 0, []], [3000, 5000, 16, [[1, 1]]], [5000, 6000, 0, []]]
    assert bars["moves"] == [[4000, 0, 1, 1]]
    assert data.instances[1] == {"samples": 1, "tokens": 4, "zero_tokens": 1, "nonfinite": 0, "logprob_sum": -2.0}


def test_the_same_is_a_chrome_trace_which_a_resumed_run_goes_on_with(tmp_path):
    clock = Clock()

    def process(kill, *facts):
        log = Timeline(tmp_path, print, clock)
        for event, *commands in facts:
            clock.now += 1
            log.event(event, commands)
        if not kill:
            log.close()
        return log

    id, train = SampleId(0, 0), ev.Train(group_ids=(1,), base_version=0)
    killed = process(True, [up(0), ev.LoadWeights(instance=0, version=0)], [ev.WeightsLoaded(instance=0, version=0)],
                     [ev.SampleStarted(id=id, instance=0, version=0)], [ev.TimePassed(now_s=3.0), train])  # fmt: skip
    with (tmp_path / "trace.json").open("ab") as file:
        file.write(b',\n{"ph":"X","na')  # as a power cut leaves it
    process(False, [up(0)], [up(1)], [ev.SampleStarted(id=id, instance=0, version=1)],
            [ev.SampleMoved(id=id, src=0, dst=1, attempt=1)], [ev.SampleDone(id=id, instance=1, tokens=4, finish="stop")])  # fmt: skip
    resumed = process(True)
    resumed.write({"spent": {"trainer": {"update": 2.0, "pack": 0.5}}, "step": 3, "seconds": 2.5})
    resumed.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    slices = [(e["pid"], e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert slices == [(2, 2, "load", 1001.0, 1.0), (2, 2, "v1", 1007.0, 1.0), (2, 3, "v1", 1008.0, 1.0)]
    arrows = [(e["ph"], e["name"], e["tid"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", "1 moved", 2), ("f", "1 moved", 3)]
    counted = [(e["name"], e["ts"] / 1e6, e["args"]) for e in events if e["ph"] == "C"]
    assert counted == [("seconds of trainer", 1009.0, {"update": 2.0, "pack": 0.5})]
    assert not faults(events) and killed is not None


def test_a_viewer_loses_no_slice_however_short_it_is():
    """A double holds wall-clock times to a quarter of a microsecond."""
    events = []
    rows = chrome_trace.TraceRows("live", events.append)
    for i in range(1000):
        rows.turn(chrome_trace.TRAINER, 0, f"v{i}", 1795368443.503 + i * 1.7e-6)
        rows.turn(chrome_trace.ROLLOUT, i % 3, f"v{i}", 1795368443.503 + i * 1.7e-6)
    rows.end(1795368444.0)
    assert not faults(events) and sum(event["ph"] == "X" for event in events) >= 1990


def test_the_rules_find_what_a_viewer_loses():
    slice = {"ph": "X", "pid": 1, "tid": 1, "name": "v1", "ts": 10, "dur": 5}
    arrow = {"ph": "s", "pid": 1, "tid": 1, "name": "moved", "cat": "moved", "id": 1, "ts": 12}
    names = [{"ph": "M", "pid": pid, "tid": tid, "name": name} for pid, tid in ((1, 0), (1, 1), (2, 0))
             for name in ("process_name", "thread_name")]  # fmt: skip
    lost = {
        "no whole number": [{**slice, "ts": 10.5}],
        "thread 0 is one": [{**slice, "tid": 0}],
        "one of the processes [1, 2]": [slice, {**slice, "pid": 2, "ts": 20}],
        "has no name": [{**slice, "tid": 7}],
        "begins 1 microseconds before": [slice, {**slice, "ts": 14}],
        "is in no slice": [slice, arrow, {**arrow, "ph": "f", "ts": 40}],
        "arrow 1 is s at [12]": [slice, arrow],
        "arrow 1 is s-f at [12, 11]": [slice, arrow, {**arrow, "ph": "f", "ts": 11}],
    }
    for sentence, events in lost.items():
        (found,) = faults([*names, *events])
        assert sentence in found
    assert not faults([*names, slice, arrow, {**arrow, "ph": "f", "ts": 13}])


def test_a_sample_that_comes_where_nothing_is_any_more_runs_nowhere(tmp_path):
    log, id = Timeline(tmp_path, print), SampleId(0, 0)
    for event in (up(0), up(1), ev.SampleStarted(id=id, instance=0, version=0),
                  ev.InstanceDown(instance=1, reason="killed"), ev.SampleMoved(id=id, src=0, dst=1, attempt=1)):  # fmt: skip
        log.event(event, ())
    log.close()
    busy = [row["busy"] for row in load(tmp_path, "a").timeline if "busy" in row]
    assert busy and all("1" not in row for row in busy) and busy[-1]["0"] == {}


def test_the_picture_begins_when_the_first_instance_is_up():
    rows = [{"t": 100.0, "start": True}, {"t": 290.0, "up": 0, "slots": 4}, {"t": 292.0, "busy": {"0": {"0": 2}}},
            {"t": 293.0, "busy": {"0": {}}}]  # fmt: skip
    drawn = picture.bars(rows)
    assert drawn["end"] == 3000 and drawn["instances"][0]["bars"][0][:2] == [0, 2000] and not drawn["restarts"]


def test_a_quarantine_is_reported_to_everyone_who_looks(tmp_path):
    log, notes = Timeline(tmp_path, print), []
    for i in (0, 1):
        log.event(up(i), ())
    command = ev.Quarantine(instance=1, reason="NaN", group_ids=(5, 9), steps=(2, 2))
    Agreement(0.0, None, (), notes.append, log.write).event(ev.InstanceUnhealthy(instance=1, reason="NaN"), (command,))
    assert len(notes) == 1
    log.close()
    data = load(tmp_path, "a")
    ((sentence,),) = findings.quarantines(data).values()
    assert sentence.startswith("Rollout 1 is in quarantine (NaN). Nothing") and sentence.endswith(
        "in step 2: groups 5, 9."
    )
    html = page([data])
    assert sentence in html and "<td>quarantined 1 x</td>" in html
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(top.picture(data, 20.0))
    assert sentence in console.export_text()


def test_log_probs_that_are_no_numbers_are_counted(tmp_path):
    log = Timeline(tmp_path, print)
    log.record(Finished(sample=sample_of(SampleId(0, 0), logprob=float("nan")), instance=3))
    log.record(Finished(sample=sample_of(SampleId(-1, 0)), instance=3))  # held out: no part of the statistics
    log.close()
    assert load(tmp_path, "a").instances[3]["nonfinite"] == 4
    assert load(tmp_path, "a").lengths["generated"] == {length_bucket(4): 1}


def test_a_run_that_resumes_writes_on(tmp_path):
    for _ in range(2):
        log = Timeline(tmp_path, print)
        group = ScoredGroup(group_id=0, version=0, samples=(sample_of(SampleId(0, 0)),), rewards=np.ones(1), parts={})
        log.record(Finished(sample=group.samples[0], instance=0))
        log.record(StepDone(version=1, groups=(group,), metrics={}, wait_s=0.0, step_s=1.0))
        log.close()
    data = load(tmp_path, "a")
    assert len(data.timeline) == 2 and data.instances[0]["samples"] == 2
    assert data.lengths["generated"] == data.lengths["trained"] == {length_bucket(4): 2}


def test_loads_and_steps_keep_within_the_budget_and_the_rest_is_whole(tmp_path):
    clock, notes = Clock(), []
    log = Timeline(tmp_path, notes.append, clock, log_bytes=40_000)
    log.event(up(0), ())
    for version in range(1, 600):
        clock.now += 1.0
        log.event(ev.TimePassed(now_s=clock.now), [ev.Train(group_ids=(1,), base_version=version)])
        clock.now += 1.0
        log.event(ev.StepPublished(version=version), [ev.LoadWeights(instance=0, version=version)])
        log.event(ev.WeightsLoaded(instance=0, version=version), ())
    log.close()
    for name, part in (("timeline", "jsonl"), ("trace", "json")):
        sizes = [(tmp_path / file).stat().st_size for file in (f"{name}.1.{part}", f"{name}.{part}")]
        assert 15_000 < sizes[0] < 21_000 and sizes[1] < 21_000
    data = load(tmp_path, "a")
    published = [row["published"] for row in data.timeline if "published" in row]
    halves = [(tmp_path / name).read_text().count('"published"') for name in ("timeline.1.jsonl", "timeline.jsonl")]
    assert published == list(range(600 - sum(halves), 600)) and all(halves) and not notes
    assert "timeline.jsonl has reached its budget" in page([data])
    traces = [json.loads((tmp_path / name).read_text()) for name in ("trace.1.json", "trace.json")]
    assert not faults(traces[0]) and not faults(traces[1]) and traces[1][-1]["name"] == "v600"


@pytest.mark.parametrize("instances", [4, 64])
def test_the_file_stays_small_however_long_the_run(tmp_path, instances):
    clock = Clock()
    log = Timeline(tmp_path, print, clock)
    for i in range(instances):
        log.event(up(i), ())
    sizes = []
    for n in range(40_000):
        clock.now += 0.5
        id = SampleId(n, 0)
        log.event(ev.SampleStarted(id=id, instance=n % instances, version=0), ())
        log.event(ev.SampleDone(id=id, instance=n % instances, tokens=1, finish="stop"), ())
        if n in (9_999, 19_999, 39_999):
            sizes.append((tmp_path / "timeline.jsonl").read_bytes().count(b"\n"))
    log.close()
    assert sizes[2] - sizes[1] <= ROWS and sizes[1] - sizes[0] <= ROWS, "no more rows for each doubling"
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert len(rows) < 4 * ROWS + instances
