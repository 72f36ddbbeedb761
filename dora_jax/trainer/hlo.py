"""Stage 5, train: what a compiled program sends and how long XLA takes it to run, read from XLA's text. No JAX.

Consumes HLO of one device; produces how often each kind of collective runs with its bytes, XLA's own estimate of the
cycles, and the kernels (custom calls) that this estimate leaves out. An operation inside a loop counts as often as the
loop runs, loops in loops included. XLA overlaps a collective with products by cloning it into several fusions under one
channel: a channel counts once, as often as its rarest clone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

SHARED_CHANNEL = "1"  # JAX gives it to every collective of a shard_map: it tells none from another
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
}
NO_ESTIMATE = 1 << 62  # XLA writes a number near 2**63 where its model has none
NOT_KERNELS = (
    "AllocateBuffer",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
    "AssumeGatherIndicesInBound",
)  # nothing that takes time by itself

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ALONE = re.compile(r"replica_groups=(\{\{\d+\}(,\{\d+\})*\}|\[\d+,1\])")  # groups of one device, which send nothing
_COLLECTIVE = re.compile(rf"%?(\S+) = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_KERNEL = re.compile(r"%?\S+ = (\(.*?\)|\S+) custom-call\(.*custom_call_target=\"([^\"]+)\"")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|condition)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective on one chip."""

    runs: int = 0
    bytes: int = 0  # of the results, all runs together; of a reduce-scatter the part that stays here


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """Loops whose count is only known at run time."""

    loops: int
    once: str | None

    def runs(self, line: str) -> int:
        return 1 if self.once and self.once in line else self.loops


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """A custom call, of which XLA knows neither FLOPs nor cycles; all that have one name together."""

    name: str
    runs: int
    bytes: int  # operands and results of all runs, what is updated in place once


class CompiledText:
    """A compiled program's text. `loops`: how often a loop runs whose count is only known at run time; one in the named
    scope `once` counts once."""

    def __init__(self, text: str, loops: int = 1, once: str | None = None):
        self._bodies, entry = _computations(text)
        self._runs: collections.Counter[str] = collections.Counter()
        _visit(self._bodies, entry, 1, _Unknown(loops, once), self._runs)

    def collectives(self) -> dict[str, Traffic]:
        """By kind, those that occur."""
        rarest: dict[tuple[str, str], Traffic] = {}
        for name, runs, line in self._lines():
            if not (match := _COLLECTIVE.match(line)) or _ALONE.search(line):
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            own = channel is not None and channel[1] != SHARED_CHANNEL
            key = (match[3], channel[1] if channel and own else f"{name}/{match[1]}")
            found = Traffic(runs, runs * _bytes(match[2], started=bool(match[4])))
            rarest[key] = min(rarest.get(key, found), found, key=lambda t: t.runs)
        total: dict[str, Traffic] = {}
        for (kind, _), one in rarest.items():
            sofar = total.get(kind, Traffic())
            total[kind] = Traffic(sofar.runs + one.runs, sofar.bytes + one.bytes)
        return total

    def cycles(self) -> int:
        """XLA's estimates added up: without kernels, and without what has no estimate, as collectives."""
        found = ((runs, int(n)) for _, runs, line in self._lines() for n in _CYCLES.findall(line))
        return sum(runs * n for runs, n in found if n < NO_ESTIMATE)

    def kernels(self) -> tuple[CustomCall, ...]:
        counts: collections.Counter[str] = collections.Counter()
        sizes: collections.Counter[str] = collections.Counter()
        for _, runs, line in self._lines():
            match = _KERNEL.match(line)
            if match and match[2] not in NOT_KERNELS:
                name = _name(match[2], line)
                counts[name] += runs
                sizes[name] += runs * _moved(match[1], line)
        return tuple(CustomCall(name, counts[name], sizes[name]) for name in sorted(counts))

    def _lines(self) -> Iterator[tuple[str, int, str]]:
        for name, lines in self._bodies.items():
            if runs := self._runs[name]:
                yield from ((name, runs, line.removeprefix("ROOT ")) for line in lines)


# ---------------------------------------------------------------- private


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Instructions of each computation, and the name of the entry. A kernel's metadata may run over several lines."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and not line.startswith(" "):
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif re.match(r"\}(,|$)", line):
            lines = None
        elif lines is not None and line.startswith(" "):
            lines.append(line.strip())
        elif lines:
            lines[-1] += line
    return bodies, entry


def _visit(
    bodies: dict[str, list[str]], name: str, times: int, unknown: _Unknown, runs: collections.Counter[str]
) -> None:
    runs[name] += times
    for line in bodies[name]:
        for called, repeated in _calls(bodies, line, unknown):
            _visit(bodies, called, times * repeated, unknown, runs)


def _calls(bodies: dict[str, list[str]], line: str, unknown: _Unknown) -> Iterator[tuple[str, int]]:
    body = re.search(r"body=%?([\w.\-]+)", line)
    if body:
        yield body[1], _trips(bodies, line) or unknown.runs(line)
    for one, several in _CALLED.findall(line):
        for name in filter(None, [one, *re.split(r"[,\s%]+", several)]):
            yield name, 1


def _trips(bodies: dict[str, list[str]], line: str) -> int | None:
    """Of a while loop: as XLA notes it, else the one constant that its condition compares with."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known[1])
    [name] = re.findall(r"condition=%?([\w.\-]+)", line)[:1]
    condition = bodies[name]
    constants = {n for text in condition for n in re.findall(r" constant\((\d+)\)", text)}
    return int(constants.pop()) if len(constants) == 1 else None


def _name(target: str, line: str) -> str:
    """A Pallas kernel's own, from `.../name/pallas_call`, or that of its function, from `.../jit(name)/pallas_call`; of
    XLA's own kernels the operation's; else that of the call's target."""
    named = re.search(r'op_name="[^"]*?([\w.\-]+)\)?/pallas_call"', line) or re.search(
        r'op_name="[^"]*(ragged-dot\S*?)"', line
    )
    return named[1] if named else target


def _moved(results: str, line: str) -> int:
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
    aliased = {
        int(n or 0) for n in re.findall(r"\{(\d*)\}: \(\d+, \{", line.partition("output_to_operand_aliasing=")[2])
    }
    results_bytes = [size for i, size in enumerate(_sizes(results)) if i not in aliased]
    return sum(results_bytes) + (sum(_sizes(operands[1])) if operands else 0)


def _bytes(shape: str, started: bool) -> int:
    """Of a type such as bf16[8,4]{1,0} or a tuple; an operation that is only started lists its operand, too."""
    return max(_sizes(shape), default=0) if started else sum(_sizes(shape))


@functools.cache
def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(
        ITEM_BYTES[item] * math.prod(int(n) for n in dims.split(",") if n)
        for item, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", shape)
        if item in ITEM_BYTES
    )
