"""How long a stage has had nothing to do, and what it waited for.

`IdleTimer` sums the waits of one thread; any thread may read the sum. `IdleReport` observes the loop: it turns the
orchestrator's account of what each role waits for, and the measured shares, into one phrase a role. Law: a wait that is
still going on counts up to now.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping

from dora_jax.orchestrate import events as ev


class IdleTimer:
    def __init__(self) -> None:
        self._at: tuple[float, float | None] = (0.0, None)  # (earlier waits, since when the present one); set as one

    def __enter__(self) -> None:
        self._at = self._at[0], time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._at = self.total_s, None

    @property
    def total_s(self) -> float:
        earlier_s, since_s = self._at
        return earlier_s + (0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def present_s(self) -> float | None:
        """Seconds of the present wait; None: there is none."""
        since_s = self._at[1]
        return None if since_s is None else time.monotonic() - since_s


class IdleReport:
    """Observer of the loop. `waiting`: role -> what it waits for, "" while it works."""

    def __init__(self, waiting: Callable[[], Mapping[str, str]]):
        self._waiting = waiting
        self._present: Mapping[str, str] = {}
        self._since_s = time.monotonic()
        self._spent_s: dict[str, dict[str, float]] = collections.defaultdict(dict)

    def __call__(self, event: ev.Event) -> None:
        if not isinstance(event, ev.InstanceReported):  # by far the most events; nothing starts or stops waiting by one
            self._count()
            self._present = self._waiting()

    def phrases(self, shares: Mapping[str, float]) -> list[str]:
        """`trainer idle 34%: waiting for rollouts`, a phrase a role, the most idle first; begins the next step."""
        self._count()
        phrases = []
        for role, share in sorted(shares.items(), key=lambda item: -item[1]):
            spent_s = self._spent_s[role]
            known = spent_s and f"{share:.0%}" != "0%"
            longest = f": waiting for {max(spent_s, key=lambda cause: spent_s[cause])}" if known else ""
            phrases.append(f"{role} idle {share:.0%}{longest}")
        self._spent_s.clear()
        return phrases

    def _count(self) -> None:
        now = time.monotonic()
        for role, cause in self._present.items():
            if cause:
                self._spent_s[role][cause] = self._spent_s[role].get(cause, 0.0) + now - self._since_s
        self._since_s = now
