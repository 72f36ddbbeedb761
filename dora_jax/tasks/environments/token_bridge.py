"""Stage 3: between an engine and an environment that speaks token ids itself, such as a client with a renderer of its own.

As bridge.py, but that nothing is encoded or decoded here: what the environment says is the whole prompt of the next turn.
Where that does not begin with the exact earlier tokens, a branch begins at the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dora_jax.tasks.environment import Message
from dora_jax.tasks.environments.bridge import Conversation, shared_length
from dora_jax.types import Prompt, Version


class TokenBridge:
    """stop_ids: the tokens that end a turn."""

    def __init__(self, stop_ids: Sequence[int]):
        self._stop_ids = frozenset(stop_ids)

    def begin(self, prompt: Prompt) -> Conversation:
        return Conversation([], "")

    def message(self, turn: np.ndarray, logprobs: np.ndarray, version: Version) -> Message:
        """i32[n], f32[n] -> what the environment is told."""
        return {
            "role": "assistant",
            "token_ids": turn.tolist(),
            "logprobs": logprobs.tolist(),
            "finish": "stop" if int(turn[-1]) in self._stop_ids else "length",
            "version": version,
        }

    def observe(
        self, told: Conversation, tokens: np.ndarray, turn: np.ndarray, observed: Sequence[Message]
    ) -> tuple[np.ndarray, int | None]:
        """As Bridge.observe."""
        (message,) = observed
        ids = np.array(message["token_ids"], np.int32)
        shared = shared_length(ids, tokens)
        if shared == len(tokens):
            return ids[shared:], None
        keep = min(shared, len(ids) - 1)  # something is observed
        return ids[keep:], keep
