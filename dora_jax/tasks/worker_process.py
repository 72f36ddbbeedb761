"""Stage 3: a worker process of rewards or of environments, asked many questions at once.

    put -> Questions -> [thread of the process: send, receive] -> Question.answered

Laws: `put` does not wait; each question is answered once, on the thread of a process, unless it was dropped before it
was sent or its pool is closed. A process that dies, or has an overdue question, is ended, and the next one starts
at once; one that cannot start breaks the pool. The question that it had fails. Of several, where their number is
bounded, none is blamed: each is asked again alone. Where it is not, those that are overdue fail, or all if none is, and
the others are asked again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Generic, TypeVar

from dora_jax.config import ConfigError
from dora_jax.tasks.sandbox import calls

SENT_S = 30.0  # the most that a process may take until it reads a question
RECEIVED_BYTES = 1 << 16  # at a time
CLOSE_TIMEOUT_S = 10.0  # for threads whose processes were just killed
R = TypeVar("R")


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Question:
    """What is asked once."""

    name: str  # what a sentence calls the code that is asked
    timeout_s: float  # from when it is sent; `waits` of the process stops the clock
    message: calls.Request = dataclasses.field(default_factory=dict)
    sent_s: float = math.inf
    dropped: bool = False  # it is not sent any more

    def request(self) -> calls.Request:
        """What is sent, on the thread of the process."""
        return self.message

    def checked(self, reply: calls.Request) -> calls.Request:
        """The reply, or one with an "error" in the place of a reply that cannot be."""
        return reply


Q = TypeVar("Q", bound=Question)


class Questions:
    """A queue that processes may share. Its descriptor `readable` is so while it holds a question."""

    def __init__(self) -> None:
        self._held: collections.deque[Question] = collections.deque()
        self._lock = threading.Lock()
        self.readable, self._writable = os.pipe()
        for descriptor in (self.readable, self._writable):
            weakref.finalize(self, os.close, descriptor)

    def put(self, question: Question, first: bool = False) -> None:
        with self._lock:
            if not self._held:
                os.write(self._writable, b"?")
            if first:
                self._held.appendleft(question)
            else:
                self._held.append(question)

    def take(self) -> Question | None:
        """The next one that was not dropped. None: another process has taken it."""
        with self._lock:
            while self._held:
                question = self._held.popleft()
                if not self._held:
                    os.read(self.readable, 1)
                if not question.dropped:
                    return question
        return None


def drained(results: queue.SimpleQueue[R]) -> list[R]:
    """What a queue holds now."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(results.get_nowait())
    return found


class WorkerPool(Generic[Q, R]):
    """Processes that are asked, and what their answers have become. Q: questions, R: results. A pool handles each
    answer; `started` and `answered` are called on the thread of the process."""

    def __init__(self, what: str, field: str, variables: Iterable[str]):
        """what: whose workers they are, and field: of the config, with the `variables` that they see, for sentences."""
        for name in variables:
            if name not in os.environ:
                raise ConfigError(f"{field}: the environment has no {name}")
        self._what = what
        self._workers: list[WorkerProcess] = []
        self._results: queue.SimpleQueue[R] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.terms: tuple[str, ...] = ()
        self.error: Exception | None = None  # which the next call raises
        self._closed = False

    def started(self, worker: WorkerProcess, properties: calls.Request) -> None:
        """properties: what its setup was answered with."""
        raise NotImplementedError

    def answered(self, question: Q, reply: calls.Request) -> None:
        """reply: of the process; or "error" and "kind", with "gone" where the process is: whether it was too late."""
        raise NotImplementedError

    def wait_ready(self, timeout_s: float = calls.START_TIMEOUT_S * calls.START_ATTEMPTS) -> tuple[str, ...]:
        """The reward terms as far as they are known, once a process has loaded what it runs; ConfigError says why none
        can."""
        if not self._workers[0].ready.wait(timeout_s):
            raise RuntimeError(f"no {self._what} worker was ready within {timeout_s:.0f} s")
        self.check()
        return self.terms

    def check(self) -> None:
        """Raises why there will be no more answers."""
        if self.error is not None:
            raise self.error
        if self._closed:
            raise RuntimeError(f"the {self._what} workers are closed")

    def poll(self) -> list[R]:
        """The results since the last call."""
        self.check()
        return drained(self._results)

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of its processes."""
        return tuple(pid for worker in list(self._workers) if (pid := worker.process.pid) is not None)

    def close(self) -> None:
        """Kills the processes; what was not polled is gone. May be called twice."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.close()


class WorkerProcess:
    """One process and its thread. Its pool may change questions, window and fresh as it starts."""

    def __init__(
        self,
        pool: WorkerPool,
        process: calls.Process,
        questions: Questions,
        *,
        fails: str,
        window: int = sys.maxsize,
        fresh: bool = False,
    ):
        """fails: the sentence of a process that does not start. window: most questions that it has at once.
        fresh: an error is followed by a new process."""
        self.process, self.questions, self.window, self.fresh = process, questions, window, fresh
        self.ready = threading.Event()  # it has started, or never will
        self._pool, self._fails = pool, fails
        self._asked: dict[str, Question] = {}  # by nonce
        self._came = bytearray()  # of frames that are not whole
        self._alone = 0  # so many of the next ones are asked one at a time
        self._look_s = math.inf  # when one of them may be overdue
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="worker-process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kills the process. May be called twice."""
        self._closed = True
        self.process.close()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        try:
            self._begin()
            while not self._closed:
                try:
                    self._exchange()
                except (EOFError, OSError, ValueError) as error:  # a TimeoutError is an OSError
                    if not self._closed:
                        self._replace(error)
        except Exception as error:  # a thread has no caller to raise to
            if not self._closed:
                self._pool.error = error
        finally:
            self.process.close()
            self.ready.set()

    def _begin(self) -> None:
        try:
            properties = self.process.start()
        except calls.Declined as error:
            raise ConfigError(str(error)) from error
        except calls.NoAnswer as error:
            raise RuntimeError(f"{self._fails}; {error}") from error
        self._came.clear()
        self._pool.started(self, properties)
        self.ready.set()

    def _exchange(self) -> None:
        """Sends a question, takes answers, or both. Where it raises, the process must go."""
        connection = self.process.connection
        if connection is None:
            raise EOFError
        most = 1 if self._alone else self.window
        question = self.questions.take() if len(self._asked) < most else None
        if question is not None:
            self._send(connection, question)
        waiter = select.poll()
        waiter.register(connection, select.POLLIN)
        left_s = self._look_s - time.monotonic()
        if len(self._asked) < most:
            if question is None:
                waiter.register(self.questions.readable, select.POLLIN)
            else:
                left_s = 0.0  # there may be more to send
        ready = waiter.poll(None if left_s == math.inf else max(0, math.ceil(1000 * left_s)))
        if connection.fileno() not in dict(ready):
            if time.monotonic() >= self._look_s:
                self._look_s = min((each.sent_s + each.timeout_s for each in self._asked.values()), default=math.inf)
                if time.monotonic() >= self._look_s:
                    raise TimeoutError
            return
        data = connection.recv(RECEIVED_BYTES)
        if not data:
            raise EOFError
        self._came += data
        while (reply := calls.next_frame(self._came)) is not None:
            self._take(reply)

    def _take(self, reply: calls.Request) -> None:
        nonce = str(reply.pop("nonce", ""))
        if (asked := self._asked.get(nonce)) is None:
            raise ValueError("a reply without the request's nonce was written to the worker's own socket")
        if "waits" in reply:  # for a thread of the process
            asked.sent_s = math.inf if reply["waits"] else time.monotonic()
            self._look_s = min(self._look_s, asked.sent_s + asked.timeout_s)
            return
        del self._asked[nonce]
        self._alone = max(0, self._alone - 1)
        reply = asked.checked(reply)
        if "error" in reply and self.fresh:
            self._begin()
        self._pool.answered(asked, reply)

    def _send(self, connection: socket.socket, question: Question) -> None:
        nonce = secrets.token_hex(16)
        try:
            frame = calls.framed({**question.request(), "nonce": nonce})
        except (TypeError, ValueError) as error:  # of a source or a policy that has more than JSON
            self._pool.answered(question, {"error": f"cannot be asked: {error}", "kind": "error"})
            return
        self.process.trim()
        question.sent_s = time.monotonic()
        self._asked[nonce] = question
        self._look_s = min(self._look_s, question.sent_s + question.timeout_s)
        connection.settimeout(min(question.timeout_s, SENT_S))
        connection.sendall(frame)

    def _replace(self, error: Exception) -> None:
        asked, self._asked, self._look_s = list(self._asked.values()), {}, math.inf
        now_s = time.monotonic() if isinstance(error, TimeoutError) else -math.inf
        overdue = {each for each in asked if each.sent_s + each.timeout_s <= now_s}
        together = len(asked) > 1 and self.window < sys.maxsize
        if together:
            self._alone = len(asked)
        kind, reason = self.process.lost(error)
        self._begin()
        for each in reversed(asked):
            if together or overdue and each not in overdue:
                self.questions.put(each, first=True)
            else:
                lost = (f" took over {each.timeout_s:g} s",) * 2 if each in overdue else (kind, reason)
                reply = {"error": each.name + lost[1], "kind": each.name + lost[0], "gone": each in overdue}
                self._pool.answered(each, reply)
