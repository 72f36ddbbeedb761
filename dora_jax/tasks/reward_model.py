"""Stage 3, a trained judge: groups with the rewards of their task -> the same groups with a model's score added.

    submit -> [reward workers] -> poll -> queue -> [thread: pack -> one jit on the model's mesh] -> results -> poll

Consumes finished samples and a Hugging Face folder `...ForSequenceClassification` of one label (or weights of our
families with a head `score.weight` [1, D]); produces weight * score as the term `reward_model`, beside decoding.
The score is what transformers returns: the head over the hidden state of the last token that is not the model's pad.
Laws:
  generated ids are never encoded again: the model reads the sample's own, so every token of the policy's tokenizer has
  the same id in the model's;
  a score depends on its group alone: its samples are packed by themselves into rows of one static shape, which is
  compiled once; neither the time of scoring nor other groups change a bit of it;
  neither submit nor poll waits; a score that is not finite fails its group and is never a reward;
  held-out groups keep the reward of their task where there is one, so that accuracy means what it meant.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.config import RewardModelSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.hf_config import read_json
from dora_jax.models.tokenizer import vocabulary
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.worker_process import drained
from dora_jax.types import Prompt, Sample, ScoredGroup, is_eval

TERM = "reward_model"
CLOSE_TIMEOUT_S = 60.0  # for the batch that is being computed


def check(path: str | Path, policy: str | Path, max_tokens: int) -> None:
    """ValueError says in a sentence why this folder cannot score samples of the policy's folder."""
    cfg = hf.check(path, scorer=True)
    theirs = vocabulary(path)
    for token, i in vocabulary(policy).items():
        if theirs.get(token) != i:
            found = f"id {theirs[token]}" if token in theirs else "no id"
            raise ValueError(
                f"{path} gives the token {token!r} {found}, the policy's tokenizer {i}: a reward model "
                "reads the policy's own ids"
            )
        if i >= cfg.vocab_size:
            raise ValueError(f"{path} embeds {cfg.vocab_size} ids, and the policy's token {token!r} is {i}")
    if max_tokens > cfg.max_position:
        raise ValueError(f"{path} has {cfg.max_position} positions, the longest sample {max_tokens} tokens")


class RewardModel:
    """The weights on their mesh and the forward pass; used by one thread."""

    def __init__(self, section: RewardModelSection, mesh: Mesh, dtype: str = "float32"):
        self._cfg, self._params, head_D = hf.load_scorer(section.path, mesh, dtype)
        self._whole, self._rows_over = NamedSharding(mesh, PartitionSpec()), sharding.batch_spec(mesh)
        self._head_D = jax.device_put(head_D, self._whole)
        self._shape = section.rows or section.data * section.fsdp, section.pack_tokens
        self._pad_id = read_json(Path(section.path) / "config.json").get("pad_token_id")
        forward = functools.partial(_scores, self._cfg, mesh, jnp.dtype(dtype))
        self._jitted = decoder.jitted(forward, dtype, out_shardings=self._whole)
        self._run: Any = None

    def compile(self) -> None:
        """Once; every batch has this shape."""
        rows = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._rows_over)
        self._run = self._jitted.lower(self._params, self._head_D, rows, rows, rows).compile()

    def scores(self, samples: Sequence[Sample]) -> np.ndarray:
        """f32[n]; the samples share batches with each other only."""
        texts = [np.concatenate([sample.prompt_ids, sample.out_ids]) for sample in samples]
        places = _places([len(text) for text in texts], self._shape[1])
        batches = range(0, max(place.row for place in places) + 1, self._shape[0])  # by the first row of each
        # tokens, segment ids and positions, i32[rows of all batches, L]
        tokens, segments, positions = (
            np.zeros((batches[-1] + self._shape[0], self._shape[1]), np.int32) for _ in range(3)
        )
        lasts = []
        for text, place in zip(texts, places):
            here = place.row, slice(place.start, place.start + len(text))
            tokens[here], segments[here], positions[here] = text, place.segment, np.arange(len(text))
            # where transformers reads the head; with the end token as pad that is the token before it
            real = np.flatnonzero(text != self._pad_id) if self._pad_id is not None else [len(text) - 1]
            lasts.append(place.start + (int(real[-1]) if len(real) else 0))
        values = []
        for first in batches:
            batch = (x[first : first + self._shape[0]] for x in (tokens, segments, positions))
            on_device = [jax.device_put(x, self._rows_over) for x in batch]
            values.append(np.asarray(self._run(self._params, self._head_D, *on_device)))
        return np.concatenate(values)[[place.row for place in places], lasts]


class ModelScorer:
    """A `Scorer` behind another, `task` (None: there are no other rewards). Closes it too."""

    def __init__(self, model: RewardModel, weight: float, task: Any | None):
        self._model, self._weight, self._task = model, weight, task
        self._jobs: queue.SimpleQueue[ScoredGroup | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ScoredGroup | GroupFailure] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None:
        self._check()
        if self._task:
            self._task.submit(prompt, samples)
        else:
            self._jobs.put(
                ScoredGroup(
                    group_id=prompt.group_id,
                    version=samples[0].version,
                    samples=samples,
                    parts={},
                    rewards=np.zeros(len(samples), np.float32),
                )
            )

    def poll(self) -> list[ScoredGroup | GroupFailure]:
        """What has finished since the last call; each group once."""
        self._check()
        done = []
        for group in self._task.poll() if self._task else ():
            if isinstance(group, GroupFailure) or is_eval(group.group_id):
                done.append(group)
            else:
                self._jobs.put(group)
        return done + drained(self._results)

    def close(self) -> None:
        """Groups not yet polled are gone. May be called twice."""
        self._closed = True
        self._jobs.put(None)
        if self._task:
            self._task.close()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ private

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the reward model is closed")

    def _serve(self) -> None:
        try:
            self._model.compile()
            while (group := self._jobs.get()) is not None and not self._closed:
                self._results.put(self._judged(group))
        except Exception as error:  # handed to the next call: a thread has no caller to raise to
            self._error = error

    def _judged(self, group: ScoredGroup) -> ScoredGroup | GroupFailure:
        failed = [sample for sample in group.samples if sample.finish == "error"]
        scores = np.zeros(len(group.samples), np.float32) if failed else self._model.scores(group.samples)
        if failed or not np.isfinite(scores).all():
            kind = "a sample ended in an error" if failed else "a score of the reward model is not finite"
            worst = int(np.argmin(np.isfinite(scores)))
            reason = f"the reward model scored sample {tuple(group.samples[worst].id)} {scores[worst]}"
            if failed:
                reason = f"sample {tuple(failed[0].id)} ended in an error"
            lengths = tuple(len(sample.out_ids) for sample in group.samples)
            return GroupFailure(group_id=group.group_id, reason=reason, kind=kind, lengths=lengths)
        term = np.float32(self._weight) * scores
        return dataclasses.replace(group, rewards=group.rewards + term, parts={**group.parts, TERM: term})


class _ScoredPlace(NamedTuple):
    row: int  # over all batches of the group
    start: int
    segment: int  # 1.. within the row


def _places(lengths: Sequence[int], tokens: int) -> list[_ScoredPlace]:
    """First fit by falling length, ties by index; as many rows as that takes."""
    used: list[tuple[int, int]] = []  # (tokens, segments) of each row
    places: dict[int, _ScoredPlace] = {}
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, (length, _) in enumerate(used) if length + lengths[i] <= tokens), len(used))
        used += [(0, 0)] if row == len(used) else []
        start, segments = used[row]
        places[i] = _ScoredPlace(row, start, segments + 1)
        used[row] = start + lengths[i], segments + 1
    return [places[i] for i in range(len(lengths))]


def _scores(
    cfg: decoder.ModelConfig,
    mesh: Mesh,
    dtype: Any,
    params: Any,
    head_D: jax.Array,
    tokens_BxL: jax.Array,
    segment_ids_BxL: jax.Array,
    positions_BxL: jax.Array,
) -> jax.Array:
    """f32[B, L]: the head over every token, each segment on its own."""
    attend = segment_attention(segment_ids_BxL, positions_BxL)
    hidden_BxLxD = decoder.forward(
        cfg, params, tokens_BxL, positions_BxL, attend, dtype=dtype, constrain=sharding.constrain_rows(mesh)
    )
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("bld,d->bl", hidden_BxLxD.astype(jnp.float32), head_D, precision=highest)
