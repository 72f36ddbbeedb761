"""A model's text that grows -> what it thought, its text, and its tool calls, in the forms of the model families.

    Hermes, Qwen          <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    Qwen-Coder            <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    GLM                   <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
    Llama                 {"name": "f", "parameters": {"x": 1}}, all of an answer; several with ";" between them
    Mistral               [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], or [TOOL_CALLS]f[ARGS]{"x": 1}
    DeepSeek              <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>, and marks around all of them
    harmony (gpt-oss)     <|channel|>commentary to=functions.f<|message|>{"x": 1}<|call|>

Thinking is what stands in <think>...</think> at the beginning of an answer, or in harmony's channel "analysis". The
chat template tells which forms a model writes: it holds their marks.
Laws: what is read does not depend on how the text was cut; nothing that is thought is a call, nor are arguments that
are no object: what is of no form stays text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_jax.serving.chat import Growing

if TYPE_CHECKING:
    from dora_jax.models.tokenizer import Tokenizer

THINK, THOUGHT = "<think>", "</think>"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"  # of harmony
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Thought:
    text: str


Output = str | Thought | ToolCall


Texts = frozenset[tuple[str, str]]  # (function, parameter) whose value is a text, whatever it looks like


@dataclass(frozen=True)
class CallSyntax:
    """Calls between two marks. close: empty: they go on to the next `open`, or to the end of the answer."""

    open: str
    close: str
    calls: Callable[[str, Texts], list[ToolCall]]  # of the text between; empty, or an error: it is of no form


def _call(name: object, arguments: object) -> list[ToolCall]:
    """Empty: it is no call."""
    if isinstance(arguments, str):  # some models write them as JSON in a string
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return []
    return [ToolCall(name.strip(), json.dumps(arguments, ensure_ascii=False))]


def _objects(text: str, texts: Texts = frozenset()) -> list[ToolCall]:
    """Objects with a name and arguments: one, a list of them, or several one behind the other. All are calls, or
    none."""
    calls, at, decoder = list[ToolCall](), 0, json.JSONDecoder()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        for each in value if isinstance(value, list) else [value]:
            if not (call := _call(each["name"], each.get("arguments", each.get("parameters", {})))):
                return []
            calls += call
        while text[at : at + 1] in (";", " ", "\n"):
            at += 1
    return calls


def _tagged(text: str, texts: Texts) -> list[ToolCall]:
    """Between the tags of Hermes: its JSON, or the tags of Qwen-Coder, or those of GLM."""
    if function := re.fullmatch(r"<function=([^>\n]+)>(.*?)(?:</function>)?", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
    elif function := re.fullmatch(r"([\w.:-]+)\s*(<arg_key>.*)?", text, re.DOTALL):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", function[2] or "", re.DOTALL)
    else:
        return _objects(text)
    name, arguments = function[1].strip(), dict[str, object]()
    for key, value in pairs:
        arguments[key.strip()] = value
        if (name, key.strip()) not in texts:
            with contextlib.suppress(ValueError):
                arguments[key.strip()] = json.loads(value)
    return _call(name, arguments)


def _mistral(text: str, texts: Texts) -> list[ToolCall]:
    if text.startswith("["):
        return _objects(text)
    name, _, arguments = re.sub(r"\[CALL_ID\][^\[{]*|\[ARGS\]", "", text).partition("{")
    return _call(name, json.loads("{" + arguments))


def _deepseek(text: str, texts: Texts) -> list[ToolCall]:
    calls = []
    for call in re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL):
        kind, _, rest = call.partition("<｜tool▁sep｜>")
        fenced = re.fullmatch(r"\s*([^\n]+)\n```json\n(.*?)\n?```\s*", rest, re.DOTALL)  # kind is "function" then
        if not (new := _call(fenced[1], json.loads(fenced[2])) if fenced else _call(kind, json.loads(rest))):
            return []
        calls += new
    return calls


def _harmony(text: str, texts: Texts, *, name: str) -> list[ToolCall]:
    return _call(name, json.loads(text))


TAGGED = CallSyntax("<tool_call>", "</tool_call>", _tagged)
CODER = CallSyntax("<function=", "</function>", lambda text, texts: _tagged(f"<function={text}", texts))
LLAMA = CallSyntax("<|python_tag|>", "", _objects)
MISTRAL = CallSyntax("[TOOL_CALLS]", "", _mistral)
DEEPSEEK = CallSyntax("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek)


@dataclass(frozen=True)
class AnswerSyntax:
    """How the answers of one model are read."""

    forms: tuple[CallSyntax, ...] = (TAGGED,)
    harmony: bool = False
    special: re.Pattern[str] | None = None  # special tokens, which are read as marks and are left out of the text

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerSyntax:
        """The syntax that the marks in its chat template tell."""
        template, special = tokenizer.template, tokenizer.special
        harmony = CHANNEL in template and MESSAGE in template
        forms = tuple(form for form in (CODER, LLAMA, MISTRAL, DEEPSEEK) if form.open in template)
        marks = (THINK, TAGGED.open, CHANNEL, *(form.open for form in forms))
        return cls((TAGGED, *forms), harmony, special if special and any(map(special.search, marks)) else None)

    def begin(
        self, before: str, *, tools: bool, texts: Texts = frozenset(), keep_special: bool = False
    ) -> AnswerParser:
        """The reader of an answer behind this text. tools: it may call some; keep_special: as the text has them."""
        kind = HarmonyParser if self.harmony else AnswerParser
        special = None if keep_special else self.special
        return kind(self.forms if tools else (), texts, special, thinking=before.rstrip().endswith(THINK))


class AnswerParser(Growing):
    """Reads one answer."""

    def __init__(
        self,
        forms: tuple[CallSyntax, ...] = (TAGGED,),
        texts: Texts = frozenset(),
        special: re.Pattern[str] | None = None,
        *,
        thinking: bool = False,
    ):
        """thinking: the prompt has opened <think>."""
        self.n_calls = 0  # calls
        self._forms, self._texts, self._special = forms, texts, special
        self._thinking, self._has_thought = thinking, thinking
        self._speaking = self._called = False  # there is text; a call was the last
        self._quoting = False  # behind a later <think>, which is text, and so is a call in it

    def feed(self, text: str, final: bool = False) -> Iterator[Output]:
        """What the text adds, in its order. final: no more follows."""
        self._held += text
        while True:
            if self._called:
                self._held = self._held.lstrip("\n")
                self._called = not self._held
            inside = self._thinking or self._quoting
            if not self._speaking and not inside and LLAMA in self._forms and self._held.lstrip().startswith("{"):
                if final:
                    whole, self._held = self._held, ""
                    yield from self._calls(LLAMA, "", whole, whole)
                return
            marks = (THOUGHT,) if inside else (*(form.open for form in self._forms), THINK)
            places = {mark: self._held.find(mark) for mark in marks if mark in self._held}
            if not places:
                break
            mark = min(places, key=places.__getitem__)
            before, _, rest = self._held.partition(mark)
            if mark in (THINK, THOUGHT):
                self._held = rest
                if self._thinking:
                    self._thinking = False
                    yield from self._output(Thought, before)
                elif mark == THINK and not (self._speaking or self._has_thought or before.strip()):
                    self._thinking = self._has_thought = True
                else:
                    self._quoting = mark == THINK
                    yield from self._output(str, before + mark)
                continue
            form = next(form for form in self._forms if form.open == mark)
            inner, closed, after = rest.partition(form.close or form.open)
            if not closed and (form.close or not final):
                if final:
                    break
                yield from self._output(str, before.rstrip("\n"))
                self._held = self._held[len(before.rstrip("\n")) :]
                return
            self._held = after if form.close else closed + after
            yield from self._calls(form, before, inner, mark + inner + (closed if form.close else ""))
        if final:
            ready, self._held = self._held, ""
        else:
            ready = self._ready(marks)
            keep = ready.rstrip("\n") if ready.strip() or self._speaking else ""  # blanks, which what follows may drop
            if not self._thinking:
                ready, self._held = keep, ready[len(keep) :] + self._held
        yield from self._output(Thought if self._thinking else str, ready)

    # ------------------------------------------------------------ private

    def _calls(self, form: CallSyntax, before: str, inner: str, whole: str) -> Iterator[Output]:
        """The calls behind the text before them; where there are none, all of it is text."""
        if self._special:  # the end token
            inner = re.sub(f"(?:{self._special.pattern})+$", "", inner.rstrip())
        try:
            calls = form.calls(inner.strip(), self._texts)
        except (ValueError, KeyError, TypeError, AttributeError):
            calls = []
        yield from self._output(str, before.rstrip("\n") if calls else before + whole)
        self.n_calls += len(calls)
        self._called = bool(calls)
        yield from calls

    def _output(self, kind: type[str | Thought], text: str) -> Iterator[Output]:
        text = self._special.sub("", text) if self._special else text
        if kind is str:
            if self._has_thought and not self._speaking:
                text = text.lstrip("\n")  # between thought and answer
            self._speaking |= bool(text.strip())
        if text:
            yield kind(text)


class HarmonyParser(AnswerParser):
    """Reads messages of channels: "analysis" is thought; one to a function is a call; the others are text."""

    _header: str | None = None  # of the message whose body is under way

    def feed(self, text: str, final: bool = False) -> Iterator[Output]:
        self._held += text
        while True:
            if self._header is None:
                header, mark, rest = self._held.partition(MESSAGE)
                if not mark:
                    if final and CHANNEL not in header:  # of no form
                        yield from self._output(str, header)
                    return
                self._header, self._held = header, rest
            ends = {mark: self._held.find(mark) for mark in MESSAGE_ENDS if mark in self._held}
            end = min(ends, key=ends.__getitem__, default="")
            to = re.search(r"to=(?:functions\.)?([\w.-]+)", self._header) if self._forms else None
            if not end and not final:
                if to is None:
                    kind = Thought if "analysis" in self._header else str
                    yield from self._output(kind, self._ready(MESSAGE_ENDS))
                return
            body = self._held[: ends[end]] if end else self._held
            if to is None:
                yield from self._output(Thought if "analysis" in self._header else str, body)
            else:
                function = CallSyntax("", "", functools.partial(_harmony, name=to[1]))
                yield from self._calls(function, "", body, body)
            self._header, self._held = None, self._held[len(body) + (0 if end == CHANNEL else len(end)) :]
            if not end:
                return
