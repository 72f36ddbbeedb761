"""What ahead-of-time compilation finds of a trainer or an instance, and the message where it does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

import jax

from dora_jax.base import chips
from dora_jax.base.chips import Chip
from dora_jax.config import Config, ConfigError
from dora_jax.costs.update import ALL_REDUCE, KERNEL
from dora_jax.trainer import hlo

TRAINER, INSTANCE = "trainer", "instance"
PUBLISH = "publish"
PROGRAMS = {TRAINER: ("train", PUBLISH), INSTANCE: ("decode", "narrow", "verify", "prefill", "read", "write")}
GIB = 2**30
OUT_OF_MEMORY = (  # XLA:TPU's two ways to say it: what is needed, what there is
    re.compile(r"HLO temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)"),
    re.compile(r"[Uu]sed ([\d.]+)G of ([\d.]+)G hbm"),
)


class DoesNotFit(ConfigError):
    """More memory than a chip has: a sentence with the fields that help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A custom call on one chip, which XLA's estimate of the time leaves out; all its runs together."""

    name: str
    runs: int
    flops: float
    bytes: float
    floor_s: float  # the larger of FLOPs at the chip's peak and bytes at its memory's bandwidth

    @property
    def seconds(self) -> float:
        return KERNEL * self.floor_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program; bytes and FLOPs of one chip."""

    name: str
    argument_bytes: int  # also of those that are donated
    temporary_bytes: int  # with the program's code
    output_bytes: int  # that take no argument's place
    host_bytes: int
    flops: float  # of matrix products, kernels included
    sent: dict[str, hlo.Traffic]
    copied: hlo.Traffic | None = None  # of KV pages and recurrent states, which stay where they are; None: it has none
    model_s: float  # XLA's estimate of the cycles at the chip's clock; neither kernels nor what is sent
    kernels: tuple[Kernel, ...]
    compile_s: float
    chip: Chip
    links_bytes_per_s: float  # to the chips of its role
    small_ops: float = 0.0  # of a decode call, a layer: operations beside products, kernels and what is sent
    needed: float = 0.0  # FLOPs of an update that the model itself needs, the numerator of MFU; 0: of other programs

    @property
    def sent_s(self) -> float:
        carried = sum((ALL_REDUCE if kind == "all-reduce" else 1) * one.bytes for kind, one in self.sent.items())
        return carried / self.links_bytes_per_s

    @property
    def seconds(self) -> float:
        """The longer of computing and of sending, which overlap."""
        return max(self.model_s + sum(kernel.seconds for kernel in self.kernels), self.sent_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What stays on each chip of a trainer or an instance, and the programs that need room beside it."""

    name: str
    slice_name: str
    chips: int
    held: dict[str, float]  # bytes a chip, by what they are
    programs: tuple[Compiled, ...]

    @property
    def chip(self) -> Chip:
        return chip_of(self.slice_name)

    @property
    def work_bytes(self) -> int:
        """Bytes that the neediest program works with, beside what is held."""
        return max(
            (one.temporary_bytes + (one.output_bytes if one.name != PUBLISH else 0) for one in self.programs), default=0
        )

    @property
    def chip_bytes(self) -> float:
        return sum(self.held.values()) + self.work_bytes


def chip_of(slice_name: str) -> Chip:
    return chips.CHIPS[chips.parse(slice_name)[0]]


def describe(one: Compiled) -> list[str]:
    """Lines of a dry run."""
    sent = ", ".join(f"{kind} {t.bytes / 1e9:.2f} GB in {t.runs}" for kind, t in sorted(one.sent.items()))
    copied = "" if one.copied is None else "; no pool copied"
    if one.copied and one.copied.runs:
        copied = f"; {one.copied.bytes / 1e9:.2f} GB OF THE POOLS COPIED in {one.copied.runs}"
    small = f"; {one.small_ops:.1f} small operations a layer" if one.small_ops else ""
    host = f", {one.host_bytes / GIB:.2f} in host memory" if one.host_bytes else ""
    model = f"model {one.model_s:.4g} s; " if one.chip.clock_hz else ""  # XLA estimates no cycles of a GPU
    lines = [
        (
            f"  {one.name:12s} arguments {one.argument_bytes / GIB:.2f}, temporaries {one.temporary_bytes / GIB:.3f}, "
            f"outputs {one.output_bytes / GIB:.2f} GiB{host}; {one.flops / 1e12:.2f} TFLOP; sends {sent or 'nothing'}"
            f"{copied}{small}; {model}compiled in {one.compile_s:.0f} s"
        ),
        *(
            f"    kernel {k.name} x {k.runs}: {k.flops / 1e12:.2f} TFLOP, {k.bytes / 1e9:.2f} GB, charged "
            f"{k.seconds:.4g} s"
            for k in one.kernels
        ),
    ]
    if one.needed and model:
        lines.append(
            f"    MFU {one.needed / (one.chip.flops * one.seconds):.0%} of an update in {one.seconds:.3g} s: model and "
            f"kernels {one.model_s + sum(k.seconds for k in one.kernels):.3g} s, meanwhile it sends "
            f"{one.sent_s:.3g} s; {one.needed / one.flops:.0%} of its FLOPs are the model's own"
        )
    return lines


def describe_role(role: Role) -> str:
    parts = ", ".join(f"{what} {size / GIB:.2f}" for what, size in role.held.items())
    return (
        f"  {role.name} on {role.chips} chips of {role.slice_name}: {role.chip_bytes / GIB:.2f} of "
        f"{role.chip.hbm_bytes / GIB:.2f} GiB a chip ({parts}, the programs' work {role.work_bytes / GIB:.2f})"
    )


# ---------------------------------------------------------------- the verdict


@contextlib.contextmanager
def in_words(config: Config, role: Role, program: str) -> Iterator[None]:
    """What XLA says of too little memory, in one sentence."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise verdict(error, config, role, program) from error


def verdict(error: Exception, config: Config, role: Role, program: str) -> Exception:
    """XLA's lack of memory as one sentence; anything else is no matter of size and stays as it is."""
    message = str(error)
    if "RESOURCE_EXHAUSTED" in message and re.search(r"space[ =]smem", message):
        rollout = config.rollout
        return DoesNotFit(
            f"rollout.page_size: the page table of {program}, for {rollout.slots} slots, is larger "
            f"than the scalar memory of {role.slice_name}: raise rollout.page_size (now "
            f"{rollout.page_size}), or lower rollout.slots or rollout.decode_rows"
        )
    used = next(filter(None, (pattern.search(message) for pattern in OUT_OF_MEMORY)), None)
    if used is None:
        return error
    cores = chips.DEVICES_A_CHIP[chips.parse(role.slice_name)[0]]
    return refusal(config, role, cores * float(used[1]) * GIB, program)


def refusal(config: Config, role: Role, needed: float, program: str = "") -> DoesNotFit:
    """What is too large, and the fields that make it smaller, those of the largest part first."""
    parts = dict(sorted({**role.held, "the programs' work": role.work_bytes}.items(), key=lambda part: -part[1]))
    listed = ", ".join(f"{what} {size / GIB:.1f}" for what, size in parts.items() if size >= 0.05 * GIB)
    largest, rollout, t = next(iter(parts)), config.rollout, config.trainer
    if role.name == TRAINER:
        work = [f"raise trainer.micro_batches (now {t.micro_batches})"]
        work += ["set trainer.remat=full"] if t.remat != "full" else []
        state = ["set trainer.moments=bfloat16"] if t.moments == "float32" else []
        state += ["raise trainer.fsdp or trainer.tensor with a larger slice"]
        advice = work + state if largest == "the programs' work" else state + work
    else:
        pool, weights = [f"lower rollout.pages (now {rollout.pages})"], [f"raise rollout.tensor (now {rollout.tensor})"]
        if rollout.residents > 1 and not config.lora.on:
            weights += [f"lower rollout.residents (now {rollout.residents})"]
        work = [f"lower rollout.slots (now {rollout.slots}) or rollout.prefill_tokens (now {rollout.prefill_tokens})"]
        order = {"KV pool": pool + weights + work, "the programs' work": work + weights + pool}
        advice = order.get(largest, weights + pool + work)
    return DoesNotFit(
        f"{role.name}: {program or 'all together'} needs {needed / GIB:.1f} GiB a chip on {role.slice_name}, which has "
        f"{role.chip.hbm_bytes / GIB:.1f}{f' ({listed})' if listed and not program else ''}: {', or '.join(advice)}"
    )
