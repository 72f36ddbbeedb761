"""The plain way in JAX, as a rival: one contiguous cache, whole batches, a scan until the longest sample ends.

Everything of it is tuned as in the engine (layouts, one dispatch a batch, donated cache); what it lacks is continuous
batching, pages and versions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dora_jax.models import decoder
from dora_jax.ops.attention import MASKED
from dora_jax.ops.segment_attention import segment_attention


def runner(cfg: decoder.ModelConfig, params, work) -> Callable[[], None]:
    """A closure that samples the whole work once."""
    longest = [int(work.lengths[i : i + work.batch].max()) for i in range(0, len(work.lengths), work.batch)]
    calls = {n: jax.jit(functools.partial(_generate, cfg, n)) for n in set(longest)}

    def run() -> None:
        for first, n in zip(range(0, len(work.lengths), work.batch), longest, strict=True):
            prompts = work.prompts[first : first + work.batch]
            jax.device_get(calls[n](params, prompts, jax.random.key(first)))

    return run


def _generate(cfg: decoder.ModelConfig, n: int, params, prompts_BxT, key):
    """Log-probs f32[n, B] and the tokens of n steps, prefill included."""
    b, prompt = prompts_BxT.shape
    cache = {}

    def keep(layer, q, k, v):
        cache[layer] = (
            jnp.pad(k.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, n))),
            jnp.pad(v.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, n), (0, 0))),
        )
        return attend(q, k, v)

    positions = jnp.tile(jnp.arange(prompt)[None], (b, 1))
    attend_prompt = segment_attention(jnp.ones((b, prompt), jnp.int32), positions)
    attend = lambda q, k, v: attend_prompt(None, q, k, v)
    hidden = decoder.forward(cfg, params, prompts_BxT, positions, keep)[:, -1]
    first, first_logprob = _sample(decoder.logits(cfg, params, hidden), jax.random.fold_in(key, 0))

    def step(carry, i):
        token_B, cache = carry
        cache = dict(cache)
        at = prompt + i

        def attend(layer, q, k, v):
            k = jax.lax.dynamic_update_slice_in_dim(cache[layer][0], k.transpose(0, 2, 3, 1), at, 3)
            v = jax.lax.dynamic_update_slice_in_dim(cache[layer][1], v.transpose(0, 2, 1, 3), at, 2)
            cache[layer] = k, v
            return _attend(q, k, v, at)

        hidden = decoder.forward(cfg, params, token_B[:, None], jnp.full((b, 1), at), attend)[:, 0]
        token_B, logprob_B = _sample(decoder.logits(cfg, params, hidden), jax.random.fold_in(key, i + 1))
        return (token_B, cache), (token_B.astype(jnp.float32), logprob_B)

    _, (tokens, logprobs) = jax.lax.scan(step, (first, cache), jnp.arange(n - 1))
    return jnp.concatenate([first_logprob[None], logprobs]), tokens


def _attend(q_Bx1xHxD, k_BxKxDxS, v_BxKxSxD, at):
    b, _, heads, d = q_Bx1xHxD.shape
    q = q_Bx1xHxD.reshape(b, k_BxKxDxS.shape[1], -1, d)
    scores = jnp.einsum("bkgd,bkds->bkgs", q, k_BxKxDxS) * d**-0.5
    seen = jnp.arange(scores.shape[-1])[None, None, None] <= at
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    return jnp.einsum("bkgs,bksd->bkgd", weights, v_BxKxSxD).reshape(b, 1, heads, d)


def _sample(logits, key):
    token = jax.random.categorical(key, logits).astype(jnp.int32)
    return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
