"""What the policy wrote: all of it is kept and found again, and what the trainer made of the tokens of a few."""

import dataclasses
import json
import shutil
import types

import numpy as np
import pytest

from dora_jax.base.metrics import Writer
from dora_jax.buffer import layout, pack
from dora_jax.orchestrate import events as ev
from dora_jax.report.load import load, samples
from dora_jax.runtime.common.idle_time import StepSeconds
from dora_jax.runtime.common.sample_log import SampleLog, TokenViews, files
from dora_jax.runtime.common.worker import StepDone
from dora_jax.runtime.journal import workdir_mirror
from dora_jax.runtime.observe.metrics_log import RunLog
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.solved import Solved
from dora_jax.trainer.advantage import Prepare
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes import trainer_cases as cases
from tests.fakes.sinks import quiet


class Echo:
    """A trainer whose log-prob of a target is the target's id over 100, and which counts how often it was asked."""

    asked = 0

    def row_logprobs(self, batch, row):
        self.asked += 1
        return batch.targets[row].astype(np.float32) / 100


def scored(group_id, rewards, version=0):
    samples = tuple(
        Sample(
            id=SampleId(group_id, i),
            prompt_ids=np.array([1, 2, 3], np.int32),
            out_ids=np.array([10, 20 + group_id, 30 + i], np.int32),
            logprobs=np.array([-0.5, -0.25 * i, -1.0], np.float32),
            mask=np.array([True, False, True]),
            spans=(Span(version=version, start=0, stop=3),),
            finish="stop",
        )
        for i in range(len(rewards))
    )
    return ScoredGroup(
        group_id=group_id, version=version, samples=samples, rewards=np.array(rewards, np.float32), parts={}
    )


GROUPS = [scored(0, [1, 1, 1]), scored(1, [0, 1, 0.5]), scored(2, [0, 0, 0])]


def packer(groups, base):
    shape = layout.layout(pack_tokens=16, rows=0, micro_batches=2, samples=9, max_tokens=8, share_prompts=True)
    objective = Prepare(dataclasses.replace(cases.SECTION, advantage="dr_grpo"), 8)
    return pack.pack_step([groups], shape, objective)


PROMPT = types.SimpleNamespace(text="1 + 1 =", answer=2, task="sums")


def spelt(ids):
    return "".join(f"<{i}>" for i in ids)


def stored(folder, views=None, decode=spelt, notes=None, **budgets):
    return SampleLog(
        folder, print if notes is None else notes.append, decode, lambda id: PROMPT, views and views.take, **budgets
    )


def bytes_in(folder, name):
    return sum(file.stat().st_size for file in folder.glob(name))


def test_all_groups_are_kept_within_their_budget_the_oldest_going_first(tmp_path):
    budget = 400_000

    def run(steps, **more):
        log = stored(tmp_path, decode=lambda ids: "x" * 200, log_bytes=20_000, samples_bytes=budget, **more)
        for step in steps:
            log.write(step, GROUPS)
        log.close()

    run(range(1, 200))
    assert len(files(tmp_path / "samples")) > 20 and budget * 0.9 < bytes_in(tmp_path, "samples/*") <= budget
    assert bytes_in(tmp_path, "trajectories*") <= 20_000
    with files(tmp_path / "samples")[-1].open("ab") as file:
        file.write(b'{"step": 19')  # a kill
    run(range(200, 203))
    rows = samples(tmp_path)
    steps = sorted({row["step"] for row in rows})
    assert steps == list(range(steps[0], 203)) and len(rows) == 9 * len(steps), "no row is glued to the one cut short"
    run(range(151, 153), resumed_at=150)
    assert [row["step"] for row in samples(tmp_path)][-1] == 152 and len(samples(tmp_path, step=151)) == 9
    text = b"".join(file.read_bytes() for file in files(tmp_path / "samples"))
    assert text.count(b'{"step": 151,') == 3 and b'{"step": 160,' not in text


def rows_of(folder, views, version):
    log = stored(folder, views)
    log.write(version, GROUPS)
    log.close()
    return [json.loads(line) for line in files(folder / "samples")[0].read_text().splitlines()]


def test_a_step_keeps_all_of_its_groups_and_of_two_samples_the_tokens(tmp_path):
    views = TokenViews(Echo(), 5, packer)
    views.pack(GROUPS, 4)
    rows = rows_of(tmp_path, views, 5)
    assert [(row["kind"], row["group"], len(row["samples"])) for row in rows] == [("trained", i, 3) for i in range(3)]
    worst, best, _ = rows[1]["samples"]
    assert [[s["index"] for s in row["samples"] if "by_token" in s] for row in rows] == [[], [0, 1], []]
    best, worst = best["by_token"], worst["by_token"]
    assert best["text"] == ["<10>", "<21>", "<31>"]
    assert best["advantage"] == [0.5, None, 0.5] and worst["advantage"] == [-0.5, None, -0.5], "none where observed"
    assert best["logprob"] == [-0.5, -0.25, -1.0]
    assert best["gap"] == [0.6, None, 1.31], "of the trainer - of the engine"
    assert (tmp_path / "trajectories.txt").read_text().startswith("=== step 5  group 1")


def test_rows_are_found_by_step_task_kind_and_text(tmp_path):
    log = stored(tmp_path)
    log.keep(0, "heldout", scored(-1, [1, 0]), solved=np.array([True, False]))
    log.write(1, GROUPS)
    log.keep(2, "filtered", scored(7, [1, 1]))
    log.keep(2, "failed", scored(8, [np.nan, np.nan]), reason="it took too long")
    log.write(2, GROUPS[:1])
    log.close()
    assert [row["solved"] for row in samples(tmp_path, kind="heldout")] == [True, False]
    failed = samples(tmp_path, kind="failed")
    assert [(row["reward"], row["reason"], row["group"]) for row in failed] == [(None, "it took too long", 8)] * 2
    assert {row["kind"] for row in samples(tmp_path, step=2)} == {"filtered", "failed", "trained"}
    assert len(samples(tmp_path)) == 2 + 9 + 2 + 2 + 3 == len(samples(tmp_path, task="sums"))
    assert samples(tmp_path, task="games") == [] == samples(tmp_path, contains="<99>")
    (row,) = samples(tmp_path, step=1, contains="<21><31>")
    assert (row["index"], row["reward"], row["text"], row["expected"]) == (1, 1.0, "<10><21><31>", "2")
    with pytest.raises(ValueError, match="kind = 'evaluated' is none of trained"):
        samples(tmp_path, kind="evaluated")


def test_what_no_step_trains_on_is_kept_and_counted(tmp_path):
    state = types.SimpleNamespace(
        ledger=types.SimpleNamespace(base=4), groups={-1: types.SimpleNamespace(version=4)}, evaluating={4: 2},
        config=types.SimpleNamespace(task_cycle=()),
    )  # fmt: skip
    facts = {"versions": {}, "stride": 1, "moves": 0, "reloads": 0, "metrics": {}}
    brain = types.SimpleNamespace(state=state, waiting=dict, summary=lambda: facts)
    tables = []
    sink = types.SimpleNamespace(write=lambda *_: None, samples=lambda *row: tables.append(row[:2]))
    with Writer(tmp_path, quiet(), [sink]) as writer:
        log = RunLog(
            workdir=tmp_path, writer=writer, orchestrator=brain, seconds=StepSeconds({}), in_timeline=print,
            decode=spelt, prompt_of=lambda id: PROMPT, solved=Solved(term="total"), steps=9, max_failed_share=1.0,
        )  # fmt: skip
        log.record(scored(-1, [1, 0], version=4))
        log.record(scored(-2, [0, 0], version=4))  # of an earlier process, which has kept it
        for group, trainable in ((scored(7, [1, 1]), False), (GROUPS[1], True)):
            log.record(group)
            log.event(ev.GroupScored(group_id=group.group_id, trainable=trainable), [])
        failed = scored(8, [0, 0]).samples
        log.record(GroupFailure(group_id=8, reason="it took too long", lengths=(3, 3), samples=failed))
        log.record(StepDone(version=5, groups=(GROUPS[1],), metrics={}, wait_s=0.0, step_s=0.1))
        assert log.metrics["groups/filtered_share"] == 0.5
        log.samples.evaluated(4)
        log.close()
    rows = samples(tmp_path)
    assert [(row["step"], row["kind"], row["group"]) for row in rows if row["index"] == 1] == [
        (4, "heldout", -1), (5, "filtered", 7), (5, "failed", 8), (5, "trained", 1),
    ]  # fmt: skip
    assert [row["solved"] for row in rows[:2]] == [True, False] and rows[-4]["reason"] == "it took too long"
    assert tables == [(4, "heldout")]


def test_a_workdir_of_one_group_a_step_is_read_too_and_damage_is_left_out(tmp_path):
    old = {
        "step": 1,
        "group": 3,
        "version": 0,
        "prompt": "p",
        "expected": "2",
        "samples": [{"index": 4, "text": "old"}],
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(old) + "\n{\n" + json.dumps(old | {"step": 2}) + "\n")
    log = stored(tmp_path, resumed_at=1)
    log.write(2, [scored(3, [0, 1])])
    log.close()
    with files(tmp_path / "samples")[0].open("ab") as file:
        file.write(b'\xff\n{"step": 2, "kind": "other", "samples": []}\n{"step": 2, "samples": 7}\n[')
    assert [(row["step"], row["text"]) for row in samples(tmp_path)][:2] == [(1, "old"), (2, "old")]
    data = load(tmp_path, "a")
    assert [len(row["samples"]) for row in data.rollouts.steps] == [1, 2] and data.rollouts.damaged == 3
    assert "3 lines of samples hold no row and are left out" in data.remarks


def test_a_bucket_holds_the_files_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    url, names = f"file://{tmp_path}/bucket", ["00000000.jsonl", "00000005.jsonl"]
    folder = workdir_mirror.attach(url, "train")
    (folder / "config.json").write_text("{}")
    with workdir_mirror.mirrored(folder, print, steps=False):
        (folder / "samples").mkdir()
        for name in names:
            (folder / "samples" / name).write_text(
                json.dumps({"step": int(name[:8]), "samples": [{"text": "a"}]}) + "\n"
            )
    assert [row["step"] for row in samples(url)] == [0, 5]
    shutil.rmtree(folder)
    folder = workdir_mirror.attach(url, "train")
    with workdir_mirror.mirrored(folder, print, steps=False):
        assert [file.name for file in files(folder / "samples")] == names, "a machine that goes on has them all"
        (folder / "samples" / names[0]).unlink()
    assert [row["step"] for row in samples(url)] == [5]


def test_what_cannot_be_written_is_reported_once_and_ends_nothing(tmp_path):
    notes = []
    (tmp_path / "samples").write_text("a file of the user's")
    log = stored(tmp_path, notes=notes)
    log.write(1, GROUPS)
    log.close()
    assert "is no folder; it is moved aside" in notes[0] and len(samples(tmp_path)) == 9

    def broken(ids):
        raise RuntimeError("no such id")

    log = stored(tmp_path, decode=broken, notes=notes)
    for step in (2, 3):
        log.write(step, GROUPS)
    log.close()
    assert len(notes) == 2 and notes[1].endswith("lacks samples: RuntimeError: no such id")


def test_other_steps_have_no_look_and_are_written_all_the_same(tmp_path):
    trainer = Echo()
    views = TokenViews(trainer, 5, packer)
    views.pack(GROUPS, 3)
    row = rows_of(tmp_path, views, 4)[1]
    assert trainer.asked == 0 and "by_token" not in row["samples"][0] and row["samples"][0]["tokens"] == 3


def test_a_step_in_parts_is_looked_at_once_while_its_weights_are_those_it_starts_from():
    trainer, began = Echo(), []

    def parts(groups, base):
        return (packer([group], base)[0] for group in groups)

    views = TokenViews(trainer, 1, parts)
    for batch in views.pack([GROUPS[1], GROUPS[0]], 0):
        began.append((batch.group_ids, trainer.asked))
    assert began == [((1,), 2), ((0,), 2)], "both samples are of the first part, before it is trained on"
    assert sorted(id.index for id in views.take(1)) == [0, 1] and views.take(1) == {}


def test_samples_that_are_not_packed_in_one_piece_have_no_token_view():
    left_out = lambda groups, base: packer(groups[:1], base)
    views = TokenViews(Echo(), 1, left_out)
    views.pack(GROUPS, 0)
    assert views.take(1) == {}
