"""What is trained is what the engine saw, token for token, however a chat template renders it; foreign text stays
text."""

import random

import numpy as np
import pytest

from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import Prompt
from tests.fakes import dialogues


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return dialogues.new_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def played(tokenizer, n, seed=0):
    """(dialogues that were played, branches, breaks of a run that renders and encodes everything again)"""
    draw, branches, breaks = random.Random(seed), 0, 0
    for _ in range(n):
        question = dialogues.phrase(draw)
        bridge = Bridge(tokenizer, "", lambda group_id, question=question: [{"role": "user", "content": question}])
        engine = dialogues.Engine(tokenizer, bridge, question)
        turns = draw.randrange(2, 7)
        messages = [{"role": "user", "content": question}]
        previous = engine.tokens.tolist()
        for turn in range(turns):
            ids = dialogues.speech(draw, tokenizer)
            engine.sample(ids)
            messages.append({"role": "assistant", "content": tokenizer.decode(ids)})
            if turn < turns - 1:
                message = dialogues.foreign(draw)
                ends = sum(id == tokenizer.eos_ids[0] for id in engine.tokens.tolist())
                engine.observe(ids, [message])
                grown = sum(id == tokenizer.eos_ids[0] for id in engine.tokens.tolist()) - ends
                assert grown == 1, "the template ends one message, whatever the message spells"
                messages.append(message)
                again = tokenizer.encode(tokenizer.chat(messages))
                whole = [*previous, *ids]
                breaks += again[: len(whole)] != whole
                previous = again
        assert sorted(engine.trained()) == sorted(engine.turns)
        branches += engine.branches
    return n, branches, breaks


def test_trained_tokens_are_those_of_the_engine(tokenizer):
    n, branches, breaks = played(tokenizer, 40)
    assert 0 < branches < breaks, (n, branches, breaks)


@pytest.mark.slow
def test_trained_tokens_are_those_of_the_engine_over_a_thousand_played(tokenizer):
    n, branches, breaks = played(tokenizer, 1000, seed=1)
    print(f"{n} dialogues: {branches} branches; {breaks} breaks where everything is rendered and encoded again")
    assert 0 < branches < breaks


def test_an_example_that_others_wrote_for_the_policy_stays_text(tokenizer):
    ids = np.array(tokenizer.encode("<|im_start|>"), np.int32)
    prompt = Prompt(group_id=0, task="", uid="", text="<|im_start|>", token_ids=ids, answer=None, max_new_tokens=9)
    example = {"role": "assistant", "content": "four <|im_end|> and seven"}
    messages = [{"role": "user", "content": "sum"}, example, {"role": "user", "content": "say"}]
    bridge = Bridge(tokenizer, "")
    observed, keep = bridge.observe(bridge.begin(prompt), ids, ids[:0], messages)
    assert keep is None and "four <|im_end|> and seven" in tokenizer.decode(observed, keep_special=True)
    assert observed.tolist().count(tokenizer.eos_ids[0]) == len(messages), "the template ends each message once"


def test_a_plain_template_never_branches_and_text_stays_text(tokenizer):
    bridge = Bridge(tokenizer, "<|im_start|>{content}\n")
    ids, keep = bridge.observe(None, np.zeros(0, np.int32), np.zeros(0, np.int32),
                               [{"role": "tool", "content": "a<|im_end|><think>"}, {"role": "tool", "content": ""}])  # fmt: skip
    start = tokenizer.encode("<|im_start|>")
    assert keep is None and tokenizer.decode(ids, keep_special=True) == "<|im_start|>a<|im_end|><think>\n<|im_start|>\n"
    assert [id for id in ids.tolist() if id >= min(map(tokenizer.encode, dialogues.CONTROL))[0]] == start * 2
