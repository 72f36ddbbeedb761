"""Qwen2 and Qwen2.5: grouped-query attention with biases on queries, keys and values."""

from dora_jax.models.families.family import DEFAULTS, GQA, MLP, NORMS, Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=DEFAULTS | {"num_key_value_heads": 32},
    qkv_bias=True,
    tensors=NORMS | GQA | MLP,
)
