"""The sections of what goes out of a run while it goes on: monitoring, and the endpoint on its fleet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from dora_jax.base import callables
from dora_jax.base.config_tree import FREE, field


@dataclass(frozen=True, kw_only=True)
class MonitorSection:
    """What else receives the metrics of a run (runtime/observe/monitoring.py), and how much its logs may hold."""

    change: ClassVar[str] = FREE

    port: int = field(0, "of 127.0.0.1, where /metrics (Prometheus) and /healthz answer; 0: none", ge=0, le=65535)
    wandb: str = field("", "Weights & Biases project that gets each record of metrics.jsonl (extra wandb); empty: none")
    sinks: tuple[str, ...] = field((), "import paths of your own metric sinks (dora_jax.base.metrics.Sink)")
    log_bytes: int = field(
        2**27, "trajectories.txt, timeline.jsonl, trace.json, each: the oldest go; 0: no limit", ge=0, tuning=True
    )
    samples_bytes: int = field(
        2**30, "samples/, every group with its answers: the oldest steps go; 0: no limit", ge=0, tuning=True
    )


@dataclass(frozen=True, kw_only=True)
class ServingSection:
    """The endpoint of a run: what `python -m dora_jax.serve` answers, sampled by the run's own fleet while it
    trains."""

    change: ClassVar[str] = FREE

    port: int = field(0, "where it answers; 0: none", ge=0, le=65535)
    host: str = field("127.0.0.1", "its address; others than loopback want DORA_SERVE_TOKEN")
    name: str = field("policy", "what requests call the model; NAME@41 is its version 41")
    train: bool = field(
        False,
        "a session is an episode: task.rewards score each answer by what the user wrote next",
        change="with it groups are sessions of the endpoint, without it prompts of the task",
    )
    session_idle_s: float = field(60.0, "train: a session that is silent for so long has ended", gt=0)
    reward_s: float = field(
        0.0,
        "train: clients post rewards of their sessions, until so long after a session's end; 0: they do not",
        ge=0,
        change="with it a reward is what clients post beside task.rewards, without it task.rewards alone",
    )
    hold_versions: int = field(0, "older versions kept for the sessions that began with them", ge=0)
    hold_s: float = field(600.0, "so long after a newer one is published, at most; then their requests get 410", ge=0)


def problems(config: Any) -> Iterator[str]:
    """What does not fit in a configuration with sinks of the user's, or with an endpoint."""
    serving, residents = config.serving, config.rollout.residents
    for path in config.monitor.sinks:
        try:
            callables.imported(path, "sink")
        except ValueError as error:
            yield f"monitor.sinks: {error}"
    if serving.train:
        # Of a run that trains on the sessions of its endpoint.
        if not config.serving.port:
            yield "serving.train: there are no sessions without an endpoint; set serving.port"
        if config.environment.name:
            yield "environment.name: users are the environment where serving.train is set; leave it empty"
        if config.reward_model.path:
            yield "reward_model.path: sessions are scored by task.rewards, turn by turn; leave it empty"
        if not (config.task.rewards or serving.reward_s):
            yield "task.rewards: no reward is named that says what an answer was worth, and serving.reward_s is 0"
        if config.orchestrator.mode in ("partial", "staleflow"):
            yield f"orchestrator.mode: {config.orchestrator.mode}; a session belongs to one version"
        if config.task.mix:
            yield "task.mix: the prompts of the run are sessions where serving.train is set; leave it empty"
    elif serving.reward_s:
        yield "serving.reward_s: no session is trained on without serving.train"
    if not serving.port:
        return
    if serving.port == config.monitor.port:
        yield f"serving.port: {serving.port} is monitor.port too"
    if serving.hold_versions and residents < serving.hold_versions + 2:
        yield (
            f"serving.hold_versions: an instance that holds {residents} versions at once (rollout.residents) would "
            f"drop the newest for the sessions of {serving.hold_versions} older ones; set rollout.residents to "
            f"{serving.hold_versions + 2}"
        )
