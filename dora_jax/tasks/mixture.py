"""Stage 1: several sources of prompts in one stream, each with its share of it.

    {"sums": weight 2, "games": weight 1}  ->  sums games sums | sums games sums | ...

Consumes the entries of `task.mix` and their sources; produces a source. Laws: the task of prompt i is `cycle[i % len]`,
whatever the seed; the mix takes each source's own stream in order and skips none of its prompts; no source trains on a
prompt that another source holds out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from dora_jax import types

if TYPE_CHECKING:
    from dora_jax.config.task import TaskPart
    from dora_jax.tasks.source import Source, TaskRow

OWN = (
    "name",
    "params",
    "path",
    "heldout_path",
    "prompt_column",
    "answer_column",
    "extract",
)  # fields of a section that each entry has for itself


def cycle_of(mix: Mapping[str, TaskPart]) -> tuple[str, ...]:
    """The order of tasks in one turn; () for no mix."""
    return types.cycle_of({name: part.weight for name, part in mix.items()})


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Errors inside name the fields of this entry of the mix."""
    from dora_jax.config import ConfigError  # which asks this file for what may be wrong with a mix

    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [
                f"task.mix.{name}.{problem.removeprefix('task.')}"
                if problem.partition(":")[0].partition(".")[2].partition(".")[0] in OWN
                else problem
                for problem in error.problems
            ]
        ) from error
    except ValueError as error:
        raise ConfigError(f"task.mix.{name}.path: {error}") from error


class Mixture:
    """`Source` of the entries of a mix; `open_one(name, held out, excluded uids)` opens each."""

    def __init__(
        self,
        mix: Mapping[str, TaskPart],
        open_one: Callable[[str, int, AbstractSet[str]], Source],
        heldout: int,
        exclude: AbstractSet[str],
    ):
        self.name = "the mix of " + ", ".join(sorted(mix))
        self._cycle = cycle_of(mix)
        self._weights = {name: part.weight for name, part in mix.items()}
        self._earlier = [self._cycle[:at].count(name) for at, name in enumerate(self._cycle)]  # turns of the same task
        self._sources: dict[str, Source] = {}
        uids = frozenset(exclude)
        for order, name in enumerate(sorted(mix)):
            among = len(mix)
            source = self._sources[name] = open_one(name, heldout // among + (order < heldout % among), uids)
            uids |= source.heldout_uids
        for source in self._sources.values():
            source.exclude(uids)
        self.heldout_uids = uids - exclude
        parts = self._sources.items()
        # The first row of each list, then the second of each, so that every prefix is a fair part of all lists.
        lists = [[dataclasses.replace(row, part=name) for row in source.heldout] for name, source in parts]
        longest = max(map(len, lists))
        self.heldout = [rows[i] for i in range(longest) for rows in lists if i < len(rows)]

    def exclude(self, uids: AbstractSet[str]) -> None:
        for source in self._sources.values():
            source.exclude(uids)

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        turn, at = divmod(i, len(self._cycle))
        name = self._cycle[at]
        row = self._sources[name].draw(f"{stream} {name}", seed, turn * self._weights[name] + self._earlier[at])
        return dataclasses.replace(row, part=name)
