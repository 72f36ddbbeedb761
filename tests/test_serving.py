"""The endpoint over oracle engines: what clients read on the wire, and what becomes of answers whose clients leave."""

import asyncio
import dataclasses

import numpy as np
import pytest

from dora_jax.models import grammar
from dora_jax.runtime.common.worker import Crashed
from dora_jax.types import Sampling
from tests.fakes.endpoint import END, SECTION, Letters, Rig, named, sample_of
from tests.fakes.oracle import OracleEngine

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
FOUR = dataclasses.replace(SECTION, residents=4)
HELLO = [{"role": "user", "content": "hello"}]


def test_a_completion_says_its_text_tokens_and_version():
    async def run():
        async with Rig(length=lambda *_: 6) as rig:
            body = {"model": "policy", "prompt": "abc", "max_tokens": 9, "logprobs": 1, "return_token_ids": True}
            call = await rig.ask(COMPLETIONS, body)
            sampled = [*rig.engines[0].expected(1, *named(1), 5).tolist(), END]
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
                texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in mine]
                assert "".join(texts) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
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
            assert choice["token_ids"] == rig.engines[0].expected(1, *named(1), 4).tolist()
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{id}" for id in choice["token_ids"]]
            assert all(-2.1 < entry["logprob"] < 0 for entry in content) and call.json["request_id"]

    asyncio.run(run())


def test_each_token_comes_with_its_most_likely_alternatives():
    async def run():
        async with Rig(length=lambda *_: 6) as rig:
            text = await rig.ask(COMPLETIONS, {"prompt": "abc", "logprobs": 3})
            shown = text.json["choices"][0]["logprobs"]
            for token, logprob, top in zip(
                shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
            ):
                assert len(top) == 3 and top[token] == logprob == max(top.values())
            body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
            whole = await rig.ask(CHAT, body)
            entries = whole.json["choices"][0]["logprobs"]["content"]
            assert len(entries) == 6
            for entry in entries:
                first, second = entry["top_logprobs"]
                assert first == {name: entry[name] for name in ("token", "logprob", "bytes")}
                assert second["logprob"] == first["logprob"] - 1 and set(second) == set(first)
            stream = await rig.ask(CHAT, body | {"stream": True})
            pieces = [choice["logprobs"] for chunk in stream.chunks for choice in chunk["choices"]]
            assert [len(each["top_logprobs"]) for piece in pieces if piece for each in piece["content"]] == [2] * 6

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_echoed_with_its_own_log_probs(stream):
    async def run():
        async with Rig(length=lambda *_: 6) as rig:
            body = {"prompt": ["abcde", "xy"], "echo": True, "logprobs": 1, "max_tokens": 3, "stream": stream}
            call = await rig.ask(COMPLETIONS, body)
            for index, prompt in enumerate(body["prompt"]):
                pieces = [choice for each in (call.chunks if stream else [call.json]) for choice in each["choices"]]
                pieces = [choice for choice in pieces if choice["index"] == index]
                text = "".join(choice["text"] for choice in pieces)
                shown = {
                    name: [x for choice in pieces for x in choice["logprobs"][name]] for name in pieces[0]["logprobs"]
                }
                assert text == "".join(shown["tokens"]) and text.startswith(prompt) and len(text) == len(prompt) + 3
                assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
                assert all(-2.1 < x < 0 for x in shown["token_logprobs"][1:]), shown
                assert shown["text_offset"] == list(range(len(text)))
                assert [max(top, key=top.get) for top in shown["top_logprobs"][1:]] == shown["tokens"][1:]
            if not stream:
                assert call.json["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}

    asyncio.run(run())


def test_a_prompt_is_scored_without_an_answer():
    async def run():
        async with Rig() as rig:
            call = await rig.ask(COMPLETIONS, {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0})
            (choice,) = call.json["choices"]
            assert choice["text"] == "abc" and choice["finish_reason"] == "length"
            assert len(choice["logprobs"]["token_logprobs"]) == 3
            assert call.json["usage"]["completion_tokens"] == 0
            body = {"messages": HELLO, "prompt_logprobs": 2, "max_tokens": 1}
            call = await rig.ask(CHAT, body)
            first, *others = call.json["prompt_logprobs"]
            assert first is None and len(others) == len("user: hello\n") - 1
            assert others[0][str(ord("s"))]["rank"] == 1 and len(others[0]) == 2
            assert len(call.json["choices"][0]["message"]["content"]) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "path, body, status, param",
    [
        (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": "0.5"}, 400, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": 0.5}, 400, "top_k"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 3}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"256": 3}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(301)}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, 400, "min_tokens"),
        (COMPLETIONS, {"prompt": ["a"] * 128, "n": 128}, 400, "n"),
        (COMPLETIONS, {"prompt": "a", "wings": 2}, 400, "wings"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a" * 128}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [300]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n"),
        (COMPLETIONS, {"prompt": "a", "model": "gpt-5"}, 404, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "policy@9"}, 404, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "policy@" + "9" * 5000}, 404, "model"),
        (COMPLETIONS, b"{", 400, None),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, None),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 7}]}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "tool_choice": "often"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}},
            400,
            "response_format",
        ),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        (CHAT, {"messages": HELLO, "echo": True}, 400, "echo"),
        (GENERATE, {"token_ids": "abc"}, 400, "token_ids"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}, 400, "prompt_logprobs"),
        ("/v1/embeddings", {"input": "a"}, 404, None),
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


class Recorder(OracleEngine):
    """Remembers how its samples are asked to be drawn."""

    def __init__(self):
        super().__init__(SECTION, eos_ids=(END,), version_in=lambda weights: weights)
        self.asked = []

    def submit(self, *sample, sampling=None):
        self.asked.append((sample[3], sample[-1] if len(sample) > 5 else sampling))
        super().submit(*sample[:5])


@pytest.mark.parametrize(
    "values, sampling",
    [
        ({"temperature": 1.0, "top_p": 1, "top_k": -1, "presence_penalty": 0, "logit_bias": {}, "user": "u"}, None),
        ({"temperature": 0}, Sampling(temperature=0.0)),
        ({"temperature": 0.1, "top_p": 0.95, "min_p": 0.02}, Sampling(temperature=0.1, top_p=0.95, min_p=0.02)),
        ({"top_k": 7, "min_tokens": 3}, Sampling(top_k=7, min_tokens=3)),
        (
            {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
            Sampling(frequency_penalty=0.5, repetition_penalty=1.1),
        ),
        ({"logit_bias": {"9": -100, "7": 1.5}}, Sampling(biased_ids=(7, 9), biases=(1.5, -100.0))),
        ({"reasoning_effort": "low", "verbosity": "high"}, None),
        ({"logprobs": 0}, None),
        ({"logprobs": 20}, Sampling(top_logprobs=20)),
        ({"echo": True, "temperature": 0}, Sampling(temperature=0.0)),
    ],
)
def test_an_engine_draws_as_the_request_asks(values, sampling):
    async def run():
        async with Rig(engine=(engine := Recorder())) as rig:
            call = await rig.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 4000} | values)
            assert call.status == 200, call.body
            assert engine.asked == [(125, sampling)], "max_tokens is cut to the room that the prompt leaves"

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
            await rig.finish()
            assert rig.fleet.free_pages == {0: free}

    asyncio.run(run())


def test_a_session_that_comes_back_goes_on_where_it_was():
    """Its sample leaves the engine with its KV, which the oracle checks token by token, and none is sampled twice."""

    async def run():
        async with Rig() as rig:
            (engine,) = rig.engines
            free, body = engine.free_pages, {"prompt": "abc", "max_tokens": 30, "return_token_ids": True}
            call = rig.open(COMPLETIONS, body, x_session_id="s")
            await rig.turn(4)
            await call.leave()
            await rig.turn()
            assert engine.free_pages == free and engine.idle and rig.answers.running == 1
            before = rig.answers.tokens
            assert 0 < before < 30
            again = await rig.ask(COMPLETIONS, body, x_session_id="s")
            assert again.json["choices"][0]["token_ids"] == engine.expected(1, *named(1), 30).tolist()
            assert rig.answers.tokens == 30 and rig.answers.joined == 1
            other = await rig.ask(COMPLETIONS, body, x_session_id="s")
            assert other.json["choices"] != again.json["choices"], "sent in full: the next one is another request"

    asyncio.run(run())


@pytest.mark.parametrize("header", ["x_session_id", "idempotency_key"])
def test_a_retry_joins_the_answer_that_runs(header):
    async def run():
        async with Rig() as rig:
            body, key = {"prompt": "abc", "max_tokens": 30, "return_token_ids": True}, {header: "1"}
            first = rig.open(COMPLETIONS, body, **key)
            await rig.turn(4)
            second, third = rig.open(COMPLETIONS, body, **key), rig.open(COMPLETIONS, body)
            await first.leave()
            await rig.finish()
            await asyncio.gather(second.task, third.task)
            texts = [call.json["choices"][0]["token_ids"] for call in (second, third)]
            assert texts == [rig.engines[0].expected(1, *named(group), 30).tolist() for group in (1, 2)]
            assert rig.answers.tokens == 60 and rig.answers.running == 0
            if header == "idempotency_key":
                late = await rig.ask(COMPLETIONS, body, **key)
                assert late.json["id"] == second.json["id"] and rig.answers.tokens == 60

    asyncio.run(run())


def test_a_retry_that_never_comes_is_forgotten():
    async def run():
        async with Rig(linger_s=0.01) as rig:
            call = rig.open(COMPLETIONS, {"prompt": "abc", "max_tokens": 30}, x_session_id="s")
            await rig.turn(4)
            await call.leave()
            await rig.turn()
            await asyncio.sleep(0.02)
            await rig.finish()
            assert rig.answers.running == 0 and rig.answers.cancelled_samples == 1

    asyncio.run(run())


def test_parked_answers_take_no_more_host_memory_than_they_may():
    async def run():
        async with Rig(parked_bytes=200) as rig:  # 8 for each token of the oracle's KV, twice
            for session in "abc":
                call = rig.open(COMPLETIONS, {"prompt": "abc", "max_tokens": 30}, x_session_id=session)
                await rig.turn(5)
                await call.leave()
                await rig.finish()
            assert rig.answers.running == 1 and rig.answers.cancelled_samples == 2

    asyncio.run(run())


def test_a_client_that_waits_hears_something_before_any_time_out():
    async def run():
        async with Rig(pulse_s=0.01) as rig:
            body = {"prompt": "abc", "max_tokens": 4}
            whole, stream = rig.open(COMPLETIONS, body), rig.open(COMPLETIONS, body | {"stream": True})
            while len(whole.body) < 2 or stream.body.count(b": the answer") < 2:  # the engine is in one long tick
                await asyncio.sleep(0.01)
            assert whole.status == stream.status == 200
            assert whole.body.strip() == b"" and not stream.chunks
            await rig.finish()
            await asyncio.gather(whole.task, stream.task)
            assert len(whole.json["choices"][0]["text"]) == 4 and stream.events[-1] == "[DONE]"

    asyncio.run(run())


def test_an_engine_that_dies_is_an_error_and_no_answer():
    async def run():
        async with Rig() as rig:
            calls = [rig.open(COMPLETIONS, {"prompt": "abc", "stream": stream}) for stream in (False, True)]
            await rig.turn(3)
            assert (await rig.ask("/healthz")).status == 200
            rig.fleet.put(Crashed(role="rollout 0", error=RuntimeError("no room")))
            await rig.settle()
            calls.append(rig.open(COMPLETIONS, {"prompt": "abc"}))
            await rig.settle()
            assert rig.fleet.died.is_set() and all(call.task.done() for call in calls)
            for call in (calls[0], calls[2]):
                assert call.status == 500 and call.error["message"] == "the engines cannot go on: no room"
            assert calls[1].task.exception() and "[DONE]" not in calls[1].events
            assert (await rig.ask("/healthz")).status == 503

    asyncio.run(run())


def test_64_streams_are_each_of_the_version_that_they_name_while_versions_come_and_go():
    """Every token is compared with what the oracle samples at the version that the answer names, and at no other."""

    async def run():
        async with Rig(engines=2, length=lambda v, g, i, limit: 5 + (named(0).group_id - g) % 20, section=FOUR) as rig:
            body = {"prompt": "abc", "max_tokens": 30, "stream": True, "return_token_ids": True}
            calls = []
            for i in range(64):
                if i in (16, 32, 48):
                    rig.store.offered = 1 + i // 16
                    rig.versions.offer(rig.store.offered)
                    while max(rig.versions.resident) < rig.store.offered:
                        rig.fleet.replan()
                        await asyncio.sleep(0.001)  # the weights are read on another thread
                        await rig.turn()
                calls.append(rig.open(COMPLETIONS, body, x_session_id=str(i - 40 if 40 <= i < 48 else i)))
                await rig.turn()
            await rig.finish()
            await asyncio.gather(*(call.task for call in calls))
            versions = [call.chunks[0]["weight_version"] for call in calls]
            assert sorted(set(versions)) == [1, 2, 3, 4] and versions[40:] == [*versions[:8], *[4] * 16]
            for group, (call, version) in enumerate(zip(calls, versions, strict=True), 1):
                assert {chunk["model"] for chunk in call.chunks} == {f"policy@{version}"}
                ids = [id for chunk in call.chunks for id in chunk["choices"][0]["token_ids"]]
                n = 5 + group % 20
                assert ids == [*rig.engines[0].expected(version, *named(group), n - 1).tolist(), END]
            rig.versions.idle_s = 0.0
            for _ in range(5):
                rig.fleet.replan()
                await rig.turn()
            assert rig.versions.resident == {4} and rig.engines[0].versions == (4,)

    asyncio.run(run())


def test_a_source_that_fails_for_a_while_ends_nothing():
    async def run():
        async with Rig() as rig:
            looks = []

            def newest():
                looks.append(1)
                if len(looks) == 1:
                    raise OSError("the storage is away")
                return 2

            rig.store.newest = newest
            following = asyncio.ensure_future(rig.fleet.follow(period_s=0.001))
            while 2 not in rig.versions.resident:
                await asyncio.sleep(0.001)
                await rig.turn()
            following.cancel()
            call = await rig.ask(COMPLETIONS, {"prompt": "abc", "max_tokens": 4})
            assert call.json["model"] == "policy@2"

    asyncio.run(run())


def test_a_retired_version_is_gone_and_says_what_is_there():
    async def run():
        async with Rig(versions=(1, 2), idle_s=0.0) as rig:
            body = {"prompt": "abc", "max_tokens": 4}
            old = await rig.ask(COMPLETIONS, body | {"model": "policy@1"}, x_session_id="s")
            assert old.json["model"] == "policy@1"
            rig.fleet.replan()
            for call in (
                await rig.ask(COMPLETIONS, body | {"model": "policy@1"}),
                await rig.ask(COMPLETIONS, body, x_session_id="s"),
            ):
                assert call.status == 410 and call.error["code"] == "version_retired"
                assert "policy@2" in call.error["message"]

    asyncio.run(run())


def test_the_user_of_a_body_pins_neither_a_version_nor_an_answer():
    async def run():
        async with Rig() as rig:
            body, models, ids = {"prompt": "abc", "max_tokens": 4, "user": "u"}, [], set()
            for version in (1, 2):
                if version > 1:
                    rig.engines[0].load(version, version)
                    rig.versions.loaded(version)
                call = await rig.ask(COMPLETIONS, body)
                models.append(call.json["model"])
                ids.add(call.json["id"])
            assert models == ["policy@1", "policy@2"] and len(ids) == 2 and rig.answers.joined == 0

    asyncio.run(run())


def test_a_stop_string_ends_the_sample_in_its_engine_too():
    async def run():
        async with Rig() as rig:
            (engine,) = rig.engines
            free, expected = engine.free_pages, engine.expected(1, *named(1), 30).tolist()
            text = Letters().decode(expected)
            body = {"prompt": "abc", "max_tokens": 30, "stop": [text[6:9]], "return_token_ids": True}
            call = await rig.ask(COMPLETIONS, body)
            (choice,) = call.json["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text[:6], "stop")
            assert choice["token_ids"] == expected[:9]
            await rig.turn()
            assert engine.free_pages == free and engine.idle
            call = await rig.ask(GENERATE, {"token_ids": [1], "sampling_params": {"stop_token_ids": list(range(256))}})
            assert len(call.json["choices"][0]["token_ids"]) == 1

    asyncio.run(run())


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


NAMED = {"type": "function", "function": {"name": "add"}}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "required"}, grammar.of(None, [TOOLS[0]["function"]])),
        ({"tool_choice": NAMED}, grammar.of(None, [TOOLS[0]["function"]])),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, grammar.of(OBJECT, [TOOLS[0]["function"]])),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, grammar.of(OBJECT, [])),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}, "tools": []},
            grammar.of(OBJECT, []),
        ),
    ],
)
def test_an_answer_is_held_to_what_the_request_says(values, expected):
    async def run():
        async with Rig(engine=(engine := Recorder())) as rig:
            call = await rig.ask(CHAT, {"messages": HELLO, "max_tokens": 5, "tools": TOOLS} | values)
            assert call.status == 200, call.body
            assert engine.asked == [(5, None if expected is None else Sampling(grammar=expected))]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_reported_as_one(stream):
    """The text is put into the engine's mouth."""

    async def run():
        async with Rig() as rig:
            earlier = {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add"}}],
            }
            messages = [*HELLO, earlier, {"role": "tool", "content": "3", "tool_call_id": "a"}]
            call = rig.open(CHAT, {"messages": messages, "tools": TOOLS, "stream": stream})
            await rig.settle()
            texts = b'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
            ids, logprobs = np.frombuffer(texts, np.uint8).astype(np.int32), np.full(len(texts), -0.5, np.float32)
            for start in range(0, len(ids), 7):
                rig.answers.grew(named(1), start, ids[start : start + 7], logprobs[start : start + 7])
                await rig.settle()
            whole = np.append(ids, np.int32(END)), np.append(logprobs, np.float32(-0.5))
            rig.answers.ended(sample_of(named(1), *whole))
            await call.task
            if stream:
                deltas = [chunk["choices"][0] for chunk in call.chunks]
                text = "".join(delta["delta"].get("content") or "" for delta in deltas)
                calls = [c for delta in deltas for c in delta["delta"].get("tool_calls", [])]
                assert calls[0].pop("index") == 0
                finish = deltas[-1]["finish_reason"]
            else:
                message, finish = call.json["choices"][0]["message"], call.json["choices"][0]["finish_reason"]
                text, calls = message["content"], message["tool_calls"]
            assert text == "so " and finish == "tool_calls"
            (made,) = calls
            assert made["type"] == "function" and made["id"].startswith("call_")
            assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}

    asyncio.run(run())
