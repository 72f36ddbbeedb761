"""Environments of a paced run: the waits of the simulator's workload, in real seconds at the run's pace.

`PacedEnvironments` answers beside the engines, as those of a run do: an episode that waits holds no slot. `HoldingEngine`
is the rival: nobody hears of the wait, and the sample keeps its slot and its KV until the environment has answered.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.rollout.migrate import InFlightSample, SampledTokens, ended, observed
from dora_jax.rollout.oracle import OracleEngine
from dora_jax.rollout.ticks import TickResult
from dora_jax.sim.workload import Turn, Workload
from dora_jax.types import EpisodeEnded, EpisodeSoFar, Observed, Prompt, SampleId, TokenTable


class TurnsOf:
    """Where each turn of a sample begins, and what follows it."""

    def __init__(self, work: Workload):
        self._work = work

    def length(self, id: SampleId, start: int) -> int:
        """Tokens of the turn that begins behind `start` tokens of the response."""
        return self._at(id, start)[1].tokens

    def behind(self, id: SampleId, tokens: int) -> Turn | None:
        """The turn whose end these tokens of the response are, with its wait; None: the last one."""
        turns = self._work.turns(id)
        before = 0
        for turn in turns[:-1]:
            before += turn.tokens
            if tokens <= before:
                return turn
            before += turn.observation_tokens
        return None

    def _at(self, id: SampleId, start: int) -> tuple[int, Turn]:
        turns, before = self._work.turns(id), 0
        for turn in turns[:-1]:
            if start < before + turn.tokens + turn.observation_tokens:
                return before, turn
            before += turn.tokens + turn.observation_tokens
        return before, turns[-1]


class PacedEnvironments:
    """`Environments`: an answer of zeros after the modelled wait."""

    def __init__(self, turns: TurnsOf, pace: float):
        self._turns, self._pace = turns, pace
        self._due: list[tuple[float, int, SampleId]] = []
        self._asked: dict[SampleId, tuple[int, Observed | EpisodeEnded]] = {}
        self._numbers = 0

    def open(self, id: SampleId, prompt: Prompt) -> None:
        self._answer(id, Observed(id=id, token_ids=np.zeros(0, np.int32)), 0.0)

    def turn(self, prompt: Prompt, told: EpisodeSoFar) -> None:
        turn = self._turns.behind(told.id, len(told.mask))
        if turn is None:
            self._answer(told.id, EpisodeEnded(id=told.id, terms={}), 0.0)
        else:
            said = Observed(id=told.id, token_ids=np.zeros(turn.observation_tokens, np.int32))
            self._answer(told.id, said, turn.environment_s * self._pace)

    def drop(self, id: SampleId) -> dict[str, float]:
        self._asked.pop(id, None)
        return {}

    def poll(self) -> Sequence[Observed | EpisodeEnded]:
        found, now = [], time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, number, id = heapq.heappop(self._due)
            if self._asked.get(id, (0, None))[0] == number:
                found.append(self._asked.pop(id)[1])
        return found

    def stats(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._asked.clear()

    def _answer(self, id: SampleId, answer: Observed | EpisodeEnded, seconds: float) -> None:
        self._numbers += 1
        self._asked[id] = self._numbers, answer
        heapq.heappush(self._due, (time.monotonic() + seconds, self._numbers, id))


class HoldingEngine:
    """The Engine seam around an oracle whose samples wait in their slots. due_s: of every engine of the run, when each
    wait is over, so that a sample that moves waits no longer."""

    def __init__(self, engine: OracleEngine, turns: TurnsOf, pace: float, due_s: dict[tuple[SampleId, int], float]):
        self.engine = engine
        self._turns, self._pace, self._due_s = turns, pace, due_s
        self._held: dict[SampleId, InFlightSample] = {}
        self._slots = engine.section.slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def idle(self) -> bool:
        return self.engine.idle and not self._held

    def tick(self) -> TickResult:
        now, over = time.monotonic(), []
        for id, held in list(self._held.items()):
            if self._due(held) <= now:
                del self._held[id]
                turn = self._turns.behind(id, len(held.out_ids))
                if turn is None:
                    over.append(ended(held, "stop"))
                else:
                    self.engine.import_(observed(held, np.zeros(turn.observation_tokens, np.int32)))
        free = max(0, self._slots - len(self._held))
        self.engine.section = dataclasses.replace(self.engine.section, slots=free)
        if self.engine.idle and not over and self._held:
            time.sleep(max(0.0, min(map(self._due, self._held.values())) - now))
        result = self.engine.tick()
        self._held |= {held.id: held for held in result.waiting}
        return dataclasses.replace(result, waiting=(), finished=(*result.finished, *over))

    @property
    def samples(self) -> tuple[SampleId, ...]:
        return (*self.engine.samples, *self._held)

    def holds(self, id: SampleId) -> bool:
        return id in self._held or self.engine.holds(id)

    def version_of(self, id: SampleId) -> int:
        return self._held[id].version if id in self._held else self.engine.version_of(id)

    def sampled(self, id: SampleId, start: int = 0, row: int = 0) -> SampledTokens:
        if id not in self._held:
            return self.engine.sampled(id, start, row)
        held = self._held[id]
        return SampledTokens(held.out_ids[start:], held.logprobs[start:], TokenTable())

    def export(self, id: SampleId) -> InFlightSample:
        return self._held.pop(id) if id in self._held else self.engine.export(id)

    def cancel(self, id: SampleId) -> bool:
        return self._held.pop(id, None) is not None or self.engine.cancel(id)

    def _due(self, held: InFlightSample) -> float:
        turn = self._turns.behind(held.id, len(held.out_ids))
        wait_s = turn.environment_s * self._pace if turn else 0.0
        return self._due_s.setdefault((held.id, len(held.out_ids)), time.monotonic() + wait_s)
