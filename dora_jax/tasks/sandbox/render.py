"""Stage 1: texts from a user's regular expression or a folder's chat template, with a time limit: `Renderer`, and its
process, `python -m dora_jax.tasks.sandbox.render FD`.

Consumes what a user wrote: expressions and templates that raise, never end, or ask for all memory. They run in a
process that may be killed, in the best sandbox of the machine; it starts with the first question.
Protocol (calls.py): setup {"extract": expression} or {"template": text, "special": {name: token}}; then
{"raw"} -> {"text": the first group, or null} or {"messages", "add_generation_prompt", "variables"} -> {"text"}.
Laws: text is a pure function of the request; a failure is one sentence within RENDER_S; nothing is compiled before the
first question, which has a deadline; a chat template sees no clock, so that a prompt is a pure function of its row:
strftime_now formats the day that the variable of this name is.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from dora_jax.tasks import sandbox
from dora_jax.tasks.sandbox import calls

if TYPE_CHECKING:
    import jinja2

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
                    "dora_jax.tasks.sandbox.render", self._setup, form=sandbox.best(), memory_bytes=MEMORY_BYTES
                )
                weakref.finalize(self, process.close)
                try:
                    process.start()
                except calls.NoAnswer as error:
                    raise RuntimeError(f"the process for {self._what} does not start: {error}") from error
                self._process = process
            try:
                return self._process.ask(request, RENDER_S, self._what).get("text")
            except calls.Declined as error:
                raise ValueError(f"{self._what} {error}") from error
            except calls.NoAnswer as error:
                self._process = None
                raise NeverEnds(str(error)) from error


def prepare(setup: calls.Request) -> tuple[calls.Request, Callable[[calls.Request], calls.Request]]:
    if "extract" in setup:

        def extract(request: calls.Request) -> calls.Request:
            match = re.search(setup["extract"], request["raw"])
            return {"text": match.group(1) if match else None}

        return {}, extract
    import jinja2  # an expression does without

    @functools.cache
    def template() -> jinja2.Template:
        try:
            return _environment().from_string(setup["template"])
        except jinja2.TemplateError as error:
            raise calls.Declined(f"does not compile: {error}") from error

    def answer(request: calls.Request) -> calls.Request:
        names = {"tools": None, "documents": None, **setup["special"], **request["variables"]}
        try:
            if "strftime_now" in names:
                names["strftime_now"] = datetime.date.fromisoformat(names["strftime_now"]).strftime
            text = template().render(
                messages=request["messages"], add_generation_prompt=request["add_generation_prompt"], **names
            )
            return {"text": text}
        except jinja2.TemplateError as error:
            day = "; it sees no clock: give it the day, strftime_now=2026-01-31 of the template's variables"
            hint = day if "'strftime_now' is undefined" in str(error) else ""
            raise calls.Declined(f"refused the messages: {error}{hint}") from error
        except Exception as error:  # a template divides, adds and calls like any program; always raised again
            if isinstance(error, calls.Declined):
                raise
            raise calls.Declined(f"refused the messages: {type(error).__name__}: {error}") from error

    return {}, answer


def _environment() -> jinja2.Environment:
    """The sandbox and the extras that published templates count on; strftime_now is a variable (no clock)."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's text for trainers elsewhere; here it is
        plain."""

        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja's own filter escapes HTML characters, which would change the prompt
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


if __name__ == "__main__":
    calls.serve(int(sys.argv[1]), prepare)
