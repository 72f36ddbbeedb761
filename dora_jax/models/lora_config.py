"""Which matrices of a model have low-rank adapters, and of which rank. Standard library only.

Consumes the section `lora` of a configuration; produces `Lora`, which lora.py reads, and a sentence for each rule that
a configuration breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from dora_jax.base.config_tree import field
from dora_jax.models.families.config import ModelConfig

ADAPTED = ("attention", "mlp", "experts")  # mlp: dense feed-forwards, and the experts that every token takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters as what is trained and published, y = x W + (alpha / rank) (x A) B; the weights W stay as they
    are."""

    change: ClassVar[str] = "versions of the run are adapters of one shape, beside one base"

    rank: int = field(0, "of A and B; 0: all weights are trained, at about a third of the learning rate", ge=0)
    alpha: float = field(32.0, "the product with A and B is multiplied by alpha / rank", gt=0)
    targets: tuple[str, ...] = field(("attention", "mlp"), "whose matrices have adapters: attention, mlp, experts")
    path: str = field("", "a Hugging Face PEFT folder to start from; empty: a fresh adapter, which changes nothing")

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def gain(self) -> float:
        """What the product with both factors is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the parameter of this name has an adapter: of matrices alone, and never the router."""
        name = name[:-2] if name.endswith(("_0", "_1")) else name  # of a layer with two sublayers
        if name in ("experts_gate", "experts_up", "experts_down"):
            return "experts" in self.targets
        if name.startswith("shared_") or name in ("gate_proj", "up_proj", "down_proj"):
            return "mlp" in self.targets
        return name.endswith("_proj") and "attention" in self.targets


OFF = Lora()


def adapter_params(cfg: ModelConfig, lora: Lora, *, fsdp: int = 1, tensor: int = 1, expert: int = 1) -> float:
    """Numbers of an adapter of this model, on one device of a mesh; mirrors the table in sharding.py."""
    cut, e = fsdp * expert, cfg.experts
    wide, counts, sublayers = cfg.d_model / cut, dict.fromkeys(ADAPTED, 0.0), 2 if cfg.shortcut else 1
    for layer, kind in enumerate(cfg.every_kind):
        q, own = cfg.q_width(kind), 0 if kind.kv == "read" else 1 if kind.tied_values else 2
        attention = (2 + own + cfg.gated) * wide + ((2 + cfg.gated) * q + own * cfg.kv_width(kind)) / tensor
        if kind.linear:  # queries, keys, values, their gate and what comes out
            attention = 5 * wide + (sum(cfg.rule.widths) + 2 * cfg.rule.widths[2]) / tensor
        if cfg.latent is not None:
            m, heads = cfg.latent, cfg.n_heads / tensor
            attention = 2 * wide + m.cache_dim + m.kv_rank / cut + heads * (m.nope_dim + 2 * m.v_dim) + q / tensor
            attention += wide + m.q_rank + m.q_rank / cut if m.q_rank else wide
        counts["attention"] += sublayers * attention
        if e is None or not cfg.has_experts(layer) or cfg.shortcut or e.beside:
            counts["mlp"] += sublayers * 3 * (wide + (kind.d_ff or cfg.d_ff) / tensor)
    if e is not None:
        counts["mlp"] += cfg.expert_layers * 3 * (wide + e.shared * e.width / tensor) if e.shared else 0
        counts["experts"] = cfg.expert_layers * e.count / expert * 3 * (cfg.d_model / fsdp + e.width / tensor)
    return lora.rank * sum(counts[target] for target in lora.targets)


def problems(config: Any) -> Iterator[str]:
    """Every rule of a `config.Config` that its section `lora` breaks."""
    section = config.lora
    if not section.targets or set(section.targets) - set(ADAPTED) or len(set(section.targets)) < len(section.targets):
        yield f"lora.targets: {section.targets} is not a choice of: {', '.join(ADAPTED)}"
    if not section.rank:
        if section.path:
            yield f"lora.path: {section.path} is an adapter, and lora.rank = 0 trains none"
        return
    rollout = config.rollout  # what a run with adapters does not have:
    if "experts" in section.targets and (rollout.tensor > 1 or rollout.expert_matmul == "megablox"):
        yield (
            f"lora.targets: engines serve adapters of experts on one device and by scan, blocks or ragged_dot, and "
            f"rollout.tensor = {rollout.tensor}, rollout.expert_matmul = {rollout.expert_matmul}; take attention, mlp"
        )
    if config.pace:
        yield f"lora.rank: pace = {config.pace} emulates the loads of whole weights, and adapters are loaded"
    if config.trainer.router_bias_rate:
        yield (
            "lora.rank: the weights beside adapters stay as they are, and trainer.router_bias_rate would move a "
            "router's"
        )


def model_problems(lora: Lora, model: ModelConfig) -> list[str]:
    """Which targets the model does not have; one sentence each."""
    if lora.on and "experts" in lora.targets and model.experts is None:
        return [f"lora.targets: experts are named, and this {model.family} model has none"]
    return []
