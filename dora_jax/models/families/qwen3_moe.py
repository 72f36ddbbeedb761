"""Qwen3 with experts: Qwen3's attention; a softmax over all experts chooses."""

from typing import Any

from dora_jax.models.families.config import Experts, ModelConfig
from dora_jax.models.families.family import EXPERTS, GQA, MLP, NORMS, Family, Fields, Tensor


def _read(fields: Fields) -> dict[str, Any]:
    fields.only("decoder_sparse_step", 1)
    dense = sorted(fields.value("mlp_only_layers", list) or [])
    if dense != list(range(len(dense))):
        raise ValueError(
            f"{fields.file} has mlp_only_layers={dense}; the decoder takes dense layers before the others only"
        )
    return {
        "experts": Experts(
            count=fields.either("num_local_experts", "num_experts"),
            per_token=fields.size("num_experts_per_tok", 8),
            width=fields.size("moe_intermediate_size", 768),
            first_dense=len(dense),
            renormalize=bool(fields.value("norm_topk_prob", bool)),
        )
    }


def _write(cfg: ModelConfig) -> dict[str, Any]:
    e = cfg.moe
    return {
        "num_experts": e.count,
        "num_experts_per_tok": e.per_token,
        "moe_intermediate_size": e.width,
        "mlp_only_layers": list(range(e.first_dense)),
        "decoder_sparse_step": 1,
        "norm_topk_prob": e.renormalize,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
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
