"""Environments for the tests: one that does as the policy tells it, and a pool of scripts that needs no process."""

import asyncio
import os
import pathlib
import time

import numpy as np

from dora_jax.tasks.environment import EnvironmentError
from dora_jax.types import EpisodeEnded, EpisodeFailed, EpisodeLost, Observed


class Obedient:
    """Says the message again with its number. "end" ends with reward 1; "sleep S", "hang S", "raise", "retry", "die"
    and "odd" do what they say."""

    terms = ("right", "turns")
    replays = True

    def __init__(self, opening="", flag=""):
        self.n, self.opening, self.flag = 0, opening, flag

    async def reset(self, prompt):
        self.answer = prompt.answer
        return [{"role": "user", "content": self.opening}] if self.opening else []

    async def step(self, message):
        word, _, rest = message["content"].strip().partition(" ")
        self.n += 1
        if word == "end":
            return [], True, {"right": 1.0, "turns": 1.0}
        if word == "sleep":
            await asyncio.sleep(float(rest))
        if word == "hang":
            time.sleep(float(rest))  # noqa: ASYNC251 (a user's code blocks its loop)
        if word == "raise":
            raise RuntimeError("a bug")
        if word in ("retry", "die") and not pathlib.Path(self.flag).exists():
            pathlib.Path(self.flag).touch()
            if word == "die":
                os._exit(3)
            raise EnvironmentError("the network is down", retryable=True)
        if word == "odd":
            return [], False, {"wrong": 1.0}
        return [{"role": "tool", "content": f"{self.n}:{message['content']}"}], False, {"turns": 1.0}

    async def close(self):
        pass


class Blocking:
    """Plain functions. It waits as many seconds as the message says, and says what else stands there."""

    terms = ("right",)
    replays = True

    def reset(self, prompt):
        return []

    def step(self, message):
        seconds, _, rest = message["content"].partition(" ")
        time.sleep(float(seconds))
        parts = {"parts": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "object": object()}
        parts |= {"image": [{"type": "image_url"}], "long": "x" * 50 + "y" * 50}
        more = [{"role": "user", "content": "short"}] if rest == "many" else []
        parts["many"] = "x" * 25 + "y" * 25
        return [{"role": "tool", "content": parts.get(rest, rest)}, *more], False, {}

    def close(self):
        """Nothing is open."""


class Forgetful(Obedient):
    replays = False


class Echo:
    """Speaks token ids: observes one token more, whose number is the policy's vocabulary; a turn that stops ends it."""

    terms = ("right",)
    replays = True
    tokens = True

    def __init__(self, policy):
        self.policy = policy

    async def reset(self, prompt):
        self.ids = [*map(ord, prompt.text), self.policy.vocab]
        return [{"role": "prompt", "token_ids": self.ids, "max_tokens": 5}]

    async def step(self, message):
        if message["finish"] == "stop":
            return [], True, {"right": message["version"] + sum(message["logprobs"])}
        self.ids = [*self.ids, *message["token_ids"], self.policy.vocab]
        return [{"role": "prompt", "token_ids": self.ids}], False, {}

    async def close(self):
        pass


class Lawless:
    terms = ("right",)


class ScriptedEnvironments:
    """`Environments` whose answers follow from the sample and the turn: an episode has 1 + (group + index) % 3 turns
    and is right where its index is odd. The answer to a turn comes at the `late`-th poll behind it."""

    def __init__(self, late=3, opening=0, failing=(), losing=(), branching=()):
        """opening: tokens that come first. failing: groups. losing, branching: samples, at their first turn."""
        self.late, self.opening = late, opening
        self.failing, self.losing, self.branching = set(failing), set(losing), set(branching)
        self.asked, self.answered, self.closed = {}, [], False

    def opened(self, id):
        return 900 + id.index + np.arange(self.opening, dtype=np.int32)

    def observed(self, id, turn):
        return 1000 + 10 * turn + np.arange(1 + turn % 2, dtype=np.int32)

    def turns(self, id):
        return 1 + (id.group_id + id.index) % 3

    def open(self, id, prompt):
        self.asked[id] = (0, Observed(id=id, token_ids=self.opened(id)))

    def turn(self, prompt, so_far):
        id, mask = so_far.id, so_far.mask
        turn = int((np.diff(np.concatenate([[0], mask.astype(int)])) == 1).sum()) + (id in self.answered)
        if id.group_id in self.failing:
            answer = EpisodeFailed(id=id, reason="the machine is gone", kind="error")
        elif id in self.losing:
            self.losing.discard(id)
            answer = EpisodeLost(id=id, reason="its object is gone")
        elif id in self.branching:
            self.branching.discard(id)
            self.answered.append(id)
            answer = Observed(id=id, token_ids=self.observed(id, turn), keep=len(so_far.tokens) - 2)
        elif turn >= self.turns(id):
            answer = EpisodeEnded(id=id, terms={"right": float(id.index % 2)})
        else:
            answer = Observed(id=id, token_ids=self.observed(id, turn))
        self.asked[id] = (self.late, answer)

    def drop(self, id):
        self.asked.pop(id, None)
        return {}

    def poll(self):
        due = [answer for left, answer in self.asked.values() if not left]
        self.asked = {id: (left - 1, answer) for id, (left, answer) in self.asked.items() if left}
        return due

    def stats(self):
        return {}

    def close(self):
        self.closed = True
