"""The one loop: events in, commands out. Production, tests and simulation run this same function.

    world.events() --facts--> orchestrator.step --requests--> world.execute

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

Observer = Callable[[Event, Sequence[Command]], None]


class World(Protocol):
    """Where commands become work and work becomes events."""

    def events(self) -> Iterable[Event]:
        """The facts since the last call; may wait a little, may be empty, raises what a stage raised."""

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

    Observers see each event with the commands it caused *before* those are executed: after
    `StepPublished` the trainer is still idle, so its state can be saved there without a race.
    """
    while True:
        for event in world.events():
            commands = orchestrator.step(event)
            for observe in observers:
                observe(event, commands)
            for command in commands:
                if isinstance(command, Halt):
                    return command
                world.execute(command)
