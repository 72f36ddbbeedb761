"""A real model, SmolLM2-135M-Instruct: its import, chat template, greedy tokens, a step of RL and the export.

The parts that it comes from are those of tests/requirements*.txt; where one is absent the tests skip, saying so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dora_jax import config as configs
from dora_jax.bench import harness
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import presets
from dora_jax.runtime.assembly import run as build
from dora_jax.types import SampleId

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(harness.missing()), reason=harness.missing() or "it is there")]
ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = [f"What is {a} + {b}?" for a, b in ((12, 34), (71, 9), (55, 55), (90, 17))]
NEW = 24
CLOSE = 1e-3  # log-prob: f32 sums of 30 layers in another order; measured over 1,536 tokens: 3.3e-5


def chat(tokenizer, question):
    return tokenizer.encode(tokenizer.chat([{"role": "user", "content": question}]))


def torch_model(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model, prompt):
    """(greedy tokens, their log-probs) of transformers."""
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(prompt) :]
        logprobs = torch.log_softmax(torch.stack(out.logits)[:, 0], -1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.numpy()


def test_greedy_answers_are_those_of_transformers():
    import jax
    import transformers

    folder = harness.smollm_folder()
    tokenizer = Tokenizer.load(folder)
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    rival = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, question in zip(prompts, QUESTIONS, strict=True):
        text = rival.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        assert prompt == rival(text, add_special_tokens=False)["input_ids"]

    config = configs.Config(
        model=configs.ModelSection(path=str(folder)),
        rollout=configs.RolloutSection(
            slots=4,
            pages=32,
            max_prompt_tokens=64,
            max_new_tokens=NEW,
            decode_steps=NEW,
            context_block=64,
            temperature=0.0,
            weights="published",  # float32 on both sides
        ),
    )
    cfg, params = hf.load(folder)
    engine = build.new_engine(presets.filled(config), tokenizer, cfg, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
    engine.load(0, jax.device_put(decoder.serving_layout(params), engine.param_shardings))
    for index, prompt in enumerate(prompts):
        engine.submit(SampleId(0, index), np.array(prompt, np.int32), 0, NEW)
    samples = {}
    while len(samples) < len(prompts):
        samples |= {sample.id.index: sample for sample in engine.tick().finished}
    model = torch_model(folder)
    for index, prompt in enumerate(prompts):
        tokens, logprobs = theirs(model, prompt)
        assert samples[index].out_ids.tolist() == tokens
        np.testing.assert_allclose(samples[index].logprobs, logprobs, rtol=0, atol=CLOSE)


def test_a_step_of_rl_and_its_export(tmp_path):
    """What `train` trains and `export_hf` writes, transformers reads: the same body, weights that have moved."""
    base = harness.smollm_folder()
    rows = tmp_path / "sums.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)}) + "\n" for a in range(10, 30)
        )
    )
    fields = {
        "model.path": base,
        "task.path": rows,
        "task.heldout": 2,
        "steps": 1,
        "eval.prompts": 2,
        "rollout.instances": 1,
        "rollout.slots": 4,
        "rollout.pages": 64,
        "rollout.max_prompt_tokens": 64,
        "rollout.max_new_tokens": 8,
        "rollout.context_block": 64,
        "orchestrator.groups_per_step": 1,
        "orchestrator.group_size": 4,
        "trainer.pack_tokens": 256,
        "trainer.micro_batches": 1,
        "trainer.warmup_steps": 0,
        "eval.every": 0,
    }
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": "",  # of a real size, what runs counts more than what compiles
        "PYTHONHASHSEED": "0",
    }

    def run(module, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, f"--workdir={tmp_path / 'run'}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    run("dora_jax.train", "--config=configs/rows.py:chat", *(f"--config.{k}={v}" for k, v in fields.items()))
    run("dora_jax.export_hf", f"--out={tmp_path / 'out'}")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["eval/accuracy"] >= 0 for r in records if "eval/accuracy" in r] == [True, True]
    before, after = (torch_model(path).state_dict() for path in (base, tmp_path / "out"))
    moved = [float((after[name] - weight).abs().max()) for name, weight in before.items()]
    assert before.keys() == after.keys() and max(moved) < 1e-4  # Adam: at most the learning rate, 1e-5
    tokens, _ = theirs(torch_model(tmp_path / "out"), chat(Tokenizer.load(tmp_path / "out"), QUESTIONS[0]))
    assert len(tokens) > 0
