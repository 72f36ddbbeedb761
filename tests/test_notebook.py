"""The notebook of dora_jax/tasks/README.md runs, cell by cell, in an interpreter whose program is no file, as a kernel's is
not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import hf_folder, tokenizer_folder

ROOT = Path(__file__).resolve().parent.parent
SMALLER = """{"steps": 2, "rollout.max_new_tokens": 4, "rollout.max_prompt_tokens": 16, "rollout.slots": 8, "eval.prompts": 2,
    "orchestrator.groups_per_step": 2, "orchestrator.group_size": 2, "trainer.pack_tokens": 32}"""
KERNEL = """
import ast, json, pathlib, sys
names = globals()
for source in json.load(sys.stdin):
    magic, _, rest = source.partition("\\n")
    if magic.startswith("%%writefile "):
        pathlib.Path(magic.split()[1]).write_text(rest)
        continue
    *body, last = ast.parse(source).body
    try:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        shown = isinstance(last, ast.Expr)
        code = compile(ast.Expression(last.value) if shown else ast.Module([last], []), "cell", "eval" if shown else "exec")
        print("Out:", eval(code, names))
    except Exception as error:
        print("Error:", error)
"""


def cells():
    text = (ROOT / "dora_jax/tasks/README.md").read_text()
    page = text[text.index("## In a notebook") :]
    found = re.findall(r"^```python\n(.*?)^```$", page[: page.index("## A recipe")], re.MULTILINE | re.DOTALL)
    return [cell.replace('{"steps": 2, "rollout.max_new_tokens": 32}', SMALLER.replace("\n", "")) for cell in found]


@pytest.mark.slow
def test_the_notebook_runs_and_a_reward_of_a_cell_is_refused_with_what_to_do(tmp_path):
    model = hf_folder.folder(tmp_path / "runs/quickstart_hf")
    tokenizer_folder.folder(model, vocab=["<pad>", "<eos>", "<unk>", *"0123456789 +="])
    written, run, shown = cells()
    refused = written.partition("\n")[2] + run.replace("from my_rewards import right\n", "")
    outputs = json.dumps([refused, written, run, shown, "run"])
    command = [sys.executable, "-c", KERNEL]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, input=outputs, capture_output=True, text=True, check=False)
    printed = [line for line in done.stdout.splitlines() if line.startswith(("Out:", "Error:"))]
    assert "right is defined in a notebook or at a prompt" in printed[0] and "%%writefile my_rewards.py" in printed[0]
    assert printed[1] == "Out: None" and re.match(r"Out: \(array\(\[.*\]\), '", printed[2]), done.stdout + done.stderr
    assert (
        printed[3] == "Out: RunResult(exit_code=0, workdir='runs/notebook', 2 steps, 2 evaluations, checkpoints=(2,))"
    )
