"""Stage 3: what answers a policy that takes several turns. `environment.name` is the import path of one.

    class Calculator:
        terms = ("right",)
        replays = True
        async def reset(self, prompt): return []
        async def step(self, message): return [{"role": "tool", "content": "7"}], False, {}
        async def close(self): ...

An object is one episode; many live in one worker process (environment_worker.py). What takes long is awaited, or blocks
a thread: methods may be plain functions, and `in_thread` runs one. Laws: an error or a deadline is no reward; the time
in which a call waits for a thread is outside its deadline; the terms of an episode's turns add up; a term that no turn
names is 0. Standard library only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import inspect
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

from dora_jax.base import callables
from dora_jax.types import Columns

NOISE = ("failed", "truncated", "late", "irrelevant")  # environment.noise_*
Message = dict[str, Any]  # role, content, and whatever else a chat template knows
T = TypeVar("T")
THREADS = concurrent.futures.ThreadPoolExecutor(64, thread_name_prefix="environment")  # for methods that block
# Of the worker: stops the clock of the step (True) and lets it go on (False).
CLOCK: contextvars.ContextVar[Callable[[bool], None]] = contextvars.ContextVar("clock", default=lambda waits: None)


class EnvironmentError(Exception):  # the name under which users know it; nothing here means OSError
    """The episode cannot go on, through no fault of the policy. retryable: a fresh attempt may help."""

    def __init__(self, reason: str, retryable: bool = False):
        super().__init__(reason)
        self.retryable = retryable


async def called(method: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """What a method of an environment answers: awaited, or where it is a plain function by one of THREADS."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await in_thread(THREADS, cast(Callable[..., T], method), *arguments)


async def in_thread(
    threads: concurrent.futures.Executor, function: Callable[..., T], *arguments: object, bounded: bool = False
) -> T:
    """The result of a function that blocks, run by one of the threads; until one is free, no deadline passes.

    bounded: nor while it runs, because it ends by a limit of its own."""
    loop, clock = asyncio.get_running_loop(), CLOCK.get()

    def run() -> T:
        if not bounded:
            loop.call_soon_threadsafe(clock, False)
        return function(*arguments)

    clock(True)
    try:
        return await loop.run_in_executor(threads, run)
    finally:
        clock(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePrompt:
    """What an episode begins with: the task's row, as the policy meets it."""

    text: str
    answer: Any  # JSON-serialisable
    seed: int  # the same for every sample of a group
    task: str = ""  # of a mix: its entry's name; else as the source of the prompt names it
    row: Columns = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What an environment of token ids knows of the policy: the keyword `policy` of its constructor."""

    path: str = ""  # of the tokenizer's folder; empty: the environment is only tried, before there is a tokenizer
    context: int = 0  # tokens of prompt and response together
    vocab: int = 0
    turn_tokens: int = 0  # that one turn may sample
    stop_ids: tuple[int, ...] = ()  # that end a turn
    rollout: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # that section of the run's configuration


NO_POLICY = PolicyFacts()


def problems(config: Any) -> Iterator[str]:
    """What does not fit in a configuration with an environment."""
    section = config.environment
    if not section.name:
        return
    identifiers = all(part.isidentifier() for part in section.name.split("."))
    if not (identifiers and "." in section.name or section.name in callables.registered("environment")):
        yield (
            f"environment.name: {section.name!r} is not an import path such as "
            "dora_jax.tasks.environments.calculator.Calculator"
        )
    if "{content}" not in section.observation and config.task.template != "chat":
        yield f"environment.observation: {section.observation!r} has no {{content}} in it"
    if section.python and not shutil.which(section.python):
        yield f"environment.python: {section.python!r} is no interpreter of this machine"
    if section.renderer and config.task.template != "chat":
        yield 'environment.renderer: it renders chats; set task.template = "chat"'
    if section.turn_tokens > config.rollout.max_new_tokens:
        yield (
            f"environment.turn_tokens: {section.turn_tokens} is more than rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}, which holds all turns of an episode"
        )
    if (noise := sum(getattr(section, f"noise_{kind}") for kind in NOISE)) > 1:
        yield f"environment.noise_failed: the shares of {', '.join(NOISE)} observations add up to {noise:g}"
    if config.orchestrator.mode in ("partial", "staleflow"):
        yield f"orchestrator.mode: {config.orchestrator.mode}; an episode belongs to one version"
    if config.reward_model.path:
        yield "reward_model.path: the environment gives the reward of its episodes; leave it empty"
    if section.most_branches and config.trainer.advantage == "vcpo":
        yield "trainer.advantage: vcpo needs the gradient of a whole trajectory, which branches have none of"


class Environment(Protocol):
    """One episode. `environment.params` are the keywords of its constructor.

    terms: of the reward; accuracy counts the first where eval.solved names none. replays: the same messages always
    give the same observations, so that an episode whose object is lost is made again by its messages; where that is
    not so, it begins again.

    An environment with `tokens = True` speaks token ids: a message of the policy holds token_ids, logprobs, finish
    ("stop" or "length") and version, and the one message that is observed holds, as token_ids, all that the next turn
    follows, earlier turns included. Its constructor takes `policy`, a PolicyFacts.

    `reset`, `step` and `close` may be plain functions, which then run in threads of the worker, several at once; an
    `async def` that blocks stops every episode of its process."""

    terms: ClassVar[tuple[str, ...]]
    replays: ClassVar[bool]

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        """What follows the prompt before the policy's first turn; often nothing."""

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        """(what the policy observes next, whether the episode is over, the reward terms of this turn)."""

    async def close(self) -> None:
        """The episode is over, whatever ended it."""
