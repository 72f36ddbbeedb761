"""SmolLM3: a Llama of whose layers every fourth does not rotate queries and keys."""

from dora_jax.models.families.config import Kind, ModelConfig
from dora_jax.models.families.family import DEFAULTS, GQA, MLP, NORMS, Family, Fields, Json, repeated


def _read(fields: Fields) -> Json:
    n, every = fields.size("num_hidden_layers"), fields.size("no_rope_layer_interval")
    rotated = fields.value("no_rope_layers", list) or [int((i + 1) % every != 0) for i in range(n)]
    if len(rotated) != n or set(rotated) - {0, 1}:
        raise ValueError(f"{fields.file} has no_rope_layers that are not {n} of 0 and 1")
    return {"kinds": repeated(tuple(Kind(rotated=bool(x)) for x in rotated))}


def _write(cfg: ModelConfig) -> Json:
    return {"no_rope_layers": [int(cfg.kind(i).rotated) for i in range(cfg.n_layers)]}


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults=DEFAULTS
    | {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
    read=_read,
    write=_write,
    tensors=NORMS | GQA | MLP,
)
