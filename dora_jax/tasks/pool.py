"""Stage 3: groups of samples -> groups with rewards, in processes that may be killed, while generation goes on.

Consumes a prompt and its G finished samples (submit); produces ScoredGroup or GroupFailure (poll), in any order:

    submit -> RewardCall of each sample -> [worker_process.py: worker.py] -> answered -> results -> poll

A RewardCall is about one sample, to all rewards that are plain functions or to one that is awaited; or about a group,
to one reward that takes its responses, or to plain ones that have been quick: where such a call has no answer, each
sample is asked about alone. Plain ones run one at a time in each of task.reward_workers processes, awaited
ones task.reward_concurrency at once, in a process beside these, or in all of them where no reward is plain.

Laws:
  neither submit nor poll waits; every submitted group comes back exactly once, unless the pool is closed or broken.
  A reward that raises, hangs, dies or returns no finite number is tried again, task.reward_retries times, a plain one
  on a fresh process; then its group fails. Such an error is never a reward of 0.
  A reward that cannot be loaded breaks the pool: wait_ready, submit and poll raise the reason.
  Workers (sandbox/) see no variable that task.reward_env does not name, and no other process, unless
  task.reward_sandbox allows the weak form; what they start ends with them. No pickle crosses the socket.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.config import ConfigError, TaskSection
from dora_jax.tasks import code, sandbox
from dora_jax.tasks.rewards import RewardError, summed
from dora_jax.tasks.sandbox import calls
from dora_jax.tasks.worker_process import Question, Questions, WorkerPool, WorkerProcess
from dora_jax.types import GroupId, Prompt, Sample, ScoredGroup

FAILED_LENGTHS_KEPT = 10_000  # for the quantiles
TOGETHER_S = 0.05  # a group whose samples are expected to take no longer is asked about at once
SLOWEST_FADES = 0.9  # by each answer, of what a sample takes
SHIPPED = ("dora_jax.tasks.rewards.", code.OURS)  # rewards of ours

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """A group that could not be scored; it is not trained on."""

    group_id: GroupId
    reason: str
    lengths: tuple[int, ...]  # tokens of each response
    kind: str = ""  # what failures from one cause share; empty: the reason
    response: str = ""  # the text that has no score, where it is one response's fault
    samples: tuple[Sample, ...] = dataclasses.field(default=(), compare=False)  # as the coordinator adds them


@dataclass(slots=True, eq=False, kw_only=True)
class _Scoring:
    """A group whose rewards are asked."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: list[dict[str, dict[str, float]]]  # of each sample, the terms of each reward that has answered
    calls: list[RewardCall] = dataclasses.field(default_factory=list)  # not answered; none: it has come back


@dataclass(slots=True, eq=False, kw_only=True)
class RewardCall(Question):
    """One request to some rewards about some samples of a group."""

    pool: ScorerPool
    group: _Scoring
    rewards: tuple[str, ...]
    samples: range
    of_group: bool
    queue: Questions  # it is asked again from there
    attempts: int = 1
    responses: list[str] = dataclasses.field(default_factory=list)

    def request(self) -> calls.Request:
        prompt = self.group.prompt
        if not self.responses:
            self.responses = [self.pool.decode(self.group.samples[i].out_ids) for i in self.samples]
        asked = {"rewards": self.rewards, "prompt": prompt.text, "responses": self.responses}
        return {**asked, "answer": prompt.answer, "row": dict(prompt.row)}

    def checked(self, reply: calls.Request) -> calls.Request:
        """What the worker checks already (rewards.py), checked again: a worker may lie."""
        if "error" in reply:
            return reply
        scores: Any = reply.get("scores")
        fine = isinstance(scores, list) and len(scores) == len(self.samples)
        for scored in scores if fine else ():
            fine &= isinstance(scored, dict) and list(scored) == list(self.rewards)
            for terms in scored.values() if fine else ():
                fine &= isinstance(terms, dict) and bool(terms)
                fine &= fine and all(isinstance(each, float) and math.isfinite(each) for each in terms.values())
        if fine:
            return reply
        return {"error": f"{self.name}: the worker replied without a finite number for each term"}


class ScorerPool(WorkerPool[RewardCall, ScoredGroup | GroupFailure]):
    """`decode(ids) -> text` strips stop and special tokens. Processes start at once, in the background."""

    def __init__(self, section: TaskSection, decode: Callable[[Sequence[int] | np.ndarray], str]):
        super().__init__("reward", "task.reward_env", section.reward_env)
        self._section, self.decode = section, decode
        self.kinds: dict[str, tuple[bool, bool]] = {}  # of each reward: is it awaited, does it see a group
        self._early: list[_Scoring] = []  # submitted before these were known
        self._sample_s = math.inf  # of plain rewards, what a sample took of late; inf: not known
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed_lengths: collections.deque[int] = collections.deque(maxlen=FAILED_LENGTHS_KEPT)
        self._form = sandbox.WEAK
        if section.reward_sandbox != sandbox.WEAK:
            try:
                self._form = sandbox.full()
            except sandbox.NoSandbox as error:
                if section.reward_sandbox != "auto" or not all(path.startswith(SHIPPED) for path in section.rewards):
                    raise ConfigError(
                        f'task.reward_sandbox: {error}; "{sandbox.WEAK}" lets rewards run that could read the run\'s '
                        "environment and signal its processes"
                    ) from error
                _log.warning("the shipped rewards run in the weak form of the sandbox: %s", error)
        self._plain, self._awaited = Questions(), Questions()
        with self._lock:
            for _ in range(section.reward_workers):
                self._add_worker(asynchronous=False)

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None:
        self.check()
        group = _Scoring(prompt=prompt, samples=samples, scores=[{} for _ in samples])
        with self._lock:
            self._counts["submitted"] += 1
            if failed := next((sample for sample in samples if sample.finish == "error"), None):
                reason = f"sample {tuple(failed.id)} ended in an error"
                self._fail(group, reason, "a sample ended in an error")
            elif self.kinds:
                self._put(group)
            else:
                self._early.append(group)

    def stats(self) -> dict[str, float]:
        with self._lock:
            counts, lengths = dict(self._counts), list(self._failed_lengths)
        scored, failed = counts.get("scored", 0), counts.get("failed", 0)
        p50, p90 = np.quantile(lengths, [0.5, 0.9]) if lengths else (0.0, 0.0)
        return {
            "rewards/failed_share": failed / max(1, scored + failed),
            "rewards/failed_length_p50": float(p50),
            "rewards/failed_length_p90": float(p90),
            "rewards/queued_groups": counts.get("submitted", 0) - scored - failed,
            "rewards/retries": counts.get("retries", 0),
        }

    # ------------------------------------------------------------ of its workers, on their threads

    def started(self, worker: WorkerProcess, properties: calls.Request) -> None:
        with self._lock:
            kinds = {name: (bool(awaited), bool(whole)) for name, (awaited, whole) in properties["kinds"].items()}
            awaited = all(each for each, _ in kinds.values())
            if awaited and worker.questions is self._plain:
                worker.questions, worker.window, worker.fresh = self._awaited, self._section.reward_concurrency, False
            if self.kinds or self._closed:
                return
            self.kinds = kinds
            if not awaited and any(each for each, _ in kinds.values()):
                self._add_worker(asynchronous=True)
            for group in self._early:
                self._put(group)
            self._early.clear()

    def answered(self, question: RewardCall, reply: calls.Request) -> None:
        call, group = question, question.group
        samples = [group.samples[i] for i in call.samples]
        with self._lock:
            if call not in group.calls:
                return  # the group has failed meanwhile
            if "error" in reply:
                if len(samples) > 1 and not call.of_group:  # none is blamed for the others
                    self._sample_s = math.inf
                    group.calls.remove(call)
                    for i in reversed(call.samples):
                        alone = dataclasses.replace(call, samples=range(i, i + 1), responses=[])
                        group.calls.append(alone)
                        call.queue.put(alone, first=True)
                    return
                if call.attempts <= self._section.reward_retries and not self._closed:
                    call.attempts += 1
                    self._counts["retries"] += 1
                    call.queue.put(call, first=True)
                    return
                about = f"{len(samples[0].out_ids)} tokens, sample {tuple(samples[0].id)}"
                if call.of_group:
                    about = f"{len(samples)} samples of group {group.prompt.group_id}"
                reason = f"{reply['error']} ({about}, {call.attempts} attempts)"
                kind = str(reply.get("kind") or reply["error"])
                self._fail(group, reason, kind, call.responses[0] if call.responses else "")
                return
            if call.queue is self._plain and not call.of_group:
                took_s = (time.monotonic() - call.sent_s) / len(samples)
                self._sample_s = took_s if self._sample_s == math.inf else max(took_s, SLOWEST_FADES * self._sample_s)
            for i, scored in zip(call.samples, reply["scores"], strict=True):
                group.scores[i].update(scored)
            group.calls.remove(call)
            if not group.calls:
                self._finish(group)

    # ------------------------------------------------------------ private

    def _add_worker(self, asynchronous: bool) -> None:
        """Under the lock, as all that follows."""
        section = self._section
        setup = {
            "rewards": list(section.rewards),
            "answer_pattern": section.answer_pattern,
            "asynchronous": asynchronous,
            "timeout_s": section.reward_timeout_s,
        }
        process = calls.Process(
            "dora_jax.tasks.worker",
            setup,
            form=self._form,
            variables=section.reward_env,
            sandbox_python=code.may_run("task", "rewards", section.rewards, section.sandbox, section.sandbox_python),
        )
        fails = f"reward workers failed {calls.START_ATTEMPTS} times to load {', '.join(section.rewards)}"
        questions, window = (self._awaited, section.reward_concurrency) if asynchronous else (self._plain, 1)
        worker = WorkerProcess(self, process, questions, fails=fails, window=window, fresh=not asynchronous)
        self._workers.append(worker)

    def _put(self, group: _Scoring) -> None:
        plain_ones = tuple(name for name, kind in self.kinds.items() if not any(kind))
        asked = [((name,), kind) for name, kind in self.kinds.items() if any(kind)]
        for names, (awaited, of_group) in [*([(plain_ones, (False, False))] if plain_ones else []), *asked]:
            name = "reward " + ", ".join(names)
            if self._section.answer_pattern:  # runs right before them, and takes as long as it likes
                name = f"task.answer_pattern {self._section.answer_pattern!r} or {name}"
            # A process of awaited ones has this deadline itself: it is late where it does not keep it.
            timeout_s = self._section.reward_timeout_s * (2 if awaited else 1)
            n = len(group.samples)
            quick = not awaited and n * self._sample_s <= min(TOGETHER_S, timeout_s / 10)
            for samples in [range(n)] if of_group or quick else [range(i, i + 1) for i in range(n)]:
                call = RewardCall(
                    name=name, timeout_s=timeout_s, pool=self, group=group, rewards=names, samples=samples,
                    of_group=of_group, queue=self._awaited if awaited else self._plain,
                )  # fmt: skip
                group.calls.append(call)
                call.queue.put(call)

    def _finish(self, group: _Scoring) -> None:
        weights = self._section.reward_weights
        try:
            sums = [summed({name: scored[name] for name in self.kinds}, weights) for scored in group.scores]
        except RewardError as error:
            return self._fail(group, str(error), error.kind)
        first, terms = sums[0][0], [of_sample for of_sample, _ in sums]
        for row in terms:
            if row.keys() != first.keys():
                reason = f"rewards returned the terms {sorted(first)} for one sample and {sorted(row)} for another"
                return self._fail(group, reason, reason)
        self._counts["scored"] += 1
        scored_group = ScoredGroup(
            group_id=group.prompt.group_id,
            version=group.samples[0].version,
            samples=group.samples,
            rewards=np.array([reward for _, reward in sums], np.float32),
            parts={name: np.array([row[name] for row in terms], dtype=np.float32) for name in first},
        )
        return self._results.put(scored_group)

    def _fail(self, group: _Scoring, reason: str, kind: str, response: str = "") -> None:
        """Its other calls are not sent any more, and what they answer is not taken."""
        for call in group.calls:
            call.dropped = True
        group.calls.clear()
        lengths = tuple(len(sample.out_ids) for sample in group.samples)
        self._counts["failed"] += 1
        self._failed_lengths.extend(lengths)
        self._results.put(
            GroupFailure(group_id=group.prompt.group_id, reason=reason, lengths=lengths, kind=kind, response=response)
        )
