"""Sizes and switches of the one dense decoder, and what a mesh may do with them. Standard library only.

Consumes nothing but numbers; produces `ModelConfig`, which decoder.py, sharding.py and hf.py read. It imports no JAX,
so that a wrong model or an indivisible mesh is reported before JAX is imported.
Law: a family fixes `qk_norm` and `qkv_bias`; nothing else differs between families.
"""

from __future__ import annotations

import dataclasses

MAX_LAYERS = 10_000  # ten times what any model has; the names of a billion layers' tensors take all memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What one `model_type` of config.json fixes."""

    model_type: str
    architecture: str  # the class name that config.json lists
    qk_norm: bool
    qkv_bias: bool


FAMILIES = (
    Family(model_type="qwen3", architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False),
    Family(model_type="qwen2", architecture="Qwen2ForCausalLM", qk_norm=False, qkv_bias=True),  # Qwen2 and Qwen2.5
    Family(model_type="llama", architecture="LlamaForCausalLM", qk_norm=False, qkv_bias=False),  # Llama 3.x
)


def family(model_type: str) -> Family:
    """The family of this `model_type`; ValueError lists the known ones."""
    for known in FAMILIES:
        if known.model_type == model_type:
            return known
    names = ", ".join(known.model_type for known in FAMILIES)
    raise ValueError(f"unknown model family {model_type!r}; known: {names}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str  # model_type of config.json: qwen3, qwen2, llama
    vocab_size: int  # rows of the embedding; a tokenizer may be smaller
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool
    qkv_bias: bool
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    max_position: int = 32768

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"model n_layers is {self.n_layers}; it must be at most {MAX_LAYERS}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"model n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    def kv_width_on(self, tensor: int) -> int:
        """Of keys, or values, on one of `tensor` devices: at least one whole head."""
        return max(self.n_kv_heads // tensor, 1) * self.head_dim

    @property
    def layer_params(self) -> int:
        """Of one layer's matrices."""
        return self.d_model * (2 * self.q_width + 2 * self.kv_width + 3 * self.d_ff)

    @property
    def matrix_params(self) -> int:
        """Of all matrices: what a mesh cuts."""
        ends = (1 if self.tie_embeddings else 2) * self.vocab_size * self.d_model
        return self.n_layers * self.layer_params + ends

    @property
    def gain_params(self) -> int:
        """Gains and biases: small, and replicated but for the biases."""
        layer = 2 * self.d_model
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += self.q_width + 2 * self.kv_width if self.qkv_bias else 0
        return self.n_layers * layer + self.d_model


def new_config(model_type: str, **sizes) -> ModelConfig:
    """A config for a fresh model of this family: the family's switches, the given sizes, defaults for the rest."""
    known = family(model_type)
    return ModelConfig(family=model_type, qk_norm=known.qk_norm, qkv_bias=known.qkv_bias, **sizes)


_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "n_kv_heads": 8, "rope_theta": 1e6, "max_position": 40960}
KNOWN = {  # sizes as in the config.json of the same name at Hugging Face
    "Qwen3-0.6B": new_config("qwen3", d_model=1024, n_layers=28, n_heads=16, d_ff=3072, **_QWEN3),
    "Qwen3-1.7B": new_config("qwen3", d_model=2048, n_layers=28, n_heads=16, d_ff=6144, **_QWEN3),
    "Qwen3-4B": new_config("qwen3", d_model=2560, n_layers=36, n_heads=32, d_ff=9728, **_QWEN3),
    "Qwen3-8B": new_config("qwen3", d_model=4096, n_layers=36, n_heads=32, d_ff=12288, tie_embeddings=False, **_QWEN3),
    "Qwen3-14B": new_config("qwen3", d_model=5120, n_layers=40, n_heads=40, d_ff=17408, tie_embeddings=False, **_QWEN3),
    "Qwen3-32B": new_config("qwen3", d_model=5120, n_layers=64, n_heads=64, d_ff=25600, tie_embeddings=False, **_QWEN3),
}


def check_mesh(cfg: ModelConfig, *, fsdp: int, tensor: int, serving: bool = False) -> None:
    """ValueError naming the first size that a mesh axis does not divide. Mirrors the tables in sharding.py.

    serving: of an engine, several of whose devices may hold the same KV head.
    """
    sizes = {"fsdp": ("d_model",), "tensor": ("n_heads", "n_kv_heads", "d_ff", "vocab_size")}
    for axis, size in (("fsdp", fsdp), ("tensor", tensor)):
        for name in sizes[axis]:
            shared = serving and name == "n_kv_heads" and size % cfg.n_kv_heads == 0
            if getattr(cfg, name) % size and not shared:
                raise ValueError(f"model {name} {getattr(cfg, name)} is not divisible by mesh axis {axis}={size}")
