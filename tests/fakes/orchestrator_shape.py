"""What the orchestrator's world is made of: its size and faults, its samples, its engines."""

from __future__ import annotations

import dataclasses
import hashlib

from dora_jax.types import SampleId


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The body: sizes, speeds and faults. Shares are probabilities of one sample, group, move or
    instance-incarnation."""

    instances: tuple[tuple[int, float, int], ...] = ((4, 1.0, 1),)  # slots, speed, residents
    pages: int = 64
    page_size: int = 16
    train_s: float = 2.0
    load_s: float = 0.3
    move_s: float = 0.2
    score_s: float = 0.1
    token_s: float = 0.02
    period_s: float = 0.5
    filtered: float = 0.0
    failed: float = 0.0  # after all samples
    refused: float = 0.0  # right after Start: the prompt is too long
    move_fails: float = 0.0
    reports_pages: bool = False  # instances say how many pages are free; a small `pages` then makes pressure
    prompt_tokens: int = 16
    turns: int = 1  # of a sample, at most: between two of them it waits for its environment
    environment_s: float = 1.0  # mean wait
    breaks: float = 0.0  # an environment fails its group
    deaths: float = 0.0  # an instance dies within its first `life_s` after coming up
    uptime_s: float = 10.0
    back_s: float = 3.0  # a dead instance returns after this time; < 0: never
    seed: int = 0


def chance(*key: object) -> float:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@dataclasses.dataclass
class Run:
    """One sample as an engine has it."""

    id: SampleId
    version: int
    tokens: int
    length: int
    started_s: float
    epoch: int
    began: bool = False
    turn: int = 1
    turns: int = 1
    attempt: int = 0  # that placed it where it is

    @property
    def stop(self) -> int:
        """Tokens at which its present turn ends."""
        return max(1, self.length * self.turn // self.turns)


class Engine:
    def __init__(self, slots: int, speed: float, residents: int, incarnation: int):
        self.incarnation = incarnation
        self.slots, self.speed, self.residents = slots, speed, residents
        self.versions: list[int] = []
        self.loading: int | None = None
        self.paused = False
        self.runs: dict[SampleId, Run] = {}
