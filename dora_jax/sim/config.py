"""The configuration of a simulation: an ml_collections ConfigDict at the edge, these frozen dataclasses inside.

A config file reads
    from dora_jax.sim import config
    def get_config(arg=None):
        c = config.defaults()
        c.hardware.chip = "h800"
        return c

`rows` are the lines of the table: {"label": ..., "mode": ..., "set": {"workload.mean_tokens": 2600.0}, "published":
{"step_min": 22.91}}. Without rows there is one for each of `modes`. Every row faces the same work unless it says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_collections

from dora_jax.base import config_tree
from dora_jax.base.chips import CHIPS
from dora_jax.base.config_tree import field, nearest
from dora_jax.config import ConfigError
from dora_jax.costs import CostOptions, Hardware, ModelSizes
from dora_jax.orchestrate.modes import MODES, Decisions
from dora_jax.sim.drafts import DraftSection


@dataclass(frozen=True, kw_only=True)
class WorkloadSection:
    seed: int = 0
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 30000
    distribution: str = field("lognormal", "lognormal, heavy, file, or the work of a recorded journal")
    mean_tokens: float = field(2400.0, "of a response, the cut at max_new_tokens included; file: 0 keeps its mean")
    sigma: float = field(1.0, "of log length")
    tail_share: float = field(0.05, "heavy: share of responses in the Pareto tail that begins where the body ends")
    tail_alpha: float = field(1.2, "heavy: its exponent")
    path: str = field("", "file: one length a line; journal: see recording.py")
    group_correlation: float = field(0.5, "of the log lengths of siblings")
    prompt_tokens: float = field(160.0, "mean")
    prompt_sigma: float = 0.6
    turns: float = field(1.0, "mean turns of a response; between two of them it waits for its environment")
    environment_s: float = field(0.0, "median time until the environment answers")
    environment_sigma: float = field(1.0, "of its log")
    observation_tokens: int = field(0, "that an answer appends")
    filtered_share: float = field(0.0, "groups without signal")
    failed_share: float = field(0.0, "groups whose scoring fails")
    mix: Mapping[str, Any] = field(
        {}, 'tasks that take turns: name -> {"weight", "limit" as in task.mix, and any of the fields above}'
    )


@dataclass(frozen=True, kw_only=True)
class SimOrchestratorSection:
    max_versions: int = 3
    stride: int = field(1, "rollouts take every n-th version; 0: n follows what was measured")
    max_mean_lag: float = field(0.0, "that a stride of 0 keeps to; 0: no more than max_versions - 1")
    groups_per_step: int = 512
    group_size: int = 16
    inflight: float = 1.25
    updates: int = field(1, "optimizer updates a step; modes that take parts train each when its groups are ready")
    rebalance_period_s: float = 20.0
    task_lead: float = field(0.0, "steps of prompts by which a task with a limit may be ahead; 0: any number")
    peer_weights: bool = True
    elastic: bool = field(False, "the trainer's chips decode while it waits")
    swapped_kv: str = field(
        "parked", "of samples under which weights are swapped: parked first, dropped for nothing, or reused as it is"
    )
    hold_slots: bool = field(False, "a sample keeps its slot and KV while it waits for its environment")
    decisions: Mapping[str, Any] = field({}, "replaces choices of the mode")


@dataclass(frozen=True, kw_only=True)
class FaultSection:
    mtbf_s: float = field(0.0, "mean time between losses of one instance; 0: never")
    repair_s: float = 120.0
    failed_moves: float = field(0.0, "share")


@dataclass(frozen=True, kw_only=True)
class GridSection:
    """What `--tune` tries, the same for every mode."""

    rollout_shares: tuple[float, ...] = field(
        tuple(n / 32 for n in range(6, 30)), "of the chips; colocated is tried too"
    )
    inflight: tuple[float, ...] = (0.5, 0.75, 1.0, 1.15, 1.25, 1.5, 2.0, 2.5, 3.0)
    max_versions: tuple[int, ...] = (2, 3, 4, 6, 8, 10, 12)
    strides: tuple[int, ...] = field((1,), "of mode dora")


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    modes: tuple[str, ...] = MODES
    rows: tuple[Mapping[str, Any], ...] = ()
    steps: int = 8
    warmup_steps: int = field(2, "left out of every average")
    seeds: int = field(1, "runs of each row, from workload.seed on; of several the table shows mean and deviation")
    report_tokens: int = field(64, "an instance reports progress every so many ticks")
    model: ModelSizes = dataclasses.field(default=ModelSizes())
    hardware: Hardware = dataclasses.field(default=Hardware())
    cost: CostOptions = dataclasses.field(default=CostOptions())
    workload: WorkloadSection = WorkloadSection()
    orchestrator: SimOrchestratorSection = SimOrchestratorSection()
    draft: DraftSection = dataclasses.field(default=DraftSection())
    fault: FaultSection = FaultSection()
    grid: GridSection = GridSection()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: a mode in a configuration of its own."""

    label: str
    mode: str
    config: SimConfig
    published: Mapping[str, float]


def defaults() -> ml_collections.ConfigDict:
    """What a config file fills in; locked but for the free-form dictionary."""
    return config_tree.defaults(SimConfig())


def from_config_dict(tree: config_tree.Tree) -> SimConfig:
    """Converts and checks everything at once, rows included."""
    config, problems = config_tree.build(SimConfig, tree)
    problems = problems or list(_problems(config))
    if not problems:
        for row in rows(config):
            problems += [f"row {row.label!r}: {problem}" for problem in _row_problems(row)]
    if problems:
        raise ConfigError(problems)
    return config


def rows(config: SimConfig) -> list[Row]:
    """The lines of the table, each with its changes applied."""
    given = config.rows or tuple({"mode": mode} for mode in config.modes)
    return [
        Row(
            label=row.get("label", row["mode"]),
            mode=row["mode"],
            config=replace(config, row.get("set", {})),
            published=row.get("published", {}),
        )
        for row in given
    ]


def replace(config: SimConfig, changes: Mapping[str, Any]) -> SimConfig:
    """A config with some dotted fields changed."""
    known = config_tree.fields(SimConfig)
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{name}: unknown field; the nearest is {nearest(name, known)}")
        head, _, leaf = name.rpartition(".")
        if head:
            value = dataclasses.replace(getattr(config, head), **{leaf: value})
        config = dataclasses.replace(config, **{head or leaf: value})
    return config


# ---------------------------------------------------------------- private


def _problems(config: SimConfig) -> Iterator[str]:
    """Sentences about what no row can repair."""
    if config.steps <= config.warmup_steps:
        yield f"steps: {config.steps} steps leave none to measure after {config.warmup_steps} of warm-up"
    if config.seeds < 1:
        yield f"seeds: {config.seeds} is less than one run of a row"
    for mode in config.modes:
        if mode not in MODES:
            yield f"modes: {mode!r} is none of {', '.join(MODES)}"
    known = set(config_tree.fields(SimConfig))
    for row in config.rows:
        if row.get("mode") not in MODES:
            yield f"rows: {dict(row)} names no mode; they are {', '.join(MODES)}"
        for name in set(row) - {"label", "mode", "set", "published"}:
            yield f"rows: {name!r} is none of label, mode, set, published"
        for name in set(row.get("set", {})) - known:
            yield f"rows: {name}: unknown field; the nearest is {nearest(name, known)}"


def _row_problems(row: Row) -> Iterator[str]:
    hardware, work, section = row.config.hardware, row.config.workload, row.config.orchestrator
    if hardware.chip not in CHIPS:
        yield f"hardware.chip: {hardware.chip!r} is none of {', '.join(CHIPS)}"
    if not 0 <= hardware.rollout_chips < hardware.chips:
        yield f"hardware.rollout_chips: {hardware.rollout_chips} of {hardware.chips} chips leave none to the trainer"
    elif hardware.instances < 1:
        yield (
            f"hardware.tensor: an instance of {hardware.instance_chips} chips does not fit on "
            f"{(hardware.rollout_chips or hardware.chips) - hardware.prefill_chips}"
        )
    if 0 < hardware.prefill_chips < hardware.instance_chips or hardware.prefill_chips < 0:
        yield f"hardware.prefill_chips: {hardware.prefill_chips} make no instance of {hardware.instance_chips} chips"
    if work.distribution not in ("lognormal", "heavy", "file", "journal"):
        yield f"workload.distribution: {work.distribution!r} is none of lognormal, heavy, file, journal"
    if work.distribution in ("file", "journal") and not work.path:
        yield f"workload.path: missing; distribution {work.distribution} reads its lengths there"
    if not 0 <= work.group_correlation <= 1:
        yield f"workload.group_correlation: {work.group_correlation} is not between 0 and 1"
    draft = row.config.draft
    if draft.tokens < 0 or not 0 <= draft.acceptance <= 1 or draft.cost < 0:
        yield f"draft: {draft} has less than no tokens or cost, or an acceptance that is no share"
    if section.swapped_kv not in ("parked", "dropped", "reused"):
        yield f"orchestrator.swapped_kv: {section.swapped_kv!r} is none of parked, dropped, reused"
    unknown = set(section.decisions) - {field.name for field in dataclasses.fields(Decisions)}
    for name in sorted(unknown):
        yield f"orchestrator.decisions: {name} is no choice of a mode"
