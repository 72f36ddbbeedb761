"""Mistral: a Llama whose attention may see a window only; without the window it is one."""

from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.family import DEFAULTS, GQA, MLP, NORMS, Family, Fields, Json


def _read(fields: Fields) -> Json:
    if "sliding_window" not in fields.raw:  # transformers takes 4096 then
        raise ValueError(
            f"{fields.file} leaves sliding_window out, which means 4096; the decoder attends in full only: null"
        )
    return {}


def _write(cfg: ModelConfig) -> Json:
    return {"sliding_window": None}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=DEFAULTS | {"num_key_value_heads": 8},
    read=_read,
    write=_write,
    tensors=NORMS | GQA | MLP,
)
