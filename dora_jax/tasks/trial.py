"""Stage 3, before a run begins: its rewards score one real row.

Consumes the pool of a run and the first prompt of its task; produces the terms of its reward, or the sentence that
names the response and the row that have no score. The responses are what a user would try first: the row's own answer,
and nothing at all. They take the way of every sample: decoded, asked in a worker process, within its deadline and
retries.
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

TRIAL_POLL_S = 0.01
INITIAL = 0  # the version that the responses pretend to be of


def try_rewards(
    pool: ScorerPool, prompt: Prompt, encode: Callable[[str], Sequence[int]], alone: str = ""
) -> tuple[str, ...]:
    """Scores one real row before anything is compiled, so that a broken reward is refused in seconds. Returns the terms
    of the reward, in the order of task.rewards; ConfigError says which response of which row has no score.

    The row is tried with two responses, its own answer and the empty text, because a policy writes anything; both are
    scored as samples are: decoded, in a worker process, with its deadline and its retries. alone: the field that makes
    the run submit samples one by one, so that no reward can see a group."""
    pool.wait_ready()
    if alone and (together := [name for name, (_, of_group) in pool.kinds.items() if of_group]):
        raise ConfigError(
            f"task.rewards: {together[0]} takes responses, all of a prompt together, and with {alone} each "
            "session is scored alone"
        )
    answer, samples = "" if prompt.answer is None else str(plain(prompt.answer)), []
    for index, text in enumerate((answer, "")):
        ids = np.asarray(encode(text), np.int32)
        sample = Sample(
            id=SampleId(prompt.group_id, index),
            prompt_ids=prompt.token_ids,
            out_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            mask=np.ones(len(ids), bool),
            spans=(Span(version=INITIAL, start=0, stop=len(ids)),),
            finish="stop",
        )
        samples.append(sample)
    pool.submit(prompt, tuple(samples))
    while not (done := pool.poll()):
        time.sleep(TRIAL_POLL_S)
    (result,) = done
    if isinstance(result, GroupFailure):
        raise ConfigError(
            f"task.rewards: {result.reason}, tried on the response {shorten(result.response)!r} to the prompt "
            f"{shorten(prompt.text)!r} with the answer {shorten(answer)!r}"
        )
    return tuple(result.parts)
