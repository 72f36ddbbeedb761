"""Assembles endpoints. `serve` is that of one process: engines as `train` makes them, versions of a folder or of a run.
`new_endpoint` has what it shares with the endpoint of a run (live.py).

Consumes a configuration; serves until a signal. Law: the socket is taken before the model is read, so that a port that
is not free costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import uvicorn
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from dora_jax.base.exits import SIGNALS
from dora_jax.base.prometheus import Counters
from dora_jax.config import Config, ConfigError, RunError, field_context
from dora_jax.models import hf, lora, peft, sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import OFF
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import devices, presets
from dora_jax.publish import DeviceWeights
from dora_jax.rollout.engine import Engine
from dora_jax.runtime import job
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.common.seams import Tree
from dora_jax.runtime.journal.workdir_mirror import fetch
from dora_jax.runtime.local_backend import side_by_side
from dora_jax.serving.answers import Answers, ServingFleet
from dora_jax.serving.app import Endpoint, Health, is_loopback
from dora_jax.serving.fleet import LocalFleet
from dora_jax.serving.parser import AnswerSyntax
from dora_jax.serving.request import SAMPLING, ServedLimits
from dora_jax.serving.versions import Versions
from dora_jax.trainer import checkpoint
from dora_jax.types import Version

GRACE_S = 5  # open answers get so long after a signal
BUCKET_S = 30.0  # between two looks into a bucket, each of which reads every checkpoint that has come before
HEADER_S = 30.0  # from the first byte of a request, or the start of a connection, to the end of its headers
MAX_CONNECTIONS = 4096  # beyond them a request is answered 503
TOKEN_VARIABLE = "DORA_SERVE_TOKEN"  # in the environment, which other users of the machine do not see


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says of the endpoint itself."""

    host: str
    port: int
    name: str  # what requests call the policy
    session_idle_s: float
    keepalive_s: float = 10.0
    step: int | None = None  # of the run: this checkpoint alone; None: the newest, and those that follow
    token: str = ""


def serve(config: Config, options: Options, workdir: Path | None) -> int:
    """Serves the checkpoints of the run in `workdir`; None: the folder model.path. Returns the exit code."""
    with listening_socket(options) as listening:
        devices.setup_platform(config)
        # It does nothing but serve. Where a run's next versions follow, there is room for one beside what is served.
        residents = max(2 if workdir is not None and options.step is None else 1, config.rollout.residents)
        config = dataclasses.replace(
            config,
            slice="",
            cluster=dataclasses.replace(config.cluster, launcher=""),
            rollout=dataclasses.replace(config.rollout, residents=residents),
        )
        config = presets.filled(config)
        with field_context("model"):
            model = hf.check(config.model.path)
            tokenizer = Tokenizer.load(config.model.path)
        whole = dataclasses.replace(config, lora=OFF)  # an adapter is added up into what is read
        # An engine on every rollout.tensor devices, and the mesh of the first.
        found, size = jax.devices(), whole.rollout.tensor
        if size > len(found):
            raise ConfigError(f"rollout.tensor: an engine of {size} devices, and there are {len(found)}")
        meshes = [sharding.make_mesh(found[i : i + size], 1, 1, size) for i in range(0, len(found) - size + 1, size)]
        engines, mesh = [build.new_engine(whole, tokenizer, model, mesh) for mesh in meshes], meshes[0]
        source = None if workdir is None else RunSource(config, model, mesh, workdir, options.step)
        store = DeviceWeights(config.model.dtype)
        first = 0 if source is None else source.first
        store.put(first, read_folder(config, mesh) if source is None else source.read(first))
        side_by_side([functools.partial(_begin, engine, first, store) for engine in engines])
        store.drop(first)
        versions = Versions(config.rollout.residents, options.session_idle_s, options.name)
        versions.loaded(first)
        fleet = LocalFleet(engines, store, versions, source)
        endpoint = new_endpoint(fleet, config, tokenizer, options, fleet.health)
        asyncio.run(_run(fleet, endpoint, listening))
    if fleet.crashed is not None:
        raise RunError(f"the engines cannot go on: {type(fleet.crashed).__name__}: {fleet.crashed}") from fleet.crashed
    return 0


def new_endpoint(
    fleet: ServingFleet,
    config: Config,
    tokenizer: Tokenizer,
    options: Options,
    health: Health,
    *gauges: Collector,
    **answering: Any,
) -> Endpoint:
    """The routes over a fleet. answering: see Answers."""
    section = config.rollout
    limits = ServedLimits(
        context=section.max_prompt_tokens + section.max_new_tokens,
        vocab=tokenizer.vocab_size,
        sampling=tuple((name, getattr(section, name)) for name in SAMPLING),
    )
    answers = fleet.answers = Answers(fleet, tokenizer.decode, syntax=AnswerSyntax.of(tokenizer), **answering)

    def numbers() -> Mapping[str, tuple[str, float]]:
        resident, free = fleet.versions.resident, fleet.free_pages.values()
        return {
            "samples": ("samples of requests that run, wait or are parked", answers.running),
            "tokens": ("tokens sampled for requests since the start", answers.tokens),
            "joined": ("requests that joined an answer that was there", answers.joined),
            "cancelled_samples": ("samples whose client went away", answers.cancelled_samples),
            "resident_versions": ("versions that engines hold", len(resident)),
            "newest_version": ("of the resident ones", max(resident, default=-1)),
        } | ({"free_pages": ("KV pages that no sample holds", sum(free))} if free else {})

    return Endpoint(answers, tokenizer, limits, Counters(numbers, *gauges), options.token, options.keepalive_s, health)


def where(endpoint: Endpoint, listening: socket.socket, name: str) -> str:
    """A sentence for the console."""
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{name} is served at http://{host}:{port}/v1, {endpoint.limits.context} tokens a request"


def read_folder(config: Config, mesh: jax.sharding.Mesh) -> Tree:
    """The weights of a Hugging Face folder, with the adapter of lora.path added up into them."""
    model, params = hf.load(config.model.path, mesh)
    if not config.lora.path:
        return params
    with field_context("lora.path"):
        adapter = peft.load(config.lora.path, model, config.lora, config.seed)
    return jax.jit(functools.partial(lora.merge, gain=config.lora.gain))(params, adapter)


class RunSource:
    """The checkpoints of a run, which may go on meanwhile."""

    def __init__(self, config: Config, model: ModelConfig, mesh: jax.sharding.Mesh, workdir: Path, step: int | None):
        self._config, self._directory = config, workdir / "checkpoints"
        self._like = build.publishing_inputs(model, mesh)
        self._follows = step is None
        self._fetched_s = time.monotonic()
        self.first = job.pick(self._directory, step)

    def newest(self) -> Version | None:
        if not self._follows:
            return None
        if time.monotonic() - self._fetched_s > BUCKET_S:
            fetch(self._directory.parent)
            self._fetched_s = time.monotonic()
        return checkpoint.latest(self._directory)

    def read(self, version: Version) -> Tree:
        return checkpoint_weights.read(self._config, self._directory, version, self._like)


# ---------------------------------------------------------------- private


async def _run(fleet: LocalFleet, endpoint: Endpoint, listening: socket.socket) -> None:
    server = _Server(http_config(endpoint.app(fleet.lifespan)))
    watch = asyncio.ensure_future(fleet.died.wait())
    watch.add_done_callback(lambda _: setattr(server, "should_exit", True))
    there = f"{fleet.versions.name}@{max(fleet.versions.resident)}"
    print(f"{where(endpoint, listening, there)} (Ctrl-C ends)", flush=True)
    await server.serve(sockets=[listening])
    watch.cancel()


def http_config(app: Starlette, *, grace_s: int = GRACE_S, idle_s: int = 5) -> uvicorn.Config:
    """How every endpoint listens. grace_s: that open answers get at the end; idle_s: before an idle connection is
    closed."""
    return uvicorn.Config(
        app,
        port=0,
        http=_Protocol,
        log_level="warning",
        lifespan="on",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=idle_s,
    )


class _Protocol(H11Protocol):
    """A connection whose request does not come to the end of its headers within `HEADER_S` is closed. One that has had
    an answer may be idle: clients keep them in a pool."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_S, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        super().connection_lost(exc)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """A first signal ends it in peace, and it does not raise that signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listening_socket(options: Options, section: str = "") -> socket.socket:
    """section: of the configuration, where the options are its fields. ConfigError: nothing can listen there."""
    if not options.token and not is_loopback(options.host):
        raise ConfigError(
            f"{section}host: {options.host} can be reached from other machines: put a secret into {TOKEN_VARIABLE}, "
            "which every request then sends as its bearer token"
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{section}port: {options.host}:{options.port} cannot be listened at: {error}") from error


def _begin(engine: Engine, version: Version, store: DeviceWeights) -> None:
    engine.load(version, store.get(version, engine.param_shardings))
    engine.warmup()
