"""Rewards that run a response: what passes, what only pretends to, and what is an error and no score."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dora_jax.config import EnvironmentSection
from dora_jax.tasks import code
from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.rewards import RewardError
from dora_jax.tasks.sandbox import programs
from dora_jax.types import EpisodeSoFar, Observed, SampleId
from tests.fakes.episode_player import Player, answers
from tests.fakes.reward_pool import decode, group, pools, scored
from tests.fakes.sandbox import needs_sandbox

DOUBLE = {"tests": [{"stdin": "4\n", "stdout": "8\n"}, {"stdin": "-1\n", "stdout": "-2"}]}
EXPECTED = "q7w3e5r1"  # an output that no program can guess
HIDDEN = {"tests": [{"stdin": "go\n", "stdout": EXPECTED}]}
HACKS = {
    "sys.exit(0)": "import sys; sys.exit(0)",
    "os._exit(0)": "import os; os._exit(0)",
    "atexit": "import atexit, os; atexit.register(lambda: os._exit(0)); raise SystemExit(1)",
    "a patched __eq__": """
class Same(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
import builtins, sys
builtins.str = Same
sys.stdout.write(Same("anything"))
""",
    "a patched assert": "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\nassert False",
    "conftest.py": "open('/tmp/conftest.py', 'w').write('import pytest\\ndef pytest_runtest_makereport(*_): return 1')",
    "sitecustomize": """
import os, sys
for folder in ("/tmp", sys.prefix, *sys.path):
    for name in ("sitecustomize.py", "usercustomize.py"):
        try: open(os.path.join(folder, name), "w").write("print('q7w' + '3e5r1')")
        except OSError: pass
""",
    "what an earlier run left": "import os; print(open('/tmp/left').read() if os.path.exists('/tmp/left') else open('/tmp/left', 'w').write('q7w3' + 'e5r1'))",
    "reading the tests": """
import os
for folder, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/usr", "/proc", "/dev")]
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file: text = file.read(10**5)
        except OSError: continue
        if b"q7w" + b"3e5r1" in text: print("q7w" + "3e5r1")
""",
    "reading the parent": """
for pid in (1, "self"):
    for name in ("cmdline", "environ", "mem"):
        try: text = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError: continue
        if b"q7w" + b"3e5r1" in text: print("q7w" + "3e5r1")
""",
    "the result file": """
import os
reply = b'{"stdout": "q7w' + b'3e5r1", "stderr": "", "exit_code": 0, "ended_by": "", "wall_s": 0.1}'
for fd in range(3, 1024):
    for text in (reply, b'{"exit-code": 0}'):
        try: os.write(fd, text)
        except OSError: pass
for name in ("result", "results.json", "reward.txt", "score"): open(f"/tmp/{name}", "w").write("1.0")
""",
    "the pass marker": "print('PASSED'); print('1 passed in 0.01s'); print('ok'); print(True); print('stdio 1.0')",
    "everything at once": "print(open('/dev/stdin').read()); import os; os.kill(1, 9); os.kill(os.getppid(), 9); os.killpg(0, 9)",
}


@needs_sandbox
def test_a_program_that_passes_every_test_is_rewarded():
    assert code.stdio("", "print(2 * int(input()))", DOUBLE) == 1.0
    assert (
        code.stdio(
            "",
            "Think.\n```python\nnonsense(\n```\nNo:\n```py\nprint(2 * int(input()), end=' \\n\\n')\n```\nDone.",
            DOUBLE,
        )
        == 1.0
    )
    assert code.stdio_share("", "print(2 * int(input()) or 1)", DOUBLE) == 1.0


@needs_sandbox
@pytest.mark.parametrize("fence", ["```python3", "```Python", "```PYTHON3"])
def test_a_block_may_be_named_otherwise_and_left_open(fence):
    assert code.stdio("", f"So:\n{fence}\nprint(2 * int(input()))\n```\nDone.", DOUBLE) == 1.0
    assert code.stdio("", f"So:\n{fence}\nprint(2 * int(input()))\n", DOUBLE) == 1.0


@needs_sandbox
def test_numbers_may_be_off_by_a_tolerance():
    third = {"tests": [{"stdin": "", "stdout": "x 0.333333\n"}]}
    assert code.stdio("", "print('x', 1 / 3)", third) == 0.0
    assert code.stdio("", "print('x', 1 / 3)", third | {"tolerance": 1e-5}) == 1.0
    for wrong in ("'x', 0.3334", "'y', 1 / 3", "'x', 1 / 3, 1", "'x'", "'x nan'"):
        assert code.stdio("", f"print({wrong})", third | {"tolerance": 1e-5}) == 0.0
    with pytest.raises(code.RewardError, match="tolerance 2 is no number from 0 to 1"):
        code.stdio("", "print(1)", third | {"tolerance": 2})


@needs_sandbox
def test_a_program_that_passes_some_tests_has_its_share():
    assert code.stdio("", "print(8)", DOUBLE) == 0.0
    assert code.stdio_share("", "print(8)", DOUBLE) == 0.5
    assert code.stdio_share("", "Let me think.", DOUBLE) == code.stdio_share("", "", DOUBLE) == 0.0
    assert code.stdio_share("", "print(2 * int(input())); exit(1)", DOUBLE) == 0.0


@needs_sandbox
@pytest.mark.slow
def test_the_time_is_for_all_tests_together():
    slow = {"tests": DOUBLE["tests"] * 20, "time_limit_s": 0.4}
    assert code.stdio_share("", "import time; print(8); time.sleep(60)", slow) == 0.0
    assert code.stdio_share("", "import time; time.sleep(0.3); print(2 * int(input()))", slow) <= 0.05


@needs_sandbox
@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_scores_nothing(hack):
    assert code.stdio("", HACKS[hack], HIDDEN) == 0.0
    if hack in ("sitecustomize", "what an earlier run left"):
        assert code.stdio("", HACKS[hack], HIDDEN) == 0.0


@pytest.mark.parametrize("answer", ["8", {"tests": []}, {"tests": [{"stdin": "4"}]}, {**DOUBLE, "time_limit_s": "1"}])
def test_an_answer_without_tests_is_an_error(answer):
    with pytest.raises(RewardError, match="stdio: "):
        code.stdio("", "print(8)", answer)


def test_what_the_machine_does_wrong_is_an_error_and_no_score(monkeypatch):
    def fails(*_):
        raise programs.SandboxError("fork: Resource temporarily unavailable")

    monkeypatch.setattr(programs, "run", fails)
    with pytest.raises(RewardError, match="stdio: the sandbox did not run the program: fork: Resource temporarily"):
        code.stdio("", "print(8)", DOUBLE)


@needs_sandbox
def test_reward_workers_run_programs_from_behind_their_own_sandbox():
    with pools() as open_pool:
        pool = open_pool("dora_jax.tasks.code.stdio", "dora_jax.tasks.code.stdio_share")
        right, half = "print(2 * int(input()))", "print(8)"
        assert scored(pool, right, half, "", answer=DOUBLE).rewards.tolist() == [2.0, 0.5, 0.0]
        failed = scored(pool, right, answer="8")
        assert isinstance(failed, GroupFailure) and "has no" in failed.reason


@needs_sandbox
@pytest.mark.slow
def test_a_reward_of_one_s_own_may_run_programs_if_the_config_says_so(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "from dora_jax.tasks.sandbox import programs\ndef says(prompt, response, answer): return "
        "float(programs.run(response).stdout)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pools() as open_pool:
        assert scored(open_pool("says", sandbox=True), "print(0.5)").rewards.tolist() == [0.5]


@needs_sandbox
def test_the_tool_tells_a_model_what_its_program_did():
    assert code.python_tool("print(6 * 7)") == "42\n"
    assert code.python_tool("print(input())", "in") == "in\n"
    outputs = code.python_tool("print('a'); 1 / 0")
    assert outputs.startswith("a\nTraceback") and outputs.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert code.python_tool("while True: pass", limits=programs.Limits(wall_s=0.2)) == "[ended at its limit of time]"
    long = code.python_tool("print('x' * 10**5)")
    assert len(long) < 5000 and f"[{10**5 + 1 - code.REPORTED_CHARS} characters left out]" in long


# ---------------------------------------------------------------- an environment


def episode(*messages, answer="42"):
    async def played():
        tool, outputs = code.PythonTool(), []
        await tool.reset(EpisodePrompt(text="", answer=answer, seed=0))
        for message in messages:
            outputs.append(await tool.step({"role": "assistant", "content": message}))
        return outputs

    return asyncio.run(played())


@needs_sandbox
def test_the_tool_is_an_environment():
    outputs = episode("Let me see.\n```python\nprint(6 * 7)\n```", "So it is\n42\n")
    assert outputs == [([{"role": "tool", "content": "42\n"}], False, {}), ([], True, {"right": 1.0})]
    assert episode("41") == episode("") == [([], True, {"right": 0.0})]


def test_an_environment_whose_program_the_machine_cannot_run_fails_and_may_be_tried_again(monkeypatch):
    def fails(*_):
        raise programs.SandboxError("fork: Resource temporarily unavailable")

    monkeypatch.setattr(programs, "run", fails)
    with pytest.raises(EnvironmentError, match="the sandbox did not run the program: fork") as caught:
        episode("```python\n1\n```")
    assert caught.value.retryable


class Characters:
    """A tokenizer for the bridge."""

    decode = staticmethod(lambda ids, *, keep_special=False: decode(ids))

    def encode(self, text):
        return [ord(c) for c in text]

    encode_text = encode


@needs_sandbox
@pytest.mark.slow
def test_environment_workers_run_programs_from_behind_their_own_sandbox():
    section = EnvironmentSection(name="dora_jax.tasks.code.PythonTool")
    pool = EnvironmentPool(section, Bridge(Characters(), section.observation), seed=0)
    try:
        assert pool.wait_ready() == ("right",)
        (prompt, _), id = group("x"), SampleId(0, 0)
        reported = np.array([ord(c) for c in "```python\nprint(6 * 7)\n```"], np.int32)
        mask, logprobs = np.ones(len(reported), bool), np.zeros(len(reported), np.float32)
        tokens = np.append(prompt.token_ids, reported)
        pool.turn(prompt, EpisodeSoFar(id=id, version=0, tokens=tokens, mask=mask, logprobs=logprobs, room=1000))
        while not (answers := pool.poll()):
            time.sleep(0.01)
        assert isinstance(answers[0], Observed) and "42" in decode(answers[0].token_ids)
    finally:
        pool.close()


@needs_sandbox
@pytest.mark.slow
def test_programs_wait_for_each_other_outside_the_deadline_of_a_step():
    section = EnvironmentSection(name="dora_jax.tasks.code.PythonTool", step_timeout_s=1.5)
    pool = EnvironmentPool(section, Bridge(Characters(), section.observation), seed=0)
    try:
        pool.wait_ready()
        program = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nprint(42)"
        for i in range(24):
            Player(pool, SampleId(i, 0), tokenizer=Characters()).say(f"```python\n{program}\n```")
        found = answers(pool, 24)
        assert all(isinstance(answer, Observed) and "42" in decode(answer.token_ids) for answer in found)
    finally:
        pool.close()


# ---------------------------------------------------------------- a run

CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = 2
    c.task.name, c.task.path, c.task.heldout = "rows", "programs.jsonl", 2
    c.task.rewards = ("dora_jax.tasks.code.stdio",)
    c.sft.rows, c.sft.out, c.model.path = "programs.jsonl", "base", "base"
    c.sft.steps, c.sft.batch_rows, c.sft.learning_rate, c.sft.warmup_steps = 60, 8, 1e-2, 5
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 32, 1, 64
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 2, 1, 16
    c.rollout.slots, c.rollout.pages, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 8, 128, 64, 24
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
    c.trainer.pack_tokens = 160
    c.eval.prompts = 2
    return c
"""


def train(folder):
    return subprocess.run(
        [sys.executable, "-m", "dora_jax.train", "--config=c.py", "--workdir=run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_sandbox
@pytest.mark.slow
def test_a_run_is_trained_by_programs_that_pass_their_tests(tmp_path):
    (tmp_path / "c.py").write_text(CONFIG)
    rows = [
        {
            "prompt": f"Print {n} times the number that you read.\n",
            "answer": {"tests": [{"stdin": f"{i}\n", "stdout": f"{n * i}\n"} for i in (3, -4)]},
            "completion": f"print({n}*int(input()))",
        }
        for n in range(2, 10)
    ]
    (tmp_path / "programs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/term/stdio"] for row in steps if "reward/term/stdio" in row]
    assert len(rewards) == 2 and max(rewards) > 0.0
    assert all(row.get("rewards/failed_share", 0.0) == 0.0 for row in steps)
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    assert {event["name"] for event in trace if event["ph"] == "X" and event["pid"] == 1} == {"v1", "v2"}  # the trainer
