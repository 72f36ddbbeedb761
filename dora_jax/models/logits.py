"""Log-probabilities as the policy samples them: temperature first, then ids that no tokenizer knows masked.

The engine and the trainer both use `policy_logits`, so that the trainer's log-prob of a sampled token equals the
engine's up to rounding. Law: B x L x V never exists where it would pass `max_bytes`; the head then runs over chunks
of the sequence and is recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dora_jax.models import decoder

MASKED = -1e30  # finite: p * logit of a masked id is 0, not nan
LOGITS_BYTES = 64 * 2**20  # per device; a larger f32[B, L, V] is computed in chunks


def policy_logits(cfg: decoder.ModelConfig, params: Any, hidden: jax.Array, *, vocab_limit: int | None = None,
                  temperature: float = 1.0) -> jax.Array:
    """f32[..., V] after temperature; ids >= vocab_limit (rows of the embedding without a token) are masked."""
    logits = decoder.logits(cfg, params, hidden)
    logits = logits if temperature == 1.0 else logits / temperature
    if vocab_limit is None or vocab_limit >= cfg.vocab_size:
        return logits
    return jnp.where(_token_ids(logits) < vocab_limit, logits, MASKED)


def target_logprobs(cfg: decoder.ModelConfig, params: Any, hidden_BxLxD: jax.Array, targets_BxL: jax.Array, *,
                    vocab_limit: int | None = None, temperature: float = 1.0, entropy_grad: bool = False,
                    max_bytes: int = LOGITS_BYTES) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy), f32[B, L]. `max_bytes` bounds the logits alive at once."""

    def head(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = policy_logits(cfg, params, hidden, vocab_limit=vocab_limit, temperature=temperature)
        return logprobs_of(logits, targets, entropy_grad=entropy_grad)

    rows, length = targets_BxL.shape
    chunk = chunk_length(rows, length, cfg.vocab_size, max_bytes)
    if chunk == length:
        return head(hidden_BxLxD, targets_BxL)
    split = (rows, length // chunk, chunk)
    hidden_NxBxCxD = jnp.moveaxis(hidden_BxLxD.reshape(*split, -1), 1, 0)
    targets_NxBxC = jnp.moveaxis(targets_BxL.reshape(split), 1, 0)
    _, parts_NxBxC = jax.lax.scan(lambda _, x: (None, jax.checkpoint(head)(*x)), None, (hidden_NxBxCxD, targets_NxBxC))
    return tuple(jnp.moveaxis(part, 0, 1).reshape(rows, length) for part in parts_NxBxC)


def logprobs_of(logits: jax.Array, targets: jax.Array, *, entropy_grad: bool = False) -> tuple[jax.Array, jax.Array]:
    """(log-prob of each target, entropy) from logits f32[..., V]; picks by comparison, which shards over V."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.sum(jnp.where(_token_ids(logits) == targets[..., None], logits, 0.0), axis=-1)
    source, norm = (logits, lse) if entropy_grad else jax.lax.stop_gradient((logits, lse))
    entropy = norm - jnp.sum(jnp.exp(source - norm[..., None]) * source, axis=-1)
    return chosen - lse, entropy


def chunk_length(rows: int, length: int, vocab: int, max_bytes: int) -> int:
    """The longest divisor of `length` whose f32 logits fit into max_bytes; at least 1."""
    return next((c for c in range(length, 1, -1) if length % c == 0 and 4 * rows * c * vocab <= max_bytes), 1)


def _token_ids(logits: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
