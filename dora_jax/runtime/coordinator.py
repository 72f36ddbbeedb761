"""The coordinator of a run: it carries the commands of the orchestrator to the stages, and their facts back to it.

    prompts -> instances -> scorer -> group store -> trainer -> weight store -> instances           payload: one way
    stages -- events --> orchestrator -- commands --> stages          the orchestrator sees ids and counts only

Every loop of a run, by the queue that it reads:

    queue             reader          consumes                  waits for                  is unblocked by
    outbox            coordinator     events, payload records   TIME_PERIOD_S at most      any worker's item
    instance's inbox  EngineWorker    messages: Start, Cancel,  a message, while its       a command; a sample that
                                      Move, Park, ...           engine is idle             moves here
    trainer's inbox   TrainerWorker   Train                     the groups of a step       GroupScored: enough groups
                                                                                           are ready within the lag
    environments      environment     the end of an episode's   the environment's answer  Exported; SampleReady goes
                      workers         turn                                                back by Resume
    scorer            reward workers  a finished group          a free reward worker       the last sample of a group
    group store       TrainerWorker   scored groups             nothing: Train names groups that are there
    weight store      EngineWorker    a version                 nothing: LoadWeights follows StepPublished

A slot of the orchestrator's admission is charged at Start and free again when a version trained on the group is live.
All bookkeeping here runs on the main thread. The workers are threads of this process or, in a cluster, gangs
(cluster/): the coordinator does not know which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dora_jax.base.exits import Stop
from dora_jax.base.lanes import doing
from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.snapshot import Outstanding
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import (
    Environments,
    GroupStore,
    Prompts,
    RolloutWorker,
    Scorer,
    StageWorker,
    WeightStore,
)
from dora_jax.runtime.common.shutdown import STAGE_END_S
from dora_jax.runtime.common.worker import Crashed, Exported, Finished, InstanceReady, StepDone, TopTokens
from dora_jax.runtime.episodes import Episodes
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import Partial
from dora_jax.runtime.sample_registry import KeptKV, OpenGroup, SampleRegistry
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.types import GroupId, Sample, SampleId, ScoredGroup, is_eval, is_served, is_training

TIME_PERIOD_S = 0.05  # how often the orchestrator learns the time; also the longest wait for an event
SMALL_FLEET = 100  # instances whose facts are few enough to be decided on one by one
GATHERED_S = 2e-6  # for each instance of a larger fleet: how long a batch of its facts comes together
MAX_BATCH = 4096  # outbox items in a batch: what has come meanwhile is the next one


def gather_s(instances: int) -> float:
    """How long a coordinator lets facts come together behind the first: decisions are made once a batch."""
    return GATHERED_S * instances if instances > SMALL_FLEET else 0.0


class Coordinator:
    """`World` of one process; see `orchestrate.loop`."""

    def __init__(
        self,
        *,
        instances: Sequence[RolloutWorker],
        trainer: TrainerWorker | None,
        task: Prompts,
        scorer: Scorer,
        groups: GroupStore,
        weights: WeightStore,
        outbox: queue.SimpleQueue,
        group_size: int,
        eval_samples: int,
        trainable: Callable[[ScoredGroup], bool] = lambda group: True,
        environments: Environments | None = None,
        max_context: int = 0,
        record_tokens: bool = False,
        of_users: bool = False,
    ):
        """environments: of a run whose samples are episodes; max_context: tokens of prompt and response together;
        record_tokens: the tokens of running samples are written down. of_users: the environments are users."""
        self._instances = {worker.instance: worker for worker in instances}
        self._workers: list[StageWorker] = [*instances, *([trainer] if trainer else [])]
        self._gather_s = gather_s(len(instances))
        self._trainer = trainer
        self._scorer = scorer
        self._groups = groups
        self._weights = weights
        self._outbox = outbox
        self._size = lambda group_id: 1 if is_served(group_id) else eval_samples if is_eval(group_id) else group_size
        self._trainable = trainable
        self.samples = SampleRegistry(task)
        self._kept = KeptKV(self._instances)
        self._episodes = (
            Episodes(environments, self.samples, self._kept, max_context, record_tokens, of_users)
            if environments is not None
            else None
        )
        self._refused: set[GroupId] = set()  # their prompts are too long
        self._listeners: list[Callable[[Any], None]] = []
        self._time_s = 0.0
        self._skew_s = 0.0  # the clock goes on from that of the process before
        self._ready: list[InstanceReady] = []

    def listen(self, listener: Callable[[Any], None]) -> None:
        """`listener` sees every payload record: Finished, Partial, ScoredGroup, GroupFailure, StepDone, Quarantine."""
        self._listeners.append(listener)

    def recall(self, payloads: PayloadState) -> None:
        """Samples of a lost instance go on with the tokens of `payloads`, which is only read here."""
        self.samples.payloads = payloads

    def adopt(self, outstanding: Outstanding, payloads: PayloadState, now_s: float) -> None:
        """Takes over what an earlier process left outstanding, before `start`."""
        self.samples.adopt(outstanding, payloads)
        self._skew_s = now_s - time.monotonic()
        for group in (*payloads.evaluated.values(), *payloads.scored.values()):
            self._tell(group)
        for group in payloads.scored.values():
            self._groups.put(group)
        for group_id in outstanding.score:
            self._submit_scores(self.samples.groups[group_id])
        if self._episodes:
            self._episodes.adopt(outstanding.waiting)
        for command in (outstanding.cancel, outstanding.train):
            if command is not None:
                self.execute(command)

    def start(self, instances_up: Iterable[ev.InstanceUp]) -> None:
        for event in instances_up:
            self._outbox.put(event)
        for worker in self._workers:
            worker.start()

    def close(self, patience_s: float = STAGE_END_S) -> None:
        """Ends every stage; waits so long for each."""
        for worker in self._workers:
            worker.stop(patience_s)
        self._scorer.close()
        if self._episodes:
            self._episodes.close()

    def retained(self) -> set[GroupId]:
        """Groups of which anything is here, the group store aside."""
        episodes = self._episodes.retained() if self._episodes else set()
        return self.samples.retained() | self._kept.retained() | self._refused | episodes

    def diagnosis(self) -> str:
        return "; ".join(worker.state for worker in self._workers)

    def events(self) -> Iterator[ev.Event]:
        arrived, self._ready = self._ready, []
        for ready in arrived:  # commands that were meant for its earlier incarnation have been executed by now
            if self._episodes:
                self._episodes.comes_up(ready.event.instance)
            for found in ready.admit():
                if (unrecorded := self.samples.find(found)) is not None:
                    self._tell(unrecorded)
            yield ready.event
        # what is in the outbox, and comes within `gather_s`
        with contextlib.suppress(queue.Empty):
            with doing("waiting for the stages"):
                item = self._outbox.get(timeout=TIME_PERIOD_S)
                if self._gather_s:
                    time.sleep(self._gather_s)
            for _ in range(MAX_BATCH - 1):
                yield from self._to_events(item)
                item = self._outbox.get_nowait()
            yield from self._to_events(item)
        if self._episodes:
            for item in self._episodes.poll():
                yield from self._to_events(item)
        with doing("rewards"):
            results = self._scorer.poll()
        for scored in results:
            yield from self._scored(scored)
        now = time.monotonic() + self._skew_s
        if now - self._time_s >= TIME_PERIOD_S:
            self._time_s = now
            yield ev.TimePassed(now_s=now)

    def execute(self, command: ev.Command) -> None:
        """A command to an instance is sent as it is, but for those that need what is kept here: a Start of one group
        takes its prompt along, a Resume its one sample."""
        match command:
            case ev.Start(ids=ids):
                for group_id, siblings in itertools.groupby(ids, operator.attrgetter("group_id")):
                    self._start(dataclasses.replace(command, ids=tuple(siblings)), group_id)
            case ev.Resume(ids=ids):
                for id in ids:
                    self._resume(dataclasses.replace(command, ids=(id,)), id)
            case ev.Cancel(ids=ids, instance=instance, reason=reason):
                self._forget(ids)
                if instance is not None:
                    self._instances[instance].send(command)
                else:
                    for id in ids:
                        self._outbox.put(ev.SampleCancelled(id=id, reason=reason))
            case ev.Move(src=src, dst=dst):
                self._instances[src].send(command, dst=self._instances[dst])
            case ev.Train(group_ids=group_ids, base_version=base):
                for group_id in group_ids:
                    del self.samples.groups[group_id]
                if (trainer := self._trainer) is None:
                    raise RuntimeError("a run without a trainer got Train")
                trainer.post(trainer.train, group_ids, base)
            case ev.Discard(group_id=group_id):
                self._forget([SampleId(group_id, i) for i in range(self._size(group_id))])
                self._groups.discard(group_id)
                self._refused.discard(group_id)
            case ev.Quarantine():  # the incarnation in question is over already
                self._tell(command)
            case ev.Retire(version=version):
                self._weights.drop(version)
            case ev.Halt():
                raise NotImplementedError("the coordinator has no Halt")
            case _:
                self._instances[command.instance].send(command)

    # ------------------------------------------------------------ private

    def _start(self, command: ev.Start, group_id: GroupId) -> None:
        if group_id in self._refused:
            return
        for id in command.ids:
            self.samples.forget(id)
        self._kept.forget(command.ids)
        self._groups.discard(group_id)
        try:
            with doing("prompts"):
                group = self.samples.opened(group_id)
        except PromptTooLong as error:
            self._refused.add(group_id)
            self._tell(error)
            self._outbox.put(ev.GroupFailed(group_id=group_id, reason=str(error)))
            return
        worker = self._instances[command.instance]
        if self._episodes and not is_served(group_id):
            for id in command.ids:
                one = dataclasses.replace(command, ids=(id,))
                for event in self._episodes.start(id, group.prompt, worker, one):
                    self._outbox.put(event)
        else:
            worker.send(command, group.prompt)

    def _forget(self, ids: Sequence[SampleId]) -> None:
        self._kept.forget(ids)
        if self._episodes:
            self._episodes.cancel(ids)
        self.samples.cancel(ids)

    def _resume(self, command: ev.Resume, id: SampleId) -> None:
        worker = self._instances[command.instance]
        recorded = self.samples.waiting(id) is None
        held = self.samples.resume(id, command.version)
        if isinstance(held, Sample):
            here = {"instance": worker.instance, "incarnation": worker.incarnation}
            self._outbox.put(ev.SampleResumed(id=id, attempt=command.attempt, **here))
            self._outbox.put(Finished(sample=held, **here))
        elif self._episodes and recorded and not len(held.out_ids) and not is_served(id.group_id):
            for event in self._episodes.reopen(id, worker, held.version, command.attempt):
                self._outbox.put(event)
        else:
            self._kept.resume(command, held)

    def _to_events(self, item: Any) -> Iterator[ev.Event]:
        match item:
            case Crashed(error=RunError() | Stop() as error):
                raise error
            case Crashed(role=role, error=error):
                raise RuntimeError(f"{role} failed: {error}") from error
            case Exported(waits=True) if self._episodes:
                yield from self._episodes.waits(item)
            case Finished(sample=sample, instance=instance):
                self._kept.forget([sample.id])
                if self._episodes and not is_served(sample.id.group_id):
                    item = dataclasses.replace(item, sample=(sample := self._episodes.finished(sample)))
                self._tell(item)
                if (group := self.samples.finished(sample, self._size(sample.id.group_id))) is not None:
                    if is_served(sample.id.group_id):
                        del self.samples.groups[sample.id.group_id]
                    else:
                        self._submit_scores(group)
                here = {"instance": instance, "incarnation": item.incarnation}
                yield ev.SampleDone(id=sample.id, tokens=len(sample.out_ids), finish=sample.finish, **here)
            case StepDone(version=version):
                self._tell(item)
                yield ev.StepPublished(version=version)
            case Partial() | TopTokens() | GroupFailure():
                self._tell(item)
            case InstanceReady():
                self._ready.append(item)
            case ev.InstanceDown(instance=id, incarnation=over):  # also of one that fell before it was ready
                self._ready = [r for r in self._ready if r.event.instance != id or r.event.incarnation > over]
                yield item
            case InFlightSample():  # it is handed over
                self.samples.park(item)
            case Exported(in_flight=in_flight, instance=instance, incarnation=incarnation, attempt=attempt):
                self.samples.park(in_flight)
                yield ev.SampleParked(id=in_flight.id, instance=instance, incarnation=incarnation, attempt=attempt)
            case _:
                yield item

    def _submit_scores(self, group: OpenGroup) -> None:
        group.submitted = tuple(group.done[i] for i in sorted(group.done))
        with doing("rewards"):
            self._scorer.submit(group.prompt, group.submitted)

    def _scored(self, scored: ScoredGroup | GroupFailure) -> Iterator[ev.Event]:
        group_id = scored.group_id
        group = self.samples.groups.get(group_id)
        if group is None or not group.submitted:
            return  # it was cancelled, or a sample of it has begun again
        if isinstance(scored, GroupFailure):
            self._tell(dataclasses.replace(scored, samples=group.submitted))
            del self.samples.groups[group_id]
            yield ev.GroupFailed(group_id=group_id, reason=scored.reason)
            return
        if any(a is not b for a, b in zip(scored.samples, group.submitted, strict=True)):
            return  # a sample of it has begun again since
        self._tell(scored)
        trainable = is_training(group_id) and self._trainable(scored)
        if trainable:
            self._groups.put(scored)
        else:
            del self.samples.groups[group_id]
        yield ev.GroupScored(group_id=group_id, trainable=trainable)

    def _tell(self, record: Any) -> None:
        for listener in self._listeners:
            listener(record)
