"""The tools of an MCP server as an environment of a run (the package `mcp`, extra of that name).

    environment.name = "dora_jax.serving.mcp.Tools"
    environment.params = {"server": {"url": "http://127.0.0.1:8000/mcp"}, "rewards": ["dora_jax.tasks.rewards.exact"]}
    task.template, task.template_kwargs = "chat", {"tools": [...]}

A server is {"url": its streamable HTTP} or {"command": [program, ...], "env": {}}, which is started for each
episode and asked by its stdin. `python -m dora_jax.serving.mcp [--python=PYTHON] SERVER` prints the list for
template_kwargs: so the chat template shows the tools as it shows any. Calls of the policy are read in the forms of
parser.py whose marks are plain text (Hermes, Qwen, GLM, Llama); each is answered by a message of the role "tool". A
message without a call ends the episode, and the rewards score its text.
Laws: a connection is an episode; what a tool answers, its errors and unknown names included, is observed; what the
server or the connection does wrong is an EnvironmentError.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from dora_jax.base import callables
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.serving.parser import AnswerSyntax, ToolCall
from dora_jax.tasks.environment import NO_POLICY, EnvironmentError, EpisodePrompt, Message, PolicyFacts
from dora_jax.tasks.rewards import RewardError, resolve, score, summed

USERS_FAULT = (-32601, -32602)  # of JSON-RPC: no such method, or arguments that do not fit; the policy's, here


class Tools:
    """rewards: import paths, as in task.rewards; they name the terms, or `terms` does."""

    terms: tuple[str, ...] = ()
    replays = False  # no server promises it

    def __init__(
        self,
        server: Message,
        rewards: Sequence[str] = ("dora_jax.tasks.rewards.exact",),
        terms: Sequence[str] = (),
        policy: PolicyFacts = NO_POLICY,
    ):
        self._server, self._rewards, self._syntax = dict(server), resolve([*rewards]), _syntax(policy.path)
        connected(self._server)  # what it lacks is reported at the start
        self.terms = tuple(terms or self._rewards)
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._prompt = prompt
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened))
        await asyncio.wait({opened, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise self._failed(self._task.exception())
        self._client = opened.result()
        self._known = {tool["function"]["name"] for tool in await self._listed()}
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        read = list(self._syntax.begin(self._prompt.text, tools=True).feed(str(message.get("content") or ""), True))
        if calls := [each for each in read if isinstance(each, ToolCall)]:
            return [await self._called(call) for call in calls], False, {}
        text = "".join(each for each in read if isinstance(each, str))
        try:
            (scored,) = await score(self._rewards, self._prompt.text, [text], self._prompt.answer, self._prompt.row)
            return [], True, summed(scored)[0]
        except RewardError as error:
            raise EnvironmentError(str(error)) from error

    async def close(self) -> None:
        self._over.set()
        if self._task is not None:
            with contextlib.suppress(Exception):  # the episode is over
                await self._task

    # ------------------------------------------------------------ private

    async def _hold(self, opened: asyncio.Future[Any]) -> None:
        """Holds the connection: it begins and ends in one task, as its library asks for."""
        async with connected(self._server) as client:
            opened.set_result(client)
            await self._over.wait()

    async def _listed(self) -> list[Message]:
        try:
            return await listed(self._client)
        except Exception as error:
            raise self._failed(error) from error

    async def _called(self, call: ToolCall) -> Message:
        """What a tool answers."""
        from mcp import MCPError

        if call.name not in self._known:
            return {"role": "tool", "name": call.name, "content": f"error: there is no tool {call.name}"}
        try:
            result = await self._client.call_tool(call.name, json.loads(call.arguments))
        except MCPError as error:
            if error.code not in USERS_FAULT:
                raise self._failed(error) from error
            return {"role": "tool", "name": call.name, "content": f"error: {error.message}"}
        except Exception as error:
            raise self._failed(error) from error
        texts = [each.text if each.type == "text" else f"[{each.type}]" for each in result.content]
        content = "\n".join(texts) or json.dumps(result.structured_content)
        return {"role": "tool", "name": call.name, "content": content}

    def _failed(self, error: BaseException | None) -> EnvironmentError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        where = self._server.get("url") or self._server["command"][0]
        return EnvironmentError(f"{where}: {type(error).__name__}: {error}", retryable=True)


@functools.cache
def _syntax(path: str) -> AnswerSyntax:
    """How the policy of this tokenizer writes calls; without one, as Hermes and Qwen do."""
    return AnswerSyntax.of(Tokenizer.load(path)) if path else AnswerSyntax()


def connected(server: Message) -> Any:
    """A client of the server, to be entered. ValueError: it names none."""
    from mcp import Client, StdioServerParameters, stdio_client

    if bool(server.get("url")) == bool(server.get("command")) or set(server) - {"url", "command", "env"}:
        raise ValueError(f'server: {server} is neither {{"url": ...}} nor {{"command": [...], "env": {{}}}}')
    if server.get("url"):
        return Client(server["url"], cache=None)
    program, *arguments = server["command"]
    return Client(
        stdio_client(StdioServerParameters(command=program, args=arguments, env=server.get("env"))), cache=None
    )


async def listed(client: Any) -> list[Message]:
    """The tools of a server, as chat templates take them."""
    tools, cursor = list[Message](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
        if not (cursor := page.next_cursor):
            return tools


def main(arguments: Sequence[str]) -> int:
    """[--python=PYTHON] SERVER"""
    if arguments and arguments[0].startswith("--python="):
        with callables.package_alone() as path:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
            command = [arguments[0].removeprefix("--python="), "-P", "-m", __spec__.name, *arguments[1:]]
            return subprocess.run(command, env=env, check=False).returncode

    async def tools() -> list[Message]:
        async with connected(json.loads(arguments[0])) as client:
            return await listed(client)

    try:
        print(json.dumps(asyncio.run(tools())))
    except Exception as error:  # whatever a server does; in a sentence
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        print(f"error: mcp {' '.join(arguments)[:200]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
