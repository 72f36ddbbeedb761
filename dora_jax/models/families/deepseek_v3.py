"""DeepSeek-V3 and R1: latent attention; sigmoid scores, of which the best groups take part; one shared expert."""

from collections.abc import Sequence

from dora_jax.models.families.config import Experts, Latent, ModelConfig, Yarn
from dora_jax.models.families.family import DEFAULTS, EXPERTS, MLA, MLP, NORMS, SHARED, Family, Fields, Json, Tensor

ROUTING: Json = {"router": "sigmoid", "corrected": True}


def read_latent(fields: Fields) -> Json:
    """Latent attention as config.json describes it."""
    fields.only("rope_interleave", True)
    latent = Latent(
        kv_rank=fields.size("kv_lora_rank"),
        rope_dim=fields.size("qk_rope_head_dim"),
        nope_dim=fields.size("qk_nope_head_dim"),
        v_dim=fields.size("v_head_dim"),
        q_rank=fields.size("q_lora_rank", 0, least=0),
    )
    if (heads := fields.size("num_attention_heads")) != fields.size("num_key_value_heads", heads):
        raise ValueError(
            f"{fields.file} has num_key_value_heads={fields.raw['num_key_value_heads']}; latent attention has as many "
            f"as num_attention_heads, {heads}"
        )
    return {"latent": latent, "head_dim": latent.nope_dim + latent.rope_dim}


def write_latent(cfg: ModelConfig) -> Json:
    m = cfg.mla
    return {
        "kv_lora_rank": m.kv_rank,
        "q_lora_rank": m.q_rank or None,
        "qk_rope_head_dim": m.rope_dim,
        "qk_nope_head_dim": m.nope_dim,
        "qk_head_dim": cfg.head_dim,
        "v_head_dim": m.v_dim,
        "head_dim": m.rope_dim,
    }


def read_experts(fields: Fields, dense: Sequence[int]) -> Experts:
    """A mixture by the rules of DeepSeek-V3; dense: the layers without one."""
    first = next((i for i, layer in enumerate(dense) if i != layer), len(dense))
    return Experts(
        count=fields.either("num_local_experts", "n_routed_experts"),
        per_token=fields.size("num_experts_per_tok"),
        width=fields.size("moe_intermediate_size"),
        shared=fields.size("n_shared_experts", 0, least=0),
        first_dense=first,
        dense=tuple(dense[first:]),
        **ROUTING,
        groups=fields.size("n_group"),
        top_groups=fields.size("topk_group"),
        renormalize=bool(fields.value("norm_topk_prob", bool)),
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def write_experts(cfg: ModelConfig) -> Json:
    e = cfg.moe
    return {
        "n_routed_experts": e.count,
        "num_experts_per_tok": e.per_token,
        "moe_intermediate_size": e.width,
        "n_shared_experts": e.shared,
        "n_group": e.groups,
        "topk_group": e.top_groups,
        "norm_topk_prob": e.renormalize,
        "routed_scaling_factor": e.scale,
        "num_nextn_predict_layers": 0,
    }


def _read(fields: Fields) -> Json:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    dense = range(fields.size("first_k_dense_replace", 0, least=0))
    return {"experts": read_experts(fields, dense), **read_latent(fields)}


def _write(cfg: ModelConfig) -> Json:
    return {
        **write_latent(cfg),
        **write_experts(cfg),
        "rope_interleave": True,
        "first_k_dense_replace": cfg.moe.first_dense,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


ROUTER = {"router": Tensor("mlp.gate.weight"), "router_bias": Tensor("mlp.gate.e_score_correction_bias", False)}
FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    mixture=ROUTING,
    latent=True,
    read=_read,
    write=_write,
    tensors=NORMS | MLA | MLP | EXPERTS | SHARED | ROUTER,
    ahead_layers=True,
)
KNOWN = {
    "DeepSeek-V3": dict(
        vocab_size=129280,
        d_model=7168,
        n_layers=61,
        n_heads=128,
        n_kv_heads=128,
        head_dim=192,
        d_ff=18432,
        max_position=163840,
        tie_embeddings=False,
        rope_scaling=Yarn(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
        latent=Latent(kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536),
        experts=Experts(
            count=256, per_token=8, width=2048, shared=1, first_dense=3, **ROUTING, groups=8, top_groups=4, scale=2.5
        ),
    )
}
