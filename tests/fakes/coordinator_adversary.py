"""The production coordinator without threads or time: a driver decides whose turn it is, and whose facts are taken.

Coordinator, LocalInstance, EngineWorker, TrainerWorker, JournaledWorld and the arithmetic engine are the real ones;
what would be a thread is a list of things that the driver may do next. Instances die with calls and facts on their way,
or turn out unhealthy, and are made again; events are sent twice; environments answer late, or have lost an episode; the
process is killed at any fact and begun again from its journal.

    python -m tests.fakes.coordinator_adversary 500        so many configurations, one after the other
"""

from __future__ import annotations

import collections
import dataclasses
import json
import queue
import random
import sys
from unittest import mock

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import lending
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import MODES, OrchestratorConfig
from dora_jax.runtime import coordinator
from dora_jax.runtime.common.worker import StepDone, Worker
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.episodes import RunPrompts
from dora_jax.runtime.instances import supervised_worker as instances
from dora_jax.runtime.instances.shared_devices import SharedDevices
from dora_jax.runtime.instances.supervised_worker import LocalInstance, RestartPolicy
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import Partial
from dora_jax.runtime.journal.recovery import recover
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.types import SampleId
from tests.fakes.coordinator_ends import Ends, Store
from tests.fakes.coordinator_world import SECTION, TURN_TOKENS, Scorer, Task, Trainer, Weights, expected
from tests.fakes.environments import ScriptedEnvironments
from tests.fakes.journal_world import Disk
from tests.fakes.oracle import OracleEngine

MAX_MOVES = 40_000
DEATH, SUSPICION, TWICE, KILLED = 0.03, 0.005, 0.2, 0.01
LOST = 0.02  # of the answers of environments
BUSY = 0.5  # how likely it is that the coordinator does not listen yet, and hears more at once
UP = {"slots": 8, "pages": 96, "page_size": 8}
# What a duplicate of would be a second payload: no queue says one twice.
REPEATED = (
    ev.WeightsLoaded,
    ev.SampleStarted,
    ev.InstanceReported,
    ev.SampleCancelled,
    ev.SampleMoved,
    ev.MoveFailed,
    ev.SampleResumed,
    ev.InstanceDown,
    ev.InstanceUnhealthy,
)


# What is repeated a long time after it counted. Weights are not: nothing in WeightsLoaded names the LoadWeights.
REPORTED_AGAIN = (
    ev.SampleStarted,
    ev.SampleCancelled,
    ev.SampleMoved,
    ev.MoveFailed,
    ev.SampleParked,
    ev.SampleResumed,
    ev.SampleWaiting,
    ev.SampleReady,
    ev.InstanceDown,
    ev.InstanceUnhealthy,
)
AGAIN = 0.02


class Pipe(queue.SimpleQueue):
    """A queue that nobody waits at."""

    def get(self, block=True, timeout=None):
        return super().get(block=False)


class Source(Pipe):
    """What one stage says. Tokens are recorded before the sample that they belong to is handed on: that much order all
    queues of production keep."""

    def __init__(self, received: Pipe):
        self._received = received

    def put(self, item):
        (self._received if isinstance(item, Partial) else super()).put(item)


class NoThread:
    """Stands for threading.Thread: what it would run is run at once, so that nothing happens behind the driver."""

    def __init__(self, target=None, args=(), **_):
        self._target, self._args = target, args

    def start(self):
        self._target(*self._args)

    def is_alive(self):
        return False

    def join(self, timeout=None):
        pass


class SlowScorer(Scorer):
    """Hands out one group now and then."""

    def __init__(self, mixed, draw):
        super().__init__(mixed)
        self._draw = draw

    def poll(self):
        if not self.done or self._draw.random() < 0.7:
            return []
        return [self.done.pop(self._draw.randrange(len(self.done)))]


class SlowEnvironments(ScriptedEnvironments):
    """Answers in any order, and late; loses an episode now and then."""

    def __init__(self, draw, calm):
        super().__init__(late=0, opening=draw.choice([0, 2]))
        self._draw, self._calm = draw, calm

    def turn(self, prompt, so_far):
        if self._draw.random() < LOST and not self._calm():
            self.losing.add(so_far.id)
        super().turn(prompt, so_far)

    def poll(self):
        if not self.asked or self._draw.random() < 0.7:
            return []
        _, answer = self.asked.pop(self._draw.choice(sorted(self.asked)))
        return [answer]


class MovableState(Trainer):
    """A trainer whose state leaves the devices, or comes back, and is trained where it is."""

    def __init__(self):
        self.here, self.moves = True, 0

    def to_host(self):
        assert self.here
        self.here, self.moves = False, self.moves + 1

    def to_devices(self):
        assert not self.here
        self.here = True

    def free(self, engine):
        assert not engine.versions and not self.here, "pages go while nothing is on the devices"

    def step(self, batch):
        assert self.here, "the state is in host memory"
        return super().step(batch)


class Process:
    """One process of a run: its stages, its queues, its orchestrator."""

    def __init__(self, game: Game, found):
        config, self.draw = game.config, game.draw
        self.received = Pipe()
        self.pipes = [Source(self.received) for _ in range(game.instances + 1)]  # of the instances, then of the trainer
        base = found.base if found else 0
        self.weights, self.groups = Weights(), Store()
        self.weights.held = set(found.outstanding.versions) if found else {0}
        self.brain = found.orchestrator if found else Orchestrator(config)
        self.pool: dict[int, LocalInstance] = {}
        self.state = MovableState()
        lent = SharedDevices(self.state, self.state.free)
        for i in range(game.instances):
            spare = RestartPolicy(new_engine=game.new_engine, vocab_size=256, hung_s=0.0)
            common = self.weights, self.pipes[i], 1e-9, spare, self.pool, lambda sentence: None
            up, engine = ev.InstanceUp(instance=i, **UP), game.new_engine()
            self.pool[i] = LocalInstance(up, engine, *common, lent if i in config.lendable else None)
        options = {"reload": lent.reload}
        bound, pack = config.decisions.max_lag, lambda groups, base: None
        self.trainer = TrainerWorker(self.state, pack, self.groups, self.weights, bound, self.pipes[-1], **options)
        self.world = Coordinator(
            instances=list(self.pool.values()),
            trainer=self.trainer,
            task=RunPrompts(Task(game.too_long), TURN_TOKENS) if game.turns else Task(game.too_long),
            scorer=SlowScorer(config.decisions.mixes_versions, self.draw),
            groups=self.groups,
            weights=self.weights,
            outbox=self.received,
            group_size=config.group_size,
            eval_samples=config.eval_samples,
            environments=SlowEnvironments(self.draw, lambda: game.calm) if game.turns else None,
            max_context=SECTION.max_prompt_tokens + SECTION.max_new_tokens,
            record_tokens=True,
        )
        self.world.listen(game.records.append)
        payloads = found.payloads if found else PayloadState()
        journal = EventLog(game.disk)
        self.durable = JournaledWorld(
            self.world, journal, self.brain, payloads, segments=dict(found.segments) if found else {}
        )
        if found:
            self.world.adopt(found.outstanding, payloads, self.brain.state.now_s)
        else:
            self.world.recall(payloads)
        self.world.start([ev.InstanceUp(instance=i, **UP) for i in self.pool if i not in config.lendable])
        assert base == self.brain.state.ledger.base

        game.ends.begin(self.brain)
        self.past: collections.deque[ev.Event] = collections.deque(maxlen=200)

    def acts(self) -> list:
        acts = [lambda pipe=pipe: self.pass_on(pipe) for pipe in self.pipes if not pipe.empty()]
        for worker in [self.trainer, *(instance.worker for instance in self.pool.values() if instance.worker)]:
            if not worker.idle:
                acts.append(worker.turn)
        return acts or [lambda: None]

    def pass_on(self, pipe: Pipe) -> None:
        item = pipe.get()
        self.received.put(item)
        if isinstance(item, REPEATED) and self.draw.random() < TWICE:
            self.received.put(item)


class Game:
    def __init__(
        self, config: OrchestratorConfig, instances: int, too_long: tuple[int, ...], seed: int, kills: bool, turns: bool
    ):
        self.config, self.instances, self.too_long, self.kills, self.turns = config, instances, too_long, kills, turns
        self.draw = random.Random(seed)
        self.disk, self.records = Disk(), []
        self.moves = self.incarnations = 0
        self.dropped: collections.Counter = collections.Counter()
        self.lends = 0
        self.ends = Ends(config.group_size)

    def new_engine(self) -> OracleEngine:
        return OracleEngine(SECTION, length=self.length, version_in=int)

    def length(self, version, group, index, limit):
        return 60 if (group + index) % 7 == 0 else 2 + (group + index) % 9

    @property
    def calm(self) -> bool:
        return self.moves >= MAX_MOVES // 8

    def play(self) -> Game:
        with (
            mock.patch.object(instances, "threading", mock.Mock(wraps=instances.threading, Thread=NoThread)),
            mock.patch.object(instances, "MAX_LOSSES", MAX_MOVES),
            mock.patch.object(Worker, "start", lambda worker: None),
            mock.patch.object(coordinator, "TIME_PERIOD_S", 0.0),
            mock.patch.object(lending, "worth_lending", lambda *expected: True),  # whatever this machine's times say
        ):
            while not self.incarnation():
                pass
        return self

    def incarnation(self) -> bool:
        """One process, to its end or to the run's."""
        self.incarnations += 1
        process = Process(self, recover(EventLog(self.disk), self.config, [0], lambda v: True, lambda sentence: None))
        while True:
            self.moves += 1
            assert self.moves < MAX_MOVES, f"nothing ends: {process.brain.summary()}"
            if not self.calm:
                if self.draw.random() < DEATH:
                    kill(process.pool[self.draw.randrange(self.instances)])
                if self.draw.random() < SUSPICION:
                    says_nan(process.pool[self.draw.randrange(self.instances)])
                worker = process.pool[self.draw.randrange(self.instances)]
                if worker.incarnation > 0 and self.draw.random() < SUSPICION:
                    worker.mark_unhealthy(self.draw.randrange(worker.incarnation), "found out late")
                if process.past and self.draw.random() < AGAIN:
                    process.received.put(self.draw.choice(process.past))
                if self.kills and self.draw.random() < KILLED:
                    return self.ended(process, False)
            self.draw.choice(process.acts())()
            if self.draw.random() < BUSY:
                continue
            for event in process.durable.events():
                self.ends.hear(process.brain, event)
                if isinstance(event, REPORTED_AGAIN) and process.brain.counts(event):
                    assert getattr(event, "attempt", 0) is not None, f"{event} names no attempt"
                    process.past.append(event)
                process.brain.commit(event)
                process.brain.state.ledger.check()
            for command in process.brain.decide():
                if isinstance(command, ev.Halt):
                    assert command.ok, command.reason
                    return self.ended(process, True)
                self.ends.follow(command)
                process.durable.execute(command)
            self.ends.check_retained(process.brain, process.world, process.durable.payloads, process.groups)

    def ended(self, process: Process, over: bool) -> bool:
        self.dropped.update(process.brain.state.dropped)
        self.state = process.brain.state
        self.lends = self.state.roles.lends_total
        return over

    def audit(self) -> None:
        """Every group once, whole, in time, and every token by the version that is claimed."""
        assert not self.ends.unended, f"{self.ends.unended} have started, and have no end"
        assert not self.ends.open, f"groups {self.ends.open} have begun, and have no end"
        assert not self.state.redo, f"prompts {self.state.redo} were given up, and are not issued again"
        steps = {r.version: r for r in self.records if isinstance(r, StepDone)}  # of a step made again: its last making
        assert sorted(steps) == list(range(1, self.config.total_steps + 1))
        ids = [group.group_id for step in steps.values() for group in step.groups]
        assert len(ids) == len(set(ids)) == self.config.total_steps * self.config.groups_per_step
        bound = self.config.decisions.max_lag
        for step in steps.values():
            for group in step.groups:
                assert bound is None or step.version - 1 - group.version <= bound
                assert len(group.samples) == self.config.group_size
                for sample in group.samples:
                    np.testing.assert_array_equal(sample.out_ids[sample.mask], expected(sample)[sample.mask])


def kill(instance: LocalInstance) -> None:
    if (incarnation := instance.worker) is not None:
        instance.lose(incarnation, "killed by the test")


def says_nan(instance: LocalInstance) -> None:
    if (incarnation := instance.worker) is not None:
        nan = np.full(1, np.nan, np.float32)
        garbage = Partial(id=SampleId(0, 0), version=0, start=0, out_ids=np.ones(1, np.int32), logprobs=nan)
        instance.on_message(incarnation, garbage)


def drawn(seed: int) -> Game:
    draw = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    config = OrchestratorConfig(
        mode=mode, groups_per_step=draw.choice([1, 2, 4]), group_size=draw.choice([1, 2, 4]), total_steps=draw.randint(1, 4),
        max_versions={"sync": 1, "one_step": 2}.get(mode, draw.randint(1, 3)), inflight=draw.choice([1.0, 1.25, 3.0]),
        max_prompt_tokens=8, max_new_tokens=64, eval_every=draw.randint(0, 2), eval_groups=draw.choice([0, 2]),
        rebalance_period_s=1e-3)  # fmt: skip
    too_long = tuple(draw.sample(range(12), draw.choice([0, 2])))
    kills, turns = not config.decisions.mixes_versions and draw.random() < 0.5, draw.random() < 0.5
    instances = draw.randint(1, 3)
    if draw.random() < 0.5:  # one more, of the trainer's devices
        config = dataclasses.replace(config, lendable=(instances,))
        instances += 1
    if mode == "dora":
        config = dataclasses.replace(config, stride=draw.randint(1, config.max_versions))
    return Game(config, instances, too_long, seed, kills, turns)


def main(configurations: int, first: int = 0) -> None:
    dropped, incarnations, moves, lends = collections.Counter(), 0, 0, 0
    for seed in range(first, first + configurations):
        try:
            game = drawn(seed).play()
            game.audit()
        except BaseException:
            print(f"configuration {seed}: {json.dumps(drawn(seed).config.__dict__)}", flush=True)
            raise
        dropped, incarnations, moves = dropped + game.dropped, incarnations + game.incarnations, moves + game.moves
        lends += game.lends
    summary = f"{configurations} configurations, {incarnations} processes, {moves} moves, {lends} lends, no law broken"
    print(f"{summary}; dropped: {dict(dropped)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
