"""What there is to do: the lengths, turns, waits and fates of samples, as pure functions of (seed, group, index).

Counter-based: nothing here remembers what was asked before, so every mode faces the same work in whatever order it
asks. Lengths of siblings share a part of their deviation (`group_correlation`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from statistics import NormalDist

from dora_jax.base.config_tree import nearest
from dora_jax.config import ConfigError
from dora_jax.costs.recording import recorded_work
from dora_jax.sim.config import WorkloadSection
from dora_jax.types import GroupId, SampleId, cycle_of, issued_first_as

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()
_QUANTILES = 2048  # points at which a distribution's mean is taken
KEPT = 4096  # groups of which an answer is kept: one is asked for each of their samples

# streams: one for every question that is asked of the same sample
LENGTH, PROMPT, TURNS, ENVIRONMENT, FILTERED, FAILED, FAULT, MOVE = 1, 2, 3, 4, 5, 6, 8, 9


def uniform(seed: int, stream: int, *counters: int) -> float:
    """A number in (0, 1) that depends on its arguments only (splitmix64 over each)."""
    x = (seed * 0x9E3779B97F4A7C15 + stream) & _MASK
    for counter in (0, *counters):
        x = (x + (counter & _MASK) * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return ((x >> 11) + 0.5) / (1 << 53)


def normal(seed: int, stream: int, *counters: int) -> float:
    return _NORMAL.inv_cdf(uniform(seed, stream, *counters))


@dataclasses.dataclass(slots=True)
class Turn:
    """Tokens to sample, then a wait for the environment (0 s: the response ends) and what its answer appends."""

    tokens: int
    environment_s: float
    observation_tokens: int


class Workload:
    def __init__(self, section: WorkloadSection):
        self._seed = section.seed
        self._cycle = cycle_of(weights(section)) or ("",)
        self._tasks: dict[str, _LengthDistribution] = {}
        known = {field.name for field in dataclasses.fields(WorkloadSection)}
        for task, part in (section.mix or {"": {}}).items():
            changes = {name: value for name, value in part.items() if name not in ("weight", "limit")}
            for name in sorted(set(changes) - known):
                raise ConfigError(f"workload.mix.{task}.{name}: unknown field; the nearest is {nearest(name, known)}")
            self._tasks[task] = _LengthDistribution(dataclasses.replace(section, mix={}, **changes))
        self._recorded: dict[SampleId, int] = {}
        self._untrainable: frozenset[GroupId] | None = None
        if section.distribution == "journal":
            self._recorded, self._untrainable = recorded_work(section.path)

    @functools.lru_cache(maxsize=KEPT)  # noqa: B019 (a workload is kept as long as its simulation)
    def prompt_tokens(self, group: GroupId) -> int:
        group = issued_first_as(group)
        section = self._task(group).section
        mu = math.log(section.prompt_tokens) - section.prompt_sigma**2 / 2
        length = math.exp(mu + section.prompt_sigma * normal(self._seed, PROMPT, group))
        return max(1, min(section.max_prompt_tokens, round(length)))

    def length(self, id: SampleId) -> int:
        """Response tokens that the policy samples."""
        id = SampleId(issued_first_as(id.group_id), id.index)
        if id in self._recorded:
            return self._recorded[id]
        task = self._task(id.group_id)
        shared = task.section.group_correlation
        z = math.sqrt(1 - shared) * normal(self._seed, LENGTH, *id)
        if shared:
            z += math.sqrt(shared) * self._of_siblings(id.group_id)
        return task.length(z)

    def turns(self, id: SampleId) -> list[Turn]:
        """The response as it runs; one turn unless the task has an environment."""
        id = SampleId(issued_first_as(id.group_id), id.index)
        task = self._task(id.group_id).section
        length = self.length(id)
        if task.turns <= 1:
            return [Turn(length, 0.0, 0)]
        extra = math.log(uniform(self._seed, TURNS, *id)) / math.log(1 - 1 / task.turns)  # geometric
        count = min(length, 1 + int(extra))
        turns = []
        for i in range(count):
            tokens = length * (i + 1) // count - length * i // count
            last = i == count - 1
            answer_s = task.environment_s * math.exp(task.environment_sigma * normal(self._seed, ENVIRONMENT, *id, i))
            turns.append(Turn(tokens, 0.0 if last else answer_s, 0 if last else task.observation_tokens))
        return turns

    def filtered(self, group: GroupId) -> bool:
        group = issued_first_as(group)
        if self._untrainable is not None:
            return group in self._untrainable
        return uniform(self._seed, FILTERED, group) < self._task(group).section.filtered_share

    def failed(self, group: GroupId) -> bool:
        group = issued_first_as(group)
        return uniform(self._seed, FAILED, group) < self._task(group).section.failed_share

    @functools.lru_cache(maxsize=KEPT)  # noqa: B019 (a workload is kept as long as its simulation)
    def _of_siblings(self, group: GroupId) -> float:
        return normal(self._seed, LENGTH, group, -1)

    def task(self, group: GroupId) -> str:
        """The name of the group's task in the mix."""
        return self._cycle[issued_first_as(group) % len(self._cycle)]

    def _task(self, group: GroupId) -> _LengthDistribution:
        return self._tasks[self.task(group)]


class _LengthDistribution:
    """One length distribution: quantile(z) of a standard normal deviate, scaled to its mean, cut at the limit."""

    def __init__(self, section: WorkloadSection):
        self.section = section
        self._file: list[float] = []
        if section.distribution == "file":
            # Sorted lengths from a JSON list or from lines that begin with a number.
            path = section.path
            if not Path(path).is_file():
                raise ConfigError(f"workload.path: {path} does not exist")
            text = Path(path).read_text()
            try:
                is_json = text.lstrip().startswith("[")
                rows = json.loads(text) if is_json else [line.split()[0] for line in text.splitlines() if line.strip()]
                lengths = sorted(float(length) for length in rows)
            except ValueError as error:
                raise ConfigError(f"workload.path: {path} is not a list of lengths: {error}") from error
            if not lengths or lengths[0] < 1:
                raise ConfigError(f"workload.path: {path} needs lengths of at least 1 token")
            self._file = lengths
        elif section.distribution == "journal":
            self._file = sorted(recorded_work(section.path)[0].values())
        self._scale = 1.0
        if section.mean_tokens and section.distribution != "journal":
            # The scale at which the mean of the cut distribution is `mean`.
            mean = section.mean_tokens
            limit = self.section.max_new_tokens
            points = [self._quantile(_NORMAL.inv_cdf((i + 0.5) / _QUANTILES)) for i in range(_QUANTILES)]
            low, high = 0.0, limit / points[0]
            if not 1 <= mean < limit:
                raise ConfigError(f"workload.mean_tokens: {mean:g} is not between 1 and max_new_tokens, {limit}")
            for _ in range(60):
                scale = (low + high) / 2
                if sum(min(limit, scale * point) for point in points) < mean * _QUANTILES:
                    low = scale
                else:
                    high = scale
            self._scale = high

    def length(self, z: float) -> int:
        return max(1, min(self.section.max_new_tokens, round(self._scale * self._quantile(z))))

    def _quantile(self, z: float) -> float:
        section = self.section
        if section.distribution == "lognormal":
            return math.exp(section.sigma * z)
        u = _NORMAL.cdf(z)
        if self._file:
            return self._file[int(u * len(self._file))]
        body = 1 - section.tail_share
        if u <= body:
            return math.exp(section.sigma * z)
        start = math.exp(section.sigma * _NORMAL.inv_cdf(body))
        return start * ((1 - u) / section.tail_share) ** (-1 / section.tail_alpha)


def weights(section: WorkloadSection) -> dict[str, int]:
    return {name: int(part.get("weight", 1)) for name, part in section.mix.items()}


def limits(section: WorkloadSection) -> tuple[tuple[str, float], ...]:
    """The limit of each task of the mix, where one has a limit of its own."""
    return tuple((name, float(part["limit"])) for name, part in sorted(section.mix.items()) if "limit" in part)
