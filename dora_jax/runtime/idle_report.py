"""What the trainer and the rollout instances waited for, and for what share of a step.

Consumes the orchestrator's account of what waits after each event, and the threads' own measured waits; produces one
phrase a role: the share is the measured one, the cause the one that held longest while the role was idle in that step.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping

from dora_jax.orchestrate import events as ev


class Idle:
    """Observer of the loop. `waiting`: role -> what it waits for, "" while it works."""

    def __init__(self, waiting: Callable[[], Mapping[str, str]]):
        self._waiting = waiting
        self._present: Mapping[str, str] = {}
        self._since_s = time.monotonic()
        self._spent_s: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def __call__(self, event: ev.Event) -> None:
        if not isinstance(event, ev.InstanceReported):  # by far the most events; nothing starts or stops waiting by one
            self._count()
            self._present = self._waiting()

    def phrases(self, shares: Mapping[str, float]) -> list[str]:
        """`trainer idle 34%: waiting for rollouts`, a phrase a role, the most idle first; begins the next step."""
        self._count()
        phrases = []
        for role, share in sorted(shares.items(), key=lambda item: -item[1]):
            causes = self._spent_s[role].most_common(1)
            known = causes and f"{share:.0%}" != "0%"
            phrases.append(f"{role} idle {share:.0%}" + (f": waiting for {causes[0][0]}" if known else ""))
        self._spent_s.clear()
        return phrases

    def _count(self) -> None:
        now = time.monotonic()
        for role, cause in self._present.items():
            if cause:
                self._spent_s[role][cause] += now - self._since_s
        self._since_s = now
