"""One incarnation of an instance, and a sample between two, as the orchestrator's adversary keeps them."""

from __future__ import annotations

import collections
import dataclasses

from dora_jax.orchestrate import events as ev
from dora_jax.types import SampleId


@dataclasses.dataclass
class InFlightSample:
    """A sample on its way between two incarnations."""

    id: SampleId
    version: int
    move: ev.Move
    src: InstanceIncarnation
    dst: InstanceIncarnation | None


class InstanceIncarnation:
    """One incarnation of an instance: what it runs, what it received and what it has reported, in order."""

    def __init__(self, instance: int, number: int, slots: int, residents: int):
        self.instance, self.number, self.slots, self.residents = instance, number, slots, residents
        self.versions: list[int] = []
        self.loading: list[tuple[int, int]] = []  # versions, and the attempts to load them
        self.runs: dict[SampleId, int] = {}  # id -> version
        self.attempts: dict[SampleId, int] = {}  # that placed what runs or ran here
        self.begun: set[SampleId] = set()
        self.inbox: collections.deque = collections.deque()
        self.destinations: collections.deque = collections.deque()  # of the moves in the inbox
        self.sent: collections.deque = collections.deque()
        self.paused = self.over = False
