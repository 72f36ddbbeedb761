"""The trainer's state while its devices are lent: in host memory from the first Lend to the last return.

    first instance: to_host -> weights, pages ... last instance: no weights, no pages -> to_devices -> the next batch

`LentState` consumes what lent instances say of themselves, and moves the state on the thread that says it. Laws: the state is off
the devices before an instance takes their memory; it is back on them before the trainer takes a batch, whatever became of
the instance; compiled programs stay.
"""

from __future__ import annotations

import threading
from typing import Protocol

from dora_jax.types import InstanceId


class MovableState(Protocol):
    """trainer.step.Trainer."""

    def to_host(self) -> None: ...

    def to_devices(self) -> None: ...


class LentState:
    """Any thread may use it."""

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

    def give_back(self, instance: InstanceId) -> None:
        """The instance has freed what it took, or never took any. On return the state is on the devices, unless another
        instance has them."""
        with self._changed:
            self._lent.discard(instance)
            self._changed.notify_all()
            self._bring()

    def come_home(self) -> None:
        """Returns when the state is on the devices."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent)
            self._bring()

    # ------------------------------------------------------------ private

    def _bring(self) -> None:
        if not self._lent and not self._here:
            self._trainer.to_devices()
            self._here = True
