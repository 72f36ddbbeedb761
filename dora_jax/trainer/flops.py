"""Stage 5, train: floating-point operations of a step as it runs: a rate, and what a traced program does.

Meter            tokens/s and MFU of a step, for its metrics; what the model needs is update_costs.model_flops
traced_flops     every matrix product of a jaxpr, recomputation and masked scores included: what the chips execute
"""

from __future__ import annotations

import math
from typing import Any

import jax.extend.core

from dora_jax.base.chips import CHIPS, DEVICE_KINDS
from dora_jax.costs.update import model_flops
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.grouped_experts import EVEN_LOAD
from dora_jax.types import SHORT_ROWS

XLA_GROUPED = "ragged-dot-none"  # what XLA:TPU calls its own kernel of a grouped product


def traced_flops(jaxpr: Any, loops: int = 1) -> float:
    """FLOPs of all devices together. `loops`: how often a loop runs whose count is only known at run time; that over
    rows of short samples never does."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        elif eqn.primitive.name == "ragged_dot_general":  # every row with one group's matrix, or a row of its gradient
            total += 2.0 * math.prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]
        elif eqn.primitive.name == "pallas_call":
            total += _kernel_flops(eqn)
        else:
            times = 1
            if eqn.primitive.name == "scan":
                times = eqn.params["length"]
            elif eqn.primitive.name == "while":
                scope = str(eqn.source_info.name_stack)
                times = 1 if EVEN_LOAD in scope else 0 if SHORT_ROWS in scope else loops
            elif eqn.primitive.name == "shard_map":  # its inner shapes are one device's
                times = eqn.params["mesh"].size
            total += times * sum(traced_flops(each, loops) for each in jax.extend.core.jaxprs_in_params(eqn.params))
    return total


def kernel_flops(jaxpr: Any, within: str = "") -> dict[str, float]:
    """FLOPs of one run of each Pallas kernel, by its name, on one device: every block of the grid, skipped ones too,
    and one round of a loop whose count is only known at run time; of a grid that depends on the load, all rows. The
    largest where a name comes twice. A kernel without a name has that of the function `within` which it stands."""
    found: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            inner = {eqn.params["name"] or within: _kernel_flops(eqn)}
        elif eqn.primitive.name == "ragged_dot_general":
            inner = {XLA_GROUPED: 2.0 * math.prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]}
        else:
            inner = {
                name: most
                for each in jax.extend.core.jaxprs_in_params(eqn.params)
                for name, most in kernel_flops(each, eqn.params.get("name") or within).items()
            }
        found |= {name: max(most, found.get(name, 0.0)) for name, most in inner.items()}
    return found


def _kernel_flops(eqn: Any) -> float:
    """FLOPs of one pallas_call: its own estimate where its grid depends on the load, as that of a grouped product."""
    grid, estimate = eqn.params["grid_mapping"].grid, eqn.params["cost_estimate"]
    blocks = [n for n in grid if isinstance(n, int)]
    if estimate and len(blocks) < len(grid):
        return estimate.flops
    return math.prod(blocks) * traced_flops(eqn.params["jaxpr"])


class FlopsMeter:
    """Adds up the updates of a step."""

    def __init__(self, cfg: ModelConfig, mesh: Any, peak_tflops: float = 0.0, frozen: bool = False):
        """peak_tflops: of one device; 0: the hardware table's for its name, and without one there is no MFU. frozen:
        adapters are trained, and the model's own matrices have no gradient."""
        self._cfg, self._frozen = cfg, frozen
        self._peak = mesh.size * (1e12 * peak_tflops or peak_flops(mesh.devices.flat[0].device_kind) or 0.0)
        self._tokens, self._places, self._flops, self._seconds = 0, 0, 0.0, 0.0

    def add(self, batch: Any, seconds: float) -> None:
        """A TrainBatch; a prompt that is shared counts once."""
        lengths, before = batch.lengths
        self._tokens += int(lengths.sum())
        self._places += math.prod(batch.shape)
        self._flops += model_flops(self._cfg, lengths, before, self._frozen)
        self._seconds += seconds

    def take(self) -> dict[str, float]:
        """Metrics of the updates since the last call."""
        metrics = {
            "trainer/tokens_per_s": self._tokens / self._seconds,
            "trainer/packed_share": self._tokens / self._places,
        }
        if self._peak:
            metrics["trainer/mfu"] = self._flops / self._seconds / self._peak
        self._tokens, self._places, self._flops, self._seconds = 0, 0, 0.0, 0.0
        return metrics


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of one device as JAX counts them; None for one that the hardware table lacks."""
    if device_kind not in DEVICE_KINDS:
        return None
    chip, devices = DEVICE_KINDS[device_kind]
    return CHIPS[chip].flops / devices
