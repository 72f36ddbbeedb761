"""Messages -> what a chat template takes; tokens -> text up to a stop string.

Laws: the pieces of a text, joined, do not depend on how its tokens were cut into ticks; no piece holds half a character
or the beginning of a stop string that may still be completed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dora_jax.models import grammar
from dora_jax.models.tokenizer import INCOMPLETE
from dora_jax.serving.request import Json, Refused, check

Decode = Callable[[Sequence[int]], str]
CONTEXT = 5  # prompt tokens before the first sampled one: some tokenizers drop the blank before a first word


class Detokenizer:
    """The text of one growing token sequence."""

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(prompt_ids[-CONTEXT:])
        self._start, self._decoded = 0, len(self._ids)

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self.rest(final=False)

    def rest(self, final: bool = True) -> str:
        """What is left when no token follows."""
        before, now = self._decode(self._ids[self._start : self._decoded]), self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not final):
            return ""
        self._start, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]


class Growing:
    """A text that grows. Its end waits where it may be the beginning of a mark."""

    _held = ""

    def _ready(self, marks: Sequence[str]) -> str:
        """What may be sent now."""
        longest = min(len(self._held), max((len(mark) - 1 for mark in marks), default=0))
        keep = next((n for n in range(longest, 0, -1) if any(mark.startswith(self._held[-n:]) for mark in marks)), 0)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return ready

    def rest(self) -> str:
        """What was held back, when no text follows."""
        ready, self._held = self._held, ""
        return ready


class StopText(Growing):
    """Lets a text through up to the first stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """include: the stop string itself is part of the text."""
        self._stops, self._include = tuple(stops), include
        self.complete = ""  # the stop string that is complete

    def feed(self, text: str) -> tuple[str, bool]:
        """(what may be sent now, whether a stop string is complete: then nothing follows)."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.complete = min(found)
            stop = self.complete
            return self._held[: at + len(stop) * self._include], True
        return self._ready(self._stops), False


ROLES = ("system", "developer", "user", "assistant", "tool")
OWN = (  # parameters of /v1/chat/completions alone
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "max_completion_tokens",
    "add_generation_prompt",
    "top_logprobs",
    "prompt_logprobs",
    "response_format",
)


@dataclass(frozen=True)
class TemplateInput:
    """What a chat template is rendered with."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    grammar: str = ""  # what the answer must look like: models/grammar.py
    held_by: str = ""  # the parameter that says so


def read(body: Json) -> TemplateInput:
    check(body, *OWN)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: not a list with at least one message", param="messages")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise Refused(400, "chat_template_kwargs: not an object", param="chat_template_kwargs")
    variables = dict(variables)
    if body.get("add_generation_prompt") is not None:
        variables["add_generation_prompt"] = bool(body["add_generation_prompt"])
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
        raise Refused(400, 'tools: not a list of objects of type "function"', param="tools")
    functions = [tool.get("function") for tool in tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise Refused(400, "tools: a function has no name", param="tools")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name") if choice.get("type") == "function" else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise Refused(400, f"tool_choice: {repr(name)[:40]} is none of the tools", param="tool_choice")
    elif choice not in (None, "auto", "none", "required"):
        raise Refused(
            400, 'tool_choice: neither "auto", "none" nor "required", nor one of the tools', param="tool_choice"
        )
    forced = choice not in (None, "auto", "none")
    if forced and not functions:
        raise Refused(400, "tool_choice: it requires a call, and there are no tools", param="tool_choice")
    if tools and choice != "none":
        variables["tools"] = tools
    form = body.get("response_format") or {"type": "text"}
    kind, schema = form.get("type") if isinstance(form, dict) else None, None
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind == "json_schema":
        schema = (form.get("json_schema") or {}).get("schema")
    if kind not in ("text", "json_object", "json_schema") or (kind != "text" and not isinstance(schema, dict)):
        message = "response_format: its type is none of text, json_object, json_schema, or there is no schema"
        raise Refused(400, message, param="response_format")
    held_by = "tool_choice" if forced else "response_format" if schema is not None else ""
    text = ""
    if held_by:
        text = grammar.of(None if forced else schema, functions if forced or "tools" in variables else ())
    ready = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return TemplateInput(ready, variables, text, held_by)


# ---------------------------------------------------------------- private


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates take it: a text, of parts that are joined, and arguments of calls as objects, because a
    template writes them as JSON."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(400, f"{where}: its role is none of {', '.join(ROLES)}", param="messages")
    ready = {name: value for name, value in message.items() if value is not None}
    content, calls = message.get("content"), message.get("tool_calls") or []
    if content is not None and not isinstance(content, str):
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if not parts or len(parts) < len(content) or not all(part.get("type") == "text" for part in parts):
            raise Refused(
                400, f"{where}: its content is not text, and this endpoint takes text alone", param="messages"
            )
        content = "".join(str(part.get("text", "")) for part in parts)
    ready["content"] = content or ""
    if not isinstance(calls, list):
        raise Refused(400, f"{where}: its tool_calls are no list", param="messages")
    if calls:
        ready["tool_calls"] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"{where}: a tool call has no function with a name", param="messages")
        arguments = function.get("arguments", "{}")
        with contextlib.suppress(ValueError):  # what the model wrote was no JSON: the template shows it as it was
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        ready["tool_calls"].append({**call, "function": {**function, "arguments": arguments}})
    return ready
