"""A policy's side of an episode: what the coordinator keeps of it, by hand."""

import time
from typing import Any

import numpy as np

from dora_jax.types import EpisodeSoFar, Observed, Prompt, SampleId

FIRST = SampleId(0, 0)


class Letters:
    """A tokenizer of characters."""

    def encode(self, text):
        return [ord(c) for c in text]

    encode_text = encode

    def decode(self, ids, *, keep_special=False):
        return "".join(map(chr, ids))


LETTERS = Letters()


def prompt_of(group_id=0, text="ask ", answer="7", encode=LETTERS.encode):
    ids = np.array(encode(text), np.int32)
    return Prompt(group_id=group_id, task="t", uid="u", text=text, token_ids=ids, answer=answer, max_new_tokens=99)


def ids_of(text):
    return np.array([ord(c) for c in text], np.int32)


class Player:
    """An episode as the coordinator keeps it. tokenizer: of what is sampled and observed."""

    def __init__(self, pool, id=FIRST, room=1000, tokenizer=LETTERS, prompt=None):
        self.pool, self.id, self.room, self.tokenizer = pool, id, room, tokenizer
        self.version = 0
        self.prompt = prompt or prompt_of(id.group_id)
        self.tokens, self.mask = self.prompt.token_ids, np.zeros(0, bool)

    def observed(self, answer):
        assert isinstance(answer, Observed) and answer.keep is None, answer
        self.tokens = np.concatenate([self.tokens, answer.token_ids])
        self.mask = np.append(self.mask, np.zeros(len(answer.token_ids), bool))
        return self.tokenizer.decode(answer.token_ids)

    def say(self, text):
        answer_ids = np.array(self.tokenizer.encode(text), np.int32)
        self.tokens = np.concatenate([self.tokens, answer_ids])
        self.mask = np.append(self.mask, np.ones(len(answer_ids), bool))
        logprobs = np.where(self.mask, np.float32(-0.5), np.float32(0))
        so_far = EpisodeSoFar(
            id=self.id, version=self.version, tokens=self.tokens, mask=self.mask, logprobs=logprobs, room=self.room
        )
        self.pool.turn(self.prompt, so_far)

    def answer(self):
        """The next answer to this episode; what comes with it is kept for the others."""
        kept = vars(self.pool).setdefault("kept", {})
        while self.id not in kept:
            kept |= {answer.id: answer for answer in answers(self.pool, 1)}
        return kept.pop(self.id)

    def ask(self, text):
        self.say(text)
        return self.answer()


def answers(pool, n, timeout_s=60.0):
    found: list[Any] = []
    until = time.monotonic() + timeout_s
    while len(found) < n:
        assert time.monotonic() < until, f"{len(found)} of {n} answers"
        found += pool.poll()
        time.sleep(0.002)
    return found
