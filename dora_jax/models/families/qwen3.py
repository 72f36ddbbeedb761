"""Qwen3, dense: grouped-query attention with normed queries and keys."""

from dora_jax.models.families.family import DEFAULTS, GQA, MLP, NORMS, Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    qk_norm=True,
    tensors=NORMS | GQA | MLP,
)
_COMMON = {"vocab_size": 151936, "head_dim": 128, "n_kv_heads": 8, "rope_theta": 1e6, "max_position": 40960}
_UNTIED = _COMMON | {"tie_embeddings": False}
KNOWN = {  # sizes as in the config.json of the same name at Hugging Face
    "Qwen3-0.6B": dict(d_model=1024, n_layers=28, n_heads=16, d_ff=3072, **_COMMON),
    "Qwen3-1.7B": dict(d_model=2048, n_layers=28, n_heads=16, d_ff=6144, **_COMMON),
    "Qwen3-4B": dict(d_model=2560, n_layers=36, n_heads=32, d_ff=9728, **_COMMON),
    "Qwen3-8B": dict(d_model=4096, n_layers=36, n_heads=32, d_ff=12288, **_UNTIED),
    "Qwen3-14B": dict(d_model=5120, n_layers=40, n_heads=40, d_ff=17408, **_UNTIED),
    "Qwen3-32B": dict(d_model=5120, n_layers=64, n_heads=64, d_ff=25600, **_UNTIED),
}
