"""LongCat-Flash: a layer is two sublayers of latent attention and dense feed-forward, and a mixture beside them.

The mixture takes what the first feed-forward takes, and its result is added at the layer's end (shortcut-connected).
Some of its experts compute nothing: they return their input.
"""

import dataclasses

from dora_jax.models.families.config import Experts, Latent, ModelConfig
from dora_jax.models.families.deepseek_v3 import read_latent, write_latent
from dora_jax.models.families.family import DEFAULTS, EXPERTS, MLA, Family, Fields, Json, Tensor

_ROUTING: Json = {"corrected": True, "renormalize": False}


def _read(fields: Fields) -> Json:
    fields.only("attention_method", "MLA")
    fields.only("zero_expert_type", "identity")
    fields.only("router_bias", False)
    fields.only("norm_topk_prob", False)
    fields.only("mla_scale_q_lora", True)
    fields.only("mla_scale_kv_lora", True)
    ngrams = [name for name in fields.raw if name.startswith(("oe_", "ngram_", "emb_"))]
    if ngrams:
        raise ValueError(f"{fields.file} has {ngrams[0]}: the decoder computes no n-gram embeddings")
    latent = read_latent(fields)
    if not latent["latent"].q_rank:
        raise ValueError(f"{fields.file} leaves q_lora_rank out, which longcat_flash scales its queries by")
    experts = Experts(
        count=fields.size("n_routed_experts"),
        per_token=fields.size("moe_topk"),
        width=fields.size("expert_ffn_hidden_size"),
        zero=fields.size("zero_expert_num", 0, least=0),
        **_ROUTING,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return {**latent, "latent": dataclasses.replace(latent["latent"], scaled=True), "experts": experts}


def _write(cfg: ModelConfig) -> Json:
    e = cfg.moe
    return {
        **write_latent(cfg),
        "attention_method": "MLA",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "expert_ffn_hidden_size": e.width,
        "n_routed_experts": e.count,
        "moe_topk": e.per_token,
        "zero_expert_num": e.zero,
        "zero_expert_type": "identity",
        "router_bias": False,
        "routed_scaling_factor": e.scale,
    }


_TENSORS = {"router": Tensor("mlp.router.classifier.weight"), **EXPERTS}
_TENSORS["router_bias"] = Tensor("mlp.router.e_score_correction_bias", False)
for _j in (0, 1):
    _TENSORS |= {
        f"{name}_{_j}": Tensor(tensor.name.replace("self_attn.", f"self_attn.{_j}."), tensor.transposed)
        for name, tensor in MLA.items()
    }
    _TENSORS |= {f"{x}_proj_{_j}": Tensor(f"mlps.{_j}.{x}_proj.weight") for x in ("gate", "up", "down")}
    _TENSORS[f"attn_norm_{_j}"] = Tensor(f"input_layernorm.{_j}.weight", False)
    _TENSORS[f"mlp_norm_{_j}"] = Tensor(f"post_attention_layernorm.{_j}.weight", False)

FAMILY = Family(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    defaults=DEFAULTS
    | {
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 1536,
        "moe_topk": 12,
        "zero_expert_num": 256,
        "routed_scaling_factor": 6.0,
    },
    names={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"},
    mixture=_ROUTING,
    latent=True,
    shortcut=True,
    read=_read,
    write=_write,
    tensors=_TENSORS,
    ahead=("model.mtp.",),
)
KNOWN = {
    "LongCat-Flash": dict(
        vocab_size=131072,
        d_model=6144,
        n_layers=28,
        n_heads=64,
        n_kv_heads=64,
        head_dim=192,
        d_ff=12288,
        rope_theta=1e7,
        norm_eps=1e-5,
        max_position=131072,
        tie_embeddings=False,
        latent=Latent(kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536, scaled=True),
        experts=Experts(count=512, per_token=12, width=2048, zero=256, scale=6.0, **_ROUTING),
    )
}
