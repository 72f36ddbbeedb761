"""What the pages of files and of environment variables say is what the code writes and reads."""

import dataclasses
import json
import re
import types
from pathlib import Path

import numpy as np

from dora_jax.base import state_files
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.sample_log import SampleLog, TokenView
from dora_jax.runtime.observe.timeline import STATISTICS, Timeline
from dora_jax.runtime.training.agreement import Agreement
from dora_jax.tasks.rows import BadRow
from dora_jax.types import Sample, SampleId, ScoredGroup, Span

ROOT = Path(__file__).parents[1]


def section(heading):
    """The names between backticks below a heading of the page of files."""
    text = (ROOT / "dora_jax/runtime/files.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([^`]+)`", text))


def keys(tree):
    """Every key of objects within objects, down to what stands under a name of the user's."""
    for key, value in tree.items():
        yield key
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and key != "terms":
                yield from keys(each)


def test_every_field_of_a_row_of_samples_is_on_the_page_and_no_other(tmp_path):
    sample = Sample(
        id=SampleId(1, 0),
        prompt_ids=np.array([1], np.int32),
        out_ids=np.array([2], np.int32),
        logprobs=np.array([-0.5], np.float32),
        mask=np.array([True]),
        spans=(Span(version=0, start=0, stop=1),),
        finish="stop",
    )
    group = ScoredGroup(
        group_id=1, version=0, samples=(sample,), rewards=np.ones(1, np.float32), parts={"exact": np.ones(1)}
    )
    view = TokenView(id=sample.id, advantages=np.zeros(1), logprobs=np.zeros(1))
    prompt = types.SimpleNamespace(text="1 + 1 =", answer=2, task="sums")
    log = SampleLog(tmp_path, print, str, lambda id: prompt, lambda version: {sample.id: view})
    log.write(1, [group])
    log.keep(1, "heldout", group, solved=[True], reason="why")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "samples/00000001.jsonl").read_text().splitlines()]
    written = {key for row in rows for key in keys(row)}
    table = {"trained", "filtered", "failed", "heldout", "stop", "length", "dora_jax.samples", "trainer.show_every"}
    assert section("samples/STEP.jsonl") - table == written


def test_every_fact_of_the_timeline_is_on_the_page(tmp_path):
    timeline = Timeline(tmp_path, print, clock=iter(range(1000)).__next__)
    id, agreement = SampleId(0, 0), Agreement(0.0, None, (), [].append, timeline.write)
    for event, commands in (
        (ev.InstanceUp(instance=0, slots=1, pages=1, page_size=1), [ev.LoadWeights(instance=0, version=0)]),
        (ev.WeightsLoaded(instance=0, version=0), []),
        (ev.SampleStarted(id=id, instance=0, version=0), [ev.Train(base_version=0, group_ids=())]),
        (ev.SampleMoved(id=id, src=0, dst=0, attempt=0), []),
        (ev.StepPublished(version=1), [ev.Quarantine(instance=0, reason="nan", group_ids=(), steps=())]),
        (ev.InstanceDown(instance=0, reason="it died"), []),
    ):
        timeline.event(event, commands)
        agreement.event(event, commands)
    timeline.close()
    written = {key for line in (tmp_path / "timeline.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert written - section("timeline.jsonl") == set()
    assert section("timeline.jsonl") - written == {"trace.json"}
    summary = json.loads((tmp_path / "instances.json").read_text())
    assert {*summary, *STATISTICS, *summary["lengths"]} - {"format", "checksum"} == section("instances.json")


def test_rows_of_the_quarantine_and_state_files_are_as_the_page_says():
    assert section("quarantine.jsonl") - {"sft_quarantine.jsonl"} == {
        field.name for field in dataclasses.fields(BadRow)
    }
    top = (ROOT / "dora_jax/runtime/files.md").read_text().split("\n## ")[0]
    assert {f"`{state_files.FORMAT}`", f"`{state_files.CHECKSUM}`"} <= set(re.findall(r"`[^`]+`", top))


def test_every_environment_variable_of_ours_is_on_its_page_and_no_other():
    page = (ROOT / "launch/systems.md").read_text()
    files = [*(ROOT / "dora_jax").rglob("*.py"), *(ROOT / "launch").rglob("*.sh"), *(ROOT / "launch").rglob("*.py")]
    found = {name for file in files for name in re.findall(r"\bDORA_[A-Z][A-Z_]*[A-Z]\b", file.read_text())}
    assert set(re.findall(r"\bDORA_[A-Z][A-Z_]*[A-Z]\b", page)) == found - {"DORA_JAX_NONE"}
    read = {
        name
        for file in (ROOT / "dora_jax").rglob("*.py")
        for name in re.findall(r'environ(?:\.get\(|\.pop\(|\[)"(\w+)"', file.read_text())
    }
    inner = {"TPU_WORKER_ID", "PYTHONPATH"}  # of the machine, and of Python
    assert {name for name in read if f"`{name}`" not in page} <= inner
