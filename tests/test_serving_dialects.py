"""The endpoint in two other dialects of chat: each gets what a chat completion of the same seed gets, in its own form."""

import asyncio
import json

import numpy as np
import pytest

from tests.fakes.endpoint import END, Rig, named, sample_of

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
SIX = {"seed": 3, "temperature": 0.5}
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
THOUGHT = b"<think>\nhm, 5\n</think>\n\nFive."
SAMPLED = b'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def asked(path, tools=False, **more):
    """A request of `path` that the others translate to."""
    if path == RESPONSES:
        body = {"input": "hello", "max_output_tokens": 9, "reasoning": {"effort": "low"}, "store": False}
        body |= {"tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "auto"} if tools else {}
    elif path == MESSAGES:
        body = {"messages": HELLO, "max_tokens": 9, "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}}
        tool = {"name": "add", "description": "adds", "input_schema": FUNCTION["parameters"]}
        body |= {"tools": [tool], "tool_choice": {"type": "auto"}} if tools else {}
    else:
        body = {"messages": HELLO, "max_tokens": 9}
        body |= {"tools": [{"type": "function", "function": FUNCTION}]} if tools else {}
    return {"model": "policy"} | body | more


def whole_of(path, call):
    """The answer that a stream makes."""
    events = call.chunks
    lines = [line for line in call.body.decode().split("\n") if line.startswith("event: ")]
    assert [line.removeprefix("event: ") for line in lines] == [event["type"] for event in events]
    if path == RESPONSES:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        whole = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert whole["output"] == done
        kinds = "response.reasoning_text.delta", "response.output_text.delta"
        deltas = "".join(event["delta"] for event in events if event["type"] in kinds)
        assert deltas == "".join(part["text"] for item in done for part in item.get("content", []))
        return whole
    whole, blocks = events[0]["message"], {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"json": ""}
        elif event["type"] == "content_block_delta" and event["delta"]["type"] in ("text_delta", "thinking_delta"):
            kind = event["delta"]["type"].removesuffix("_delta")
            blocks[event["index"]][kind] += event["delta"][kind]
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["json"] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            whole |= event["delta"]
            whole["usage"] |= event["usage"]
    assert events[-1]["type"] == "message_stop"
    for block in blocks.values():
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
    return whole | {"content": list(blocks.values())}


def text_of(path, answer):
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    blocks = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return "".join(block["text"] for block in blocks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_another_dialect_gets_what_a_chat_completion_gets(path, stream):
    async def run():
        async with Rig() as rig:
            chat = (await rig.ask(CHAT, asked(CHAT, **SIX))).json
            call = await rig.ask(path, asked(path, stream=stream, **SIX))
            assert call.status == 200, call.body
            answer = whole_of(path, call) if stream else call.json
            assert text_of(path, answer) == text_of(CHAT, chat) and answer["model"] == "policy@1"
            assert call.headers["x-weight-version"] == "1"
            used = answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]
            assert used == (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
            if path == RESPONSES:
                assert answer["status"] == "incomplete" and answer["object"] == "response"
                assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            else:
                assert answer["stop_reason"] == "max_tokens" and answer["type"] == "message"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_thought_stands_beside_the_answer(path, stream):
    async def run():
        async with Rig() as rig:
            size = {"max_output_tokens" if path == RESPONSES else "max_tokens": 90}
            call = rig.open(path, asked(path, stream=stream) | size)
            await rig.settle()
            ids = np.append(np.frombuffer(THOUGHT, np.uint8).astype(np.int32), np.int32(END))
            logprobs = np.full(len(ids), -0.5, np.float32)
            for n in (9, 25):
                rig.answers.grew(named(1), 0, ids[:n], logprobs[:n])
                await rig.settle()
            rig.answers.ended(sample_of(named(1), ids, logprobs))
            await call.task
            if path == CHAT and stream:
                deltas = [choice["delta"] for chunk in call.chunks for choice in chunk["choices"]]
                text = {
                    name: "".join(delta.get(name) or "" for delta in deltas)
                    for name in ("reasoning_content", "content")
                }
                assert text == {"reasoning_content": "\nhm, 5\n", "content": "Five."}
            elif path == CHAT:
                message = call.json["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == ("\nhm, 5\n", "Five.")
            elif path == RESPONSES:
                thought, text = (whole_of(path, call) if stream else call.json)["output"]
                assert thought["type"] == "reasoning" and thought["summary"] == [] and text["type"] == "message"
                assert thought["content"] == [{"type": "reasoning_text", "text": "\nhm, 5\n"}]
                assert text["content"][0]["text"] == "Five."
            else:
                thought, text = (whole_of(path, call) if stream else call.json)["content"]
                assert thought == {"type": "thinking", "thinking": "\nhm, 5\n", "signature": ""}
                assert text == {"type": "text", "text": "Five."}

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_a_tool_call_is_one_in_another_dialect(path, stream):
    async def run():
        async with Rig() as rig:
            call = rig.open(path, asked(path, tools=True, stream=stream, parallel_tool_calls=False) | {
                "max_output_tokens" if path == RESPONSES else "max_tokens": 90})  # fmt: skip
            await rig.settle()
            ids = np.append(np.frombuffer(SAMPLED, np.uint8).astype(np.int32), np.int32(END))
            logprobs = np.full(len(ids), -0.5, np.float32)
            rig.answers.grew(named(1), 0, ids[:9], logprobs[:9])
            await rig.settle()
            rig.answers.ended(sample_of(named(1), ids, logprobs))
            await call.task
            answer = whole_of(path, call) if stream else call.json
            if path == RESPONSES:
                reported, made = answer["output"]
                assert reported["content"][0]["text"] == "so " and answer["status"] == "completed"
                assert made["type"] == "function_call" and made["call_id"].startswith("call_")
                assert (made["name"], json.loads(made["arguments"])) == ("add", {"a": 1})
            else:
                reported, made = answer["content"]
                assert reported == {"type": "text", "text": "so "} and answer["stop_reason"] == "tool_use"
                assert (made["type"], made["name"], made["input"]) == ("tool_use", "add", {"a": 1})

    asyncio.run(run())


def test_a_conversation_with_tool_results_is_rendered_as_in_chat():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        {"role": "system", "content": "be kind"},
        *HELLO,
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "user", "content": "more"},
    ]
    blocks = [
        HELLO[0],
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]},
            {"type": "text", "text": "more"}]},
    ]  # fmt: skip
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "user", "content": "more"},
    ]

    async def run():
        async with Rig() as rig:
            expected = (await rig.ask(CHAT, asked(CHAT, True, **SIX) | {"messages": talk})).json
            for path, own in (
                (MESSAGES, {"messages": blocks, "system": [{"type": "text", "text": "be kind"}]}),
                (RESPONSES, {"input": items, "instructions": "be kind"}),
            ):
                answer = (await rig.ask(path, asked(path, True, **SIX) | own)).json
                assert text_of(path, answer) == text_of(CHAT, expected)
                assert answer["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]

    asyncio.run(run())


def test_a_stop_sequence_is_named():
    async def run():
        async with Rig() as rig:
            text = text_of(CHAT, (await rig.ask(CHAT, asked(CHAT, **SIX))).json)
            for stream in (False, True):
                call = await rig.ask(MESSAGES, asked(MESSAGES, stop_sequences=[text[4]], stream=stream, **SIX))
                answer = whole_of(MESSAGES, call) if stream else call.json
                assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4])
                assert text_of(MESSAGES, answer) == text[: text.index(text[4])]

    asyncio.run(run())


@pytest.mark.parametrize(
    "path, own, param",
    [
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
        (RESPONSES, {"wings": 2}, "wings"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (MESSAGES, {"tool_choice": {"type": "often"}}, "tool_choice"),
        (MESSAGES, {"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools"),
        (MESSAGES, {"temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused_in_the_words_of_its_dialect(path, own, param):
    async def run():
        async with Rig() as rig:
            call = await rig.ask(path, asked(path) | own)
            assert call.status == 400 and call.error["message"].startswith(param)
            if path == MESSAGES:
                assert call.json["type"] == "error" and call.error["type"] == "invalid_request_error"
            else:
                assert call.error["param"] == param

    asyncio.run(run())


def test_the_token_of_the_endpoint_may_come_as_an_api_key():
    async def run():
        async with Rig(token="secret") as rig:
            assert (await rig.ask(MESSAGES, asked(MESSAGES), x_api_key="secret")).status == 200
            call = await rig.ask(MESSAGES, asked(MESSAGES), x_api_key="other")
            assert call.status == 401 and call.error["type"] == "authentication_error"

    asyncio.run(run())
