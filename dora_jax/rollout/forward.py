"""Stage 2, device side: what one compiled call of an engine computes: decode steps, the check of drafts, a prompt's
chunk.

Consumes params of one version (or base weights and the adapters of several), the KV pool, the state of the slots and an
i32 control array (shapes.py says its columns); produces the pool with the new KV and one small i32 result array. `kv`
says how KV lies in pages and how a call reads and writes it (kv_xla.py, kv_pallas.py). device_calls.py compiles these
functions. Law: a row reads and writes only the pages that it was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models import decoder, moe
from dora_jax.models.routes import RouteShape
from dora_jax.rollout import quantize, sample
from dora_jax.rollout.shapes import HEADER, PREFILL_HEADER, PREFILL_STATE, SOURCE, STATE, TOP_COLUMNS, Shapes


def empty(kv, shapes: Shapes):
    """The pool, and per slot (the last one for padding rows) its next token, whether it still samples, how often the
    token has come in a row."""
    return kv.empty(), jnp.zeros((shapes.slots + 1, 3), jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Forward:
    """What the calls of one engine compute. Arrays come in and go out; the object holds none."""

    cfg: decoder.ModelConfig
    shapes: Shapes
    kv: Any  # Gathered or Paged
    compute: moe.Compute
    logits: Callable[..., jax.Array]  # (params, hidden [N, D]) -> [N, V], tempered and masked
    draw: Callable[..., Any]  # sample.draw with its options
    own: Callable[..., Any]  # a decode call's options and masks -> sample.OwnSampling
    limits: Callable[..., Any] | None  # (last token, how often in a row) -> DrawLimits; None: any may be drawn
    key: Callable[..., jax.Array]  # (group, index) -> the sample's key
    stop: Callable[[jax.Array], jax.Array]  # tokens -> whether each ends its sample
    dtype: Any
    routes: RouteShape | None  # None: no routes come along
    gain: float  # of adapters
    shards: int  # devices that joined weights are cut for

    def decode(self, params, pool, state_Sx3, control_BxC, options_BxO, masks_BxM, *, blocks: int):
        """Up to `steps` tokens for each row: (pool, state, result, routes [rows, steps, M, k] or None, most likely
        tokens [rows, steps, TOP_COLUMNS]); see `empty` for the state, Shapes.result for the result, OwnSampling for the
        last."""
        own = self.own(options_BxO, masks_BxM)
        widths = blocks * self.shapes.block_pages, self.shapes.window
        header, pages_GxBxP, window_GxBxW, forced_BxN = self._cut(control_BxC, HEADER, *widths)
        columns = [header[:, i] for i in range(STATE)]
        slot_B, fresh_B, token_B, past_B, remaining_B, drawn_B, group_B, index_B, repeats_B, adapter_B = columns
        states = (header[:, SOURCE], header[:, STATE]) if self.shapes.states else ()
        fresh_B = fresh_B > 0
        token_B = jnp.where(fresh_B, token_B, state_Sx3[slot_B, 0])
        repeats_B = jnp.where(fresh_B, repeats_B, state_Sx3[slot_B, 2])
        active_B = (remaining_B > 0) & (fresh_B | (state_Sx3[slot_B, 1] > 0))
        keys_B = jax.vmap(self.key)(group_B, index_B)
        fixed, moving = self.kv.begin(pool, pages_GxBxP, window_GxBxW, past_B, *states)
        rows, steps = token_B.shape[0], self.shapes.steps

        def step(carry):
            i, last_B, repeats_B, active_B, moving, out, count_B = carry
            tokens_NxB, bits_NxB, kept_NxBxK, routes_NxB, top_NxBxT = out
            hidden_Bx1xD, moving, ids = self._run(
                quantize.tied(params, i),
                last_B[:, None],
                past_B[:, None] + i,
                self.kv.attend_step(fixed, i, active_B),
                moving,
                adapter_B,
                turns=self.kv.turns,
            )
            with jax.named_scope("sample"):
                logits_BxV = self.logits(self._base(params), hidden_Bx1xD[:, 0])
                limits = self.limits and self.limits(last_B, repeats_B)
                forced_B = forced_BxN[:, i] if self.shapes.exact else None
                noise_BxT = sample.noise(keys_B, drawn_B + i, logits_BxV.shape[-1])
                drawn = self.draw(logits_BxV, noise_BxT, drawn_B + i, limits, forced_B)
                drawn = own.draw(drawn, logits_BxV, noise_BxT, drawn_B + i, limits, tokens_NxB.T, i)
                next_B, logprob_B, kept_BxK, top_BxT = drawn
            given_B = own.given(steps, i) >= 0
            token_B = jnp.where(active_B, next_B, last_B)
            repeats_B = jnp.where((token_B == last_B) & (repeats_B > 0), repeats_B + 1, 1)
            repeats_B = jnp.where(given_B, 0, repeats_B)
            if self.routes is not None:
                routes_NxB = routes_NxB.at[i].set(_routes(ids, self.routes)[:, 0])
            bits_B = jax.lax.bitcast_convert_type(logprob_B.astype(jnp.float32), jnp.int32)
            tokens_NxB, bits_NxB = tokens_NxB.at[i].set(token_B), bits_NxB.at[i].set(bits_B)
            out = tokens_NxB, bits_NxB, kept_NxBxK.at[i].set(kept_BxK), routes_NxB, top_NxBxT.at[i].set(top_BxT)
            count_B = count_B + active_B
            active_B = active_B & (~self.stop(token_B) | given_B) & (i + 1 < remaining_B)
            return i + 1, token_B, repeats_B, active_B, moving, out, count_B

        out = (
            jnp.zeros((steps, rows), jnp.int32),
            jnp.zeros((steps, rows), jnp.int32),
            jnp.zeros((steps, rows, self.shapes.kept), jnp.int32),
            self.routes and jnp.zeros((steps, rows, self.routes.layers, self.routes.per_token), self.routes.dtype),
            jnp.zeros((steps, rows, TOP_COLUMNS), jnp.int32),
        )
        carry = (jnp.int32(0), token_B, repeats_B, active_B, moving, out, jnp.zeros(rows, jnp.int32))
        _, token_B, repeats_B, active_B, moving, out, count_B = jax.lax.while_loop(
            lambda c: (c[0] < steps) & c[3].any(), step, carry
        )
        tokens_NxB, bits_NxB, kept_NxBxK, routes_NxB, top_NxBxT = out
        pool = self.kv.end(pool, moving, pages_GxBxP, window_GxBxW, past_B, count_B)
        state_Sx3 = state_Sx3.at[slot_B].set(jnp.stack([token_B, active_B.astype(jnp.int32), repeats_B], axis=1))
        kept_BxNK = kept_NxBxK.transpose(1, 0, 2).reshape(rows, -1)
        result = jnp.concatenate([tokens_NxB.T, bits_NxB.T, count_B[:, None], kept_BxNK], axis=1)
        routes_BxN = None if routes_NxB is None else routes_NxB.swapaxes(0, 1)
        return pool, state_Sx3, result, routes_BxN, top_NxBxT.swapaxes(0, 1)

    def verify(self, params, pool, control_BxC, *, blocks: int):
        """One forward over each row's last token and its draft: (pool, result, routes), as `decode` gives them.

        Each position draws with its own key, as a decode step does; the draws count up to the first that its draft does
        not equal. The state of the slots is not read and not written: the host says where every row stands, here and
        next."""
        length, widths = self.shapes.drafts + 1, (blocks * self.shapes.block_pages, self.shapes.verify_window)
        header, pages_GxBxP, window_GxBxW, drafts_BxK = self._cut(control_BxC, HEADER, *widths)
        columns = [header[:, i] for i in range(STATE)]
        _, _, token_B, past_B, remaining_B, drawn_B, group_B, index_B, repeats_B, adapter_B = columns
        active_B = remaining_B > 0
        tokens_BxL = jnp.concatenate([token_B[:, None], jnp.maximum(drafts_BxK, 0)], axis=1)
        at_L = jnp.arange(length)
        states = (header[:, SOURCE], header[:, STATE], length) if self.shapes.states else ()
        fixed, moving = self.kv.begin(pool, pages_GxBxP, window_GxBxW, past_B, *states)
        hidden_BxLxD, moving, ids = self._run(
            params,
            tokens_BxL,
            past_B[:, None] + at_L[None],
            lambda moving: self.kv.attend_ahead(fixed, moving, active_B),
            moving,
            adapter_B,
        )
        with jax.named_scope("sample"):
            keys_T = jax.vmap(self.key)(jnp.repeat(group_B, length), jnp.repeat(index_B, length))
            drawn_T = (drawn_B[:, None] + at_L[None]).reshape(-1)
            repeats = [repeats_B]  # how often each token has come in a row; the first one 0 where it is the prompt's
            for i in range(1, length):
                again_B = (tokens_BxL[:, i] == tokens_BxL[:, i - 1]) & (repeats[-1] > 0)
                repeats.append(jnp.where(again_B, repeats[-1] + 1, 1))
            limits = self.limits and self.limits(tokens_BxL.reshape(-1), jnp.stack(repeats, axis=1).reshape(-1))
            logits_TxV = self.logits(self._base(params), hidden_BxLxD.reshape(-1, self.cfg.d_model))
            noise = sample.noise(keys_T, drawn_T, logits_TxV.shape[-1])
            drawn = self.draw(logits_TxV, noise, drawn_T, limits)
        next_BxL, logprob_BxL, kept_BxLxK = (x.reshape(*tokens_BxL.shape, *x.shape[1:]) for x in drawn)
        goes_on_BxK = (next_BxL[:, :-1] == drafts_BxK) & ~self.stop(next_BxL[:, :-1])
        goes_on_BxK &= at_L[None, 1:] < remaining_B[:, None]
        count_B = active_B * (1 + jnp.cumprod(goes_on_BxK, axis=1).sum(1, dtype=jnp.int32))
        pool = self.kv.end(pool, moving, pages_GxBxP, window_GxBxW, past_B, count_B)
        kept_BxLK = kept_BxLxK.reshape(len(tokens_BxL), -1)
        bits_BxL = jax.lax.bitcast_convert_type(logprob_BxL.astype(jnp.float32), jnp.int32)
        result = jnp.concatenate([next_BxL, bits_BxL, count_B[:, None], kept_BxLK], axis=1)
        return pool, result, self.routes and _routes(ids, self.routes)

    def prefill(self, params, pool, control_RxC, *, blocks: int):
        """(pool, routes [rows, chunk, M, k] or None): KV of one chunk a row, given the pages before it. What the
        chunk's first page holds of the chunk already stays. The last layer's output is not needed; of unrolled layers
        it is not computed."""
        chunk, widths = (
            self.shapes.chunk,
            (blocks * self.shapes.block_pages, self.shapes.chunk // self.shapes.page_size),
        )
        head, past_GxRxP, write_GxRxW, _ = self._cut(control_RxC, PREFILL_HEADER + chunk, *widths)
        header, tokens_RxL = jnp.split(head, [PREFILL_HEADER], axis=1)
        start_R, length_R, kept_R, _, adapter_R = header.T
        states = (header[:, PREFILL_STATE],) if self.shapes.states else ()
        positions_RxL = start_R[:, None] + jnp.arange(chunk)[None]
        _, pool, ids = self._run(
            params,
            tokens_RxL,
            positions_RxL,
            lambda pool: self.kv.attend_chunk(pool, past_GxRxP, write_GxRxW, start_R, length_R, kept_R, *states),
            pool,
            adapter_R,
        )
        return pool, self.routes and _routes(ids, self.routes)

    def _cut(self, control_BxC, header: int, read: int, write: int) -> list[jax.Array]:
        """(header, pages to read [groups, B, read], to write [groups, B, write], what stands behind them)."""
        groups = self.shapes.groups
        pieces = jnp.split(control_BxC, np.cumsum([header, groups * read, groups * write]).tolist(), axis=1)
        pieces[1:3] = [x.reshape(len(x), groups, -1).swapaxes(0, 1) for x in pieces[1:3]]
        return pieces

    def _base(self, params):
        return params[0] if self.shapes.adapters else params

    def _run(self, params, tokens_BxL, positions_BxL, attend_with, state, adapter_B, turns: bool = False):
        options = {"dtype": self.dtype, "compute": self.compute, "turns": turns, "shards": self.shards}
        if self.shapes.adapters:
            options |= {"adapters": params[1], "adapter_index": adapter_B, "adapter_gain": self.gain}
        return decoder.forward_carrying(
            self.cfg, self._base(params), tokens_BxL, positions_BxL, attend_with, state, **options
        )


def _routes(ids_MxBxLxk, routes: RouteShape):
    """[B, L, M, k] in the type that travels."""
    return ids_MxBxLxk.transpose(1, 2, 0, 3).astype(routes.dtype)


def is_stop(token_B, *, eos_ids: tuple[int, ...]):
    stopped = jnp.zeros(token_B.shape, bool)
    for eos in eos_ids:
        stopped |= token_B == eos
    return stopped
