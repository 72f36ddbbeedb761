"""Stages 1 and 3: frozen lakes, a task of several turns that is planned on a map (after FrozenLake of Gymnasium).

    _ O _ _      P the policy, G its goal, O a hole, _ ice. A turn is a direction: up, down, left, right; the answer is
    P _ _ G      the map as it is then. The goal ends the episode with reward 1, a hole with 0; the border, or a message
    _ _ O _      that is no direction, costs the turn.

`Lakes` draws the maps, `FrozenLake` plays them. Laws: each map has a way to its goal of `shortest` to `longest` moves;
a draw is pure in its arguments, and never of a map that is held out; nothing slips, so that the same messages give the
same observations. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet

from dora_jax.config import ConfigError
from dora_jax.tasks.environment import EpisodePrompt, Message
from dora_jax.tasks.source import TaskRow, identity_hash, uid_of

PLAYER, GOAL, HOLE, ICE = "P", "G", "O", "_"
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TRIES = 10_000  # maps that are drawn before the sizes asked for count as impossible

Place = tuple[int, int]
Lake = dict[Place, str]  # what each place is; one without an entry is beyond the border


def read(text: str) -> tuple[Lake, Place]:
    """The lake of a map, and where the policy stands on it."""
    lake = {(y, x): square for y, row in enumerate(text.split("\n")) for x, square in enumerate(row.split(" "))}
    start = next(place for place, square in lake.items() if square == PLAYER)
    return lake | {start: ICE}, start


def drawn(lake: Lake, at: Place) -> str:
    """The map of a lake."""
    rows: dict[int, list[str]] = {}
    for place, square in sorted(lake.items()):
        rows.setdefault(place[0], []).append(PLAYER if place == at else square)
    return "\n".join(" ".join(row) for row in rows.values())


def way(lake: Lake, start: Place) -> list[str] | None:
    """A shortest way to the goal; None: there is none."""
    ways: dict[Place, list[str]] = {start: []}
    for place in (found := [start]):
        if lake[place] == GOAL:
            return ways[place]
        for name in MOVES:
            there = moved(lake, place, name)
            if there not in ways and lake[there] != HOLE:
                ways[there] = [*ways[place], name]
                found.append(there)
    return None


def moved(lake: Lake, place: Place, name: str) -> Place:
    there = place[0] + MOVES[name][0], place[1] + MOVES[name][1]
    return there if there in lake else place


class Lakes:
    """Source of maps of `size` x `size` places, of which a share `holes` are holes."""

    name = "frozen_lake"

    def __init__(
        self, *, heldout: int, exclude: AbstractSet[str], size: int = 4, holes: float = 0.25, shortest: int = 2,
        longest: int = 6,
    ):  # fmt: skip
        if size < 2 or not 0 <= holes < 1 or not 1 <= shortest <= longest:
            raise ConfigError(
                f"task.params: size {size}, holes {holes}, ways of {shortest} to {longest} moves make no lake: it has "
                "2 places a side or more, a share of holes below 1, and a way of a move or more"
            )
        self.size, self.holes, self.moves = size, holes, range(shortest, longest + 1)
        self._excluded = set(exclude)
        self.heldout: list[TaskRow] = []
        for i in range(heldout):
            row = self.draw("heldout", 0, i)
            self.heldout.append(row)
            self._excluded.add(row.uid)
        self.heldout_uids = frozenset(row.uid for row in self.heldout)

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        draw = random.Random(identity_hash(self.name, stream, seed, i))
        places = [(y, x) for y in range(self.size) for x in range(self.size)]
        for _ in range(TRIES):
            lake: Lake = {place: HOLE if draw.random() < self.holes else ICE for place in places}
            start, goal = draw.sample(places, 2)
            lake |= {start: ICE, goal: GOAL}
            steps = way(lake, start)
            text = drawn(lake, start)
            if steps is not None and len(steps) in self.moves and uid_of(text) not in self._excluded:
                return TaskRow(uid=uid_of(text), task=self.name, question=text, answer=text)
        raise ConfigError(
            f"task.params: of {TRIES} lakes of size {self.size} with holes {self.holes:g} none has a way of "
            f"{self.moves[0]} to {self.moves[-1]} moves and is not held out"
        )

    def exclude(self, uids: AbstractSet[str]) -> None:
        self._excluded |= uids


class FrozenLake:
    """FrozenLake on random lakes. Reward term `reached`: 1 for the goal."""

    terms = ("reached",)
    replays = True

    @staticmethod
    def worked(prompt: EpisodePrompt, slips: bool) -> list[str]:
        """A shortest way. The slip is one other direction on it, which may end in a hole."""
        lake, place = read(prompt.answer)
        draw, names = random.Random(prompt.seed), list[str]()
        steps = way(lake, place) or []
        slip = draw.randrange(len(steps)) if slips else -1
        while steps:
            name = steps[0]
            if len(names) == slip:
                name = draw.choice([other for other in MOVES if other != name])
            names.append(name)
            place = moved(lake, place, name)
            steps = [] if lake[place] == HOLE else way(lake, place) or []
        return names

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._lake, self._place = read(prompt.answer)
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        name = message["content"].strip()
        if name in MOVES:
            self._place = moved(self._lake, self._place, name)
        if (square := self._lake[self._place]) != ICE:
            return [], True, {"reached": float(square == GOAL)}
        return [{"role": "tool", "content": drawn(self._lake, self._place)}], False, {}

    async def close(self) -> None:
        """Nothing is open."""
