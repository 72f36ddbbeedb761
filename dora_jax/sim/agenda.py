"""Appointments in virtual time: what is called when. The clock jumps from one to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Agenda:
    """Calls of one moment come in the order in which they were agreed on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._count = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._count), call, args))

    def next(self) -> None:
        """Move the clock to the next appointment, and keep it."""
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
