"""Stage 2 without a model: the engine's public surface, where token = f(version, group, index, position).

A test that drives this engine can prove, token by token, which version produced it: stale weights, KV of another
sample or version, and bad migrations all show. No JAX.
Laws: a sample's tokens and length depend on (version, group, index) alone; every position of its KV carries a stamp
of that identity, and a wrong stamp raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dora_jax.config import RolloutSection
from dora_jax.rollout import migrate
from dora_jax.rollout.migrate import InFlightSample, SampledTokens, ended
from dora_jax.rollout.seq import StopStrings
from dora_jax.rollout.shapes import TOP_COLUMNS
from dora_jax.rollout.ticks import TickResult
from dora_jax.types import Sample, SampleId, Sampling, TokenTable, Version

PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd multipliers that mix the four parts of an identity


def mix(version: int, group_id: int, index: int, position: int) -> int:
    """A 32-bit hash of one token's identity."""
    h = 0
    for part, prime in zip((version, group_id, index, position), PRIMES, strict=True):
        h = ((h ^ (part & 0xFFFFFFFF)) * prime) & 0xFFFFFFFF
        h ^= h >> 15
    return h


def spread_length(version: Version, group_id: int, index: int, limit: int) -> int:
    """The default length function: 1 .. limit, long-tailed, by identity."""
    u = mix(version, group_id, index, -1) / 2**32
    return max(1, min(limit, int(limit * u**3) + 1))


@dataclasses.dataclass
class _Running:
    request: InFlightSample
    limit: int  # of its tokens
    length: int  # where it stops
    last: bool  # at its limit it is over, and not only its turn
    out: list[int]
    stamps: list[int]  # its KV
    drawn: list[int] = dataclasses.field(default_factory=list)  # of the tokens sampled here
    started: bool = False


class OracleEngine:
    """The `Engine` of tests. `version_in(params)` reads the version that weights really carry (default: as claimed);
    `turn_length(id, start)`: tokens of the turn that begins there, in the place of `length`."""

    def __init__(
        self,
        section: RolloutSection,
        *,
        eos_ids: tuple[int, ...] = (),
        vocab_limit: int = 256,
        length: Callable[[Version, int, int, int], int] = spread_length,
        turn_length: Callable[[SampleId, int], int] | None = None,
        version_in: Callable[[Any], Version] | None = None,
    ):
        self.section = section
        self.eos_ids = tuple(eos_ids)
        self.vocab_limit = vocab_limit
        self.param_shardings = None
        self._allowed = [token for token in range(vocab_limit) if token not in eos_ids]
        self._length, self._turn_length = length, turn_length
        self._version_in = version_in
        self._weights: dict[Version, Version] = {}
        self._samples: dict[SampleId, _Running] = {}
        self._finished: list[Sample] = []  # not yet handed out, as are those that wait
        self._waiting: list[InFlightSample] = []
        self._stops = StopStrings((), None)
        self._max_context = section.max_prompt_tokens + section.max_new_tokens

    def expected(self, version: Version, group_id: int, index: int, n: int) -> np.ndarray:
        """i32[n]: the first n tokens that `version` samples for (group, index), a stop token not included."""
        return np.array(
            [self._allowed[mix(version, group_id, index, i) % len(self._allowed)] for i in range(n)], np.int32
        )

    # ---------------------------------------------------------- versions

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._weights))

    def warmup(self) -> None:
        """Nothing to compile."""

    def load(self, version: Version, params: Any) -> None:
        if version in self._weights:
            raise RuntimeError(f"version {version} is already loaded")
        if len(self._weights) >= self.section.residents:
            raise RuntimeError(f"cannot load version {version}: {self.section.residents} residents are held")
        self._weights[version] = version if self._version_in is None else self._version_in(params)

    def drop(self, version: Version) -> None:
        users = [id for id, s in self._samples.items() if s.request.version == version]
        if users:
            raise RuntimeError(f"cannot drop version {version}: {len(users)} of its samples run, {users[0]} first")
        del self._weights[version]

    # ----------------------------------------------------------- samples

    @property
    def samples(self) -> tuple[SampleId, ...]:
        """The samples that are here, in the order in which they came."""
        return tuple(self._samples)

    def submit(
        self,
        id: SampleId,
        prompt_ids: Any,
        version: Version,
        max_new_tokens: int,
        turn_tokens: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        self.import_(migrate.begun(id, prompt_ids, version, max_new_tokens, turn_tokens, sampling))

    def import_(self, request: InFlightSample) -> None:
        id = request.id
        if id in self._samples:
            raise RuntimeError(f"{id} is already here")
        if request.version not in self._weights:
            raise RuntimeError(f"{id} needs version {request.version}; loaded: {self.versions}")
        if request.turn_tokens and self._stops.ends_turn(request, self.eos_ids):
            return self._waiting.append(request)
        if request.turn_tokens and migrate.spent(request, self._max_context):
            return self._finished.append(ended(request, "length"))
        start = request.turn_start
        unsampled = len(request.out_ids) - request.sampled
        budget = min(migrate.response_room(request, self._max_context), request.max_new_tokens + unsampled)
        limit = min(budget, start + request.turn_tokens) if request.turn_tokens else budget
        given = len(request.sampling.given) if request.sampling else 0
        first = request.spans[0].version if request.spans else request.version
        if self._turn_length is not None:
            length = self._turn_length(id, start)
        else:
            # each turn has its own
            length = given + self._length(first, id.group_id, id.index + start, limit - start - given)
        out = request.out_ids.tolist()
        stamps = [mix(request.version, *id, i) for i in range(len(request.prompt_ids) + len(out) - 1)]
        came = [] if request.k_pages is None else request.k_pages.reshape(-1)[: request.kv_len].tolist()
        if came[: len(stamps)] != stamps[: len(came)]:
            raise RuntimeError(f"the KV of {id} is not its own at version {request.version}")
        # what came without KV is prefilled
        self._samples[id] = _Running(request, limit, min(start + length, limit), limit == budget, out, stamps)

    def export(self, id: SampleId) -> InFlightSample:
        return self._request(self._samples.pop(id))

    def _request(self, s: _Running) -> InFlightSample:
        stamps = np.array(s.stamps, np.int64).reshape(1, 1, 1, 1, -1)
        request = migrate.with_pages(self._tokens(s), {"k": stamps, "v": stamps})
        return dataclasses.replace(request, kv_len=len(s.stamps), page_size=self.section.page_size)

    def _tokens(self, s: _Running) -> InFlightSample:
        mask = s.request.mask
        return dataclasses.replace(
            migrate.without_pages(s.request),
            out_ids=np.array(s.out, np.int32),
            logprobs=self._logprobs(s),
            mask=None if mask is None else np.concatenate([mask, np.ones(len(s.out) - len(mask), bool)]),
        )

    def with_kept(self, request: InFlightSample) -> InFlightSample:
        """An episode that waits carries its KV: nothing is kept."""
        return request

    def forget(self, id: SampleId) -> None:
        """Nothing is kept."""

    def know(self, id: SampleId, tokens: np.ndarray) -> None:
        """Nothing is drafted."""

    def cancel(self, id: SampleId) -> bool:
        """True where the sample was here."""
        return self._samples.pop(id, None) is not None

    def holds(self, id: SampleId) -> bool:
        return id in self._samples

    def version_of(self, id: SampleId) -> Version:
        return self._samples[id].request.version

    def sampled(self, id: SampleId, start: int = 0, row: int = 0) -> SampledTokens:
        """A running sample's tokens from `start` on."""
        running = self._samples[id]
        out_ids, logprobs = np.array(running.out[start:], np.int32), self._logprobs(running)[start:]
        return SampledTokens(out_ids, logprobs, TokenTable(), self._top(running, start))

    @property
    def idle(self) -> bool:
        return not (self._samples or self._finished or self._waiting)

    def check(self) -> None:
        if self.free_pages < 0:
            raise RuntimeError(f"{-self.free_pages} more pages are used than there are")

    @property
    def free_pages(self) -> int:
        size = self.section.page_size
        running = [s for s in self._samples.values() if s.started]
        return self.section.pages - sum(-(-(len(s.request.prompt_ids) + len(s.out)) // size) for s in running)

    def tick(self) -> TickResult:
        started: list[SampleId] = []
        finished, self._finished = self._finished, []
        waiting, self._waiting = self._waiting, []
        progress, tokens, tops = {}, 0, {}
        for id, s in list(self._samples.items())[: self.section.slots]:
            if not s.started:
                s.started = True
                started.append(id)
        decoded = [(id, s) for id, s in self._samples.items() if s.started]
        for id, s in decoded:
            version, start = self._weights[s.request.version], len(s.out)
            for position in range(start, min(s.length, start + self.section.decode_steps)):
                stops = position + 1 == s.length < s.limit and self.eos_ids
                s.drawn.append(mix(version, *id, position))
                given = s.request.sampling.given if s.request.sampling else ()
                token = self.eos_ids[0] if stops else self._allowed[s.drawn[-1] % len(self._allowed)]
                s.out.append(given[position] if position < len(given) else token)
                s.stamps.append(mix(version, *id, len(s.stamps)))
            tokens += len(s.out) - start
            progress[id] = len(s.out)
            if len(s.out) == s.length:
                early = s.length < s.limit
                if s.request.turn_tokens and (early or not s.last):
                    waiting.append(self._request(s))
                else:
                    finished.append(ended(self._tokens(s), "stop" if early else "length"))
                    if (top := self._top(s, 0)) is not None:
                        tops[id] = top
                del self._samples[id]
        return TickResult(
            started=tuple(started),
            finished=tuple(finished),
            waiting=tuple(waiting),
            progress=progress,
            tokens=tokens,
            free_pages=self.free_pages,
            rows=0 if started else len(decoded),
            tops=tops,
        )

    # ----------------------------------------------------------- private

    def _top(self, s: _Running, start: int) -> np.ndarray | None:
        """The most likely token at each is the sampled one, and those that follow it in the vocabulary are less and
        less so."""
        if s.request.sampling is None or not s.request.sampling.top_logprobs:
            return None
        ranks = np.arange(TOP_COLUMNS // 2)
        ids = (np.array(s.out[start:], np.int32)[:, None] + ranks) % self.vocab_limit
        logprobs = self._logprobs(s)[start:, None] - ranks.astype(np.float32)
        return np.concatenate([ids.astype(np.int32), logprobs.view(np.int32)], axis=1)

    def _logprobs(self, s: _Running) -> np.ndarray:
        drawn = np.array([stamp % 1000 for stamp in s.drawn], np.float32)
        return np.concatenate([s.request.logprobs, -1.0 - drawn / 1000])
