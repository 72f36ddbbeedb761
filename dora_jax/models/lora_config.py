"""Which matrices of a model have low-rank adapters, and of which rank. Standard library only.

Consumes the section `lora` of a configuration; produces `Lora`, which lora.py reads, and a sentence for each rule that a
configuration breaks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

ADAPTED = ("attention", "mlp", "experts")  # mlp: dense feed-forwards, and the experts that every token takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters as what is trained and published, y = x W + (alpha / rank) (x A) B; the weights W stay as they are."""

    rank: int = 0  # numbers between A and B; 0: no adapters, all weights are trained
    alpha: float = 32.0  # the product with A and B is multiplied by alpha / rank
    targets: tuple[str, ...] = ("attention", "mlp")  # whose matrices have adapters: attention, mlp, experts
    path: str = ""  # a Hugging Face PEFT folder to start from; empty: a fresh adapter, which changes nothing

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def gain(self) -> float:
        """What the product with both factors is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the parameter of this name has an adapter: of matrices alone, and never the router."""
        return target_of(name) in self.targets


OFF = Lora()


def target_of(name: str) -> str | None:
    """Which of ADAPTED a parameter of a layer belongs to; None: adapters leave it alone."""
    name = name[:-2] if name.endswith(("_0", "_1")) else name  # of a layer with two sublayers
    if name.startswith("experts_"):
        return "experts"
    if name.startswith("shared_") or name in ("gate_proj", "up_proj", "down_proj"):
        return "mlp"
    return "attention" if name.endswith("_proj") else None


def problems(config: Any) -> Iterator[str]:
    """Every rule of a `config.Config` that its section `lora` breaks."""
    section = config.lora
    if section.rank < 0:
        yield f"lora.rank: {section.rank} is not at least 0"
    if not section.alpha > 0 or math.isinf(section.alpha):
        yield f"lora.alpha: {section.alpha} is not above 0"
    if not section.targets or set(section.targets) - set(ADAPTED) or len(set(section.targets)) < len(section.targets):
        yield f"lora.targets: {section.targets} is not a choice of: {', '.join(ADAPTED)}"
    if section.rank:
        yield f"lora.rank: {section.rank} would train adapters, and the trainer trains all weights; leave it 0"
    if not section.rank and section.path:
        yield f"lora.path: {section.path} is an adapter, and lora.rank = 0 trains none"
