"""A run in one process with real threads: every token of its arithmetic engine proves the version that made it."""

import dataclasses
import queue
import time

import numpy as np

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import RolloutSection
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, run
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import presets
from dora_jax.runtime.common.worker import StepDone
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.draft_sources import DraftSources
from dora_jax.runtime.episodes import EpisodeScorer, RunPrompts
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.training.trainer_worker import TrainerWorker
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.types import Prompt, ScoredGroup
from tests.fakes.oracle import OracleEngine

P, G, STEPS = 4, 4, 6
TURN_TOKENS = 16  # of an episode


SECTION = presets.on_cpu(
    RolloutSection(slots=8, pages=96, page_size=8, max_prompt_tokens=8, max_new_tokens=64, decode_steps=4)
)


ORACLE = OracleEngine(SECTION)


class Task:
    def __init__(self, too_long=()):
        self.too_long = too_long

    def prompt_at(self, group_id):
        if group_id in self.too_long:
            raise PromptTooLong(group_id, 999, 10)
        ids = np.arange(1 + abs(group_id) % 5, dtype=np.int32)
        return Prompt(
            group_id=group_id, task="t", uid=str(group_id), text="", token_ids=ids, answer=None, max_new_tokens=64
        )


class Scorer:
    """Scores at once; but in mode `partial` a group's samples must agree on their version (C1)."""

    def __init__(self, mixed):
        self.done = []
        self.mixed = mixed

    def submit(self, prompt, samples):
        versions = {s.version for s in samples}
        assert self.mixed or len(versions) == 1, versions
        rewards = np.array([s.id.index % 2 for s in samples], np.float32)
        self.done.append(
            ScoredGroup(
                group_id=prompt.group_id, version=versions.pop(), samples=samples, rewards=rewards, parts={"r": rewards}
            )
        )

    def poll(self):
        done, self.done = self.done, []
        return done

    def close(self):
        pass


class Weights:
    """Version v's weights are the number v."""

    def __init__(self):
        self.held = {0}

    def put(self, version, params, digest=0, copy=0):
        assert version not in self.held
        self.held.add(version)
        return 0

    def get(self, version, shardings):
        assert version in self.held, f"version {version} was dropped before {shardings}"
        return version

    def drop(self, version):
        self.held.remove(version)


class SlowEngine(OracleEngine):
    """A tick takes time, so that samples end one by one and not in bursts."""

    def tick(self):
        time.sleep(0.002)
        return super().tick()


class Trainer:
    params = None

    def step(self, batch):
        return {}


def config_of(mode="dora", max_versions=3, eval_every=0, inflight=1.25, **more):
    return OrchestratorConfig(
        mode=mode,
        max_versions=max_versions,
        groups_per_step=P,
        group_size=G,
        inflight=inflight,
        total_steps=STEPS,
        max_prompt_tokens=8,
        max_new_tokens=64,
        eval_every=eval_every,
        eval_groups=3,
        eval_samples=2,
        **more,
    )


def make(
    mode="dora",
    instances=2,
    too_long=(),
    length=None,
    engine=SlowEngine,
    trainer=Trainer,
    environments=None,
    users=None,
    residents=1,
    requests=None,
    drafts=False,
    term="right",
    **options,
):
    """(orchestrator, world, [InstanceUp], weights); `options`: of config_of. environments: the samples are episodes.
    users: prompts of sessions, which are the environments then. requests(prompts, outbox, orchestrator): the prompts of
    the world, whose listener they are. term: of the episodes' rewards."""
    config = config_of(mode, **options)
    section = dataclasses.replace(SECTION, residents=residents)
    outbox, weights, groups, scorer = (
        queue.SimpleQueue(),
        Weights(),
        MemoryGroupStore(),
        Scorer(mixed=mode in ("partial", "staleflow")),
    )
    length = length or (
        lambda version, group, index, limit: 60 if (group + index) % 7 == 0 else 2 + (group + index) % 5
    )
    workers = [
        EngineWorker(i, engine(section, length=length, version_in=int), weights, outbox) for i in range(instances)
    ]
    trainer = TrainerWorker(trainer(), lambda groups, base: None, groups, weights, config.decisions.max_lag, outbox)
    orchestrator, task = Orchestrator(config), users or Task(too_long)
    if environments:  # in the order of a run: what requests ask is no turn of an episode
        task = RunPrompts(task, TURN_TOKENS)
    if requests:
        task = requests(task, outbox, orchestrator)
    world = Coordinator(
        instances=workers,
        trainer=trainer,
        task=task,
        scorer=EpisodeScorer((term,)) if environments else scorer,
        groups=groups,
        weights=weights,
        outbox=outbox,
        group_size=G,
        eval_samples=2,
        environments=environments,
        of_users=users is not None,
        max_context=SECTION.max_prompt_tokens + SECTION.max_new_tokens,
    )
    if requests:
        world.listen(task.record)
    if drafts:
        world.sources = DraftSources(workers, world.samples)
        world.listen(world.sources.record)
    ups = [ev.InstanceUp(instance=w.instance, slots=8, pages=96, page_size=8, residents=residents) for w in workers]
    return orchestrator, world, ups, weights


def play(orchestrator, world, ups, observers=()):
    records = []
    world.listen(records.append)
    try:
        world.start(ups)
        return run(orchestrator, world, observers), records
    finally:
        world.close()


def expected(sample):
    """The tokens that the versions named by its spans sample."""
    out = np.zeros(len(sample.out_ids), np.int32)
    for span in sample.spans:
        out[span.start : span.stop] = ORACLE.expected(span.version, *sample.id, span.stop)[span.start :]
    return out


def trained_by(records):
    steps = [r for r in records if isinstance(r, StepDone)]
    return [(step.version - 1, group) for step in steps for group in step.groups]


def long_tailed(version, group, index, limit):
    return 64 if group % 2 == 0 and index == 0 else 2
