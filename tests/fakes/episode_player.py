"""A policy's side of an episode: what the coordinator keeps of it, by hand."""

import time

import numpy as np

from dora_jax.types import Observed, Prompt, SampleId

FIRST = SampleId(0, 0)


class Letters:
    """A tokenizer of characters."""

    def encode(self, text):
        return [ord(c) for c in text]

    encode_text = encode

    def decode(self, ids, *, keep_special=False):
        return "".join(map(chr, ids))


def prompt_of(group_id=0):
    return Prompt(group_id=group_id, task="t", uid="u", text="ask ", token_ids=ids_of("ask "), answer="7",
                  max_new_tokens=99)  # fmt: skip


def ids_of(text):
    return np.array([ord(c) for c in text], np.int32)


class Player:
    """An episode as the coordinator keeps it."""

    def __init__(self, pool, id=FIRST, room=1000):
        self.pool, self.id, self.room = pool, id, room
        self.tokens, self.mask = ids_of("ask "), np.zeros(0, bool)

    def observed(self, answer):
        assert isinstance(answer, Observed) and answer.keep is None, answer
        self.tokens = np.concatenate([self.tokens, answer.token_ids])
        self.mask = np.append(self.mask, np.zeros(len(answer.token_ids), bool))
        return "".join(map(chr, answer.token_ids))

    def say(self, text):
        self.tokens = np.concatenate([self.tokens, ids_of(text)])
        self.mask = np.append(self.mask, np.ones(len(text), bool))
        self.pool.turn(self.id, prompt_of(self.id.group_id), self.tokens, self.mask, self.room)

    def answer(self):
        return answers(self.pool, 1)[0]

    def ask(self, text):
        self.say(text)
        return self.answer()


def answers(pool, n, timeout_s=60.0):
    found, until = [], time.monotonic() + timeout_s
    while len(found) < n:
        assert time.monotonic() < until, f"{len(found)} of {n} answers"
        found += pool.poll()
        time.sleep(0.002)
    return found
