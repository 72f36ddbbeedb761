"""What a simulation is told: an ml_collections ConfigDict at the edge, these frozen dataclasses inside.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_collections

from dora_jax.chips import CHIPS
from dora_jax.config import ConfigError
from dora_jax.orchestrate.modes import MODES, Decisions
from dora_jax.spelling import nearest

section = dataclasses.dataclass(frozen=True, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    params: float = 32.8e9  # all weights
    active_params: float = 0.0  # used by one token; 0: all of them (dense)
    experts: int = 0  # routed experts a layer; 0: dense
    experts_per_token: int = 0
    n_layers: int = 64
    d_model: int = 5120
    n_heads: int = 40
    head_dim: int = 128
    kv_bytes_per_token: float = 262144.0  # all layers
    weight_bytes_per_param: float = 2.0


@dataclass(frozen=True, kw_only=True)
class HardwareSection:
    chip: str = "h800"
    chips: int = 64
    rollout_chips: int = 0  # the trainer has the others; 0: colocated, everybody has all and they take turns
    tensor: int = 4  # chips that split every matrix of an instance
    expert: int = 1  # groups of `tensor` chips that split the experts of an instance
    residents: int = 1  # R: versions an instance holds at once
    slots: int = 512  # samples that decode at once, per instance
    hbm_share: float = 0.9  # of HBM that weights and KV may fill
    page_size: int = 16
    speeds: tuple[float, ...] = (1.0,)  # relative speeds of the instances, repeated

    @property
    def instance_chips(self) -> int:
        return self.tensor * self.expert

    def speed(self, instance: int) -> float:
        return self.speeds[instance % len(self.speeds)]

    @property
    def colocated(self) -> bool:
        return self.rollout_chips == 0

    @property
    def instances(self) -> int:
        return (self.rollout_chips or self.chips) // self.instance_chips

    @property
    def trainer_chips(self) -> int:
        return self.chips - self.rollout_chips


@dataclass(frozen=True, kw_only=True)
class CostSection:
    path: str = ""  # measured costs (JSON, see sim/cost.py) in place of the roofline
    decode_overhead_s: float = 0.005  # of one tick, whatever its batch
    hbm_efficiency: float = 0.8  # share of the chip's bandwidth that decode reaches
    flops_efficiency: float = 0.5  # share of the chip's FLOP/s that prefill and a full decode batch reach
    train_utilisation: float = 0.35  # share of the trainer's FLOP/s, preparation included
    train_fixed_s: float = 0.0  # of a step, however many chips
    score_s: float = 1.0  # from the last sample of a group to its rewards
    link_efficiency: float = 0.7
    load_fixed_s: float = 0.5  # of one weight transfer
    move_fixed_s: float = 0.02  # of one sample's migration
    balance_s: float = 0.0  # of a step, that instances which versions share stand still to balance and to move samples
    publish_s: float = 0.0  # from a step's end until its version is there to be loaded
    control_s: float = 0.0  # from a fact to the command that follows from it


@dataclass(frozen=True, kw_only=True)
class WorkloadSection:
    seed: int = 0
    max_prompt_tokens: int = 2048
    max_new_tokens: int = 30000
    distribution: str = "lognormal"  # lognormal, heavy, file, or the work of a recorded journal
    mean_tokens: float = 2400.0  # of a response, the cut at max_new_tokens included; file: 0 keeps its mean
    sigma: float = 1.0  # of log length
    tail_share: float = 0.05  # heavy: share of responses in the Pareto tail that begins where the body ends
    tail_alpha: float = 1.2  # heavy: its exponent
    path: str = ""  # file: one length a line; journal: see sim/replay.py
    group_correlation: float = 0.5  # of the log lengths of siblings
    prompt_tokens: float = 160.0  # mean
    prompt_sigma: float = 0.6
    turns: float = 1.0  # mean turns of a response; between two of them a tool runs
    tool_s: float = 0.0  # median latency of a tool call
    tool_sigma: float = 1.0
    observation_tokens: int = 0  # that a tool call appends
    filtered_share: float = 0.0  # groups without signal
    failed_share: float = 0.0  # groups whose scoring fails
    tasks: tuple[Mapping[str, Any], ...] = ()  # a mixture: {"share": 0.3, and any of the fields above}


@dataclass(frozen=True, kw_only=True)
class OrchestratorSection:
    max_versions: int = 3
    groups_per_step: int = 512
    group_size: int = 16
    inflight: float = 1.25
    updates: int = 1  # optimizer updates a step; modes that take parts train each as soon as its groups are ready
    rebalance_period_s: float = 20.0
    peer_weights: bool = True
    decisions: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # replaces choices of the mode


@dataclass(frozen=True, kw_only=True)
class FaultSection:
    mtbf_s: float = 0.0  # mean time between losses of one instance; 0: never
    repair_s: float = 120.0
    failed_moves: float = 0.0  # share


@dataclass(frozen=True, kw_only=True)
class GridSection:
    """What `--tune` tries, the same for every mode."""

    rollout_shares: tuple[float, ...] = tuple(n / 16 for n in range(3, 15))  # of the chips; colocated is tried as well
    inflight: tuple[float, ...] = (0.5, 0.75, 1.0, 1.15, 1.25, 1.5, 2.0)
    max_versions: tuple[int, ...] = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    modes: tuple[str, ...] = MODES
    rows: tuple[Mapping[str, Any], ...] = ()
    steps: int = 8
    warmup_steps: int = 2  # left out of every average
    seeds: int = 1  # runs of each row, from workload.seed on; of several the table shows mean and standard deviation
    report_tokens: int = 1024  # an instance reports progress every so many ticks
    model: ModelSection = ModelSection()
    hardware: HardwareSection = HardwareSection()
    cost: CostSection = CostSection()
    workload: WorkloadSection = WorkloadSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
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
    tree = ml_collections.ConfigDict(dataclasses.asdict(SimConfig())).lock()
    tree.orchestrator.decisions.unlock()
    return tree


def from_config_dict(tree: ml_collections.ConfigDict) -> SimConfig:
    """Converts and checks everything at once, rows included."""
    config = _build(SimConfig, tree.to_dict(preserve_field_references=False))
    problems = list(_problems(config))
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
    known = fields()
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"{name}: unknown field; the nearest is {nearest(name, known)}")
        head, _, leaf = name.rpartition(".")
        if head:
            value = dataclasses.replace(getattr(config, head), **{leaf: value})
        config = dataclasses.replace(config, **{head or leaf: value})
    return config


def fields(cls: type = SimConfig, prefix: str = "") -> list[str]:
    """Dotted names of all fields, sections left out."""
    found = []
    for field in dataclasses.fields(cls):
        nested = dataclasses.is_dataclass(field.default)
        found += fields(type(field.default), f"{field.name}.") if nested else [prefix + field.name]
    return found


# ---------------------------------------------------------------- private


def _build(cls: type, tree: Mapping[str, Any]) -> Any:
    values = {}
    for field in dataclasses.fields(cls):
        value = tree[field.name]
        if dataclasses.is_dataclass(field.default):
            value = _build(type(field.default), value)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _problems(config: SimConfig) -> Any:
    """Sentences about what no row can repair."""
    if config.steps <= config.warmup_steps:
        yield f"steps: {config.steps} steps leave none to measure after {config.warmup_steps} of warm-up"
    if config.seeds < 1:
        yield f"seeds: {config.seeds} is less than one run of a row"
    for mode in config.modes:
        if mode not in MODES:
            yield f"modes: {mode!r} is none of {', '.join(MODES)}"
    known = set(fields())
    for row in config.rows:
        if row.get("mode") not in MODES:
            yield f"rows: {dict(row)} names no mode; they are {', '.join(MODES)}"
        for name in set(row) - {"label", "mode", "set", "published"}:
            yield f"rows: {name!r} is none of label, mode, set, published"
        for name in set(row.get("set", {})) - known:
            yield f"rows: {name}: unknown field; the nearest is {nearest(name, known)}"


def _row_problems(row: Row) -> Any:
    hardware, work, section = row.config.hardware, row.config.workload, row.config.orchestrator
    if hardware.chip not in CHIPS:
        yield f"hardware.chip: {hardware.chip!r} is none of {', '.join(CHIPS)}"
    if not 0 <= hardware.rollout_chips < hardware.chips:
        yield f"hardware.rollout_chips: {hardware.rollout_chips} of {hardware.chips} chips leave none to the trainer"
    elif hardware.instances < 1:
        yield (
            f"hardware.tensor: an instance of {hardware.instance_chips} chips does not fit on "
            f"{hardware.rollout_chips or hardware.chips}"
        )
    if work.distribution not in ("lognormal", "heavy", "file", "journal"):
        yield f"workload.distribution: {work.distribution!r} is none of lognormal, heavy, file, journal"
    if work.distribution in ("file", "journal") and not work.path:
        yield f"workload.path: missing; distribution {work.distribution} reads its lengths there"
    if not 0 <= work.group_correlation <= 1:
        yield f"workload.group_correlation: {work.group_correlation} is not between 0 and 1"
    unknown = set(section.decisions) - {field.name for field in dataclasses.fields(Decisions)}
    for name in sorted(unknown):
        yield f"orchestrator.decisions: {name} is no choice of a mode"
