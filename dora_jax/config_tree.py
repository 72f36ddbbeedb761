"""Trees at the edge, frozen dataclasses inside: what every configuration of this package shares. Standard library only.

Consumes a mapping of mappings (an ml_collections ConfigDict, or JSON) and the dataclass of its sections; produces that
dataclass, and one sentence for each field that is unknown or of another type.
Law: a field of type dict or Mapping is free-form, and so is what it holds; every other field has to be declared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from dora_jax.spelling import nearest

if TYPE_CHECKING:
    import ml_collections

NONE: Mapping[str, str] = MappingProxyType({})
T = TypeVar("T")
Tree = typing.Union[Mapping[str, Any], "ml_collections.ConfigDict"]


def defaults(config: Any) -> ml_collections.ConfigDict:
    """The ConfigDict that a config file fills in, from a dataclass instance: locked, but for the free-form fields."""
    import ml_collections  # config files need it, a finished configuration does not

    tree = ml_collections.ConfigDict(dataclasses.asdict(config)).lock()
    for path in free_form(type(config)):
        functools.reduce(getattr, path.split("."), tree).unlock()
    return tree


def build(cls: type[T], tree: Tree, renamed: Mapping[str, str] = NONE) -> tuple[T, list[str]]:
    """(the dataclass with the fields of the tree, a sentence for each field that cannot be read and keeps its default).

    renamed: former dotted names of fields -> names of today, which the sentence gives.
    """
    reader = _Reader(cls, renamed)
    return reader.section(cls, tree if isinstance(tree, Mapping) else tree.to_dict(), ""), reader.problems


def unknown(name: str, known: Iterable[str], renamed: Mapping[str, str] = NONE) -> str:
    """What to say of a dotted name that is no field."""
    return f"renamed to {renamed[name]}" if name in renamed else f"unknown field; the nearest is {nearest(name, known)}"


def fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> declared type of every field, sections left out: "steps", "trainer.rows", ..."""
    found: dict[str, Any] = {}
    for name, kind in _hints(cls).items():
        if dataclasses.is_dataclass(kind):
            found |= fields(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            found[prefix + name] = kind
    return found


def free_form(cls: type) -> list[str]:
    """Dotted names of the fields that are dictionaries."""
    return [name for name, kind in fields(cls).items() if typing.get_origin(kind) in (dict, Mapping)]


# ---------------------------------------------------------------- private


_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)  # it compiles annotations anew


class _Reader:
    def __init__(self, root: type, renamed: Mapping[str, str]):
        self.problems: list[str] = []
        self._known, self._renamed = fields(root), renamed

    def section(self, cls: type[T], tree: Mapping[str, Any], prefix: str) -> T:
        hints = _hints(cls)
        for name in sorted(tree.keys() - hints.keys()):
            known = self._known | fields(cls, prefix)
            self.problems.append(f"{prefix}{name}: {unknown(prefix + name, known, self._renamed)}")
        values = {}
        for name in sorted(hints.keys() & tree.keys()):
            try:
                values[name] = self._convert(tree[name], hints[name], prefix + name)
            except TypeError as error:
                self.problems.append(f"{prefix}{name}: {error}")
        return cls(**values)

    def _convert(self, value: Any, kind: Any, name: str) -> Any:
        origin = typing.get_origin(kind) or kind
        if dataclasses.is_dataclass(origin) and isinstance(value, Mapping):
            return self.section(typing.cast(type, origin), value, name + ".")
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            _, of = typing.get_args(kind)
            entries = dataclasses.is_dataclass(of)
            return {key: self._convert(v, of, f"{name}.{key}") if entries else v for key, v in value.items()}
        if origin is tuple and isinstance(value, tuple | list):
            element, _ = typing.get_args(kind)
            return tuple(self._convert(each, element, name) for each in value)
        if origin is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if origin in (int, bool, str) and type(value) is origin:
            return value
        word = "section" if dataclasses.is_dataclass(origin) else origin.__name__
        raise TypeError(f"{value!r} is not a {'finite ' if origin is float else ''}{word}")
