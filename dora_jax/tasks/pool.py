"""Stage 3: groups of samples -> groups with rewards, in processes that may be killed, while generation goes on.

Consumes a prompt and its G finished samples (submit); produces ScoredGroup or GroupFailure (poll), in any order.
One thread per worker process sends one sample at a time and waits for its reply until the deadline:

    submit -> queue -> [thread: decode -> process: rewards] -> results -> poll

Laws:
  neither submit nor poll waits; every submitted group comes back exactly once, unless the pool is closed or broken.
  A reward that raises, hangs, dies or returns no finite number is tried again on a fresh process, task.reward_retries
  times; then its group fails. Such an error is never a reward of 0.
  A reward that cannot be loaded breaks the pool: wait_ready, submit and poll raise the reason.
  Workers (calls.py, sandbox.py) see no variable that task.reward_env does not name, and no other process, unless
  task.reward_sandbox allows the weak form; what they start ends with them. No pickle crosses the socket.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.config import ConfigError, TaskSection
from dora_jax.tasks import code, sandbox
from dora_jax.tasks.rewards import plain
from dora_jax.tasks.sandbox import calls
from dora_jax.tasks.sandbox.calls import NoAnswer
from dora_jax.tasks.source import shorten
from dora_jax.types import GroupId, Prompt, Sample, SampleId, ScoredGroup, Span

CLOSE_TIMEOUT_S = 10.0  # for threads whose processes were just killed
FAILED_LENGTHS_KEPT = 10_000  # for the quantiles
TRIAL_POLL_S = 0.01
INITIAL = 0  # the version that the responses of `try_rewards` pretend to be of
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


def drained(results: queue.SimpleQueue[Any]) -> list[Any]:
    """What a queue holds now."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(results.get_nowait())
    return found


class NoScore(NoAnswer):
    """Why a response has no score: one sentence. kind, response: see GroupFailure."""

    def __init__(self, reason: str, kind: str = "", response: str = ""):
        super().__init__(reason, kind)
        self.response = response


class ScorerPool:
    """`decode(ids) -> text` strips stop and special tokens. Processes start at once, in the background."""

    def __init__(self, section: TaskSection, decode: Callable[[Sequence[int] | np.ndarray], str]):
        self._section = section
        self._decode = decode
        self._who = "reward " + ", ".join(path.rpartition(".")[2] for path in section.rewards)
        if section.answer_pattern:  # runs right before them, and takes as long as it likes
            self._who = f"task.answer_pattern {section.answer_pattern!r} or {self._who}"
        self._jobs: queue.SimpleQueue[tuple[Prompt, tuple[Sample, ...]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ScoredGroup | GroupFailure] = queue.SimpleQueue()
        self._ready = threading.Event()  # some worker is ready, or the pool is broken
        self._error: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed_lengths: collections.deque[int] = collections.deque(maxlen=FAILED_LENGTHS_KEPT)
        weights = list(section.reward_weights)
        setup = {"rewards": list(section.rewards), "weights": weights, "answer_pattern": section.answer_pattern}
        form = sandbox.WEAK
        if section.reward_sandbox != sandbox.WEAK:
            try:
                form = sandbox.full()
            except sandbox.NoSandbox as error:
                if section.reward_sandbox != "auto" or not all(path.startswith(SHIPPED) for path in section.rewards):
                    raise ConfigError(
                        f'task.reward_sandbox: {error}; "{sandbox.WEAK}" lets rewards run that could read the run\'s '
                        "environment and signal its processes"
                    ) from error
                _log.warning("the shipped rewards run in the weak form of the sandbox: %s", error)
        variables = section.reward_env
        for name in variables:
            if name not in os.environ:
                raise ConfigError(f"task.reward_env: the environment has no {name}")
        python = code.may_run("task", "rewards", section.rewards, section.sandbox, section.sandbox_python)
        self._processes = [
            calls.Process("dora_jax.tasks.worker", setup, form=form, variables=variables, sandbox_python=python)
            for _ in range(section.reward_workers)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(process,), name=f"rewards-{i}", daemon=True)
            for i, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self, timeout_s: float = calls.START_TIMEOUT_S * calls.START_ATTEMPTS) -> None:
        """Returns once a worker has loaded every reward; raises ConfigError with the reason if none can."""
        if not self._ready.wait(timeout_s):
            raise RuntimeError(f"no reward worker was ready within {timeout_s:.0f} s")
        self._check()

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None:
        self._check()
        with self._lock:
            self._counts["submitted"] += 1
        self._jobs.put((prompt, samples))

    def poll(self) -> list[ScoredGroup | GroupFailure]:
        """What has finished since the last call; each group once."""
        self._check()
        return drained(self._results)

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

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of its worker processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def close(self) -> None:
        """Kills the workers; groups not yet polled are gone. May be called twice."""
        self._closed = True
        for process in self._processes:
            self._jobs.put(None)
            process.close()
        for thread in self._threads:
            thread.join(timeout=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ private

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the reward workers are closed")

    def _serve(self, process: calls.Process) -> None:
        try:
            self._start(process)
            self._ready.set()
            while (job := self._jobs.get()) is not None:
                result = self._score_group(process, *job)
                with self._lock:
                    self._counts["failed" if isinstance(result, GroupFailure) else "scored"] += 1
                    if isinstance(result, GroupFailure):
                        self._failed_lengths.extend(result.lengths)
                self._results.put(result)
        except Exception as error:  # handed to the next call: a thread has no caller to raise to
            if not self._closed:
                self._error = error
        finally:
            process.close()
            self._ready.set()

    def _score_group(
        self, process: calls.Process, prompt: Prompt, samples: tuple[Sample, ...]
    ) -> ScoredGroup | GroupFailure:
        lengths = tuple(len(sample.out_ids) for sample in samples)
        try:
            scores = [self._score_sample(process, prompt, sample) for sample in samples]
            first, terms = scores[0][0], [of_sample for of_sample, _ in scores]
            for row in terms:
                if row.keys() != first.keys():
                    raise NoScore(
                        f"rewards returned the terms {sorted(first)} for one sample and {sorted(row)} for another"
                    )
            parts = {name: np.array([row[name] for row in terms], dtype=np.float32) for name in first}
        except NoScore as error:
            return GroupFailure(
                group_id=prompt.group_id, reason=str(error), lengths=lengths, kind=error.kind, response=error.response
            )
        rewards = np.array([reward for _, reward in scores], np.float32)
        return ScoredGroup(
            group_id=prompt.group_id, version=samples[0].version, samples=samples, rewards=rewards, parts=parts
        )

    def _score_sample(self, process: calls.Process, prompt: Prompt, sample: Sample) -> tuple[dict[str, float], float]:
        """The sample's terms and its reward; raises NoScore with the last reason after all retries."""
        if sample.finish == "error":
            raise NoScore(f"sample {tuple(sample.id)} ended in an error", "a sample ended in an error")
        response = self._decode(sample.out_ids)
        request = {"prompt": prompt.text, "response": response, "answer": prompt.answer, "row": dict(prompt.row)}
        attempts = 1 + self._section.reward_retries
        for attempt in range(1, attempts + 1):
            try:
                # What the worker checks already (rewards.py), checked again: a worker may lie.
                reply = process.ask(request, self._section.reward_timeout_s, self._who)
                parts: Any = reply.get("parts")
                reward: Any = reply.get("reward")
                numbers = [*parts.values(), reward] if isinstance(parts, dict) and parts else [None]
                if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
                    raise NoAnswer(f"{self._who}: the worker replied without a finite number for each term")
                return parts, reward
            except NoAnswer as error:
                if self._closed:
                    raise NoScore(str(error)) from error
                self._start(process)  # fresh for the next attempt, and for the next group
                if attempt == attempts:
                    message = f"{error} ({len(sample.out_ids)} tokens, sample {tuple(sample.id)}, {attempts} attempts)"
                    raise NoScore(message, error.kind, response) from error
                with self._lock:
                    self._counts["retries"] += 1
        raise AssertionError("unreachable")

    def _start(self, process: calls.Process) -> None:
        try:
            process.start()
        except calls.Declined as error:
            raise ConfigError(str(error)) from error
        except NoAnswer as error:
            raise RuntimeError(
                f"reward workers failed {calls.START_ATTEMPTS} times to load "
                f"{', '.join(self._section.rewards)}; {error}"
            ) from error


def try_rewards(pool: ScorerPool, prompt: Prompt, encode: Callable[[str], Sequence[int]]) -> tuple[str, ...]:
    """Scores one real row before anything is compiled, so that a broken reward is refused in seconds. Returns the terms
    of the reward, in the order of task.rewards; ConfigError says which response of which row has no score.

    The row is tried with two responses, its own answer and the empty text, because a policy writes anything; both are
    scored as samples are: decoded, in a worker process, with its deadline and its retries."""
    pool.wait_ready()
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
