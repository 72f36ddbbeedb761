"""Stage 5, train: what the models say of a packed batch before its advantages exist. One jitted call each.

Consumes a TrainBatch whose tokens stand; produces f32[B, L] arrays by name (old_logprobs, ref_logprobs, values,
grad_sq), those that the objective needs. Law: all of it is of the weights at the start of the step.

Stage 5, train: the log-probs of a packed batch by the engine's own calls, `rollout.exact`.

Consumes a TrainBatch and what replays its answers; produces f32[B, L], in which the loss takes the values of its
log-probs. Their gradient stays that of the trainer's forward. Law: prompts and answers are cut out of the rows exactly
as the engine had them, shared prompts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models.sharding import row_shards
from dora_jax.trainer.model import Adapted
from dora_jax.types import Version

Answer = tuple[np.ndarray, np.ndarray]  # i32[P] prompt, i32[U] what came behind it
Masks = Sequence[np.ndarray]  # bool[U] of each answer: what of it the policy sampled, the first token among it
Rungs = Sequence[np.ndarray]  # i32[U] of each answer: rows of the decode call that drew each token; 0: of the widest


class Replay(Protocol):
    """An engine's calls, as the trainer asks for them."""

    def __call__(
        self,
        params: Any,
        answers: Sequence[Answer],
        masks: Masks | None = None,
        version: Version = 0,
        rungs: Rungs | None = None,
    ) -> list[np.ndarray]:
        """f32[U] of each answer under the trainer's masters, those of this version; 0 where nothing is sampled. masks:
        None: all is. rungs: None: every token was drawn by the widest calls."""

    def warmup(self) -> None:
        """Compiles the calls."""


def replayed_logprobs(replay: Replay, params: Any, batch: Any, version: Version) -> np.ndarray:
    """f32[B, L]: of the targets that the policy sampled; 0 elsewhere. params: the masters of this version."""
    places, answers, masks = answers_of(batch)
    out = np.zeros(batch.tokens.shape, np.float32)
    rungs = None if batch.rungs is None else [batch.rungs[place] for place in places]
    for (row, columns), scored in zip(places, replay(params, answers, masks, version, rungs), strict=True):
        out[row, columns] = scored
    return out


def answers_of(batch: Any) -> tuple[list[tuple[int, slice]], list[Answer], list[np.ndarray]]:
    """(row and columns of the targets, prompt and answer, mask) of every trajectory of a packed batch."""
    places, answers, masks = [], [], []
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
            masks.append(batch.version[row, first:stop] >= 0)
    return places, answers, masks


GRADIENTS_AT_ONCE = 4  # whole gradients alive while the exact norm of each trajectory's is taken


def segments_of(batch: Any) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every trajectory of a packed batch, row by row."""
    found = []
    for row, ids in enumerate(batch.segment_ids):
        for segment in range(1, int(ids.max()) + 1):
            at = np.flatnonzero(ids == segment)
            found.append((row, int(at[0]), int(at[-1]) + 1))
    return found


def one_a_row(batch: Any, segments: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    """Each trajectory from column 0 of a row of its own, [n, L]."""
    names: tuple[str, ...] = ("tokens", "targets", "positions", "mask", "segment_ids")
    names += ("routes", "temperatures")
    out = {
        name: np.zeros((len(segments), *x.shape[1:]), x.dtype)
        for name in names
        if (x := getattr(batch, name)) is not None
    }
    for i, (row, start, stop) in enumerate(segments):
        for name, x in out.items():
            x[i, : stop - start] = getattr(batch, name)[row, start:stop]
    return out


def grad_norms_sq(model: Any, params: Any, rows: dict[str, jax.Array]) -> jax.Array:
    """f32[n]: |grad sum_t m log pi|^2 of each row's trajectory, exact, GRADIENTS_AT_ONCE gradients at a time.

    Gradients are sharded like the parameters; on several data shards the others' rows stay empty meanwhile.
    """
    empty = row_shards(model.mesh) - 1
    trained, weights = Adapted.learning(params)

    def one(row: dict[str, jax.Array]) -> jax.Array:
        def log_prob(trained: Any) -> jax.Array:
            alone = {name: jnp.pad(x[None], ((0, empty), *[(0, 0)] * x.ndim)) for name, x in row.items()}
            logprobs, _ = model.logprobs(weights(trained), alone)
            return jnp.sum(jnp.where(row["mask"], logprobs[0], 0.0))

        return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(jax.grad(log_prob)(trained)))

    return jax.lax.map(one, rows, batch_size=GRADIENTS_AT_ONCE)
