"""Stage 5, train: the value model of PPO: a second decoder with a scalar head, its own Adam, the same mesh.

Consumes the packed rows; produces V of the state *before* each target, and its own update from `returns`.
It starts as a copy of the policy with a head of zeros, so its first values are 0. Law: the policy's gradient never
reaches it, nor its own the policy.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.config import TrainerSection
from dora_jax.models import decoder, sharding
from dora_jax.trainer import loss, optim
from dora_jax.trainer.model import Model, unrouted


class CriticState(NamedTuple):
    params: Any  # {"body": stacked decoder, "head": f32[D]}
    opt_state: Any


class Critic:
    """The static part: how to initialise, evaluate and update a CriticState."""

    def __init__(self, model: Model, section: TrainerSection):
        self.model, self.section = model, section
        self._tx = optim.optimizer(optax.constant_schedule(section.value_learning_rate), section)

    def init(self, policy: Any) -> CriticState:
        """Jittable; copies the policy's weights."""
        body = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), policy)
        params = {"body": body, "head": jnp.zeros(self.model.cfg.d_model, jnp.float32)}
        return CriticState(params, self._tx.init(params))

    def shardings(self, mesh: Mesh) -> CriticState:
        whole = NamedSharding(mesh, PartitionSpec())
        specs = {"body": sharding.param_specs(self.model.cfg, mesh), "head": whole}
        like = {
            "body": decoder.abstract_params(self.model.cfg),
            "head": jax.ShapeDtypeStruct((self.model.cfg.d_model,), jnp.float32),
        }
        moments = optim.state_shardings(self._tx, like, specs, whole, self.section.optimizer_memory)
        return CriticState(specs, moments)

    def values(self, params: Any, arrays: Any) -> jax.Array:
        """f32[B, L]"""
        hidden, _ = self.model.hidden(params["body"], unrouted(arrays))
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("bld,d->bl", hidden.astype(jnp.float32), params["head"], precision=highest)

    def loss(self, params: Any, arrays: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Clipped value loss under the policy's own loss weights, and its sums."""
        mask = arrays["mask"]
        clip = self.section.value_clip or None
        per_token = loss.value_loss(self.values(params, arrays), arrays["values"], arrays["returns"], e=clip)
        per_token = jnp.where(mask, per_token, 0.0)
        return jnp.sum(arrays["loss_weights"] * per_token), {"value_loss": jnp.sum(per_token)}

    def update(self, state: CriticState, arrays: Any, accumulate: Any) -> tuple[CriticState, dict[str, jax.Array]]:
        """One optimizer step; not finite: the state stays, and `skipped` is 1. `accumulate` is step.accumulate."""
        where, section = self.shardings(self.model.mesh).params, self.section
        grads, sums = accumulate(
            self.loss, state.params, where, arrays, section.micro_batches, max(section.row_splits, 1)
        )
        norm = optax.tree.norm(grads)
        ok = jnp.isfinite(norm) & jnp.isfinite(sums["value_loss"])
        old = optim.fetched(state.opt_state, self.shardings(self.model.mesh).opt_state, after=norm)
        updates, opt_state = self._tx.update(grads, old, state.params)
        new = CriticState(optax.apply_updates(state.params, updates), opt_state)
        keep = functools.partial(jax.tree.map, lambda a, b: jnp.where(ok, a, b))
        sums |= {"value_grad_norm": norm, "skipped": 1.0 - ok.astype(jnp.float32)}
        return keep(new, CriticState(state.params, old)), sums
