"""gpt-oss: every second layer in a window, a sink beside each head's scores, biases everywhere, experts whose SwiGLU is
clamped, angles by YaRN. The hub's folders hold the experts in MXFP4 (models/packed.py)."""

from dora_jax.models.families.config import Experts, Kind, ModelConfig, Yarn
from dora_jax.models.families.family import (
    DEFAULTS,
    GQA,
    NORMS,
    Family,
    Fields,
    Json,
    Tensor,
    layer_types,
    windows,
)  # fmt: skip

_YARN = Yarn(factor=32.0, original_max_position=4096, truncate=False)


def _read(fields: Fields) -> Json:
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0)
    biased = bool(fields.value("attention_bias", bool))
    experts = Experts(
        count=fields.either("num_experts", "num_local_experts"),
        per_token=fields.either("experts_per_token", "num_experts_per_tok"),
        width=fields.size("intermediate_size"),
        biased=True,
    )
    sizes: Json = {"kinds": windows(fields, 2, 0.0), "experts": experts, "qkv_bias": biased, "o_bias": biased}
    given = [name for name in ("rope_parameters", "rope_scaling") if fields.value(name, dict)]
    return sizes | ({} if given else {"rope_scaling": _YARN})


def _write(cfg: ModelConfig) -> Json:
    return {
        **layer_types(cfg),
        "attention_bias": cfg.qkv_bias,
        "intermediate_size": cfg.moe.width,
        "num_local_experts": cfg.moe.count,
        "num_experts_per_tok": cfg.moe.per_token,
        "experts_per_token": cfg.moe.per_token,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _windowed(sizes: Json, window: int) -> Json:
    more: Json = {"kinds": (Kind(window=window), Kind()), "rope_theta": 1.5e5, "rope_scaling": _YARN, "norm_eps": 1e-5}
    return more | ({"d_ff": sizes["experts"].width} if "experts" in sizes else {})  # a folder has one field for both


_EXPERTS = {
    **{f"experts_{x}": Tensor("mlp.experts.gate_up_proj", False, i, True) for i, x in enumerate(("gate", "up"))},
    **{f"experts_{x}_bias": Tensor("mlp.experts.gate_up_proj_bias", False, i, True)
       for i, x in enumerate(("gate", "up"))},
    "experts_down": Tensor("mlp.experts.down_proj", False),
    "experts_down_bias": Tensor("mlp.experts.down_proj_bias", False),
    "router": Tensor("mlp.router.weight"),
    "router_logit_bias": Tensor("mlp.router.bias", False),
}  # fmt: skip
FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults=DEFAULTS
    | {
        "rope_theta": 1.5e5,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 36,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "attention_bias": True,
    },
    qkv_bias=True,
    mixture={"biased": True},
    windowed=_windowed,
    further={"o_bias": True, "sinks": True, "activation": "clamped"},
    reads=("sliding_window", "layer_types", "attention_bias"),
    read=_read,
    write=_write,
    tensors=NORMS
    | GQA
    | {"o_bias": Tensor("self_attn.o_proj.bias", False), "sinks": Tensor("self_attn.sinks", False)}
    | _EXPERTS,
)

_COMMON = dict(
    vocab_size=201088, d_model=2880, n_heads=64, n_kv_heads=8, head_dim=64, d_ff=2880, max_position=131072,
    tie_embeddings=False, **_windowed({}, 128),
)  # fmt: skip
KNOWN: dict[str, Json] = {  # sizes as in the config.json of the same name at Hugging Face
    f"gpt-oss-{name}": _COMMON
    | dict(n_layers=layers, experts=Experts(count=count, per_token=4, width=2880, biased=True))
    for name, layers, count in (("20b", 24, 32), ("120b", 36, 128))
}
