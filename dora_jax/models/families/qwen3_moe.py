"""Qwen3 with experts: Qwen3's attention; a softmax over all experts chooses."""

from dora_jax.models.families.config import Experts, ModelConfig
from dora_jax.models.families.family import DEFAULTS, EXPERTS, GQA, MLP, NORMS, Family, Fields, Json, Tensor


def _read(fields: Fields) -> Json:
    only, step = fields.value("mlp_only_layers", list) or [], fields.size("decoder_sparse_step")
    dense = [i for i in range(fields.size("num_hidden_layers")) if i in only or (i + 1) % step]
    first = next((i for i, layer in enumerate(dense) if i != layer), len(dense))
    return {
        "experts": Experts(
            count=fields.either("num_local_experts", "num_experts"),
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size("moe_intermediate_size"),
            first_dense=first,
            dense=tuple(dense[first:]),
            renormalize=bool(fields.value("norm_topk_prob", bool)),
        )
    }


def _write(cfg: ModelConfig) -> Json:
    e = cfg.moe
    return {
        "num_experts": e.count,
        "num_experts_per_tok": e.per_token,
        "moe_intermediate_size": e.width,
        "mlp_only_layers": [i for i in range(cfg.n_layers) if not cfg.has_experts(i)],
        "decoder_sparse_step": 1,
        "norm_topk_prob": e.renormalize,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    qk_norm=True,
    mixture={},
    read=_read,
    write=_write,
    tensors=NORMS | GQA | MLP | EXPERTS | {"router": Tensor("mlp.gate.weight")},
)
KNOWN = {
    "Qwen3-30B-A3B": dict(
        vocab_size=151936,
        d_model=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        d_ff=6144,
        rope_theta=1e6,
        max_position=40960,
        tie_embeddings=False,
        experts=Experts(count=128, per_token=8, width=768),
    )
}
