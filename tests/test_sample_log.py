"""The samples to read: which they are, and what the trainer made of their tokens."""

import dataclasses
import json
import types

import numpy as np

from dora_jax.buffer import layout, pack
from dora_jax.report.load import load
from dora_jax.runtime.common.sample_log import SampleLog, TokenViews
from dora_jax.trainer.advantage import Prepare
from dora_jax.types import Sample, SampleId, ScoredGroup, Span
from tests.fakes import trainer_cases as cases


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


def test_samples_keep_within_their_budget_the_oldest_going_first(tmp_path):
    prompt, budget = types.SimpleNamespace(text="1 + 1 =", answer=2), 20_000

    def run(steps):
        log = SampleLog(tmp_path, print, lambda ids: "x" * 200, lambda id: prompt, None, log_bytes=budget)
        for step in steps:
            log.write(step, GROUPS)
        log.close()

    run(range(1, 200))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 19')  # a kill
    run(range(200, 203))
    for first, second in (("samples.1.jsonl", "samples.jsonl"), ("trajectories.1.txt", "trajectories.txt")):
        sizes = [(tmp_path / name).stat().st_size for name in (first, second)]
        assert sum(sizes) <= budget and sizes[0] > budget / 2 - 1000
    data = load(tmp_path, "a")
    steps = [row["step"] for row in data.samples]
    assert steps == list(range(steps[0], 203)) and len(steps) > 10, "no row is glued to the one that was cut short"
    assert any("samples.jsonl has reached its budget (monitor.log_bytes)" in remark for remark in data.remarks)


def rows_of(folder, views, version):
    prompt = types.SimpleNamespace(text="1 + 1 =", answer=2)
    log = SampleLog(folder, print, lambda ids: "".join(f"<{i}>" for i in ids), lambda id: prompt, views.take)
    log.write(version, GROUPS)
    log.close()
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_the_best_and_the_worst_sample_of_the_most_mixed_group_are_written_with_their_tokens(tmp_path):
    views = TokenViews(Echo(), 5, packer)
    views.pack(GROUPS, 4)
    (row,) = rows_of(tmp_path, views, 5)
    assert (row["group"], [s["index"] for s in row["samples"]]) == (1, [1, 0])
    best, worst = (sample["by_token"] for sample in row["samples"])
    assert best["text"] == ["<10>", "<21>", "<31>"]
    assert best["advantage"] == [0.5, None, 0.5] and worst["advantage"] == [-0.5, None, -0.5], "none where observed"
    assert best["logprob"] == [-0.5, -0.25, -1.0]
    assert best["gap"] == [0.6, None, 1.31], "of the trainer - of the engine"
    assert (tmp_path / "trajectories.txt").read_text().startswith("=== step 5  group 1")


def test_other_steps_have_no_look_and_are_written_all_the_same(tmp_path):
    trainer = Echo()
    views = TokenViews(trainer, 5, packer)
    views.pack(GROUPS, 3)
    (row,) = rows_of(tmp_path, views, 4)
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
