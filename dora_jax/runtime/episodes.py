"""Episodes between their engine and their environment: the coordinator's part in samples of several turns.

    Start -> environment: reset -> submit, or SampleStarted + SampleWaiting + SampleReady where it says something first
    Waiting -> SampleWaiting; environment: step -> Observed     -> SampleReady, and later Resume
                                                   EpisodeEnded -> Finished
                                                   EpisodeLost  -> it begins again, at the same version
                                                   EpisodeFailed -> GroupFailed

Consumes answers of an environment pool and in-flight samples; produces events and payload records for the coordinator,
on whose thread all of it runs. Laws: what is observed is recorded before it is reported; an episode of an earlier
process goes on from its recorded tokens where its environment replays to the same observations, else it begins again; a
failure is never a reward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.base.lanes import doing
from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import Environments, Prompts, RolloutWorker
from dora_jax.runtime.common.worker import Exported, Finished
from dora_jax.runtime.journal.records import Partial
from dora_jax.runtime.sample_registry import KeptKV, SampleRegistry
from dora_jax.tasks.environments import Answer
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLost,
    EpisodeSoFar,
    GroupId,
    InstanceId,
    Observed,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    ScoredGroup,
    Version,
    is_eval,
    is_training,
    issued_first_as,
)

AHEAD = 32  # prompts that are made before their groups start

Item = ev.Event | Finished | Partial | GroupFailure  # what the coordinator takes from here


class Episodes:
    """record: whether the tokens of running samples are written down; then what they observe is. of_users: what an
    environment says first comes when a user likes."""

    def __init__(
        self,
        environments: Environments,
        samples: SampleRegistry,
        kept: KeptKV,
        max_context: int,
        record: bool,
        of_users: bool = False,
    ):
        self._environments, self._samples, self._kept = environments, samples, kept
        self.close = environments.close
        self._max_context = max_context  # tokens of prompt and response together
        self._record = record
        self._of_users = of_users
        self._opening: dict[
            SampleId, tuple[RolloutWorker, ev.Start] | int
        ] = {}  # a number: it waits with so many tokens
        self._attempts: dict[SampleId, int] = {}  # that had placed the samples that wait; 0: under an earlier process

    def start(self, id: SampleId, prompt: Prompt, worker: RolloutWorker, command: ev.Start) -> Iterator[ev.Event]:
        """command: of this sample. Its slot is reserved meanwhile, but for a user."""
        if self._of_users:
            yield from self._started(id, worker, command)
            self._begin_again(id, command.version, 0)
            return
        self._opening[id] = worker, command
        self._environments.open(id, prompt)

    def comes_up(self, instance: InstanceId) -> None:
        """What was to start in an earlier incarnation of the instance is started again."""
        for id, waits in list(self._opening.items()):
            if not isinstance(waits, int) and waits[0].instance == instance:
                del self._opening[id]

    def reopen(self, id: SampleId, worker: RolloutWorker, version: Version, attempt: int) -> Iterator[ev.Event]:
        """Reopen an episode whose Resume finds no token recorded: it waits for what its environment observes first."""
        yield ev.SampleResumed(id=id, instance=worker.instance, incarnation=worker.incarnation, attempt=attempt)
        yield self._waiting(id, worker.instance, worker.incarnation, attempt)
        self._begin_again(id, version, 0)

    def waits(self, item: Exported) -> Iterator[ev.Event]:
        held = item.in_flight
        self._samples.park(held)
        if held.id.group_id in self._samples.groups:
            self._ask(held)
        kept = self._kept.keep(held, item.instance)
        yield self._waiting(held.id, item.instance, item.incarnation, item.attempt, len(held.out_ids), kept)
        if held.id.group_id not in self._samples.groups:  # it was given up: nobody will resume it
            self._kept.forget([held.id])
            self._attempts.pop(held.id, None)

    def adopt(self, waiting: Mapping[SampleId, Version]) -> None:
        """Take over the episodes that waited under an earlier process."""
        for id, version in waiting.items():
            self._attempts[id] = 0
            if (held := self._samples.owed(id, version)) is None:
                self._begin_again(id, version, 0)
            else:
                self._ask(held)

    def poll(self) -> Iterator[Item]:
        with doing("environments"):
            answers = self._environments.poll()
        for answer in answers:
            if answer.id in self._opening:
                yield from self._opened(answer, self._opening.pop(answer.id))
            elif (held := self._samples.waiting(answer.id)) is not None:
                match answer:
                    case Observed():
                        yield from self._observed(answer, len(held.out_ids))
                    case EpisodeEnded(id=id, terms=terms, finish=finish):
                        yield Finished(sample=self._samples.whole(self._samples.end(id, finish), terms), instance=None)
                    case EpisodeLost(id=id):
                        self._begin_again(id, held.version, len(held.out_ids))
                    case EpisodeFailed():
                        yield from self._failed(answer)

    def finished(self, sample: Sample) -> Sample:
        """A sample that an engine ended at a limit, with what its environment gave so far."""
        self._attempts.pop(sample.id, None)
        if sample.terms is not None:
            return sample
        return self._samples.whole(sample, self._environments.drop(sample.id))

    def cancel(self, ids: Iterable[SampleId]) -> None:
        for id in ids:
            self._opening.pop(id, None)
            self._attempts.pop(id, None)
            self._environments.drop(id)

    def retained(self) -> set[GroupId]:
        """Groups of whose episodes an answer is awaited."""
        return {id.group_id for id in (*self._opening, *self._attempts)}

    # ------------------------------------------------------------ private

    def _started(self, id: SampleId, worker: RolloutWorker, command: ev.Start) -> Iterator[ev.Event]:
        """It waits for what its environment says first, without a slot."""
        way: dict[str, Any] = {"instance": worker.instance, "incarnation": worker.incarnation}
        yield ev.SampleStarted(id=id, version=command.version, attempt=command.attempt, **way)
        yield self._waiting(id, attempt=command.attempt, **way)

    def _waiting(
        self, id: SampleId, instance: InstanceId, incarnation: int, attempt: int, tokens: int = 0, kept: bool = False
    ) -> ev.SampleWaiting:
        self._attempts[id] = attempt
        return ev.SampleWaiting(
            id=id, instance=instance, tokens=tokens, kept=kept, incarnation=incarnation, attempt=attempt
        )

    def _ask(self, held: InFlightSample) -> None:
        mask = np.ones(len(held.out_ids), bool) if held.mask is None else held.mask
        tokens = np.concatenate([held.prompt_ids, held.out_ids])
        so_far = EpisodeSoFar(
            id=held.id,
            version=held.version,
            tokens=tokens,
            mask=mask,
            logprobs=held.logprobs,
            room=self._max_context - len(tokens),
        )
        self._environments.turn(self._samples.groups[held.id.group_id].prompt, so_far)

    def _begin_again(self, id: SampleId, version: Version, tokens: int) -> None:
        """tokens: those with which the orchestrator knows it to wait."""
        self._kept.forget([id])
        self._samples.begin_again(id, version)
        self._opening[id] = tokens
        self._environments.open(id, self._samples.groups[id.group_id].prompt)

    def _opened(self, answer: Answer, waits: tuple[RolloutWorker, ev.Start] | int) -> Iterator[Item]:
        id = answer.id
        if id.group_id not in self._samples.groups:
            return  # it was cancelled
        if not isinstance(answer, Observed):
            yield from self._failed(answer)
            return
        prompt = self._samples.groups[id.group_id].prompt
        if len(prompt.token_ids) + len(answer.token_ids) >= self._max_context:
            n = len(answer.token_ids)
            reason = f"what its environment says first has {n} tokens, more than a prompt leaves room for"
            yield from self._failed(EpisodeFailed(id=id, reason=reason, kind="limit"))
            return
        if not isinstance(waits, int):
            worker, command = waits
            if not len(answer.token_ids):
                worker.send(command, prompt)
                return
            self._samples.begin_again(id, command.version)
            yield from self._started(id, worker, command)
            waits = 0
        if len(answer.token_ids):
            yield from self._observed(answer, waits)
        else:
            yield ev.SampleReady(id=id, tokens=0, attempt=self._attempts.pop(id))

    def _observed(self, answer: Observed, before: int) -> Iterator[Item]:
        after, record = self._samples.observe(answer)
        if self._record:
            yield record
        tokens = max(before, len(after.out_ids))
        yield ev.SampleReady(id=answer.id, tokens=tokens, attempt=self._attempts.pop(answer.id))

    def _failed(self, answer: Answer) -> Iterator[Item]:
        """The whole group fails: its others would be compared with a sample that is not there."""
        reason, kind = getattr(answer, "reason", "it ended before its first turn"), getattr(answer, "kind", "error")
        group_id, held = answer.id.group_id, self._samples.waiting(answer.id)
        length = 0 if held is None else len(held.out_ids)
        yield GroupFailure(group_id=group_id, reason=reason, lengths=(length,), kind=f"environment: {kind}")
        del self._samples.groups[group_id]
        self._kept.forget_group(group_id)
        yield ev.GroupFailed(group_id=group_id, reason=reason)


class EpisodeScorer:
    """`Scorer` of episodes: their environment has given the terms. A term that a sample has none of is 0."""

    def __init__(self, terms: Sequence[str]):
        self._terms = tuple(terms)
        self._done: list[ScoredGroup | GroupFailure] = []

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None:
        broken = [sample for sample in samples if sample.finish == "error"]
        if broken:
            lengths = tuple(len(sample.out_ids) for sample in samples)
            reason = f"sample {tuple(broken[0].id)} ended in an error"
            self._done.append(GroupFailure(group_id=prompt.group_id, reason=reason, lengths=lengths))
            return
        parts = {name: np.array([(s.terms or {}).get(name, 0.0) for s in samples], np.float32) for name in self._terms}
        rewards = np.stack(list(parts.values())).sum(0, dtype=np.float32)
        version = samples[0].version
        self._done.append(
            ScoredGroup(group_id=prompt.group_id, version=version, samples=samples, rewards=rewards, parts=parts)
        )

    def poll(self) -> Sequence[ScoredGroup | GroupFailure]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """It holds nothing."""


class PromptsAhead:
    """Makes training prompts before their groups start, on a thread of its own: a process may have to word them, which
    waits for a core. What is wrong with one is raised by its `prompt_at`, which keeps what was made."""

    def __init__(self, prompt_at: Callable[[GroupId], Prompt]):
        self._prompt_at = prompt_at
        self._wanted: queue.SimpleQueue[GroupId | None] = queue.SimpleQueue()
        self._stop: GroupId = 0  # the first prompt that was never wanted
        # the thread does not hold this object, so that it ends when nobody uses it any more
        weakref.finalize(self, self._wanted.put, None)
        reader = threading.Thread(target=_read, args=(weakref.ref(self), self._wanted), name="prompts", daemon=True)
        reader.start()

    def behind(self, group_id: GroupId) -> None:
        """Make the prompts behind that of this group."""
        first = issued_first_as(group_id) + 1
        for wanted in range(max(first, self._stop), first + AHEAD):
            self._wanted.put(wanted)
        self._stop = max(first + AHEAD, self._stop)

    def make(self, group_id: GroupId) -> None:
        with contextlib.suppress(Exception):
            self._prompt_at(group_id)


def _read(of: weakref.ref[PromptsAhead], wanted: queue.SimpleQueue[GroupId | None]) -> None:
    while (group_id := wanted.get()) is not None:
        if (prompts := of()) is not None:
            prompts.make(group_id)
        del prompts


@dataclasses.dataclass(frozen=True)
class RunPrompts:
    """`Prompts` as a run samples them: in turns of so many tokens, where that is not 0, and held-out ones in a way of
    their own. ahead: makes the prompts behind each that is taken."""

    prompts: Prompts
    turn_tokens: int = 0
    heldout: Sampling | None = None  # None: as training samples
    ahead: PromptsAhead | None = None

    def prompt_at(self, group_id: GroupId) -> Prompt:
        sampling = self.heldout if is_eval(group_id) else None
        if self.ahead and is_training(group_id):
            self.ahead.behind(group_id)
        return dataclasses.replace(self.prompts.prompt_at(group_id), turn_tokens=self.turn_tokens, sampling=sampling)
