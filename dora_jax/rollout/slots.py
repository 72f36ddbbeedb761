"""Stage 2: the engine by JetStream's verbs, slot by slot, for callers that schedule for themselves.

Consumes prompts tagged with a version and slot numbers; produces one array of results a `generate`. The vocabulary is
that of google/JetStream's last public head, with a version and a sample's identity on every call that needs one:
  prefill      computes a prompt's KV             insert        gives it to one slot
  bulk_insert  to several: a group shares it      generate      some tokens for every slot, versions side by side
  free_resource  returns what a slot holds
Laws: a slot decodes one sample; what it samples depends on the sample's identity alone, as everywhere in the engine;
the token of a sample that ended stays in its last result, and the slot is free from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import sampled_from
from dora_jax.rollout.pages import Prefix
from dora_jax.types import Sample, SampleId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotData:
    tokens: np.ndarray  # i32[N]
    valid: np.ndarray  # bool[N]: the first ones, as many as there are
    logprobs: np.ndarray  # f32[N]
    length: int  # tokens sampled so far, these included


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTokens:
    """Everything that one `generate` says, in one array."""

    data: np.ndarray  # i32[slots, 3 * steps + 1]: tokens | valid | log-prob bits | length
    steps: int  # the most tokens a slot may have in it

    def get_result_at_slot(self, slot: int) -> SlotData:
        tokens, valid, bits, length = np.split(self.data[slot], np.arange(1, 4) * self.steps)
        return SlotData(tokens=tokens, valid=valid > 0, logprobs=bits.view(np.float32), length=int(length[0]))


class Slots:
    """One engine whose samples are all started here."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._running: dict[int, tuple[SampleId, int]] = {}  # slot -> sample, tokens of it handed out

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.shapes.slots

    def prefill(self, *, version: Version, tokens: Any) -> Prefix:
        return self.engine.prefill(tokens, version)

    def insert(self, prefix: Prefix, slot: int, *, id: SampleId, max_new_tokens: int) -> None:
        """Starts one sample of this prompt; the prefix stays the caller's, to insert again or to release."""
        if not 0 <= slot < self.max_concurrent_decodes:
            raise ValueError(f"slot {slot} is none of the {self.max_concurrent_decodes}")
        if slot in self._running:
            raise RuntimeError(f"slot {slot} holds {self._running[slot][0]}; free it before {id} goes there")
        self.engine.submit(id, prefix.prompt_ids, prefix.version, max_new_tokens)
        self._running[slot] = id, 0

    def bulk_insert(
        self, prefix: Prefix, slots: Sequence[int], *, ids: Sequence[SampleId], max_new_tokens: int
    ) -> None:
        for slot, id in zip(slots, ids, strict=True):
            self.insert(prefix, slot, id=id, max_new_tokens=max_new_tokens)

    def generate(self) -> tuple[ResultTokens, tuple[Sample, ...]]:
        """One tick: (new tokens of every slot, the samples that ended, whose slots are free now)."""
        finished = {sample.id: sample for sample in self.engine.tick().finished}
        steps = self.engine.shapes.reach
        data = np.zeros((self.max_concurrent_decodes, 3 * steps + 1), np.int32)
        for slot, (id, seen) in list(self._running.items()):
            done = finished.get(id)
            tokens, logprobs, _ = sampled_from(done, seen, 0) if done else self.engine.sampled(id, seen)
            new = len(tokens)
            data[slot, :new] = tokens
            data[slot, steps : steps + new] = 1
            data[slot, 2 * steps : 2 * steps + new] = logprobs.view(np.int32)
            data[slot, -1] = seen + new
            self._running[slot] = id, seen + new
            if done:
                del self._running[slot]
        return ResultTokens(data=data, steps=steps), tuple(finished.values())

    def holds(self, slot: int) -> bool:
        return slot in self._running

    def free_resource(self, slot: int) -> None:
        """Ends the slot's sample, if it has one."""
        if slot in self._running:
            self.engine.cancel(self._running.pop(slot)[0])
