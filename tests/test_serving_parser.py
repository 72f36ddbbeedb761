"""What an answer holds beside what it says: thinking and tool calls, in the forms of the model families, however it is cut."""

import json
import re

import pytest

from dora_jax.serving.parser import AnswerSyntax, Thought, ToolCall

ADD, SUB = ToolCall("add", '{"a": 1, "b": "x y"}'), ToolCall("sub", "{}")
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_ENDS, ALL_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
ARGUMENTS = '{"a": 1, "b": "x y"}'
DEEPSEEK_V3 = (
    f"<｜tool▁calls▁begin｜>{CALL}function{SEP}add\n```json\n{ARGUMENTS}\n```{CALL_ENDS}\n"
    f"{CALL}function{SEP}sub\n```json\n{{}}\n```{CALL_ENDS}{ALL_END}"
)
DEEPSEEK = f"<｜tool▁calls▁begin｜>{CALL}add{SEP}{ARGUMENTS}{CALL_ENDS}{CALL}sub{SEP}{{}}{CALL_ENDS}{ALL_END}"
SPECIAL = ("<|eot_id|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "</s>")  # fmt: skip
HARMONY = "<|start|>assistant<|channel|>"
CASES = {  # marks of the chat template, answer -> thinking, text, calls
    "hermes": ("", f"Let me see.\n{TAGGED}\n{TAGGED}", ("", "Let me see.", [ADD, ADD])),
    "hermes, thought": ("", f"<think>\nhm {TAGGED}\n</think>\n\nWell.{TAGGED}", (f"\nhm {TAGGED}\n", "Well.", [ADD])),
    "thought alone": ("", "\n<think>so</think>5", ("so", "5", [])),
    "a later thought": ("", f"see <think>{TAGGED}</think>{TAGGED}", ("", f"see <think>{TAGGED}</think>", [ADD])),
    "coder": ("<function=", CODER, ("", "", [ADD])),
    "coder, bare": ("<function=", "So:\n" + CODER[12:-13], ("", "So:", [ADD])),
    "glm": ("<arg_key>", f"<think></think>{GLM}{GLM}", ("", "", [ADD, ADD])),
    "llama": ("<|python_tag|>", '{"name": "add", "parameters": {"a": 1, "b": "x y"}}<|eot_id|>', ("", "", [ADD])),
    "llama, two": ("<|python_tag|>", f'<|python_tag|>{{"name": "sub", "parameters": {{}}}}; {{"name": "add", "parameters": {ARGUMENTS}}}<|eot_id|>', ("", "", [SUB, ADD])),
    "llama, an answer": ("<|python_tag|>", '{"n": 5}<|eot_id|>', ("", '{"n": 5}', [])),
    "mistral": ("[TOOL_CALLS]", f'Yes.[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "sub", "arguments": {{}}}}]</s>', ("", "Yes.", [ADD, SUB])),
    "mistral, newer": ("[TOOL_CALLS]", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]sub[CALL_ID]8f[ARGS]{{}}</s>", ("", "", [ADD, SUB])),
    "deepseek v3": ("<｜tool▁calls▁begin｜>", f"Yes.{DEEPSEEK_V3}", ("", "Yes.", [ADD, SUB])),
    "deepseek": ("<｜tool▁calls▁begin｜>", f"<think>hm</think>{DEEPSEEK}", ("hm", "", [ADD, SUB])),
    "harmony": ("<|channel|><|message|>", f"<|channel|>analysis<|message|>hm<|end|>{HARMONY}commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>", ("hm", "", [ADD])),
    "harmony, an answer": ("<|channel|><|message|>", f"<|channel|>analysis<|message|>hm<|end|>{HARMONY}final<|message|>It is 5.<|return|>", ("hm", "It is 5.", [])),
    "unfinished": ("", f"a {TAGGED[:-3]}", ("", f"a {TAGGED[:-3]}", [])),
    "mistral, broken": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": 1}]', ("", '[{"name": 1}]', [])),
    "deepseek, no object": ("<｜tool▁calls▁begin｜>", DEEPSEEK.replace("{}", "[]"), ("", DEEPSEEK.replace("{}", "[]"), [])),
}  # fmt: skip


def syntax_of(marks):
    special = re.compile("|".join(map(re.escape, SPECIAL)))
    return AnswerSyntax.of(type("Tokenizer", (), {"template": marks, "special": special}))


def read(text, size, marks="", before="", **options):
    parser = syntax_of(marks).begin(before, **{"tools": True} | options)
    parts = []
    for i in range(0, len(text), size):
        parts += parser.feed(text[i : i + size])
    parts += parser.feed("", final=True)
    assert all(part.text if isinstance(part, Thought) else part for part in parts)
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    rest = "".join(part for part in parts if isinstance(part, str))
    return thought, rest, [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_an_answer_is_read_in_the_form_of_its_family_however_it_is_cut(name, size):
    marks, text, found = CASES[name]
    assert read(text, size, marks) == found


def test_a_prompt_that_opens_the_thought_and_a_request_without_tools():
    assert read(f"hm {TAGGED}</think>\n\n5", 2, before="assistant\n<think>\n") == (f"hm {TAGGED}", "5", [])
    assert read(f"<think>hm</think>{TAGGED}", 2, tools=False) == ("hm", TAGGED, [])


def test_a_text_stays_one_whatever_it_looks_like():
    text = CODER.replace("x y", "2")
    (call,) = read(text, 5, "<function=", texts=frozenset({("add", "b")}))[2]
    assert json.loads(call.arguments) == {"a": 1, "b": "2"}
    (call,) = read(text, 5, "<function=")[2]
    assert json.loads(call.arguments) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "arguments, same", [('"{\\"a\\": 1}"', '{"a": 1}'), ("[1]", None), ('"no"', None), ("7", None)]
)
def test_arguments_are_an_object(arguments, same):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(text, 1000)[1:] == (("", [ToolCall("add", same)]) if same else (text, []))


class Marks:
    """A tokenizer as the package asks for one: marks are tokens, and so is every other character."""

    unk_token_id = None

    def __init__(self, *marks):
        self.pattern, self.marks = re.compile("|".join(map(re.escape, marks)) + "|.", re.DOTALL), marks

    def encode(self, text):
        return [self._id(piece) for piece in self.pattern.findall(text)]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.marks[id - 200_000] if id >= 200_000 else chr(id) for id in ids)

    def convert_tokens_to_ids(self, token):
        return self._id(token) if token in self.marks else None

    def _id(self, piece):
        return 200_000 + self.marks.index(piece) if piece in self.marks else ord(piece)


@pytest.mark.parametrize(
    "name, kind, marks",
    [
        ("hermes", "qwen3", ("<tool_call>", "</tool_call>")),
        ("coder", "qwen3.5", ("<tool_call>", "</tool_call>")),
        ("glm", "glm", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
        ("deepseek v3", "deepseek-v3", ("<｜tool▁calls▁begin｜>", CALL, SEP, CALL_ENDS, ALL_END)),
    ],
)
def test_the_package_renderers_finds_the_same_calls(name, kind, marks):
    parsers = pytest.importorskip("renderers.parsers", reason="renderers is not installed: the extra agents")
    marked, text, (_, _, calls) = CASES[name]
    tokenizer = Marks(*marks)
    _, found = parsers.get_tool_parser(kind, tokenizer).extract(tokenizer.encode(text))
    assert [(call.name, call.arguments) for call in found] == [(c.name, json.loads(c.arguments)) for c in calls]
    assert read(text, 4, marked)[2] == calls
