"""What one family of models is: a `model_type` of config.json, its fields, its tensors. Standard library only.

A family's file names its own fields and tensors; what families share stands here. Our parameter names are flat, one a
matrix; a name that ends in `_0` or `_1` belongs to that sublayer of a layer with two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

from dora_jax.models.families.config import ModelConfig

JSON_NAMES = {list: "array", dict: "object", bool: "true or false", str: "string"}


@dataclasses.dataclass(frozen=True)
class Fields:
    """config.json, read with an error that names the file and the field."""

    raw: Mapping[str, Any]
    file: Path
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of Family

    def value(self, name: str, kind: type) -> Any:
        """The value of a field that may be null, or left out (None)."""
        value = self.raw.get(name := self.names.get(name, name))
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{self.file} has {name}={value!r:.60}; a JSON {JSON_NAMES[kind]} is needed")
        return value

    def size(self, name: str, null: int | None = None, *, least: int = 1) -> int:
        """null: the value of a field that is null, or left out."""
        name = self.names.get(name, name)
        value = null if self.raw.get(name) is None else self.raw[name]
        if type(value) is not int or value < least:  # a bool is an int too
            raise ValueError(f"{self.file} has {name}={value!r:.60}; a whole number of at least {least} is needed")
        return value

    @overload
    def number(self, name: str, absent: float) -> float: ...

    @overload
    def number(self, name: str, absent: None = None) -> float | None: ...

    def number(self, name: str, absent: float | None = None) -> float | None:
        value = self.raw.get(name := self.names.get(name, name))
        if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
            raise ValueError(f"{self.file} has {name}={value!r:.60}; a number is needed")
        return absent if value is None else float(value)

    def either(self, *names: str) -> int:
        """The size that stands under one of several spellings."""
        given = [name for name in names if self.raw.get(name) is not None]
        values = {self.size(name) for name in given or names[-1:]}
        if len(values) > 1:
            raise ValueError(f"{self.file} has {' and '.join(given)} that disagree")
        return values.pop()

    def only(self, name: str, *values: Any) -> None:
        """Refuses a switch that the decoder does not compute; absent means the first value, and so does null where that
        is nothing."""
        value = self.raw.get(name, values[0])
        if value not in values and (value is not None or values[0]):
            raise ValueError(f"{self.file} has {name}={value!r:.60}; the decoder computes {name}={values[0]!r} only")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a parameter of one layer lies on disk: `name` below the layer, with `{e}` for each of its experts."""

    name: str
    transposed: bool = True  # a matrix is [out, in] on disk

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name


def nothing_more(of: Fields | ModelConfig) -> dict[str, Any]:
    """Nothing beside the fields that all families have."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What one `model_type` of config.json fixes."""

    model_type: str
    architecture: str  # the class name that config.json lists
    defaults: Mapping[str, Any]  # fields of config.json that may be left out, and what its class in transformers takes
    qk_norm: bool = False
    qkv_bias: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of config.json: usual name -> the family's
    mixture: Mapping[str, Any] | None = None  # of Experts: what the family's router fixes; None: the family has none
    latent: bool = False  # whether attention is latent
    shortcut: bool = False
    read: Callable[[Fields], dict[str, Any]] = nothing_more  # further arguments of ModelConfig
    write: Callable[[ModelConfig], dict[str, Any]] = nothing_more  # further fields of config.json
    tensors: Mapping[str, Tensor]  # of a layer, by our name
    ahead: tuple[str, ...] = ()  # beginnings of the tensors of multi-token prediction, which are ignored
    ahead_layers: bool = False  # whether layers behind the last one are of multi-token prediction

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of ModelConfig that the family fixes."""
        return {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias, "shortcut": self.shortcut}


DEFAULTS = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
NORMS = {
    "attn_norm": Tensor("input_layernorm.weight", False),
    "mlp_norm": Tensor("post_attention_layernorm.weight", False),
}
GQA = {
    **{f"{x}_proj": Tensor(f"self_attn.{x}_proj.weight") for x in "qkvo"},
    **{f"{x}_bias": Tensor(f"self_attn.{x}_proj.bias", False) for x in "qkv"},
    **{f"{x}_norm": Tensor(f"self_attn.{x}_norm.weight", False) for x in "qk"},
}
MLA = {
    **{f"{x}_proj": Tensor(f"self_attn.{x}_proj.weight") for x in ("q", "q_a", "q_b", "kv_b", "o")},
    "kv_a_proj": Tensor("self_attn.kv_a_proj_with_mqa.weight"),
    **{f"{x}_norm": Tensor(f"self_attn.{x}_layernorm.weight", False) for x in ("q_a", "kv_a")},
}
MLP = {f"{x}_proj": Tensor(f"mlp.{x}_proj.weight") for x in ("gate", "up", "down")}
EXPERTS = {f"experts_{x}": Tensor(f"mlp.experts.{{e}}.{x}_proj.weight") for x in ("gate", "up", "down")}
SHARED = {f"shared_{x}": Tensor(f"mlp.shared_experts.{x}_proj.weight") for x in ("gate", "up", "down")}
