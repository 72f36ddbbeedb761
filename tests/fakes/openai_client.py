"""A client of the endpoint: `python openai_client.py SUITE BASE_URL` in an environment that has openai and nothing of
ours.

Each suite raises where the endpoint does not do what the library expects of OpenAI's, or of vLLM's extras.
"""

import asyncio
import sys
import urllib.request

import openai

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def client_of(url, **options):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **{"timeout": 60.0, "max_retries": 0} | options)


def suite(url):
    """Every route and parameter that the library names."""
    client = client_of(url)
    cards = client.models.list().data
    assert [card.id for card in cards] == ["policy", "policy@0"] and cards[0].max_model_len == 64
    assert client.models.retrieve("policy@0").weight_version == 0

    done = client.completions.create(model="policy", prompt="abc", max_tokens=9, logprobs=1, seed=1)
    (choice,) = done.choices
    assert len(choice.logprobs.token_logprobs) == done.usage.completion_tokens <= 9, done
    assert done.model == "policy@0" and done.weight_version == 0 and choice.finish_reason in ("stop", "length")
    parts = list(client.completions.create(model="policy", prompt="abc", max_tokens=9, seed=1, stream=True))
    assert "".join(part.choices[0].text for part in parts) == choice.text

    extra = {"return_token_ids": True}
    talk = client.chat.completions.create(
        model="policy@0", messages=HELLO, max_completion_tokens=9, logprobs=True, n=2, seed=1, extra_body=extra
    )
    assert len(talk.choices) == 2 and talk.prompt_token_ids and talk.usage.total_tokens > 0
    for one in talk.choices:
        assert len(one.logprobs.content) == len(one.token_ids) and one.message.role == "assistant"
    stream = client.chat.completions.create(
        model="policy",
        messages=HELLO,
        max_tokens=9,
        n=2,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        tools=[TOOL],
        tool_choice="none",
    )
    text, last = {0: "", 1: ""}, None
    for last in stream:
        for part in last.choices:
            text[part.index] += part.delta.content or ""
    assert [text[i] for i in (0, 1)] == [one.message.content for one in talk.choices]
    assert last.choices == [] and last.usage.total_tokens == talk.usage.total_tokens

    refused(404, client, model="gpt-5")
    refused(400, client, model="policy", temperature=-0.3)
    with_headers = client.completions.with_raw_response.create(model="policy", prompt="abc", max_tokens=2)
    assert with_headers.headers["x-weight-version"] == "0"
    asyncio.run(many(url))


def refused(status, client, **asked):
    try:
        client.completions.create(prompt="abc", **asked)
    except openai.APIStatusError as error:
        assert error.status_code == status and error.body["message"] and error.body["param"], error
    else:
        raise AssertionError(f"{asked} is answered")


async def many(url):
    """64 streams at once, of which every second is left in its middle; nothing of those is left behind."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0, max_retries=0) as client:

        async def one(i):
            stream = await client.completions.create(model="policy", prompt="abc", max_tokens=40, stream=True)
            parts = []
            async for part in stream:
                parts.append(part)
                if i % 2 and len(parts) == 2:
                    await stream.close()
                    return False
            return parts[-1].choices[0].finish_reason in ("stop", "length")

        ended = await asyncio.gather(*(one(i) for i in range(64)))
        assert all(ended[::2])
    for _ in range(100):
        if samples(url) == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{samples(url)} samples are left behind")


def samples(url):
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return float(next(line for line in text.splitlines() if line.startswith("dora_samples ")).split()[1])


def patient(url):
    """Answers that take longer than the client's time-out, and a tool call in each."""
    client = client_of(url, timeout=0.6)
    asked = {"model": "policy", "messages": HELLO, "tools": [TOOL]}
    talk = client.chat.completions.create(**asked)
    (choice,) = talk.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "add" and choice.message.content == "hm "
    calls, finish = [], None
    for part in client.chat.completions.create(**asked, stream=True):
        calls += part.choices[0].delta.tool_calls or []
        finish = part.choices[0].finish_reason or finish
    assert finish == "tool_calls" and calls[0].function.arguments == '{"a": 1}'


def hasty(url):
    """A client that gives up before it has received anything, and comes back."""
    client = client_of(url, timeout=0.6, max_retries=8, default_headers={"X-Session-ID": "hasty"})
    talk = client.completions.create(model="policy", prompt="abc", max_tokens=12)
    assert talk.usage.completion_tokens == 12, talk


if __name__ == "__main__":
    {"suite": suite, "patient": patient, "hasty": hasty}[sys.argv[1]](sys.argv[2])
    print(f"openai {openai.__version__}: {sys.argv[1]} is fine")
