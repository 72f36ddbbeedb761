"""Stage 5, train: the loss of one micro-batch, and what adds up over the micro-batches of an update. Inside the jit.

Where rows are split (`trainer.row_splits`), micro-batches behind the last one with a segment in two short rows are
computed with each short row as one: scores grow with the square of a row.

Law: everything here is a plain sum, because what it is divided by travels in the batch; empty micro-batches are not
computed. The load-balance loss alone is of a micro-batch's own tokens: it is no sum over tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dora_jax.config import TrainerSection
from dora_jax.trainer import correction, health, loss
from dora_jax.trainer.model import Arrays, Model
from dora_jax.types import SHORT_ROWS


def accumulate(
    loss_fn: Any, params: Any, specs: Any, arrays: Arrays, micro_batches: int, splits: int = 1
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradients and metric sums over the micro-batches that hold tokens. loss_fn(params, arrays) -> (loss, sums)."""
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if micro_batches == splits == 1:
        grads, sums = grad_fn(params, arrays)
        return optax.tree.cast(grads, jnp.float32), sums
    split = split_rows(arrays, micro_batches)

    def body(of_row, i, carry):
        grads, sums = grad_fn(params, short_rows(micro_batch_of(split, i), of_row))
        grads = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, carry[0], grads), specs)
        joined = {
            name: jnp.maximum(x, sums[name]) if name.endswith("_max") else x + sums[name]
            for name, x in carry[1].items()
        }
        return grads, joined

    shapes = jax.eval_shape(lambda p, a: grad_fn(p, a)[1], params, {k: v[:, 0] for k, v in split.items()})
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    zeros = jax.lax.with_sharding_constraint(zeros, specs)
    return _over_micro_batches(split, splits, body, (zeros, optax.tree.zeros_like(shapes)))


def split_rows(arrays: Arrays, micro_batches: int) -> dict[str, jax.Array]:
    """[B, L] -> [B/M, M, L]: row r is of micro-batch r % M, so each shard of the rows holds its part of every one."""
    return {name: x.reshape(-1, micro_batches, *x.shape[1:]) for name, x in arrays.items()}


def widened(micro_batches: int, arrays: Arrays, rows: int) -> dict[str, jax.Array]:
    """The first micro-batches of a batch -> all of its `rows`, the others empty: no segment, and zeros."""

    def wide(x: jax.Array) -> jax.Array:
        split = x.reshape(rows // micro_batches, -1, *x.shape[1:])
        empty = [(0, 0), (0, micro_batches - split.shape[1]), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(split, empty).reshape(rows, *x.shape[1:])

    return {name: wide(x) for name, x in arrays.items()}


def by_micro_batch(fn: Any, micro_batches: int, params: Any, arrays: Arrays, splits: int = 1) -> jax.Array:
    """fn(params, arrays) -> [B, L], one micro-batch at a time; 0 in those that hold no token."""
    if micro_batches == splits == 1:
        return fn(params, arrays)
    split = split_rows(arrays, micro_batches)
    like = jax.eval_shape(fn, params, {name: x[:, 0] for name, x in split.items()})

    def body(of_row, i, out):
        rows = fn(params, short_rows(micro_batch_of(split, i), of_row)).reshape(like.shape)
        return jax.lax.dynamic_update_index_in_dim(out, rows, i, axis=1)

    zeros = jnp.zeros((like.shape[0], micro_batches, like.shape[1]), like.dtype)
    return _over_micro_batches(split, splits, body, zeros).reshape(-1, like.shape[1])


def micro_loss(
    model: Model, section: TrainerSection, params: Any, arrays: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(sum of weighted per-token losses, metric sums) of one micro-batch."""
    mask, segments, adv = arrays["mask"], arrays["segment_ids"], arrays["advantages"]
    (l, entropy), routed = model.logprobs_routed(params, arrays, entropy_grad=section.entropy_coef > 0)
    if "exact_logprobs" in arrays:
        l = _valued(arrays["exact_logprobs"], l)
    behavior = arrays["behavior_logprobs"]
    old = arrays.get("old_logprobs", jax.lax.stop_gradient(l))  # a step's first update starts at its own old policy
    anchor = behavior if section.anchor == "behavior" else old
    w, keep, _ = correction.weights(
        section.correction,
        old,
        behavior,
        mask,
        logprobs=l,
        advantages=adv,
        segment_ids=segments,
        **section.correction_params,
    )
    per_token = loss.policy_loss(
        section.policy_loss,
        l,
        anchor,
        adv,
        mask,
        behavior_logprobs=behavior,
        rewards=arrays["rewards"],
        segment_ids=segments,
        **section.loss_params,
    )
    weight = jnp.where(mask, arrays["loss_weights"], 0.0)
    policy = jnp.sum(weight * jnp.where(keep, w * per_token, 0.0))
    sums = health.token_sums(
        l,
        anchor,
        old,
        behavior,
        entropy,
        mask,
        arrays["lag"],
        loss.clipped(section.policy_loss, l, anchor, adv, section.loss_params),
    )
    sums["kept"] = jnp.sum(keep & mask, dtype=jnp.float32)
    moments = correction.trajectory_moments(jnp.where(mask, old - behavior, 0.0), mask, segments)
    sums |= dict(zip(("trajectories", "w", "w_sq"), jax.lax.stop_gradient(moments)))
    total = policy
    if section.kl != "none":
        divergence = jnp.where(mask, loss.kl(section.kl, jnp.where(mask, l, 0.0), arrays["ref_logprobs"]), 0.0)
        sums["kl_ref"] = jnp.sum(divergence)
        total += section.kl_coef * jnp.sum(weight * divergence) if section.kl_in == "loss" else 0.0
    if section.entropy_coef:
        total -= section.entropy_coef * jnp.sum(weight * jnp.where(mask, entropy, 0.0))
    if routed is not None:
        k = routed.ids.shape[-1]
        routers = {  # of the tokens that count
            "expert_load": routed.load,
            "expert_entropy": routed.entropy * k,  # once a choice, as the other sums
            "expert_changed": routed.changed,
            "expert_choices": jnp.sum(segments > 0, dtype=jnp.float32) * k,
        }
        sums |= jax.lax.stop_gradient(routers)
        if section.load_balance_coef:  # each micro-batch counts by its part of the update
            balance = loss.load_balance_loss(model.cfg.moe, routed)
            total += section.load_balance_coef * jnp.sum(weight) * balance
    return total, sums | {"loss": total, "policy_loss": policy}


@jax.custom_jvp
def _valued(values: jax.Array, computed: jax.Array) -> jax.Array:
    """The values, with the gradient of what was computed. A sum of both and a difference would round."""
    del computed
    return values


@_valued.defjvp
def _valued_jvp(primals, tangents):
    return primals[0], tangents[1]


def _over_micro_batches(split: dict[str, jax.Array], splits: int, body: Any, carry: Any) -> Any:
    """body(splits of a row, i, carry) -> carry, over the micro-batches that hold tokens; they come first, at least
    one."""
    segments_BxMxL = split["segment_ids"]
    count_M = jnp.arange(1, 1 + segments_BxMxL.shape[1])
    used = jnp.max(jnp.where((segments_BxMxL > 0).any((0, 2)), count_M, 1))
    if splits == 1:
        return jax.lax.fori_loop(0, used, functools.partial(body, 1), carry)
    edges = segments_BxMxL.reshape(*segments_BxMxL.shape[:2], splits, -1)
    last, first = edges[:, :, :-1, -1], edges[:, :, 1:, 0]
    whole = jnp.max(jnp.where(((last == first) & (first > 0)).any((0, 2)), count_M, 0))
    carry = jax.lax.fori_loop(0, whole, functools.partial(body, 1), carry)
    with jax.named_scope(SHORT_ROWS):
        return jax.lax.fori_loop(whole, used, functools.partial(body, splits), carry)


def micro_batch_of(split: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
    """[B/M, L]"""
    return {name: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for name, x in split.items()}


def short_rows(arrays: Arrays, splits: int) -> dict[str, jax.Array]:
    """[B, L] -> [B * splits, L / splits]"""
    return {name: x.reshape(-1, x.shape[1] // splits, *x.shape[2:]) for name, x in arrays.items()}
