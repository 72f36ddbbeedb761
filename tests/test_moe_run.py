"""A small mixture of experts from its config down: warm start, decoding, rewards, updates, publication."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = 3
    c.task.name, c.task.template = "reasoning_gym:chain_sum", "{{prompt}} "
    c.sft.out = c.model.path = {base!r}
    c.sft.family = "qwen3_moe"
    c.sft.experts, c.sft.experts_per_token, c.sft.expert_width = 4, 2, 16
    c.sft.dense_layers = 1
    c.sft.steps, c.sft.examples, c.sft.batch_rows = 10, 64, 8
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 16, 2, 32
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 2, 1, 8
    c.rollout.slots, c.rollout.pages, c.rollout.max_new_tokens = 8, 128, 32
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
    c.trainer.pack_tokens = 160
    c.trainer.load_balance_coef = 0.01
    c.eval.prompts = c.task.heldout = 8
    return c
"""


@pytest.mark.slow
def test_a_mixture_runs_from_its_config_down(tmp_path):
    (tmp_path / "c.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    arguments = ["-m", "dora_jax.train", "--config=c.py", "--workdir=run"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads((tmp_path / "base" / "config.json").read_text())
    assert written["model_type"] == "qwen3_moe" and written["num_experts"] == 4 and written["mlp_only_layers"] == [0]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "moe/load_max" in record]
    assert len(steps) == 3
    assert all(step["moe/dropped_share"] == 0 and step["moe/load_max"] >= 1 for step in steps)
    gaps = [step["mismatch/max"] for step in steps if "mismatch/max" in step]
    assert gaps and max(gaps) < 1e-4  # the engine's log-probs are the trainer's, token by token
