"""The endpoint of a run over arithmetic engines, with real threads and sockets; the trainer makes steps when it
is asked."""

import contextlib
import dataclasses
import http.client
import json
import threading
import time
import urllib.request

from dora_jax.config import Config
from dora_jax.runtime.live_requests import LiveRequests
from dora_jax.runtime.live_sessions import SessionPrompts
from dora_jax.serving.live import LiveEndpoint
from dora_jax.serving.server import Options, listening_socket
from tests.fakes.coordinator_world import SECTION, Trainer, make, play
from tests.fakes.endpoint import END, Letters

PATIENCE_S = 60.0  # of a test, for what comes at once


class Tokenizer(Letters):
    """Its chat template writes what the policy says as the policy says it."""

    eos_ids = (END,)

    def encode_text(self, text):
        return self.encode(text)

    def chat(self, messages, tools=(), place="after", **variables):
        """Tools stand in front of the first text, or of all."""
        shown = "".join(f"{tool['function']['name']} ~ " for tool in tools)
        whole = "".join(
            message["content"] + chr(END)
            if message["role"] == "assistant"
            else f"{message['role']}: {message['content']}\n"
            for message in messages
        )
        return shown + whole if place == "before" else whole.replace(": ", f": {shown}", 1)


class Run:
    """`with Run(...) as run`: it goes on until `steps` are released and made."""

    def __init__(self, length, sessions=None, **options):
        """sessions: LiveSessions that it trains on."""
        self._sessions = sessions
        if sessions:
            options |= {"environments": sessions, "users": SessionPrompts(Tokenizer(), SECTION.max_new_tokens)}
        self._steps = threading.Semaphore(0)

        class Sampled(Trainer):
            def step(trainer, batch):
                assert self._steps.acquire(timeout=PATIENCE_S)
                return super().step(batch)

        self.brain, self._world, self._ups, _ = make(
            length=length, trainer=Sampled, requests=self._requests, **{"instances": 1, "residents": 3} | options
        )

    def _requests(self, *parts):
        self.requests = LiveRequests(*parts)
        return self.requests

    def __enter__(self):
        self._open = contextlib.ExitStack()
        options = Options(host="127.0.0.1", port=0, name="policy", session_idle_s=0.0)
        listening = self._open.enter_context(listening_socket(options))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = dataclasses.replace(Config(), rollout=SECTION)
        self._endpoint = LiveEndpoint(options, listening)
        self.facts = self._endpoint.facts
        self._thread = threading.Thread(target=self._play, args=(config,))
        self._thread.start()
        self.until(lambda: self.get("/v1/models")["data"])
        return self

    def _play(self, config):
        if self._sessions:
            self._world.listen(self._sessions.record)
        with self._endpoint.serving(config, Tokenizer(), self.requests, self._sessions):
            self.halt, self.records = play(self.brain, self._world, self._ups, [self.requests.observe])

    def __exit__(self, *error):
        self.release(self.brain.state.config.total_steps)
        self._thread.join()
        self._open.close()

    def release(self, steps):
        """So many more steps may be made."""
        for _ in range(steps):
            self._steps.release()

    def publish(self, steps):
        """So many more steps are made; waits for those that are not the last."""
        before = self.brain.state.ledger.base
        self.release(steps)
        if before + steps < self.brain.state.config.total_steps:
            self.until(lambda: f"policy@{before + steps}" in [card["id"] for card in self.get("/v1/models")["data"]])

    def until(self, true):
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    def get(self, path):
        return json.loads(self.text(path))

    def text(self, path):
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def ask(self, **body):
        """(status, answer) of /inference/v1/generate, or of a chat where there are `messages`; `session` goes into its
        header, or is its headers."""
        with contextlib.closing(self.connect(**body)) as connection:
            answer = connection.getresponse()
            reported = json.loads(answer.read())
            return answer.status, reported.get("error", reported)

    def connect(self, **body):
        """The connection of a client that has asked."""
        headers = {"content-type": "application/json"}
        if session := body.pop("session", None):
            headers |= session if isinstance(session, dict) else {"x-session-id": session}
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=PATIENCE_S)
        if "messages" in body:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        else:
            asked = {"token_ids": [1, 2, 3], **body}
            connection.request("POST", "/inference/v1/generate", json.dumps(asked), headers)
        return connection
