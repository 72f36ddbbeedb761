"""GLM-4.7-Flash: DeepSeek-V3's attention and mixture; mlp_layer_types names the layers without experts."""

from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.deepseek_v3 import (
    ROUTER,
    ROUTING,
    read_experts,
    read_latent,
    write_experts,
    write_latent,
)  # fmt: skip
from dora_jax.models.families.family import DEFAULTS, EXPERTS, MLA, MLP, NORMS, SHARED, Family, Fields, Json

DENSE, SPARSE = "dense", "sparse"


def _read(fields: Fields) -> Json:
    n = fields.size("num_hidden_layers")
    names = fields.value("mlp_layer_types", list) or [DENSE] + [SPARSE] * (n - 1)
    if len(names) != n or set(names) - {DENSE, SPARSE}:
        raise ValueError(f"{fields.file} has mlp_layer_types that are not {n} of {DENSE} and {SPARSE}")
    dense = [i for i, name in enumerate(names) if name == DENSE]
    return {"experts": read_experts(fields, dense), **read_latent(fields)}


def _write(cfg: ModelConfig) -> Json:
    names = [SPARSE if cfg.has_experts(i) else DENSE for i in range(cfg.n_layers)]
    return {**write_latent(cfg), **write_experts(cfg), "rope_interleave": True, "mlp_layer_types": names}


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults=DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    mixture=ROUTING,
    latent=True,
    read=_read,
    write=_write,
    tensors=NORMS | MLA | MLP | EXPERTS | SHARED | ROUTER,
    ahead_layers=True,
)
