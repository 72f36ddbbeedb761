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
from dora_jax.rollout.shapes import BIASED, BIASES, HISTORY, TOP_COLUMNS, Option
from dora_jax.types import MAX_TOP_LOGPROBS, OWN_SAMPLING

OWN_ROWS = 8  # of a call, whose arrays of the vocabulary are alive at once
GREEDY = 1e-5  # a request's temperature below it is 0, as in vLLM
BLOCKS = 128  # of a vocabulary, at most; a power of two, so that a shard of the vocabulary holds whole blocks


def sample_key(seed: int, group_id, index) -> jax.Array:
    """Key of one sample; group ids may be negative (held-out groups)."""
    key = jax.random.fold_in(jax.random.key(seed), jnp.asarray(group_id).astype(jnp.uint32))
    return jax.random.fold_in(key, jnp.asarray(index).astype(jnp.uint32))


def draw(
    logits_BxV,
    noise_BxT,
    positions_B,
    limits: DrawLimits | None = None,
    forced_B: jax.Array | None = None,
    *,
    greedy: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    keep_set: bool = False,
):
    """(token i32[B], log-prob f32[B], kept i32[B, top_k or 0]) of the next token of each row.

    `logits_BxV` are already tempered and masked. noise_BxT: of `noise`. forced_B: tokens to report in the place of the
    drawn ones; -1: none. kept: the ids that were drawn from, -1 beyond them.
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
    token_B = _likeliest(kept_BxV) if greedy else _drawn(kept_BxV, noise_BxT)
    if forced_B is not None:
        token_B = jnp.where(forced_B >= 0, forced_B, token_B)
    return token_B, jnp.take_along_axis(logprobs_BxV, token_B[:, None], axis=-1)[:, 0], kept_BxK


@dataclasses.dataclass(frozen=True)
class OwnSampling:
    """Draws of the rows of a decode call that have sampling values of their own (types.Sampling).

    The other rows keep the run's draw, bit for bit. Where no row has own values nothing of this is computed; where none
    has a cut or a penalty, no vocabulary is sorted and no token counted. Order as vLLM's: bias, penalties, temperature,
    top-k, top-p, min-p; temperature alone changes the log-prob that is reported."""

    options_BxO: jax.Array  # columns of shapes.py
    masks_BxM: jax.Array  # a bit a token, of rows whose tokens a grammar says
    temperature: float  # that the logits were divided by
    stop_ids: tuple[int, ...]

    def draw(self, drawn, logits_BxV, noise_BxT, positions_B, limits: DrawLimits | None, new_BxN, count):
        """(token, log-prob, kept) as `draw` returns them, with these rows' draws in place, and
        i32[B, TOP_COLUMNS]: the ids of the most likely tokens, then the bits of their log-probs; zeros where nobody
        wants them. new_BxN: this call's tokens, of which the first `count` are there."""
        token_B, logprob_B, set_BxK = drawn
        own_B = self.options_BxO[:, Option.OWN] > 0

        def draw_rows(rows):
            options, masks, logits, noise, positions, new, *limited = rows
            cuts = dataclasses.replace(limits, last_B=limited[0], repeats_B=limited[1]) if limits else None
            own = dataclasses.replace(self, options_BxO=options, masks_BxM=masks)
            return own._draw(logits, noise, positions, cuts, new, count)

        def draw_own(*_):
            rows = self.options_BxO, self.masks_BxM, logits_BxV, noise_BxT, positions_B, new_BxN
            rows += (limits.last_B, limits.repeats_B) if limits else ()
            size = math.gcd(len(own_B), OWN_ROWS)
            some = jax.lax.map(draw_rows, jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), rows))
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), some)

        with jax.named_scope(OWN_SAMPLING):
            none_BxT = jnp.zeros((len(own_B), TOP_COLUMNS), jnp.int32)
            *own, top_BxT = jax.lax.cond(own_B.any(), draw_own, lambda *drawn: drawn, token_B, logprob_B, none_BxT)
        token_B, logprob_B = (jnp.where(own_B, new, run) for new, run in zip(own, drawn[:2], strict=True))
        return token_B, logprob_B, jnp.where(own_B[:, None], -1, set_BxK), top_BxT

    def given(self, steps: int, count) -> jax.Array:
        """i32[B]: the token that each row takes in the place of this call's next draw; -1: it draws."""
        return jnp.where(self.options_BxO[:, Option.OWN] > 0, self.options_BxO[:, -steps:][:, count], -1)

    def _draw(self, logits_BxV, noise_BxT, positions_B, limits: DrawLimits | None, new_BxN, count):
        """(token, log-prob, most likely tokens) of each row."""
        greedy_B = self._number(Option.TEMPERATURE) < GREEDY
        divisor_Bx1 = jnp.where(greedy_B, 1.0, self._number(Option.TEMPERATURE))[:, None]
        raw_BxV = logits_BxV * self.temperature
        changed = (self.options_BxO[:, BIASED:BIASES] >= 0).any() | self._penalised.any()
        logits_BxV = jax.lax.cond(changed, self._penalise, _first, raw_BxV, new_BxN, count)
        allowed_BxV = jax.nn.log_softmax(logits_BxV / divisor_Bx1, axis=-1)
        if limits is not None:
            allowed_BxV = limits.cut(allowed_BxV, positions_B)
        is_stop_V = jnp.isin(jnp.arange(allowed_BxV.shape[-1]), jnp.array(self.stop_ids, jnp.int32))
        early_B = positions_B < self.options_BxO[:, Option.MIN_TOKENS]
        allowed_BxV = jnp.where(early_B[:, None] & is_stop_V[None], MASKED, allowed_BxV)
        masked_B = self.options_BxO[:, Option.MASKED] > 0
        allowed_BxV = jax.lax.cond(masked_B.any(), self._mask, _first, allowed_BxV, masked_B)
        own_B, top_k_B = self.options_BxO[:, Option.OWN] > 0, self.options_BxO[:, Option.TOP_K]
        top_p_B = self._number(Option.TOP_P)
        cuts_B = own_B & ~greedy_B & ((top_k_B > 0) | (top_p_B < 1.0))
        least_B = allowed_BxV.min(-1)
        least_B = jax.lax.cond(cuts_B.any(), _least, _first, least_B, allowed_BxV, top_k_B, top_p_B)
        least_B = jnp.maximum(least_B, allowed_BxV.max(-1) + jnp.log(self._number(Option.MIN_P)))
        rest_BxV = jnp.where(allowed_BxV >= least_B[:, None], allowed_BxV, MASKED)
        next_B = jnp.where(greedy_B, _likeliest(allowed_BxV), _drawn(rest_BxV, noise_BxT))
        given_B = self.given(new_BxN.shape[1], count)
        next_B = jnp.where(given_B >= 0, given_B, next_B)
        reported_BxV = jax.nn.log_softmax(raw_BxV / divisor_Bx1, axis=-1)
        wanted = (self.options_BxO[:, Option.TOP_LOGPROBS] > 0).any()
        none_BxT = jnp.zeros((len(next_B), TOP_COLUMNS), jnp.int32)
        top_BxT = jax.lax.cond(wanted, _top, _first, none_BxT, reported_BxV)
        return next_B, jnp.take_along_axis(reported_BxV, next_B[:, None], axis=-1)[:, 0], top_BxT

    def _number(self, column: Option) -> jax.Array:
        return jax.lax.bitcast_convert_type(self.options_BxO[:, column], jnp.float32)

    @property
    def _penalised(self) -> jax.Array:
        additive_B = (self._number(Option.PRESENCE) != 0) | (self._number(Option.FREQUENCY) != 0)
        return (self.options_BxO[:, Option.OWN] > 0) & (additive_B | (self._number(Option.REPETITION) != 1))

    def _mask(self, logprobs_BxV, masked_B) -> jax.Array:
        ids_V = jnp.arange(logprobs_BxV.shape[-1])
        may_BxV = (self.masks_BxM[:, ids_V // 32] >> (ids_V % 32)[None]) & 1
        return jnp.where(masked_B[:, None] & (may_BxV == 0), MASKED, logprobs_BxV)

    def _penalise(self, raw_BxV, new_BxN, count) -> jax.Array:
        """The logits with the rows' biases and penalties. An id of -1 lies beyond the vocabulary, where a scatter drops
        it."""
        rows_Bx1, vocab = jnp.arange(len(raw_BxV))[:, None], raw_BxV.shape[-1]
        biases_BxE = jax.lax.bitcast_convert_type(self.options_BxO[:, BIASES:HISTORY], jnp.float32)
        logits_BxV = raw_BxV.at[rows_Bx1, _inside(self.options_BxO[:, BIASED:BIASES], vocab)].add(
            biases_BxE, mode="drop"
        )
        new_BxN = jnp.where(jnp.arange(new_BxN.shape[1]) < count, new_BxN, -1)
        tokens_BxT = jnp.concatenate([self.options_BxO[:, HISTORY : -new_BxN.shape[1]], new_BxN], axis=1)
        is_prompt_BxT = jnp.arange(tokens_BxT.shape[1])[None] < self.options_BxO[:, Option.N_PROMPT, None]
        steps = new_BxN.shape[1]
        is_prompt_BxT = is_prompt_BxT.at[:, -steps:].set(self.options_BxO[:, -steps:] >= 0)
        response_BxT = _inside(jnp.where(is_prompt_BxT, -1, tokens_BxT), vocab)
        seen_BxV = jnp.zeros(raw_BxV.shape, bool).at[rows_Bx1, _inside(tokens_BxT, vocab)].set(True, mode="drop")
        count_BxV = jnp.zeros(raw_BxV.shape).at[rows_Bx1, response_BxT].add(1.0, mode="drop")
        repetition_Bx1 = self._number(Option.REPETITION)[:, None]
        scaled_BxV = jnp.where(logits_BxV > 0, logits_BxV / repetition_Bx1, logits_BxV * repetition_Bx1)
        less_BxV = self._number(Option.FREQUENCY)[:, None] * count_BxV
        less_BxV += self._number(Option.PRESENCE)[:, None] * (count_BxV > 0)
        penalised_BxV = jnp.where(seen_BxV, scaled_BxV, logits_BxV) - less_BxV
        return jnp.where(self._penalised[:, None], penalised_BxV, logits_BxV)


def _first(value, *_):
    """What a condition leaves as it is."""
    return value


def _top(_, logprobs_BxV) -> jax.Array:
    """i32[B, TOP_COLUMNS]; an id of -1 where the vocabulary has no more."""
    values_BxK, ids_BxK = jax.lax.top_k(logprobs_BxV, min(MAX_TOP_LOGPROBS, logprobs_BxV.shape[-1]))
    columns = jax.lax.bitcast_convert_type(values_BxK, jnp.int32), ids_BxK
    pad = ((0, 0), (0, MAX_TOP_LOGPROBS - ids_BxK.shape[-1]))
    bits_BxK, ids_BxK = (jnp.pad(column, pad, constant_values=-1) for column in columns)
    return jnp.concatenate([ids_BxK, bits_BxK], axis=-1)


def _inside(ids, vocab: int) -> jax.Array:
    return jnp.where(ids < 0, vocab, ids)


def _least(_, logprobs_BxV, top_k_B, top_p_B) -> jax.Array:
    """The log-prob of the last token that each row's top-k, then top-p, keeps. No vocabulary is sorted: the bits of
    -log-prob order as the numbers do, and each step settles one of them, the highest first."""
    vocab = logprobs_BxV.shape[-1]
    bits_BxV = jax.lax.bitcast_convert_type(jnp.maximum(-logprobs_BxV, 0.0), jnp.int32)
    probs_BxV = jnp.exp(logprobs_BxV)

    def last(weights_BxV, enough_B):
        """The least bits up to which the weights add up to enough; all of them where they never do."""

        def settle(i, bound_B):
            lower_B = bound_B - (1 << 30 >> i)
            weight_B = jnp.where(bits_BxV <= lower_B[:, None], weights_BxV, 0.0).sum(-1)
            return jnp.where(weight_B >= enough_B, lower_B, bound_B)

        return jax.lax.fori_loop(0, 31, settle, jnp.full(len(enough_B), jnp.iinfo(jnp.int32).max))

    cuts_k_B = (top_k_B > 0) & (top_k_B < vocab)
    most = jnp.iinfo(jnp.int32).max
    nearest_B = jax.lax.cond(
        cuts_k_B.any(),
        lambda: jnp.where(cuts_k_B, last(jnp.ones_like(probs_BxV), top_k_B.astype(jnp.float32)), most),
        lambda: jnp.full(len(top_k_B), most),
    )
    near_BxV = jnp.where(bits_BxV <= nearest_B[:, None], probs_BxV, 0.0)
    nucleus_B = last(near_BxV, jnp.maximum(top_p_B, 1e-9) * near_BxV.sum(-1))  # at 0: the most likely one
    bound_B = jnp.where(top_p_B < 1.0, jnp.minimum(nearest_B, nucleus_B), nearest_B)
    return jnp.where(bits_BxV <= bound_B[:, None], logprobs_BxV, 0.0).min(-1)


@dataclasses.dataclass(frozen=True)
class DrawLimits:
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


def noise(keys_B, positions_B, vocab: int) -> jax.Array:
    """f32[B, T]: what a draw of each row adds to its log-probs, for its blocks of ids and for the ids of one block."""
    size = math.gcd(vocab, BLOCKS) + vocab // math.gcd(vocab, BLOCKS)
    row = lambda key, at: jax.random.gumbel(jax.random.fold_in(key, at), (size,))
    return jax.vmap(row)(keys_B, positions_B.astype(jnp.uint32))


def _drawn(logprobs_BxV, noise_BxT) -> jax.Array:
    """Gumbel-max in two stages: a block of ids by its mass, then an id of the block. The law is that of one stage.

    A row takes noise for its blocks and for the ids of one block, not for every id: over a vocabulary of 49,152 that
    is 512 random words a row, where the noise of every id costs as much as the head itself on a CPU.
    """
    rows, vocab = logprobs_BxV.shape
    n_blocks = math.gcd(vocab, BLOCKS)
    ids_BxNxW = logprobs_BxV.reshape(rows, n_blocks, vocab // n_blocks)
    mass_BxN = jnp.log(jnp.exp(ids_BxNxW).sum(-1))
    block_B = _likeliest(mass_BxN + noise_BxT[:, :n_blocks])
    inside_BxW = jnp.take_along_axis(ids_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * (vocab // n_blocks) + _likeliest(inside_BxW + noise_BxT[:, n_blocks:])
