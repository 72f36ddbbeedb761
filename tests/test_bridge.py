"""What is trained is what the engine saw, token for token, however a chat template renders it; foreign text stays text."""

import dataclasses
import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.sample_registry import SampleRegistry
from dora_jax.tasks.bridge import Bridge
from dora_jax.tokenizer import Tokenizer
from dora_jax.types import Observed, Prompt, SampleId

WORDS = [
    "the",
    "sum",
    "of",
    "four",
    "and",
    "seven",
    "is",
    "eleven",
    "so",
    "call",
    "add",
    "with",
    "a",
    "b",
    "and",
    "then",
    "say",
    "what",
    "it",
    "returned",
    "once",
    "more",
]
CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
# As Qwen3's: thinking stays until the next message of the user, a tool's answer is a message of its own.
TEMPLATE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- set content = m.content -%}
  {%- if m.role == "assistant" and loop.index0 < ns.last and "</think>" in content -%}
    {%- set content = content.split("</think>")[-1].lstrip("\\n") -%}
  {%- endif -%}
  {%- if m.role == "tool" -%}
    {{- "<|im_start|>user\\n<tool_response>\\n" + content + "\\n</tool_response><|im_end|>\\n" -}}
  {%- else -%}
    {{- "<|im_start|>" + m.role + "\\n" + content + "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    backend.add_tokens(
        [tokenizers.AddedToken(text, special=text.startswith("<|"), normalized=False) for text in CONTROL]
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    return Tokenizer.load(folder)


class Engine:
    """What the engine and the coordinator keep of an episode."""

    def __init__(self, tokenizer, bridge, question):
        self.tokenizer, self.bridge = tokenizer, bridge
        text = tokenizer.chat([{"role": "user", "content": question}])
        ids = np.array(tokenizer.encode(text), np.int32)
        prompt = Prompt(group_id=0, task="t", uid="u", text=text, token_ids=ids, answer="", max_new_tokens=9999)
        self.registry = SampleRegistry(self)
        self.prompt_at = lambda group_id: prompt
        self.registry.opened(0)
        self.told = bridge.begin(prompt)
        self.held = InFlightSample(id=SampleId(0, 0), version=3, prompt_ids=ids, out_ids=ids[:0], logprobs=np.zeros(0, np.float32),
                                   max_new_tokens=9999, turn_tokens=99)  # fmt: skip
        self.turns = []  # all that the engine had when the turn ended, and the turn's length
        self.branches = 0

    @property
    def tokens(self):
        return np.concatenate([self.held.prompt_ids, self.held.out_ids])

    def sample(self, ids):
        mask = np.ones(len(self.held.out_ids), bool) if self.held.mask is None else self.held.mask
        self.held = dataclasses.replace(
            self.held,
            out_ids=np.append(self.held.out_ids, ids).astype(np.int32),
            logprobs=np.append(self.held.logprobs, np.full(len(ids), -1.0)).astype(np.float32),
            mask=np.append(mask, np.ones(len(ids), bool)),
        )
        self.turns.append((tuple(self.tokens.tolist()), len(ids)))
        self.registry.park(self.held)

    def observe(self, ids, messages):
        before = self.tokens
        observed, keep = self.bridge.observe(self.told, before, np.array(ids), messages)
        self.held, _ = self.registry.observe(Observed(id=self.held.id, token_ids=observed, keep=keep))
        self.branches += keep is not None
        assert self.tokens.tolist() == [*before[: keep if keep is not None else len(before)], *observed]

    def trained(self):
        """Of each turn: the tokens up to its end in the branch that has its loss, and its length."""
        sample = self.registry.whole(self.registry.end(self.held.id, "stop"), {})
        assert len(sample.branches) == self.branches
        found = []
        for branch in (*sample.branches, sample):
            offset = len(branch.prompt_ids)
            whole = [*branch.prompt_ids.tolist(), *branch.out_ids.tolist()]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], branch.mask, [False]]).astype(int)))
            found += [(tuple(whole[: offset + stop]), stop - start) for start, stop in edges.reshape(-1, 2).tolist()]
        return found


def speech(draw, tokenizer):
    """A policy's turn, in tokens that no tokenizer would choose for its text."""
    ids = []
    if draw.random() < 0.5:
        ids += tokenizer.encode("<think>\n" + said(draw) + "\n</think>\n\n")
    text = '<tool_call>\n{"b": false, "a": ""}\n</tool_call>' if draw.random() < 0.4 else said(draw)
    at = draw.randrange(len(text)) if "<" not in text else 0
    return [*ids, *tokenizer.encode(text[:at]), *tokenizer.encode(text[at:]), tokenizer.eos_ids[0]]


def said(draw):
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 8)))


def foreign(draw):
    """What an environment says: often a tool's answer, now and then with what looks like a control token."""
    text = said(draw) + (draw.choice(CONTROL) + said(draw) if draw.random() < 0.3 else "")
    return {"role": "tool" if draw.random() < 0.7 else "user", "content": text}


def dialogues(tokenizer, n, seed=0):
    """(dialogues that were played, branches, breaks of a run that renders and encodes everything again)"""
    draw, branches, breaks = random.Random(seed), 0, 0
    for _ in range(n):
        question = said(draw)
        bridge = Bridge(tokenizer, "", lambda group_id, question=question: [{"role": "user", "content": question}])
        engine = Engine(tokenizer, bridge, question)
        turns = draw.randrange(2, 7)
        messages = [{"role": "user", "content": question}]
        previous = engine.tokens.tolist()
        for turn in range(turns):
            ids = speech(draw, tokenizer)
            engine.sample(ids)
            messages.append({"role": "assistant", "content": tokenizer.decode(ids)})
            if turn < turns - 1:
                message = foreign(draw)
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
    played, branches, breaks = dialogues(tokenizer, 40)
    assert 0 < branches < breaks, (played, branches, breaks)


@pytest.mark.slow
def test_trained_tokens_are_those_of_the_engine_over_a_thousand_dialogues(tokenizer):
    played, branches, breaks = dialogues(tokenizer, 1000, seed=1)
    print(f"{played} dialogues: {branches} branches; {breaks} breaks where everything is rendered and encoded again")
    assert 0 < branches < breaks


def test_a_plain_template_never_branches_and_text_stays_text(tokenizer):
    bridge = Bridge(tokenizer, "<|im_start|>{content}\n")
    ids, keep = bridge.observe(None, np.zeros(0, np.int32), np.zeros(0, np.int32),
                               [{"role": "tool", "content": "a<|im_end|><think>"}, {"role": "tool", "content": ""}])  # fmt: skip
    start = tokenizer.encode("<|im_start|>")
    assert keep is None and tokenizer.decode(ids, keep_special=True) == "<|im_start|>a<|im_end|><think>\n<|im_start|>\n"
    assert [id for id in ids.tolist() if id >= min(map(tokenizer.encode, CONTROL))[0]] == start * 2
