"""What a run tells other programs while it goes on, where the configuration asks for it.

    monitor.port    GET /metrics (Prometheus) and /healthz on 127.0.0.1
    monitor.wandb   each record of metrics.jsonl, and tables of samples, to a project of Weights & Biases;
                    WANDB_MODE=offline keeps it in WORKDIR/wandb
    monitor.sinks   each record, what goes on now, and samples, to classes of the user's (metrics.Sink)

Consumes the records and the live facts that metrics.Writer is given; decides nothing. Law: what listens here never
stops the run: a page that nobody reads costs nothing, no request changes anything, and connections hold a bounded
number of threads for a bounded time.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dora_jax import config
from dora_jax.base import callables, prometheus, state_files
from dora_jax.base.metrics import COLUMNS, MAX_TEXT, SampleRow, Sink
from dora_jax.config import Config, ConfigError
from dora_jax.runtime.common.listener import hang_up

HOST = "127.0.0.1"
POLL_S = 0.1  # how long an end of the page may take
CONNECTIONS = 16  # at a time, a thread each; where one more comes, the oldest ends
ANSWER_S = 10.0  # for a connection to send its request and take the answer, however slowly its bytes come
WANDB_ID = r"[^/\\#?%:\s]{1,128}"  # what Weights & Biases takes for the name of a run
CALLS = ("write", "status", "close")  # of a sink
SAMPLES = "samples"  # a call that a class of the user's may lack
QUIET_S = 60.0  # the loop speaks each second; after so long without a word it is stuck


@contextlib.contextmanager
def opened(settings: Config, workdir: Path) -> Iterator[list[Sink]]:
    """The sinks that `monitor` asks for; ConfigError where one cannot be had."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if settings.monitor.port:
            sinks.append(stack.enter_context(contextlib.closing(LivePage(settings.monitor.port))))
        if settings.monitor.wandb:
            sinks.append(stack.enter_context(contextlib.closing(WandbRun(settings, workdir))))
        for path in settings.monitor.sinks:
            sinks.append(stack.enter_context(contextlib.closing(UserSink(path, settings, workdir))))
        yield sinks


class UserSink:
    """A sink of the user's (monitor.sinks). One that raises is reported once and gets nothing more: the run goes on."""

    def __init__(self, path: str, settings: Config, workdir: Path):
        self._path = path
        self.write, self.status, self.close, self.samples = (
            functools.partial(self._call, name) for name in (*CALLS, SAMPLES)
        )
        with config.field_context("monitor.sinks"):
            self._sink: Any = callables.imported(path, "sink")(settings, workdir)
        if missing := [name for name in CALLS if not hasattr(self._sink, name)]:
            raise ConfigError(f"monitor.sinks: {path} has no {', '.join(missing)} (dora_jax.base.metrics.Sink)")

    def _call(self, name: str, *args: Any) -> None:
        if self._sink is None or (name == SAMPLES and not hasattr(self._sink, name)):
            return
        try:
            getattr(self._sink, name)(*args)
        except Exception as error:  # the user's own code
            self._sink = None
            print(f"monitor.sinks: {self._path}.{name} raised {type(error).__name__}: {error}; it gets nothing more",
                  file=sys.stderr, flush=True)  # fmt: skip


class RunFacts:
    """A sink that keeps the newest record and facts of a run, for the pages that show them."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._facts: dict[str, float] = {}
        self._verdicts: list[str] = []
        self._last_beat_s: float | None = None  # when the loop last reported; None: it has not begun
        self.gauges = prometheus.Gauges(lambda: self._facts | self._numbers)

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._numbers = self._numbers | {"step": step} | {n: v for n, v in scalars.items() if v is not None}

    def status(self, facts: Mapping[str, Any]) -> None:
        self._last_beat_s = time.monotonic()
        self._verdicts = list(facts.get("health", ()))
        self._facts = {f"live/{name}": value for name, value in prometheus.flat(facts).items()}

    def samples(self, step: int, kind: str, rows: Sequence[SampleRow]) -> None:
        """Gauges hold no text."""

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """What /healthz answers."""
        quiet_s = 0.0 if self._last_beat_s is None else time.monotonic() - self._last_beat_s
        stuck = quiet_s > QUIET_S
        body = {"status": f"the loop has reported nothing for {quiet_s:.0f} s" if stuck else "ok"}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stuck else HTTPStatus.OK
        return status, body | {"step": self._numbers.get("step", 0), "verdicts": self._verdicts}


class LivePage(RunFacts):
    """They, over HTTP. Port 0: any that is free."""

    def __init__(self, port: int):
        super().__init__()
        self.registry = CollectorRegistry()
        self.registry.register(self.gauges)
        try:
            self._server = _Server((HOST, port), self)
        except OSError as error:
            raise ConfigError(f"monitor.port: {HOST}:{port} cannot be listened on: {error.strerror}") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="live-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    """Server whose connections end after ANSWER_S, or earlier where there are more than CONNECTIONS."""

    daemon_threads = True
    request_queue_size = 4 * CONNECTIONS  # come at once, while the oldest end

    def __init__(self, address: tuple[str, int], page: LivePage):
        self.page = page
        self._since_s: dict[Any, float] = {}  # connection -> when it came, the oldest first
        self._fewer = threading.Condition()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._fewer:
            while len(self._since_s) >= CONNECTIONS:
                hang_up(next(iter(self._since_s)))
                if not self._fewer.wait(POLL_S):  # its thread computes an answer: the new one does without
                    self.shutdown_request(request)
                    return
            self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called by the connection's thread as its last act."""
        super().shutdown_request(request)
        with self._fewer:
            self._since_s.pop(request, None)
            self._fewer.notify()

    def service_actions(self) -> None:
        """Called every POLL_S."""
        with self._fewer:
            for request, since_s in self._since_s.items():
                if time.monotonic() - since_s > ANSWER_S:
                    hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone, or was hung up on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:  # the name that http.server calls
        status, kind, body = HTTPStatus.NOT_FOUND, "text/plain", b"/metrics and /healthz are here\n"
        match self.path.partition("?")[0]:
            case "/metrics":
                status, kind, body = (
                    HTTPStatus.OK,
                    prometheus.MEDIA_TYPE,
                    prometheus.generate_latest(self.server.page.registry),
                )
            case "/healthz":
                status, health = self.server.page.health()
                kind, body = "application/json", json.dumps(health).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The console is the run's."""


class WandbRun:
    """One run of Weights & Biases for a workdir, however often the workdir's run is resumed."""

    def __init__(self, settings: Config, workdir: Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("monitor.wandb: wandb is not installed (pip install 'dora_jax[wandb]')") from error
        identity = workdir / "wandb_id"
        if not identity.exists():
            state_files.replace(identity, secrets.token_hex(4).encode())
        name = identity.read_bytes().decode(errors="replace") if identity.is_file() else ""
        if not re.fullmatch(WANDB_ID, name) or not name.isascii():
            raise ConfigError(
                f"monitor.wandb: {identity} holds no id of a run: write the id that Weights & Biases shows into it, or "
                "remove it, and another run begins there"
            )
        try:
            self._run = wandb.init(
                project=settings.monitor.wandb,
                name=workdir.resolve().name,
                id=name,
                resume="allow",
                dir=workdir,
                config=config.to_json(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"monitor.wandb: {' '.join(str(error).split())}") from error
        # A run that resumes counts from its checkpoint again, and wandb's own counter never goes back.
        self._run.define_metric("*", step_metric="step")
        self.close, self._table = self._run.finish, wandb.Table

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._run.log({"step": step} | {name: value for name, value in scalars.items() if value is not None})

    def status(self, facts: Mapping[str, Any]) -> None:
        """Not exported."""

    def samples(self, step: int, kind: str, rows: Sequence[SampleRow]) -> None:
        table = self._table(columns=list(COLUMNS), data=[[f"{row[name]!s:.{MAX_TEXT}}" for name in COLUMNS]
                                                         for row in rows])  # fmt: skip
        self._run.log({"step": step, f"samples/{kind}": table})
