"""Requests on the live fleet of a run: each is a group of one sample beside those of training (types.is_served).

    ask     -> RequestCame -> Start -> tokens as they grow -> SampleDone
    give_up -> GroupFailed -> Cancel -> SampleCancelled

Consumes prompts of an endpoint, on its thread; the facts, commands and payload records of the run, on the run's. Tells
a `Desk` what becomes of each request. Law: the desk hears of the end of each request once, whatever ended it.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.runtime.common.seams import Prompts, RunPlugin
from dora_jax.runtime.common.worker import Finished, TopTokens
from dora_jax.runtime.journal.records import Partial
from dora_jax.types import GroupId, Prompt, Sample, SampleId, Version, is_served

if TYPE_CHECKING:
    import numpy as np

    from dora_jax.base.metrics import Sink
    from dora_jax.config import Config
    from dora_jax.models.tokenizer import Tokenizer
    from dora_jax.runtime.live_sessions import LiveSessions


class Desk(Protocol):
    """Called on the run's main thread; no call waits."""

    def grew(self, id: SampleId, start: int, out_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Tokens from `start` on. Those of a sample that began again come again."""

    def ranked(self, id: SampleId, start: int, rows: np.ndarray) -> None:
        """The most likely tokens at tokens from `start` on, before these: see TopTokens."""

    def ended(self, sample: Sample) -> None: ...

    def gone(self, id: SampleId, reason: str) -> None:
        """The sample will not end: it was given up, its version has retired, or the run could not go on with it."""

    def loaded(self, version: Version) -> None:
        """An instance holds the version."""

    def retired(self, version: Version) -> None: ...


class LiveServing(Protocol):
    """The server that answers requests on the fleet of a run."""

    @property
    def facts(self) -> Sink:
        """Takes the run's metrics, for the endpoint's own pages."""

    def serving(
        self, config: Config, tokenizer: Tokenizer, requests: LiveRequests, sessions: LiveSessions | None
    ) -> AbstractContextManager[str]:
        """From now until the context ends; a sentence for the console. sessions: those that are trained on."""


class LiveRequests(RunPlugin):
    """`Prompts` of the run's task and of requests; `record` listens to the world, `observe` to the loop.

    desk: set before the run begins."""

    desk: Desk

    def __init__(self, prompts: Prompts, outbox: queue.SimpleQueue[Any], orchestrator: Orchestrator):
        self._prompts, self._outbox, self._orchestrator = prompts, outbox, orchestrator
        self._asked: dict[GroupId, Prompt] = {}  # requests that have not ended
        self._known: set[Version] = set()  # that the desk knows of
        self._attempts = itertools.count(1)

    def prompt_at(self, group_id: GroupId) -> Prompt:
        return self._asked[group_id] if is_served(group_id) else self._prompts.prompt_at(group_id)

    # ------------------------------------------------------ on the endpoint's thread

    def ask(self, prompt: Prompt, version: Version) -> None:
        """prompt.group_id: of no request that has not ended."""
        self._asked[prompt.group_id] = prompt
        self._outbox.put(ev.RequestCame(group_id=prompt.group_id, version=version, attempt=next(self._attempts)))

    def give_up(self, group_id: GroupId) -> None:
        self._outbox.put(ev.GroupFailed(group_id=group_id, reason="its client has left, or has enough"))

    # ---------------------------------------------------------- on the run's thread

    def record(self, record: Any) -> None:
        """Listener of the world's payload records."""
        match record:
            case Partial(id=id) if is_served(id.group_id):
                self.desk.grew(id, record.start, record.out_ids, record.logprobs)
            case TopTokens(id=id) if is_served(id.group_id):
                self.desk.ranked(id, record.start, record.rows)
            case Finished(sample=sample) if is_served(sample.id.group_id):
                if self._asked.pop(sample.id.group_id, None) is not None:
                    self.desk.ended(sample)

    def observe(self, events: Sequence[ev.Event], commands: Sequence[ev.Command]) -> None:
        """Observer of the loop."""
        alive = self._orchestrator.state.alive
        touched: dict[GroupId, str] = {}
        for event in events:
            match event:
                case ev.WeightsLoaded(version=version) if version in alive and version not in self._known:
                    self._known.add(version)
                    self.desk.loaded(version)
                case ev.GroupFailed(group_id=group_id, reason=reason) if is_served(group_id):
                    touched[group_id] = reason
                case ev.SampleCancelled(id=id, reason=reason) if is_served(id.group_id):
                    touched[id.group_id] = reason
        for command in commands:
            match command:
                case ev.Retire(version=version):
                    self._known.discard(version)
                    self.desk.retired(version)
                case ev.Discard(group_id=group_id, reason=reason) if is_served(group_id):
                    touched.setdefault(group_id, reason)
        for group_id, reason in touched.items():
            # tells the desk, if the orchestrator has let go of the request
            if group_id not in self._orchestrator.state.groups and self._asked.pop(group_id, None) is not None:
                self.desk.gone(SampleId(group_id, 0), reason)
