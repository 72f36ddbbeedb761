"""Several tasks in one run: their turns, their held-out rows, what is refused, and the shares that are served."""

import collections
import dataclasses
import json
import re

import pytest
from absl import flags

from dora_jax import config, tasks
from dora_jax.base import helping
from dora_jax.cli.arguments import apply_overrides
from dora_jax.config import ConfigError, TaskSection
from dora_jax.config.task import TaskPart
from dora_jax.plan.validate import from_config_dict
from dora_jax.runtime.assembly import run as build
from dora_jax.tasks.mixture import cycle_of
from dora_jax.tasks.source import uid_of
from tests.fakes.tasks import Letters, sums, write

GYM = TaskPart(name="reasoning_gym:chain_sum", params={"min_terms": 2, "max_terms": 3, "max_digits": 1})


def rows_of(folder, name, rows, **more):
    return TaskPart(name="rows", path=write(folder / f"{name}.jsonl", rows), **more)


def opened(mix, folder, *, heldout=6, seed=0):
    return tasks.open_task(
        TaskSection(mix=mix),
        Letters(),
        seed=seed,
        max_prompt_tokens=100,
        max_new_tokens=8,
        heldout=heldout,
        quarantine_path=folder / "quarantine.jsonl",
    )


def products(n, start=0):
    return [{"prompt": f"{i}*{i}=", "answer": str(i * i)} for i in range(start, start + n)]


def test_turns_are_spread_evenly_and_have_no_order_but_their_names():
    mix = {"sums": TaskPart(weight=4), "games": TaskPart(weight=2), "proofs": TaskPart()}
    assert (
        cycle_of(mix)
        == cycle_of(dict(reversed(mix.items())))
        == ("sums", "games", "sums", "proofs", "sums", "games", "sums")
    )
    assert cycle_of({}) == ()


def test_every_prompt_of_every_task_has_its_turn(tmp_path):
    mix = {
        "sums": rows_of(tmp_path, "sums", sums(43), weight=2),
        "products": rows_of(tmp_path, "products", products(23)),
    }
    task = opened(mix, tmp_path)
    assert opened(mix, tmp_path).prompt_at(17).text == task.prompt_at(17).text
    prompts = [task.prompt_at(g) for g in range(60)]
    assert ["*" in prompt.text for prompt in prompts] == [g % 3 == 1 for g in range(60)]
    held = {task.prompt_at(-1 - i).uid for i in range(6)}
    everything = {uid_of(row["prompt"]) for row in sums(43) + products(23)}
    assert {prompt.uid for prompt in prompts} == everything - held  # one epoch of each: 40 and 20 are left of them
    assert ["*" in task.prompt_at(-1 - i).text for i in range(6)] == [True, False] * 3


def test_what_one_task_holds_out_no_other_one_trains_on(tmp_path):
    """Both have the same rows."""
    mix = {name: rows_of(tmp_path, name, sums(40)) for name in ("one", "two")}
    task = opened(mix, tmp_path, heldout=10)
    assert task.n_heldout == len(task.heldout_uids) == 10
    assert not {task.prompt_at(g).uid for g in range(60)} & task.heldout_uids


def test_bad_rows_of_each_task_have_a_file_of_their_own(tmp_path):
    mix = {name: rows_of(tmp_path, name, sums(200) + [{"prompt": name}]) for name in ("one", "two")}
    opened(mix, tmp_path)
    for name in mix:
        (bad,) = map(json.loads, (tmp_path / f"quarantine.{name}.jsonl").read_text().splitlines())
        assert bad["reason"] == "answer is missing" and bad["file"].endswith(f"{name}.jsonl")


def test_what_is_wrong_with_an_entry_names_it(tmp_path):
    bad = dataclasses.replace(GYM, params={"min_terms": "two"})
    with pytest.raises(ConfigError, match=r"^task.mix.sums.params: reasoning-gym's chain_sum refuses"):
        opened({"sums": bad}, tmp_path)
    with pytest.raises(ConfigError, match=r"^task.mix.mine.path: .*truncated"):
        (tmp_path / "cut.jsonl").write_text('{"prompt": "1+1=", "ans')
        opened({"mine": TaskPart(name="rows", path=str(tmp_path / "cut.jsonl")), "sums": GYM}, tmp_path)


def of_mix(mix, **more):
    c = config.defaults()
    c.model.path = "somewhere"
    c.task.mix = mix
    for name, value in more.items():
        c[name.split("__")[0]][name.split("__")[1]] = value
    return c


MIX = {
    "sums": {"name": "reasoning_gym:chain_sum", "weight": 3},
    "games": {"name": "rows", "path": "games.jsonl", "limit": 2},
}


def test_a_mix_reaches_the_orchestrator():
    run = build.orchestrator_config(from_config_dict(of_mix(MIX, orchestrator__kv_pressure=0.1)))
    assert run.task_cycle == ("sums", "games", "sums", "sums")
    assert dict(run.task_ratios) == {"sums": 1.0, "games": 2.0} and not run.task_adaptive and run.kv_pressure == 0.1
    assert run.task_limits == {"sums": 15, "games": 10}  # of 20 outstanding
    unlimited = {**MIX, "games": {"name": "rows", "path": "games.jsonl"}}
    assert not build.orchestrator_config(from_config_dict(of_mix(unlimited))).task_limits
    adaptive = of_mix(unlimited, task__adaptive=True, orchestrator__filter_zero_variance=True)
    assert build.orchestrator_config(from_config_dict(adaptive)).task_limits == {"sums": 15, "games": 5}
    read = from_config_dict(of_mix(MIX))
    assert from_config_dict(config.to_json(read)) == read


@pytest.mark.parametrize(
    "changed, more, sentence",
    [
        ({"weight": 0}, {}, "task.mix.sums.weight: 0 is not at least 1"),
        ({"weight": 2000}, {}, "task.mix: its weights add up to 2001: a turn through it has at most 1000 prompts"),
        ({"limit": 0.0}, {}, "task.mix.sums.limit: 0.0 is not above 0"),
        (
            {"name": "chain_sum"},
            {},
            'task.mix.sums.name: neither "rows" nor "reasoning_gym:<dataset>", and \'chain_sum\' is not an import path',
        ),
        ({"wieght": 3}, {}, "task.mix.sums.wieght: unknown field; the nearest is task.mix.sums.weight"),
        ({"weight": "three"}, {}, "task.mix.sums.weight: 'three' is not a int"),
        ({}, {"task__name": "rows"}, "task.name: there is a task.mix, whose entries have their own; leave it empty"),
        (
            {},
            {"task__adaptive": True},
            "task.adaptive: it looks at the filtered groups of a mix: it needs task.mix and orches",
        ),
        ({}, {"orchestrator__kv_pressure": 0.6}, "orchestrator.kv_pressure: 0.6 is not between 0 and 0.5"),
    ],
)
def test_a_mix_that_cannot_be_is_refused_in_a_sentence(changed, more, sentence):
    mix = {"sums": {"name": "reasoning_gym:chain_sum"} | changed, "games": {"name": "reasoning_gym:gcd"}}
    with pytest.raises(ConfigError) as error:
        from_config_dict(of_mix(mix, **more))
    (problem,) = error.value.problems
    assert problem.startswith(sentence)


def test_a_command_line_may_change_an_entry():
    argv = ["", "--config.task.mix.sums.weight=5"]
    assert apply_overrides(of_mix(MIX).lock(), argv, flags.FlagValues(), config.Config) == {"task.mix.sums.weight": 5}
    with pytest.raises(
        ConfigError, match="config.task.mix.sums.wieght: unknown field; the nearest is config.task.mix.sums.weight"
    ):
        apply_overrides(of_mix(MIX).lock(), ["", "--config.task.mix.sums.wieght=5"], flags.FlagValues(), config.Config)


def test_help_shows_what_an_entry_takes():
    shown = "\n".join(helping.fields(config.TaskSection, "task."))
    assert (
        re.search(r"task.mix.NAME.weight=1 +prompts of it in each turn", shown) and "task.mix.NAME.limit=1.0" in shown
    )


def test_names_are_such_as_metrics_can_bear():
    with pytest.raises(ConfigError, match="task.mix.a/b: a task's name is made of letters"):
        from_config_dict(of_mix({"a/b": {"name": "reasoning_gym:gcd"}}))


def test_prompts_and_the_orchestrator_agree_on_whose_group_it_is(tmp_path):
    """Names that a ConfigDict or JSON would bring in another order."""
    mix = {"z": rows_of(tmp_path, "z", sums(40), weight=2), "a": rows_of(tmp_path, "a", products(40))}
    task, run = opened(mix, tmp_path), build.orchestrator_config(config.Config(task=TaskSection(mix=mix)))
    received = collections.Counter((run.task(g), "*" in task.prompt_at(g).text) for g in range(30))
    assert received == {("z", False): 20, ("a", True): 10}
