"""One row of the table: a mode, a configuration, the orchestrator of production, and a world in virtual time."""

from __future__ import annotations

import dataclasses
import functools

from dora_jax.config import ConfigError
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.loop import Observer, run
from dora_jax.orchestrate.modes import Decisions, OrchestratorConfig
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.meter import Result
from dora_jax.sim.trace import Trace
from dora_jax.sim.world import EndOfMeasurement, SimWorld

# Fields of the configuration that go to the orchestrator as they are.
SHARED = ("max_versions", "groups_per_step", "group_size", "inflight", "updates", "rebalance_period_s")


class StoppedEarly(RuntimeError):
    """The orchestrator halted before the measured steps were over: the sentence says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimOrchestratorConfig(OrchestratorConfig):
    """With some of the mode's choices replaced, to see what each of them is worth. No trainer works on chips that decode."""

    changes: tuple[tuple[str, object], ...] = ()

    @functools.cached_property
    def decisions(self) -> Decisions:
        changed = dataclasses.replace(OrchestratorConfig.decisions.fget(self), **dict(self.changes))
        return dataclasses.replace(changed, parts=1) if self.colocated else changed


def simulate(row: Row, *, trace: Trace | None = None, observers: tuple[Observer, ...] = ()) -> Result:
    """The measured steps of one row."""
    config = row.config
    told = orchestrator_config(config, row.mode)
    if told.problems():
        raise ConfigError([f"row {row.label!r} could never progress: {problem}" for problem in told.problems()])
    world = SimWorld(config, told.decisions, until=config.steps, trace=trace)
    brain = Orchestrator(told, evaluate_start=False)
    try:
        halt = run(brain, world, observers)
    except EndOfMeasurement:
        return world.meter.result
    raise StoppedEarly(f"{row.label}: {halt.reason}")


def orchestrator_config(config: SimConfig, mode: str) -> OrchestratorConfig:
    section, work = config.orchestrator, config.workload
    fields = {name: getattr(section, name) for name in SHARED} | {
        "mode": mode, "colocated": config.hardware.colocated,
        "max_prompt_tokens": work.max_prompt_tokens, "max_new_tokens": work.max_new_tokens,
        # the work goes on behind the last measured step, so that this step is like those before it
        "total_steps": config.steps + section.max_versions + 2,
    }  # fmt: skip
    if not section.decisions:
        return OrchestratorConfig(**fields)
    return SimOrchestratorConfig(**fields, changes=tuple(section.decisions.items()))
