"""The endpoint over oracle engines: what clients read on the wire, and what becomes of answers whose clients leave."""

import asyncio

import pytest

from dora_jax.serving.chat import ToolCall, ToolCalls
from dora_jax.serving.request import Refused
from dora_jax.serving.text import Detokenizer, StopText
from dora_jax.serving.versions import Versions
from tests.fakes.endpoint import END, Letters, Rig

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]


# ------------------------------------------------------------------ the wire


def test_a_completion_says_its_text_tokens_and_version():
    async def run():
        async with Rig(length=lambda *_: 6) as rig:
            body = {"model": "policy", "prompt": "abc", "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
            call = await rig.ask(COMPLETIONS, body)
            sampled = [*rig.engines[0].expected(1, 1, 0, 5).tolist(), END]
            (choice,) = call.json["choices"]
            assert call.status == 200 and call.headers["x-weight-version"] == "1"
            assert call.json["model"] == "policy@1" and call.json["weight_version"] == 1
            assert choice["token_ids"] == sampled and choice["prompt_token_ids"] == [97, 98, 99]
            assert choice["text"] == Letters().decode(sampled) and choice["finish_reason"] == "stop"
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == 6
            assert call.json["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}

    asyncio.run(run())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_what_one_piece_says(path):
    async def run():
        async with Rig() as rig:
            body = {"seed": 3, "n": 2, "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
            body |= {"prompt": "abc"} if path == COMPLETIONS else {"messages": HELLO, "logprobs": True}
            whole = (await rig.ask(path, body)).json
            options = {"stream": True, "stream_options": {"include_usage": True}}
            call = await rig.ask(path, body | options)
            assert call.events[-1] == "[DONE]" and call.chunks[-1]["choices"] == []
            assert call.chunks[-1]["usage"] == whole["usage"]
            assert len(call.chunks) > 10, "in pieces"
            for choice in whole["choices"]:
                mine = [c for chunk in call.chunks for c in chunk["choices"] if c["index"] == choice["index"]]
                said = [c.get("text") or c.get("delta", {}).get("content") or "" for c in mine]
                assert "".join(said) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
                assert [id for c in mine for id in c.get("token_ids", [])] == choice["token_ids"]
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
            if path == CHAT:
                assert call.chunks[0]["choices"][0]["delta"]["role"] == "assistant"

    asyncio.run(run())


def test_token_ids_go_in_and_come_out_with_their_logprobs():
    async def run():
        async with Rig() as rig:
            params = {"max_tokens": 4, "temperature": 1.0, "logprobs": 1, "skip_special_tokens": False}
            call = await rig.ask(GENERATE, {"model": "policy@1", "token_ids": [7, 8], "sampling_params": params})
            (choice,) = call.json["choices"]
            assert choice["token_ids"] == rig.engines[0].expected(1, 1, 0, 4).tolist()
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in choice["token_ids"]]
            assert all(-2.1 < entry["logprob"] < 0 for entry in content) and call.json["request_id"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "path, body, status, param",
    [
        (COMPLETIONS, {"prompt": "a", "temperature": 0.7}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0.5}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "wings": 2}, 400, "wings"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 64}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a" * 64}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [300]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "policy@9"}, 404, "model"),
        (COMPLETIONS, b"{", 400, None),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 3}, 400, "top_logprobs"),
        (GENERATE, {"token_ids": "abc"}, 400, "token_ids"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"routed_experts_prompt_start": 0}}, 400, None),
        ("/v1/responses", {"input": "a"}, 404, None),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(path, body, status, param):
    async def run():
        async with Rig() as rig:
            call = await rig.ask(path, body)
            assert call.status == status, call.body
            assert set(call.error) == {"message", "type", "param", "code"}
            if param:
                assert call.error["param"] == param and call.error["message"]

    asyncio.run(run())


def test_with_a_token_only_its_bearer_is_answered():
    async def run():
        async with Rig(token="secret") as rig:
            assert (await rig.ask("/v1/models")).status == 401
            assert (await rig.ask("/v1/models", authorization="Bearer secrets")).status == 401
            call = await rig.ask("/v1/models", authorization="Bearer secret")
            assert [card["id"] for card in call.json["data"]] == ["policy", "policy@1"]
            assert (await rig.ask("/healthz")).json == {"status": "ok"}
            page = {"authorization": "Bearer secret", "content_type": "text/plain"}  # as a form of a web page sends it
            assert (await rig.ask(COMPLETIONS, {"prompt": "a"}, **page)).status == 415

    asyncio.run(run())


# -------------------------------------------------------- clients that leave


def test_a_client_that_leaves_frees_its_pages_within_a_tick():
    async def run():
        async with Rig() as rig:
            (engine,) = rig.engines
            free = engine.free_pages
            call = rig.open(COMPLETIONS, {"prompt": "abc", "max_tokens": 30, "stream": True})
            await rig.turn(3)
            assert call.chunks and engine.free_pages < free
            await call.leave()
            await rig.turn()
            assert engine.free_pages == free and engine.idle and rig.answers.running == 0

    asyncio.run(run())


# ------------------------------------------------------------------- parts


def test_a_stop_string_is_found_however_the_text_is_cut():
    text, stops = "one ENDtwo END three", ("END ", "END t")
    for size in range(1, 8):
        stop, told, stopped = StopText(stops), "", False
        for i in range(0, len(text), size):
            if not stopped:
                new, stopped = stop.feed(text[i : i + size])
                told += new
        assert (told, stopped) == ("one ENDtwo ", True)
    assert StopText(stops, include=True).feed(text) == ("one ENDtwo END ", True)


def test_half_a_character_waits_for_its_rest():
    decode = lambda ids: bytes(ids).decode(errors="replace")
    tokens, said = Detokenizer(decode, list("é".encode())), []
    for byte in "aé€b".encode():
        said.append(tokens.add(byte))
    assert said == ["a", "", "é", "", "", "€", "b"]
    assert tokens.add(0xE2) == "" and tokens.rest() == "\ufffd"


def test_tool_calls_leave_the_text_however_it_is_cut():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"Let me see.\n{call}\n{call} <tool_call>no</tool_call> <tool_call>{{"
    for size in (1, 3, 7, 1000):
        calls, found = ToolCalls(), []
        for i in range(0, len(text), size):
            found += calls.feed(text[i : i + size])
        found.append(calls.rest())
        said = "".join(part for part in found if isinstance(part, str))
        assert [part for part in found if isinstance(part, ToolCall)] == [ToolCall("add", '{"a": 1}')] * 2
        assert said.split() == ["Let", "me", "see.", "<tool_call>no</tool_call>", "<tool_call>{"]


def test_a_session_keeps_its_version_until_it_is_idle():
    versions = Versions(residents=2, idle_s=10.0)
    versions.loaded(1)
    assert versions.choose("s", None, 0.0) == 1
    versions.offer(2)
    assert versions.plan(0.0) == (None, 2)
    versions.loaded(2)
    versions.offer(3)
    assert versions.choose("s", None, 5.0) == 1 and versions.choose(None, None, 5.0) == 2
    versions.begin(2)
    assert versions.plan(6.0) == (None, None), "both are needed"
    versions.end(2)
    assert versions.plan(16.0) == (1, 3)
    assert versions.choose(None, 3, 16.0) is None, "it is on its way"
    for session, asked in (("s", None), (None, 1)):
        with pytest.raises(Refused, match="retired") as refused:
            versions.choose(session, asked, 16.0)
        assert refused.value.status == 410
    with pytest.raises(Refused, match="no version 4 yet"):
        versions.choose(None, 4, 16.0)
