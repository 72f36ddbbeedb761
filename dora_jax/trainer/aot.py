"""Stage 5, train: the update compiled for a TPU slice that is not here: what it holds, computes and sends.

Consumes a model, a trainer's section and the name of a slice; produces `Compiled`, from XLA's own compiler for that
chip (libtpu, the extra `aot`; no TPU is touched), or a sentence that says why it would not run there.
Laws: it proves that the step compiles and fits, never that it is right or fast; the compiled function and its
shardings are those of `Trainer`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.chips import CHIPS, Chip, parse
from dora_jax.models import sharding
from dora_jax.models.config import ModelConfig, check_mesh
from dora_jax.trainer import flops, hlo, step

FLAT = ("v5e", "v6e")  # two-dimensional slices; the others have three
QUIET = {  # libtpu would ask a metadata server and lock the machine's chips; there are none
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One optimizer update: its mesh and its batch."""

    data: int = 1
    fsdp: int
    tensor: int = 1
    context: int = 1
    rows: int
    tokens: int

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor * self.context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """An update on one chip."""

    slice_name: str
    chip: Chip
    chips: int
    state_bytes: int  # masters, moments and the batch, which stay
    temporary_bytes: int  # gradients, activations, gathered weights
    host_bytes: int  # optimizer state in host memory
    flops: float  # executed, all chips together
    tokens: int
    collectives: dict[str, hlo.Traffic]
    compile_s: float

    @property
    def chip_bytes(self) -> int:
        return self.state_bytes + self.temporary_bytes

    @property
    def flops_per_chip(self) -> float:
        return self.flops / self.chips

    @property
    def compute_s(self) -> float:
        """At the chip's peak: a floor."""
        return self.flops_per_chip / self.chip.flops

    @property
    def transfer_s(self) -> float:
        """At full bandwidth between chips, nothing overlapped: what overlap has to hide."""
        return sum(t.bytes for t in self.collectives.values()) / self.chip.ici_bytes_per_s


class DoesNotFit(ValueError):
    """The compiler's verdict: more memory than the chip has."""


def installed() -> bool:
    """Whether libtpu is here."""
    return importlib.util.find_spec("libtpu") is not None


def problems(model: ModelConfig, section: Any, slice_name: str, shape: Shape, dtype: str = "bfloat16") -> list[str]:
    """Why this update would not run on that slice: for a dry run. Compiles it, which takes a minute or more."""
    try:
        compile_update(model, section, slice_name, shape, dtype)
    except ValueError as error:
        return [str(error)]
    return []


def compile_update(model: ModelConfig, section: Any, slice_name: str, shape: Shape,
                   dtype: str = "bfloat16") -> Compiled:
    """ValueError where the mesh does not fit the slice or the model; DoesNotFit where memory is too small."""
    kind, _ = parse(slice_name)
    check_mesh(model, fsdp=shape.fsdp, tensor=shape.tensor)
    mesh = sharding.make_mesh(slice_devices(slice_name), shape.data, shape.fsdp, shape.tensor, shape.context)
    recipe = step.Recipe(step.Model(model, mesh, jnp.dtype(dtype), section.remat, 1.0, None), section, total_steps=1)
    began = time.monotonic()
    traced = step.jitted_update(recipe).trace(*step.abstract_inputs(recipe, shape.rows, shape.tokens))
    try:
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except jax.errors.JaxRuntimeError as error:
        raise _verdict(error, slice_name, shape, section) from error
    memory = compiled.memory_analysis()
    grown = memory.output_size_in_bytes - memory.alias_size_in_bytes
    result = Compiled(
        slice_name=slice_name, chip=CHIPS[kind], chips=mesh.size, compile_s=time.monotonic() - began,
        state_bytes=memory.argument_size_in_bytes, host_bytes=memory.host_argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes + grown + memory.generated_code_size_in_bytes,
        flops=flops.traced_flops(traced.jaxpr.jaxpr, section.micro_batches), tokens=shape.rows * shape.tokens,
        collectives=hlo.collectives(compiled.as_text(), section.micro_batches))
    if result.chip_bytes > result.chip.hbm_bytes:  # XLA itself only refuses temporaries that are too large alone
        needs, has = (f"{n / GIB:.2f}G" for n in (result.chip_bytes, result.chip.hbm_bytes))
        raise _refusal(needs, has, slice_name, shape, section)
    return result


def slice_devices(name: str) -> list[Any]:
    """Descriptions of the slice's devices, in the order that JAX would list them."""
    if not installed():
        raise ValueError(f"slice {name}: compiling for a TPU needs libtpu: pip install 'dora_jax[aot]'")
    os.environ.update(QUIET)
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology_name=topology(name), platform="tpu").devices)


def topology(name: str) -> str:
    """v5e-64 -> v5e:8x8, v5p-16 -> v5p:2x2x2: dimensions as equal as powers of two can be, the longest last."""
    kind, chips = parse(name)
    dimensions = [1] * (2 if kind in FLAT else 3)
    while chips > 1:
        dimensions[dimensions.index(min(dimensions))] *= 2
        chips //= 2
    if kind in FLAT:
        dimensions.sort()
    elif dimensions[2] == 1:  # slices of three dimensions start at 2x2x1
        dimensions.sort(reverse=True)
    else:
        dimensions.sort()
    return f"{kind}:{'x'.join(map(str, dimensions))}"


# ---------------------------------------------------------------- private


OUT_OF_MEMORY = (  # XLA:TPU's two ways to say it: what is needed, what there is
    re.compile(r"HLO temporaries \(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)"),
    re.compile(r"[Uu]sed ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm"))


def _verdict(error: Exception, slice_name: str, shape: Shape, section: Any) -> Exception:
    """XLA's lack of memory as one sentence; anything else is no matter of size and stays as it is."""
    used = next(filter(None, (said.search(str(error)) for said in OUT_OF_MEMORY)), None)
    return error if used is None else _refusal(used[1], used[2], slice_name, shape, section)


def _refusal(needed: str, there: str, slice_name: str, shape: Shape, section: Any) -> DoesNotFit:
    return DoesNotFit(
        f"trainer: one update of {shape.rows} rows of {shape.tokens} tokens in {section.micro_batches} micro-batches "
        f"needs {needed}iB a chip on {slice_name}, which has {there}iB: raise trainer.micro_batches or the mesh, "
        f"set trainer.remat=full (now {section.remat}), or trainer.optimizer_memory=host "
        f"(now {section.optimizer_memory})")


def describe(c: Compiled) -> str:
    """One line for a dry run."""
    sent = ", ".join(f"{kind} {t.bytes / 1e9:.1f} GB in {t.runs}" for kind, t in sorted(c.collectives.items()))
    return (f"{c.slice_name}: {c.chip_bytes / GIB:.1f} of {c.chip.hbm_bytes / GIB:.1f} GiB a chip, "
            f"{c.flops_per_chip / 1e12:.0f} TFLOP a chip; {sent or 'nothing sent'}")
