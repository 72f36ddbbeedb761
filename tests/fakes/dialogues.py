"""Random dialogues of a policy with tools and thinking, and what the engine and the coordinator keep of one."""

import dataclasses
import json

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dora_jax.models.tokenizer import Tokenizer
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.sample_registry import SampleRegistry
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


def new_tokenizer(folder, control=CONTROL):
    """A byte-level BPE of few merges, with these control tokens and a chat template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    backend.add_tokens(
        [tokenizers.AddedToken(text, special=text.startswith("<|"), normalized=False) for text in control]
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
        self.received = bridge.begin(prompt)
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
        observed, keep = self.bridge.observe(self.received, before, np.array(ids), messages)
        self.held, _ = self.registry.observe(Observed(id=self.held.id, token_ids=observed, keep=keep))
        self.branches += keep is not None
        assert self.tokens.tolist() == [*before[: keep if keep is not None else len(before)], *observed]

    def trained(self):
        """For each turn: the tokens up to its end in the branch that has its loss, and its length."""
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
        ids += tokenizer.encode("<think>\n" + phrase(draw) + "\n</think>\n\n")
    text = '<tool_call>\n{"b": false, "a": ""}\n</tool_call>' if draw.random() < 0.4 else phrase(draw)
    at = draw.randrange(len(text)) if "<" not in text else 0
    return [*ids, *tokenizer.encode(text[:at]), *tokenizer.encode(text[at:]), tokenizer.eos_ids[0]]


def phrase(draw):
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 8)))


def foreign(draw):
    """What an environment says: often a tool's answer, now and then with what looks like a control token."""
    text = phrase(draw) + (draw.choice(CONTROL) + phrase(draw) if draw.random() < 0.3 else "")
    return {"role": "tool" if draw.random() < 0.7 else "user", "content": text}
