"""What the coordinator knows of samples outside the engines; it uses all of this on the main thread.

`SampleRegistry` has the groups that are under way, parked samples and recorded tokens; `KeptKV` has which instance
keeps the KV of an episode that waits.

Consumes Start, finished and parked samples, and what a restart recovered; produces the prompt of a Start, the group
whose last sample has finished, and the sample of a Resume. Laws: a Resume
goes on from the tokens that an engine gave, else from those of the journal; a group that is not here is trained,
filtered, failed or given up, and what comes late for it is dropped; nothing is here of a group that was discarded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.snapshot import Outstanding
from dora_jax.rollout.migrate import InFlightSample, count_rows, ended, observed, retagged, sampled_from
from dora_jax.runtime.common.seams import Prompts, RolloutWorker
from dora_jax.runtime.common.worker import ForgetSample, Held
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import OBSERVED, REWRITTEN, Partial
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.types import (
    Branch,
    GroupId,
    InstanceId,
    Observed,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    TokenTable,
    Version,
)


@dataclasses.dataclass
class OpenGroup:
    """A group from its first Start until it is trained, filtered, failed or cancelled."""

    prompt: Prompt
    done: dict[int, Sample] = dataclasses.field(default_factory=dict)
    submitted: tuple[Sample, ...] = ()  # what the scorer was handed


class SampleRegistry:
    def __init__(self, task: Prompts):
        self.groups: dict[GroupId, OpenGroup] = {}
        self._task = task
        self._parked: dict[SampleId, Held] = {}  # out of the engines by Park, or by an instance that
        # left; a Sample: it finished while no controller listened
        self._branches: dict[SampleId, list[tuple[Sample, int]]] = {}  # what a rewriting ended; the tokens that stayed
        self.payloads = PayloadState()  # samples of a lost instance go on with its tokens; only read here
        self._turns: dict[SampleId, dict[str, Any]] = {}  # of an episode whose turn differs from its prompt's
        self._temperatures: dict[SampleId, list[float]] = {}  # of an episode's turns; 0: the run's
        self._recorded: dict[SampleId, Version] = {}  # begun under an earlier process, and not asked for yet

    def adopt(self, outstanding: Outstanding, payloads: PayloadState) -> None:
        """Opens the groups that an earlier process left."""
        self.payloads = payloads
        self._recorded = dict(outstanding.recorded)
        for group_id in outstanding.groups:
            try:
                self.opened(group_id).done.update(payloads.samples.get(group_id, {}))
            except PromptTooLong:
                continue  # no sample of it has started: its Start will be refused
        for group_id, group in payloads.scored.items():
            self.opened(group_id).submitted = group.samples

    def retained(self) -> set[GroupId]:
        """Groups of which anything is here."""
        samples = (*self._parked, *self._branches, *self._recorded)
        return {*self.groups, *(id.group_id for id in samples)}

    def opened(self, group_id: GroupId) -> OpenGroup:
        """PromptTooLong: the group cannot start."""
        if group_id not in self.groups:
            self.groups[group_id] = OpenGroup(self._task.prompt_at(group_id))
        return self.groups[group_id]

    def finished(self, sample: Sample, group_size: int) -> OpenGroup | None:
        """The sample's group, if this was the last sample of it."""
        group = self.groups.get(sample.id.group_id)
        self._turns.pop(sample.id, None)
        self._temperatures.pop(sample.id, None)
        if group is None:
            return None  # it was cancelled
        if sample.id.index in group.done:
            raise RuntimeError(f"sample {sample.id} finished twice")
        group.done[sample.id.index] = sample
        return group if len(group.done) == group_size else None

    def cancel(self, ids: Sequence[SampleId]) -> None:
        """Forgets these samples and their groups."""
        for id in ids:
            self._parked.pop(id, None)
            self._branches.pop(id, None)
            self._turns.pop(id, None)
            self._temperatures.pop(id, None)
            self._recorded.pop(id, None)
            self.groups.pop(id.group_id, None)

    def forget(self, id: SampleId) -> None:
        """The sample starts. Of one that had begun on an instance in quarantine nothing is left, not even its end."""
        self._parked.pop(id, None)
        self._branches.pop(id, None)
        recorded = self.payloads.samples.get(id.group_id, {})
        if id.group_id not in self.groups and recorded:  # it was scored as a whole, and forgotten
            self.opened(id.group_id).done.update(recorded)
        group = self.groups.get(id.group_id)
        if group is not None and group.done.pop(id.index, None) is not None:
            group.submitted = ()

    def park(self, sample: InFlightSample) -> None:
        if sample.id.group_id in self.groups:
            self._parked[sample.id] = sample

    def resume(self, id: SampleId, version: Version) -> Held:
        """The sample as it goes on at this version; a Sample: it has finished."""
        self._recorded.pop(id, None)
        held = self._parked.pop(id, None) or self._from_journal(id, version)
        return held if isinstance(held, Sample) else retagged(held, version)

    def waiting(self, id: SampleId) -> InFlightSample | None:
        """A sample that is parked here, and not asked for yet. None: it was cancelled."""
        held = self._parked.get(id) if id.group_id in self.groups else None
        return None if isinstance(held, Sample) else held

    def owed(self, id: SampleId, version: Version) -> InFlightSample | None:
        """Parks an episode that waited under an earlier process. None: no token of it is recorded."""
        self.park(held := self._from_journal(id, version))
        return held if len(held.out_ids) else None

    def begin_again(self, id: SampleId, version: Version) -> InFlightSample:
        """Parks the episode as it is before its first turn."""
        self._branches.pop(id, None)
        self._turns.pop(id, None)
        self._temperatures.pop(id, None)
        fresh = InFlightSample(
            id=id,
            version=version,
            out_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            **_of_prompt(self.groups[id.group_id].prompt),
        )
        self.park(fresh)
        return fresh

    def observe(self, answer: Observed) -> tuple[InFlightSample, Partial]:
        """The parked episode behind what it observed, and what the journal needs to know of that."""
        before = self._parked[answer.id]
        assert isinstance(before, InFlightSample)
        prompt = self.groups[before.id.group_id].prompt
        own = prompt.sampling
        if answer.stop or answer.temperature is not None:
            own = dataclasses.replace(own or Sampling(), stop=answer.stop, temperature=answer.temperature)
        self._temperatures.setdefault(before.id, []).append(answer.temperature or 0.0)
        turn: dict[str, Any] = {"turn_tokens": answer.turn_tokens or prompt.turn_tokens, "sampling": own}
        self._turns[before.id] = turn
        after = dataclasses.replace(observed(before, answer.token_ids, answer.keep), **turn)
        self._parked[before.id] = after
        stay = len(after.out_ids) - len(answer.token_ids)
        branched = answer.keep is not None and bool(len(before.out_ids))
        if branched:
            self._branches.setdefault(before.id, []).append((ended(before, "stop"), stay))
        return after, Partial(
            id=before.id,
            version=before.version,
            start=stay,
            out_ids=after.out_ids[stay:],
            logprobs=after.logprobs[stay:],
            kind=OBSERVED if answer.keep is None else REWRITTEN,
        )

    def end(self, id: SampleId, finish: str) -> Sample:
        """The parked episode as a sample."""
        held = self._parked.pop(id)
        assert isinstance(held, InFlightSample)
        return ended(held, finish)

    def whole(self, sample: Sample, terms: dict[str, float]) -> Sample:
        """The sample with its earlier branches, each token in the oldest branch that holds it, and the temperatures of
        its turns where one had its own."""
        held = self._branches.pop(sample.id, [])
        temperatures = iter(turns if any(turns := self._temperatures.pop(sample.id, [])) else ())
        branches, shared = [], 0
        for piece, stay in held:
            branches.append(
                Branch(
                    prompt_ids=piece.prompt_ids,
                    out_ids=piece.out_ids,
                    logprobs=piece.logprobs,
                    mask=(mask := _without(piece.mask, shared)),
                    version=piece.version,
                    table=_tempered(piece, mask, temperatures),
                )
            )
            shared = stay
        mask = _without(sample.mask, shared)
        table = _tempered(sample, mask, temperatures)
        return dataclasses.replace(sample, mask=mask, branches=tuple(branches), terms=terms, table=table)

    def find(self, held: Held) -> Partial | None:
        """A sample that an instance still has from an earlier process: it is used where it goes on from what is
        recorded.
        Returns the tokens that are not recorded yet."""
        version = held.version if isinstance(held, InFlightSample) else held.spans[-1].version
        out_ids, _, _ = self.payloads.tokens(held.id)
        n = len(out_ids)
        if self._recorded.get(held.id) != version or not np.array_equal(held.out_ids[:n], out_ids):
            return None
        self._parked[held.id] = held
        if isinstance(held, Sample) or len(held.out_ids) == n:
            return None
        row = count_rows(self.payloads.table(held.id, len(held.prompt_ids)))
        out_ids, logprobs, table, _ = sampled_from(held, n, row)
        return Partial(id=held.id, version=version, start=n, row=row, out_ids=out_ids, logprobs=logprobs, table=table)

    def _from_journal(self, id: SampleId, version: Version) -> InFlightSample:
        """The tokens that the journal has of a sample; the engine prefills them."""
        prompt = self.groups[id.group_id].prompt
        out_ids, logprobs, spans = self.payloads.tokens(id)
        last = spans[-1] if spans else None
        return InFlightSample(
            id=id,
            version=last.version if last else version,
            out_ids=out_ids,
            logprobs=logprobs,
            spans=spans[:-1],
            mask=self.payloads.mask(id),
            table=self.payloads.table(id, len(prompt.token_ids)),
            **(_of_prompt(prompt) | self._turns.get(id, {})),
        )


def _of_prompt(prompt: Prompt) -> dict[str, Any]:
    shared = ("max_new_tokens", "turn_tokens", "sampling")
    return {"prompt_ids": prompt.token_ids} | {name: getattr(prompt, name) for name in shared}


def _without(mask: np.ndarray, shared: int) -> np.ndarray:
    """bool[U]: the first `shared` tokens have their loss elsewhere."""
    return mask & (np.arange(len(mask)) >= shared)


def _tempered(sample: Sample, mask: np.ndarray, temperatures: Iterator[float]) -> TokenTable:
    """The table with the temperature of each turn, a run of True in the mask."""
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    turns = list(itertools.islice(temperatures, len(starts)))
    if not any(turns):
        return sample.table
    drawn = np.repeat(np.array([0.0, *turns], np.float32), np.diff([0, *starts, len(mask)])) * mask
    before = np.zeros(len(sample.prompt_ids) - 1, np.float32)
    return dataclasses.replace(sample.table, temperatures=np.concatenate([before, drawn]))


class KeptKV:
    """Which instance keeps the KV of each episode that waits for its environment. Laws: an episode goes on with the KV
    that an instance keeps, wherever it goes on; KV of an episode that has ended is forgotten."""

    def __init__(self, instances: Mapping[InstanceId, RolloutWorker]):
        self._instances = instances
        self._keeper: dict[SampleId, InstanceId] = {}

    def keep(self, held: InFlightSample, instance: InstanceId) -> bool:
        """Notes an episode whose turn has ended there. False: its KV has come along, and nothing is kept."""
        if not held.n_pages:
            self._keeper[held.id] = instance
        return not held.n_pages

    def resume(self, command: ev.Resume, held: InFlightSample) -> None:
        """The sample goes on; by way of the instance that keeps its KV."""
        keeper = self._keeper.pop(held.id, command.instance)
        dst = self._instances[command.instance] if keeper != command.instance else None
        self._instances[keeper].send(command, held, dst)

    def forget(self, ids: Iterable[SampleId]) -> None:
        for id in ids:
            if (keeper := self._keeper.pop(id, None)) is not None:
                self._instances[keeper].send(ForgetSample(id=id))

    def retained(self) -> set[GroupId]:
        """Groups of whose episodes an instance keeps KV."""
        return {id.group_id for id in self._keeper}

    def forget_group(self, group_id: GroupId) -> None:
        self.forget([id for id in self._keeper if id.group_id == group_id])
