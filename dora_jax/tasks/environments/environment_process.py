"""Stage 3: one process of environments and the two threads that talk to it, whatever becomes of it.

    sender:   questions -> process          receiver:   process -> asker.answered; a process that is dead or hangs -> a
              new one

Law: what was asked and not answered when a process went is reported to `asker.died`, once the next process is there.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import queue
import threading
from typing import Any, Protocol

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.tasks import sandbox
from dora_jax.tasks.sandbox import calls

POLL_S = 1.0  # how often a receiver looks for questions that are open for too long
CLOSE_TIMEOUT_S = 10.0  # for threads whose processes were just killed


class Asker(Protocol):
    """What an EnvironmentPool is to its processes, on their threads."""

    def answered(self, reply: calls.Request) -> None: ...

    def asks(self, request: calls.Request) -> bool: ...

    def hangs(self, process: EnvironmentProcess) -> bool: ...

    def died(self, process: EnvironmentProcess, late: bool) -> None: ...

    def broken(self, error: Exception) -> None: ...


class EnvironmentProcess:
    """One process, with its sender and its receiver."""

    def __init__(
        self, pool: Asker, setup: calls.Request, section: EnvironmentSection, number: int, runs_programs: bool = False
    ):
        self._pool = pool
        self._process = calls.Process(
            "dora_jax.tasks.environments.environment_worker",
            setup,
            form=sandbox.best(),
            variables=section.env,
            runs_programs=runs_programs,
            python=section.python,
        )
        self._name = str(setup["name"])
        self._outgoing: queue.SimpleQueue[calls.Request | None] = queue.SimpleQueue()
        self._ready, self._closed = threading.Event(), False
        self._terms: tuple[str, ...] = ()
        self.speaks_tokens = False  # known once it is ready
        self._connection: Any = None  # while the process answers
        self._threads = [threading.Thread(target=call, name=f"environments-{number}-{what}", daemon=True)
                         for what, call in (("receives", self._receive), ("sends", self._send))]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def ready(self, timeout_s: float) -> tuple[str, ...]:
        if not self._ready.wait(timeout_s):
            raise RuntimeError(f"no environment worker was ready within {timeout_s:.0f} s")
        return self._terms

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, request: calls.Request) -> None:
        self._outgoing.put(request)

    def close(self) -> None:
        self._closed = True
        self._outgoing.put(None)
        self._process.close()
        for thread in self._threads:
            thread.join(timeout=CLOSE_TIMEOUT_S)

    def _start(self) -> Any:
        """Its connection, which the sender uses from now on."""
        self._connection = None
        try:
            self._process.start()
            answer = self._process.ask({}, calls.START_TIMEOUT_S, self._name)
            self._terms, self.speaks_tokens = tuple(answer["terms"]), answer["tokens"]
        except calls.Refused as error:
            raise ConfigError(str(error)) from error
        except calls.NoAnswer as error:
            raise RuntimeError(f"environment workers failed {calls.START_ATTEMPTS} times to start; {error}") from error
        connection = self._connection = self._process.connection
        assert connection is not None  # it has just answered
        connection.settimeout(None)
        self._ready.set()
        return connection

    def _receive(self) -> None:
        try:
            connection = self._start()
            while not self._closed:
                late = False
                try:  # no deadline on the socket: the sender has the same one
                    if multiprocessing.connection.wait([connection], POLL_S):
                        self._pool.answered(calls.receive(connection))
                        continue
                    if not (late := self._pool.hangs(self)):
                        continue
                except (EOFError, OSError, ValueError):
                    pass
                if not self._closed:
                    connection = self._start()
                    self._pool.died(self, late)
        except Exception as error:  # handed to the next call: a thread has no caller to raise to
            if not self._closed:
                self._pool.broken(error)
        finally:
            self._ready.set()

    def _send(self) -> None:
        """What cannot be sent is asked again once the receiver has found the process dead."""
        self._ready.wait()
        while (request := self._outgoing.get()) is not None:
            if (connection := self._connection) is None or not self._pool.asks(request):
                continue
            payload = json.dumps(request).encode()
            with contextlib.suppress(OSError):
                connection.sendall(calls.HEADER.pack(len(payload)) + payload)
