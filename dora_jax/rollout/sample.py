"""Stage 2: logits -> token and log-prob; the noise depends on the token's identity alone.

Consumes the policy's logits (after temperature, padding ids masked: models/logits.py, which the trainer uses too);
produces one token a row and its log-prob. Key = fold_in(fold_in(fold_in(key(seed), group), index), position), where
position counts sampled tokens from 0: slots, batch-mates, instances and migration do not enter.
Laws: the log-prob is that of the tempered distribution over all tokens that exist, before limits, top-k, top-p and
min-p: those cut the draw, not the report. What was drawn from is in the keep set, which comes along where asked for;
without it, samples drawn with cuts may be scored but not trained on. Temperature 0 is greedy and reports the log-prob
at temperature 1.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dora_jax.models.logits import MASKED

BLOCKS = 128  # of a vocabulary, at most; a power of two, so that a shard of the vocabulary holds whole blocks


def sample_key(seed: int, group_id, index) -> jax.Array:
    """Key of one sample; group ids may be negative (held-out groups)."""
    key = jax.random.fold_in(jax.random.key(seed), jnp.asarray(group_id).astype(jnp.uint32))
    return jax.random.fold_in(key, jnp.asarray(index).astype(jnp.uint32))


def draw(
    logits_BxV,
    keys_B,
    positions_B,
    limits: Limits | None = None,
    forced_B: jax.Array | None = None,
    *,
    greedy: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    keep_set: bool = False,
):
    """(token i32[B], log-prob f32[B], kept i32[B, top_k or 0]) of the next token of each row.

    `logits_BxV` are already tempered and masked. forced_B: tokens to report in the place of the drawn ones; -1: none.
    kept: the ids that were drawn from, -1 beyond them.
    """
    logprobs_BxV = jax.nn.log_softmax(logits_BxV, axis=-1)
    allowed_BxV = logprobs_BxV if limits is None else limits.cut(logprobs_BxV, positions_B)
    kept_BxV = keep(allowed_BxV, top_k=top_k, top_p=top_p, min_p=min_p)
    kept_BxK = jnp.zeros((*positions_B.shape, 0), jnp.int32)
    if keep_set:
        values_BxK, ids_BxK = jax.lax.top_k(kept_BxV, top_k)
        kept_BxK = jnp.where(values_BxK > MASKED, ids_BxK, -1)
        in_set_BxV = jnp.zeros(kept_BxV.shape, bool).at[jnp.arange(len(ids_BxK))[:, None], ids_BxK].set(True)
        kept_BxV = jnp.where(in_set_BxV, kept_BxV, MASKED)  # of ties with the last, only those that are sent along
    token_B = _likeliest(kept_BxV) if greedy else _drawn(kept_BxV, keys_B, positions_B)
    if forced_B is not None:
        token_B = jnp.where(forced_B >= 0, forced_B, token_B)
    return token_B, jnp.take_along_axis(logprobs_BxV, token_B[:, None], axis=-1)[:, 0], kept_BxK


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may not be drawn, given what has been: a stop token too early, one token too often in a row."""

    last_B: jax.Array  # the token before
    repeats_B: jax.Array  # how often it has come in a row; 0: it is the prompt's
    stop_ids: tuple[int, ...]
    min_new_tokens: int
    max_repeats: int  # 0: any number

    def cut(self, logprobs_BxV, positions_B) -> jax.Array:
        ids_V = jnp.arange(logprobs_BxV.shape[-1])
        cut_BxV = jnp.zeros(logprobs_BxV.shape, bool)
        if self.max_repeats:
            worn_B = self.repeats_B >= self.max_repeats
            cut_BxV |= worn_B[:, None] & (ids_V[None] == self.last_B[:, None])
        if self.min_new_tokens:
            is_stop_V = jnp.isin(ids_V, jnp.array(self.stop_ids, jnp.int32))
            cut_BxV |= (positions_B < self.min_new_tokens)[:, None] & is_stop_V[None]
        return jnp.where(cut_BxV, MASKED, logprobs_BxV)


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


def _likeliest(scores_BxV) -> jax.Array:
    """argmax as two plain reductions, which CPUs vectorise: four times as fast."""
    top_Bx1 = scores_BxV.max(-1, keepdims=True)
    vocab = scores_BxV.shape[-1]
    ids_1xV = jnp.arange(vocab, dtype=jnp.int32)[None]
    return jnp.where(scores_BxV == top_Bx1, ids_1xV, vocab - 1).min(-1)  # a row of nan takes the last id


def _drawn(logprobs_BxV, keys_B, positions_B) -> jax.Array:
    """Gumbel-max in two stages: a block of ids by its mass, then an id of the block. The law is that of one stage.

    A row takes noise for its blocks and for the ids of one block, not for every id: over a vocabulary of 49,152 that
    is 512 random words a row, where the noise of every id costs as much as the head itself on a CPU.
    """
    rows, vocab = logprobs_BxV.shape
    n_blocks = math.gcd(vocab, BLOCKS)
    ids_BxNxW = logprobs_BxV.reshape(rows, n_blocks, vocab // n_blocks)
    noise_BxT = jax.vmap(_noise, (0, 0, None))(keys_B, positions_B, n_blocks + vocab // n_blocks)
    mass_BxN = jnp.log(jnp.exp(ids_BxNxW).sum(-1))
    block_B = _likeliest(mass_BxN + noise_BxT[:, :n_blocks])
    inside_BxW = jnp.take_along_axis(ids_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * (vocab // n_blocks) + _likeliest(inside_BxW + noise_BxT[:, n_blocks:])


def _noise(key, position, size: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, position.astype(jnp.uint32)), (size,))
