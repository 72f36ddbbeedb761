"""An instance of the trainer's devices: it is up only while they are lent.

`LentInstance` is a LocalInstance that never starts by itself. Lend begins one: the engine, which keeps its
programs, takes the weights of the version that is named. Return ends it: its samples leave with their KV, and the
weights go. The trainer's state stays on its devices, which then hold the memory of both sides, or is in host memory
meanwhile (LentState), as `trainer.lent_memory` says; the pages of the KV go with the weights then. Laws: every
Lend is answered by InstanceUp or InstanceDown, and every Return by InstanceDown; an incarnation that dies gives the
devices back.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.seams import RolloutEngine
from dora_jax.runtime.common.shutdown import STAGE_END_S
from dora_jax.runtime.common.worker import Crashed, HandedOver
from dora_jax.runtime.instances.supervised_worker import LocalInstance, LocalWorker
from dora_jax.types import InstanceId, Version

RETURNED = "its devices are the trainer's again"


class MovableState(Protocol):
    """trainer.step.Trainer."""

    def to_host(self) -> None: ...

    def to_devices(self) -> None: ...


class LentState:
    """The trainer's state while its devices are lent: in host memory from the first Lend to the last return.

    first instance: to_host -> weights, pages ... last instance: no weights, no pages -> to_devices -> the next batch

    Any thread may use it; the state moves on that thread. Laws: the state is off the devices before an instance takes
    their memory; it is back on them before the trainer takes a batch, whatever became of the instance; compiled
    programs stay."""

    def __init__(self, trainer: MovableState):
        self._trainer = trainer
        self._here = True  # on the devices
        self._lent: set[InstanceId] = set()
        self._changed = threading.Condition()

    def lend(self, instance: InstanceId) -> None:
        """The instance is about to take the devices' memory."""
        with self._changed:
            if self._here:
                self._trainer.to_host()
                self._here = False
            self._lent.add(instance)

    def reclaim(self, instance: InstanceId) -> None:
        """The instance has freed what it took, or never took any. On return the state is on the devices, unless another
        instance has them."""
        with self._changed:
            self._lent.discard(instance)
            self._changed.notify_all()
            self._bring()

    def reload(self) -> None:
        """Returns when the state is on the devices."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent)
            self._bring()

    # ------------------------------------------------------------ private

    def _bring(self) -> None:
        if not self._lent and not self._here:
            self._trainer.to_devices()
            self._here = True


@dataclasses.dataclass(frozen=True)
class LentMemory:
    """What leaves the devices with either side. free: frees the pages of an engine that holds no version."""

    state: LentState
    free: Callable[[RolloutEngine], None]


class LentInstance(LocalInstance):
    on_demand = True

    def __init__(self, up: ev.InstanceUp, engine: RolloutEngine, *args: Any, memory: LentMemory | None = None):
        """memory: what moves where the devices have no room for both sides; None: they have."""
        super().__init__(up, engine, *args)
        self._memory = memory
        self._worker = None
        self._ended: LocalWorker | None = None  # the incarnation before
        self._spare: RolloutEngine | None = engine  # None: the engine of the incarnation that died is made again

    @property
    def engine(self) -> RolloutEngine:
        if self._spare is None:
            raise RuntimeError(f"{self.role} has no engine now")
        return self._spare

    def lend(self, version: Version) -> None:
        self._run(self._begin, version)

    def reclaim(self, worker: LocalWorker) -> None:
        worker.post(self._return, worker)

    def free(self) -> None:
        """Gives the devices to the trainer: no incarnation uses them."""
        if self._memory is None:
            return
        try:
            if self._spare is not None:
                self._memory.free(self._spare)
            self._memory.state.reclaim(self.instance)
        except Exception as error:  # without its state there is no trainer
            self._outbox.put(Crashed(role=self.role, error=error))

    def stop(self, timeout_s: float = STAGE_END_S) -> None:
        super().stop(timeout_s)
        if self._ended is not None:
            self._ended.stop(timeout_s)
        self.free()

    # ------------------------------------------------------------ private

    def _begin(self, version: Version) -> None:
        with self._making:
            self.incarnation += 1
            try:
                if self.gone:
                    raise RuntimeError(f"{self.role} stays away")
                if self._ended is not None:
                    self._ended.stop()  # its thread used the engine
                worker = self._new_worker(self.engine)
                if self._memory is not None:
                    self._memory.state.lend(self.instance)
                for old in worker.engine.versions:
                    worker.engine.drop(old)
                worker.engine.load(version, self._weights.get(version, worker.engine.param_shardings))
            except Exception as error:  # whatever it is, the devices are the trainer's, and the others go on
                if self._spare is not None:  # else its devices are freed when it is made again
                    self.free()
                self._outbox.put(
                    ev.InstanceDown(instance=self.instance, reason=str(error), incarnation=self.incarnation)
                )
                return
            self._event = dataclasses.replace(self._event, versions=(version,))
            worker.start()
            self.incarnation_ready(worker, functools.partial(self._admit, worker))

    def _return(self, worker: LocalWorker) -> None:
        """On the incarnation's own thread."""
        worker.hand_over()
        for version in worker.engine.versions:
            worker.engine.drop(version)
        self.free()
        with self._lock:
            if self._worker is worker:
                self._ended = worker
                self.incarnation_down(worker, worker.incarnation, RETURNED)

    def incarnation_down(
        self, worker: LocalWorker | None, number: int, reason: str, last: Sequence[HandedOver] = ()
    ) -> None:
        if reason != RETURNED:
            self._spare = None
        super().incarnation_down(worker, number, reason, last)

    def _remade(self, engine: RolloutEngine) -> None:
        """Only the engine: the next Lend begins an incarnation."""
        self._ended, self._spare = None, engine
        self.free()

    def _stay_away(self, error: BaseException) -> None:
        self.free()
        super()._stay_away(error)
