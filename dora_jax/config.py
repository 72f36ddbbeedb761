"""Configuration: an ml_collections ConfigDict at the edge, these frozen dataclasses inside.

Every field of a run, with its default and its meaning. A config file reads
    from dora_jax import config
    def get_config(arg=None):
        c = config.defaults()
        c.task.name = "rows"
        return c

Laws: no JAX here, so that a mistake is reported before a device is touched; `Config` never changes; a field that
is not declared below does not exist, except inside the free-form dictionaries (`task.params`, ...).
The sections of prompts and rewards are in config_task.py, that of a cluster in config_cluster.py. Trees become a `Config` in config_tree.py, the rules between fields are in validate.py, the command line in flags.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dora_jax import config_tree
from dora_jax.config_cluster import ClusterSection
from dora_jax.config_live import MonitorSection, ServingSection
from dora_jax.config_task import EnvironmentSection, RewardModelSection, TaskSection
from dora_jax.models.lora_config import Lora
from dora_jax.redaction import redact

if TYPE_CHECKING:
    import ml_collections


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    path: str = ""  # a Hugging Face folder
    size: str = ""  # Qwen3-8B, say: what a dry run reckons with if path is missing; a folder of other sizes is refused
    dtype: str = "auto"  # compute dtype: float32 or bfloat16; auto: by platform (presets.py); masters stay f32


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    instances: int = 2
    tensor: int = 1  # devices an instance (tensor parallel); of more than KV heads, neighbours share one
    residents: int = 0  # R: versions an instance holds at once; 0: 1, and where they are adapters max_versions + 1
    slots: int = 32  # samples that decode at once, per instance
    pages: int = 0  # KV pages per instance; 0: as many as memory_share allows, on a CPU as many as the slots need
    host_kv_bytes: int = 0  # host memory a process for KV of preempted and waiting samples; 0: as much as they need
    memory_share: float = 0.9  # of the memory that weights and programs leave: what KV pages take
    page_size: int = 0  # tokens a page; 0: by platform
    max_prompt_tokens: int = 128
    max_new_tokens: int = 128
    prefill_tokens: int = 0  # prompt tokens a tick may prefill; 0: by platform
    prefill_call_tokens: int = 0  # of them, in one dispatch; 0: by platform
    decode_steps: int = 8  # decode steps a dispatch
    decode_rows: int = 0  # rows of a decode dispatch, a divisor of slots; 0: slots
    prefill_chunk: int = 0  # prompt tokens of one sample in one dispatch; prefixes are shared in chunks; 0: by platform
    context_block: int = 128  # the past is attended to in blocks of so many tokens
    narrow_rows: int = 0  # rows of a second, narrower decode dispatch, for versions that have no more samples; 0: none
    narrow_cost: float = 0.0  # its time over that of a decode dispatch; 0: measured when calls are compiled
    late_results: str = "auto"  # on: read a dispatch back after the next is launched, which hides host work; off; auto
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0
    attention: str = "auto"  # reference, tpu, tokamax, gpu; auto: by platform
    expert: int = 1  # of a mixture: 1: a device has a part of each expert; rollout.tensor: it has some of them whole
    expert_matmul: str = "auto"  # of a mixture of experts: scan, blocks, ragged_dot, megablox; auto: by platform
    min_new_tokens: int = 0  # no stop token is drawn before so many
    max_repeats: int = 0  # one token is drawn at most so often in a row; 0: any number
    stop_strings: tuple[str, ...] = ()  # the text that ends a sample; its tokens stay
    weights: str = ""  # int8 or float8: projections in 8 bits; empty: as published
    kv: str = ""  # float8: the KV pool in 8 bits; empty: as computed
    drafts: int = 0  # tokens guessed from a group's other samples, verified in one call (rollout/drafts.py); 0: off
    draft_rows: int = 4  # of a version, decoding at once, at most: with more of them no draft is tried
    draft_cost: float = 0.0  # a verifying call's time over that of a decode call; 0: measured when calls are compiled
    exact: bool = (
        False  # the trainer's log-probs come from the engine's own calls: no gap, for one more decode a sample
    )
    keep_set: bool = False  # send along which ids each token was drawn from; needs top_k
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of XLA, engine; empty: the chip's


@dataclass(frozen=True, kw_only=True)
class OrchestratorSection:
    mode: str = "dora"  # sync, one_step, partial, evict, dora_paper, dora, rollpacker, staleflow
    max_versions: int = 3  # the paper's K; max_lag = K - 1
    groups_per_step: int = 16  # P
    group_size: int = 8  # G
    inflight: float = 1.25  # groups outstanding beyond the batch in training, in units of P
    rebalance_period_s: float = 0.5
    max_filtered_rounds: int = 10  # filtered groups in a row, in units of P, that stop the run
    kv_pressure: float = 0.03  # share of free pages below which an instance moves samples elsewhere, or puts them aside
    filter_zero_variance: bool = False  # DAPO dynamic sampling
    colocated: bool = False  # instances stand still while the trainer works: for devices that they share
    elastic: bool = False  # the trainer's devices decode while the trainer waits for samples

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
    data: int = 1  # mesh axis: batch rows, parameters replicated
    fsdp: int = -1  # mesh axis: batch rows and parameters; -1: every device left to the trainer
    tensor: int = 1  # mesh axis: heads, d_ff, vocabulary
    context: int = 1  # mesh axis: positions of a row
    expert: int = 1  # mesh axis: batch rows and, of a mixture of experts, the experts
    pack_tokens: int = 512  # L: packed row length
    rows: int = 0  # B: packed rows a step; 0: derived from groups, G and the length limits
    micro_batches: int = 1
    share_prompts: str = "auto"  # on: a row holds a group's prompt once; off: once a sample; auto: where attention can
    skip_zero_advantage: bool = False  # samples that move no weight are not computed; metrics are then of the others
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    schedule: str = "constant"  # constant, cosine, linear
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    remat: str = "none"  # none, full, dots
    attention: str = "auto"  # reference, splash (TPU), cudnn (GPU); auto: by platform
    logits_bytes: int = 0  # f32 logits alive at once on a device; 0: by platform
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of XLA, update; empty: the chip's
    advantage: str = "grpo"
    policy_loss: str = "ppo"
    aggregation: str = "token_mean"
    anchor: str = "behavior"  # behavior or proximal
    correction: str = "none"
    loss_params: dict[str, Any] = dataclasses.field(default_factory=dict)  # eps_lo, eps_hi, ...; empty: the loss's own
    advantage_params: dict[str, Any] = dataclasses.field(default_factory=dict)  # gamma, lam, eps, ...
    correction_params: dict[str, Any] = dataclasses.field(default_factory=dict)  # C, lo, hi, level, metric, ...
    updates: int = 1  # optimizer updates a step; each has its own share of the groups and its own denominators
    kl: str = "none"  # none, k1, k2, k3 against the reference model (the initial weights)
    kl_coef: float = 0.0
    kl_in: str = "loss"  # loss or reward
    ref_refresh_steps: int = 0  # the reference follows the policy every so many steps; 0: frozen
    entropy_coef: float = 0.0  # bonus: the loss falls by this times the aggregated entropy
    value_learning_rate: float = 0.0  # of the value model (advantages gae, gae_turn); 0: there is none
    value_clip: float = 0.2  # e of the clipped value loss; 0: not clipped
    overlong_cache: int = 0  # last tokens before the limit over which the soft penalty grows to -1; 0: off
    overlong_filter: bool = False  # samples that hit the limit have no loss, but count in the group statistics
    moments: str = "float32"  # type of Adam's moments: float32 or bfloat16
    optimizer_memory: str = "device"  # device or host: where Adam's moments rest between updates
    lent_memory: str = "device"  # device or host: where the state is while orchestrator.elastic lends the devices
    peak_tflops: float = 0.0  # of one device, for trainer/mfu; 0: known from its name, else there is no such metric
    expert_matmul: str = "auto"  # of a mixture: scan, ragged_dot, megablox; auto: by platform
    expert_dispatch: str = "gather"  # of tokens over trainer.expert: gather, or all_to_all, to their experts only
    routing_replay: str = "none"  # of a mixture: none, or rollout: tokens go to the experts that sampling sent them to
    load_balance_coef: float = 0.0  # of a mixture: the loss grows by this times load x score of the experts; 0: off
    router_bias_rate: float = 0.0  # what an update moves a router's selection bias by, against the load; 0: off
    show_every: int = 10  # steps between samples whose tokens are shown with advantage and log-probs; 0: never
    max_mismatch: float = 0.0  # mean |trainer - engine| log-prob at lag 0 that stops the run; 0: off
    max_instance_mismatch: float = 0.2  # the same of one instance's samples, that puts it in quarantine; 0: off


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    every: int = 0  # steps; 0: only the first and the last version
    prompts: int = 64
    samples: int = 1  # k of avg@k and pass@k
    solved: str = ""  # what accuracy counts: "TERM" or "TERM >= 0.5" of the reward, or total; empty: first term >= 1


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    every: int = 20  # steps; the last step is always saved; 0: off
    keep: int = 3  # the newest so many, and whatever running samples need
    keep_best: int = 0  # and the best so many by reward/mean
    keep_every: int = 0  # and every step divisible by this; 0: none
    export_hf_every: int = 0  # steps between exports as a Hugging Face folder, WORKDIR/hf/STEP; 0: none


@dataclass(frozen=True, kw_only=True)
class JournalSection:
    """WORKDIR/journal: what makes running the same command again lose nothing and repeat nothing."""

    on: bool = True
    partial_s: float = 2.0  # how often running samples' tokens are written; 0 (always so in mode sync): they start over
    sync_s: float = 0.5  # facts outlive a kill at once, a power cut so much later (0: at once); in a bucket: a batch
    keep_all: bool = False  # never drop what no checkpoint needs any more: the audit can go back to the first fact
    record: bool = False  # WORKDIR/recorded: the orchestrator's facts and what things cost, for bench.recorded
    watchdog_s: float = 600.0  # a run in which nothing moves for so long ends with exit code 42; 0: never


@dataclass(frozen=True, kw_only=True)
class SftSection:
    """Supervised warm start; `python -m dora_jax.sft` reads this section and writes a Hugging Face folder."""

    out: str = ""  # folder to write; the main job makes it first when it equals model.path and is missing
    rows: str = ""  # jsonl or parquet with prompt and answer (or completion); empty: the task's worked solutions
    init: str = ""  # Hugging Face folder to start from; empty: a new model of the sizes below
    examples: int = 4096
    slip_rate: float = 0.0  # share of worked solutions that carry one arithmetic slip
    steps: int = 300
    batch_rows: int = 32
    pack_tokens: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    family: str = "qwen3"
    vocab_size: int = 0  # rows of the embedding; 0: the tokenizer's size
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    d_ff: int = 384
    experts: int = 0  # of a mixture in place of the feed-forward, for families that have one; 0: dense
    experts_per_token: int = 2
    expert_width: int = 64
    shared_experts: int = 0  # that every token takes besides
    zero_experts: int = 0  # that return their input
    dense_layers: int = 0  # before the first layer with experts
    kv_rank: int = 0  # numbers of a latent, for families with latent attention; 0: grouped-query attention
    q_rank: int = 0  # of the queries' low rank; 0: one matrix
    rope_dim: int = 16  # of latent attention: rotated numbers of a head, of head_dim


@dataclass(frozen=True, kw_only=True)
class Config:
    seed: int = 0
    steps: int = 100
    slice: str = ""  # the machine that the run is for: v5e-8, v5p-16, h100-8, laptop; empty: what JAX finds
    cpu_devices: int = 0  # virtual CPU devices; 0: as the platform has
    placement: str = "auto"  # auto, disjoint, shared: do trainer and instances own their devices
    pace: str = ""  # a chip: ticks, steps and transfers last at least as long as a 32.8B model's on it (runtime/emulated_timing.py)
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


RENAMED = {  # former name of a field -> its name; whatever reads a configuration refuses the former one with it
    "cluster.hosts_per_replica": "cluster.hosts_per_instance",
    "cluster.replica_slice": "cluster.instance_slice",
}


class ConfigError(ValueError):
    """Everything that is wrong with a configuration: one line a problem, each naming its field."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RunError(RuntimeError):
    """A run that cannot go on, in one sentence for the console; what it wrote so far stays."""


@contextlib.contextmanager
def blame(field: str) -> Iterator[None]:
    """A ValueError inside says what is wrong with something that `field` names: the user's to mend."""
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
