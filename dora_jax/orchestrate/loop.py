"""The one loop: events in, commands out. Production, tests and simulation run this same function.

    world.events() --a batch of facts--> orchestrator.commit each, then decide --requests--> world.execute

Consumes whatever the world reports, produces nothing itself; ends when the orchestrator says `Halt`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import Command, Event, Halt

YOUNG_OBJECTS = 50_000  # that come, beyond those that go, before the collector looks at them; most are gone by then
MIDDLE_PASSES = 1_000  # of those, before it looks again at what they left: seconds of work beside a million samples
FULL_PASSES = 1_000_000  # in practice none

Observer = Callable[[Sequence[Event], Sequence[Command]], None]


class World(Protocol):
    """Where commands become work and work becomes events."""

    def events(self) -> Iterable[Event]:
        """One batch: the facts since the last call; may wait a little, may be empty, raises what a stage raised. Each
        fact is committed before the next one is asked for; the decisions follow when there are no more."""

    def execute(self, command: Command) -> None:
        """Begin the work; its outcome is a later event."""


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """What is there now is never looked at by the cycle collector, and what comes is looked at once in many allocations.

    A full pass over a million live samples takes a second, and the orchestrator leaves no cycles behind (a test holds
    that); those of other stages are young when they are collected."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_PASSES, FULL_PASSES)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run(orchestrator: Orchestrator, world: World, observers: Sequence[Observer] = ()) -> Halt:
    """Run until the orchestrator halts.

    Observers see each batch with the commands it caused *before* those are executed: after
    `StepPublished` the trainer is still idle, so its state can be saved there without a race.
    """
    while True:
        events = []
        for event in world.events():
            orchestrator.commit(event)
            events.append(event)
        commands = orchestrator.decide()
        for observe in observers if events else ():
            observe(events, commands)
        for command in commands:
            if isinstance(command, Halt):
                return command
            world.execute(command)


def each(observe: Callable[[Event, Sequence[Command]], None]) -> Observer:
    """An observer of facts one by one: the last of a batch comes with the commands that the batch caused."""

    def observe_batch(events: Sequence[Event], commands: Sequence[Command]) -> None:
        for event in events[:-1]:
            observe(event, ())
        for event in events[-1:]:
            observe(event, commands)

    return observe_batch
