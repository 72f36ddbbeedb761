"""Llama 3.x: grouped-query attention, plain."""

from dora_jax.models.families.family import DEFAULTS, GQA, MLP, NORMS, Family

FAMILY = Family(model_type="llama", architecture="LlamaForCausalLM", defaults=DEFAULTS, tensors=NORMS | GQA | MLP)
