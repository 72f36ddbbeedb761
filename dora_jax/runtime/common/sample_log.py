"""What the policy wrote: every group that ended, and to read, the best and the worst answer of each step.

    WORKDIR/samples/STEP.jsonl  a row a group, trained, filtered, failed or held-out, with all of its samples; of some
                                steps two of them with each token's advantage and both log-probs
    WORKDIR/trajectories.txt    the best and the worst answer of each step's most mixed group

Consumes groups as they end and, from the trainer's thread, what the trainer made of their tokens (`TokenViews`).
Laws: what is looked at moves nothing: no batch and no weight is changed by it, and texts are decoded and written on a
thread of their own, whose failure ends no run; the rows keep within their budget, less than a step more, whose oldest
files are deleted; after a resume no row is of a later step than the one resumed from, until it is made again.
"""

from __future__ import annotations

import concurrent.futures
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.base import state_files
from dora_jax.base.retrying_file import PatientFile
from dora_jax.types import GroupId, Prompt, Sample, SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.buffer.pack import TrainBatch
    from dora_jax.trainer.step import Trainer

Row = dict[str, Any]  # JSON
Batches = Any  # seams.Batches, whose module knows this one
Pack = Callable[[Sequence[ScoredGroup], Version], Batches]  # seams.Pack

SHOWN_TOKENS = 512  # of a sample, one by one
CONTEXT = 4  # tokens before a token with which it is decoded: a piece of a word may need its neighbours
DIGITS = 4
FOLDER = "samples"
SEGMENTS = 64  # files that share the budget of the rows
MAX_WAITING_TOKENS = 1 << 24  # of groups whose rows are not written yet, about 150 MB
TABLE_ROWS = 16  # held-out prompts of a version that sinks get
STEP = re.compile(rb'\{"step": (\d+),')  # begins every row


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

    def __init__(self, trainer: Trainer, every: int, pack: Pack, whole: Pack | None = None):
        """every: steps between two looks; 0: none. whole: packs what is looked at, where `pack` gives the rows of this
        process alone."""
        self._trainer, self._every, self._pack, self._whole = trainer, every, pack, whole or pack
        self._seen: dict[Version, dict[SampleId, TokenView]] = {}
        self._lock = threading.Lock()

    def pack(self, groups: Sequence[ScoredGroup], base: Version) -> Batches:
        if not self._every or (base + 1) % self._every:
            return self._pack(groups, base)
        batches = self._whole(groups, base)
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
    """Stores groups as they end. Its calls return at once; `close` waits until all of it is written."""

    def __init__(
        self,
        workdir: Path,
        notify: Callable[[str], None],
        decode: Callable[[Sequence[int]], str],
        prompt_of: Callable[[GroupId], Prompt],
        views: SeenTokens | None,
        *,
        log_bytes: int = 0,
        samples_bytes: int = 0,
        resumed_at: Version | None = None,
    ):
        """log_bytes: budget of trajectories.txt; samples_bytes: of the rows; 0: none. resumed_at: the step from which
        the run goes on; rows of later ones are dropped."""
        self._trajectories = PatientFile(workdir / "trajectories.txt", notify, budget_bytes=log_bytes, lines=True)
        self._folder, self._budget_bytes, self._notify = workdir / FOLDER, samples_bytes, notify
        self._decode, self._prompt_of, self._views = decode, prompt_of, views
        self._rows: PatientFile | None = None
        self._path: Path | None = None  # of the file that grows
        self._heldout: dict[Version, list[Row]] = {}  # rows of versions that are being evaluated
        self._given_tokens = self._written_tokens = 0  # each is counted by one thread
        self._crowded = self._failing = False
        # (step, what they are, rows) for sinks: of held-out prompts, and of steps whose tokens were looked at
        self.tables: queue.SimpleQueue[tuple[Version, str, list[Row]]] = queue.SimpleQueue()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "samples")
        self._thread.submit(self._guarded, self._open, resumed_at)

    def close(self) -> None:
        self._thread.shutdown()
        self._trajectories.close()
        if self._rows:
            self._rows.close()

    def write(self, version: Version, groups: Sequence[ScoredGroup]) -> None:
        """The groups of the step that made this version."""
        views = self._views(version) if self._views else {}
        self._later(version, "trained", groups, views)

    def keep(
        self,
        step: Version,
        kind: str,
        group: ScoredGroup,
        *,
        solved: Sequence[bool] | np.ndarray | None = None,
        reason: str = "",
    ) -> None:
        """A group that no step trains on. kind: heldout (step: the version evaluated), filtered or failed (step: the
        one under way); the rewards of a failed one are NaN, and `reason` says why. solved: which samples are."""
        self._later(step, kind, [group], {}, solved, reason)

    def evaluated(self, version: Version) -> None:
        """The last held-out group of this version has ended."""
        self._thread.submit(self._guarded, self._give, version)

    # ------------------------------------------------------------ private

    def _later(
        self,
        step: Version,
        kind: str,
        groups: Sequence[ScoredGroup],
        views: Mapping[SampleId, TokenView],
        solved: Sequence[bool] | np.ndarray | None = None,
        reason: str = "",
    ) -> None:
        tokens = sum(len(sample.out_ids) for group in groups for sample in group.samples)
        if self._given_tokens - self._written_tokens > MAX_WAITING_TOKENS:
            if not self._crowded:
                self._notify(f"{self._folder} lacks samples: groups end faster than they are written")
            self._crowded = True
            return
        self._given_tokens += tokens
        # here, since a source of prompts belongs to this thread
        prompts = [self._prompt_of(group.group_id) for group in groups]

        self._thread.submit(self._guarded, self._write, step, kind, groups, prompts, views, solved, reason)

    def _guarded(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # whatever it is, the run goes on without these rows
            if not self._failing:
                self._notify(f"{self._folder} lacks samples: {type(error).__name__}: {error}")
            self._failing = True

    def _open(self, resumed_at: Version | None) -> None:
        """Drop the rows of later steps than the one resumed from; a line that holds no row stays as it is."""
        if self._folder.exists() and not self._folder.is_dir():
            self._notify(f"{self._folder} is no folder; it is moved aside as {state_files.set_aside(self._folder)}")
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in reversed(files(self._folder) if resumed_at is not None else []):
            lines = file.read_bytes().splitlines(keepends=True)
            steps = [int(match[1]) if (match := STEP.match(line)) else 0 for line in lines]
            stay = [line for line, step in zip(lines, steps, strict=True) if resumed_at is None or step <= resumed_at]
            if len(stay) == len(lines):
                break  # and so in all the older ones
            if stay:
                state_files.replace(file, b"".join(stay))
            else:
                file.unlink()

    def _give(self, version: Version) -> None:
        self.tables.put((version, "heldout", self._heldout.pop(version, [])))

    def _append(self, step: Version, lines: bytes) -> None:
        """To the newest file, or to a new one where that is full; then the oldest ones go until the budget holds."""
        most, path = self._budget_bytes // SEGMENTS, self._folder / f"{step:08}.jsonl"
        if self._rows is None:
            self._path = (files(self._folder) or [path])[-1]
            self._rows = PatientFile(self._path, self._notify, lines=True)
        full = most and self._rows.size and self._rows.size + len(lines) > most
        if full and path != self._path and not self._rows.waits:
            self._rows.close()
            self._path, self._rows = path, PatientFile(path, self._notify, lines=True)
            old = files(self._folder)[:-1]
            sizes = [file.stat().st_size for file in old]
            while old and sum(sizes) + max(most, len(lines)) > self._budget_bytes:
                old.pop(0).unlink()
                sizes.pop(0)
        self._rows.write(lines)

    def _write(
        self,
        step: Version,
        kind: str,
        groups: Sequence[ScoredGroup],
        prompts: Sequence[Prompt],
        views: Mapping[SampleId, TokenView],
        solved: Sequence[bool] | np.ndarray | None,
        reason: str,
    ) -> None:
        self._written_tokens += sum(len(sample.out_ids) for group in groups for sample in group.samples)
        rows: list[Row] = []
        for group, prompt in zip(groups, prompts, strict=True):
            mean = float(group.rewards.mean())
            samples = [self._row(group, i, mean, views.get(sample.id)) for i, sample in enumerate(group.samples)]
            for sample, right in zip(samples, solved if solved is not None else (), strict=False):
                sample["solved"] = bool(right)
            rows.append({"step": step, "kind": kind, "group": group.group_id, "task": prompt.task,
                         "version": group.version, "prompt": prompt.text, "expected": str(prompt.answer),
                         **({"reason": reason} if reason else {}), "samples": samples})  # fmt: skip
        lines = [json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for row in rows]
        self._append(step, b"".join(lines))
        if kind == "heldout" and len(held := self._heldout.setdefault(step, [])) < TABLE_ROWS:
            held.extend(rows)
        if kind != "trained":
            return
        seen = [group for group in groups if any(sample.id in views for sample in group.samples)]
        group, best, worst = most_mixed(seen or groups)
        row = rows[next(i for i, each in enumerate(groups) if each is group)]
        if seen:
            self.tables.put((step, "trained", [{**row, "samples": [row["samples"][i] for i in (best, worst)]}]))
        text = (
            f"=== step {step}  group {group.group_id}  version {group.version}  "
            f"reward mean {group.rewards.mean():.3f}  expected {row['expected']!r:.80}\nprompt> {row['prompt']}\n"
        )
        for i in (best, worst):
            sample = row["samples"][i]
            text += (
                f"[{sample['index']}] reward {group.rewards[i]:+.3f}, {sample['tokens']} tokens, "
                f"{sample['finish']}> {sample['text']}\n"
            )
        self._trajectories.write(text.encode(errors="replace"))

    def _row(self, group: ScoredGroup, i: int, mean: float, view: TokenView | None) -> Row:
        """A sample as the row of its group has it; log-probs are the engine's, in nats a token."""
        sample, reward = group.samples[i], float(group.rewards[i])
        logprobs = np.asarray(sample.logprobs, np.float64)[sample.mask]
        finite = bool(np.isfinite(logprobs).all() and len(logprobs))  # JSON knows finite numbers only
        scored = bool(np.isfinite(reward))
        row: Row = {
            "index": sample.id.index,
            "reward": reward if scored else None,
            "reward_above_mean": reward - mean if scored else None,
            "terms": {name: float(values[i]) for name, values in group.parts.items()},
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
        for at in range(len(ids)):
            before = ids[max(0, at - CONTEXT) : at]
            pieces.append(self._decode([*before, ids[at]])[len(self._decode(before)) :])
        row["by_token"] = {"text": pieces} | {
            name: [round(float(x), DIGITS) if np.isfinite(x) else None for x in values[:SHOWN_TOKENS]]
            for name, values in columns.items()
        }
        return row


def files(folder: Path) -> list[Path]:
    """The files of rows in a folder, oldest first; other files there are not ours."""
    return [file for _, file in sorted((int(f.stem), f) for f in folder.glob("*.jsonl") if f.stem.isdigit())]
