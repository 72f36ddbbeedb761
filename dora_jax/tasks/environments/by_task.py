"""Stage 3: an environment for each task of a mix.

    environment.name = "dora_jax.tasks.environments.by_task.ByTask"
    environment.params = {
        "sums": {"name": "dora_jax.tasks.environments.calculator.Calculator"},
        "riddles": {"rewards": ["dora_jax.tasks.rewards.exact"]},
    }

    eval.solved = "total >= 1"  # by default the first reward term decides, which is that of one task alone

The keys are those of task.mix. An entry names an environment and the params of its constructor, or rewards: then the
policy's first message is its answer, which they score.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from dora_jax.tasks.environment import (
    NO_POLICY,
    Environment,
    EnvironmentError,
    EpisodePrompt,
    Message,
    PolicyFacts,
    called,
)
from dora_jax.tasks.environments.environment_worker import resolved
from dora_jax.tasks.rewards import RewardError, of_group, resolve, score, summed
from dora_jax.tasks.sandbox import calls


class ByTask:
    """Its reward terms are those of all. tokens: the tasks whose environment speaks token ids."""

    terms: tuple[str, ...] = ()
    replays = False
    tokens: tuple[str, ...] = ()

    def __init__(self, policy: PolicyFacts = NO_POLICY, **tasks: dict[str, Any]):
        self._makers = {task: _maker(task, dict(entry), policy) for task, entry in tasks.items()}
        made = {task: maker() for task, maker in self._makers.items()}
        self.terms = tuple(dict.fromkeys(term for each in made.values() for term in each.terms))
        self.replays = all(each.replays for each in made.values())
        self.tokens = tuple(task for task, each in made.items() if getattr(each, "tokens", False))
        self._own: Environment | None = None

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        if prompt.task not in self._makers:
            raise EnvironmentError(f"environment.params: the task {prompt.task!r} is none of {', '.join(self._makers)}")
        self._own = self._makers[prompt.task]()
        return await called(self._own.reset, prompt)

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        assert self._own is not None
        return await called(self._own.step, message)

    async def close(self) -> None:
        if self._own is not None:
            await called(self._own.close)


class OneAnswer:
    """rewards: import paths, as in task.rewards. A reward that returns several terms is named among `terms` by them."""

    terms: tuple[str, ...] = ()
    replays = True

    def __init__(self, rewards: list[str], terms: list[str] | None = None):
        try:
            self._rewards = resolve(rewards)
        except RewardError as error:
            raise calls.Declined(str(error)) from error
        if together := [name for name, reward in self._rewards.items() if of_group(reward)]:
            raise calls.Declined(
                f"environment.params: the reward {together[0]} takes responses, all of a prompt together, and an "
                "episode is one of them"
            )
        self.terms = tuple(terms or self._rewards)

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._prompt = prompt
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        try:
            prompt = self._prompt
            (scored,) = await score(self._rewards, prompt.text, [message["content"]], prompt.answer, prompt.row)
            found, _ = summed(scored)
        except RewardError as error:
            raise EnvironmentError(str(error)) from error
        return [], True, found

    async def close(self) -> None:
        """Nothing is open."""


def _maker(task: str, entry: dict[str, Any], policy: PolicyFacts) -> Any:
    """() -> the environment of a task; Declined in a sentence."""
    if "rewards" in entry:
        if unknown := set(entry) - {"rewards", "terms"}:
            raise calls.Declined(f"environment.params.{task}: {min(unknown)} is none of rewards, terms")
        return functools.partial(OneAnswer, **entry)
    if not entry.get("name") or (unknown := set(entry) - {"name", "params"}):
        raise calls.Declined(f"environment.params.{task}: it takes name and params, or rewards and terms")
    kind: Any = resolved(entry["name"])
    more = {"policy": policy} if "policy" in inspect.signature(kind).parameters else {}
    return functools.partial(kind, **entry.get("params", {}), **more)
