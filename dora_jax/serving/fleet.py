"""The engines of this process as a `ServingFleet`: a thread each, samples spread over them, checkpoints loaded beside.

Consumes what `Answers` asks for and the versions that a `VersionSource` offers; tells `Answers`, on the loop's thread,
what the engines sample. Laws: a sample and its session stay on one engine; weights are read and placed beside the
engines' threads, which decode meanwhile; a version is resident once every engine has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.seams import RolloutEngine, Tree, WeightStore
from dora_jax.runtime.common.worker import Crashed, Exported, Finished, TopTokens
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.journal.records import Partial
from dora_jax.serving.answers import ServingFleet
from dora_jax.serving.versions import Versions
from dora_jax.types import InstanceId, Prompt, SampleId, Version

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from dora_jax.rollout.migrate import InFlightSample

LOG = logging.getLogger(__name__)
POLL_S = 0.5  # between two looks at the source of versions


class ServingEngine(RolloutEngine, Protocol):
    @property
    def free_pages(self) -> int:
        """KV pages that no sample holds."""


class VersionSource(Protocol):
    """Where versions come from. Both methods run on other threads than the loop's."""

    def newest(self) -> Version | None:
        """The newest that is whole. OSError: the source cannot be read now."""

    def read(self, version: Version) -> Tree:
        """Its weights, as `WeightStore.put` takes them. OSError, ValueError: they cannot be read any more."""


class LocalFleet(ServingFleet):
    """died: an engine has, every answer that runs is an error, and none begins."""

    def __init__(
        self,
        engines: Sequence[ServingEngine],
        store: WeightStore,
        versions: Versions,
        source: VersionSource | None = None,
    ):
        super().__init__(versions)
        self.workers = [EngineWorker(i, engine, store, self) for i, engine in enumerate(engines)]
        self.free_pages = {i: engine.free_pages for i, engine in enumerate(engines)}
        self.crashed: BaseException | None = None
        self.died = asyncio.Event()
        self._engines, self._store, self._source = engines, store, source
        self._home: dict[SampleId, EngineWorker] = {}
        self._load = [0] * len(engines)  # samples on each
        self._awaited: set[InstanceId] = set()  # engines that are yet to load `versions.loading`
        self._background: set[asyncio.Future[Any]] = set()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        following = asyncio.ensure_future(self.follow())
        try:
            async with super().lifespan(app):
                for worker in self.workers:
                    worker.start()
                yield
        finally:
            following.cancel()
            for worker in self.workers:
                worker.stop()

    def health(self) -> tuple[int, dict[str, Any]]:
        """What /healthz answers."""
        return (503, {"status": "an engine has died"}) if self.crashed else (200, {"status": "ok"})

    # ------------------------------------------------------------ as a ServingFleet

    def start(self, id: SampleId, prompt: Prompt, version: Version, session: str | None) -> None:
        at = zlib.crc32(session.encode()) % len(self.workers) if session else int(np.argmin(self._load))
        worker = self._place(id, at)
        worker.send(ev.Start(ids=(id,), instance=worker.instance, version=version), prompt)

    def cancel(self, id: SampleId) -> None:
        worker = self._home.get(id) or self.workers[0]  # one that is parked is nowhere: any engine says so
        worker.send(ev.Cancel(ids=(id,), instance=worker.instance, reason="its client left, or has enough"))

    def park(self, id: SampleId) -> None:
        if worker := self._home.get(id):
            worker.send(ev.Park(ids=(id,), instance=worker.instance))

    def resume(self, in_flight: InFlightSample) -> None:
        worker = self._place(in_flight.id, int(np.argmin(self._load)))
        worker.send(ev.Resume(ids=(in_flight.id,), instance=worker.instance, version=in_flight.version), in_flight)

    # ------------------------------------------------------------ versions

    async def follow(self, period_s: float = POLL_S) -> None:
        """Offers new versions, loads and drops, until it is cancelled."""
        while True:
            try:
                newest = await asyncio.to_thread(self._source.newest) if self._source else None
            except OSError as error:  # what is served goes on; the next look may succeed
                LOG.warning("no look at new versions: %s", error)
                newest = None
            if newest is not None:
                self.versions.offer(newest)
            self.replan()
            await asyncio.sleep(period_s)

    def replan(self) -> None:
        was = self.versions.loading
        drop, load = self.versions.plan(time.monotonic())
        if drop is not None:
            for worker in self.workers:
                worker.post(worker.engine.drop, drop)
        if load is not None and was is None:
            self._awaited = {worker.instance for worker in self.workers}
            task = asyncio.ensure_future(self._bring(load))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _bring(self, version: Version) -> None:
        try:
            await asyncio.to_thread(self._read, version)
        except (OSError, ValueError, KeyError) as error:  # the run may have deleted it: a newer one is there by then
            LOG.warning("version %d is not loaded: %s", version, error)
            self.versions.loading = None
            self.answers.changed()
        except Exception as error:  # no room on the device, say: raised on the main thread
            self._die(error)

    def _read(self, version: Version) -> None:
        assert self._source is not None
        self._store.put(version, self._source.read(version))
        for worker in self.workers:
            weights = self._store.get(version, worker.engine.param_shardings)
            worker.send(ev.LoadWeights(instance=worker.instance, version=version), weights)
        self._store.drop(version)  # the engines hold what they need of it

    # -------------------------------------------------------- as an outbox

    def put(self, item: Any) -> None:
        """Called by the engines' threads."""
        self.post(self._on_item, item)

    def _on_item(self, item: Any) -> None:
        answers = self.answers
        match item:
            case Partial():
                answers.grew(item.id, item.start, item.out_ids, item.logprobs)
            case TopTokens():
                answers.ranked(item.id, item.start, item.rows)
            case Finished(sample=sample):
                self._left(sample.id)
                answers.ended(sample)
            case Exported(in_flight=in_flight):
                self._left(in_flight.id)
                answers.parked(in_flight)
            case ev.SampleCancelled(id=id):
                self._left(id)
                answers.cancelled(id)
            case ev.InstanceReported(instance=instance, free=free):
                self.free_pages[instance] = free
            case ev.WeightsLoaded(instance=instance, version=version):
                self._awaited.discard(instance)
                if not self._awaited:
                    self.versions.loaded(version)
                    answers.changed()
            case Crashed(error=error):
                self._die(error)

    def _die(self, error: BaseException) -> None:
        self.crashed = error
        self.answers.fail(f"the engines cannot go on: {error}")
        self.died.set()

    def _place(self, id: SampleId, at: int) -> EngineWorker:
        self._load[at] += 1
        self._home[id] = self.workers[at]
        return self.workers[at]

    def _left(self, id: SampleId) -> None:
        if worker := self._home.pop(id, None):
            self._load[worker.instance] -= 1
            worker.post(self._count, self._engines[worker.instance], worker.instance)

    def _count(self, engine: ServingEngine, instance: InstanceId) -> None:
        """On the engine's thread: an engine that is idle reports nothing by itself."""
        self.free_pages[instance] = engine.free_pages
