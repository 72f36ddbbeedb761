"""Tasksets of verifiers (`verifiers` 0.4, which is installed apart) as environments of a run.

    environment.name = "dora_jax.serving.verifiers.Verifiers"
    environment.python = "/path/of/its/environment/bin/python"
    environment.params = {"env": {"taskset": {"id": "my-taskset"}, "agent": {"harness": {"id": "null"}, "runtime":
    ...}}}

A row's `answer` is the number of a task. The rollout is the library's own, and so is its training client, which asks a
loopback route of this process for each turn, as token ids: that request is what the policy observes, and the tokens
that the engine samples behind it are the answer.

    the run -- reset, step --> Verifiers -- future --> route <-- POST /inference/v1/generate -- training client <--
    rollout

Laws: a session is one episode, and thereby one version; a request that the engine cannot honour is refused by name; a
rollout that ends in an error is no reward, but a prompt that is longer than the context is: what was scored so far.
`python -m dora_jax.serving.verifiers --python=PYTHON '{"taskset": {"id": "my-taskset"}}' [NUMBER]` prints the rows of
the tasks (task.path), of a taskset without an end the first NUMBER.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dora_jax.base import callables
from dora_jax.config import ConfigError
from dora_jax.serving.answers import Answer, Piece
from dora_jax.serving.reply import GenerateReply
from dora_jax.serving.request import SAMPLING, GenerateRequest, Refused, ServedLimits, generate
from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt, Message, PolicyFacts

NAME = "policy"  # the model that clients ask for
SESSION = "x-session-id"
KEEP_ALIVE_S = 86_400  # the client never asks again after a connection that ended as it was used
Step = tuple[list[Message], bool, dict[str, float]]


class Verifiers:
    """env: the block of that name of a configuration of verifiers. renderer: a RendererConfig, such as {"name":
    "qwen3"}; None: the library chooses by the model. sampling: beside what the run's rollout section says."""

    terms = ("reward",)
    replays = False  # nothing says which tasksets do
    tokens = True

    def __init__(
        self,
        policy: PolicyFacts,
        env: Mapping[str, Any],
        renderer: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ):
        key = json.dumps([env, renderer, sampling], sort_keys=True)
        if key not in _hosts:
            _hosts[key] = Host(policy, env, renderer, sampling or {})
        self._host = _hosts[key]
        self._requests: asyncio.Queue[Asked] = asyncio.Queue()
        self._open: Asked | None = None
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._rollout = asyncio.create_task(await self._host.play(prompt.answer, self))
        observed, done, _ = await self._next()
        if done:
            raise EnvironmentError(f"{self._host.name}: the rollout ended before its first turn")
        return observed

    async def step(self, message: Message) -> Step:
        assert self._open is not None
        self._open.answer.set_result(message)
        return await self._next()

    async def close(self) -> None:
        self._host.forget(self)
        if self._rollout is not None:
            self._rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # the episode is over
                await self._rollout
        while not self._requests.empty():
            self._requests.get_nowait().refuse()
        if self._open is not None:
            self._open.refuse()

    def ask(self, wanted: GenerateRequest) -> asyncio.Future[Message]:
        """A request of the client: the policy's turn, once those before it are answered."""
        asked = Asked(wanted)
        self._requests.put_nowait(asked)
        return asked.answer

    # ------------------------------------------------------------ private

    async def _next(self) -> Step:
        """The next request, or the end of the rollout."""
        assert self._rollout is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            wanted = (opened := request.result()).wanted
            self._open = opened
            observed = {"role": "prompt", "token_ids": list(wanted.prompts[0]), "max_tokens": wanted.max_tokens}
            return [observed], False, {}
        request.cancel()
        episode = self._rollout.result()
        if not episode.ok:
            for error in (*episode.errors, *(error for trace in episode.traces for error in trace.errors)):
                if error.status_code != 400 or "maximum context length" not in error.message:
                    retryable = (error.status_code or 0) >= 500
                    raise EnvironmentError(f"{self._host.name}: {error.type}: {error.message}", retryable)
        # of all traces of the policy: what their tasks scored
        return [], True, {"reward": float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))}


class Asked:
    """An open request."""

    def __init__(self, wanted: GenerateRequest):
        self.wanted = wanted
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def refuse(self) -> None:
        """The route waits for it no longer."""
        if not self.answer.done():
            self.answer.set_exception(Refused(503, "the episode is over"))


class Host:
    """What the episodes of one process share: the taskset, the library's servers, and the route."""

    def __init__(
        self,
        policy: PolicyFacts,
        env: Mapping[str, Any],
        renderer: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
    ):
        import verifiers.v1 as vf

        self._vf, self._policy, self._renderer, self._sampling = vf, policy, renderer, dict(sampling)
        self._env = vf.load_environment(vf.resolve_env_config(dict(env)))
        self.name = self._env.config.env_id
        self._sessions: dict[str, Verifiers] = {}
        self._starting: asyncio.Task[None] | None = None

    async def play(self, number: int, episode: Verifiers) -> Any:
        """The rollout of a task, not yet begun."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)  # a deadline of the first episode is none of the others'
        if isinstance(number, int) and number >= 0:  # as many are made as are asked for: there may be no end of them
            self._tasks += itertools.islice(self._more, max(0, number + 1 - len(self._tasks)))
        if not isinstance(number, int) or not 0 <= number < len(self._tasks):
            raise EnvironmentError(f"{self.name}: a row's answer is {number!r}, not one of {len(self._tasks)} tasks")

        def minted(trace: Any) -> None:
            self._sessions[trace.id] = episode

        return self._env.run_episode(self._tasks[number], self._context, on_trace=minted)

    def forget(self, episode: Verifiers) -> None:
        for session in [session for session, one in self._sessions.items() if one is episode]:
            del self._sessions[session]

    async def _start(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [Route("/v1/models", self._models), Route("/inference/v1/generate", self._generate, methods=["POST"])]
        app = Starlette(routes=routes, exception_handlers={Refused: _refused})
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S)
        server = uvicorn.Server(config)
        self._served = asyncio.create_task(server.serve(sockets=[listening]))
        client = self._vf.TrainClientConfig(
            base_url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1",
            api_key_var="DORA_JAX_NONE",
            renderer=self._renderer,
            renderer_model_name=self._policy.path,
        )
        sampling = self._vf.SamplingConfig(**self._sampling)
        self._context = self._vf.ModelContext(model=NAME, client=client, sampling=sampling)
        self._tasks, self._more = list[object](), iter(self._env.taskset)
        self._serving = self._env.serving()  # held as long as the process
        await self._serving.__aenter__()

    # ------------------------------------------------------------ the route

    async def _models(self, asked: Any) -> Any:
        from starlette.responses import JSONResponse

        card = {"id": NAME, "object": "model", "created": 0, "owned_by": "dora_jax"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self._policy.context}]})

    async def _generate(self, asked: Any) -> Any:
        from starlette.responses import JSONResponse

        body = await asked.json()
        rollout, turn = self._policy.rollout, self._policy.turn_tokens
        limits = ServedLimits(
            context=self._policy.context,
            vocab=self._policy.vocab,
            sampling=tuple((name, rollout[name]) for name in SAMPLING),
        )
        wanted, form = generate(body, limits)
        # A turn ends at the client's max_tokens, or at environment.turn_tokens.
        given = (body.get("sampling_params") or {}).get("max_tokens")
        wanted = dataclasses.replace(wanted, max_tokens=turn if given is None else min(wanted.max_tokens, turn))
        # refuses what the engine of a run does otherwise
        if foreign := sorted(wanted.stop_ids - set(self._policy.stop_ids)):
            raise Refused(400, f"stop_token_ids: {foreign[0]} ends no turn of this run", param="stop_token_ids")
        unlike = {
            "n": wanted.n != 1,
            "stop": wanted.stop,
            "seed": wanted.seed is not None,
            "sampling_params": wanted.sampling,
        }
        for name in (name for name, other in unlike.items() if other):
            raise Refused(
                400, f"{name}: a turn of a run is drawn as its section rollout says; leave it out", param=name
            )
        session = asked.headers.get(SESSION, "")
        if session not in self._sessions:
            raise Refused(404, f"{SESSION}: {session[:40]!r} is no episode that goes on", param=SESSION)
        # The answer of /inference/v1/generate to a turn of the policy.
        message = await self._sessions[session].ask(wanted)
        ids, logprobs = tuple(message["token_ids"]), tuple(message["logprobs"])
        piece = Piece(index=0, text="", calls=(), ids=ids, logprobs=logprobs, finish=message["finish"])
        return JSONResponse(GenerateReply(Answer(wanted, message["version"]), form, NAME, None).body([piece]))


_hosts: dict[str, Host] = {}  # of this process


def rows(env: Mapping[str, Any], number: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a taskset, for task.name = "rows": the first `number`, or all. ConfigError: they have no end."""
    import verifiers.v1 as vf

    taskset = vf.load_environment(vf.resolve_env_config(dict(env))).taskset
    if number is None and not taskset.bounded:
        raise ConfigError(f"{type(taskset).__name__} has no end of tasks: give their number behind its configuration")
    for i, task in enumerate(itertools.islice(taskset, number)):
        yield {"prompt": task.data.prompt_text, "answer": i}


def main(arguments: Sequence[str]) -> int:
    """[--python=PYTHON] ENV [NUMBER]"""
    if arguments and arguments[0].startswith("--python="):
        python = arguments[0].removeprefix("--python=")
        with callables.package_alone() as path:
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
            }
            return subprocess.run([python, "-P", "-m", __spec__.name, *arguments[1:]], env=env, check=False).returncode
    try:
        for row in rows(json.loads(arguments[0]), *map(int, arguments[1:2])):
            print(json.dumps(row))
    except (IndexError, ValueError, ConfigError, ImportError) as error:
        print(f"error: verifiers {' '.join(arguments)[:200]}: {error}", file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------- private


async def _refused(asked: Any, error: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(error.body, error.status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
