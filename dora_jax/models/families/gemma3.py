"""Gemma 3, text: norms before and behind both parts with gains of 1 + w, five layers of six in windows with a base of
their own, the embedding scaled, GELU."""

from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.family import DEFAULTS, GQA, MLP, Family, Fields, Json, Tensor, layer_types, windows

_GELU = "gelu_pytorch_tanh"


def _read(fields: Fields) -> Json:
    fields.only("hidden_activation", _GELU)
    fields.only("hidden_act", _GELU)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        fields.only(name, None)
    fields.only("use_bidirectional_attention", False)
    local = fields.number("rope_local_base_freq", 1e4)
    return {
        "kinds": windows(fields, fields.size("sliding_window_pattern", 6), local),
        "query_scale": float(fields.size("query_pre_attn_scalar")),
        "embed_scale": fields.size("hidden_size") ** 0.5,
    }


def _write(cfg: ModelConfig) -> Json:
    return {
        **layer_types(cfg),
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "query_pre_attn_scalar": int(cfg.query_scale),
        "rope_local_base_freq": max(kind.theta for kind in cfg.kinds),
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults=DEFAULTS
    | {
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    qk_norm=True,
    further={"norms": "both", "gain_offset": 1.0, "activation": "gelu_tanh"},
    reads=("sliding_window", "layer_types", "hidden_act"),
    read=_read,
    write=_write,
    tensors={
        "attn_norm": Tensor("input_layernorm.weight", False),
        "attn_post_norm": Tensor("post_attention_layernorm.weight", False),
        "mlp_norm": Tensor("pre_feedforward_layernorm.weight", False),
        "mlp_post_norm": Tensor("post_feedforward_layernorm.weight", False),
    }
    | GQA
    | MLP,
)
