"""Stage 1: texts from a user's regular expression or a folder's chat template, with a time limit.

Consumes what a user wrote: expressions and templates that raise, never end, or ask for all memory. They run in a
process that may be killed (render_worker.py), in the best sandbox of the machine; it starts with the first question.
Laws: text is a pure function of the request; a failure is one sentence within RENDER_S.
"""

from __future__ import annotations

import threading
import weakref

from dora_jax.tasks import sandbox
from dora_jax.tasks.sandbox import calls

RENDER_S = 10.0  # for one text; they take far below a millisecond
MEMORY_BYTES = 2**30  # of the process


class NeverEnds(ValueError):
    """A text that took longer than RENDER_S, or the process with it; asking for the next one may be as futile."""


class Renderer:
    """Shared between threads. `what` is what a sentence calls the expression or the template."""

    def __init__(self, what: str, setup: calls.Request):
        self._what = what
        self._setup = setup
        self._process: calls.Process | None = None
        self._lock = threading.Lock()

    def ask(self, request: calls.Request) -> str | None:
        """The text, None where an expression does not match; ValueError in one sentence, NeverEnds where none came."""
        with self._lock:
            if self._process is None:
                process = calls.Process(
                    "dora_jax.tasks.sandbox.render_worker", self._setup, form=sandbox.best(), memory_bytes=MEMORY_BYTES
                )
                weakref.finalize(self, process.close)
                try:
                    process.start()
                except calls.NoAnswer as error:
                    raise RuntimeError(f"the process for {self._what} does not start: {error}") from error
                self._process = process
            try:
                return self._process.ask(request, RENDER_S, self._what).get("text")
            except calls.Refused as error:
                raise ValueError(f"{self._what} {error}") from error
            except calls.NoAnswer as error:
                self._process = None
                raise NeverEnds(str(error)) from error
