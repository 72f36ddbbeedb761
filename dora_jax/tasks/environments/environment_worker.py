"""Stage 3, one process of environments: `python -m dora_jax.tasks.environments.environment_worker FD`, which
worker_process.py starts.

Protocol (calls.py): setup {"name", "params", "policy", "step_timeout_s", "episode_timeout_s", "observation_chars",
"threads", "noise"} -> {"terms", "replays", "tokens"}, and from then on questions and answers in any order:

    {"id", "prompt", "messages", "again"} -> {"observed", "done", "terms"}, or with "error" or "lost"; before it
    {"waits"} as the episode begins or ends to wait for a thread
    {"id", "close"}                       -> {}

messages: all that the policy has written, the last of them not yet answered. observed: what each answered, from the
first one that this object has not answered before; the opening comes before all. An object that is not there, or that
is asked for again, is made by the messages, where its environment replays; else the episode is lost.
Laws: one event loop, and threads for what blocks; an answer within step_timeout_s, without the time that it waits for a
thread; what an environment raises, or answers that cannot be sent, ends its episode alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from dora_jax.base import callables
from dora_jax.tasks import environment
from dora_jax.tasks.environment import (
    CLOCK,
    NOISE,
    Environment,
    EnvironmentError,
    EpisodePrompt,
    Message,
    PolicyFacts,
    called,
)
from dora_jax.tasks.sandbox import calls
from dora_jax.tasks.source import identity_hash, share_hash
from dora_jax.types import is_eval, issued_first_as

FAILED = "error: the tool did not answer"
IRRELEVANT = ("status: idle", "0 messages", "the file is empty", "ok", "see the log for details")


T = TypeVar("T")


class Lost(Exception):
    """The object of the episode is gone, and its messages cannot make it again."""


@dataclasses.dataclass(slots=True, eq=False)
class Session:
    """An episode of this process."""

    environment: Environment
    began_s: float
    messages: list[Message] = dataclasses.field(default_factory=list)  # answered
    terms: dict[str, float] = dataclasses.field(default_factory=dict)
    done: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Observations that are wrong on purpose, so that a policy learns to live with broken tools: the shares that fail,
    end after half, come `late_s` later, or say something else.

    A draw is decided by the run's seed, the sample and the turn alone. Its rate rises linearly with the number of the
    group up to `ramp_groups`. The last observation of an episode, and its reward, are never touched.
    """

    seed: int = 0
    failed: float = 0.0
    truncated: float = 0.0
    late: float = 0.0
    irrelevant: float = 0.0
    late_s: float = 1.0
    ramp_groups: int = 0

    def kind(self, id: tuple[int, int], turn: int) -> str:
        """ "" where the observation stays as it is. Of held-out samples every second one meets the noise in full."""
        group, index = id
        if is_eval(group):
            strength = float(index % 2)
        else:
            strength = min(issued_first_as(group) / self.ramp_groups, 1.0) if self.ramp_groups else 1.0
        draw = share_hash("noise", self.seed, issued_first_as(group), index, turn)
        for kind in ("failed", "truncated", "late", "irrelevant"):
            draw -= strength * getattr(self, kind)
            if draw < 0:
                return kind
        return ""

    async def on(self, observed: list[Message], id: tuple[int, int], turn: int) -> list[Message]:
        kind = self.kind(id, turn)
        if not kind or not observed:
            return observed
        if kind == "late":
            await asyncio.sleep(self.late_s)
            return observed
        last = dict(observed[-1])
        content = str(last.get("content", ""))
        other = IRRELEVANT[identity_hash("irrelevant", self.seed, *id, turn) % len(IRRELEVANT)]
        last["content"] = {"failed": FAILED, "truncated": content[: len(content) // 2], "irrelevant": other}[kind]
        return [*observed[:-1], last]


class EpisodeServer:
    def __init__(self, kind: type[Environment], setup: calls.Request, terms: Sequence[str], replays: bool):
        self._kind, self._params = kind, keywords(kind, setup)
        self._terms, self._replays = tuple(terms), replays
        self._step_s, self._episode_s = setup["step_timeout_s"], setup["episode_timeout_s"]
        self._noise, self._most_chars = Noise(**setup["noise"]), setup["observation_chars"]
        environment.THREADS = concurrent.futures.ThreadPoolExecutor(setup["threads"], thread_name_prefix="environment")
        self._sessions: dict[tuple[int, int], Session] = {}
        self._asked: dict[tuple[int, int], asyncio.Task] = {}  # the open question of each episode
        self._closing: set[asyncio.Task] = set()

    async def answer(self, request: calls.Request, send: calls.Send) -> calls.Request:
        """What the environment raises is an error of the episode alone."""
        id = tuple(request["id"])
        # A question takes the place of an earlier one about the same episode, whose object may have got that.
        earlier = self._asked.pop(id, None)
        if request.get("close") or earlier is not None:
            if earlier is not None:
                earlier.cancel()
            closing = asyncio.create_task(self._close(self._sessions.pop(id, None)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if request.get("close"):
            return {}
        task = self._asked[id] = cast(asyncio.Task, asyncio.current_task())
        reply: calls.Request = {}
        try:
            reply = await self._turns(id, request, lambda waits: send({"waits": waits}))
        except Lost as error:
            reply = {"lost": str(error)}
        except TimeoutError:
            reply = {"error": f"no answer within environment.step_timeout_s = {self._step_s:g} s", "kind": "deadline"}
        except EnvironmentError as error:
            reply = {"error": str(error), "kind": "error", "retryable": error.retryable}
        except Exception as error:  # whatever a user's code raises; in a sentence
            reply = {"error": f"raised {type(error).__name__}: {error}", "kind": "error"}
        if reply.get("done", True):
            await self._close(self._sessions.pop(id, None))
        if self._asked.get(id) is task:
            del self._asked[id]
        return reply

    async def _turns(self, id: tuple[int, int], request: calls.Request, waits: Callable[[bool], None]) -> calls.Request:
        messages, session = request["messages"], self._sessions.get(id)
        observed: list[list[Message]] = []
        if session is None or session.messages != messages[:-1] or not messages or request["again"]:
            await self._close(self._sessions.pop(id, None))
            if messages[:-1] and not self._replays:
                raise Lost("the environment does not replay")
            session = Session(self._kind(**self._params), asyncio.get_running_loop().time())
            self._sessions[id] = session  # before its reset, so that one that fails or hangs is closed
            opening = await self._call(session, waits, session.environment.reset, EpisodePrompt(**request["prompt"]))
            observed.append(self._observed(opening))
        for message in messages[len(session.messages) :]:
            if session.done:
                raise Lost("the environment ended the episode earlier than it did before")
            left_s = session.began_s + self._episode_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise EnvironmentError(f"the episode took over environment.episode_timeout_s = {self._episode_s:g} s")
            turn = len(session.messages)
            step = self._call(session, waits, session.environment.step, message)
            answer, session.done, terms = await step
            for name, value in terms.items():
                if name not in self._terms or not math.isfinite(value):
                    raise EnvironmentError(f"the reward term {name!r} is {value}; terms are {', '.join(self._terms)}")
                session.terms[name] = session.terms.get(name, 0.0) + float(value)
            session.messages.append(message)
            answer = self._observed(answer)
            observed.append(answer if session.done else await self._noise.on(answer, id, turn))
        return {"observed": observed, "done": session.done, "terms": session.terms, "replayed": len(observed) > 1}

    async def _call(
        self, session: Session, waits: Callable[[bool], None], method: Callable[..., Awaitable[T]], *arguments: object
    ) -> T:
        """What a method of the episode answers, within step_timeout_s. TimeoutError: it does not."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._step_s) as deadline:
            left_s = since_s = 0.0

            def clock(stops: bool) -> None:
                nonlocal left_s, since_s
                if stops and (when := deadline.when()) is not None:
                    left_s, since_s = when - loop.time(), loop.time()
                    deadline.reschedule(None)
                    waits(True)
                elif not stops and deadline.when() is None and not over:
                    session.began_s += loop.time() - since_s
                    deadline.reschedule(loop.time() + left_s)
                    waits(False)

            over = False
            before = CLOCK.set(clock)
            try:
                return await called(method, *arguments)
            finally:
                over = True
                CLOCK.reset(before)

    def _observed(self, messages: Sequence[Message]) -> list[Message]:
        """Turn contents that are lists into text; where all texts together are above the bound, leave out the middle of
        each that is above its share."""
        taken: list[Message] = []
        for message in messages or ():
            if not isinstance(message, dict):  # which whoever renders it refuses in a sentence
                taken.append(message)
                continue
            content = message.get("content")
            if isinstance(content, list):
                if other := [item for item in content if not isinstance(item, dict) or item.get("type") != "text"]:
                    raise EnvironmentError(f"an item of a content is no text: {other[0]!r:.100}")
                content = "".join(str(item.get("text", "")) for item in content)
            taken.append({**message, "content": content} if "content" in message else message)
        texts = [message for message in taken if isinstance(message, dict) and isinstance(message.get("content"), str)]
        if sum(len(message["content"]) for message in texts) > self._most_chars:
            half = self._most_chars // len(texts) // 2
            for message in texts:
                content, left_out = message["content"], len(message["content"]) - 2 * half
                if left_out > 0:
                    end = content[half + left_out :]
                    message["content"] = f"{content[:half]}\n[{left_out} characters left out]\n{end}"
        return taken

    async def _close(self, session: Session | None) -> None:
        if session is not None:
            with contextlib.suppress(Exception):  # the episode is over, and nothing depends on its object
                await self._call(session, lambda waits: None, session.environment.close)


def resolved(path: str) -> type[Environment]:
    """The environment of an import path; Declined in a sentence."""
    module, _, name = callables.registered("environment").get(path, path).rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise calls.Declined(f"environment.name: {path} cannot be imported: {type(error).__name__}: {error}") from error
    lacks = [each for each in ("terms", "replays", "reset", "step", "close") if not hasattr(found, each)]
    if lacks:
        raise calls.Declined(f"environment.name: {path} has no {', '.join(lacks)}")
    return found


def keywords(kind: type[Environment], setup: calls.Request) -> dict[str, Any]:
    """Keywords of the constructor."""
    if "policy" not in inspect.signature(kind).parameters:
        return setup["params"]
    return {**setup["params"], "policy": PolicyFacts(**setup["policy"])}


def prepare(setup: calls.Request) -> tuple[calls.Request, calls.Answer]:
    """The properties of the environment, and what answers its questions."""
    kind = resolved(setup["name"])
    try:
        tried = kind(**keywords(kind, setup))
    except calls.Declined:
        raise
    except ImportError as error:  # of what an adapter needs
        raise calls.Declined(f"environment.name: {setup['name']}: {error}") from error
    except Exception as error:  # the constructor's
        raise calls.Declined(f"environment.params: {type(error).__name__}: {error}") from error
    # Whether it speaks token ids; of a mix, the tasks whose environment does.
    tokens = getattr(tried, "tokens", False)
    if tokens and (noise := [name for name in NOISE if setup["noise"][name]]):
        # observations that are token ids have no text that it could change
        raise calls.Declined(f"environment.noise_{noise[0]}: {setup['name']} says token ids, which have no noise")
    properties = {"terms": list(tried.terms), "replays": bool(tried.replays), "tokens": tokens}
    return properties, EpisodeServer(kind, setup, tried.terms, bool(tried.replays)).answer


if __name__ == "__main__":
    calls.serve(int(sys.argv[1]), prepare)
