"""Stage 3: environments of OpenEnv, served elsewhere, as environments of a run.

    environment.name = "dora_jax.tasks.environments.openenv.OpenEnv"
    environment.params = {"url": "ws://127.0.0.1:8000/ws", "action": "message", "observation": "echoed_message"}
    environment.python = "/path/of/an/environment/with/websockets/bin/python"

A connection is an episode. Frames of JSON, one answer a question:

    {"type": "reset", "data": {"seed"}} or {"type": "step", "data": action}
    -> {"type": "observation", "data": {"observation", "reward", "done"}}
    or {"type": "error", "data": {"message", "code"}}

Laws: an error of the server or of the connection is an EnvironmentError, but for an action of the policy that is none,
which it observes; an episode waits for a server that is full as long as for any answer; the reward of an episode is the
sum of those of its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt, Message

FULL = "CAPACITY_REACHED"  # of a server that has as many sessions as it may (max_concurrent_envs, often 1)
RETRYABLE = (FULL, "FACTORY_ERROR")  # of a server that may have room, or a session, later
AGAIN_S = 0.25


class OpenEnv:
    """action: the field of an action that takes the policy's message, empty where the message is the JSON of the whole
    action; more: its other fields. observation: the field of an observation that the policy sees as `role`, empty: all
    of it as JSON. opening: whether it sees that of `reset`, too. reset: more fields of that question."""

    terms = ("reward",)
    replays = False  # no server promises it

    def __init__(
        self,
        url: str,
        action: str = "message",
        more: Message | None = None,
        observation: str = "",
        role: str = "user",
        opening: bool = True,
        reset: Message | None = None,
    ):
        from websockets.asyncio.client import connect

        self._connect, self._url = connect, url
        self._action, self._more, self._observation = action, more or {}, observation
        self._role, self._opening, self._reset = role, opening, reset or {}
        self._socket: Any = None

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        while True:
            try:
                # no limit of a frame but that of an observation, no time-out but that of a step
                self._socket = await self._connect(self._url, max_size=None, open_timeout=None, ping_timeout=None)
                observed, _, _ = await self._ask("reset", {"seed": prompt.seed % 2**31, **self._reset})
                return observed if self._opening else []
            except OSError as error:
                raise EnvironmentError(f"{self._url}: {error}", retryable=True) from error
            except EnvironmentError as error:
                if FULL not in str(error):
                    raise
                await self._socket.close()
                await asyncio.sleep(AGAIN_S)

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        content = message.get("content") or ""
        if self._action:
            action = {**self._more, self._action: content}
        else:
            try:
                action = {**self._more, **json.loads(content)}
            except (TypeError, ValueError):  # what a policy writes; the environment has not moved
                return [{"role": self._role, "content": "the action is no JSON object"}], False, {}
        observed, done, reward = await self._ask("step", action)
        return ([] if done else observed), done, {"reward": reward}

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: Message) -> tuple[list[Message], bool, float]:
        """(what is observed, whether the episode is over, its reward)."""
        try:
            with contextlib.suppress(Exception):  # a server that refuses sends why, and closes
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except Exception as error:  # websockets' own, of a connection that ended
            raise EnvironmentError(f"{self._url}: {type(error).__name__}: {error}", retryable=True) from error
        body = answer.get("data") or {}
        if answer.get("type") != "observation":
            code, text = str(body.get("code", answer.get("type"))), body.get("message", "")
            if code == "VALIDATION_ERROR" and kind == "step" and not self._action:
                return [{"role": self._role, "content": f"{text}: {body.get('errors')}"}], False, 0.0
            raise EnvironmentError(f"{self._url}: {code}: {text}", retryable=code in RETRYABLE)
        seen = body.get("observation") or {}
        text = seen.get(self._observation) if self._observation else json.dumps(seen)
        if not isinstance(text, str):
            raise EnvironmentError(f"{self._url}: an observation has no text {self._observation!r}: {sorted(seen)}")
        return [{"role": self._role, "content": text}], bool(body.get("done")), float(body.get("reward") or 0.0)
