"""The jobs that a person starts, from configuration to closing line: train, evaluate; and `load_policy` for scripts."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dora_jax import config as configs
from dora_jax import devices, sft
from dora_jax.buffer.store import MemoryGroupStore
from dora_jax.config import Config, ConfigError
from dora_jax.metrics import Writer
from dora_jax.models import decoder, hf
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import Command, Event, Halt, StepPublished
from dora_jax.runtime import build
from dora_jax.runtime.build import Parts
from dora_jax.runtime.loop import Observer, run
from dora_jax.runtime.observe import RunLog
from dora_jax.runtime.workers import TrainerWorker
from dora_jax.tokenizer import Tokenizer
from dora_jax.trainer import checkpoint
from dora_jax.trainer.checkpoint import Checkpoints
from dora_jax.trainer.step import Trainer


def train(config: Config, workdir: Path) -> int:
    """Warm start where the base is missing, then RL until config.steps; resumes. Returns the exit code."""
    began = time.monotonic()
    devices.setup_platform(config)
    with Writer(workdir) as writer:
        make_base(config, workdir, writer)
        halt, log = _train(Parts(config, workdir), writer)
        accuracies = ", ".join(f"{100 * a:.1f} % at version {v}" for v, a in sorted(log.accuracy.items()))
        writer.close_with(f"{halt.reason} ({time.monotonic() - began:.0f} s in all); held-out accuracy: {accuracies or 'not measured'}")
    return 0 if halt.ok else 1


def evaluate(config: Config, workdir: Path, step: int | None = None) -> int:
    """avg@k and pass@k of one checkpoint on the held-out prompts. A run of no steps: no trainer, the same engines."""
    devices.setup_platform(config)
    directory = workdir / "checkpoints"
    version = pick(directory, step)
    with Writer(workdir) as writer:
        parts = Parts(config, workdir)
        model = hf.read_config(config.model.path)
        parts.weights.put(version, checkpoint.read_params(directory, version))
        orchestrator = Orchestrator(build.orchestrator_config(dataclasses.replace(config, steps=version)),
                                    start_version=version)
        _, log = _run(parts, writer, model, orchestrator)
    print(json.dumps({"step": version, **log.evaluations[version]}))
    return 0


def load_policy(workdir: str | Path, step: int | None = None) -> tuple[Any, Any, Tokenizer]:
    """(ModelConfig, params in the stacked layout, Tokenizer) of a run's checkpoint."""
    tree = json.loads((Path(workdir) / "config.json").read_text())
    path = configs.from_config_dict(tree, "evaluate").model.path
    directory = Path(workdir) / "checkpoints"
    return hf.read_config(path), checkpoint.read_params(directory, pick(directory, step)), Tokenizer.load(path)


def make_base(config: Config, workdir: Path, writer: Writer) -> None:
    """The quickstart's way: model.path is the warm start's own output and does not exist yet."""
    if not (Path(config.model.path) / "config.json").exists():
        sft.run(config, workdir, writer)


def pick(directory: Path, step: int | None) -> int:
    """The step asked for, or the newest that verifies; ConfigError where there is none."""
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


class Saver:
    """Loop observer: saves right after a version is published, while the trainer is still idle."""

    def __init__(self, checkpoints: Checkpoints, trainer: Trainer, orchestrator: Orchestrator, log: RunLog,
                 due: Callable[[int], bool]):
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._orchestrator = orchestrator
        self._log = log
        self._due = due

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        if not isinstance(event, StepPublished):
            return
        self._checkpoints.poll()
        if self._due(event.version):
            state = self._trainer.state
            self._checkpoints.save(event.version, state.params, state.opt_state, self._orchestrator.resume_state(),
                                   self._log.metrics)


# ---------------------------------------------------------------- private


def _train(parts: Parts, writer: Writer) -> tuple[Halt, RunLog]:
    config = parts.config
    writer.phase("trainer", "loading the model")
    mesh = parts.trainer_mesh()
    model, params = hf.load(config.model.path, mesh)
    trainer = Trainer(model, config.trainer, mesh, params, total_steps=config.steps, dtype=config.model.dtype,
                      vocab_limit=parts.tokenizer.vocab_size, temperature=config.rollout.temperature,
                      dump_dir=str(parts.workdir))
    checkpoints = Checkpoints(parts.workdir / "checkpoints", config.checkpoint)
    resume = _restore(checkpoints, trainer, writer)
    orchestrator = Orchestrator(build.orchestrator_config(config), **resume)
    parts.weights.put(int(trainer.state.step), trainer.params)

    def due(version: int) -> bool:
        every = config.checkpoint.every
        return bool(every) and (version % every == 0 or version == config.steps)

    def saver(log: RunLog) -> list[Observer]:
        return [Saver(checkpoints, trainer, orchestrator, log, due)]

    try:
        return _run(parts, writer, model, orchestrator, trainer, saver)
    finally:
        checkpoints.close()


def _restore(checkpoints: Checkpoints, trainer: Trainer, writer: Writer) -> dict[str, Any]:
    """Loads the newest good checkpoint into the trainer; what the orchestrator needs to go on from there."""
    step = checkpoints.latest(full=True)
    if step is None:
        return {}
    abstract = trainer.abstract_state()
    restored = checkpoints.restore(step, abstract.params, abstract.opt_state)
    trainer.load(restored.params, restored.opt_state, step)
    writer.resume(step)
    writer.note(f"resuming from step {step}")
    return restored.rl_state


def _run(parts: Parts, writer: Writer, model: Any, orchestrator: Orchestrator, trainer: Trainer | None = None,
         observers: Callable[[RunLog], list[Observer]] = lambda log: []) -> tuple[Halt, RunLog]:
    config, groups = parts.config, MemoryGroupStore()
    instances = parts.instances(model)
    trainer_worker = trainer and TrainerWorker(trainer, build.packer(config, trainer), groups, parts.weights,
                                               build.orchestrator_config(config).decisions.max_lag, parts.outbox)
    world = parts.world(instances, trainer_worker, groups)
    log = RunLog(workdir=parts.workdir, writer=writer, orchestrator=orchestrator, instances=instances,
                 decode=parts.tokenizer.decode, prompt_of=parts.task.prompt_at, eval_groups=config.eval.prompts,
                 max_failed_share=config.task.max_failed_share)
    world.listen(log.record)
    try:
        writer.phase("all", "compiling")
        warmups = [worker.engine.warmup for worker in instances]
        if trainer:
            shape = build.batch_layout(config, trainer)
            warmups.append(lambda: trainer.warmup(shape.rows, shape.tokens))
        build.side_by_side(warmups)
        writer.phase("all", "")
        writer.phase("rollout", "generating")
        world.start([build.instance_up(worker, config) for worker in instances])
        return run(orchestrator, world, [log.event, *observers(log)]), log
    finally:
        world.close()
        log.close()
