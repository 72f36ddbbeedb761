"""An environment, or rewards, for each task of a mix, from the configuration down."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dora_jax import tasks
from dora_jax.config import ConfigError
from dora_jax.config.files import load_file
from dora_jax.models import decoder
from dora_jax.plan.validate import from_config_dict
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded, EpisodeFailed, SampleId, cycle_of, issued_first_as
from tests.fakes import hf_folder, tokenizer_folder
from tests.fakes.episode_player import LETTERS, Player
from tests.fakes.pinned_environment import ROOT

VOCAB = ["<eos>", *"0123456789+-*#= \n>?<ab"]
SETTINGS = {"eos_token": "<eos>", "pad_token": "<eos>"}
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = 2
    c.task.mix.sums = {{"name": "rows", "path": "sums.jsonl", "weight": 2}}
    c.task.mix.riddles = {{"name": "rows", "path": "riddles.jsonl"}}
    c.task.template, c.task.heldout, c.model.path = "{{prompt}}\\n", 4, {model!r}
    c.environment.name = "dora_jax.tasks.environments.by_task.ByTask"
    c.environment.params = {{
        "sums": {{"name": "dora_jax.tasks.environments.calculator.Calculator"}},
        "riddles": {{"rewards": ["dora_jax.tasks.rewards.exact"]}},
    }}
    c.environment.observation, c.environment.max_turns, c.environment.turn_tokens = "-> {{content}}\\n", 2, 4
    c.rollout.slots, c.rollout.decode_steps, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 16, 1, 8, 16
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 3, 4
    c.trainer.pack_tokens, c.eval.every, c.eval.prompts = 64, 0, 4
    c.trainer.row_splits = 2  # samples of 24 tokens at most fit into short rows of 32
    c.journal.keep_all = True
    return c
"""


@pytest.fixture
def folder(tmp_path):
    rows = {"sums": [("1 + 1", "2"), ("2 + 3", "5")], "riddles": [("a", "7"), ("b", "8")]}
    for name, pairs in rows.items():
        lines = [json.dumps({"prompt": f"{prompt}{i}", "answer": answer}) for i in range(5) for prompt, answer in pairs]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "config.py").write_text(CONFIG.format(model=str(tmp_path / "model")))
    return tmp_path


def opened(folder, params=None):
    tree = load_file(str(folder / "config.py"))
    if params:
        tree.environment.params = params
    made = from_config_dict(tree)
    return made, EnvironmentPool(made.environment, Bridge(LETTERS, made.environment.observation), made.seed)


def test_each_task_meets_its_own_environment_and_its_own_rewards(folder, monkeypatch):
    monkeypatch.chdir(folder)
    made, pool = opened(folder)
    limits = dict(max_prompt_tokens=8, max_new_tokens=16, heldout=4, quarantine_path=folder / "bad.jsonl")
    task = tasks.open_task(made.task, LETTERS, seed=0, **limits)
    try:
        assert pool.wait_ready() == ("exact", "right")
        seen = []
        for group in (0, 1, 2, -1, -2):
            prompt = task.prompt_at(group)
            seen.append(prompt.task)
            player = Player(pool, SampleId(group, 0), prompt=prompt)
            if prompt.task == "sums":
                assert player.observed(player.ask("3 * 3")) == "-> 9\n"
                ended = player.ask(f"#### {prompt.answer}")
            else:
                ended = player.ask(prompt.answer)
            assert ended == EpisodeEnded(id=player.id, terms={"right" if prompt.task == "sums" else "exact": 1.0})
        assert sorted(seen[:3]) == ["riddles", "sums", "sums"] and sorted(seen[3:]) == ["riddles", "sums"]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"sums": {"params": {}}}, "environment.params.sums: it takes name and params, or rewards and terms"),
        ({"sums": {"rewards": ["tests.fakes.nothing.f"]}}, "tests.fakes.nothing"),
        ({"sums": {"rewards": ["tests.fakes.tasks.together"]}}, "the reward together takes responses, all of a prompt"),
    ],
)
def test_what_no_task_can_meet_is_refused(folder, params, sentence):
    _, pool = opened(folder, params)
    try:
        with pytest.raises(ConfigError, match=sentence):
            pool.wait_ready()
    finally:
        pool.close()


def test_a_task_without_an_environment_fails_its_groups_and_says_why(folder, monkeypatch):
    monkeypatch.chdir(folder)
    _, pool = opened(folder, {"games": {"name": "dora_jax.tasks.environments.calculator.Calculator"}})
    try:
        pool.wait_ready()
        answer = Player(pool).ask("1 + 1")
        assert isinstance(answer, EpisodeFailed) and "the task 't' is none of games" in answer.reason
    finally:
        pool.close()


@pytest.mark.slow
def test_a_run_trains_each_task_on_its_own_terms_at_the_shares_asked(folder):
    sizes = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    hf_folder.folder(folder / "model", decoder.new_config("qwen3", vocab_size=len(VOCAB), **sizes))
    tokenizer_folder.folder(folder / "model", vocab=VOCAB, settings=SETTINGS, unknown="?")
    command = [sys.executable, "-m", "dora_jax.train", "--config=config.py", "--workdir=run"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = EventLog(FileLogStore(folder / "run/journal", read_only=True))
    groups = [group for step in replay(log, log.segments(), print).steps for group in step.groups]
    cycle = cycle_of({"sums": 2, "riddles": 1})
    ids = [group.group_id for group in groups if cycle[issued_first_as(group.group_id) % 3] == "riddles"]
    assert len(groups) == 6 and 1 <= len(ids) <= 3
    for group in groups:
        turns = [int((np.diff(np.append(False, s.mask).astype(int)) == 1).sum()) for s in group.samples]
        assert not group.parts["right" if group.group_id in ids else "exact"].any()
        assert group.group_id not in ids or set(turns) == {1}
