"""What a run tells other programs while it goes on, where the configuration asks for it.

    monitor.port    GET /metrics (Prometheus) and /healthz on 127.0.0.1
    monitor.wandb   each record of metrics.jsonl to a project of Weights & Biases; WANDB_MODE=offline keeps it in WORKDIR/wandb

Consumes the records and the live facts that metrics.Writer is given; decides nothing. Law: what listens here never stops
the run: a page that nobody reads costs nothing, and no request changes anything.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dora_jax import config, prometheus
from dora_jax.config import Config, ConfigError
from dora_jax.metrics import Sink

HOST = "127.0.0.1"
POLL_S = 0.1  # how long an end of the page may take
QUIET_S = 60.0  # the loop speaks each second; after so long without a word it is stuck


@contextlib.contextmanager
def opened(settings: Config, workdir: Path) -> Iterator[list[Sink]]:
    """The sinks that `monitor` asks for; ConfigError where one cannot be had."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if settings.monitor.port:
            page = LivePage(settings.monitor.port)
            stack.callback(page.close)
            sinks.append(page)
        if settings.monitor.wandb:
            board = WandbRun(settings, workdir)
            stack.callback(board.close)
            sinks.append(board)
        yield sinks


class RunFacts:
    """The newest record and the newest facts of a run: a sink, and what pages say of it."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._facts: dict[str, float] = {}
        self._heard_s: float | None = None  # when the loop last said something; None: it has not begun
        self.gauges = prometheus.Gauges(lambda: self._facts | self._numbers)

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._numbers = self._numbers | {"step": step} | {n: v for n, v in scalars.items() if v is not None}

    def status(self, facts: Mapping[str, Any]) -> None:
        self._heard_s = time.monotonic()
        self._facts = {f"live/{name}": value for name, value in prometheus.flat(facts).items()}

    def health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """What /healthz answers."""
        quiet_s = 0.0 if self._heard_s is None else time.monotonic() - self._heard_s
        stuck = quiet_s > QUIET_S
        said = {"status": f"the loop has said nothing for {quiet_s:.0f} s" if stuck else "ok"}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stuck else HTTPStatus.OK
        return status, said | {"step": self._numbers.get("step", 0)}


class LivePage(RunFacts):
    """They, over HTTP. Port 0: any that is free."""

    def __init__(self, port: int):
        super().__init__()
        self._registry = CollectorRegistry()
        self._registry.register(self.gauges)
        try:
            self._server = http.server.ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as error:
            raise ConfigError(f"monitor.port: {HOST}:{port} cannot be listened on: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="live-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """(status, media type, body) of a GET."""
        if path == "/metrics":
            return HTTPStatus.OK, prometheus.MEDIA_TYPE, prometheus.page(self._registry)
        if path == "/healthz":
            status, said = self.health()
            return status, "application/json", json.dumps(said).encode()
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics and /healthz are here\n"


def _handler(page: LivePage) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            status, kind, body = page.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """The console is the run's."""

    return Handler


class WandbRun:
    """One run of Weights & Biases for a workdir, however often the workdir's run is resumed."""

    def __init__(self, settings: Config, workdir: Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("monitor.wandb: wandb is not installed (pip install 'dora_jax[wandb]')") from error
        identity = workdir / "wandb_id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=settings.monitor.wandb,
                name=workdir.resolve().name,
                id=identity.read_text(),
                resume="allow",
                dir=workdir,
                config=config.to_json(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"monitor.wandb: {' '.join(str(error).split())}") from error
        # A run that resumes counts from its checkpoint again, and wandb's own counter never goes back.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._run.log({"step": step} | {name: value for name, value in scalars.items() if value is not None})

    def status(self, facts: Mapping[str, Any]) -> None:
        """Only what is in metrics.jsonl is told."""

    def close(self) -> None:
        self._run.finish()
