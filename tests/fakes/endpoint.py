"""The endpoint over oracle engines, without sockets and threads: a test ticks the engines, and clients come and go."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
import time

import numpy as np
import uvicorn

from dora_jax.config import Config, RolloutSection
from dora_jax.plan import presets
from dora_jax.serving.answers import ServingFleet
from dora_jax.serving.fleet import LocalFleet
from dora_jax.serving.request import ServedLimits
from dora_jax.serving.server import Options, http_config, new_endpoint
from dora_jax.serving.versions import Versions
from dora_jax.types import SERVED, Sample, SampleId, Span
from tests.fakes.oracle import OracleEngine

END = 0  # the engines' stop token
SECTION = presets.on_cpu(
    RolloutSection(
        slots=64, pages=2048, page_size=4, max_prompt_tokens=64, max_new_tokens=64, decode_steps=2, residents=3
    )
)
LIMITS = ServedLimits(  # those of SECTION
    context=128, vocab=256, sampling=(("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
)


class Speaker(OracleEngine):
    """An engine that says a given text, whatever it is asked, and takes `tick_s` for each token."""

    def __init__(self, text, tick_s):
        section = dataclasses.replace(SECTION, decode_steps=1)
        super().__init__(section, eos_ids=(END,), length=lambda v, g, i, limit: min(len(text) + 1, limit))
        self.text, self.tick_s = text.encode("latin-1"), tick_s
        self.sampled_tokens = 0

    def tick(self):
        time.sleep(self.tick_s)
        result = super().tick()
        self.sampled_tokens += result.tokens
        finished = tuple(
            dataclasses.replace(sample, out_ids=self._reported(sample.out_ids)) for sample in result.finished
        )
        return dataclasses.replace(result, finished=finished)

    def sampled(self, id, start=0, *rest):
        """Its tokens are those of the text, not the oracle's."""
        new = super().sampled(id, 0, *rest)
        return new._replace(out_ids=self._reported(new.out_ids)[start:], logprobs=new.logprobs[start:])

    def _reported(self, out_ids):
        return np.array([*self.text, END][: len(out_ids)], np.int32)


class Letters:
    """A tokenizer of single characters; END is special. Its chat template writes role, text and tools."""

    longest_token, vocab_size = 1, 256

    def encode(self, text):
        return list(text.encode("latin-1"))

    def decode(self, ids, *, keep_special=False):
        return "".join(chr(id) for id in ids if keep_special or id != END)

    template, special = "", None

    def token_bytes(self, id):
        return bytes([id])

    def check_grammar(self, text):
        if "wat" in text:
            raise ValueError("Invalid type: wat")

    def chat(self, messages, tools=None, **variables):
        if not messages[-1]["content"]:
            raise ValueError("the last message is empty")
        shown = "".join(f"{tool['function']['name']} " for tool in tools or ())
        return shown + "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class Store:
    """A WeightStore of numbers; as a Source it offers `offered`."""

    def __init__(self):
        self.offered = None
        self.versions = ()

    def put(self, version, weights):
        self.held = version

    def get(self, version, shardings):
        assert version == self.held
        return version

    def drop(self, version):
        self.held = None

    def newest(self):
        return self.offered

    def read(self, version):
        return version


class Rig:
    """`async with Rig(...) as rig`. length(version, group, index, limit): of a sample; the default is the longest."""

    def __init__(
        self, *, engines=1, versions=(1,), length=None, section=SECTION, pulse_s=100.0, token="", engine=None, **options
    ):
        """engine: in the place of oracle engines."""
        length = length or (lambda version, group, index, limit: limit)
        self.engines = [engine] if engine else [
            OracleEngine(section, eos_ids=(END,), length=length, version_in=lambda weights: weights)
            for _ in range(engines)
        ]  # fmt: skip
        self.versions, self.store = Versions(section.residents, idle_s=options.pop("idle_s", 60.0)), Store()
        config = dataclasses.replace(Config(), rollout=section)
        for version in versions:
            for each in self.engines:
                each.load(version, version)
            self.versions.loaded(version)
        self.fleet = LocalFleet(self.engines, self.store, self.versions, self.store)
        reported = Options(host="", port=0, name="policy", session_idle_s=60.0, keepalive_s=pulse_s, token=token)
        health = self.fleet.health
        endpoint = new_endpoint(self.fleet, config, Letters(), reported, health, **{"first_group": 0} | options)
        self.answers, self.app = endpoint.answers, endpoint.app(self.fleet.lifespan)

    @contextlib.contextmanager
    def live(self):
        """The base URL of a real server on a thread, with the engines on theirs."""
        server = uvicorn.Server(http_config(self.app))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

    async def __aenter__(self):
        # one thread for what the loop hands away, so that `settle` can wait for all of it
        asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        self._served = ServingFleet.lifespan(self.fleet, self.app)  # without the engines' threads
        await self._served.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self._served.__aexit__(*error)
        for worker in self.fleet.workers:
            worker.stop()

    async def settle(self):
        """Whatever waits for the loop, or for its thread, has run."""
        for _ in range(3):
            await asyncio.to_thread(int)
            for _ in range(20):
                await asyncio.sleep(0)

    async def turn(self, n=1):
        """Each engine runs so many posted calls or ticks."""
        await self.settle()
        for _ in range(n):
            for worker in self.fleet.workers:
                if not worker.idle:
                    worker.turn()
            await self.settle()

    async def finish(self):
        await self.settle()
        while not all(worker.idle for worker in self.fleet.workers):
            await self.turn()

    def open(self, path, body=None, **headers):
        """A Call that is on its way."""
        return Call(self.app, path, body, headers)

    async def ask(self, path, body=None, **headers):
        """The Call, ended."""
        call = self.open(path, body, **headers)
        while not call.task.done():
            await self.turn()
        return call


def named(number):
    """The sample of the request that came as this number of its Rig, from 1 on."""
    return SampleId(SERVED - number, 0)


def sample_of(id, out_ids, logprobs):
    """A whole sample of version 1."""
    return Sample(
        id=id,
        prompt_ids=np.array([1], np.int32),
        out_ids=out_ids,
        logprobs=logprobs,
        mask=np.ones(len(out_ids), bool),
        spans=(Span(version=1, start=0, stop=len(out_ids)),),
        finish="stop",
    )


class Call:
    """One request of a client: POST where it has a body."""

    def __init__(self, app, path, body, headers):
        self.status, self.headers, self.body = None, {}, b""
        self._inbox = asyncio.Queue()
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": content})
        known = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in known.items()], "server": ("localhost", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")

    async def leave(self):
        """The client closes its connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """The events of a stream, without comments."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def chunks(self):
        return [json.loads(event) for event in self.events if event != "[DONE]"]
