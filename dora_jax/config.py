"""Configuration: an ml_collections ConfigDict at the edge, these frozen dataclasses inside.

No JAX here: every mistake is reported before a device is touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

section = dataclasses.dataclass(frozen=True, kw_only=True)


@section
class ModelSection:
    path: str = ""  # a Hugging Face folder
    dtype: str = "float32"  # compute dtype: float32 or bfloat16; masters stay f32


@section
class TaskSection:
    name: str = ""  # "reasoning_gym:<dataset>" or "rows"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # handed to the reasoning-gym dataset
    path: str = ""  # rows: a .jsonl or .parquet file
    heldout_path: str = ""  # rows: held-out file; empty: a share of `path` by uid
    heldout: int = 256  # distinct held-out prompts
    template: str = "{prompt}"  # "{prompt}" is the question; "chat" applies the tokenizer's chat template
    extract: str = ""  # regex; its first group in the question replaces the question
    rewards: tuple[str, ...] = ("dora_jax.tasks.rewards.exact",)  # import paths; values add up
    answer_pattern: str = ""  # regex; its first group in the response is what rewards see
    reward_workers: int = 1  # processes
    reward_timeout_s: float = 10.0
    reward_retries: int = 2
    max_failed_share: float = 0.01  # above this the run stops
    max_bad_rows_share: float = 0.01
    shuffle_rewards: bool = False  # control experiment: rewards permuted among a step's samples


@section
class RolloutSection:
    instances: int = 2
    tensor: int = 1  # devices an instance (tensor parallel)
    residents: int = 1  # R: versions an instance holds at once
    slots: int = 32  # samples that decode at once, per instance
    pages: int = 512  # KV pages per instance
    page_size: int = 16  # tokens a page
    max_prompt_tokens: int = 128
    max_new_tokens: int = 128
    prefill_tokens: int = 256  # prompt tokens a tick may prefill
    decode_steps: int = 8  # decode steps a dispatch
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0
    attention: str = "reference"  # reference, tpu, gpu


@section
class OrchestratorSection:
    mode: str = "dora"  # sync, one_step, partial, evict, dora_paper, dora
    max_versions: int = 3  # the paper's K; max_lag = K - 1
    groups_per_step: int = 16  # P
    group_size: int = 8  # G
    inflight: float = 1.25  # groups outstanding beyond the batch in training, in units of P
    rebalance_period_s: float = 0.5
    max_filtered_rounds: int = 10  # filtered groups in a row, in units of P, that stop the run
    filter_zero_variance: bool = False  # DAPO dynamic sampling

    @property
    def max_lag(self) -> int:
        return self.max_versions - 1


@section
class TrainerSection:
    data: int = 1  # mesh axis: batch rows, parameters replicated
    fsdp: int = -1  # mesh axis: batch rows and parameters; -1: every device left to the trainer
    tensor: int = 1  # mesh axis: heads, d_ff, vocabulary
    pack_tokens: int = 512  # L: packed row length
    rows: int = 0  # B: packed rows a step; 0: derived from groups, G and the length limits
    micro_batches: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 5
    schedule: str = "constant"  # constant, cosine, linear
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    remat: str = "none"  # none, full, dots
    advantage: str = "grpo"
    policy_loss: str = "ppo"
    aggregation: str = "token_mean"
    anchor: str = "behavior"  # behavior or proximal
    correction: str = "none"
    loss_params: dict[str, Any] = dataclasses.field(default_factory=lambda: {"eps_lo": 0.2, "eps_hi": 0.2})


@section
class EvalSection:
    every: int = 0  # steps; 0: only the first and the last version
    prompts: int = 64
    samples: int = 1  # k of avg@k and pass@k


@section
class CheckpointSection:
    every: int = 20  # steps; the last step is always saved; 0: off
    keep: int = 3


@section
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


@section
class Config:
    seed: int = 0
    steps: int = 100
    cpu_devices: int = 0  # virtual CPU devices; 0: as the platform has
    placement: str = "auto"  # auto, disjoint, shared: do trainer and instances own their devices
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sft: SftSection = SftSection()
