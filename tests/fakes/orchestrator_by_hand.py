"""A small orchestrator whose facts a test tells one by one."""

import dataclasses

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.types import SampleId


def make(**changes) -> Orchestrator:
    base = dict(groups_per_step=2, group_size=2, total_steps=4, max_prompt_tokens=16, max_new_tokens=48)
    return Orchestrator(OrchestratorConfig(**{**base, **changes}))


def up(instance=0, slots=6, **kwargs) -> ev.InstanceUp:
    return ev.InstanceUp(instance=instance, slots=slots, pages=64, page_size=16, **kwargs)


def ready(brain: Orchestrator, *instances: int) -> tuple:
    """Instances 0.. up and loaded with version 0; returns the last answer."""
    out = ()
    for i in instances or (0,):
        brain.step(up(i))
    for i in instances or (0,):
        out = brain.step(ev.WeightsLoaded(instance=i, version=0))
    return out


def begin(brain: Orchestrator, *ids: SampleId) -> None:
    for id in ids:
        unit = brain.state.unit(id)
        brain.step(ev.SampleStarted(id=id, instance=unit.instance, version=unit.version))


def unnumbered(*commands: ev.Command) -> tuple[ev.Command, ...]:
    """The commands, whatever the numbers of their Start and Resume are."""
    placed = ev.Start | ev.Resume
    return tuple(dataclasses.replace(c, attempt=0) if isinstance(c, placed) else c for c in commands)


A, B = SampleId(0, 0), SampleId(0, 1)
