"""Prompts of reasoning-gym tasks: purity, the split, templates, limits, refusals, worked solutions."""

import dataclasses
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dora_jax import tasks
from dora_jax.config import ConfigError, TaskSection
from dora_jax.runtime.episodes import PromptsAhead
from dora_jax.tasks import datasets
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.tasks.source import uid_of
from tests.fakes.cluster import eventually
from tests.fakes.tasks import SUMS, opened


def params(**values):
    return dataclasses.replace(SUMS, params=values)


def refusal(section, **more):
    with pytest.raises(ConfigError) as error:
        opened(section, **more)
    text = str(error.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------- purity and the split


PRINT_PROMPTS = """
import json
from tests.fakes.tasks import opened
task = opened()
prompts = [task.prompt_at(g) for g in (5, 0, 123456789, -1, -64)]
print(json.dumps([[p.uid, p.text, p.token_ids.tolist(), p.answer] for p in prompts]))
"""


def test_a_fresh_process_meets_the_same_prompts():
    out = subprocess.run(
        [sys.executable, "-c", PRINT_PROMPTS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "11"},
    )
    task = opened()
    here = [task.prompt_at(g) for g in (-64, -1, 123456789, 0, 5)][::-1]  # in another order, too
    assert json.loads(out.stdout) == [[p.uid, p.text, p.token_ids.tolist(), p.answer] for p in here]


def test_training_and_heldout_never_share_a_uid():
    task = opened(params(min_terms=2, max_terms=2, max_digits=1), heldout=64)  # 200 questions in all
    heldout = {task.prompt_at(-1 - i).uid for i in range(64)}
    assert len(heldout) == 64 == task.n_heldout
    assert heldout == task.heldout_uids
    training = {task.prompt_at(g).uid for g in range(5000)}
    assert len(training) == 200 - 64
    assert not training & heldout
    worked = {uid_of(task.worked(i)[0].removesuffix("=")) for i in range(500)}
    assert len(worked) > 100 and not worked & heldout


def test_the_seed_moves_training_prompts_and_leaves_heldout_ones():
    one, two = opened(seed=1), opened(seed=2)
    assert [one.prompt_at(g).uid for g in range(8)] != [two.prompt_at(g).uid for g in range(8)]
    assert [one.prompt_at(-g).uid for g in range(1, 65)] == [two.prompt_at(-g).uid for g in range(1, 65)]
    assert one.prompt_at(-65).uid == one.prompt_at(-1).uid


def test_excluded_uids_are_never_drawn():
    section = params(min_terms=2, max_terms=2, max_digits=1)
    main = opened(section)
    other = opened(section, heldout=0, exclude=main.heldout_uids)
    assert not {other.prompt_at(g).uid for g in range(2000)} & main.heldout_uids
    assert other.n_heldout == 0
    with pytest.raises(ValueError, match="none held out"):
        other.prompt_at(-1)


def test_a_prompt_takes_well_under_two_milliseconds():
    task = opened()
    began_s = time.thread_time()
    for group in range(500):
        task.prompt_at(group)
    assert (time.thread_time() - began_s) / 500 < 2e-3


def test_a_prompt_is_drawn_once_for_its_group_s_start_and_its_rows(monkeypatch):
    task = opened()
    drawn, draw = [], task.source.draw
    monkeypatch.setattr(task.source, "draw", lambda *which: drawn.append(which) or draw(*which))
    texts = [task.prompt_at(group).text for group in (7, 8, 7, 8)]
    assert len(drawn) == 2
    assert texts[:2] == texts[2:] != texts[1::-1]


def test_prompts_are_made_ahead_one_at_a_time_and_a_bad_one_is_raised_where_it_is_asked_for(monkeypatch):
    task, plain = opened(), opened()
    goes_on, drawn, threads, draw = threading.Event(), [], set(), task.source.draw

    def slow(stream, seed, i):
        threads.add(threading.current_thread().name)
        assert not drawn or drawn[-1] is None, "one draw at a time"
        drawn.append(i)
        if i == 9:
            goes_on.wait(10)
        try:
            if i == 12:
                raise ValueError("a bad row")
            return draw(stream, seed, i)
        finally:
            drawn.append(None)

    monkeypatch.setattr(task.source, "draw", slow)
    ahead = PromptsAhead(task.prompt_at)
    for group in (5, 6, 5):
        ahead.behind(group)
    eventually(lambda: 9 in drawn)
    assert task.prompt_at(7).text == plain.prompt_at(7).text and 9 in drawn and 10 not in drawn, "it waits for nothing"
    goes_on.set()
    eventually(lambda: 6 + 32 in drawn and drawn[-1] is None)
    assert [i for i in drawn if i is not None] == list(range(6, 39)) and threads == {"prompts"}
    made = [task.prompt_at(group) for group in range(6, 39) if group != 12]
    assert [p.text for p in made] == [plain.prompt_at(p.group_id).text for p in made] and len(drawn) == 2 * 33
    with pytest.raises(ValueError, match="a bad row"):
        task.prompt_at(12)
    del ahead
    gc.collect()
    eventually(lambda: "prompts" not in [thread.name for thread in threading.enumerate()])


def test_a_dataset_too_small_for_its_heldout_set_is_refused():
    tiny = params(min_terms=2, max_terms=2, max_digits=1)
    assert "gave only 200 distinct prompts" in refusal(tiny, heldout=201)
    assert "nearly all" in refusal(tiny, heldout=199)


# ---------------------------------------------------------------- wording


def test_extract_and_template_shape_the_prompt():
    prompt = opened().prompt_at(3)
    assert re.fullmatch(r"\d+( [-+] \d+)+=", prompt.text)
    assert eval(prompt.text[:-1]) == int(prompt.answer)
    assert prompt.token_ids.dtype == np.int32 and prompt.token_ids.tolist() == [ord(c) for c in prompt.text]
    assert (prompt.task, prompt.max_new_tokens, prompt.group_id) == ("chain_sum", 8, 3)


def test_a_template_may_hold_other_braces():
    section = dataclasses.replace(SUMS, template="\\boxed{x} {prompt} {y}")
    assert re.fullmatch(r"\\boxed\{x\} \d.* \{y\}", opened(section).prompt_at(0).text)


def test_the_chat_template_is_the_tokenizer_s():
    section = dataclasses.replace(SUMS, template="chat")
    text = opened(section).prompt_at(0).text
    assert text.startswith("<user>") and text.endswith("<assistant>")
    assert opened(section).prompt_at(0).uid == opened().prompt_at(0).uid  # wording does not change its identity


def test_an_extract_that_does_not_match_is_named():
    with pytest.raises(ValueError, match="task.extract 'nothing' does not match"):
        opened(dataclasses.replace(SUMS, extract="nothing"))


def test_a_prompt_over_the_limit_raises_before_anything_else_sees_it():
    task = opened(limit=8)
    caught = []
    for group in range(200):
        try:
            assert len(task.prompt_at(group).token_ids) <= 8
        except PromptTooLong as error:
            caught.append(error)
    assert 0 < len(caught) < 200
    assert caught[0].tokens > caught[0].limit == 8 and str(caught[0].group_id) in str(caught[0])
    assert task.n_heldout + task.heldout_too_long == 64 and task.heldout_too_long > 0
    assert all(len(task.prompt_at(-1 - i).token_ids) <= 8 for i in range(task.n_heldout))
    with pytest.raises(ValueError, match="all 64 held-out prompts"):
        opened(limit=2)


def test_white_space_and_message_form_do_not_make_another_prompt():
    assert uid_of("a  b\n") == uid_of("a b") != uid_of("ab")
    assert uid_of([{"role": "user", "content": "a b"}]) == uid_of("a b")
    assert uid_of([{"role": "system", "content": "a b"}]) != uid_of("a b")


# ---------------------------------------------------------------- names and parameters


@pytest.mark.parametrize("name", ["codeio", "boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"])
def test_datasets_with_no_fair_score_are_refused_with_the_reason(name):
    text = refusal(TaskSection(name=f"reasoning_gym:{name}"))
    assert text == f"task.name: reasoning-gym's {name} is refused: {datasets.REFUSED[name]}"


def test_unknown_names_and_parameters_name_the_nearest():
    assert refusal(TaskSection(name="reasoning_gym:chainsum")).endswith("the nearest is chain_sum")
    assert refusal(params(min_term=3)) == (
        "task.params.min_term: chain_sum has no such parameter; the nearest is min_terms"
    )
    assert "min_terms must be positive" in refusal(params(min_terms=0))
    assert refusal(params(min_terms="two")).startswith("task.params: reasoning-gym's chain_sum refuses {'min_terms'")
    assert "leave it out" in refusal(params(seed=3))
    assert "'gsm8k' is not an import path such as my_module.name" in refusal(TaskSection(name="gsm8k"))


def test_datasets_that_follow_the_hash_seed_need_it_fixed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    section = TaskSection(name="reasoning_gym:isomorphic_strings")
    assert "set PYTHONHASHSEED=0" in refusal(section)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert opened(section, limit=10_000).prompt_at(0).answer in ("True", "False")


def test_a_generator_of_the_global_random_state_is_pinned_to_the_item():
    dataset = datasets.open_dataset("list_functions", {})
    drawn = []
    for state in (1, 2):
        random.seed(state)
        drawn.append([dataset.entry(i)["question"] for i in range(60)])
    assert drawn[0] == drawn[1]
    assert random.random() == random.Random(2).random()  # and the run's own state is left as it was


def test_a_mixture_draws_its_parts_by_weight():
    part = {"name": "chain_sum", "weight": 3, "config": {"min_terms": 2, "max_terms": 2}}
    long = {"name": "chain_sum", "weight": 1, "config": {"min_terms": 9, "max_terms": 9}}
    mix = dataclasses.replace(SUMS, name="reasoning_gym:composite", params={"datasets": (part, long)})
    task = opened(mix)
    terms = [len(re.findall(r"\d+", task.prompt_at(g).text)) for g in range(1000)]
    assert set(terms) == {2, 9} and 180 < terms.count(9) < 320
    prompt, solution = task.worked(0)
    assert int(solution.split("#### ")[1]) == eval(prompt[:-1])
    assert task.prompt_at(0).task == "chain_sum"


def test_a_bad_mixture_is_reported_which_part():
    def mixture(*parts):
        return TaskSection(name="reasoning_gym:composite", params={"datasets": parts})

    assert refusal(TaskSection(name="reasoning_gym:composite")).startswith("task.params: composite takes")
    assert refusal(mixture({"name": "codeio"})).startswith("task.params.datasets[0].name: reasoning-gym's codeio")
    assert "datasets[1].weight: 0" in refusal(mixture({"name": "gcd"}, {"name": "gcd", "weight": 0}))
    assert "datasets[0].config.max: gcd" in refusal(mixture({"name": "gcd", "config": {"max": 3}}))


def test_the_item_travels_in_the_answer_only_for_the_dataset_s_own_score():
    assert opened().prompt_at(0).answer.lstrip("-").isdigit()
    item = opened(dataclasses.replace(SUMS, rewards=(tasks.GYM_REWARD,))).prompt_at(0).answer
    assert json.loads(json.dumps(item)) == item and item["reasoning_gym"] == "chain_sum"
    assert datasets.score(item["answer"], item) == 1.0
    assert datasets.score("no", item) == 0.0


# ---------------------------------------------------------------- worked solutions


@pytest.mark.parametrize("allow_negation", [False, True])
def test_worked_sums_end_in_the_answer(allow_negation):
    task = opened(params(min_terms=1, max_terms=4, max_digits=2, allow_negation=allow_negation))
    for i in range(200):
        prompt, solution = task.worked(i)
        assert int(solution.split("#### ")[1]) == eval(prompt[:-1])


def test_a_share_of_worked_sums_carries_a_slip_that_ends_in_another_answer():
    task = opened()
    clean = [task.worked(i)[1] for i in range(400)]
    slipped = [task.worked(i, slip_rate=0.3)[1] for i in range(400)]
    pairs = [(a.split("#### "), b.split("#### ")) for a, b in zip(clean, slipped, strict=True) if a != b]
    assert 80 < len(pairs) < 160  # 30 % of 400
    assert all(a[1] != b[1] for a, b in pairs)
    assert [task.worked(i, slip_rate=0.3)[1] for i in range(400)] == slipped
    always = [task.worked(i, slip_rate=1.0)[1] for i in range(400)]
    assert sum(a != b for a, b in zip(clean, always, strict=True)) > 360  # a few sums offer no slip that shows


@pytest.mark.parametrize("name", ["gcd", "spell_backward", "number_sorting", "letter_counting"])
def test_other_worked_solutions_end_in_the_answer_and_slips_do_not(name):
    task = opened(TaskSection(name=f"reasoning_gym:{name}"), heldout=8, limit=10_000)
    entries = [task.source.draw("worked", 0, i).entry for i in range(60)]
    clean = [task.worked(i)[1] for i in range(60)]
    wrong = [task.worked(i, slip_rate=1.0)[1] for i in range(60)]
    assert [text.split("#### ")[1] for text in clean] == [entry["answer"] for entry in entries]
    differ = [a.split("#### ")[1] != b.split("#### ")[1] for a, b in zip(clean, wrong, strict=True)]
    assert sum(differ) > 55  # a palindrome cannot be misspelled by a swap of equal letters


def test_bare_answers_only_where_asked_for():
    task = opened(TaskSection(name="reasoning_gym:basic_arithmetic"), heldout=8)
    with pytest.raises(ValueError, match="basic_arithmetic has no worked solutions .*chain_sum"):
        task.worked(0)
    prompt, answer = task.worked(0, answer_only=True)
    assert eval(re.search(r"Calculate (.*)\.", prompt)[1]) == int(answer)
