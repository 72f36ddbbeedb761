"""Stage 5, train: what a compiled program sends and how long XLA takes it to run, read from XLA's text. No JAX.

Consumes HLO of one device; produces how often each kind of collective runs with its bytes, XLA's own estimate of the
cycles, and the kernels (custom calls, scatters) that this estimate leaves out. An operation inside a loop counts as
often as the loop runs, loops in loops included. XLA overlaps a collective with products by cloning it into several
fusions under one channel: a channel counts once, as often as its rarest clone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

from dora_jax.types import OWN_SAMPLING, SHORT_ROWS

Dims = tuple[int, ...]
SHARED_CHANNEL = "1"  # JAX gives it to every collective of a shard_map: it tells none from another
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
ITEM_BYTES = (
    dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1)
    | dict.fromkeys(("s16", "u16", "bf16", "f16"), 2)
    | dict.fromkeys(("s32", "u32", "f32"), 4)
    | dict.fromkeys(("s64", "u64", "f64"), 8)
)
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
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]* \{([^}]*)\}")  # axes with their sizes, and those of a group
_COLLECTIVE = re.compile(rf"%?(\S+) = (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_KERNEL = re.compile(r"%?\S+ = (\(.*?\)|\S+) custom-call\(.*custom_call_target=\"([^\"]+)\"")
_SCATTER = re.compile(r"%?\S+ = \S+ scatter\(%?[^,]+, %?[^,]+, %?([^,)]+)\)")  # of one array: what it writes
_MADE = re.compile(r"%?\S+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_MOVES = ("copy", "copy-start", "transpose", "convert")  # what makes all of an array anew
_HANDS_ON = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "copy-done")
_NO_OPS = ("constant", "custom-call", "partition-id")
_PALLAS = re.compile(r" custom-call\(.*op_name=\"[^\"]*?([\w.\-]+)\)?/pallas_call\"")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"(?:calls|to_apply|condition)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective on one chip."""

    runs: int = 0
    bytes: int = 0  # of the results, all runs together; of a reduce-scatter the part that stays here


@dataclasses.dataclass(frozen=True)
class CustomCall:
    """A custom call or a scatter, of which XLA knows neither FLOPs nor cycles; all that have one name together."""

    name: str
    runs: int
    bytes: int  # operands and results of all runs, what is updated in place once


class CompiledText:
    """A compiled program's text. `loops`: how often a loop runs whose count is only known at run time; one in the named
    scope `once` counts once, that over rows of short samples never: pages are of full rows."""

    def __init__(self, text: str, loops: int = 1, once: str | None = None):
        # Instructions of each computation, and the name of the entry. A kernel's metadata may run over several lines.
        self._bodies: dict[str, list[str]] = {}
        entry, lines = "", None
        for line in text.splitlines():
            head = _COMPUTATION.match(line)
            if head and not line.startswith(" "):
                lines = self._bodies.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif re.match(r"\}(,|$)", line):
                lines = None
            elif lines is not None and line.startswith(" "):
                lines.append(line.strip())
            elif lines:
                lines[-1] += line
        self._loops, self._once = loops, once
        self._runs: collections.Counter[str] = collections.Counter()
        self._visit(entry, 1)

    def collectives(self) -> dict[str, Traffic]:
        """By kind, those that occur."""
        rarest: dict[tuple[str, str], Traffic] = {}
        for name, runs, line in self._lines():
            if not (match := _COLLECTIVE.match(line)) or _ALONE.search(line):
                continue
            axes = mesh.groups() if (mesh := _MESH.search(line)) else ("", "")
            if axes[1] and {f"{axis}=1" for axis in axes[1].split(",")} <= set(axes[0].split(",")):
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            own = channel is not None and channel[1] != SHARED_CHANNEL
            key = (match[3], channel[1] if channel and own else f"{name}/{match[1]}")
            # An operation that is only started lists its operand, too; where it has several, in a tuple of their own
            sizes = _sizes(re.sub(r"^\(\(.*?[\]}]\), ", "", match[2]))
            found = Traffic(runs, runs * (max(sizes, default=0) if match[4] else sum(sizes)))
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

    def copies(self, pools: Mapping[Dims, int]) -> Traffic:
        """What makes one of these arrays anew, or all that it has of one layer, and is no small one's way onto the chip
        or off it; pools: the dimensions of each -> how many layers share it."""
        whole = {_bare(dims) for dims in pools}
        ones = {_bare((dims[0] // n, *dims[1:])) for dims, n in pools.items() if n > 1}
        runs, size = 0, 0
        inside = set(re.findall(r" fusion\(.*calls=%?([\w.\-]+)", "\n".join(itertools.chain(*self._bodies.values()))))
        for name, times, line in self._lines():
            made = _MADE.match(line)
            if not made or made[2] in _HANDS_ON or name in inside:  # inside of a fusion nothing is in the memory
                continue
            kind, called = made[2], re.search(r"calls=%?([\w.\-]+)", line)
            if kind == "fusion" and called:
                root = next((x for x in self._bodies[called[1]] if x.startswith("ROOT ")), "")
                kind = found[2] if (found := _MADE.match(root.removeprefix("ROOT "))) else kind
            for item, dims in () if "S(1)" in made[1] and kind == "copy-start" else _arrays(made[1]):
                if _bare(dims) in ones or (_bare(dims) in whole and kind in _MOVES):
                    runs, size = runs + times, size + times * item * math.prod(dims)
                    break
        return Traffic(runs, size)

    def small_ops(self) -> dict[str, float]:
        """By kind, the operations on arrays that stand beside products, kernels and what is sent, in the computation
        that has most Pallas kernels, to each run of the commonest of these: in a loop over layers, what a layer has."""
        names = {
            name: collections.Counter(one[1] for x in lines if (one := _PALLAS.search(x)))
            for name, lines in self._bodies.items()
        }
        most = max(names, key=lambda name: names[name].total())
        small: collections.Counter[str] = collections.Counter()
        for line in self._bodies[most]:
            if not (made := _MADE.match(line.removeprefix("ROOT "))):
                continue
            called = re.search(r" fusion\(.*calls=%?([\w.\-]+)", line)
            inside = self._bodies[called[1]] if called else [line.removeprefix("ROOT ")]
            kinds = [kind[2] for x in inside if (kind := _MADE.match(x.removeprefix("ROOT ")))]
            moved = made[2].endswith(("-start", "-done")) or made[2] in (*_HANDS_ON, *KINDS, *_NO_OPS)
            if not moved and not {"dot", "convolution"} & {*kinds} and not re.match(r"\w+\[\]", made[1]):
                small[next((kind for kind in ("scatter", "gather") if kind in kinds), kinds[-1])] += 1
        return {kind: n / max(names[most].values()) for kind, n in small.items()} if names[most] else {}

    def kernels(self) -> tuple[CustomCall, ...]:
        counts: collections.Counter[str] = collections.Counter()
        sizes: collections.Counter[str] = collections.Counter()
        for computation, runs, line in self._lines():
            if written := _SCATTER.match(line):
                shapes = (re.search(rf"%?{re.escape(written[1])} = (\S+) ", one) for one in self._bodies[computation])
                counts["scatter"] += runs
                sizes["scatter"] += 2 * runs * sum(_sizes(next(filter(None, shapes))[1]))  # read, and written
            match = _KERNEL.match(line)
            if match and match[2] not in NOT_KERNELS:
                # A Pallas kernel's own name, from `.../name/pallas_call`, or that of its function, from
                # `.../jit(name)/pallas_call`; of XLA's own kernels the operation's; else that of the call's target
                named = re.search(r'op_name="[^"]*?([\w.\-]+)\)?/pallas_call"', line) or re.search(
                    r'op_name="[^"]*(ragged-dot\S*?)"', line
                )
                name = named[1] if named else match[2]
                operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", line)
                aliasing = line.partition("output_to_operand_aliasing=")[2]
                aliased = {int(n or 0) for n in re.findall(r"\{(\d*)\}: \(\d+, \{", aliasing)}
                moved = sum(size for i, size in enumerate(_sizes(match[1])) if i not in aliased)
                counts[name] += runs
                sizes[name] += runs * (moved + (sum(_sizes(operands[1])) if operands else 0))
        return tuple(CustomCall(name, counts[name], sizes[name]) for name in sorted(counts))

    def _visit(self, name: str, times: int) -> None:
        self._runs[name] += times
        for line in self._bodies[name]:
            if body := re.search(r"body=%?([\w.\-]+)", line):
                # As XLA notes it, else the one constant that the loop's condition compares with
                trips = {*re.findall(r'"known_trip_count":\{"n":"(\d+)"', line)[:1]}
                if not trips:
                    [condition] = re.findall(r"condition=%?([\w.\-]+)", line)[:1]
                    trips = {n for text in self._bodies[condition] for n in re.findall(r" constant\((\d+)\)", text)}
                known = int(trips.pop()) if len(trips) == 1 else 0
                unknown = 1 if self._once and self._once in line else 0 if SHORT_ROWS in line else self._loops
                self._visit(body[1], times * (known or unknown))
            if " conditional(" in line and OWN_SAMPLING in line:  # no sample of a run takes it
                continue
            for one, several in _CALLED.findall(line):
                for called in filter(None, [one, *re.split(r"[,\s%]+", several)]):
                    self._visit(called, times)

    def _lines(self) -> Iterator[tuple[str, int, str]]:
        for name, lines in self._bodies.items():
            if runs := self._runs[name]:
                yield from ((name, runs, line.removeprefix("ROOT ")) for line in lines)


# ---------------------------------------------------------------- private


def _bare(dims: Dims) -> Dims:
    """Without leading ones."""
    return tuple(itertools.dropwhile((1).__eq__, dims))


@functools.cache
def _arrays(shape: str) -> tuple[tuple[int, Dims], ...]:
    """Bytes of a number and dimensions of a type such as bf16[8,4]{1,0}, or of each of a tuple."""
    return tuple(
        (ITEM_BYTES[item], tuple(int(n) for n in dims.split(",") if n))
        for item, dims in re.findall(r"\b(\w+)\[([\d,]*)\]", shape)
        if item in ITEM_BYTES
    )


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(item * math.prod(dims) for item, dims in _arrays(shape))
