"""Both generations of OpenAI's client, each in an environment of its own, against live servers."""

import subprocess
import sys

import pytest

from dora_jax.models import decoder
from tests.fakes import hf_folder
from tests.fakes.endpoint import Rig, Speaker
from tests.fakes.pinned_environment import ROOT, python_of

CLIENT = ROOT / "tests/fakes/openai_client.py"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=["openai2", "openai3"])
def ask(request):
    """ask(suite, url): runs a suite of openai_client.py with this generation of the library."""
    python = python_of(request.param)

    def ask(suite, url):
        done = subprocess.run([python, CLIENT, suite, url], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    return ask


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The base URL of `python -m dora_jax.serve` over a tiny model of bytes with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "model"
    sizes = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    hf_folder.folder(folder, decoder.new_config("qwen3", vocab_size=len(hf_folder.BYTES), **sizes))
    hf_folder.byte_tokenizer(folder, TEMPLATE)
    small = {"max_prompt_tokens": 32, "max_new_tokens": 32, "slots": 16, "decode_steps": 2}
    flags = [f"--model={folder}", "--port=0", *(f"--config.rollout.{name}={value}" for name, value in small.items())]
    command = [sys.executable, "-m", "dora_jax.serve", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert "is served at" in line, line
        yield line.split("is served at ")[1].partition("/v1")[0]
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0, "asked to stop, it ends in peace"


@pytest.mark.slow
def test_the_library_reads_every_answer(ask, served):
    ask("suite", served)


@pytest.mark.slow
def test_an_answer_outlives_the_client_s_time_out(ask):
    text = 'hm <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    rig = Rig(engine=Speaker(text, 1.5 / len(text)), pulse_s=0.1)
    with rig.live() as url:
        ask("patient", url)


@pytest.mark.slow
def test_a_client_that_gives_up_and_returns_is_answered_by_what_was_sampled_once(ask):
    engine = Speaker("x" * 60, 0.1)
    with Rig(engine=engine).live() as url:  # 1.2 s for an answer, and not a word before
        ask("hasty", url)
    assert engine.sampled_tokens == 12
