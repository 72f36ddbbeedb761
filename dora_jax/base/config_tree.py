"""Trees at the edge, frozen dataclasses inside: what every configuration of this package shares. Standard library only.

    class RolloutSection:
        slots: int = field(32, "samples that decode at once, per instance", ge=1)
        kv: Literal["", "float8"] = field("", "type of the KV pool; empty: as computed")

Consumes a mapping of mappings (an ml_collections ConfigDict, or JSON) and the dataclass of its sections; produces that
dataclass, and one sentence for each field that is unknown, of another type, none of its choices or out of its range.
Laws: type, choices, range and help of a field are declared once, where its default is, and so is what a change of it
means to a run that goes on; a field of type dict or Mapping is free-form, and so is what it holds; all others have to
be declared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import ml_collections

NONE: Mapping[str, str] = MappingProxyType({})
# What a change of a field between two starts of one run means; instead, a sentence on why there can be none. A class
# attribute `change` is that of the fields of a section that name none.
FREE = "free"  # the run learns the same
LEARNS = "learns"  # another thing is learned from then on
AFRESH = "afresh"  # and what is in flight is of no use: the run goes on from its newest checkpoint
T = TypeVar("T")
Tree = typing.Union[Mapping[str, Any], "ml_collections.ConfigDict"]
BLANK = "<redacted>"
_WORDS = frozenset(
    [
        "auth",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "jwt",
        "key",
        "oauth",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "token",
    ]
)
_JOINED = re.compile(
    r"(access|api|auth|bearer|client|encryption|id|private|refresh|secret|session|signing)"
    r"(key|token|secret|password)s?"
)  # apikey, accesstoken
_USER = re.compile(r"(?<=://)[^/\s?#@]+@(?=[^/\s])")  # me:secret@ of a URL
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|auth|sig|signature|credential)=)[^&;\s#]+", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field may have; its text completes "x is not ..."."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf
    besides: int | None = None  # a number out of the range that is allowed too
    power_of_two: bool = False  # or 0

    def holds(self, x: float) -> bool:
        if self.power_of_two:
            return x >= 0 and int(x) & (int(x) - 1) == 0
        return x == self.besides or self.ge <= x <= self.le and self.gt < x < self.lt

    def __str__(self) -> str:
        if self.power_of_two:
            return "0 or a power of two"
        if math.isfinite(self.ge) and math.isfinite(self.le):
            return f"between {self.ge} and {self.le}"
        words = (("at least", self.ge), ("above", self.gt), ("at most", self.le), ("below", self.lt))
        text = " and ".join(f"{word} {bound}" for word, bound in words if math.isfinite(bound))
        text = text.replace(str(2**63), "2**63")
        return text if self.besides is None else f"{text}, or {self.besides}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """What the declaration of one field says."""

    type: Any  # int, float, bool, str, tuple[...] or dict[...]; of a Literal the type of its values
    default: Any
    help: str
    choices: tuple[Any, ...]  # empty: any value of the type and the range
    range: Range | None
    tuning: bool
    change: str  # FREE, LEARNS, AFRESH, or why it cannot change; empty: that of a program without such runs


def field(
    default: T,
    help: str = "",
    *,
    ge: float = -math.inf,
    gt: float = -math.inf,
    le: float = math.inf,
    lt: float = math.inf,
    besides: int | None = None,
    power_of_two: bool = False,
    choices: Iterable[Any] = (),
    tuning: bool = False,
    change: str = "",
) -> T:
    """Declare a field of a section: its default, what --help says of it, and which values it takes.

    Choices that are known when the section is written stand in its type, a `Literal`; `choices` are those of a table
    of the package. tuning: right as it is on any machine, so that it is not on the first page of --help. change: what
    another value means to a run that goes on; empty: that of its section.
    """
    limits = Range(ge=ge, gt=gt, le=le, lt=lt, besides=besides, power_of_two=power_of_two)
    metadata = {
        "help": help,
        "range": None if limits == Range() else limits,
        "choices": tuple(choices),
        "tuning": tuning,
        "change": change,
    }
    if isinstance(default, dict):
        made: Any = dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    else:
        made = dataclasses.field(default=default, metadata=metadata)
    return made


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
    problems: list[str] = []

    def section(cls: type, tree: Mapping[str, Any], prefix: str) -> Any:
        here = fields_of(cls)
        for name in sorted(tree.keys() - here.keys()):
            known = of_root | fields(cls, prefix)
            problems.append(f"{prefix}{name}: {unknown(prefix + name, known, renamed)}")
        values = {}
        for name in sorted(here.keys() & tree.keys()):
            try:
                value, by = converted(tree[name], here[name].type, prefix + name), here[name]
                # The value; ValueError where its declaration does not allow it.
                if by.choices and value not in by.choices:
                    raise ValueError(
                        f"{value!r} is none of: {', '.join(choice or repr(choice) for choice in by.choices)}"
                    )
                if by.range and not by.range.holds(value):
                    raise ValueError(f"{value} is not {by.range}")
                values[name] = value
            except ValueError as error:
                problems.append(f"{prefix}{name}: {error}")
        return cls(**values)

    def converted(value: Any, kind: Any, name: str) -> Any:
        origin = typing.get_origin(kind) or kind
        if dataclasses.is_dataclass(origin) and isinstance(value, Mapping):
            return section(typing.cast(type, origin), value, name + ".")
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            _, of = typing.get_args(kind)
            entries = dataclasses.is_dataclass(of)
            return {key: converted(v, of, f"{name}.{key}") if entries else v for key, v in value.items()}
        if origin is tuple and isinstance(value, tuple | list):
            element, _ = typing.get_args(kind)
            return tuple(converted(each, element, name) for each in value)
        if origin is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if origin in (int, bool, str) and type(value) is origin:
            return value
        word = "section" if dataclasses.is_dataclass(origin) else origin.__name__
        raise ValueError(f"{value!r} is not a {'finite ' if origin is float else ''}{word}")

    of_root = fields(cls)
    return section(cls, tree if isinstance(tree, Mapping) else tree.to_dict(), ""), problems


def unknown(name: str, known: Iterable[str], renamed: Mapping[str, str] = NONE) -> str:
    """Return the sentence about a dotted name that is no field."""
    return f"renamed to {renamed[name]}" if name in renamed else f"unknown field; the nearest is {nearest(name, known)}"


@functools.cache  # annotations are compiled anew each time
def fields_of(cls: type) -> dict[str, Declared]:
    """Name -> declaration of every field of this class itself, sections included."""
    hints = typing.get_type_hints(cls)
    found = {}
    for each in dataclasses.fields(cls):
        hint, make, declared = hints[each.name], each.default_factory, each.metadata
        literal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        found[each.name] = Declared(
            type=type(literal[0]) if literal else hint,
            default=each.default if make is dataclasses.MISSING else make(),
            help=declared.get("help", ""),
            choices=literal or declared.get("choices", ()),
            range=declared.get("range"),
            tuning=declared.get("tuning", False),
            change=declared.get("change", "") or getattr(cls, "change", ""),
        )
    return found


def declared(cls: type, prefix: str = "") -> dict[str, Declared]:
    """Dotted name -> declaration of every field, sections left out: "steps", "trainer.rows", ..."""
    found: dict[str, Declared] = {}
    for name, one in fields_of(cls).items():
        if dataclasses.is_dataclass(one.type):
            found |= declared(typing.cast(type, one.type), f"{prefix}{name}.")
        else:
            found[prefix + name] = one
    return found


def fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every field, sections left out."""
    return {name: one.type for name, one in declared(cls, prefix).items()}


def free_form(cls: type) -> list[str]:
    """Dotted names of the fields that are dictionaries."""
    return [name for name, kind in fields(cls).items() if typing.get_origin(kind) in (dict, Mapping)]


# Suggests the known name that a user probably meant by an unknown one.


def nearest(name: str, known: Iterable[str]) -> str:
    """The known dotted name most like this one: in its last word or that word's initials, then as a whole."""
    known = list(known)
    name = name[: 2 * max(map(len, known))]  # the comparison is quadratic, and a name may be a file put in its place
    word = name.rpartition(".")[2]

    def likeness(other: str, ratio: Callable[[SequenceMatcher], float]) -> float:
        leaf = other.rpartition(".")[2]
        initials = "".join(part[0] for part in leaf.split("_") if part)  # lr is learning_rate
        of_leaf, of_initials, of_all = (
            ratio(SequenceMatcher(None, a, b)) for a, b in ((word, leaf), (word, initials), (name, other))
        )
        return max(of_leaf, of_initials - 0.1) + 0.5 * of_all

    best, most = known[0], -1.0
    for other in known:  # quick_ratio is a cheap upper bound; it skips most candidates
        if likeness(other, SequenceMatcher.quick_ratio) > most:
            best, most = max((best, most), (other, likeness(other, SequenceMatcher.ratio)), key=lambda pair: pair[1])
    return best


def redact(tree: Any, name: str = "") -> Any:
    """The same tree without its secrets, which are blanked before a configuration is written or shown: by the names of
    its fields, and where they stand in URLs. `name`: of the field that holds it.

    Law: a number is a count and stays where its name is plural (max_new_tokens) or a rate (experts_per_token).
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()  # wandbApiKey, X-Auth-Token
    counts = isinstance(tree, int | float)
    secret = any(
        word in _WORDS or (not counts and word.removesuffix("s") in _WORDS) or _JOINED.fullmatch(word)
        for word in re.split(r"[^a-z]+", spaced)
    )
    if tree and secret and not (counts and "_per_" in spaced):  # which is a rate: experts_per_token
        return BLANK
    if isinstance(tree, Mapping):
        return {key: redact(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(redact(value) for value in tree)
    if isinstance(tree, str) and "://" in tree:
        return _QUERY.sub(rf"\1{BLANK}", _USER.sub(f"{BLANK}@", tree))
    return tree
