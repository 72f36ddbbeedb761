"""The samples that a person reads: the best and the worst answer of each step's most mixed group.

    WORKDIR/trajectories.txt    to read
    WORKDIR/samples.jsonl       for programs: a row a step; of some steps each token's advantage and both log-probs

Consumes the groups of a step and, from the trainer's thread, what the trainer made of their tokens (`TokenViews`).
Laws: what is looked at moves nothing: no batch and no weight is changed by it; each of the two keeps within its budget,
the older half in trajectories.1.txt and samples.1.jsonl, and the oldest rows are dropped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.base.retrying_file import PatientFile
from dora_jax.types import GroupId, Prompt, Sample, SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.buffer.pack import TrainBatch
    from dora_jax.trainer.step import Trainer

Batches = Any  # seams.Batches, whose module knows this one
Pack = Callable[[Sequence[ScoredGroup], Version], Batches]  # seams.Pack

SHOWN_TOKENS = 512  # of a sample, one by one
CONTEXT = 4  # tokens before a token with which it is decoded: a piece of a word may need its neighbours
DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What a step's trainer made of a sample's tokens, NaN where the policy did not sample the token."""

    id: SampleId
    advantages: np.ndarray  # f32[U]
    logprobs: np.ndarray  # f32[U], nats, under the weights that the step starts from


# What a trainer, of this process or of a gang, has seen of the samples that a person reads, in the step that made this
# version; it is forgotten, as is what was seen before it.
SeenTokens = Callable[[Version], Mapping[SampleId, TokenView]]


def most_mixed(groups: Sequence[ScoredGroup]) -> tuple[ScoredGroup, int, int]:
    """The group whose rewards spread most, and the indices of its best and its worst sample."""
    group = max(groups, key=lambda g: float(np.std(g.rewards)))
    order = np.argsort(group.rewards, kind="stable")
    return group, int(order[-1]), int(order[0])


class TokenViews:
    """`pack` packs as the one given and looks, every so many steps, at two samples on their way to the trainer.

    The trainer's thread packs; any thread takes.
    """

    def __init__(self, trainer: Trainer, every: int, pack: Pack):
        """every: steps between two looks; 0: none."""
        self._trainer, self._every, self._pack = trainer, every, pack
        self._seen: dict[Version, dict[SampleId, TokenView]] = {}
        self._lock = threading.Lock()

    def pack(self, groups: Sequence[ScoredGroup], base: Version) -> Batches:
        batches = self._pack(groups, base)
        if not self._every or (base + 1) % self._every:
            return batches
        if isinstance(batches, Iterator):
            return self._on_the_way(batches, groups, base)
        self._look(batches, groups, base)
        return batches

    def take(self, version: Version) -> dict[SampleId, TokenView]:
        with self._lock:
            seen = self._seen.get(version, {})
            self._seen = {v: views for v, views in self._seen.items() if v > version}
        return seen

    # ------------------------------------------------------------ private

    def _on_the_way(
        self, batches: Iterator[TrainBatch], groups: Sequence[ScoredGroup], base: Version
    ) -> Iterator[TrainBatch]:
        for batch in batches:
            self._look((batch,), [group for group in groups if group.group_id in batch.group_ids], base)
            yield batch

    def _look(self, batches: Sequence[TrainBatch], groups: Sequence[ScoredGroup], base: Version) -> None:
        """Looks once a step: at the first of its parts, while the weights are those that it starts from."""
        with self._lock:
            if base + 1 in self._seen:
                return
            self._seen[base + 1] = {}
        group, best, worst = most_mixed(groups)
        views = {}
        for i in dict.fromkeys((best, worst)):
            id = group.samples[i].id
            for batch in batches:
                if (place := place_of(batch, group.samples[i], float(group.rewards[i]))) is None:
                    continue  # it is not in this batch, or not in one piece
                row, tokens = place
                unseen = np.where(batch.mask[row, tokens], np.float32(0), np.float32(np.nan))
                views[id] = TokenView(
                    id=id,
                    advantages=batch.advantages[row, tokens] + unseen,
                    logprobs=self._trainer.row_logprobs(batch, row)[tokens] + unseen,
                )
        with self._lock:
            self._seen[base + 1] = views


def place_of(batch: TrainBatch, sample: Sample, reward: float) -> tuple[int, slice] | None:
    """(row, columns) of a sample's response: where its tokens are the targets, with the engine's log-probs."""
    n = len(sample.out_ids)
    logprobs = np.where(sample.mask, sample.logprobs, 0.0).astype(np.float32)
    if not n:
        return None
    starts = (batch.targets == sample.out_ids[0]) & (batch.behavior_logprobs == logprobs[0])
    for row, first in np.argwhere(starts & (batch.rewards == np.float32(reward))):
        here = slice(int(first), int(first) + n)
        if np.array_equal(batch.targets[row, here], sample.out_ids) and np.array_equal(
            batch.behavior_logprobs[row, here], logprobs
        ):
            return int(row), here
    return None


class SampleLog:
    """Writes both files, a step at a time."""

    def __init__(
        self,
        workdir: Path,
        notify: Callable[[str], None],
        decode: Callable[[Sequence[int]], str],
        prompt_of: Callable[[GroupId], Prompt],
        views: SeenTokens | None,
        log_bytes: int = 0,
    ):
        """log_bytes: budget of each of the two; 0: none."""
        self._trajectories = PatientFile(workdir / "trajectories.txt", notify, budget_bytes=log_bytes, lines=True)
        self._samples = PatientFile(workdir / "samples.jsonl", notify, budget_bytes=log_bytes, lines=True)
        self._decode, self._prompt_of, self._views = decode, prompt_of, views

    def close(self) -> None:
        self._trajectories.close()
        self._samples.close()

    def write(self, version: Version, groups: Sequence[ScoredGroup]) -> None:
        views = self._views(version) if self._views else {}
        seen = [group for group in groups if any(sample.id in views for sample in group.samples)]
        group, best, worst = most_mixed(seen or groups)
        prompt, mean = self._prompt_of(group.group_id), float(group.rewards.mean())
        text = (
            f"=== step {version}  group {group.group_id}  version {group.version}  "
            f"reward mean {mean:.3f}  expected {prompt.answer!r:.80}\nprompt> {prompt.text}\n"
        )
        shown = []
        for i in (best, worst):
            sample, reward = group.samples[i], float(group.rewards[i])
            shown.append(self._row(sample, reward, mean, views.get(sample.id)))
            text += (
                f"[{sample.id.index}] reward {reward:+.3f}, {len(sample.out_ids)} tokens, "
                f"{sample.finish}> {self._decode(sample.out_ids.tolist())}\n"
            )
        self._trajectories.write(text.encode(errors="replace"))
        row = {"step": version, "group": group.group_id, "version": group.version, "prompt": prompt.text,
               "expected": str(prompt.answer), "samples": shown}  # fmt: skip
        self._samples.write(json.dumps(row).encode() + b"\n")

    # ------------------------------------------------------------ private

    def _row(self, sample: Sample, reward: float, mean: float, view: TokenView | None) -> dict[str, Any]:
        """What samples.jsonl says of a sample; log-probs are the engine's, in nats a token."""
        logprobs = np.asarray(sample.logprobs, np.float64)
        finite = bool(np.isfinite(logprobs).all() and len(logprobs))  # JSON knows finite numbers only
        row: dict[str, Any] = {
            "index": sample.id.index,
            "reward": reward,
            "reward_above_mean": reward - mean,
            "tokens": len(sample.out_ids),
            "finish": sample.finish,
            "mean_logprob": float(logprobs.mean()) if finite else None,
            "min_logprob": float(logprobs.min()) if finite else None,
            "text": self._decode(sample.out_ids.tolist()),
        }
        if view is None:
            return row
        # null where the policy did not sample the token
        gap = view.logprobs.astype(np.float64) - sample.logprobs  # of the trainer - of the engine, nats
        columns = {"advantage": view.advantages, "logprob": sample.logprobs, "gap": gap}
        ids = sample.out_ids.tolist()[:SHOWN_TOKENS]
        # the text of each token
        pieces = []
        for i in range(len(ids)):
            before = ids[max(0, i - CONTEXT) : i]
            pieces.append(self._decode([*before, ids[i]])[len(self._decode(before)) :])
        row["by_token"] = {"text": pieces} | {
            name: [round(float(x), DIGITS) if np.isfinite(x) else None for x in values[:SHOWN_TOKENS]]
            for name, values in columns.items()
        }
        return row
