"""Configuration: an ml_collections ConfigDict at the edge, these frozen dataclasses inside.

Every field of a run in one declaration: type, choices, default, help and range. A config file reads
    from dora_jax import config
    def get_config(arg=None):
        c = config.defaults()
        c.task.name = "rows"
        return c

Laws: no JAX here, so that a mistake is reported before a device is touched; `Config` never changes; a field that
is not declared below does not exist, except inside the free-form dictionaries (`task.params`, ...).
The sections of prompts and rewards are in task.py, that of a cluster in cluster.py. Trees become a
`Config` in base/config_tree.py, the rules between fields are in plan/validate.py, the command line in cli/flags.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dora_jax.base import config_tree
from dora_jax.base.chips import CHIPS
from dora_jax.base.config_tree import AFRESH, FREE, LEARNS, field, redact
from dora_jax.config.cluster import ClusterSection
from dora_jax.config.live import MonitorSection, ServingSection
from dora_jax.config.task import EnvironmentSection, RewardModelSection, TaskSection
from dora_jax.models import families
from dora_jax.models.lora_config import Lora

if TYPE_CHECKING:
    import ml_collections

Dtype = Literal["auto", "float32", "bfloat16"]
EngineKernel = Literal["auto", "reference", "tpu", "tokamax", "gpu"]
TrainerKernel = Literal["auto", "reference", "splash", "cudnn"]
WeightBits = Literal["", "published", "bfloat16", "int8", "float8"]
KvBits = Literal["", "float8"]
RoutingReplay = Literal["none", "rollout"]
VALUE_ADVANTAGES = ("gae", "gae_turn")  # trainer.advantage, where a value model is trained too
MODEL_STAYS = "its weights are version 0 of the run, and its tokenizer has written the prompts"


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    path: str = field("", "a Hugging Face folder; a run's workdir, or WORKDIR@STEP: its policy", change=MODEL_STAYS)
    size: str = field(
        "",
        "such as Qwen3-8B: what a dry run plans for while path is missing; a folder of other sizes is refused",
        choices=("", *families.KNOWN),
        change=FREE,
    )
    dtype: Dtype = field("auto", "compute dtype; auto: by platform; masters stay float32", change=LEARNS)
    family: str = field(
        "", "import path of a Family of yours (models/families/family.py); empty: one that ships", change=FREE
    )

    def __post_init__(self) -> None:
        if self.family:  # every process of a run has its configuration, and may meet a folder of the family
            families.use(self.family)


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    change: ClassVar[str] = FREE

    instances: int = field(2, "0: as many as the devices hold", ge=0)
    tensor: int = field(1, "devices an instance (tensor parallel); of more than KV heads, neighbours share one", ge=1)
    residents: int = field(0, "R: versions an instance holds at once; 0: 1, with adapters max_versions + 1", ge=0)
    slots: int = field(
        0, "samples that decode at once, per instance; 0: those in flight that memory holds, on a CPU 32", ge=0
    )
    pages: int = field(0, "KV pages per instance; 0: what memory_share allows, on a CPU what the slots need", ge=0)
    window_pages: int = field(
        0, "of them, pages that layers with a window have; 0: all, or fewer where pages are short", ge=0, tuning=True
    )
    host_kv_bytes: int = field(0, "host memory for KV of preempted and waiting samples; 0: no limit", ge=0, tuning=True)
    memory_share: float = field(0.9, "of what weights and programs leave, for KV pages", ge=0, le=1, tuning=True)
    page_size: int = field(0, "tokens a page; 0: by platform", power_of_two=True, tuning=True)
    max_prompt_tokens: int = field(128, "longer prompts are left out", ge=1, change=AFRESH)
    max_new_tokens: int = field(128, "longest response; of an episode, all its turns", ge=1, change=AFRESH)
    prefill_tokens: int = field(0, "prompt tokens a tick may prefill; 0: by platform", ge=0, tuning=True)
    prefill_call_tokens: int = field(0, "prompt tokens of one prefill dispatch; 0: by platform", ge=0, tuning=True)
    decode_steps: int = field(0, "decode steps a dispatch; 0: by platform", ge=0)
    decode_rows: int = field(0, "rows of a decode dispatch, a divisor of slots; 0: slots", ge=0, tuning=True)
    prefill_chunk: int = field(0, "tokens of a prompt in one dispatch; 0: by platform", ge=0, tuning=True)
    context_block: int = field(128, "tokens a block, in which the past is attended to", ge=1, tuning=True)
    ladder: Literal["auto", "on", "off"] = field(
        "auto", "short contexts and few samples (1, 2, 4, ... rows) have dispatches that are compiled while it runs"
    )
    narrow_rows: int = field(
        0, "the same compiled at start: rows of the narrowest, the next ones four times wider; 0: none", ge=0
    )
    narrow_cost: float = field(
        0.0, "time of the narrowest over that of a decode dispatch; 0: measured at start", ge=0, tuning=True
    )
    late_results: Literal["auto", "on", "off"] = field(
        "auto", "on: fetch the results of dispatch i while dispatch i+1 runs", tuning=True
    )
    temperature: float = field(1.0, "0: the most likely token, of which nothing is learned", ge=0, change=AFRESH)
    top_k: int = field(0, "sample from the k most likely tokens; 0: off", ge=0, change=AFRESH)
    top_p: float = field(1.0, "nucleus sampling; 1: off", gt=0, le=1, change=AFRESH)
    min_p: float = field(
        0.0, "smallest probability relative to the most likely token's; 0: off", ge=0, le=1, change=AFRESH
    )
    attention: EngineKernel = field("auto", "kernel; auto: by platform")
    expert: int = field(1, "mixtures: rollout.tensor gives a device whole experts, 1 a part of each", ge=1)
    expert_matmul: Literal["auto", "scan", "blocks", "ragged_dot", "megablox"] = field(
        "auto", "mixtures: kernel; auto: by platform", tuning=True
    )
    min_new_tokens: int = field(0, "no stop token is sampled before so many", ge=0, change=AFRESH)
    max_repeats: int = field(0, "longest run of one token; 0: any", ge=0, change=AFRESH)
    stop_strings: tuple[str, ...] = field((), "the text that ends a sample; its tokens stay", change=AFRESH)
    weights: WeightBits = field(
        "", "type of projections; empty: bfloat16 where a CPU multiplies it natively, else as published", change=AFRESH
    )
    kv: KvBits = field("", "8-bit KV cache; empty: the compute dtype", change=AFRESH)
    drafts: int = field(0, "tokens guessed from a group's other samples and verified in one call; 0: off", ge=0)
    draft_rows: int = field(4, "no drafts where more samples of a version decode at once", ge=1, tuning=True)
    draft_cost: float = field(0.0, "time of a verifying call over a decode call's; 0: measured", ge=0, tuning=True)
    exact: bool = field(
        False, "bitwise-exact log-probs, of engine dispatches of the same rows: one more decode a sample", change=AFRESH
    )
    keep_set: bool = field(False, "send along which ids each token was drawn from; needs top_k", change=AFRESH)
    compiler_options: dict[str, Any] = field({}, "XLA options of the engine; empty: the chip's", tuning=True)


@dataclass(frozen=True, kw_only=True)
class OrchestratorSection:
    change: ClassVar[str] = AFRESH

    mode: str = field("dora", "sync, one_step, partial, evict, dora_paper, dora, rollpacker, staleflow")
    max_versions: int = field(3, "the paper's K; max_lag = K - 1", ge=1)
    stride: int = field(
        1, "rollouts take every n-th version, up to K; 0: n follows what was measured", ge=0, change=LEARNS
    )
    max_mean_lag: float = field(
        0.0,
        "stride 0: mean lag of the last 10 steps' groups that it keeps to; 0: no more than K - 1",
        ge=0,
        change=LEARNS,
    )
    groups_per_step: int = field(16, "P", ge=1)
    group_size: int = field(8, "G", ge=1)
    inflight: float = field(
        1.25,
        "groups in flight beyond the batch in training, in units of P; 0: few where all share one device, else 1.25",
        ge=0,
        change=LEARNS,
    )
    rebalance_period_s: float = field(0.5, "seconds between two looks at the instances' load", gt=0, change=FREE)
    max_filtered_rounds: int = field(
        10, "consecutive batches' worth of filtered groups that stop the run", ge=1, tuning=True, change=FREE
    )
    kv_pressure: float = field(  # relief ends at twice as many free pages
        0.03,
        "share of free KV pages below which an instance migrates or preempts samples",
        ge=0,
        le=0.5,
        tuning=True,
        change=FREE,
    )
    filter_zero_variance: bool = field(False, "DAPO dynamic sampling", change=LEARNS)
    colocated: bool = field(False, "instances stand still while the trainer works: for devices that they share")
    elastic: bool = field(False, "the trainer's devices decode while the trainer waits for samples", change=FREE)

    @property
    def max_lag(self) -> int:
        return self.max_versions - 1

    @property
    def synchronous(self) -> bool:
        return self.mode in ("sync", "rollpacker")

    @property
    def mixes_versions(self) -> bool:
        """A sample may have tokens of several versions."""
        return self.mode in ("partial", "staleflow")


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    change: ClassVar[str] = LEARNS

    data: int = field(1, "mesh axis: batch rows, parameters replicated", ge=1, change=FREE)
    fsdp: int = field(-1, "mesh axis: batch rows and parameters; -1: every device left", ge=1, besides=-1, change=FREE)
    tensor: int = field(1, "mesh axis: heads, d_ff, vocabulary", ge=1, change=FREE)
    context: int = field(1, "mesh axis: positions of a row", ge=1, change=FREE)
    expert: int = field(1, "mesh axis: batch rows and, of a mixture of experts, the experts", ge=1, change=FREE)
    pack_tokens: int = field(512, "L: packed row length; 0: by platform, a longest sample fits", ge=0, change=FREE)
    row_splits: int = field(
        0, "short rows that a row of short samples is split into; 0: by platform", ge=0, tuning=True, change=FREE
    )
    rows: int = field(0, "B: packed rows a step; 0: derived from groups, G and the length limits", ge=0, change=FREE)
    micro_batches: int = field(1, "forward and backward passes an update", ge=1, change=FREE)
    share_prompts: Literal["auto", "on", "off"] = field(
        "auto", "on: a row holds a group's prompt once; off: once a sample; auto: where attention can", change=FREE
    )
    skip_zero_advantage: bool = field(
        False, "leave out samples that move no weight; metrics are then of the others", change=FREE
    )
    learning_rate: float = field(1e-3, ge=0)
    warmup_steps: int = field(5, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = field("constant", "of the learning rate, after warmup_steps")
    b1: float = field(0.9, ge=0, lt=1, tuning=True)
    b2: float = field(0.95, ge=0, lt=1, tuning=True)
    eps: float = field(1e-8, gt=0, tuning=True)
    weight_decay: float = field(0.0, ge=0)
    max_grad_norm: float = field(1.0, "gradients are clipped to this norm", ge=0)
    remat: Literal["none", "full", "dots"] = field(
        "none", "activations that the backward pass computes again", change=FREE
    )
    matmul: Literal["", "float32", "bfloat16"] = field(
        "", "type of factors, sums are float32; empty: bfloat16 where a CPU multiplies it natively, else model.dtype"
    )
    attention: TrainerKernel = field("auto", "kernel: splash on TPU, cudnn on GPU; auto: by platform", change=FREE)
    logits_bytes: int = field(
        0, "float32 logits alive at once on a device; 0: by platform", ge=0, tuning=True, change=FREE
    )
    compiler_options: dict[str, Any] = field(
        {}, "XLA options of the update; empty: the chip's", tuning=True, change=FREE
    )
    advantage: str = field("grpo", "or the import path of your own (my_module.name)")
    policy_loss: str = field("ppo", "or the import path of your own")
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    anchor: Literal["behavior", "proximal"] = field("behavior", "policy of the ratio's denominator")
    correction: str = field("none", "of the engine-trainer mismatch, or the import path of your own")
    loss_params: dict[str, Any] = field({}, "eps_lo, eps_hi, ...; empty: the loss's own")
    advantage_params: dict[str, Any] = field({}, "gamma, lam, eps, ...")
    correction_params: dict[str, Any] = field({}, "C, lo, hi, level, metric, ...")
    updates: int = field(1, "optimizer updates a step, each on its own share of the groups", ge=1, change=AFRESH)
    kl: Literal["none", "k1", "k2", "k3"] = field(
        "none", "estimator of the divergence from the reference model, which is the initial weights"
    )
    kl_coef: float = field(0.0, ge=0)
    kl_in: Literal["loss", "reward"] = field("loss", "where the divergence counts")
    ref_refresh_steps: int = field(0, "the reference follows the policy every so many steps; 0: frozen", ge=0)
    entropy_coef: float = field(0.0, "bonus: the loss falls by this times the aggregated entropy")
    value_learning_rate: float = field(0.0, "of the value model (advantages gae, gae_turn); 0: there is none", ge=0)
    value_clip: float = field(0.2, "clip range of the value loss; 0: not clipped", ge=0, tuning=True)
    overlong_cache: int = field(0, "last tokens before the limit over which the soft penalty grows to -1; 0: off", ge=0)
    overlong_filter: bool = field(False, "samples that hit the limit have no loss, but count in the group statistics")
    moments: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of Adam's moments", change="checkpoints hold them in that type"
    )
    optimizer_memory: Literal["device", "host"] = field(
        "device", "where Adam's moments rest between updates", change=FREE
    )
    lent_memory: Literal["device", "host"] = field(
        "device", "of the state, while orchestrator.elastic lends the devices", change=FREE
    )
    peak_tflops: float = field(0.0, "of one device, for trainer/mfu; 0: by its name", ge=0, tuning=True, change=FREE)
    expert_matmul: Literal["auto", "scan", "ragged_dot", "megablox"] = field(
        "auto", "mixtures: kernel; auto: by platform", tuning=True, change=FREE
    )
    expert_dispatch: Literal["gather", "all_to_all"] = field(
        "gather", "mixtures: of tokens over trainer.expert", change=FREE
    )
    routing_replay: RoutingReplay = field(
        "none", "mixtures: rollout: tokens go to the experts of sampling", change=AFRESH
    )
    load_balance_coef: float = field(0.0, "mixtures: weight of the load-balancing loss; 0: off", ge=0)
    router_bias_rate: float = field(0.0, "step of a router's selection bias, against the load; 0: off", ge=0)
    show_every: int = field(
        10, "steps between samples that are shown token by token; 0: never", ge=0, tuning=True, change=FREE
    )
    max_mismatch: float = field(
        0.0, "mean |trainer - engine| log-prob at lag 0 that stops the run; 0: off", ge=0, change=FREE
    )
    max_instance_mismatch: float = field(
        0.2, "the same for one instance, which is then quarantined; 0: off", ge=0, change=FREE
    )


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    change: ClassVar[str] = FREE

    every: int = field(0, "steps; 0: only the first and the last version", ge=0)
    prompts: int = field(64, "held-out prompts of an evaluation", ge=1)
    samples: int = field(1, "k of avg@k and pass@k", ge=1)
    temperature: float = field(-1.0, "of held-out samples; 0: the most likely token; -1: rollout.temperature", ge=-1)
    top_p: float = field(0.0, "of held-out samples; 0: rollout.top_p", ge=0, le=1)
    solved: str = field("", 'what accuracy counts: "TERM" or "TERM >= 0.5", of the reward; empty: first term >= 1')


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    change: ClassVar[str] = FREE

    every: int = field(20, "steps; the last step is always saved; 0: off", ge=0)
    keep: int = field(3, "keep the N most recent, plus any still needed by in-flight samples", ge=1)
    keep_best: int = field(0, "and the N best by reward/mean", ge=0)
    keep_every: int = field(0, "and every step divisible by this; 0: none", ge=0)
    export_hf_every: int = field(0, "steps between exports as a Hugging Face folder, WORKDIR/hf/STEP; 0: none", ge=0)


@dataclass(frozen=True, kw_only=True)
class JournalSection:
    """WORKDIR/journal: what makes running the same command again lose nothing and repeat nothing."""

    change: ClassVar[str] = FREE

    on: bool = True
    partial_s: float = field(2.0, "seconds between records of running samples' tokens; 0: they start over", ge=0)
    sync_s: float = field(0.5, "seconds until facts outlive a power cut, 0: at once; in a bucket: a batch", ge=0)
    keep_all: bool = field(False, "keep what no checkpoint needs, so that the audit goes back to the first fact")
    record: bool = field(False, "WORKDIR/recorded: the facts and what things cost, for tests.soak.end_to_end")
    watchdog_s: float = field(
        600.0, "seconds without progress that end the run, exit code 42; 0: never", ge=0, tuning=True
    )


@dataclass(frozen=True, kw_only=True)
class SftSection:
    """Supervised warm start; `python -m dora_jax.sft` reads this section and writes a Hugging Face folder."""

    change: ClassVar[str] = "the model that it makes has been made"

    out: str = field("", "folder to write; the main job makes it first when it equals model.path and is missing")
    rows: str = field("", "rows as of task.path, with an answer or a completion; empty: the task's worked solutions")
    init: str = field("", "Hugging Face folder to start from; empty: a new model of the sizes below")
    examples: int = field(4096, ge=1)
    slip_rate: float = field(0.0, "share of worked solutions that carry one arithmetic slip", ge=0, le=1)
    steps: int = field(300, ge=1)
    batch_rows: int = field(32, ge=1)
    pack_tokens: int = field(256, ge=1)
    learning_rate: float = field(3e-3, gt=0)
    warmup_steps: int = field(20, ge=0)
    family: str = field("qwen3", "model_type of the new model")
    vocab_size: int = field(0, "rows of the embedding; 0: the tokenizer's size", ge=0)
    d_model: int = field(128, ge=1)
    n_layers: int = field(4, ge=1)
    n_heads: int = field(4, ge=1)
    n_kv_heads: int = field(2, ge=1)
    head_dim: int = field(32, ge=1)
    d_ff: int = field(384, ge=1)
    experts: int = field(0, "of a mixture in place of the feed-forward, for families that have one; 0: dense", ge=0)
    experts_per_token: int = field(2, ge=1)
    expert_width: int = field(64, ge=1)
    shared_experts: int = field(0, "that every token takes besides", ge=0)
    zero_experts: int = field(0, "that return their input", ge=0, tuning=True)
    dense_layers: int = field(0, "before the first layer with experts", ge=0)
    kv_rank: int = field(0, "numbers of a latent, for families with latent attention; 0: grouped-query attention", ge=0)
    q_rank: int = field(0, "of the queries' low rank; 0: one matrix", ge=0)
    window: int = field(
        0, "positions that most layers see, for families whose layers differ so; 0: all layers see all", ge=0
    )
    rope_dim: int = field(16, "of latent attention: rotated numbers of a head, of head_dim", ge=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = field(0, ge=0, lt=2**63, change=AFRESH)
    steps: int = field(100, ge=1, change=FREE)
    slice: str = field(
        "", "the machine that the run is for: v5e-8, v5p-16, h100-8, laptop; empty: what JAX finds", change=FREE
    )
    cpu_devices: int = field(0, "virtual CPU devices; 0: as the platform has", ge=0, change=FREE)
    placement: Literal["auto", "disjoint", "shared"] = field(
        "auto", "whether trainer and instances own their devices", change=FREE
    )
    pace: str = field(
        "",
        "chip whose speed a 32.8B model's ticks, steps and transfers are slowed down to "
        "(runtime/observe/emulated_timing.py)",
        choices=("", *CHIPS),
        change=FREE,
    )
    model: ModelSection = ModelSection()
    task: TaskSection = dataclasses.field(default_factory=TaskSection)
    environment: EnvironmentSection = dataclasses.field(default_factory=EnvironmentSection)
    reward_model: RewardModelSection = dataclasses.field(default_factory=RewardModelSection)
    rollout: RolloutSection = RolloutSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    trainer: TrainerSection = TrainerSection()
    lora: Lora = dataclasses.field(default_factory=Lora)
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    monitor: MonitorSection = dataclasses.field(default_factory=MonitorSection)
    serving: ServingSection = dataclasses.field(default_factory=ServingSection)
    journal: JournalSection = JournalSection()
    sft: SftSection = SftSection()
    cluster: ClusterSection = dataclasses.field(default_factory=ClusterSection)

    @property
    def takes_branches(self) -> bool:
        """An episode may have branches: no whole trajectory's gradient is asked for, and no replay to the bit."""
        return not (self.rollout.exact or self.trainer.advantage == "vcpo")


RENAMED = {  # former name of a field -> its name; a command or a config file is refused with it, a workdir is read
    "cluster.hosts_per_replica": "cluster.hosts_per_instance",
    "cluster.replica_slice": "cluster.instance_slice",
    "cluster.silence_s": "cluster.heartbeat_timeout_s",
    "cluster.stall_s": "cluster.stall_timeout_s",
    "task.reward_walls": "task.reward_sandbox",
}


class ConfigError(ValueError):
    """Everything that is wrong with a configuration: one line a problem, each naming its field."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class UnknownFormat(ConfigError):
    """Another version of dora_jax wrote this, and stepping over it would lose what only it holds."""


class RunError(RuntimeError):
    """A run that cannot go on, in one sentence for the console; what it wrote so far stays."""


@contextlib.contextmanager
def field_context(field: str) -> Iterator[None]:
    """Raise a ValueError from inside as a ConfigError that names `field`, which is the user's to mend."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def defaults() -> ml_collections.ConfigDict:
    """The ConfigDict that a config file fills in: locked, but for the free-form dictionaries."""
    return config_tree.defaults(Config())


def from_tree(tree: config_tree.Tree) -> Config:
    """Converts without checking: for a config file that asks about what it is filling in. `validate` checks too."""
    return config_tree.build(Config, tree)[0]


def to_json(config: Config) -> dict[str, Any]:
    """A JSON tree with secrets blanked; `from_tree` reads it back."""
    return json.loads(json.dumps(redact(dataclasses.asdict(config))))


def fields() -> dict[str, Any]:
    """Dotted name -> declared type of every field, sections left out: "steps", "trainer.rows", ..."""
    return config_tree.fields(Config)


def free_form() -> list[str]:
    """The fields that are dictionaries: what they hold is for the task or the objective to know."""
    return config_tree.free_form(Config)
