"""Frozen lakes: maps that can be walked, moves, worked ways, and a run of a few steps."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dora_jax.config import ConfigError
from dora_jax.tasks.environment import EpisodePrompt
from dora_jax.tasks.environments.frozen_lake import FrozenLake, Lakes
from tests.fakes.step_seconds import unaccounted

CONFIGS = Path(__file__).parents[1] / "configs"
LAKE = "_ _ O _\nP _ _ G\n_ _ O _"


def prompt(text=LAKE, seed=0):
    return EpisodePrompt(text=text, answer=text, seed=seed)


def walked(names, text=LAKE):
    """(the maps that are seen, the reward; None: it goes on)"""

    async def play():
        lake, seen = FrozenLake(), []
        assert await lake.reset(prompt(text)) == []
        for name in names:
            messages, done, terms = await lake.step({"role": "assistant", "content": name})
            if done:
                return seen, terms["reached"]
            seen.append(messages[0]["content"])
        return seen, None

    return asyncio.run(play())


def test_a_move_is_seen_on_the_map():
    assert walked(["up"])[0] == ["P _ O _\n_ _ _ G\n_ _ O _"]
    assert walked(["up", " right\n"])[0][1] == "_ P O _\n_ _ _ G\n_ _ O _"


@pytest.mark.parametrize("name", ["left", "", "north", LAKE])
def test_the_border_and_what_is_no_direction_cost_the_turn(name):
    assert walked([name]) == ([LAKE], None)


def test_the_goal_is_worth_one_and_a_hole_nothing():
    assert walked(["right", "right", "right"])[1] == 1.0
    assert walked(["right", "right", "up"])[1] == 0.0


def source(**params):
    return Lakes(**({"heldout": 64, "exclude": frozenset()} | params))


def test_every_lake_can_be_walked_in_the_moves_that_were_asked_for():
    lakes = source(size=4, shortest=3, longest=5)
    for i in range(50):
        row = lakes.draw("train", 0, i)
        names = FrozenLake.worked(prompt(row.answer), slips=False)
        assert 3 <= len(names) <= 5 and walked(names, row.answer)[1] == 1.0


def test_a_worked_way_with_a_slip_makes_one_false_move_and_may_end_in_a_hole():
    ends = []
    for i in range(200):
        row = source(heldout=1).draw("worked", 0, i)
        names = FrozenLake.worked(prompt(row.answer, seed=i), slips=True)
        clean = FrozenLake.worked(prompt(row.answer), slips=False)
        _, reached = walked(names, row.answer)
        assert names != clean and reached is not None and (reached == 0.0 or len(names) >= len(clean))
        ends.append(reached)
    assert 0.3 < sum(ends) / 200 < 0.95


def test_draws_are_pure_and_never_held_out():
    one, other = source(), source()
    assert [one.draw("train", 3, i) for i in range(99)] == [other.draw("train", 3, i) for i in range(99)]
    assert len(one.heldout_uids) == 64
    small = source(size=2, holes=0.0, shortest=1, heldout=6)
    assert not {small.draw("train", 0, i).uid for i in range(99)} & small.heldout_uids
    kept = small.draw("train", 0, 0).uid
    small.exclude({kept})
    assert kept not in {small.draw("train", 0, i).uid for i in range(99)}
    json.dumps(one.heldout[0].answer)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"size": 1}, "size 1, holes 0.25, ways of 2 to 6 moves make no lake"),
        ({"shortest": 7}, "ways of 7 to 6 moves make no lake"),
        ({"size": 2, "shortest": 4}, "of 10000 lakes of size 2 with holes 0.25 none has a way of 4 to 6 moves"),
        ({"size": 2, "heldout": 99}, "none has a way of 2 to 6 moves and is not held out"),
    ],
)
def test_lakes_that_cannot_be_are_refused(params, sentence):
    with pytest.raises(ConfigError, match=sentence):
        source(**params)


@pytest.mark.slow
def test_a_run_of_a_few_steps_is_trained_and_evaluated(tmp_path):
    base = f"--config.sft.out={tmp_path / 'base'}", f"--config.model.path={tmp_path / 'base'}"
    command = [sys.executable, "-m", "dora_jax.train", f"--config={CONFIGS / 'frozenlake.py'}:tiny", *base]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}"], cwd=CONFIGS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 3 and any("environment/turns" in row for row in rows)
    assert sum("eval/accuracy" in row for row in rows) == 2
    assert unaccounted(rows) < 0.03 and any("seconds/controller/environments" in row for row in rows)
