"""A run in one process behind a journal, over several incarnations: an incarnation is killed at any event."""

import queue
import time
import zlib

import numpy as np

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each, run
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.common.shutdown import Guard, GuardedWorld
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.episodes import EpisodeScorer, RunPrompts
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC
from dora_jax.runtime.journal.recovery import recover
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.types import is_eval
from tests.fakes.coordinator_world import SECTION, TURN_TOKENS, G, P, Scorer, Task, Weights, expected
from tests.fakes.oracle import OracleEngine

STEPS = 5


class Killed(Exception):
    """Stands for SIGKILL: nothing is flushed after it."""


def length(version, group, index, limit):
    return 60 if (group + index) % 7 == 0 else 2 + (group + index) % 9


class Slow(OracleEngine):
    """Ticks that take a moment, so that kills find samples half done."""

    def tick(self):
        time.sleep(0.002)
        return super().tick()


class Trainer:
    """Its weights are a hash of all that it was trained on."""

    def __init__(self, params=1):
        self.params = params

    def step(self, groups):
        for group in groups:
            self.params = zlib.crc32(CODEC.encode(group), self.params)
        return {}


class Run:
    """One workdir over several processes."""

    def __init__(self, folder, mode="dora", eval_every=2, environments=None, users=None, term="right", **options):
        """environments: makes those of an incarnation; the samples are then episodes. users: prompts of sessions, which
        are the environments then. term: of the episodes' rewards."""
        self.folder, self.environments, self.users, self.term = folder, environments, users, term
        self.config = OrchestratorConfig(
            mode=mode,
            **{"max_versions": {"sync": 1, "one_step": 2}.get(mode, 3)} | options,
            groups_per_step=P,
            group_size=G,
            total_steps=STEPS,
            max_prompt_tokens=8,
            max_new_tokens=64,
            eval_every=eval_every,
            eval_groups=2,
            eval_samples=2,
        )
        self.checkpoints = {0: 1}
        self.finished, self.trained, self.evaluated, self.known = [], {}, [], set()
        self.rewards = {}  # version -> of the groups of its step
        self.went_on = 0
        self.recorded = {}  # sample -> version, of those that the journal knew when the newest incarnation began
        self.weights = {}

    def incarnation(self, kill_at=None, log=None, guard=None, kill_when=lambda state: False):
        """Halt, or None where it was killed at its fact number `kill_at`, or at the first one that `kill_when` holds
        after."""
        sync_s = 0.02 if log else 0.0
        log = log or FileLogStore(self.folder)
        journal = EventLog(log, sync_s=sync_s)
        found = recover(journal, self.config, list(self.checkpoints), lambda v: True, lambda sentence: None)
        trainer, versions = Trainer(), [0]
        if found is not None:
            trainer = self.replayed(found)
            versions = found.outstanding.versions
        world, instances = self.world(trainer, versions)
        orchestrator, payloads = (
            (found.orchestrator, found.payloads) if found else (Orchestrator(self.config), PayloadState())
        )
        world.listen(self.hear)
        if found is not None:
            for id in found.outstanding.recorded:
                self.went_on += len(payloads.tokens(id)[0]) > 0
            world.adopt(found.outstanding, payloads, orchestrator.state.now_s)
            units = (unit for group in orchestrator.state.groups.values() for unit in group.units if unit)
            self.recorded = {unit.id: unit.version for unit in units}
        durable = JournaledWorld(world, journal, orchestrator, payloads, found.epoch if found else 0)
        seen = [0]

        def observe(event, commands):
            if isinstance(event, ev.SampleDone) and not is_eval(event.id.group_id):
                assert event.id not in self.known, f"{event.id} was generated again"
                self.known.add(event.id)
            if isinstance(event, ev.StepPublished) and event.version % 2 == 0:
                self.checkpoints[event.version] = trainer.params
                durable.rotate_due = True
            seen[0] += 1
            if seen[0] == kill_at or kill_when(orchestrator.state):
                raise Killed

        try:
            world.start([ev.InstanceUp(instance=w.instance, slots=8, pages=96, page_size=8) for w in instances])
            return run(orchestrator, GuardedWorld(durable, guard or Guard(0.0)), [each(observe)])
        except Killed:
            return None
        finally:
            log.close()  # as the end of the process does: no commit
            world.close()

    def world(self, trainer, versions):
        outbox, groups, self.weights = queue.SimpleQueue(), MemoryGroupStore(), Weights()
        self.weights.held = set(versions)
        workers = [
            EngineWorker(i, Slow(SECTION, length=length, version_in=int), self.weights, outbox, 0.005, report_s=0.0)
            for i in range(2)
        ]
        worker = TrainerWorker(
            trainer,
            lambda groups, base: groups,
            groups,
            self.weights,
            self.config.decisions.max_lag,
            outbox,
            lambda params: params,
        )
        episodes = self.environments is not None
        environments, task = self.environments() if episodes else None, self.users or Task(too_long=(3,))
        world = Coordinator(
            instances=workers,
            trainer=worker,
            task=RunPrompts(task, TURN_TOKENS) if episodes else task,
            scorer=EpisodeScorer((self.term,)) if episodes else Scorer(mixed=self.config.decisions.mixes_versions),
            groups=groups,
            weights=self.weights,
            outbox=outbox,
            group_size=G,
            eval_samples=2,
            environments=environments,
            of_users=self.users is not None,
            max_context=SECTION.max_prompt_tokens + SECTION.max_new_tokens,
            record_tokens=True,
        )
        if self.users:
            world.listen(environments.record)
        return world, workers

    def replayed(self, found):
        trainer = Trainer(self.checkpoints[found.start])
        for step in found.steps:
            trainer.step(step.groups)
            assert trainer.params == step.published.digest, f"version {step.base + 1} came out with other weights"
        return trainer

    def hear(self, item):
        match item:
            case Finished(sample=sample):
                self.finished.append(sample)
            case StepDone(version=version, groups=groups, digest=digest):
                again = ([g.group_id for g in groups], digest)
                assert self.trained.setdefault(version, again) == again
                self.rewards[version] = [reward for group in groups for reward in group.rewards.tolist()]

    def audit(self):
        ids = [g for groups, _ in self.trained.values() for g in groups]
        assert len(ids) == len(set(ids)) == STEPS * P
        for sample in self.finished:
            np.testing.assert_array_equal(sample.out_ids[sample.mask], expected(sample)[sample.mask])
