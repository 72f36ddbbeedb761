"""Where the seconds of a thread go: its lane does one thing at every moment, so what it did adds up to the time passed.

    lane = Lane()               of one thread, which turns it; any thread may read it
    lane.bind()                 from now on `doing` in this thread is of this lane
    with doing("put"): ...      behind it the lane does again what it did before

Consumes turns; produces seconds by what was done. A turn costs two tenths of a microsecond; in a thread without a lane
`doing` counts nothing.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping
from typing import Self

WAITING = "waiting"  # for a command, an event or an answer
_HERE = threading.local()


class Lane:
    def __init__(self, does: str = ""):
        """does: what it does first; "": nothing that counts."""
        self._spent_s: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._since_s = time.monotonic()
        self.does = does

    def bind(self) -> None:
        _HERE.lane = self

    def turn(self, does: str, now_s: float | None = None, did: str | None = None) -> None:
        """Begin something else. did: what the lane really did until now, where that is only known afterwards."""
        now_s = time.monotonic() if now_s is None else now_s
        before_s = self._since_s
        # no call below, and so no switch of threads: a reader sees all of it or nothing
        self._spent_s[self.does if did is None else did] += now_s - before_s
        self._since_s = now_s
        self.does = does

    def read(self) -> dict[str, float]:
        """Seconds by what was done, up to now."""
        does, since_s = self.does, self._since_s
        spent_s = dict(self._spent_s)
        spent_s[does] = spent_s.get(does, 0.0) + max(0.0, time.monotonic() - since_s)
        spent_s.pop("", None)
        return spent_s

    def present_s(self, does: str) -> float | None:
        """Seconds since the lane began to do this; None: it does something else."""
        since_s = self._since_s
        return time.monotonic() - since_s if self.does == does else None


def summed(*spent_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of several lanes, or of one lane's incarnations, by what was done."""
    total: dict[str, float] = {}
    for each in spent_s:
        for does, s in each.items():
            total[does] = total.get(does, 0.0) + s
    return total


class doing:
    """Something that this thread's lane does meanwhile; see the page."""

    __slots__ = ("_before", "_does", "_lane")

    def __init__(self, does: str):
        self._does = does

    def __enter__(self) -> Self:
        self._lane: Lane | None = getattr(_HERE, "lane", None)
        if self._lane:
            self._before = self._lane.does
            self._lane.turn(self._does)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lane:
            self._lane.turn(self._before)
