"""A rollout instance of this process that may die, hang or return garbage: it leaves the pool, and may come back.

`LocalInstance` is an InstanceProxy whose incarnations are an engine and its thread each. On demand the engine, which
keeps its programs, takes the weights of the version that is named; when the incarnation ends its samples leave with
their KV, and the weights go. Laws: a malformed sample (non-finite log-probs, out-of-vocabulary ids) is dropped, the
incarnation that produced it ends, and the instance is reported as unhealthy; incarnations that come to nothing are
counted; one on demand that dies gives the devices back; where no instance is left, the run ends with the last error.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora_jax.base.lanes import WAITING
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import Notify, RolloutEngine, Tree, WeightStore
from dora_jax.runtime.common.shutdown import STAGE_END_S
from dora_jax.runtime.common.worker import Crashed, Exported, Finished, Outbox
from dora_jax.runtime.instances.instance_proxy import RETURNED, UP, InstanceProxy
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.instances.shared_devices import SharedDevices
from dora_jax.types import InstanceId, Version

MAX_LOSSES = 3  # incarnations in a row that finished no sample and no turn, after which an instance stays away
LOOKS = 8  # at an incarnation, in the time after which it counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What an incarnation is made of, and when it is over."""

    new_engine: Callable[[], RolloutEngine] | None  # None: an instance that is lost stays away
    vocab_size: int
    hung_s: float  # one call or tick lasts so long; 0: any time


class LocalInstance(InstanceProxy["LocalWorker"]):
    """An instance of this process. `_watch` runs on the watchdog's thread, `_make_again` and `_begin` on others."""

    def __init__(
        self,
        up: ev.InstanceUp,
        engine: RolloutEngine,
        weights: WeightStore,
        outbox: Outbox,
        partial_s: float,
        restart: RestartPolicy,
        peers: Mapping[InstanceId, LocalInstance],
        notify: Notify,
        devices: SharedDevices | None = None,
    ):
        """devices: the trainer's, of an instance on demand."""
        super().__init__(up, outbox, restart.vocab_size, on_demand=devices is not None)
        self.gone = False  # for good
        self._restart, self._devices = restart, devices
        self._peers = peers
        self._notify = notify
        self._wrap: Callable[[RolloutEngine], RolloutEngine] = lambda engine: engine
        self._weights = weights
        self._partial_s = partial_s
        self._engine: RolloutEngine | None = engine  # None: that of the incarnation that died is made again
        self._worker = None if self.on_demand else self._new_worker(engine)
        self._lane.turn(WAITING if self.on_demand else UP)
        self._ended: LocalWorker | None = None  # the incarnation before, of the same engine
        self._losses = self._suspicions = 0
        self._done = threading.Event()
        self._making = threading.Lock()
        self._threads: list[threading.Thread] = []

    def wrap_engine(self, wrap: Callable[[RolloutEngine], RolloutEngine], weights: WeightStore) -> None:
        """Before `start`: `wrap(engine)` stands for the engine of every incarnation, `weights` for the store."""
        self._wrap, self._weights = wrap, weights
        if self._worker:
            self._worker = self._new_worker(self.engine)

    def start(self) -> None:
        if worker := self._worker:
            worker.start()
        if self._restart.hung_s:
            self._run(self._watch)

    def stop(self, timeout_s: float = STAGE_END_S) -> None:
        self._done.set()
        if worker := self._worker:
            worker.stop(timeout_s)
        for thread in self._threads:  # one that wakes while the interpreter ends would abort the process
            thread.join(timeout_s)
        if self._ended is not None:
            self._ended.stop(timeout_s)
        self.free()

    @property
    def engine(self) -> RolloutEngine:
        if self._engine is None:
            raise RuntimeError(f"{self.role} has no engine now")
        return self._engine

    @property
    def worker(self) -> LocalWorker | None:
        """The worker of the present incarnation; None: the instance is lost."""
        return self._worker

    def begin(self, version: Version) -> None:
        self._run(self._begin, version)

    def end(self, worker: LocalWorker) -> None:
        worker.post(self._end, worker)

    def free(self) -> None:
        """Gives shared devices to the trainer: no incarnation uses them."""
        try:
            if self._devices is not None:
                self._devices.release(self.instance, self._engine)
        except Exception as error:  # without its state there is no trainer
            self._outbox.put(Crashed(role=self.role, error=error))

    def mark_unhealthy(self, incarnation: int, reason: str) -> None:
        """After MAX_LOSSES suspicions the instance stays away: it is not its weights alone."""
        self._suspicions += 1
        super().mark_unhealthy(incarnation, reason)

    def on_message(self, worker: LocalWorker, item: Any) -> None:
        if isinstance(item, Crashed):
            return self.lose(worker, f"{type(item.error).__name__}: {item.error}", item.error)
        super().on_message(worker, item)
        ended = isinstance(item, Finished) or (isinstance(item, Exported) and item.waits)
        if ended and self._worker is worker:
            self._losses = 0

    # ------------------------------------------------------------ private

    def _new_worker(self, engine: RolloutEngine) -> LocalWorker:
        return LocalWorker(self, self._wrap(engine), self._weights, self._partial_s, self.incarnation)

    def lost(self, worker: LocalWorker, reason: str, error: BaseException, unhealthy: bool) -> None:
        self._losses += 1
        too_often = max(self._losses, self._suspicions) >= MAX_LOSSES
        self.gone = worker.hung or self._restart.new_engine is None or too_often
        self._notify(
            f"{self.role} is lost ({reason}); its samples {'begin again' if unhealthy else 'go on'} elsewhere"
            f"{', and it stays away' if self.gone else ', and it is made again'}"
        )
        if self.gone or self._restart.new_engine is None:
            self._stay_away(error)
        else:
            self._run(self._make_again, worker, self._restart.new_engine)

    def incarnation_down(
        self, worker: LocalWorker | None, number: int, reason: str, last: Sequence[InFlightSample] = ()
    ) -> None:
        if reason != RETURNED:
            self._engine = None
        super().incarnation_down(worker, number, reason, last)

    def _make_again(self, ended: LocalWorker, new_engine: Callable[[], RolloutEngine]) -> None:
        """Frees the old engine, makes another."""
        with self._making:
            ended.stop()
            del ended.engine
            try:
                engine = new_engine()
                engine.warmup()
            except Exception as error:  # whatever it is, the others go on, and the run ends where there are none
                self._notify(f"{self.role} could not be made again ({error}); it stays away")
                self._stay_away(error)
                return
            self._engine, self._ended = engine, None
            self.free()
        if not self.on_demand:
            self._begin(None)

    def _begin(self, version: Version | None) -> None:
        """version: of one on demand, which the incarnation holds from the start."""
        with self._making:
            self.incarnation += 1
            try:
                if self.gone:
                    raise RuntimeError(f"{self.role} stays away")
                if self._ended is not None:
                    self._ended.stop()  # its thread used the engine
                worker = self._new_worker(self.engine)
                if self._devices is not None and version is not None:
                    self._devices.acquire(self.instance)
                    for old in worker.engine.versions:
                        worker.engine.drop(old)
                    worker.engine.load(version, self._weights.get(version, worker.engine.param_shardings))
                    self._event = dataclasses.replace(self._event, versions=(version,))
            except Exception as error:  # whatever it is, the devices are the trainer's, and the others go on
                if self._engine is not None:  # else its devices are freed when it is made again
                    self.free()
                self._outbox.put(
                    ev.InstanceDown(instance=self.instance, reason=str(error), incarnation=self.incarnation)
                )
                return
            worker.start()
            self.incarnation_ready(worker)

    def _end(self, worker: LocalWorker) -> None:
        """On the incarnation's own thread."""
        worker.hand_over()
        for version in worker.engine.versions:
            worker.engine.drop(version)
        self.free()
        with self._lock:
            if self._worker is worker:
                self._ended = worker
                self.incarnation_down(worker, worker.incarnation, RETURNED)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=call, args=args, name=f"{self.role} {call.__name__}", daemon=True)
        thread.start()  # before `stop` can find it: one that has not begun cannot be waited for
        self._threads.append(thread)

    def _stay_away(self, error: BaseException) -> None:
        self.gone = True
        self.free()
        if all(peer.gone for peer in self._peers.values()):
            self._outbox.put(Crashed(role=self.role, error=error))

    def _watch(self) -> None:
        while not self._done.wait(self._restart.hung_s / LOOKS):
            worker = self._worker
            if worker is not None and worker.call_s > self._restart.hung_s:
                worker.hung = True
                self.lose(worker, f"it has been in one call for {worker.call_s:.0f} s", TimeoutError(self.role))


class LocalWorker(EngineWorker):
    """One engine and its thread, from start to end; its own outbox, which hands to the instance what it puts."""

    def __init__(
        self, owner: LocalInstance, engine: RolloutEngine, weights: WeightStore, partial_s: float, number: int
    ):
        super().__init__(owner.instance, engine, weights, self, partial_s, number)
        self._owner = owner
        self.hung = False  # nothing can end it
        self._fetching: threading.Thread | None = None
        self._fetched_s: float | None = None  # since when it fetches weights

    def put(self, item: Any) -> None:
        self._owner.on_message(self, item)

    @property
    def call_s(self) -> float:
        """How long the present call or tick has lasted, or the weights are on their way."""
        began = [at for at in (self._called_s, self._fetched_s) if at is not None]
        return time.monotonic() - min(began) if began else 0.0

    def fetch(self, version: Version, drop: Version | None, attempt: int | None = None) -> None:
        """Samples go on while the weights come to the devices."""
        if self._fetching is not None and self._fetching.is_alive():
            self._fetching.join()
            self.post(self.fetch, version, drop, attempt)  # behind what that fetch has sent
            return
        if drop is not None:
            self.engine.drop(drop)
        if self.engine.idle:
            super().fetch(version, None, attempt)
            return
        self._fetched_s = time.monotonic()
        args = version, attempt, self.engine.param_shardings
        self._fetching = threading.Thread(target=self._fetch, args=args, name=f"{self.role} weights", daemon=True)
        self._fetching.start()

    def _fetch(self, version: Version, attempt: int | None, shardings: Tree) -> None:
        try:
            weights = self._weights.get(version, shardings)
        except BaseException as error:  # raised on the worker's own thread
            self.post(self._fail, error)
        else:
            self.send(ev.LoadWeights(instance=self.instance, version=version, attempt=attempt), weights)
        self._fetched_s = None

    def _fail(self, error: BaseException) -> None:
        raise error
