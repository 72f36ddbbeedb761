"""Tasksets of verifiers, installed apart: its own training client plays, and a run trains what it scores."""

import contextlib
import dataclasses
import json
import os
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dora_jax.config import ConfigError, EnvironmentSection, RolloutSection
from dora_jax.models import decoder
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.tasks.environment import PolicyFacts
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded
from tests.fakes import hf_folder, remote_sandboxes, tokenizer_folder
from tests.fakes.episode_player import FIRST, Letters, Player, answers, prompt_of
from tests.fakes.pinned_environment import ROOT, python_of

STEPS = 16
TASKSETS = ROOT / "tests/data/verifiers"
VOCAB = ["<eos>", *"abcde\n"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
SIZES = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
SETTINGS = {"eos_token": "<eos>", "pad_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
AGENT_VOCAB = ["<eos>", "<tool_call>", "</tool_call>", *string.printable[:97]]
AGENT = (
    "{{ eos_token }}{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool_call>{% endfor %}'
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
)
NAME = "dora_jax.serving.verifiers.Verifiers"
LONELY = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # no network but loopback
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = {steps}
    c.task.name, c.task.path, c.task.template, c.task.heldout = "rows", {rows!r}, "chat", 8
    c.environment.name, c.environment.params = {name!r}, {params!r}
    c.environment.python = {python!r}
    c.environment.max_turns, c.environment.turn_tokens = 3, 6
    c.model.path = {model!r}
    c.rollout.slots, c.rollout.decode_steps, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 16, 1, 8, 24
    c.orchestrator.groups_per_step, c.orchestrator.group_size, c.orchestrator.inflight = 2, 8, 2.0
    c.trainer.pack_tokens, c.trainer.learning_rate, c.trainer.warmup_steps = 64, 0.03, 1
    c.eval.every, c.eval.prompts = 0, 8
    c.journal.keep_all = True
    return c
"""


def params_of(harness):
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    return {"env": {"taskset": {"id": "dora_letters"}, "agent": agent}, "renderer": {"name": "default"}}


@pytest.fixture(scope="module")
def python():
    return str(python_of("verifiers"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random policy of five letters, with a chat template."""
    path = tmp_path_factory.mktemp("model") / "model"
    hf_folder.folder(path, decoder.new_config("qwen3", vocab_size=len(VOCAB), **SIZES))
    return tokenizer_folder.folder(path, vocab=VOCAB, settings=SETTINGS | {"chat_template": TEMPLATE}, unknown="e")


@contextlib.contextmanager
def playing(model, text, answer, task="", context=32, turn_tokens=6, **section):
    """A player whose first episode is open."""
    section, tokenizer = EnvironmentSection(**section), Tokenizer.load(model)
    policy = PolicyFacts(
        path=str(model), context=context, vocab=tokenizer.vocab_size, turn_tokens=turn_tokens, stop_ids=(0,),
        rollout=dataclasses.asdict(RolloutSection()),
    )  # fmt: skip
    pool = EnvironmentPool(section, Bridge(tokenizer, section.observation), 0, policy)
    try:
        pool.wait_ready()
        prompt = prompt_of(text=text, answer=answer, encode=tokenizer.encode)
        prompt = dataclasses.replace(prompt, task=task or prompt.task)
        pool.open(FIRST, prompt)
        yield Player(pool, room=context, tokenizer=tokenizer, prompt=prompt)
    finally:
        pool.close()


def test_without_the_package_a_sentence_says_what_is_missing():
    section = EnvironmentSection(name=NAME, params=params_of("null"))
    pool = EnvironmentPool(section, Bridge(Letters(), section.observation), seed=0)
    try:
        with pytest.raises(ConfigError, match="environment.name: .*Verifiers: No module named 'verifiers'"):
            pool.wait_ready()
    finally:
        pool.close()


@pytest.mark.slow
def test_a_program_of_the_library_plays_an_episode(python, model, monkeypatch):
    """The null harness in the subprocess runtime: uv installs its program at the first use."""
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    monkeypatch.setenv("UV_SYSTEM_CERTS", "true")
    env = ("UV_SYSTEM_CERTS", "SSL_CERT_FILE")
    with playing(model, "bbb\n", 0, name=NAME, params=params_of("null"), python=python, env=env) as player:
        opening = player.answer()
        if getattr(opening, "reason", "").find("failed to prepare uv script") > 0:
            pytest.skip(opening.reason)
        assert player.observed(opening) == "", "the prompt of the run is the client's own"
        assert player.observed(player.ask("ab<eos>")) == "d\n"
        assert player.ask("aaaaaa") == EpisodeEnded(id=FIRST, terms={"reward": 7 / 8})


@pytest.mark.slow
def test_mini_swe_agent_plays_an_episode_in_a_container(python, tmp_path, monkeypatch):
    """The library's harness and the agent's own program (uv installs it at the first use); the container engine is
    faked at its command line."""
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    monkeypatch.setenv("UV_SYSTEM_CERTS", "true")
    state, box = tmp_path / "state", tmp_path / "box"
    remote_sandboxes.install(tmp_path / "bin", state)
    (state / "open").touch()
    box.mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(python).parent}:{os.environ['PATH']}")
    model = tmp_path / "model"
    hf_folder.folder(model, decoder.new_config("qwen3", vocab_size=len(AGENT_VOCAB), **SIZES))
    tokenizer_folder.folder(model, vocab=AGENT_VOCAB, settings=SETTINGS | {"chat_template": AGENT}, unknown="?")
    agent = {"harness": {"id": "mini_swe_agent"}, "runtime": {"type": "docker", "workdir": str(box), "image": "none"}}
    params = {"env": {"taskset": {"id": "dora_files"}, "agent": agent}}
    params["renderer"] = {"name": "default", "tool_parser": "qwen3"}
    how = {"context": 12_000, "turn_tokens": 500, "step_timeout_s": 300.0, "env": ("UV_SYSTEM_CERTS", "SSL_CERT_FILE")}
    with playing(model, "<eos>w\n", 0, name=NAME, params=params, python=python, **how) as player:
        opening = answers(player.pool, 1, timeout_s=300)[0]
        if getattr(opening, "reason", "").find("failed to prepare uv script") > 0:
            pytest.skip(opening.reason)
        assert opening.keep == 1, "the prompt of the row is another than the harness'"
        player.tokens = np.append(player.tokens[:1], opening.token_ids)
        player.mask = np.zeros(len(opening.token_ids), bool)
        assert "Please solve this issue: write bee to answer.txt" in player.tokenizer.decode(player.tokens)
        for command in ("echo bee > answer.txt; pwd", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"):
            call = json.dumps({"name": "bash", "arguments": {"command": command}})
            player.say(f"<tool_call>{call}</tool_call><eos>")
            ended = answers(player.pool, 1, timeout_s=300)[0]
            if command.startswith("echo bee"):
                assert str(box) in player.observed(ended)
        assert ended == EpisodeEnded(id=FIRST, terms={"reward": 1.0})
    calls = (state / "calls.txt").read_text()
    assert "--exit-immediately --yolo" in calls and "docker rm --force" in calls


@pytest.mark.slow
def test_of_a_taskset_without_an_end_tasks_are_made_as_they_are_asked_for(python, model, monkeypatch):
    """In a mix, with turns as long as the client says; its rows are printed from another folder."""
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    params = params_of("dora_letters")
    params["env"]["taskset"]["id"] = "dora_endless"
    program = [sys.executable, "-m", "dora_jax.serving.verifiers", f"--python={python}", json.dumps(params["env"])]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{TASKSETS}"}
    how = {"capture_output": True, "text": True, "env": variables, "cwd": "/"}
    assert subprocess.run([*program, "6"], check=True, **how).stdout.splitlines()[5] == '{"prompt": "c", "answer": 5}'
    refused = subprocess.run(program, check=False, **how)
    assert refused.returncode == 2 and "Endless has no end of tasks: give" in refused.stderr and not refused.stdout

    entry = {"name": NAME, "params": params | {"sampling": {"max_tokens": 3}}}
    name = "dora_jax.tasks.environments.by_task.ByTask"
    with playing(model, "d\n", 4_002, "endless", name=name, params={"endless": entry}, python=python) as player:
        opening = player.answer()
        assert opening.turn_tokens == 3 and player.observed(opening) == ""
        assert player.ask("ab<eos>") == EpisodeEnded(id=FIRST, terms={"reward": 2.0})


@pytest.mark.slow
def test_a_run_learns_a_taskset_with_no_network_but_loopback(python, model, tmp_path):
    if subprocess.run([*LONELY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no network namespace")
    rows = tmp_path / "tasks.jsonl"
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{TASKSETS}", "JAX_PLATFORMS": "cpu"}
    command = [python, "-m", "dora_jax.serving.verifiers", json.dumps(params_of("null")["env"])]
    rows.write_text(subprocess.run(command, env=variables, capture_output=True, check=True, text=True).stdout)
    params = params_of("dora_letters")
    made = CONFIG.format(steps=STEPS, rows=str(rows), name=NAME, params=params, python=python, model=str(model))
    (tmp_path / "config.py").write_text(made)
    command = [*LONELY, sys.executable, "-m", "dora_jax.train", "--config=config.py", "--workdir=run"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    log = EventLog(FileLogStore(tmp_path / "run/journal", read_only=True))
    found = replay(log, log.segments(), print)
    groups = [group for step in found.steps for group in step.groups]
    assert len(groups) == 2 * STEPS
    for sample in (sample for group in groups for sample in group.samples):
        assert len(sample.spans) == 1 and not sample.branches, "one version and one branch a trajectory"
        assert 1 <= (np.diff(np.append(False, sample.mask).astype(int)) == 1).sum() <= 2
        text = Tokenizer.load(model).decode(sample.out_ids[sample.mask])
        assert sample.terms["reward"] == pytest.approx(text.count("a") / max(1, len(text)))
    means = [float(np.mean([group.rewards for group in step.groups])) for step in found.steps]
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.2, means
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(record.get("versions/live", 0) for record in records) >= 2
