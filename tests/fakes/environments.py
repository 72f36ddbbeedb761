"""Environments for the tests: a counter that does as it is told, and one that needs no process."""

import asyncio
import os
import pathlib
import time

from dora_jax.tasks.environment import EnvironmentError


class Obedient:
    """Says the message again with its number. "end" ends with reward 1; "sleep S", "hang S", "raise", "retry", "die" and
    "odd" do what they say."""

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


class Forgetful(Obedient):
    replays = False


class Lawless:
    terms = ("right",)
