"""One process: rollout instances and the trainer on sub-meshes of `jax.devices()`, one thread each.

Payload goes  prompts -> instance -> scorer -> group store -> trainer -> weight store -> instance;
the orchestrator sees ids and counts only. All bookkeeping here runs on the main thread.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dora_jax.config import RunError
from dora_jax.exits import Stop
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.restart import Debts
from dora_jax.rollout.migrate import Parcel, retagged
from dora_jax.runtime.book import Book, Partial
from dora_jax.runtime.guard import STAGE_END_S
from dora_jax.runtime.workers import Crashed, Ended, Exported, Finished, Handed, InstanceWorker, Risen, StepDone
from dora_jax.runtime.workers import TrainerWorker
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.types import GroupId, Prompt, Sample, SampleId, ScoredGroup, Version, is_eval

TIME_PERIOD_S = 0.05  # how often the orchestrator learns the time; also the longest wait for an event


@dataclasses.dataclass
class _Group:
    """A group from its first Start until it is trained, filtered or failed."""

    prompt: Prompt
    done: dict[int, Sample] = dataclasses.field(default_factory=dict)
    given_up: bool = False  # a sample of it was cancelled: it will not be scored
    submitted: tuple[Sample, ...] = ()  # what the scorer was handed


class LocalWorld:
    """`World` of one process; see `runtime.loop`."""

    def __init__(self, *, instances: Sequence[InstanceWorker], trainer: TrainerWorker | None, task: Any,
                 scorer: Any, groups: Any, weights: Any, outbox: queue.SimpleQueue, group_size: int,
                 eval_samples: int, trainable: Callable[[ScoredGroup], bool] = lambda group: True):
        self._instances = {worker.instance: worker for worker in instances}
        self._trainer = trainer
        self._task = task
        self._scorer = scorer
        self._groups = groups
        self._weights = weights
        self._outbox = outbox
        self._size = lambda group_id: eval_samples if is_eval(group_id) else group_size
        self._trainable = trainable
        self._open: dict[GroupId, _Group] = {}
        self._parcels: dict[SampleId, Parcel] = {}  # what Park, or a leaving instance, took out of the engines
        self._refused: set[GroupId] = set()  # their prompts are too long
        self._listeners: list[Callable[[Any], None]] = []
        self._time_s = 0.0
        self._skew_s = 0.0  # the clock goes on from that of the process before
        self._book = Book()
        self._recorded: dict[SampleId, Version] = {}  # begun under an earlier process, and not asked for yet
        self._ended: dict[SampleId, Sample] = {}  # of these, finished while nobody listened
        self._risen: list[Risen] = []

    def listen(self, listener: Callable[[Any], None]) -> None:
        """`listener` sees every payload record: Finished, Partial, ScoredGroup, GroupFailure, StepDone."""
        self._listeners.append(listener)

    def recall(self, book: Book) -> None:
        """Samples of a lost instance go on with the tokens that are recorded here. It is only read."""
        self._book = book

    def adopt(self, debts: Debts, book: Book, now_s: float) -> None:
        """Takes on what an earlier process owed, before `start`."""
        self.recall(book)
        self._recorded = dict(debts.recorded)
        self._skew_s = now_s - time.monotonic()
        for group_id in debts.groups:
            try:
                prompt = self._task.prompt_at(group_id)
            except PromptTooLong:
                continue  # no sample of it has started: its Start will be refused
            self._open[group_id] = _Group(prompt, dict(book.samples.get(group_id, {})), group_id in debts.doomed)
        for group in (*book.evaluated.values(), *book.scored.values()):
            self._tell(group)
        for group_id, group in book.scored.items():
            self._open[group_id] = _Group(self._task.prompt_at(group_id), submitted=group.samples)
            self._groups.put(group)
        for group_id in debts.score:
            self._submit_scores(self._open[group_id])
        for command in (debts.cancel, debts.train):
            if command is not None:
                self.execute(command)

    def start(self, instances_up: Iterable[ev.InstanceUp]) -> None:
        for event in instances_up:
            self._outbox.put(event)
        for worker in self._workers():
            worker.start()

    def close(self, patience_s: float = STAGE_END_S) -> None:
        """Each stage is waited for so long."""
        for worker in self._workers():
            worker.stop(patience_s)
        self._scorer.close()

    def diagnosis(self) -> str:
        return "; ".join(worker.state for worker in self._workers())

    def events(self) -> Iterator[ev.Event]:
        risen, self._risen = self._risen, []
        for rise in risen:  # commands that were meant for its earlier life have been executed by now
            for brought in rise.admit():
                self._find(brought)
            yield rise.event
        yield from self._drain()
        for scored in self._scorer.poll():
            yield from self._scored(scored)
        now = time.monotonic() + self._skew_s
        if now - self._time_s >= TIME_PERIOD_S:
            self._time_s = now
            yield ev.TimePassed(now_s=now)

    def execute(self, command: ev.Command) -> None:
        match command:
            case ev.Start(ids=ids, instance=instance, version=version):
                for sample in ids:
                    self._submit(sample, self._instances[instance], version)
            case ev.LoadWeights(instance=instance, version=version, drop=drop):
                worker = self._instances[instance]
                worker.post(worker.load, version, drop)
            case ev.Move(ids=ids, src=src, dst=dst):
                source = self._instances[src]
                for sample in ids:
                    source.post(source.move, sample, self._instances[dst])
            case ev.Train(group_ids=group_ids, base_version=base):
                for group_id in group_ids:
                    del self._open[group_id]
                self._trainer.post(self._trainer.train, group_ids, base)
            case ev.Cancel(ids=ids, instance=instance, reason=reason):
                for sample in ids:
                    self._cancel(sample, instance, reason)
            case ev.Park(ids=ids, instance=instance):
                worker = self._instances[instance]
                for sample in ids:
                    worker.post(worker.park, sample)
            case ev.Resume(ids=ids, instance=instance, version=version):
                for sample in ids:
                    self._resume(sample, self._instances[instance], version)
            case ev.Retire(version=version):
                self._weights.drop(version)
            case ev.Pause(instance=instance):
                worker = self._instances[instance]
                worker.post(worker.pause)
            case ev.Unpause(instance=instance):
                worker = self._instances[instance]
                worker.post(worker.unpause)
            case _:
                raise NotImplementedError(f"the one-process world has no {type(command).__name__}")

    # ------------------------------------------------------------ private

    def _workers(self) -> list[Any]:
        return [*self._instances.values(), *([self._trainer] if self._trainer else [])]

    def _submit(self, sample: SampleId, worker: InstanceWorker, version: Version) -> None:
        group_id = sample.group_id
        if group_id in self._refused:
            return
        if group_id not in self._open:
            try:
                self._open[group_id] = _Group(self._task.prompt_at(group_id))
            except PromptTooLong as error:
                self._refused.add(group_id)
                self._tell(error)
                self._outbox.put(ev.GroupFailed(group_id=group_id, reason=str(error)))
                return
        group = self._open[group_id]
        if group.given_up or group.submitted:  # mode `evict` makes it again: nothing of its first life is used
            self._groups.discard(group_id)
            group = self._open[group_id] = _Group(group.prompt)
        self._parcels.pop(sample, None)
        worker.post(worker.submit, sample, group.prompt, version)

    def _cancel(self, sample: SampleId, instance: InstanceId | None, reason: str) -> None:
        """Instance None: what is recorded of the sample, or of its scored group, is discarded."""
        group = self._open[sample.group_id]
        group.given_up = True
        if instance is not None:
            worker = self._instances[instance]
            worker.post(worker.cancel, sample, reason)
        elif sample.index not in group.done:
            self._parcels.pop(sample, None)
            self._outbox.put(ev.SampleCancelled(id=sample, reason=reason))
        else:
            self._groups.discard(sample.group_id)

    def _resume(self, sample: SampleId, worker: InstanceWorker, version: Version) -> None:
        self._recorded.pop(sample, None)
        if sample in self._ended:
            self._outbox.put(ev.SampleResumed(id=sample, instance=worker.instance))
            self._outbox.put(Finished(sample=self._ended.pop(sample), instance=worker.instance))
        else:
            worker.post(worker.resume, retagged(self._parcel(sample, version), version))

    def _find(self, brought: Handed | Ended) -> None:
        """What an instance still has from an earlier process: used where it goes on from what is recorded."""
        held = brought.sample if isinstance(brought, Ended) else brought.parcel
        version = held.spans[-1].version if isinstance(brought, Ended) else held.version
        out_ids, _, _ = self._book.tokens(held.id)
        n = len(out_ids)
        if self._recorded.get(held.id) != version or not np.array_equal(held.out_ids[:n], out_ids):
            return
        if isinstance(brought, Ended):
            self._ended[held.id] = held
            return
        self._parcels[held.id] = held
        if len(held.out_ids) > n:
            self._tell(Partial(id=held.id, version=version, start=n, out_ids=held.out_ids[n:],
                               logprobs=held.logprobs[n:]))

    def _parcel(self, sample: SampleId, version: Version) -> Parcel:
        """What Park took out; else what the journal knows of it, to be prefilled again."""
        if sample in self._parcels:
            return self._parcels.pop(sample)
        prompt = self._open[sample.group_id].prompt
        out_ids, logprobs, spans = self._book.tokens(sample)
        last = spans[-1] if spans else None
        return Parcel(id=sample, version=last.version if last else version, prompt_ids=prompt.token_ids, out_ids=out_ids,
                      logprobs=logprobs, max_new_tokens=prompt.max_new_tokens, spans=spans[:-1])

    def _drain(self) -> Iterator[ev.Event]:
        """Whatever is in the outbox; waits up to TIME_PERIOD_S for the first."""
        try:
            item = self._outbox.get(timeout=TIME_PERIOD_S)
            while True:
                yield from self._to_events(item)
                item = self._outbox.get_nowait()
        except queue.Empty:
            return

    def _to_events(self, item: Any) -> Iterator[ev.Event]:
        match item:
            case Crashed(error=RunError() | Stop() as error):
                raise error
            case Crashed(role=role, error=error):
                raise RuntimeError(f"{role} failed: {error}") from error
            case Finished(sample=sample, instance=instance):
                self._tell(item)
                self._collect(sample)
                yield ev.SampleDone(id=sample.id, instance=instance, tokens=len(sample.out_ids),
                                    finish=sample.finish)
            case StepDone(version=version):
                self._tell(item)
                yield ev.StepPublished(version=version)
            case Partial():
                self._tell(item)
            case Risen():
                self._risen.append(item)
            case ev.InstanceDown(instance=instance):  # also of one that fell before its rise was heard
                self._risen = [rise for rise in self._risen if rise.event.instance != instance]
                yield item
            case Handed(parcel=parcel):
                self._parcels[parcel.id] = parcel
            case Exported(id=sample, instance=instance, parcel=parcel):
                self._parcels[sample] = parcel
                yield ev.SampleParked(id=sample, instance=instance)
            case _:
                yield item

    def _collect(self, sample: Sample) -> None:
        group_id = sample.id.group_id
        group = self._open[group_id]
        if sample.id.index in group.done:
            raise RuntimeError(f"sample {sample.id} finished twice")
        group.done[sample.id.index] = sample
        if len(group.done) == self._size(group_id) and not group.given_up:
            self._submit_scores(group)

    def _submit_scores(self, group: _Group) -> None:
        group.submitted = tuple(group.done[i] for i in sorted(group.done))
        self._scorer.submit(group.prompt, group.submitted)

    def _scored(self, scored: ScoredGroup | GroupFailure) -> Iterator[ev.Event]:
        self._tell(scored)
        group_id = scored.group_id
        if isinstance(scored, GroupFailure):
            del self._open[group_id]
            yield ev.GroupFailed(group_id=group_id, reason=scored.reason)
            return
        if scored.samples is not self._open[group_id].submitted:
            return  # of a life that mode `evict` has ended since
        trainable = not is_eval(group_id) and self._trainable(scored)
        if trainable:
            self._groups.put(scored)
        else:
            del self._open[group_id]
        yield ev.GroupScored(group_id=group_id, trainable=trainable)

    def _tell(self, record: Any) -> None:
        for listener in self._listeners:
            listener(record)
