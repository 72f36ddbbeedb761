"""Scores the trainer's samples with an engine's calls, on the trainer's devices: `rollout.exact`.

Consumes the trainer's masters and answers cut out of packed rows; produces the log-probs that engines would have reported.
The weights take the way of a published version: a copy in the engines' dtype, then the serving layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dora_jax.config import RolloutSection
from dora_jax.models import sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.publish import offered_copy, placed, sliced
from dora_jax.rollout.engine import Answer, ReplayEngine
from dora_jax.rollout.shapes import shapes_of


class Replay:
    """`trainer.exact.Replay` on the first devices of the trainer's mesh, as many as an instance has."""

    def __init__(self, model: ModelConfig, section: RolloutSection, mesh: jax.sharding.Mesh, **options: Any):
        """options: those of the engines."""
        shapes = shapes_of(section)
        pages = shapes.slots * shapes.worst_pages(section.max_prompt_tokens, section.max_new_tokens)
        held = dataclasses.replace(section, pages=min(section.pages, pages), residents=1)
        where = sharding.make_mesh(list(mesh.devices.flat[: section.tensor]), 1, 1, section.tensor)
        self._engine = ReplayEngine(model, held, where, **options)
        self._copied = offered_copy(str(np.dtype(options["dtype"])))

    def __call__(self, params: Any, answers: Sequence[Answer]) -> list[np.ndarray]:
        weights = placed(sliced(self._copied(params)), self._engine.param_shardings)
        return self._engine.logprobs(weights, answers)

    def warmup(self) -> None:
        self._engine.warmup()
