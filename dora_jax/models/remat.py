"""What a layer's backward pass keeps, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax

from dora_jax.models.families.config import ModelConfig

REMAT = ("none", "full", "dots")
KEPT = "attention"  # what an attention kernel names of its results: they are kept where they are small
SMALL = 2  # times a layer's input


def rematerialized(body: Callable, remat: str, cfg: ModelConfig) -> Callable:
    """The body of a layer, whose backward pass computes again what `remat` says; ValueError: it is unknown."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(*([KEPT] if cfg.q_width <= SMALL * cfg.d_model else []))
    if remat == "full":
        return jax.checkpoint(body, policy=kept)
    if remat == "dots":
        dots = policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(body, policy=policies.save_from_both_policies(dots, kept))
    raise ValueError(f"remat {remat!r} is unknown; known: {', '.join(REMAT)}")
