"""Stage 3: groups of samples -> groups with rewards, in processes that may be killed, never in generation's way.

Consumes a prompt and its G finished samples (submit); produces ScoredGroup or GroupFailure (poll), in any order.
One thread per worker process sends one sample at a time and waits for its reply until the deadline:

    submit -> queue -> [thread: decode -> process: rewards] -> results -> poll

Laws:
  neither submit nor poll waits; every submitted group comes back exactly once, unless the pool is closed or broken.
  A reward that raises, hangs, dies or returns no finite number is tried again on a fresh process, task.reward_retries
  times; then its group fails. Nothing of the kind is ever a reward of 0.
  A reward that cannot be loaded breaks the pool: wait_ready, submit and poll raise the reason.
  Workers see no environment variable whose name speaks of a secret, and no pickle crosses the socket.
"""

from __future__ import annotations

import collections
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dora_jax.config import ConfigError, TaskSection
from dora_jax.tasks import worker
from dora_jax.types import GroupId, Prompt, Sample, ScoredGroup, record

START_TIMEOUT_S = 120.0  # importing a user's reward may take long on a loaded machine
START_ATTEMPTS = 3  # a process that dies while starting may be the machine's fault; three in a row are not
CLOSE_TIMEOUT_S = 10.0  # for threads whose processes were just killed
NOISE_LIMIT_BYTES = 2**20  # of what a worker printed; cut between jobs
NOISE_TAIL_BYTES = 2000  # of it, quoted when the worker dies
FAILED_LENGTHS_KEPT = 10_000  # for the quantiles
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


@record
class GroupFailure:
    """A group that could not be scored; it is not trained on."""

    group_id: GroupId
    reason: str
    lengths: tuple[int, ...]  # tokens of each response
    kind: str = ""  # what failures from one cause share; empty: the reason
    response: str = ""  # the text that has no score, where it is one response's fault


class NoScore(Exception):
    """Why a response has no score: one sentence. Its process is gone. kind, response: see GroupFailure."""

    def __init__(self, reason: str, kind: str = "", response: str = ""):
        super().__init__(reason)
        self.kind, self.response = kind or reason, response


class ScorerPool:
    """`decode(ids) -> text` strips stop and special tokens. Processes start at once, in the background."""

    def __init__(self, section: TaskSection, decode: Callable[[Sequence[int]], str]):
        self._section = section
        self._decode = decode
        self._jobs: queue.SimpleQueue[tuple[Prompt, tuple[Sample, ...]] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ScoredGroup | GroupFailure] = queue.SimpleQueue()
        self._ready = threading.Event()  # some worker is ready, or the pool is broken
        self._error: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed_lengths: collections.deque[int] = collections.deque(maxlen=FAILED_LENGTHS_KEPT)
        self._processes = [WorkerProcess(section) for _ in range(section.reward_workers)]
        self._threads = [threading.Thread(target=self._serve, args=(process,), name=f"rewards-{i}", daemon=True)
                         for i, process in enumerate(self._processes)]
        for thread in self._threads:
            thread.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S * START_ATTEMPTS) -> None:
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
        done = []
        while True:
            try:
                done.append(self._results.get_nowait())
            except queue.Empty:
                return done

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

    def _serve(self, process: WorkerProcess) -> None:
        try:
            process.start()
            self._ready.set()
            while (job := self._jobs.get()) is not None:
                result = self._score_group(process, *job)
                with self._lock:
                    self._counts["failed" if isinstance(result, GroupFailure) else "scored"] += 1
                    if isinstance(result, GroupFailure):
                        self._failed_lengths.extend(result.lengths)
                self._results.put(result)
        except Exception as error:  # handed to whoever calls next: a thread has nobody to raise to
            if not self._closed:
                self._error = error
        finally:
            process.close()
            self._ready.set()

    def _score_group(self, process: WorkerProcess, prompt: Prompt,
                     samples: tuple[Sample, ...]) -> ScoredGroup | GroupFailure:
        lengths = tuple(len(sample.out_ids) for sample in samples)
        try:
            terms = [self._score_sample(process, prompt, sample) for sample in samples]
            parts = _columns(terms)
        except NoScore as error:
            return GroupFailure(group_id=prompt.group_id, reason=str(error), lengths=lengths, kind=error.kind,
                                response=error.response)
        rewards = np.sum(list(parts.values()), axis=0, dtype=np.float32)
        return ScoredGroup(group_id=prompt.group_id, version=samples[0].version, samples=samples,
                           rewards=rewards, parts=parts)

    def _score_sample(self, process: WorkerProcess, prompt: Prompt, sample: Sample) -> dict[str, float]:
        """The sample's terms; raises NoScore with the last reason after all retries."""
        if sample.finish == "error":
            raise NoScore(f"sample {tuple(sample.id)} ended in an error", "a sample ended in an error")
        request = {"prompt": prompt.text, "response": self._decode(sample.out_ids), "answer": prompt.answer}
        attempts = 1 + self._section.reward_retries
        for attempt in range(1, attempts + 1):
            try:
                return process.ask(request)
            except NoScore as error:
                if self._closed:
                    raise
                process.start()  # fresh for the next attempt, and for the next group
                if attempt == attempts:
                    told = f"{error} ({len(sample.out_ids)} tokens, sample {tuple(sample.id)}, {attempts} attempts)"
                    raise NoScore(told, error.kind, request["response"]) from error
                with self._lock:
                    self._counts["retries"] += 1
        raise AssertionError("unreachable")


def _columns(terms: list[dict[str, float]]) -> dict[str, np.ndarray]:
    """Rows of terms -> {name: f32[G]}."""
    names = list(terms[0])
    for row in terms:
        if row.keys() != terms[0].keys():
            raise NoScore(f"rewards returned the terms {sorted(names)} for one sample and {sorted(row)} for another")
    return {name: np.array([row[name] for row in terms], dtype=np.float32) for name in names}


class WorkerProcess:
    """One killable process. start, ask: from its own thread only; close: from any."""

    def __init__(self, section: TaskSection):
        self._section = section
        self._process: subprocess.Popen | None = None
        self._sock: socket.socket | None = None
        self._noise = tempfile.TemporaryFile("a+b")  # what rewards print; the worker appends
        self._jobs = 0
        self._closed = False
        self._lock = threading.Lock()  # of kill: close comes from another thread

    def start(self) -> None:
        """A fresh process with every reward loaded; ConfigError if they cannot be, RuntimeError if it keeps dying."""
        for _ in range(START_ATTEMPTS):
            self._kill()
            self._spawn()
            setup = {"rewards": list(self._section.rewards), "answer_pattern": self._section.answer_pattern}
            try:
                reply = self._exchange(setup, START_TIMEOUT_S, "start-up")
            except NoScore as error:
                last = error
                if self._closed:
                    raise
                continue
            if "error" in reply:
                raise ConfigError(reply["error"])
            return
        raise RuntimeError(f"reward workers failed {START_ATTEMPTS} times to load "
                           f"{', '.join(self._section.rewards)}; {last}")

    def ask(self, request: dict[str, Any]) -> dict[str, float]:
        """The terms of one response; NoScore, with the process killed, where there are none."""
        self._jobs += 1
        names = ", ".join(path.rpartition(".")[2] for path in self._section.rewards)
        reply = self._exchange({"job": self._jobs, **request}, self._section.reward_timeout_s, f"reward {names}")
        if reply.get("job") != self._jobs:
            self._kill()
            raise NoScore(f"reward {names} answered out of turn")
        if "error" in reply:
            self._kill()
            raise NoScore(reply["error"], reply.get("kind", ""))
        return reply["parts"]

    def close(self) -> None:
        """Kills the process; its thread, if it waits for a reply, wakes up and gives up."""
        self._closed = True
        self._end_process()

    # ------------------------------------------------------------ private

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: the working directory comes last in PYTHONPATH, where it hides nothing
                [sys.executable, "-P", "-m", "dora_jax.tasks.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._noise, stderr=self._noise, pass_fds=(theirs.fileno(),),
                env=worker_environment(), start_new_session=True)  # a session: its children are killed with it
        self._sock = ours
        if self._closed:  # close() came between
            self._end_process()

    def _exchange(self, message: dict[str, Any], timeout_s: float, who: str) -> dict[str, Any]:
        sock = self._sock
        if sock is None:
            raise NoScore(f"{who}: the worker is gone")
        if os.fstat(self._noise.fileno()).st_size > NOISE_LIMIT_BYTES:
            os.ftruncate(self._noise.fileno(), 0)
        try:
            deadline_s = time.monotonic() + timeout_s
            worker.send(sock, message, deadline_s)
            return worker.receive(sock, deadline_s)
        except TimeoutError:
            reason = kind = f"{who} took over {timeout_s:g} s"
        except (EOFError, OSError):
            kind = f"{who}: the worker {self._exit_status()}"
            reason = kind + self._noise_tail()
        except ValueError as error:
            reason = kind = f"{who}: {error}"
        self._kill()
        raise NoScore(reason, kind)

    def _exit_status(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _noise_tail(self) -> str:
        size = os.fstat(self._noise.fileno()).st_size
        tail = os.pread(self._noise.fileno(), NOISE_TAIL_BYTES, max(0, size - NOISE_TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return f"; it last printed: {lines[-1]}" if lines else ""

    def _kill(self) -> None:
        self._end_process()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _end_process(self) -> None:
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the whole session; its leader is not reaped yet
                process.wait()


def worker_environment() -> dict[str, str]:
    """Ours without secrets; the modules that we can import; no accelerator, which belongs to the run."""
    env = {name: value for name, value in os.environ.items()
           if not any(word in name.upper() for word in SECRET_WORDS)}
    path = [entry for entry in sys.path if entry] + [os.getcwd()]
    return {**env, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "JAX_PLATFORMS": "cpu"}
