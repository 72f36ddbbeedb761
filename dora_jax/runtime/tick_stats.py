"""What one engine tick did, in the units of a cost model: decode steps, their batches and context, tokens of prefill.

Consumes what goes into an engine and its tick results; keeps prompt and progress of every sample that is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora_jax.rollout.ticks import TickResult
from dora_jax.types import SampleId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    steps: int  # decode steps
    batches: tuple[float, ...]  # mean samples in a step, of each version: the engine decodes them in a call each
    context: float  # token-steps: tokens of KV that the steps read, summed
    prefills: tuple[int, ...]  # tokens of each sample that was prefilled

    @property
    def batch(self) -> float:
        """Mean samples in a step, of all versions."""
        return sum(self.batches)


class Account:
    def __init__(self) -> None:
        self._prompts: dict[SampleId, int] = {}
        self._versions: dict[SampleId, Version] = {}
        self._tokens: dict[SampleId, int] = {}  # sampled so far
        self._to_prefill: dict[SampleId, int] = {}

    def enter(self, id: SampleId, version: Version, prompt: int, tokens: int = 0, cached: int = 0) -> None:
        self._prompts[id], self._versions[id], self._tokens[id] = prompt, version, tokens
        if not cached:
            self._to_prefill[id] = prompt + tokens

    def leave(self, id: SampleId) -> None:
        for known in (self._prompts, self._versions, self._tokens, self._to_prefill):
            known.pop(id, None)

    def of(self, result: TickResult) -> Work:
        """Samples that grew for the first time since they came without KV were prefilled in this tick."""
        prefills = tuple(self._to_prefill.pop(id) for id in result.progress if id in self._to_prefill)
        steps, context = 0, 0.0
        grown: dict[Version, int] = {}
        for id, tokens in result.progress.items():
            new = tokens - self._tokens[id]
            self._tokens[id] = tokens
            version = self._versions[id]
            steps, grown[version] = max(steps, new), grown.get(version, 0) + new
            context += new * (self._prompts[id] + tokens - new / 2)
        for sample in result.finished:
            self.leave(sample.id)
        batches = tuple(tokens / steps for tokens in grown.values() if tokens)
        return Work(steps=steps, batches=batches, context=context, prefills=prefills)
