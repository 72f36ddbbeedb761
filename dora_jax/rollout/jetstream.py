"""Stage 2, optional: one version of the engine as `jetstream.engine.engine_api.Engine`, for JetStream's orchestrator.

Needs the extra `jetstream`: google-jetstream 0.2.2 without its own dependencies (it asks for TensorFlow through
seqio), plus grpcio, shortuuid and prometheus-client:
  pip install "dora_jax[jetstream]" && pip install --no-deps google-jetstream==0.2.2
The unrelated package that PyPI calls `jetstream` has the same import name; never install it.
Its API has no log-probs, versions, migration or release of a slot; callers that need them use `Slots`. A slot is
freed when the next sample is inserted; a request beyond its own `max_tokens` decodes on until then.

Stage 2: the engine by JetStream's verbs, slot by slot, for callers that schedule for themselves.

Consumes prompts tagged with a version and slot numbers; produces one array of results a `generate`. The vocabulary is
that of google/JetStream's last public head, with a version and a sample's identity on every call that needs one:
  prefill      computes a prompt's KV             insert        gives it to one slot
  bulk_insert  to several: a group shares it      generate      some tokens for every slot, versions side by side
  free_resource  returns what a slot holds
Laws: a slot decodes one sample; what it samples depends on the sample's identity alone, as everywhere in the engine;
the token of a sample that ended stays in its last result, and the slot is free from then on.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
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
        self.max_concurrent_decodes = engine.shapes.slots
        self._running: dict[int, tuple[SampleId, int]] = {}  # slot -> sample, tokens of it handed out

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
            tokens, logprobs, *_ = sampled_from(done, seen, 0) if done else self.engine.sampled(id, seen)
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


GROUP = 0  # all requests are samples of one group: their identity is their number


def import_jetstream() -> Any:
    """`jetstream.engine.engine_api`, with empty stand-ins for what it imports and does not use here."""
    if not hasattr(jax, "tree_map"):
        vars(jax)["tree_map"] = jax.tree.map  # removed from jax; JetStream's orchestrator kills its process without it
    stand_ins: dict[str, dict[str, Any]] = {
        "seqio": {},
        "seqio.vocabularies": {"Vocabulary": object, "SentencePieceVocabulary": object},
        "tiktoken": {},
        "tiktoken.load": {"load_tiktoken_bpe": None},
    }
    for name, attributes in stand_ins.items():
        if name.partition(".")[0] not in sys.modules and importlib.util.find_spec(name.partition(".")[0]):
            continue  # the real one is installed
        if name not in sys.modules:
            module = types.ModuleType(name)
            vars(module).update(attributes)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    from jetstream.engine import engine_api

    return engine_api


def new_adapter(engine: Engine, version: Version, *, max_new_tokens: int, bos_id: int, pad_id: int = 0) -> Any:
    """An `engine_api.Engine` that decodes with this version, one token a slot and call.

    `bos_id`: what JetStream puts before every request's tokens, whether the caller wants it or not.
    """
    engine_api = import_jetstream()
    base: Any = engine_api.Engine

    class NoTokenizer:
        """Ids in, ids out: requests carry token ids."""

        stop_tokens: ClassVar = set(engine.eos_ids)
        bos_id: int
        pad_id: int
        eos_id = engine.eos_ids[0] if engine.eos_ids else -1

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    NoTokenizer.bos_id, NoTokenizer.pad_id = bos_id, pad_id

    class Adapter(_Adapter, base):
        result_tokens = engine_api.ResultTokens
        tokenizer = NoTokenizer

    return Adapter(engine, version, max_new_tokens)


class _Adapter:
    """JetStream calls `prefill` and `insert`/`generate` from two threads; the engine is used under one lock."""

    result_tokens: Any  # JetStream's own class
    tokenizer: Any
    samples_per_slot = 1
    colocated_cpus = None
    mesh: Any = None  # as those below: of an instance, in the place of JetStream's properties
    max_concurrent_decodes = max_prefill_length = 0

    def __init__(self, engine: Engine, version: Version, max_new_tokens: int):
        self.mesh, self.max_concurrent_decodes = engine.mesh, engine.shapes.slots
        # the longest of JetStream's own lengths, powers of two from 16, that fits a prompt
        self.max_prefill_length = 1 << (engine.section.max_prompt_tokens.bit_length() - 1)
        self._slots = Slots(engine)
        self._version = version
        self._max_new_tokens = max_new_tokens
        self._lock = threading.Lock()
        self._requests = itertools.count()
        self._ready: dict[int, list[int]] = {}  # slot -> tokens not handed out yet
        self._length: dict[int, int] = {}  # slot -> tokens handed out
        self._live: set[int] = set()  # slots that may get more tokens

    def load_params(self) -> Version:
        """Weights are the engine's; what JetStream passes round is their version."""
        return self._version

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length, **_) -> Any:
        if existing_prefix is not None:
            raise NotImplementedError("a prefix is shared by its tokens here; existing_prefix is not taken")
        with self._lock:
            return self._slots.prefill(version=params, tokens=np.asarray(padded_tokens)[: int(true_length)])

    def insert(self, prefix, decode_state, slot: int) -> Any:
        with self._lock:
            self._slots.free_resource(slot)
            id = SampleId(GROUP, next(self._requests))
            self._slots.insert(prefix, slot, id=id, max_new_tokens=self._max_new_tokens)
            self._slots.engine.release(prefix)
        self._ready[slot], self._length[slot] = [], 0
        self._live.add(slot)
        return decode_state

    def generate(self, params, decode_state) -> tuple[Any, Any]:
        """One token of every slot; a slot without one has ended. Ticks until each has one to give."""
        while any(not self._ready[slot] for slot in self._live):
            with self._lock:
                results, _ = self._slots.generate()
                ended = {slot for slot in self._live if not self._slots.holds(slot)}
            for slot in self._live:
                new = results.get_result_at_slot(slot)
                self._ready[slot] += new.tokens[new.valid].tolist()
            self._live -= ended
        data = np.zeros((self.max_concurrent_decodes, 3), np.int32)  # token, valid, length
        for slot, tokens in self._ready.items():
            if tokens:
                self._length[slot] += 1
                data[slot] = tokens.pop(0), 1, self._length[slot]
        return decode_state, self.result_tokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
        )

    def _nothing(self) -> None:
        """The state is the engine's; a prefix is a handle, so nothing is sent; requests carry token ids."""

    init_decode_state = get_prefix_destination_sharding = get_tokenizer = _nothing

    def build_tokenizer(self, metadata) -> Any:
        return self.tokenizer()
