"""The endpoint of a run: what clients ask is sampled by the run's own rollout fleet, while it trains.

    HTTP -> Endpoint -> Answers -> LiveFleet -> LiveRequests (runtime) -> the orchestrator

Consumes a configuration with `serving.port`; serves from a thread with a loop of its own until the run ends. Laws: the
socket is taken before anything of the run is made; no request stops the run, and no client outlives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import uvicorn

from dora_jax.config import Config, RunError
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.live_requests import LiveRequests
from dora_jax.runtime.live_sessions import LiveSessions
from dora_jax.runtime.observe.monitoring import RunFacts
from dora_jax.serving.answers import ServingFleet
from dora_jax.serving.request import Refused
from dora_jax.serving.server import TOKEN_VARIABLE, Options, http_config, listening_socket, new_endpoint, where
from dora_jax.serving.versions import Versions
from dora_jax.types import Prompt, Sample, SampleId, Version

START_S = 60
GRACE_S = 2  # open answers get so long when the run has ended
IDLE_CONNECTION_S = 86_400  # a client's pool keeps its connections: one that closes under a request is an error there
ENDED = "the run has ended"


@contextlib.contextmanager
def opened(config: Config) -> Iterator[LiveEndpoint | None]:
    """The endpoint that the configuration asks for, on its port. ConfigError: it cannot listen there."""
    if not config.serving.port:
        yield None
        return
    section = config.serving
    options = Options(
        host=section.host,
        port=section.port,
        name=section.name,
        session_idle_s=0.0,
        token=os.environ.get(TOKEN_VARIABLE, ""),
    )
    with listening_socket(options, "serving.") as listening:
        yield LiveEndpoint(options, listening)


class LiveEndpoint:
    def __init__(self, options: Options, listening: socket.socket):
        self._options, self._listening = options, listening
        self.facts = RunFacts()

    @contextlib.contextmanager
    def serving(
        self, config: Config, tokenizer: Tokenizer, requests: LiveRequests, sessions: LiveSessions | None = None
    ) -> Iterator[str]:
        """Answers requests while the context lasts; yields what to tell the user."""
        options, facts = self._options, self.facts
        fleet = LiveFleet(requests, Versions(residents=0, idle_s=0.0, name=options.name))
        requests.desk = fleet
        endpoint = new_endpoint(fleet, config, tokenizer, options, facts.health, facts.gauges)
        endpoint.sessions = sessions
        # on a thread: signals are the run's
        server = uvicorn.Server(http_config(endpoint.app(fleet.lifespan), grace_s=GRACE_S, idle_s=IDLE_CONNECTION_S))
        thread = threading.Thread(target=server.run, args=([self._listening],), name="endpoint", daemon=True)
        thread.start()
        if not fleet.attached.wait(START_S):
            raise RunError(f"the endpoint of the run has not started within {START_S} s")
        try:
            yield where(endpoint, self._listening, options.name)
        finally:
            fleet.post(endpoint.answers.fail, ENDED, 503)
            if sessions:
                sessions.over()
            server.should_exit = True
            thread.join()


def _on_loop(call: Callable[..., None]) -> Callable[..., None]:
    """A method of `LiveFleet` that the run's thread calls, and the loop's runs."""

    @functools.wraps(call)
    def posted(self: LiveFleet, *args: Any) -> None:
        self.post(call, self, *args)

    return posted


class LiveFleet(ServingFleet):
    """`ServingFleet` for Answers, on its loop; `Desk` for the run, on the run's thread.

    A sample whose client is gone for the moment leaves its engine and begins again when the client is back: by the same
    version and with the same noise, so with the same tokens, which is checked."""

    def __init__(self, requests: LiveRequests, versions: Versions):
        super().__init__(versions)
        self._requests = requests
        self._samples: dict[SampleId, _Sample] = {}

    # ------------------------------------------------------------ as a ServingFleet

    def start(self, id: SampleId, prompt: Prompt, version: Version, session: str | None) -> None:
        self._samples[id] = _Sample(prompt, version)
        self._requests.ask(prompt, version)

    def cancel(self, id: SampleId) -> None:
        sample = self._samples.get(id)
        if sample is None or sample.state == PARKED:
            self._samples.pop(id, None)
            self.answers.cancelled(id)
            return
        sample.state = LEAVING
        self._requests.give_up(sample.prompt.group_id)

    def park(self, id: SampleId) -> None:
        if sample := self._samples.get(id):
            sample.state = PARKING
            self._requests.give_up(sample.prompt.group_id)

    def resume(self, in_flight: InFlightSample) -> None:
        sample = self._samples[in_flight.id]
        sample.state = RUNNING
        self._requests.ask(sample.prompt, sample.version)

    # -------------------------------------------------- what the run reports

    @_on_loop
    def grew(self, id: SampleId, start: int, out_ids: np.ndarray, logprobs: np.ndarray) -> None:
        if (sample := self._samples.get(id)) and self._agrees(id, sample, start, out_ids):
            self.answers.grew(id, start, out_ids, logprobs)

    @_on_loop
    def ranked(self, id: SampleId, start: int, rows: np.ndarray) -> None:
        self.answers.ranked(id, start, rows)

    @_on_loop
    def ended(self, sampled: Sample) -> None:
        id = sampled.id
        sample = self._samples.get(id)
        if sample is None:
            return
        if sample.state == LEAVING:
            del self._samples[id]
            self.answers.cancelled(id)
        elif self._agrees(id, sample, 0, sampled.out_ids):
            del self._samples[id]
            self.answers.ended(sampled)

    @_on_loop
    def gone(self, id: SampleId, reason: str) -> None:
        sample = self._samples.get(id)
        if sample is None:
            return
        if sample.state == PARKING:
            sample.state = PARKED
            none = np.zeros(0, np.int32)
            in_flight = InFlightSample(  # of a sample whose client is gone for the moment: nothing but its name
                id=id,
                version=sample.version,
                prompt_ids=sample.prompt.token_ids,
                out_ids=none,
                logprobs=none.astype(np.float32),
                max_new_tokens=sample.prompt.max_new_tokens,
            )
            self.answers.parked(in_flight)
            return
        del self._samples[id]
        if sample.state == LEAVING:
            self.answers.cancelled(id)
        elif sample.version not in self.versions.resident:
            self.answers.refused(id, Refused(410, f"model: {reason}", param="model", code="version_retired"))
        else:
            self.answers.refused(id, Refused(503, f"the fleet could not go on with it: {reason}"))

    @_on_loop
    def loaded(self, version: Version) -> None:
        self.versions.loaded(version)
        self.answers.changed()

    @_on_loop
    def retired(self, version: Version) -> None:
        self.versions.resident.discard(version)

    def _agrees(self, id: SampleId, sample: _Sample, start: int, out_ids: np.ndarray) -> bool:
        """Whether tokens that come again are those that were sent; the others are remembered."""
        again = out_ids[: max(0, len(sample.sent) - start)].tolist()
        if sample.sent[start : start + len(again)] != again:
            del self._samples[id]
            self.answers.refused(id, Refused(500, "the sample began again, and with other tokens"))
            return False
        sample.sent += out_ids[len(again) :].tolist()
        return True


RUNNING, PARKING, PARKED, LEAVING = "running", "parking", "parked", "leaving"


@dataclasses.dataclass
class _Sample:
    prompt: Prompt  # of the request on the fleet
    version: Version
    sent: list[int] = dataclasses.field(default_factory=list)  # tokens
    state: str = RUNNING
