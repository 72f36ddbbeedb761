"""Where the time of a step went, and what each role waited for.

`IdleReport` observes the loop: it turns the orchestrator's account of what each role waits for, and the measured
shares, into one phrase a role. `StepSeconds` reads the lanes (base/lanes.py) of the trainer, of every instance and of
the controller's thread. Laws: a wait that is still going on counts up to now; a lane's seconds add up to the step's.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping

from dora_jax.base.lanes import WAITING, summed
from dora_jax.orchestrate import events as ev


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

    def causes(self) -> dict[str, dict[str, float]]:
        """role -> cause -> seconds, since the last phrases."""
        self._count()
        return {role: dict(spent_s) for role, spent_s in self._spent_s.items()}

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


class StepSeconds:
    """lanes: name -> what `Lane.read` gives; the names of instances are their numbers."""

    def __init__(self, lanes: Mapping[str, Callable[[], Mapping[str, float]]]):
        self._lanes = lanes
        self.begin()

    def begin(self) -> None:
        """The step begins now: what was done before does not count."""
        self._began_s = time.monotonic()
        self._before = {name: dict(read()) for name, read in self._lanes.items()}

    def take(self, causes: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """lane -> what it did -> seconds since the step began; the next one begins. Waits are split as the causes were
        seen (role -> cause -> seconds)."""
        now_s = time.monotonic()
        elapsed_s, self._began_s = now_s - self._began_s, now_s
        taken: dict[str, dict[str, float]] = {}
        for name, read in self._lanes.items():
            before = self._before[name]
            since = {does: s - before.get(does, 0.0) for does, s in read().items()}
            since = {does: s for does, s in since.items() if s > 0}
            # of another process they come once a second, and steps may be shorter: the rest is of the next one
            share = min(1.0, elapsed_s / (sum(since.values()) or 1.0))
            since = {does: s * share for does, s in since.items()}
            self._before[name] = summed(before, since)
            waited_s = since.pop(WAITING, 0.0)
            known = causes.get("rollouts" if name.isdigit() else name) or {"commands": 1.0}
            for cause, s in known.items() if waited_s else ():
                since[f"waiting for {cause}"] = waited_s * s / (sum(known.values()) or 1.0)
            taken[name] = since
        return taken
