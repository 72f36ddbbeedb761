"""Stage 5, train: what a compiled program sends, read from XLA's text. Standard library only.

Consumes HLO of one device; produces how often each kind of collective runs, and its bytes. An operation inside a loop
counts as often as the loop runs. XLA overlaps a collective with products by cloning it into several fusions under one
channel: a channel counts once, as often as its rarest clone.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
              "s64": 8, "u64": 8, "f64": 8}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"%?(\S+) = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:calls|to_apply|condition)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective on one chip."""

    runs: int = 0
    bytes: int = 0  # of the results, all runs together; of a reduce-scatter the part that stays here


def collectives(text: str, loops: int = 1) -> dict[str, Traffic]:
    """By kind, those that occur. `loops`: how often a loop runs whose count is only known at run time."""
    bodies, entry = _computations(text)
    runs: collections.Counter[str] = collections.Counter()
    _visit(bodies, entry, 1, loops, runs)
    rarest: dict[tuple[str, str], Traffic] = {}
    for name, lines in bodies.items():
        for line in lines:
            match = _COLLECTIVE.match(line.removeprefix("ROOT "))
            if not match or not runs[name]:
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            key = (match[3], channel[1] if channel else f"{name}/{match[1]}")
            found = Traffic(runs[name], runs[name] * _bytes(match[2], started=bool(match[4])))
            rarest[key] = min(rarest.get(key, found), found, key=lambda t: t.runs)
    total: dict[str, Traffic] = {}
    for (kind, _), one in rarest.items():
        sofar = total.get(kind, Traffic())
        total[kind] = Traffic(sofar.runs + one.runs, sofar.bytes + one.bytes)
    return total


# ---------------------------------------------------------------- private


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Instructions of each computation, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":
            lines = None
        elif lines is not None and line.startswith(" "):
            lines.append(line.strip())
        elif lines:  # a kernel's metadata holds line breaks: the rest of the last instruction
            lines[-1] += line
    return bodies, entry


def _visit(bodies: dict[str, list[str]], name: str, times: int, loops: int, runs: collections.Counter[str]) -> None:
    runs[name] += times
    for line in bodies[name]:
        for called, repeated in _calls(bodies, line, loops):
            _visit(bodies, called, times * repeated, loops, runs)


def _calls(bodies: dict[str, list[str]], line: str, loops: int) -> Iterator[tuple[str, int]]:
    body = re.search(r"body=%?([\w.\-]+)", line)
    if body:
        yield body[1], _trips(bodies, line) or loops
    for one, several in _CALLED.findall(line):
        for name in filter(None, [one, *re.split(r"[,\s%]+", several)]):
            yield name, 1


def _trips(bodies: dict[str, list[str]], line: str) -> int | None:
    """Of a while loop: as XLA notes it, else the one constant that its condition compares with."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    condition = bodies[re.search(r"condition=%?([\w.\-]+)", line)[1]]
    constants = {n for text in condition for n in re.findall(r" constant\((\d+)\)", text)}
    return int(constants.pop()) if len(constants) == 1 else None


def _bytes(shape: str, started: bool) -> int:
    """Of a type such as bf16[8,4]{1,0} or a tuple; an operation that is only started lists its operand, too."""
    sizes = [ITEM_BYTES[item] * math.prod(int(n) for n in dims.split(",") if n)
             for item, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", shape) if item in ITEM_BYTES]
    return max(sizes, default=0) if started else sum(sizes)
