"""What a run may wear around its engines and its trainer: a chip's pace (emulated_timing.py), a recorder's watch (recorder.py).

Consumes instances and the trainer's side before they start; their results stay what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dora_jax.config import Config, ConfigError
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.runtime.emulated_timing import PacedEngine, PacedTrainer, PacedWeights, costs_of
from dora_jax.runtime.recorder import Recorder

RECORDED = "recorded"  # its folder in the workdir


def put_on(
    config: Config,
    workdir: Path,
    instances: Sequence[Any],
    weights: Any,
    side: Any,
    orchestrator: Orchestrator,
    notify: Callable[[str], None],
) -> tuple[Any, Recorder | None]:
    """(the trainer's side as it is to be used, the recorder if one is asked for); instances are dressed on the spot."""
    paced, recorder = lambda engine: engine, None
    if config.pace:
        costs = costs_of(config.pace, len(instances))
        notify(f"PACED: ticks, steps and transfers last as long as on {config.pace}; times are not this machine's")
        paced, weights = (
            lambda engine: PacedEngine(engine, costs, 1.0),
            PacedWeights(weights, costs, 1.0, len(instances)),
        )
        if side is not None:
            trainer = PacedTrainer(side.trainer, side.pack, costs, 1.0, config.orchestrator.groups_per_step)
            side = dataclasses.replace(side, trainer=trainer, pack=trainer.pack)
    if config.journal.record and side is not None:
        if orchestrator.state.ledger.admitted or orchestrator.state.ledger.base:
            raise ConfigError(
                f"journal.record: the run in {workdir} has begun already, and a recording begins with its run"
            )
        recorder = Recorder(workdir / RECORDED, orchestrator.state.config)
    if config.pace or recorder:
        for instance in instances:
            instance.wrap_engine(lambda engine: recorder.engine(paced(engine)) if recorder else paced(engine), weights)
    return side, recorder
