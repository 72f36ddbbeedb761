"""The trainer's devices while they are lent: whose memory they hold.

The trainer's state stays on them, which then hold the memory of both sides, or is in host memory meanwhile, as
`trainer.lent_memory` says; the pages of the instance's KV go with its weights then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from dora_jax.types import InstanceId


class MovableState(Protocol):
    """trainer.step.Trainer."""

    def to_host(self) -> None: ...

    def to_devices(self) -> None: ...


class SharedDevices:
    """The state is in host memory from the first Lend to the last return, where it moves at all.

    first instance: to_host -> weights, pages ... last instance: no weights, no pages -> to_devices -> the next batch

    Any thread may use it; the state moves on that thread. Laws: the state is off the devices before an instance takes
    their memory; it is back on them before the trainer takes a batch, whatever became of the instance; compiled
    programs stay."""

    def __init__(self, trainer: MovableState | None, free: Callable[[Any], None] | None = None):
        """trainer: None where there is room for both sides. free: an engine that holds no version frees its pages."""
        self._trainer, self._free = trainer, free
        self._here = True  # on the devices
        self._lent: set[InstanceId] = set()
        self._changed = threading.Condition()

    def acquire(self, instance: InstanceId) -> None:
        """The instance is about to take the devices' memory."""
        with self._changed:
            if self._here and self._trainer is not None:
                self._trainer.to_host()
                self._here = False
            self._lent.add(instance)

    def release(self, instance: InstanceId, engine: Any = None) -> None:
        """The instance has dropped its weights, or never took any. engine: whose pages go; None: there is none. On
        return the state is on the devices, unless another instance has them."""
        if engine is not None and self._free is not None:
            self._free(engine)
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
        if self._trainer is not None and not self._lent and not self._here:
            self._trainer.to_devices()
            self._here = True
