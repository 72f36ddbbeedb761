"""Chrome trace events (https://ui.perfetto.dev): rows of slices, and arrows between them.

Consumes what rows do and when, in seconds; produces the events of the Trace Event Format, one dictionary each, to
`emit`. A slice is named by the versions that its row works on, so that a version has one colour everywhere. Laws,
without which Perfetto drops slices: a row has a thread number of its own in the whole trace, and none has 0, which it
takes for the idle thread of the machine; times are whole microseconds, so that a slice ends where the next one of its
row begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
TRAINER, ROLLOUT = 1, 2  # process ids: the two groups of rows; as threads the trainer is 1, instance i is i + 2
MICRO = 1e6
# Old names that the legacy viewer knows; Perfetto takes its colour from the slice's name.
COLOURS = ("thread_state_running", "rail_response", "rail_animation", "cq_build_running", "cq_build_attempt_failed",
           "thread_state_runnable", "rail_load", "generic_work")  # fmt: skip


class TraceRows:
    """Rows by (process, row). A slice in progress is emitted when the row's next one begins, or by `end`."""

    def __init__(self, label: str, emit: Callable[[Event], object]):
        self._emit = emit
        self._open: dict[tuple[int, int], tuple[str, float]] = {}  # name and begin of the slice in progress
        self._label(TRAINER, 0, "process_name", f"trainer ({label})")
        self._label(TRAINER, 0, "thread_name", "trainer")
        self._label(ROLLOUT, 0, "process_name", f"rollout ({label})")

    def turn(self, process: int, row: int, name: str, now_s: float) -> None:
        """From now on the row does `name`; "" is nothing."""
        before, since_s = self._open.get((process, row), ("", now_s))
        if (process, row) not in self._open and process == ROLLOUT:
            self._label(process, row, "thread_name", f"instance {row}")
        if name != before or (process, row) not in self._open:
            self.slice(process, row, before, since_s, now_s)
            self._open[process, row] = (name, now_s)

    def end(self, now_s: float) -> None:
        """Every slice in progress ends."""
        for (process, row), (name, since_s) in self._open.items():
            self.slice(process, row, name, since_s, now_s)
        self._open.clear()

    def slice(self, process: int, row: int, name: str, begin_s: float, end_s: float, args: Any = None) -> None:
        if not name or end_s <= begin_s:
            return
        digits = "".join(c for c in name.partition("+")[0] if c.isdigit())
        colour = {"cname": COLOURS[int(digits) % len(COLOURS)]} if digits else {}
        self._emit({
            "ph": "X", "pid": process, "tid": process + row, "name": name, "cat": "work", "ts": _micro(begin_s),
            "dur": _micro(end_s) - _micro(begin_s), "args": args or {}, **colour})  # fmt: skip

    def count(self, name: str, values: dict[str, float], now_s: float) -> None:
        """Values that are drawn one on top of the other, until the next ones of this name."""
        self._emit({"ph": "C", "pid": TRAINER, "name": name, "ts": _micro(now_s), "args": values})

    def arrow(self, name: str, id: int, begin: tuple[int, int, float], end: tuple[int, int, float]) -> None:
        """begin, end: (process, row, seconds). ids differ among the arrows of one name."""
        for phase, (process, row, at_s) in (("s", begin), ("f", end)):
            binding = {"bp": "e"} if phase == "f" else {}
            self._emit({
                "ph": phase, "pid": process, "tid": process + row, "name": name, "cat": name, "id": id,
                "ts": _micro(at_s), **binding})  # fmt: skip

    def _label(self, process: int, row: int, what: str, name: str) -> None:
        self._emit({"ph": "M", "pid": process, "tid": process + row, "name": what, "args": {"name": name}})


def _micro(at_s: float) -> int:
    return round(at_s * MICRO)


def versions(counts: Any) -> str:
    """The name of a slice in which samples of these versions run; "" for none."""
    return "+".join(f"v{version}" for version in sorted(counts))
