"""OLMo 3: norms behind attention and feed-forward, queries and keys normed over all heads at once; three layers of four
attend in windows."""

from dora_jax.models.families.config import Kind, ModelConfig
from dora_jax.models.families.family import DEFAULTS, GQA, MLP, POST_NORMS, Family, Fields, Json, layer_types, windows


def _read(fields: Fields) -> Json:
    return {"kinds": windows(fields, 4, 5e5)}


def _write(cfg: ModelConfig) -> Json:
    return layer_types(cfg)


def _windowed(sizes: Json, window: int) -> Json:
    return {"kinds": (*[Kind(window=window, theta=5e5)] * 3, Kind()), "rope_theta": 5e5}


FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=DEFAULTS | {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    qk_norm=True,
    windowed=_windowed,
    further={"norms": "post", "qk_norm_whole": True},
    reads=("sliding_window", "layer_types"),
    read=_read,
    write=_write,
    tensors=POST_NORMS | GQA | MLP,
)
