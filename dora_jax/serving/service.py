"""Fleet, answers and routes, tied together. No JAX.

Law: where an engine dies, every answer that runs is an error, and `died` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from dora_jax.base.prometheus import Counters
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.serving.answers import Answers
from dora_jax.serving.app import Endpoint
from dora_jax.serving.fleet import LocalFleet
from dora_jax.serving.parser import AnswerSyntax
from dora_jax.serving.request import ServedLimits
from dora_jax.serving.versions import Versions


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


class Service:
    """`lifespan` runs inside the loop. answering: see Answers."""

    def __init__(
        self,
        fleet: LocalFleet,
        versions: Versions,
        tokenizer: Tokenizer,
        limits: ServedLimits,
        options: Options,
        **answering: Any,
    ):
        self.fleet, self.versions = fleet, versions
        self.answers = Answers(fleet, versions, tokenizer.decode, syntax=AnswerSyntax.of(tokenizer), **answering)
        self.endpoint = Endpoint(
            self.answers,
            tokenizer,
            limits,
            Counters(self._numbers),
            options.token,
            options.keepalive_s,
            health=lambda: (503, {"status": "an engine has died"}) if fleet.crashed else (200, {"status": "ok"}),
        )
        self.options = options
        self.died = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        self.attach()
        for worker in self.fleet.workers:
            worker.start()
        following = asyncio.ensure_future(self.fleet.follow())
        try:
            yield
        finally:
            following.cancel()
            self.fleet.stop_engines()

    def attach(self) -> None:
        """From inside the loop."""
        self.fleet.attach(self.answers, self._on_change)

    def _on_change(self) -> None:
        if self.fleet.crashed is not None:
            self.answers.fail(f"the engines cannot go on: {self.fleet.crashed}")
            self.died.set()
        self.answers.changed()

    def _numbers(self) -> dict[str, tuple[str, float]]:
        answers, resident = self.answers, self.versions.resident
        return {
            "samples": ("samples that run, wait or are parked", answers.running),
            "tokens": ("tokens sampled since the start", answers.tokens),
            "joined": ("requests that joined an answer that was there", answers.joined),
            "cancelled_samples": ("samples whose client went away", answers.cancelled_samples),
            "free_pages": ("KV pages that no sample holds", sum(self.fleet.free_pages.values())),
            "resident_versions": ("versions that engines hold", len(resident)),
            "newest_version": ("of the resident ones", max(resident, default=-1)),
        }
