"""Families of models as data: one short file each, over the parts that family.py lists. Standard library only.

Law: what differs between two families is a field of ModelConfig or a name on disk; no other code asks for a family.
"""

from __future__ import annotations

from typing import Any

from dora_jax.base import callables
from dora_jax.models.families import (
    deepseek_v3,
    gemma3,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    longcat_flash,
    mistral,
    olmo3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    smollm3,
)  # fmt: skip
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.families.family import Family

_MODULES = (qwen3, qwen2, llama, mistral, qwen3_moe, deepseek_v3, longcat_flash)
_NEWER = (gemma3, gemma4, glm4_moe, glm4_moe_lite, olmo3, smollm3, gpt_oss)
FAMILIES = (*(module.FAMILY for module in (*_MODULES, *_NEWER)), qwen3_5.FAMILY, qwen3_5.MOE, qwen3_5.NEXT)

used: dict[str, None] = {}  # import paths that `use` was given


ALIASES = {"kimi_k2": "deepseek_v3"}  # a model_type -> the family whose every field and tensor it has
# a model_type that has a tower beside its text -> the family of its text_config
TEXT = {name: f"{name}_text" for name in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")}
NOT_COMPUTED = {  # model types that people ask for -> what the decoder would have to compute
    "olmo2": "norms behind attention and feed-forward, and queries and keys normed over all heads at once"
}


def use(path: str) -> None:
    """Add a family of the user's, by its import path, to those of this process."""
    used[path] = None


def own() -> tuple[Family, ...]:
    """The families given to `use`, and those that installed packages register. ValueError: one cannot be used."""
    brought = tuple(callables.imported(path, "family", Family) for path in [*used, *callables.registered("family")])
    for each in brought:
        if any(each.model_type == known.model_type for known in FAMILIES):
            raise ValueError(f"a family of model_type {each.model_type!r} ships: give yours another")
    return brought


def family(model_type: str) -> Family:
    """The family of this `model_type`; ValueError lists the known ones."""
    known = {each.model_type: each for each in FAMILIES}
    if model_type not in known:
        known |= {each.model_type: each for each in own()}
    if model_type not in known:
        raise ValueError(f"unknown model family {model_type!r}; known: {', '.join(known)}")
    return known[model_type]


def new_config(model_type: str, **sizes: Any) -> ModelConfig:
    """A config for a fresh model of this family: the family's switches, the given sizes, defaults for the rest."""
    return ModelConfig(family=model_type, **{**family(model_type).switches, **sizes})


KNOWN = {  # the sizes that a run may name without a folder
    name: new_config(module.FAMILY.model_type, **sizes)
    for module in (qwen3, qwen3_moe, deepseek_v3, longcat_flash, gemma3, gemma4, gpt_oss, qwen3_5)
    for name, sizes in module.KNOWN.items()
} | {name: new_config(qwen3_5.MOE.model_type, **sizes) for name, sizes in qwen3_5.KNOWN_MOE.items()}
