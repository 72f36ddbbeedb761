"""The worker of one instance in a paced run. It says how long it stood still."""

from __future__ import annotations

import time
from typing import Any

from dora_jax.runtime.instances.rollout_worker import EngineWorker


class PacedWorker(EngineWorker):
    """Says how long it stood still beside a trainer on its chips."""

    _stood_s = 0.0
    _stands_since: float | None = None

    @property
    def paused_s(self) -> float:
        since = self._stands_since
        return self._stood_s + (time.monotonic() - since if since is not None else 0.0)

    def pause(self) -> None:
        super().pause()
        self._stands_since = time.monotonic()

    def unpause(self) -> None:
        self._stood_s, self._stands_since = self.paused_s, None
        engine: Any = self.engine  # a PacedEngine
        engine.rest()
        super().unpause()
