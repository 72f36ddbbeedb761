"""Stage 1: worked dialogues for the supervised warm start: what a policy would say, and what its environment answers to
it.

Consumes an environment with `worked(prompt, slips)`, which returns the policy's messages, and prompts; produces the
turns of each. Law: the observations are the environment's own, without noise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.tasks.environment import EpisodePrompt
from dora_jax.tasks.environments.environment_worker import resolved
from dora_jax.tasks.sandbox.calls import Declined

Dialogue = tuple[tuple[str, bool], ...]  # texts in order, and which of them the policy says


def worked(
    section: EnvironmentSection, prompts: Iterable[tuple[str, Any, bool]], seed: int
) -> list[tuple[str, Dialogue]]:
    """(prompt text, its dialogue) of each (prompt text, answer, whether it slips). ConfigError: there are no
    dialogues."""
    try:
        kind: Any = resolved(section.name)
    except Declined as error:
        raise ConfigError(str(error)) from error
    if not hasattr(kind, "worked"):
        raise ConfigError(
            f"environment.name: {section.name} has no worked dialogues; warm-start on rows of your own (sft.rows), or "
            "name a model that can speak (model.path)"
        )

    async def played() -> list[tuple[str, Dialogue]]:
        found = []
        for i, (text, answer, slips) in enumerate(prompts):
            prompt = EpisodePrompt(text=text, answer=answer, seed=seed + i)
            environment = kind(**section.params)
            messages = kind.worked(prompt, slips)
            turns = [(str(message["content"]), False) for message in await environment.reset(prompt)]
            for message in messages:
                observed, done, _ = await environment.step({"role": "assistant", "content": message})
                turns.append((message, True))
                if not done:
                    turns += [(str(each["content"]), False) for each in observed]
            await environment.close()
            found.append((text, tuple(turns)))
        return found

    return asyncio.run(played())
