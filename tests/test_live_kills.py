"""A real SIGKILL of a run that trains on sessions with tools, whose agents go on with the next process."""

import random
import socket
import sys
from pathlib import Path

import pytest

from dora_jax.models import decoder
from dora_jax.runtime.journal.journal_audit import audit
from tests.fakes import hf_folder, tokenizer_folder
from tests.soak.agent_kills import Agents, faults_of, struck
from tests.soak.agent_training import TRAIN, trained

ROOT = Path(__file__).parents[1]
VOCAB = ["<eos>", *"abcde\n"]
TEMPLATE = (
    "{{ '\n' }}{% for tool in tools or [] %}a{% endfor %}"
    "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
)
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps, c.model.path, c.task.name = 4, {model!r}, "reasoning_gym:chain_sum"
    c.environment.max_turns, c.environment.turn_tokens = 2, 8
    c.rollout.slots, c.rollout.decode_steps, c.rollout.residents = 8, 4, 3
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 8, 56
    c.orchestrator.groups_per_step, c.orchestrator.group_size, c.orchestrator.inflight = 1, 4, 2.0
    c.trainer.pack_tokens, c.checkpoint.every, c.eval.every = 64, 2, 0
    c.journal.keep_all, c.journal.partial_s = True, 0.2
    return c
"""


@pytest.mark.slow
def test_each_reward_counts_once_and_nothing_is_lost_where_the_process_is_killed(tmp_path, monkeypatch):
    model = tmp_path / "model"
    sizes = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    hf_folder.folder(model, decoder.new_config("qwen3", vocab_size=len(VOCAB), **sizes))
    settings = {"eos_token": "<eos>", "pad_token": "<eos>", "chat_template": TEMPLATE}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_folder.folder(model, vocab=VOCAB, settings=settings, unknown="e")
    (tmp_path / "config.py").write_text(CONFIG.format(model=str(model)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DORA_COMPILE_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "dora_jax.train", f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"]
    command += [word.replace("{port}", str(port)) for word in TRAIN]
    agents = Agents(f"http://127.0.0.1:{port}", 8, 0)
    starts, code = struck(command, tmp_path / "console.log", agents, 1, 3, random.Random(0))
    assert code == 0, (tmp_path / "console.log").read_text()[-3000:]
    made, books = trained(tmp_path / "run"), audit(tmp_path / "run/journal")
    assert starts == 2 and books.ok and len(made) == 4 * 4
    assert not faults_of(made, agents)
