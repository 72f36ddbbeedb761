"""What a run does in a second, by hand; who waits, and what would change it."""

import dataclasses
import json
import re

import pytest
from absl import flags as absl_flags

from dora_jax.cli import flags
from dora_jax.config import Config, ModelSection, OrchestratorSection, RolloutSection, TrainerSection
from dora_jax.costs import MeasuredCosts
from dora_jax.models.families import KNOWN
from dora_jax.plan import presets, rates

CONFIGS = "configs/qwen3.py"


def planned(
    slice_name="v5p-16", rollout=None, trainer=None, orchestrator=None, size="Qwen3-0.6B", placement="disjoint"
):
    """A run on one slice that trains on half of it, without what nobody knows: nothing of it is open."""
    sizes = {"slots": 64, "tensor": 1, "instances": 0, "max_prompt_tokens": 1024, "max_new_tokens": 3072}
    config = Config(
        slice=slice_name,
        placement=placement,
        model=ModelSection(size=size),
        rollout=RolloutSection(**sizes | (rollout or {})),
        trainer=TrainerSection(**{"pack_tokens": 4096, "remat": "full", "micro_batches": 16} | (trainer or {})),
        orchestrator=OrchestratorSection(**{"groups_per_step": 16, "group_size": 8} | (orchestrator or {})),
    )
    return presets.plan(config, presets.machines(config), KNOWN[size]).memory


@pytest.fixture
def measured(tmp_path):
    """Costs of a machine that is not in the table: 10 ms a tick of 64, 1 us a token that it reads, prompts for nothing
    but 8 ms."""
    names = ("prefill_s_per_token", "train_fixed_s", "train_s_per_token", "load_s", "move_fixed_s", "move_s_per_token")
    data = dict.fromkeys((*names, "score_s"), 0.0) | {"decode": [[64, 0.01]], "decode_kv_s": 1e-6, "pages": 1}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data | {"prefill_fixed_s": 0.008}))
    return MeasuredCosts(str(path))


def test_rates_by_hand(measured):
    speeds = rates.RoleTimes(costs=measured, update_s=lambda micro_batches: 0.5 * micro_batches)
    found = rates.of(planned(), speeds, prompt=100, answer=300)
    # a sample stops within a call of 2 steps, whose result is read one call late
    assert (found.instances, found.rows, found.samples) == (4, 40, 128)  # 1.25 x 16 groups of 8 on four instances
    assert found.decode_s == pytest.approx(0.01 + 40 * 252 * 1e-6) and found.prefill_s == pytest.approx(0.001)
    assert found.tokens_per_s == pytest.approx(300 / ((300 + 0.5 + 2) * found.decode_s / 40 + 0.001))
    assert found.rollout_s == pytest.approx(128 * 300 / (4 * found.tokens_per_s))
    # 128 samples of 400 tokens fill 12.5 rows of 4,096, and a micro-batch of the 128 rows has 8
    assert found.micro_batches == 2 and found.trainer_s == 1.0 and found.apart
    few = rates.of(planned(), speeds, prompt=100, answer=300, trained=0.5)  # 6.25 rows, the others move no weight
    assert few.micro_batches == 1 and few.rollout_s == found.rollout_s
    assert found.step_s == found.rollout_s and "the trainer waits 80% of a step for samples" in found.balance


@pytest.mark.parametrize(
    ("update_s", "changes", "step", "words"),
    [
        (10.0, {}, max, "the instances wait 92% of a step for the trainer"),
        (0.79, {}, max, "neither waits"),
        (1.0, {"orchestrator": {"mode": "sync"}}, sum, "they take turns, and the trainer has"),
        (1.0, {"placement": "shared", "rollout": {"instances": 4}}, sum, "they take turns, and the trainer has"),
    ],
)
def test_who_waits(measured, update_s, changes, step, words):
    speeds = rates.RoleTimes(costs=measured, update_s=lambda micro_batches: update_s)
    found = rates.of(planned(**changes), speeds, prompt=100, answer=12)
    found = found._replace(prefill_s=0.0, unused=0.0, rows=1.0)
    found = found._replace(decode_s=0.79 * found.instances / (found.samples * found.answer))
    assert found.rollout_s == pytest.approx(0.79)
    assert found.step_s == pytest.approx(step((0.79, update_s))) and words in found.balance
    assert found._replace(host_s=0.3).step_s == pytest.approx(step((0.79, update_s, 0.3)))


def test_slots_beyond_a_dispatch_take_turns_and_pages_bound_them(measured):
    speeds = rates.RoleTimes(costs=measured, update_s=float)
    many = {"groups_per_step": 64}
    whole, turns, few = (
        rates.of(planned(rollout=rollout, orchestrator=many), speeds, prompt=128, answer=256)
        for rollout in ({}, {"slots": 128, "decode_rows": 64}, {"pages": 128})
    )
    assert (whole.rows, turns.rows, few.rows) == (64, 128, 128 * 64 / 256)
    assert turns.decode_s == pytest.approx(2 * whole.decode_s)


def test_instances_on_one_device_take_turns(measured):
    times = rates.RoleTimes(costs=measured, update_s=lambda micro_batches: 1.0)
    one, two = (
        rates.of(planned("laptop", rollout={"instances": n}, placement="auto"), times, prompt=100, answer=300)
        for n in (1, 2)
    )
    assert one.rows == two.rows == 64 and not two.apart
    assert two.tokens_per_s == pytest.approx(one.tokens_per_s / 2) and two.rollout_s == pytest.approx(one.rollout_s)


def dry_run(arg, *more):
    asks = [f"--config={CONFIGS}:{arg}", "--config.model.path=a", "--config.task.path=b.jsonl", "--dry_run", *more]
    return flags.describe(flags.parse(["program", *asks], "train", absl_flags.FlagValues()))


def step_s(printed):
    return float(re.search(r"([\d.]+) s a step\nto change", printed)[1])


@pytest.mark.parametrize("arg", ["0.6B,v5e-8", "8B,v5p-16", "8B,h100-8", "1.7B,v6e-8"])
def test_a_dry_run_prints_rates_and_changes_that_do_what_they_say(arg):
    printed = dry_run(arg)
    assert re.search(r"an instance: [\d,]+ tokens/s of \d+ samples at once, [\d.]+ ms a token of each", printed)
    assert re.search(r"a step of the trainer: [\d.]+ s, \d+ of \d+ micro-batches hold tokens; .*MFU \d+%", printed)
    assert re.search(
        r"prompts have 512 and answers 1536 tokens in the mean: .*: (the .* waits? \d+% of|neither)", printed
    )
    line = printed.partition("\nto change: ")[2].partition("\n")[0]
    found = re.findall(r"((?:[\w.]+=\S+ )+)\(([\d.]+) s a step\)", line)
    assert len({promised for _, promised in found}) == len(found), "fields that change nothing are not named"
    assert found and "neither would wait if the trainer had" in line
    for fields, promised in found:
        changed = dry_run(arg, *(f"--config.{field}" for field in fields.split()))
        assert step_s(changed) == float(promised) < 0.96 * step_s(printed)


def test_narrow_weights_and_kv_are_read_faster():
    base = planned()
    plain, narrow = (
        rates.of(one, rates.of_chips(one)).decode_s
        for one in (base, planned(rollout={"weights": "int8", "kv": "float8", "pages": base.config.rollout.pages}))
    )
    assert narrow < 0.8 * plain
    assert rates.of_chips(dataclasses.replace(base, machines=presets.machines(Config(slice="laptop")))) is None
