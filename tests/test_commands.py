"""A command of `orchestrate/events.py` is the message that travels to an instance: nothing else names it on the way.

Read from the source: who looks at the class of a command to an instance, in a `match`, in `isinstance` or as the key of
a table.
"""

import ast
import functools
import typing
from collections import defaultdict
from pathlib import Path

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.common import worker

PACKAGE = Path(__file__).parents[1] / "dora_jax"
COMMANDS = [command.__name__ for command in typing.get_args(ev.SampleCommand | ev.InstanceCommand)]

# who carries a command out
INSTANCE = ("runtime/instances", "runtime/cluster")  # an engine's thread, and the handles that lend and load for it
FLEET = ("sim/world.py",)
JOURNAL = ("runtime/journal",)
# who adds what a command needs, from what it keeps of samples
COORDINATOR, ADDED_TO = ("runtime/coordinator.py",), {"Start", "Resume", "Move", "Cancel"}
# who only counts or draws
OBSERVERS = ("runtime/draft_sources.py", "runtime/observe", "sim/replay.py", "orchestrate", "bench")


def looks(tree):
    """The names of the classes that a module looks for."""
    for node in ast.walk(tree):
        match node:
            case ast.MatchClass(cls=ast.Attribute(value=ast.Name(id="ev"), attr=name)):
                yield name
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                yield from (part.attr for part in ast.walk(kinds) if isinstance(part, ast.Attribute))
            case ast.Dict(keys=keys):
                yield from (key.attr for key in keys if isinstance(key, ast.Attribute))


@functools.cache
def places():
    """command -> the files that look for it, observers aside."""
    found = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for command in set(looks(ast.parse(path.read_text()))).intersection(COMMANDS):
            if not name.startswith(OBSERVERS):
                found[command].add(name)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_to_an_instance_is_handled_in_three_places(command):
    """By an instance, by the virtual fleet, and by the journal where it changes what is recorded."""
    files = places()[command]
    for place in (INSTANCE, FLEET):
        assert any(file.startswith(place) for file in files), f"{place} does not know {command}"
    rest = {file for file in files if not file.startswith((*INSTANCE, *FLEET, *JOURNAL))}
    assert rest <= (set(COORDINATOR) if command in ADDED_TO else set()), rest


def test_a_command_travels_as_it_is():
    """To another process in `messages.Command`, and inside one as the argument of `send`: the same union."""
    hints = typing.get_type_hints(messages.Command)
    assert hints["what"] == worker.Message
    assert set(typing.get_args(ev.SampleCommand | ev.InstanceCommand)) < set(typing.get_args(worker.Message))
