"""The shipped rewards, how a path becomes a callable, and what counts as a value."""

import functools
import math
import time

import pytest
import reasoning_gym

from dora_jax import tasks
from dora_jax.tasks import datasets, rewards
from dora_jax.tasks.rewards import RewardError


def refused(*paths):
    with pytest.raises(RewardError) as error:
        rewards.resolve(paths)
    return str(error.value)


def total(of_rewards, prompt="", response="", answer="1", row=rewards.NO_COLUMNS, weights=()):
    """(terms, reward) of one response."""
    (scored,) = rewards.finished(rewards.score(of_rewards, prompt, [response], answer, row))
    return rewards.summed(scored, weights)


def score(reward, response="", answer="1"):
    return total({"mine": reward}, "", response, answer)[0]


# ---------------------------------------------------------------- exact, numeric, regex


def test_exact_ignores_only_white_space_at_the_ends():
    assert rewards.exact("", " 42\n", "42") == 1.0
    assert rewards.exact("", "42", 42) == 1.0
    assert rewards.exact("", "4 2", "42") == rewards.exact("", "42.", "42") == rewards.exact("", "", "42") == 0.0


@pytest.mark.parametrize(
    "response, answer",
    [
        ("42", "42"),
        ("the answer is 42.", "42"),
        ("7 and then 42", "42"),
        ("1,234,567", "1234567"),
        ("$1,234.50", "1234.5"),
        ("-5", "-5"),
        ("x = -5", -5),
        ("\N{MINUS SIGN}5", "-5"),
        ("7-5", "5"),
        ("(3)-5", "5"),
        ("7 - 5", "5"),
        ("+3", 3),
        ("1/2", "0.5"),
        ("3 / 4", "0.75"),
        ("\\frac{1}{2}", "0.5"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("0.333333333", "1/3"),
        ("50%", "0.5"),
        ("50 %", "50"),
        ("0.5", "50%"),
        ("50\\%", "50%"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("2.5e-1", "1/4"),
        ("5.", "5"),
        ("#### 12", "12"),
        ("1,2,3", "3"),
        ("007", "7"),
        ("-0", "0"),
    ],
)
def test_numeric_reads_numbers_as_people_write_them(response, answer):
    assert rewards.numeric("", response, answer) == 1.0


@pytest.mark.parametrize(
    "response, answer",
    [
        ("", "42"),
        ("none", "42"),
        ("42 or 43", "42"),
        ("5", "-5"),
        ("0.33", "1/3"),
        ("50%", "0.5%"),
        ("1/0", "0"),
        ("H2", "2"),
        ("1e99999999", "1"),
        ("9" * 5000, "9"),
        ("1" + ",111" * 30_000 + ",", "1"),
        ("inf", "1"),
        ("1.000002", "1"),
    ],
)
def test_numeric_gives_nothing_for_the_rest_and_never_raises_on_a_response(response, answer):
    began_s = time.thread_time()
    assert rewards.numeric("", response, answer) == 0.0
    assert time.thread_time() - began_s < 2.0  # no pattern that backtracks for ever


def test_an_answer_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(RewardError, match="numeric: the answer 'blue' is not a number"):
        rewards.numeric("", "7", "blue")


def test_regex_searches_for_the_answer():
    assert rewards.regex("", "the colour is Blue.", r"(?i)\bblue\b") == 1.0
    assert rewards.regex("", "bluebird", r"\bblue\b") == 0.0
    with pytest.raises(RewardError, match="reward regex raised .*unterminated"):
        total({"regex": rewards.regex}, "", "a", "(")


# ---------------------------------------------------------------- reasoning_gym, math_verify


def item(name, index=3, **params):
    entry = datasets.open_dataset(name, params).entry(index)
    return {"reasoning_gym": name, "params": params, "index": index, "answer": entry["answer"]}


def test_a_dataset_scores_its_own_items():
    sums = item("chain_sum", min_terms=2, max_terms=2)
    assert rewards.reasoning_gym("", sums["answer"], sums) == 1.0
    assert rewards.reasoning_gym("", sums["answer"] + ".0", sums) == 1.0  # its tolerance, not ours
    assert rewards.reasoning_gym("", "", sums) == 0.0
    with pytest.raises(RewardError, match="is no item of task.name"):
        rewards.reasoning_gym("", "3", "3")


def test_a_dataset_s_scorer_that_cannot_read_a_response_gives_nothing():
    factors = item("prime_factorization")
    with pytest.raises(ValueError):  # what the library does with such a response
        library = reasoning_gym.create_dataset("prime_factorization")
        library.score_answer("abc", entry=library[3])
    assert rewards.reasoning_gym("", "abc", factors) == 0.0
    assert rewards.reasoning_gym("", factors["answer"], factors) == 1.0


def test_a_scorer_that_fails_on_its_own_answer_is_an_error(monkeypatch):
    factors = item("prime_factorization")

    def broken(self, response, index, entry):
        raise ValueError("broken")

    monkeypatch.setattr(datasets.Dataset, "score", broken)
    with pytest.raises(ValueError, match="broken"):
        rewards.reasoning_gym("", "abc", factors)


def test_other_rewards_see_the_plain_answer_of_an_item():
    sums = item("chain_sum")
    terms = rewards.resolve([tasks.GYM_REWARD, "dora_jax.tasks.rewards.exact"])
    assert total(terms, "", sums["answer"], sums)[0] == {"reasoning_gym": 1.0, "exact": 1.0}


@pytest.mark.parametrize(
    "response, answer, expected",
    [
        ("0.5", "1/2", 1.0),
        ("$\\frac{1}{2}$", "0.5", 1.0),
        ("so \\boxed{(1,2)}", "(1,2)", 1.0),
        ("$x^2+2x+1$", "(x+1)^2", 1.0),
        ("$\\sqrt{8}$", "2\\sqrt{2}", 1.0),
        ("7", "8", 0.0),
        ("no idea", "8", 0.0),
        ("", "8", 0.0),
        ("$)(($", "x", 0.0),
    ],
)
def test_math_verify_compares_mathematics(response, answer, expected):
    assert rewards.math_verify("", response, answer) == expected


def test_math_verify_does_not_load_the_library_for_plain_numbers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)  # importing it would raise
    assert rewards.math_verify("", " 1,000 ", "1000") == 1.0
    with pytest.raises(ImportError):
        rewards.math_verify("", "x", "y")


def test_math_verify_refuses_an_answer_it_cannot_read():
    with pytest.raises(RewardError, match="math_verify: the answer"):
        rewards.math_verify("", "5", "")


# ---------------------------------------------------------------- paths


def test_each_way_a_path_can_be_wrong_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('boom')")
    (tmp_path / "my_needs.py").write_text("import not_installed_anywhere")
    assert refused("no_such.thing") == "task.rewards: no_such.thing: there is no module no_such"
    assert refused("dora_jax.tasks.rewards.exat") == (
        "task.rewards: dora_jax.tasks.rewards.exat: dora_jax.tasks.rewards has no exat; the nearest is exact"
    )
    assert refused("math.pi") == "task.rewards: math.pi is a float, not a callable"
    assert refused("my_broken.f") == "task.rewards: my_broken.f: importing my_broken raised RuntimeError: boom"
    assert refused("my_needs.f") == (
        "task.rewards: my_needs.f: my_needs imports not_installed_anywhere, which is not there"
    )
    assert "names one reward twice" in refused("math.sqrt", "math.sqrt")


def test_terms_are_named_by_the_last_word_unless_two_share_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_terms.py").write_text("def exact(p, r, a): return 0.5")
    ours = "dora_jax.tasks.rewards.exact"
    assert list(rewards.resolve([ours, "dora_jax.tasks.rewards.regex"])) == ["exact", "regex"]
    assert list(rewards.resolve([ours, "my_terms.exact"])) == [ours, "my_terms.exact"]


# ---------------------------------------------------------------- values


def test_terms_of_all_rewards_come_together():
    both = {"style": lambda p, r, a: {"short": True, "polite": 0.25}, "right": lambda p, r, a: 1}
    terms = {"short": 1.0, "polite": 0.25, "right": 1.0}
    assert total(both, "p", "r", "a") == (terms, 2.25)
    assert total(both, "p", "r", "a", {}, [2.0, -0.5]) == (terms, 2.0)
    with pytest.raises(RewardError, match="two rewards return a term 'right'"):
        total({"a": lambda p, r, a: {"right": 1}, "right": lambda p, r, a: 1}, "", "", "")


@pytest.mark.parametrize(
    "value, reason",
    [
        ("1.0", "reward mine returned '1.0', a str, not a number"),
        (None, "reward mine returned None, a NoneType"),
        (math.nan, "reward mine returned nan"),
        (-math.inf, "reward mine returned -inf"),
        (1e300, "reward mine returned a number beyond 1e+15"),
        (-(10**400), "reward mine returned a number beyond 1e+15"),
        ({}, "returned no terms"),
        ({"a": "x"}, "reward mine, term 'a', returned 'x', a str"),
        ([1.0], "a list, not a number"),
        (1j, "a complex"),
        ({"a": 1.0, "b": math.nan}, "reward mine, term 'b', returned nan"),
    ],
)
def test_anything_but_a_finite_number_is_an_error_with_the_reward_s_name(value, reason):
    with pytest.raises(RewardError) as error:
        score(lambda p, r, a: value)
    assert reason in str(error.value)


def test_numpy_scalars_are_numbers():
    import numpy as np

    assert score(lambda p, r, a: np.float32(0.5)) == {"mine": 0.5}
    assert score(lambda p, r, a: np.int64(2)) == {"mine": 2.0}


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(0), KeyboardInterrupt(), MemoryError("bad")])
def test_whatever_a_reward_raises_carries_its_name_and_place(error):
    def mine(prompt, response, answer):
        raise error

    with pytest.raises(RewardError, match=rf"reward mine raised {type(error).__name__}: .*\(test_rewards.py:\d+\)"):
        score(mine)


ROW = {"level": "hard", "tests": [1, 2], "prompt": "as it stands in the file"}


def named(response, level, *, tests, missing=None, prompt):
    return {f"{response} {level} {tests} {missing} {prompt}": 1.0}


class Judge:
    def __call__(self, prompt, response, answer, level="easy"):
        return {f"{response} {answer} {level}": 1.0}


@pytest.mark.parametrize(
    "reward, seen",
    [
        (named, "r hard [1, 2] None p"),
        (Judge(), "r a hard"),
        (functools.partial(Judge(), level="given"), "r a hard"),
        (lambda p, r, a: {f"{p} {r} {a}": 1.0}, "p r a"),
        (lambda p, r, a, level, other=0: {f"{p} {r} {a} {level} {other}": 1.0}, "p r a hard 0"),
        (lambda *given: {" ".join(given): 1.0}, "p r a"),
        (lambda *given, level: {" ".join(given) + level: 1.0}, "p r ahard"),
        (lambda **row: {" ".join(sorted(row)): 1.0}, "answer level prompt response tests"),
        (lambda response, **row: {f"{response} {sorted(row)}": 1.0}, "r ['answer', 'level', 'prompt', 'tests']"),
    ],
)
def test_a_parameter_gets_what_has_its_name(reward, seen):
    assert list(total({"mine": reward}, "p", "r", "a", ROW)[0]) == [seen]


@pytest.mark.parametrize(
    "reward, reason",
    [
        (lambda response, levle: 1.0, "reward mine takes 'levle', and its row has level, tests, prompt, response$"),
        (lambda prompt, response, answer: 1.0, "takes 'answer', .* .task.answer_column names the column"),
        (lambda p, r, a: 1.0, "takes 'answer', .* .task.answer_column names the column"),
    ],
)
def test_a_parameter_that_nothing_fills_is_named(reward, reason):
    with pytest.raises(RewardError, match=reason):
        total({"mine": reward}, "p", "r", None, ROW)
    assert total({"mine": lambda response, level: 1.0}, "p", "r", None, ROW)[1] == 1.0
