"""Gemma 3, text: norms before and behind both parts with gains of 1 + w, five layers of six in windows with a base of
their own, the embedding scaled, GELU."""

import functools

from dora_jax.models.families.config import Kind, Linear, ModelConfig
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


def _windowed(sizes: Json, window: int) -> Json:
    kinds = (*[Kind(window=window, theta=1e4)] * 5, Kind())
    scales = {"embed_scale": sizes["d_model"] ** 0.5, "query_scale": float(sizes["head_dim"])}
    return {"kinds": kinds, "rope_theta": 1e6, **scales}


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
    windowed=_windowed,
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


def _known(vocab_size: int, window: int, max_position: int, scaling: Linear | None = None, **sizes: float) -> Json:
    sizes = {"head_dim": 256} | sizes
    ends = {"vocab_size": vocab_size, "max_position": max_position, "rope_scaling": scaling}
    return _windowed(sizes, window) | sizes | ends


_LARGE = functools.partial(_known, 262208, 1024, 131072, Linear(factor=8.0))  # the text of folders with a vision tower
KNOWN = {  # sizes as in the config.json of the same name at Hugging Face
    "Gemma-3-270M": _known(262144, 512, 32768, d_model=640, n_layers=18, n_heads=4, n_kv_heads=1, d_ff=2048),
    "Gemma-3-1B": _known(262144, 512, 32768, d_model=1152, n_layers=26, n_heads=4, n_kv_heads=1, d_ff=6912),
    "Gemma-3-4B": _LARGE(d_model=2560, n_layers=34, n_heads=8, n_kv_heads=4, d_ff=10240),
    "Gemma-3-12B": _LARGE(d_model=3840, n_layers=48, n_heads=16, n_kv_heads=8, d_ff=15360),
    "Gemma-3-27B": _LARGE(
        d_model=5376, n_layers=62, n_heads=32, n_kv_heads=16, d_ff=21504, head_dim=128, query_scale=168.0
    ),
}
