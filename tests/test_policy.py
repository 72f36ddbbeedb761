"""A policy in memory: what it generates is what its weights say, worded as the run's configuration says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import Config, RolloutSection, TaskSection
from dora_jax.models import decoder
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import presets
from dora_jax.runtime.policy import Policy
from tests.fakes import hf_folder, tokenizer_folder

pytestmark = pytest.mark.slow  # it compiles an engine

ROLLOUT = RolloutSection(slots=4, pages=32, page_size=4, max_prompt_tokens=16, max_new_tokens=8, prefill_tokens=16,
                         prefill_chunk=8, context_block=24, decode_steps=2)  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = hf_folder.folder(tmp_path_factory.mktemp("policy") / "model")
    tokenizer_folder.folder(path)
    run = Config(rollout=ROLLOUT, task=TaskSection(template="a{prompt}"), cpu_devices=0)
    run = presets.filled(dataclasses.replace(run, model=dataclasses.replace(run.model, path=str(path))))
    params = jax.tree.map(lambda x: jnp.asarray(x) * 0.3, hf_folder.draw(hf_folder.QWEN3))
    return Policy(run, hf_folder.QWEN3, params, Tokenizer.load(path), 5)


def of_a_forward_pass(policy, prompt_ids, out_ids):
    """f32[U]: the log-prob of each token, and whether it is the likeliest, by the whole sequence at once."""
    ids = jnp.asarray([[*prompt_ids, *out_ids]], jnp.int32)
    positions = jnp.arange(ids.shape[1])[None]
    hidden = decoder.forward(
        policy.config, policy.params, ids, positions, segment_attention(jnp.ones_like(ids), positions)
    )
    logits = np.array(decoder.logits(policy.config, policy.params, hidden))[0, len(prompt_ids) - 1 : -1]
    logprobs = jax.nn.log_softmax(logits[:, : policy.tokenizer.vocab_size])
    return logprobs[np.arange(len(out_ids)), out_ids], logprobs.argmax(-1) == out_ids


def test_the_likeliest_tokens_are_those_of_a_forward_pass(policy):
    (found,) = policy.generate(["ab"], temperature=0)
    prompt = policy.tokenizer.encode("aab")
    logprobs, likeliest = of_a_forward_pass(policy, prompt, found[0].token_ids)
    assert likeliest.all() and len(found) == 1 and found[0].finish in ("stop", "length")
    np.testing.assert_allclose(found[0].logprobs, logprobs, atol=1e-4)
    assert found[0].text == policy.tokenizer.decode(found[0].token_ids.tolist())


def test_samples_of_a_prompt_differ_and_a_second_call_draws_others(policy):
    first, second = policy.generate("ab", samples=6), policy.generate("ab", samples=6)
    tokens = [tuple(completion.token_ids) for completion in (*first, *second)]
    assert len(first) == 6 and len(set(tokens)) > 2 and tokens[:6] != tokens[6:]
    assert len(policy.generate("ab", max_new_tokens=3)[0].token_ids) <= 3


@pytest.mark.parametrize(
    "asked, why",
    [
        ({"prompts": "a", "samples": 0}, "samples = 0"),
        ({"prompts": "a", "max_new_tokens": 9}, "max_new_tokens = 9 between 1 and rollout.max_new_tokens = 8"),
        ({"prompts": "a", "temperature": -1.0}, "temperature = -1.0"),
        ({"prompts": "a" * 17}, "a prompt has 18 tokens; rollout.max_prompt_tokens = 16"),
    ],
)
def test_what_cannot_be_generated_is_refused(policy, asked, why):
    with pytest.raises(ValueError, match=why):
        policy.generate(**asked)
