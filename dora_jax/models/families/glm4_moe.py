"""GLM-4.5, 4.6, 4.7: grouped queries whose heads rotate by half, and a mixture by DeepSeek-V3's rules."""

from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.deepseek_v3 import ROUTER, ROUTING, read_experts, write_experts
from dora_jax.models.families.family import (
    DEFAULTS,
    EXPERTS,
    GQA,
    MLP,
    NORMS,
    SHARED,
    Family,
    Fields,
    Json,
    rotated_part,
)


def _read(fields: Fields) -> Json:
    return {
        "experts": read_experts(fields, range(fields.size("first_k_dense_replace", least=0))),
        "qk_norm": bool(fields.value("use_qk_norm", bool)),
        "qkv_bias": bool(fields.value("attention_bias", bool)),
        "rope_part": rotated_part(fields, 0.5),
    }


def _write(cfg: ModelConfig) -> Json:
    return {
        **write_experts(cfg),
        "first_k_dense_replace": cfg.moe.first_dense,
        "use_qk_norm": cfg.qk_norm,
        "attention_bias": cfg.qkv_bias,
        "partial_rotary_factor": cfg.rope_part,
    }


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults=DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    mixture=ROUTING,
    reads=("attention_bias", "partial_rotary_factor"),
    read=_read,
    write=_write,
    tensors=NORMS | GQA | MLP | EXPERTS | SHARED | ROUTER,
    ahead_layers=True,
)
