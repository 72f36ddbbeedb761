"""Stage 5, train: the log-probs of a packed batch by the engine's own calls, `rollout.exact`.

Consumes a TrainBatch and what replays its answers; produces f32[B, L], in which the loss takes the values of its
log-probs. Their gradient stays that of the trainer's forward. Law: prompts and answers are cut out of the rows exactly as
the engine had them, shared prompts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Answer = tuple[np.ndarray, np.ndarray]  # i32[P] prompt, i32[U] sampled tokens


class Replay(Protocol):
    """An engine's calls, as the trainer asks for them."""

    def __call__(self, params: Any, answers: Sequence[Answer]) -> list[np.ndarray]:
        """f32[U] of each answer under the trainer's masters."""

    def warmup(self) -> None:
        """Compiles the calls."""


def logprobs(replay: Replay, params: Any, batch: Any) -> np.ndarray:
    """f32[B, L]: of the targets that the policy sampled; 0 elsewhere."""
    places, answers = answers_of(batch)
    out = np.zeros(batch.tokens.shape, np.float32)
    for (row, columns), scored in zip(places, replay(params, answers), strict=True):
        out[row, columns] = scored
    return out


def answers_of(batch: Any) -> tuple[list[tuple[int, slice]], list[Answer]]:
    """(row and columns of the targets, prompt and answer) of every trajectory of a packed batch."""
    places, answers = [], []
    for row, segments in enumerate(batch.segment_ids):
        tokens, targets = batch.tokens[row], batch.targets[row]
        for segment in range(1, int(segments.max()) + 1):
            columns = np.flatnonzero(segments == segment)
            sampled = columns[batch.version[row, columns] >= 0]
            if not len(sampled):
                continue  # a prompt that others continue, or what was observed alone
            prefix = segment if batch.prefix_ids is None else batch.prefix_ids[row, columns[0]]
            shared = tokens[segments == prefix] if prefix != segment else tokens[:0]
            first, stop = int(sampled[0]), int(columns[-1]) + 1
            prompt = np.concatenate([shared, tokens[columns[0] : first + 1]])
            places.append((row, slice(first, stop)))
            answers.append((prompt, targets[first:stop]))
    return places, answers
