"""The one loop: events in, commands out. Production, tests and simulation run this same function.

    world.events() --facts--> orchestrator.step --requests--> world.execute

Consumes whatever the world reports, produces nothing itself; ends when the orchestrator says `Halt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import Command, Event, Halt

Observer = Callable[[Event, Sequence[Command]], None]


class World(Protocol):
    """Where commands become work and work becomes events."""

    def events(self) -> Iterable[Event]:
        """The facts since the last call; may wait a little, may be empty, raises what a stage raised."""

    def execute(self, command: Command) -> None:
        """Begin the work; its outcome is a later event."""


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
