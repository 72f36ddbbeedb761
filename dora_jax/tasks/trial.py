"""Stage 3, before anything is compiled: the rewards score one real row, so that a broken reward is refused in seconds.

Consumes a pool of reward workers and a prompt; produces the names of the terms that the rewards return. The row is
tried with two responses, its own answer and the empty text, because a policy writes anything; both are scored as
samples are: decoded, in a worker process, with its deadline and its retries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from dora_jax.config import ConfigError
from dora_jax.tasks.pool import GroupFailure, ScorerPool
from dora_jax.tasks.rewards import plain
from dora_jax.tasks.source import shorten
from dora_jax.types import Prompt, Sample, SampleId, Span

POLL_S = 0.01
INITIAL = 0  # the version that the tried responses pretend to be of


def try_rewards(pool: ScorerPool, prompt: Prompt, encode: Callable[[str], Sequence[int]]) -> tuple[str, ...]:
    """The terms of the reward, in the order of task.rewards; ConfigError says which response of which row has no
    score."""
    pool.wait_ready()
    pool.submit(prompt, tuple(_response(prompt, i, encode(text)) for i, text in enumerate((_answer(prompt), ""))))
    while not (done := pool.poll()):
        time.sleep(POLL_S)
    (result,) = done
    if isinstance(result, GroupFailure):
        raise ConfigError(
            f"task.rewards: {result.reason}, tried on the response {shorten(result.response)!r} to the prompt "
            f"{shorten(prompt.text)!r} with the answer {shorten(_answer(prompt))!r}"
        )
    return tuple(result.parts)


def _answer(prompt: Prompt) -> str:
    return str(plain(prompt.answer))


def _response(prompt: Prompt, index: int, ids: Sequence[int]) -> Sample:
    return Sample(
        id=SampleId(prompt.group_id, index),
        prompt_ids=prompt.token_ids,
        out_ids=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        mask=np.ones(len(ids), bool),
        spans=(Span(version=INITIAL, start=0, stop=len(ids)),),
        finish="stop",
    )
