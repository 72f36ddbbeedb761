"""Log-probabilities as the policy samples them: temperature first, then ids that no tokenizer knows masked.

The engine and the trainer both use `policy_logits`, so that the trainer's log-prob of a sampled token equals the
engine's up to rounding. Law: B x L x V never exists where it would pass `max_bytes`; the head then runs over chunks
of the sequence and is recomputed in the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dora_jax.models import decoder

MASKED = -1e30  # finite: p * logit of a masked id is 0, not nan


def policy_logits(
    cfg: decoder.ModelConfig,
    params: Any,
    hidden: jax.Array,
    *,
    vocab_limit: int | None = None,
    temperature: float | jax.Array = 1.0,
    axis: str | None = None,
    narrow: bool = False,
) -> jax.Array:
    """f32[..., V] after temperature (of all, or of each row of logits, f32[...]); ids >= vocab_limit (rows of the
    embedding without a token) are masked. narrow: of decoder.logits."""
    logits = decoder.logits(cfg, params, hidden, narrow)
    if isinstance(temperature, jax.Array):
        logits = logits / jnp.where(temperature > 0, temperature, 1.0)[..., None]  # padding has none
    elif temperature != 1.0:
        logits = logits / temperature
    if vocab_limit is None or vocab_limit >= cfg.vocab_size:
        return logits
    return jnp.where(_token_ids(logits, axis) < vocab_limit, logits, MASKED)


def target_logprobs(
    cfg: decoder.ModelConfig,
    params: Any,
    hidden_BxLxD: jax.Array,
    targets_BxL: jax.Array,
    *,
    vocab_limit: int | None = None,
    temperature: float | jax.Array = 1.0,
    entropy_grad: bool = False,
    max_bytes: int | None = None,
    mesh: Mesh | None = None,
    narrow: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy), f32[B, L]. `max_bytes` a device bounds the logits alive at once; None: all.
    temperature: of all targets, or f32[B, L]. narrow: of decoder.logits, on one device.

    On a mesh each shard of rows and positions walks its own chunks, with the head gathered over fsdp once: left to
    itself, XLA gathers it, and sums its gradient over the mesh, chunk by chunk.
    """
    name = "embed" if cfg.tie_embeddings else "lm_head"

    tempered = functools.partial(policy_logits, cfg, vocab_limit=vocab_limit)
    own = (temperature,) if isinstance(temperature, jax.Array) else ()

    def local(
        head: jax.Array, hidden: jax.Array, targets: jax.Array, *own: jax.Array, axis: str | None = None
    ) -> tuple[jax.Array, jax.Array]:
        def run(hidden: jax.Array, targets: jax.Array, *own: jax.Array) -> tuple[jax.Array, jax.Array]:
            divisor = own[0] if own else temperature
            logits = tempered({name: head}, hidden, temperature=divisor, axis=axis, narrow=narrow and axis is None)
            return logprobs_of(logits, targets, entropy_grad=entropy_grad, axis=axis)

        # Over chunks of the positions, recomputed in the backward pass: the longest divisor of their number whose f32
        # logits fit into max_bytes; at least 1
        (rows, length), chunk = targets.shape, targets.shape[1]
        if max_bytes is not None:
            each = 4 * rows * (head.size // cfg.d_model)
            chunk = next((c for c in range(length, 1, -1) if length % c == 0 and each * c <= max_bytes), 1)
        if chunk == length:
            return run(hidden, targets, *own)
        split = (rows, length // chunk, chunk)
        chunks = [jnp.moveaxis(hidden.reshape(*split, -1), 1, 0)]
        chunks += [jnp.moveaxis(x.reshape(split), 1, 0) for x in (targets, *own)]
        _, parts_NxBxC = jax.lax.scan(lambda _, chunk: (None, jax.checkpoint(run)(*chunk)), None, tuple(chunks))
        return tuple(jnp.moveaxis(part, 0, 1).reshape(rows, length) for part in parts_NxBxC)

    if mesh is None or mesh.size == 1:
        return local(params[name], hidden_BxLxD, targets_BxL, *own)
    from dora_jax.models.sharding import TABLE, spec  # the table imports the decoder

    axes, rows = decoder.logical_axes(cfg)[name], spec("batch", "sequence")

    def sharded(head: jax.Array, hidden: jax.Array, *of_targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = jax.lax.all_gather(head.astype(hidden.dtype), TABLE["embed"], axis=axes.index("embed"), tiled=True)
        return local(head, hidden, *of_targets, axis=TABLE["vocab"])

    specs = (spec(*axes), rows, rows, *(rows for _ in own))
    return jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=(rows, rows))(
        params[name], hidden_BxLxD, targets_BxL, *own
    )


def logprobs_of(
    logits: jax.Array, targets: jax.Array, *, entropy_grad: bool = False, axis: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy) from logits f32[..., V]; axis: the mesh axis that V is sharded over, if
    any."""

    def total(x: jax.Array) -> jax.Array:
        x = jnp.sum(x, axis=-1)
        return x if axis is None else jax.lax.psum(x, axis)

    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    peak = peak if axis is None else jax.lax.pmax(peak, axis)
    lse = jnp.log(total(jnp.exp(logits - peak[..., None]))) + peak
    chosen = total(jnp.where(_token_ids(logits, axis) == targets[..., None], logits, 0.0))
    source, norm = (logits, lse) if entropy_grad else jax.lax.stop_gradient((logits, lse))
    # a product, not a sum of products: a CPU takes a quarter of the time
    mean = jnp.einsum("...v,...v->...", jnp.exp(source - norm[..., None]), source, precision=jax.lax.Precision.HIGHEST)
    entropy = norm - (mean if axis is None else jax.lax.psum(mean, axis))
    return chosen - lse, entropy


# ---------------------------------------------------------------- private


def _token_ids(logits: jax.Array, axis: str | None) -> jax.Array:
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return ids if axis is None else ids + jax.lax.axis_index(axis) * logits.shape[-1]
