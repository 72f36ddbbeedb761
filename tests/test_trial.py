"""Rewards and environments on one real row before anything is compiled, what counts as solved, and prompts that are too
long."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dora_jax.config import ConfigError, EnvironmentSection, TaskSection
from dora_jax.tasks import solved
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.tasks.pool import ScorerPool
from dora_jax.tasks.solved import Solved
from dora_jax.tasks.trial import try_rewards
from dora_jax.types import Prompt, ScoredGroup
from tests.fakes.episode_player import Letters, prompt_of
from tests.fakes.tasks import SUMS, opened

ROOT = Path(__file__).resolve().parent.parent
MINE = """
import time

def terse(prompt, response, answer):
    return {"right": float(response.endswith(answer)), "short": -0.001 * len(response)}

def none(prompt, response, answer): pass
def text(prompt, response, answer): return "1.0"
def raises(prompt, response, answer): return response["boxed"]
def hangs(prompt, response, answer): time.sleep(60)
def inf(prompt, response, answer): return float("inf")
def huge(prompt, response, answer): return 1e300
def unless_empty(prompt, response, answer): return float(response.split()[-1] == answer)
def colour(response, answer, colour): return {"seen " + colour: 1.0}
def first(responses): return [{"first": float(i == 0)} for i, _ in enumerate(responses)]
async def later(response, colour): return {"later " + colour: 2.0}
async def fewer(responses): return [1.0]
def uneven(prompt, response, answer): return {"right": 1.0} if response else {"empty": 0.0}

class Room:
    terms, replays = ("right",), True
    async def reset(self, prompt): self.colour = prompt.row["colour"]; return []
    async def step(self, message): return [], True, {"right": float(message["content"] == "7")}
    async def close(self): open("closed", "a").write(self.colour + " ")

class NoReset(Room):
    async def reset(self, prompt): return prompt.answer["x"]
class NoStep(Room):
    async def step(self, message): return [], True, {"right": 1.0 / len(message["content"].split())}
class OddTerm(Room):
    async def step(self, message): return [], True, {"wrong": 1.0}
class NoMessage(Room):
    async def step(self, message): return ["ok"], False, {}
class Slow(Room):
    async def reset(self, prompt): await __import__("asyncio").sleep(60)
"""
EPISODES = EnvironmentSection(observation="<{content}>", retries=0, step_timeout_s=0.5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(*names, alone="", **section):
    section = TaskSection(rewards=tuple(f"mine.{name}" for name in names), reward_retries=0, **section)
    prompt = Prompt(
        group_id=0,
        task="t",
        uid="u",
        text="3 + 4 =",
        token_ids=np.zeros(1, np.int32),
        answer="7",
        max_new_tokens=9,
        row={"colour": "red"},
    )
    pool = ScorerPool(section, lambda ids: "".join(map(chr, ids)))
    try:
        return try_rewards(pool, prompt, lambda text: list(map(ord, text)), alone)
    finally:
        pool.close()


def test_a_reward_that_scores_its_row_tells_the_terms(folder):
    assert tried("terse") == ("right", "short") and tried("colour") == ("seen red",)
    assert tried("first", "later", "terse") == ("first", "later red", "right", "short")


@pytest.mark.parametrize(
    "name, reason",
    [
        (
            "raises",
            (
                r"reward raises raised TypeError: .* \(mine.py:9\) .*, tried on the response '7' "
                r"to the prompt '3 \+ 4 =' with the answer '7'"
            ),
        ),
        ("none", "reward none returned None, a NoneType, not a number"),
        ("text", "reward text returned '1.0', a str"),
        ("inf", "reward inf returned inf"),
        ("huge", r"reward huge returned a number beyond 1e\+15"),
        ("unless_empty", "reward unless_empty raised IndexError: .* tried on the response ''"),
        ("fewer", r"reward fewer returned no list with a value for each response \(2\): \[1.0\]"),
        ("uneven", r"rewards returned the terms \['right'\] for one sample and \['empty'\] for another"),
    ],
)
def test_a_reward_that_cannot_score_its_row_is_refused_with_the_row(folder, name, reason):
    with pytest.raises(ConfigError, match=f"^task.rewards: {reason}"):
        tried(name)


def test_a_reward_of_groups_is_refused_where_samples_are_scored_alone(folder):
    assert tried("terse", "later", alone="serving.train") == ("right", "short", "later red")
    with pytest.raises(ConfigError, match="task.rewards: fewer takes responses, .* with serving.train each session"):
        tried("terse", "fewer", alone="serving.train")


def test_a_reward_that_hangs_is_refused_after_its_deadline(folder):
    with pytest.raises(ConfigError, match="reward hangs took over 0.3 s .*'3 "):
        tried("hangs", reward_timeout_s=0.3)


def played(name):
    pool = EnvironmentPool(
        dataclasses.replace(EPISODES, name=f"mine.{name}"), Bridge(Letters(), EPISODES.observation), seed=0
    )
    prompt = dataclasses.replace(prompt_of(text="3 + 4 ="), row={"colour": "red"})
    try:
        pool.wait_ready()
        return pool.try_episodes(prompt, Letters().encode), pool.stats()["environment/turns"], pool.waiting
    finally:
        pool.close()


def test_an_environment_plays_two_episodes_of_its_row_that_leave_no_trace_in_the_metrics(folder):
    assert played("Room") == (("right",), 0, 0)
    assert (folder / "closed").read_text() == "red red "


@pytest.mark.parametrize(
    "name, reason",
    [
        (
            "NoReset",
            "raised TypeError: string indices must be integers, .* with the message '7' to the prompt '3 . 4 ='",
        ),
        ("NoStep", "raised ZeroDivisionError: .*, tried with the message ' '"),
        ("OddTerm", "the reward term 'wrong' is 1.0; terms are right, tried"),
        ("NoMessage", "its messages: "),
        ("Slow", "no answer within environment.step_timeout_s = 0.5 s, tried"),
    ],
)
def test_an_environment_that_cannot_play_is_refused_with_what_it_was_sent(folder, name, reason):
    with pytest.raises(ConfigError, match=f"^environment.name: mine.{name} {reason}"):
        played(name)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--config.task.rewards=('mine.none',)"], "task.rewards: reward none returned None"),
        (
            ["--config.environment.name=mine.NoReset"],
            "environment.name: mine.NoReset raised TypeError: string indices must be integers",
        ),
    ],
)
def test_it_comes_before_the_warm_start(folder, flags, reason):
    """From the command line: exit code 2, and nothing was made."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "dora_jax.train",
            f"--config={ROOT}/configs/quickstart.py:tiny",
            "--workdir=run",
            *flags,
            "--config.sft.out=base",
            "--config.model.path=base",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"error: {reason}" in done.stderr and "Traceback" not in done.stderr
    assert "\\x" not in done.stderr  # the response is text, although there is no tokenizer yet
    assert not (folder / "base").exists() and "step" not in done.stdout


# ---------------------------------------------------------------- what counts as solved


@pytest.mark.parametrize(
    "text, rule",
    [
        ("right", ("right", 1.0)),
        ("right >= 0.5", ("right", 0.5)),
        (" total>=-1e-3 ", ("total", -0.001)),
        ("my term >= 2", ("my term", 2.0)),
    ],
)
def test_a_rule_is_read(text, rule):
    assert dataclasses.astuple(solved.read(text)) == rule


@pytest.mark.parametrize("text", [">= 1", "right > 1", "right >=", "right >= one", "right >= 1.2.3", "right == 1", " "])
def test_a_rule_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="is not of the form TERM or TERM >= NUMBER"):
        solved.read(text)


def test_the_rule_of_a_run_is_about_a_term_of_its_reward():
    assert solved.among("", ("right", "short")) == Solved(term="right") and solved.among("", ()) is None
    assert str(solved.among("total >= 0.9", ("right", "short"))) == "total >= 0.9"
    with pytest.raises(ValueError, match="no term 'rigth'; it has right, short, and total is their sum"):
        solved.among("rigth", ("right", "short"))


def test_which_samples_count():
    parts = {"right": np.array([1, 1, 0], np.float32), "fluent": np.array([0.7, 0.2, 0.9], np.float32)}
    group = ScoredGroup(group_id=-1, version=0, samples=(), rewards=sum(parts.values()), parts=parts)
    assert Solved(term="right").of(group).tolist() == [True, True, False]
    assert Solved(term="fluent", least=0.7).of(group).tolist() == [True, False, True]  # 0.7 of float32 is below 0.7
    assert Solved(term="total", least=1.5).of(group).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="group -1 has no term 'short'; it has right, fluent"):
        Solved(term="short").of(group)


# ---------------------------------------------------------------- prompts over the length limit


def test_prompts_over_the_limit_are_reported_before_the_run():
    prompt, remarks = opened(limit=100).survey()
    assert prompt.group_id == 0 and remarks == []
    prompt, (training, heldout) = opened(limit=8).survey()
    assert len(prompt.token_ids) <= 8 and prompt.group_id > 0
    assert (
        "of the first 64 prompts of reasoning_gym:chain_sum are over rollout.max_prompt_tokens = 8 and are skipped "
        "(median " in training
    )
    assert heldout.endswith("of 64 held-out prompts are over rollout.max_prompt_tokens = 8 and are not evaluated")


def test_a_task_all_of_whose_prompts_are_too_long_is_refused():
    task = opened(dataclasses.replace(SUMS, template="{prompt}" + "x" * 50), heldout=0, limit=20)
    with pytest.raises(ConfigError, match="rollout.max_prompt_tokens: the first 64 prompts of .* the shortest has"):
        task.survey()
