"""What one family of models is: a `model_type` of config.json, its fields, its tensors. Standard library only.

A family's file names its own fields and tensors; what families share stands here. Our parameter names are flat, one a
matrix; a name that ends in `_0` or `_1` belongs to that sublayer of a layer with two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

from dora_jax.models.families.config import Kind, ModelConfig

Json = dict[str, Any]  # fields by name, of config.json or of ModelConfig
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
    half: int | None = None  # of the tensor's outputs, where two parameters share one
    alternating: bool = False  # the halves: each takes every second output
    # those of the tensor's outputs that the parameter has, where several share it otherwise
    rows: Callable[[ModelConfig], list[int]] | None = None
    channels: bool = False  # of a convolution: an axis of 1 stands between outputs and taps
    other: Tensor | None = None  # the same in folders that have it there

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.name


FULL, SLIDING = "full_attention", "sliding_attention"  # in layer_types, and of rope_parameters


def rotary_tables(fields: Fields) -> Iterator[tuple[str, Fields]]:
    """(kind of layer, what rope_parameters has of it) where each kind has its own."""
    for kind, entry in (fields.value("rope_parameters", dict) or {}).items():
        if isinstance(entry, dict):
            yield kind, Fields(entry, fields.file)


def windows(fields: Fields, every: int, theta: float) -> tuple[Kind, ...]:
    """Kinds of layers of which every so many-th attends in full, where layer_types does not name each; the others see
    a sliding_window, and their rotary angles have this base unless rope_parameters has another."""
    n = fields.size("num_hidden_layers")
    names = fields.value("layer_types", list) or [FULL if (i + 1) % every == 0 else SLIDING for i in range(n)]
    if len(names) != n or set(names) - {FULL, SLIDING}:
        raise ValueError(f"{fields.file} has layer_types that are not {n} of {FULL} and {SLIDING}")
    for kind, table in rotary_tables(fields):
        if kind == SLIDING:
            table.only("rope_type", "default")
            theta = table.number("rope_theta", theta)
    local = Kind(window=fields.size("sliding_window"), theta=theta)
    return repeated(tuple(local if name == SLIDING else Kind() for name in names))


def rotated_part(fields: Fields, absent: float) -> float:
    """The share of a head that is rotated, in either spelling."""
    table = Fields(fields.value("rope_parameters", dict) or {}, fields.file)
    return table.number("partial_rotary_factor", fields.number("partial_rotary_factor", absent))


def repeated(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The shortest beginning of which all of them are repeats, the last one maybe cut off."""
    return next(kinds[:n] for n in range(1, len(kinds) + 1) if all(x == kinds[i % n] for i, x in enumerate(kinds)))


def layer_types(cfg: ModelConfig) -> dict[str, Any]:
    """The fields of config.json from which `windows` reads them."""
    kinds = [cfg.kind(i) for i in range(cfg.n_layers)]
    found: dict[str, Any] = {"layer_types": [SLIDING if kind.window else FULL for kind in kinds]}
    if cfg.windows:
        found["sliding_window"] = cfg.windows[0]
    return found


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
    fresh: Callable[[Json], Json] | None = None  # sizes of a fresh model -> its further fields
    # (sizes of a fresh model, its window) -> its further fields; None: the layers of fresh models attend in full
    windowed: Callable[[Json, int], Json] | None = None
    further: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # other fields of ModelConfig that it fixes
    reads: tuple[str, ...] = ()  # switches that `read` takes, where other families have one value of them
    read: Callable[[Fields], dict[str, Any]] = nothing_more  # further arguments of ModelConfig
    write: Callable[[ModelConfig], dict[str, Any]] = nothing_more  # further fields of config.json
    tensors: Mapping[str, Tensor]  # of a layer, by our name
    ahead: tuple[str, ...] = ()  # beginnings of the tensors of multi-token prediction, which are ignored
    ahead_layers: bool = False  # whether layers behind the last one are of multi-token prediction

    @property
    def switches(self) -> dict[str, Any]:
        """Fields of ModelConfig that the family fixes."""
        return {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias, "shortcut": self.shortcut, **self.further}


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
POST_NORMS = {  # behind attention and feed-forward
    "attn_post_norm": Tensor("post_attention_layernorm.weight", False),
    "mlp_post_norm": Tensor("post_feedforward_layernorm.weight", False),
}
MLA = {
    **{f"{x}_proj": Tensor(f"self_attn.{x}_proj.weight") for x in ("q", "q_a", "q_b", "kv_b", "o")},
    "kv_a_proj": Tensor("self_attn.kv_a_proj_with_mqa.weight"),
    **{f"{x}_norm": Tensor(f"self_attn.{x}_layernorm.weight", False) for x in ("q_a", "kv_a")},
}
MLP = {f"{x}_proj": Tensor(f"mlp.{x}_proj.weight") for x in ("gate", "up", "down")}
EXPERTS = {f"experts_{x}": Tensor(f"mlp.experts.{{e}}.{x}_proj.weight") for x in ("gate", "up", "down")}
SHARED = {f"shared_{x}": Tensor(f"mlp.shared_experts.{x}_proj.weight") for x in ("gate", "up", "down")}
