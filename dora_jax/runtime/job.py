"""The jobs that a person starts, from configuration to closing line: train. `evaluation_job` has the other."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dora_jax import config as configs
from dora_jax import tasks
from dora_jax.base.exits import FAILED, RETRY, Stop
from dora_jax.base.lanes import Lane
from dora_jax.base.metrics import Writer
from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import Config, ConfigError, RunError, changes, field_context
from dora_jax.orchestrate.core import Orchestrator, quiet_collector, run
from dora_jax.orchestrate.events import Command, Event, Halt, ImpossibleFact, StepPublished
from dora_jax.plan import devices, presets, validate
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.common.idle_time import StepSeconds
from dora_jax.runtime.common.seams import Backend, RunPlugin, TrainerSide
from dora_jax.runtime.common.shutdown import STAGE_END_S, Guard, GuardedWorld
from dora_jax.runtime.coordinator import Coordinator
from dora_jax.runtime.draft_sources import DraftSources
from dora_jax.runtime.journal import resume
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.records import Saved
from dora_jax.runtime.journal.resume import Begun
from dora_jax.runtime.journal.workdir_mirror import Mirror, fetch, mirrored
from dora_jax.runtime.live_requests import LiveRequests, LiveServing
from dora_jax.runtime.local_backend import LocalBackend, RunContext, trainer_worker
from dora_jax.runtime.observe import monitoring
from dora_jax.runtime.observe.evaluations import closing
from dora_jax.runtime.observe.metrics_log import RunLog
from dora_jax.runtime.observe.recorder import instrument
from dora_jax.runtime.observe.timeline import Timeline
from dora_jax.runtime.training import warm_start, warm_start_data
from dora_jax.runtime.training.agreement import Agreement
from dora_jax.runtime.training.hf_exports import HfExports
from dora_jax.tasks.environment import NOISE
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.tasks.pool import ScorerPool
from dora_jax.tasks.trial import try_rewards
from dora_jax.trainer import checkpoint
from dora_jax.types import Version


def train(config: Config, workdir: Path, *, owner: bool = False, endpoint: LiveServing | None = None) -> int:
    """Warm start where the base is missing, then RL until config.steps; resumes. Returns the exit code.

    owner: the process is there for this run alone, and is ended where the run does not end in time. endpoint: answers
    requests on the run's fleet.
    """
    began = time.monotonic()
    # a controller computes nothing, and must not hold the chips that its gangs want
    devices.setup_platform(dataclasses.replace(config, cpu_devices=1) if config.cluster.launcher else config)
    asked = changes.settings(configs.to_json(config))
    config, chosen = validate.settle(config)
    with (
        monitoring.opened(config, workdir) as sinks,
        Writer(workdir, others=[*sinks, *([endpoint.facts] if endpoint else [])]) as writer,
        Guard(0.0 if config.serving.train else config.journal.watchdog_s, owner=owner) as guard,  # users may be silent
        mirrored(workdir, writer.note, steps=not config.cluster.launcher) as mirror,
    ):
        writer.note("\n".join(chosen))
        try:
            make_base(config, workdir, writer, guard)
            halt, log = _train(opened(config, workdir, writer), writer, guard, mirror, endpoint, asked)
        except Stop as stop:
            writer.close_with(f"{stop} (exit code {RETRY})")
            return RETRY
        writer.close_with(f"{halt.reason} ({time.monotonic() - began:.0f} s in all); {closing(log.evaluations)}")
    return 0 if halt.ok else FAILED


def of_this_machine(config: Config) -> Config:
    """The run's configuration for a process that samples on the devices that are here, whatever the run had."""
    return presets.filled(
        dataclasses.replace(config, slice="", cluster=dataclasses.replace(config.cluster, launcher=""))
    )


def make_base(config: Config, workdir: Path, writer: Writer, guard: Guard) -> None:
    """Runs the warm start where model.path is its output and does not exist yet, as in the quickstart."""
    if validate.makes_base(config) and not (Path(config.model.path) / "config.json").exists():
        writer.phase("all", "opening the task, scoring one row")
        _try_early(config, workdir)
        warm_start.run(config, workdir, writer, guard.stepped)
        guard.stepped()
        guard.looping = False  # what follows is only being put together: a signal may interrupt it


def pick(directory: Path, step: int | None) -> int:
    """Returns the step asked for, or the newest that verifies; ConfigError where there is none."""
    fetch(directory.parent)
    if step is None:
        newest = checkpoint.latest(directory, full=True)
        if newest is None:
            raise ConfigError(f"workdir: {directory} holds no checkpoint that verifies")
        return newest
    known = checkpoint.steps(directory)
    if step not in known:
        raise ConfigError(f"step: {directory} holds no checkpoint of step {step}; it holds {known}")
    if fault := checkpoint.verify(directory, step, full=True):
        raise ConfigError(f"step: checkpoint {step} cannot be trusted: {fault}")
    return step


@dataclasses.dataclass
class RunStorage(RunPlugin):
    """The journal and the checkpoints of a training run: saves right after a version is published, while the trainer is
    still idle."""

    does = "checkpoint"

    side: TrainerSide
    journal: EventLog | None
    begun: Begun
    every: int  # steps between checkpoints; 0: none
    last: Version  # always saved, unless none are
    keep_all: bool  # of the journal
    mirror: Mirror | None = None  # the workdir is in a bucket
    exports: HfExports | None = None
    durable: JournaledWorld | None = dataclasses.field(init=False, default=None)  # from `behind` on
    floor: Version = dataclasses.field(init=False, default=-1)  # the oldest live version, as far as it is durable
    log: RunLog = dataclasses.field(init=False)  # the same

    @property
    def steps(self) -> list[Version]:
        """Checkpoints that outlive whatever happens to this machine."""
        return self.mirror.steps() if self.mirror and self.mirror.copies_steps else self.side.checkpoints.steps()

    def due(self, version: Version) -> bool:
        return bool(self.every) and (version % self.every == 0 or version == self.last)

    def save(self, version: Version) -> None:
        state = self.side.trainer.state
        self.side.checkpoints.save(
            version, state.params, state.opt_state, self.begun.orchestrator.resume_state(), self.log.metrics
        )

    def journal_saves(self, wait: bool = False) -> None:
        """Writes to the journal what the saves since the last call were given."""
        for version, digests in self.side.checkpoints.take_saves(wait):
            if self.durable is not None:
                self.durable.record_saved(Saved(version=version, **digests._asdict()))

    def save_last(self) -> None:
        """Saves the last version, where a killed process had published it and not saved it."""
        self.side.checkpoints.wait()
        if self.due(version := int(self.side.trainer.state.step)) and version not in self.side.checkpoints.steps():
            self.save(version)
        self.side.checkpoints.wait()
        if self.mirror:
            self.mirror.settle()
        if self.due(version) and version not in self.steps:
            where = "in the bucket" if self.mirror else "saved"
            raise Stop(f"the checkpoint of version {version} is not {where}; the same command makes it")
        if self.exports:
            self.exports.finish(self.steps)

    def behind(self, world: Coordinator, log: RunLog) -> JournaledWorld | None:
        """Puts the journal in front of `world`, which takes over what a killed process left outstanding."""
        begun, self.log = self.begun, log
        world.recall(begun.payloads)
        if begun.outstanding is not None:
            world.adopt(begun.outstanding, begun.payloads, begun.orchestrator.state.now_s)
        if self.journal is not None:
            self.durable = JournaledWorld(
                world, self.journal, begun.orchestrator, begun.payloads, begun.epoch, begun.segments
            )
        return self.durable

    def observe(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        durable, checkpoints = self.durable, self.side.checkpoints
        for event in events:
            if isinstance(event, StepPublished):
                floor, saves = min(self.begun.orchestrator.state.alive), self.due(event.version)
                # else a power cut brings back a version whose start is gone, or leaves a checkpoint of a version that
                # is not in the journal
                if (floor > self.floor or saves) and (self.journal is None or self.journal.commit(sync=True)):
                    self.floor = floor
                    checkpoints.protect(floor)
                checkpoints.poll()
                if self.mirror:
                    self.mirror.poll()
                if self.exports:
                    self.exports.poll(self.steps)
                if saves:
                    self.save(event.version)
                    if durable is not None:
                        durable.rotate_due = True
                # a live version that is older than every checkpoint is made again from the initial weights
                if durable is not None and not self.keep_all and (known := self.steps) and known[0] <= self.floor:
                    durable.forget_before(known[0])
        self.journal_saves()


# ---------------------------------------------------------------- private


def opened(config: Config, workdir: Path, writer: Writer) -> RunContext:
    writer.phase("all", "opening the task, scoring one row")
    parts = RunContext(config, workdir)
    for remark in parts.remarks:
        writer.note(remark)
    return parts


def _try_early(config: Config, workdir: Path) -> None:
    """Tries rewards or environment on one row before the warm start, which takes minutes and makes the tokenizer of the
    run."""
    section = dataclasses.replace(config.task, reward_workers=1)
    if not (section.rewards or config.environment.name) or config.serving.train:
        return
    tokenizer = warm_start_data.tokenizer_of(config.sft)
    with contextlib.ExitStack() as undo:
        pool = None
        if not config.environment.name:
            pool = undo.enter_context(contextlib.closing(ScorerPool(section, tokenizer.decode)))
        with field_context("task"):
            task = tasks.open_task(
                section,
                tokenizer,
                seed=config.seed,
                max_prompt_tokens=sys.maxsize,
                max_new_tokens=1,
                heldout=section.heldout,
                quarantine_path=workdir / "quarantine.jsonl",
            )
        prompt = task.survey()[0]
        if pool:
            try_rewards(pool, prompt, tokenizer.encode)
            return
        observation = "" if section.template == "chat" else config.environment.observation
        bridge = Bridge(tokenizer, observation, task.messages_at, section.template_kwargs)
        environments = EnvironmentPool(dataclasses.replace(config.environment, workers=1), bridge, config.seed)
        undo.enter_context(contextlib.closing(environments)).wait_ready()
        environments.try_episodes(prompt, tokenizer.encode)


def _train(
    parts: RunContext,
    writer: Writer,
    guard: Guard,
    mirror: Mirror | None,
    endpoint: LiveServing | None,
    settings: changes.Settings,
) -> tuple[Halt, RunLog]:
    config = parts.config
    journal = resume.open_journal(parts.workdir, config.journal, writer)
    writer.phase("trainer", "loading the model")
    backend: Backend
    if config.cluster.launcher:
        from dora_jax.runtime.cluster_backend import ClusterBackend  # a run in one process needs none of it

        backend = ClusterBackend(parts, writer.note, mirror.lease if mirror else None)
    else:
        backend = LocalBackend(parts, writer.note)
    try:
        side = backend.trainer_side()
        try:
            begun = resume.begin(
                journal,
                side.checkpoints,
                side.trainer,
                backend.weights,
                side.pack,
                side.digest,
                build.orchestrator_config(config),
                writer,
                settings,
            )
            every, last = config.checkpoint.export_hf_every, config.steps
            exports = (
                HfExports(parts.workdir, lambda step: step % every == 0 or step == last, writer.note) if every else None
            )
            backing = RunStorage(
                side, journal, begun, config.checkpoint.every, config.steps, config.journal.keep_all, mirror, exports
            )
            if mirror:
                mirror.settle()  # what the resume has moved aside goes from the store before anything new is reported
            with contextlib.closing(exports) if exports else contextlib.nullcontext():
                halt, log = run_stages(parts, backend, writer, begun.orchestrator, guard, backing, endpoint)
                backing.save_last()
            return halt, log
        finally:
            side.checkpoints.close()
    finally:
        backend.close()


def run_stages(
    parts: RunContext,
    backend: Backend,
    writer: Writer,
    orchestrator: Orchestrator,
    guard: Guard,
    backing: RunStorage | None = None,
    endpoint: LiveServing | None = None,
) -> tuple[Halt, RunLog]:
    config, groups = parts.config, MemoryGroupStore()
    instances = backend.instances()
    side, recorder = instrument(
        config, parts.workdir, instances, backend.weights, backing.side if backing else None, orchestrator, writer.note
    )
    max_lag = orchestrator.state.decisions.max_lag
    worker = trainer_worker(config, side, groups, backend.weights, max_lag, parts.outbox) if side else None
    requests = LiveRequests(parts.prompts, parts.outbox, orchestrator) if endpoint else None
    world = parts.world(instances, worker, groups, backend.weights, requests)
    timeline = Timeline(parts.workdir, writer.note, log_bytes=config.monitor.log_bytes)
    lane = Lane("decisions")
    lane.bind()
    lanes = {"controller": lane.read, **({"trainer": worker.spent} if worker else {})}
    log = RunLog(
        workdir=parts.workdir,
        writer=writer,
        orchestrator=orchestrator,
        seconds=StepSeconds(lanes | {str(instance.instance): instance.spent for instance in instances}),
        in_timeline=timeline.write,
        decode=parts.tokenizer.decode,
        prompt_of=parts.task.prompt_at,
        solved=parts.solved,
        steps=config.steps,
        max_failed_share=config.task.max_failed_share,
        environments=parts.environments,
        noisy=any(getattr(config.environment, f"noise_{kind}") for kind in NOISE),
        views=backing.side.views if backing else None,
        log_bytes=config.monitor.log_bytes,
        samples_bytes=config.monitor.samples_bytes,
    )
    limit, seen = config.trainer.max_instance_mismatch, backing.side.gaps if backing else None
    hung: tuple[RunPlugin | None, ...] = (
        recorder,
        log,
        timeline,
        Agreement(limit, seen, instances, writer.note, timeline.write),
        backing,
        requests,
        parts.sessions,
        DraftSources(instances, world.samples) if config.rollout.drafts else None,
    )
    plugins = [plugin for plugin in hung if plugin is not None]
    every = _Plugins(plugins, lane)
    world.listen(every.record)
    durable = backing.behind(world, log) if backing else None
    guard.diagnose = lambda: f"{orchestrator.summary()['waits']}; {world.diagnosis()}"
    with _ending(durable, world, backend, plugins, guard):
        writer.phase("all", "compiling")
        ups = backend.ready(instances, worker)
        writer.phase("all", "")
        serves: contextlib.AbstractContextManager[str] = contextlib.nullcontext("")
        if endpoint and requests:
            serves = endpoint.serving(config, parts.tokenizer, requests, parts.sessions)
        try:
            with serves as addresses, quiet_collector():
                writer.note(addresses)
                world.start(ups)
                halt = run(orchestrator, GuardedWorld(durable or world, guard), [every.observe])
                if backing:
                    backing.journal_saves(wait=True)
                return halt, log
        except ImpossibleFact as error:
            raise RunError(f"{error}; the same command goes on from before that") from error


class _Plugins(RunPlugin):
    """All plug-ins of a run, each as what the controller's lane does."""

    def __init__(self, plugins: Sequence[RunPlugin], lane: Lane):
        self._plugins, self._lane = plugins, lane
        self._listening = [plugin for plugin in plugins if type(plugin).record is not RunPlugin.record]

    def record(self, record: object) -> None:
        before = self._lane.does
        for plugin in self._listening:
            self._lane.turn(plugin.does)
            plugin.record(record)
        self._lane.turn(before)

    def observe(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        before = self._lane.does
        for plugin in self._plugins:
            self._lane.turn(plugin.does)
            plugin.observe(events, commands)
        self._lane.turn(before)


@contextlib.contextmanager
def _ending(
    durable: JournaledWorld | None, world: Coordinator, backend: Backend, plugins: Sequence[RunPlugin], guard: Guard
) -> Iterator[None]:
    """Closes these at the end. A stopped run does not wait for what its stages are in the middle of."""
    stopped = False
    try:
        yield
    except Stop:
        stopped = True
        raise
    finally:
        with contextlib.ExitStack() as ends:  # the last first; each of them, even where one before it raises
            for plugin in reversed(plugins):
                ends.callback(plugin.close)
            ends.callback(world.close, guard.patience_s if stopped else STAGE_END_S)
            if stopped:
                ends.callback(backend.close)  # a gang that is gone lets go of the threads that wait for its answers
            if durable:
                ends.callback(durable.close)
