"""The bridge by a published chat template keeps the engine's tokens, and what an environment says stays text."""

import random

import numpy as np
import pytest

from dora_jax.config import ConfigError
from dora_jax.tasks.environments import renderer_bridge
from tests.fakes import dialogues

QWEN3 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
         "<tool_response>", "</tool_response>")  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return dialogues.new_tokenizer(tmp_path_factory.mktemp("tokenizer"), QWEN3)


def bridge_of(tokenizer, question):
    pytest.importorskip("renderers", reason="renderers is not installed: the extra agents")
    messages = [{"role": "user", "content": question}]
    return renderer_bridge.RendererBridge(tokenizer, "qwen3", lambda group_id: messages)


def test_a_renderer_that_is_not_there_is_named(tokenizer):
    with pytest.raises(ConfigError, match=r"environment.renderer: (it needs the package renderers|'q9' is none of: )"):
        renderer_bridge.RendererBridge(tokenizer, "q9", lambda group_id: [])


def test_trained_tokens_are_those_of_the_engine(tokenizer):
    draw, branches = random.Random(0), 0
    for _ in range(100):
        question = dialogues.phrase(draw)
        engine = dialogues.Engine(tokenizer, bridge_of(tokenizer, question), question)
        for turn in range(last := draw.randrange(2, 7)):
            ids = dialogues.speech(draw, tokenizer)
            engine.sample(ids)
            if turn < last - 1:
                before, kept = engine.tokens.tolist(), engine.branches
                message = dialogues.foreign(draw)
                engine.observe(ids, [message])
                assert message["role"] == "user" or engine.branches == kept, "a tool's answer rewrites nothing"
                if engine.branches == kept:
                    seen = engine.tokens.tolist()[len(before) :]
                    starts = [i for i, id in enumerate(seen) if id == tokenizer.token_id("<|im_start|>")]
                    assert len(starts) == 2, "the message and the next turn begin, whatever the message spells"
        assert sorted(engine.trained()) == sorted(engine.turns)
        branches += engine.branches
    assert branches


def test_a_tool_call_is_read_from_the_tokens(tokenizer):
    turn = tokenizer.encode(
        '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>'
    )
    phrase = bridge_of(tokenizer, "what").message(np.array(turn))
    assert phrase["reasoning_content"] == "so" and not phrase["content"].strip()
    assert phrase["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 4}}}]
