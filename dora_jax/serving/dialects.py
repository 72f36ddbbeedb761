"""Two other dialects of chat: OpenAI's Responses and Anthropic's Messages. Pure.

    POST /v1/responses    Responses.read   -> the body of a chat completion     ResponsesReply, the way back
    POST /v1/messages     Messages.read    -> the same                          MessagesReply

Laws: what is sampled is what the chat completion samples; a parameter is translated, ignored as a hint, or refused
under the name that its own dialect gives it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dora_jax.serving.answers import Piece
from dora_jax.serving.parser import ToolCall
from dora_jax.serving.reply import ChatReply
from dora_jax.serving.request import IGNORED, Json, Refused

Item = dict[str, Any]

SAME = ("model", "temperature", "top_p", "top_k", "stream", "parallel_tool_calls", "seed", "min_p", "logit_bias",
        "presence_penalty", "frequency_penalty", "chat_template_kwargs")  # fmt: skip  # both spell them as chat does
TEXTS = ("text", "input_text", "output_text")  # kinds of content that are text


class Responses:
    """OpenAI's Responses. Nothing is stored: a conversation is sent whole."""

    names: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
    }  # of chat -> its own
    ignored = frozenset({"reasoning", "include", "truncation", "stream_options", "prompt_cache_retention"})
    neutral: Mapping[str, tuple[Any, ...]] = {"background": (False,), "top_logprobs": (0,), "previous_response_id": (),
                                              "conversation": (), "prompt": (), "max_tool_calls": ()}  # fmt: skip

    @classmethod
    def read(cls, body: Json) -> Item:
        """The chat completion's body. Refused: a chat completion does not do this."""
        known = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text")
        chat = _translated(body, cls.ignored, cls.neutral, known)
        asked = body.get("input")
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if not isinstance(items, list) or not items:
            raise Refused(400, "input: neither a text nor a list of items", param="input")
        messages: list[Item] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": body["instructions"]})
        for i, item in enumerate(items):
            kind = item.get("type", "message") if isinstance(item, dict) else None
            if kind == "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"input[{i}]", TEXTS)})
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                output = _text(item.get("output"), f"input[{i}]", TEXTS)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            elif kind != "reasoning":  # which a model without the right to read it wrote before
                raise Refused(400, f"input[{i}]: items of type {kind!r} are not served", param="input")
        form = (body.get("text") or {}).get("format") if isinstance(body.get("text") or {}, dict) else None
        if form is not None:
            json_schema = {name: value for name, value in form.items() if name != "type"}
            chat["response_format"] = {"type": form.get("type")} | ({"json_schema": json_schema} if json_schema else {})
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(t, dict) and t.get("type") == "function" for t in tools):
            raise Refused(400, 'tools: not a list of objects of type "function"', param="tools")
        fields = ("name", "description", "parameters", "strict")
        functions = [{name: tool[name] for name in fields if tool.get(name) is not None} for tool in tools]
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens"), "tool_choice": choice}
        chat["tools"] = [{"type": "function", "function": function} for function in functions] or None
        return chat


class Messages:
    """Anthropic's Messages."""

    names: Mapping[str, str] = {"stop": "stop_sequences", "response_format": "output_config"}
    ignored = frozenset({"thinking", "context_management", "cache_control", "speed", "inference_geo"})
    neutral: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
    choices: Mapping[str, str] = {"auto": "auto", "none": "none", "any": "required"}

    @classmethod
    def read(cls, body: Json) -> Item:
        """The chat completion's body. Refused: as of `Responses.read`."""
        known = ("messages", "max_tokens", "system", "stop_sequences", "tools", "tool_choice", "output_config")
        chat = _translated(body, cls.ignored, cls.neutral, known)
        if body.get("max_tokens") is None:
            raise Refused(400, "max_tokens: it is missing", param="max_tokens")
        messages: list[Item] = []
        if body.get("system"):
            messages.append({"role": "system", "content": _text(body["system"], "system", TEXTS)})
        asked = body.get("messages")
        for i, message in enumerate(asked if isinstance(asked, list) else []):
            where = f"messages[{i}]"
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
                raise Refused(400, f"{where}: its role is none of user, assistant, system", param="messages")
            content = message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
                raise Refused(400, f"{where}: its content is neither a text nor a list of blocks", param="messages")
            calls, texts = [], []
            for block in blocks:
                kind = block.get("type")
                if kind == "tool_use" and message["role"] == "assistant":
                    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                    calls.append({"id": block.get("id"), "type": "function", "function": function})
                elif kind == "tool_result" and message["role"] == "user":
                    result = _text(block.get("content") or "", where, TEXTS)
                    messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
                elif kind not in ("thinking", "redacted_thinking"):
                    texts.append(_text([block], where, TEXTS))
            if texts or calls:
                new: Item = {"role": message["role"], "content": "".join(texts) or None}
                messages.append(new | ({"tool_calls": calls} if calls else {}))
        choice, tools = body.get("tool_choice") or {}, body.get("tools") or []
        if not isinstance(choice, dict) or choice.get("type", "auto") not in (*cls.choices, "tool"):
            raise Refused(400, "tool_choice: its type is none of auto, any, tool, none", param="tool_choice")
        if not isinstance(tools, list) or not all(isinstance(t, dict) and "input_schema" in t for t in tools):
            raise Refused(400, "tools: not a list of objects with an input_schema", param="tools")
        function = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = function if choice.get("type") == "tool" else cls.choices[choice.get("type", "auto")]
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in tools
        ] or None
        config = body.get("output_config") or {}
        if isinstance(config, dict) and (form := config.get("format")):
            chat["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
        return chat | {"messages": messages, "max_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}


def renamed(error: Refused, dialect: type[Responses | Messages]) -> Refused:
    """The refusal of a chat completion, as the dialect names things."""
    body = error.body["error"]
    if (name := dialect.names.get(body["param"])) is None:
        return error
    message = body["message"].replace(f"{body['param']}", name, 1)
    return Refused(error.status, message, param=name, code=body["code"])


@dataclasses.dataclass
class ResponsesReply(ChatReply):
    prefix, last = "resp", ""

    def body(self, pieces: Sequence[Piece]) -> Item:
        cut = pieces[-1].finish == "length"
        status = "incomplete" if cut else "completed"
        return self._response(status, self._items(pieces, status), self._usage(pieces))

    def opening(self) -> list[Item]:
        self._numbers, self._open, self._done = itertools.count(), "", list[Item]()
        self._texts: list[str] = []  # of the open item
        started = self._response("in_progress", [], None)
        return [self._event(f"response.{kind}", response=started) for kind in ("created", "in_progress")]

    def chunks(self, piece: Piece) -> list[Item]:
        events = list[Item]()
        for kind, text in (("rs", piece.thought), ("msg", piece.text)):
            if not text:
                continue
            if not self._open.startswith(kind):
                events += self._close("completed")
                self._open = f"{kind}_{self.answer.id}_{len(self._done)}"
                item = self._item("in_progress", [])
                events.append(self._event("response.output_item.added", output_index=len(self._done), item=item))
                events.append(self._of_item("content_part.added", part=self._content("")))
            self._texts.append(text)
            events.append(self._of_item(f"{self._content('')['type']}.delta", delta=text, **self._no_logprobs()))
        for call in piece.calls:
            events += self._close("completed")
            index, item = len(self._done), self._call_item(call, len(self._done))
            self._done.append(item)
            started, at = (
                item | {"arguments": "", "status": "in_progress"},
                {"item_id": item["id"], "output_index": index},
            )
            events.append(self._event("response.output_item.added", output_index=index, item=started))
            events.append(self._event("response.function_call_arguments.delta", **at, delta=call.arguments))
            done = {"name": call.name, "arguments": call.arguments}
            events.append(self._event("response.function_call_arguments.done", **at, **done))
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return events

    def closing(self, pieces: Sequence[Piece]) -> list[Item]:
        status = "incomplete" if pieces[-1].finish == "length" else "completed"
        events = self._close(status)
        response = self._response(status, self._done, self._usage(pieces))
        return [*events, self._event(f"response.{status}", response=response)]

    def _items(self, pieces: Sequence[Piece], status: str) -> list[Item]:
        """What a stream of these pieces has sent, as one list."""
        self.opening()
        for piece in pieces:
            self.chunks(piece)
        self._close(status)
        return self._done

    def _close(self, status: str) -> list[Item]:
        """The open item, if any, ends."""
        if not self._open:
            return []
        text, index = "".join(self._texts), len(self._done)
        content = self._content(text)
        item = self._item(status, [content])
        events = [
            self._of_item(f"{content['type']}.done", text=text, **self._no_logprobs()),
            self._of_item("content_part.done", part=content),
            self._event("response.output_item.done", output_index=index, item=item),
        ]
        self._done.append(item)
        self._open, self._texts = "", []
        return events

    def _item(self, status: str, content: list[Item]) -> Item:
        """The open item: a message, or what was thought."""
        item: Item = {"type": "message", "id": self._open, "status": status, "role": "assistant", "content": content}
        if self._open.startswith("rs"):
            item = {"type": "reasoning", "id": self._open, "status": status, "summary": [], "content": content}
        return item

    def _content(self, text: str) -> Item:
        return {"type": "reasoning_text", "text": text} if self._open.startswith("rs") else _output(text)

    def _no_logprobs(self) -> Item:
        return {} if self._open.startswith("rs") else {"logprobs": []}

    def _of_item(self, kind: str, **fields: Any) -> Item:
        return self._event(
            f"response.{kind}", item_id=self._open, output_index=len(self._done), content_index=0, **fields
        )

    def _event(self, kind: str, **fields: Any) -> Item:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _call_item(self, call: ToolCall, i: int) -> Item:
        made = self._call(call, 0, i)
        names = {"name": call.name, "arguments": call.arguments}
        return {
            "type": "function_call",
            "id": f"fc_{made['id']}",
            "call_id": made["id"],
            **names,
            "status": "completed",
        }

    def _response(self, status: str, output: list[Item], usage: Item | None) -> Item:
        head, wanted = self._head("response"), self.answer.wanted
        head["created_at"] = head.pop("created")
        return head | {
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": wanted.max_tokens,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": not wanted.one_call,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto" if wanted.tools else "none",
            "tools": [],
            "truncation": "disabled",
            "usage": usage,
        }

    def _usage(self, pieces: Sequence[Piece]) -> Item:
        used = self.usage(pieces)
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }


REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclasses.dataclass
class MessagesReply(ChatReply):
    prefix, last = "msg", ""

    def body(self, pieces: Sequence[Piece]) -> Item:
        blocks: list[Item] = []
        for piece in pieces:
            for kind, text in (("thinking", piece.thought), ("text", piece.text)):
                if text and not (blocks and blocks[-1]["type"] == kind):
                    blocks.append(_block(kind))
                if text:
                    blocks[-1][kind] += text
            for call in piece.calls:
                id, given = self._call(call, 0, len(blocks))["id"], json.loads(call.arguments)
                blocks.append({"type": "tool_use", "id": id, "name": call.name, "input": given})
        return self._message(blocks, pieces) | self._end(pieces[-1])

    def opening(self) -> list[Item]:
        self._blocks, self._kind = 0, ""  # blocks that ended; the kind of the open one
        message = self._message([], []) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}]

    def chunks(self, piece: Piece) -> list[Item]:
        events: list[Item] = []
        for kind, text in (("thinking", piece.thought), ("text", piece.text)):
            if text and self._kind != kind:
                events += self._close()
                events.append(self._block("start", content_block=_block(kind)))
                self._kind = kind
            if text:
                events.append(self._block("delta", delta={"type": f"{kind}_delta", kind: text}))
        for call in piece.calls:
            events += self._close()
            block = {"type": "tool_use", "id": self._call(call, 0, self._blocks)["id"], "name": call.name, "input": {}}
            events.append(self._block("start", content_block=block))
            events.append(self._block("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}))
            self._kind = "tool_use"
            events += self._close()
        return events

    def closing(self, pieces: Sequence[Piece]) -> list[Item]:
        used = {"output_tokens": self.usage(pieces)["completion_tokens"]}
        end = {"type": "message_delta", "delta": self._end(pieces[-1]), "usage": used}
        return [*self._close(), end, {"type": "message_stop"}]

    def _close(self) -> Iterator[Item]:
        """The open block, if any, ends."""
        if self._kind:
            yield self._block("stop")
            self._blocks, self._kind = self._blocks + 1, ""

    def _block(self, what: str, **fields: Any) -> Item:
        return {"type": f"content_block_{what}", "index": self._blocks, **fields}

    def _end(self, piece: Piece) -> Item:
        reason = "stop_sequence" if piece.stopped_by else REASONS[piece.finish or "stop"]
        return {"stop_reason": reason, "stop_sequence": piece.stopped_by}

    def _message(self, content: list[Item], pieces: Sequence[Piece]) -> Item:
        head, used = self._head("message"), self.usage(pieces)
        del head["object"], head["created"]
        used = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        return head | {"type": "message", "role": "assistant", "content": content, "usage": used}


def refusal(error: Refused) -> Item:
    """The body of a refusal, as Anthropic's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}


# ---------------------------------------------------------------- private


def _translated(
    body: Json, ignored: frozenset[str], neutral: Mapping[str, tuple[Any, ...]], known: Sequence[str]
) -> Item:
    """What chat spells alike. Refused: a parameter is unknown or cannot be honoured."""
    for name, value in body.items():
        if name not in {*SAME, *known, *IGNORED, *ignored, *neutral}:
            raise Refused(400, f"{name}: unknown parameter", param=name)
        if value is not None and name in neutral and value not in neutral[name]:
            raise Refused(400, f"{name}: this endpoint does not have it; leave it out", param=name)
    return {name: body[name] for name in SAME if body.get(name) is not None}


def _text(content: Any, where: str, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise Refused(400, f"{where}: its content is neither a text nor a list of texts", param=where.partition("[")[0])
    if other := next((each for each in content if each.get("type") not in kinds), None):
        message = f"{where}: its content holds {other.get('type')!r}, and this endpoint takes text alone"
        raise Refused(400, message, param=where.partition("[")[0])
    return "".join(str(each.get("text", "")) for each in content)


def _block(kind: str) -> Item:
    return {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})


def _output(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
