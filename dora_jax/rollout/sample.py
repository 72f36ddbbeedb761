"""Stage 2: logits -> token and log-prob; the noise depends on the token's identity alone.

Consumes the policy's logits (after temperature, padding ids masked: models/logits.py, which the trainer uses too);
produces one token a row and its log-prob. Key = fold_in(fold_in(fold_in(key(seed), group), index), position), where
position counts sampled tokens from 0: slots, batch-mates, instances and migration do not enter.
Laws: the log-prob is that of the tempered distribution over all tokens that exist, before top-k, top-p and min-p:
those cut the draw, not the report, so samples drawn with them may be scored but never trained on. Temperature 0 is
greedy and reports the log-prob at temperature 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dora_jax.models.logits import MASKED


def sample_key(seed: int, group_id, index) -> jax.Array:
    """Key of one sample; group ids may be negative (held-out groups)."""
    key = jax.random.fold_in(jax.random.key(seed), jnp.asarray(group_id).astype(jnp.uint32))
    return jax.random.fold_in(key, jnp.asarray(index).astype(jnp.uint32))


def draw(logits_BxV, keys_B, positions_B, *, greedy: bool = False, top_k: int = 0, top_p: float = 1.0,
         min_p: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """(token i32[B], log-prob f32[B]) of the next token of each row; `logits_BxV` already tempered and masked."""
    logprobs_BxV = jax.nn.log_softmax(logits_BxV, axis=-1)
    if greedy:
        token_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    else:
        kept_BxV = keep(logprobs_BxV, top_k=top_k, top_p=top_p, min_p=min_p)
        noise_BxV = jax.vmap(_noise, (0, 0, None))(keys_B, positions_B, logits_BxV.shape[-1])
        token_B = jnp.argmax(kept_BxV + noise_BxV, axis=-1).astype(jnp.int32)
    logprob_B = jnp.take_along_axis(logprobs_BxV, token_B[:, None], axis=-1)[:, 0]
    return token_B, logprob_B


def keep(logprobs_BxV, *, top_k: int, top_p: float, min_p: float) -> jax.Array:
    """The log-probs with what top-k, then top-p, then min-p cut away masked. Ties with the last kept token stay."""
    cut = jnp.full(logprobs_BxV.shape[:-1] + (1,), MASKED)
    if 0 < top_k < logprobs_BxV.shape[-1]:
        cut = jax.lax.top_k(logprobs_BxV, top_k)[0][..., -1:]
    if top_p < 1.0:
        ordered = jnp.sort(jnp.where(logprobs_BxV >= cut, logprobs_BxV, MASKED), axis=-1, descending=True)
        mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        n_kept = 1 + jnp.sum(mass[..., :-1] < top_p, axis=-1, keepdims=True)
        cut = jnp.maximum(cut, jnp.take_along_axis(ordered, n_kept - 1, axis=-1))
    if min_p > 0.0:
        cut = jnp.maximum(cut, logprobs_BxV.max(-1, keepdims=True) + jnp.log(min_p))
    return jnp.where(logprobs_BxV >= cut, logprobs_BxV, MASKED)


def _noise(key, position, vocab: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, position.astype(jnp.uint32)), (vocab,))
