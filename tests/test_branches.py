"""environment.branches by default: as many as the chat template of the model makes, and a batch that holds them."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import pytest

from dora_jax.config.files import load_file
from dora_jax.models import decoder
from dora_jax.plan.validate import from_config_dict
from dora_jax.runtime.assembly.run import batch_layout
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.runtime.local_backend import RunContext
from tests.fakes import dialogues, hf_folder
from tests.fakes.pinned_environment import ROOT

WHOLE = """{%- for m in messages -%}
{{- "<|im_start|>" + m.role + "\\n" + (m.content CUT) + "<|im_end|>\\n" -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""
SHORTENS = WHOLE.replace("CUT", 'if loop.last or m.role != "assistant" else m.content[:1]')  # at any next message
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = 2
    c.task.name, c.task.path, c.task.template, c.task.heldout = "rows", "rows.jsonl", "chat", 4
    c.environment.name, c.environment.max_turns = "tests.fakes.environments.Obedient", 3
    c.environment.turn_tokens, c.environment.params = 8, {}
    c.model.path = "model"
    c.rollout.slots, c.rollout.decode_steps, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 16, 1, 32, 96
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
    c.trainer.pack_tokens, c.eval.every, c.eval.prompts = 128, 0, 4
    c.journal.keep_all = True
    return c
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    rows = [json.dumps({"prompt": [{"role": "user", "content": f"{i}"}], "answer": "1"}) for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "config.py").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("template", "changes", "branches"),
    [
        (dialogues.TEMPLATE, {}, 2),  # drops what was thought before a user's message
        (SHORTENS, {}, 2),
        (WHOLE.replace("CUT", ""), {}, -1),
        (dialogues.TEMPLATE, {"branches": 1}, 1),
        (dialogues.TEMPLATE, {"max_turns": 1}, -1),
    ],
)
def test_a_run_begins_with_as_many_branches_as_its_template_makes(folder, template, changes, branches):
    hf_folder.byte_tokenizer(folder / "model", template)
    asked = from_config_dict(load_file("config.py"))
    asked = dataclasses.replace(asked, environment=dataclasses.replace(asked.environment, **changes))
    parts = RunContext(asked, folder)
    with contextlib.closing(parts.environments), contextlib.closing(parts.scorer):
        made = parts.config
    assert made.environment.branches == branches
    without, shape = batch_layout(asked, 1), batch_layout(made, 1)
    open_ones = branches if "branches" not in changes else 0
    factor = 1 + max(open_ones, 0)
    assert (shape.rows, shape.micro_batches) == (factor * without.rows, factor * without.micro_batches)
    assert any("environment.branches=" in remark for remark in parts.remarks) == (factor > 1)


@pytest.mark.slow
def test_a_run_whose_template_rewrites_trains_branches_and_cuts_no_episode(folder):
    sizes = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    hf_folder.folder(folder / "model", decoder.new_config("qwen3", vocab_size=len(hf_folder.BYTES), **sizes))
    hf_folder.byte_tokenizer(folder / "model", SHORTENS)
    command = [sys.executable, "-m", "dora_jax.train", "--config=config.py", "--workdir=run"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "environment.branches=2: the chat template rewrites earlier turns" in done.stdout
    log = EventLog(FileLogStore(folder / "run/journal", read_only=True))
    groups = [group for step in replay(log, log.segments(), print).steps for group in step.groups]
    branches = {len(sample.branches) for group in groups for sample in group.samples}
    assert len(groups) == 4 and 2 in branches and max(branches) == 2
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert not any(row.get("environment/cut_share") for row in rows)
