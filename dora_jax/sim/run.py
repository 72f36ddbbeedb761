"""One row of the table: a mode, a configuration, the orchestrator of production, and a world in virtual time."""

from __future__ import annotations

import dataclasses
from typing import Any

from dora_jax.config import ConfigError
from dora_jax.costs import open_costs
from dora_jax.orchestrate.core import Observer, Orchestrator, run
from dora_jax.orchestrate.modes import Decisions, OrchestratorConfig
from dora_jax.sim import workload
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.meter import EndOfMeasurement, Result, Trace
from dora_jax.sim.world import SimWorld
from dora_jax.types import cycle_of


class StoppedEarly(RuntimeError):
    """The orchestrator halted before the measured steps were over: the sentence says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimOrchestratorConfig(OrchestratorConfig):
    """With some of the mode's choices replaced, to see what each of them is worth. No trainer works on chips that
    decode."""

    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def decisions(self) -> Decisions:
        changed = dataclasses.replace(super().decisions, **dict(self.changes))
        return dataclasses.replace(changed, parts=1) if self.colocated else changed


def simulate(row: Row, *, trace: Trace | None = None, observers: tuple[Observer, ...] = ()) -> Result:
    """The measured steps of one row."""
    config = row.config
    policy = orchestrator_config(config, row.mode)
    if policy.problems():
        raise ConfigError([f"row {row.label!r} could never progress: {problem}" for problem in policy.problems()])
    world = SimWorld(config, policy.decisions, until=config.steps, trace=trace)
    brain = Orchestrator(policy, evaluate_start=False)
    try:
        halt = run(brain, world, observers)
    except EndOfMeasurement:
        assert world.meter.result is not None
        return world.meter.result
    raise StoppedEarly(f"{row.label}: {halt.reason}")


def orchestrator_config(config: SimConfig, mode: str) -> OrchestratorConfig:
    section = config.orchestrator
    # the work goes on behind the last measured step, so that this step is like those before it
    last = config.steps + section.max_versions + 2
    more: dict[str, Any] = {"changes": tuple(section.decisions.items())} if section.decisions else {}
    if section.elastic:
        costs = open_costs(config.model, config.hardware, config.cost)
        more |= {"lendable": config.hardware.lendable, "switch_s": costs.lend_s() + costs.return_s()}
    more |= {"task_cycle": cycle_of(workload.weights(config.workload)), "task_ratios": workload.limits(config.workload)}
    return (SimOrchestratorConfig if section.decisions else OrchestratorConfig).of(
        config.workload, section, mode=mode, colocated=config.hardware.colocated, total_steps=last, **more
    )
