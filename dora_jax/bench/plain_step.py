"""The plainest JAX update, as a rival: padded rows, jax.nn attention, log_softmax over all logits, optax. Nothing else.

Written against the weights' names alone, so that it also checks the model: it shares no code with decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def runner(cfg, params, padded) -> Callable[[], tuple[float, float]]:
    """A closure that makes one update and returns (loss, gradient norm)."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.0))
    state = [jax.tree.map(jnp.copy, params)]
    state.append(tx.init(state[0]))

    @jax.jit
    def update(params, moments, batch):
        loss, grads = jax.value_and_grad(_loss, argnums=1)(cfg, params, batch)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss, optax.tree.norm(grads)

    def run() -> tuple[float, float]:
        state[0], state[1], loss, norm = update(*state, padded)
        return float(loss), float(norm)

    return run


def _loss(cfg, params, batch):
    logprobs = jax.nn.log_softmax(_logits(cfg, params, batch["tokens"]))
    l = jnp.take_along_axis(logprobs, batch["targets"][..., None], axis=-1)[..., 0]
    ratio, adv = jnp.exp(l - batch["behavior_logprobs"]), batch["advantages"]
    per_token = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 0.8, 1.2))
    return jnp.sum(jnp.where(batch["mask"], batch["loss_weights"] * per_token, 0.0))


def _logits(cfg, params, tokens):
    b, length = tokens.shape
    x = params["embed"][tokens]
    for i in range(cfg.n_layers):
        w = {name: stacked[i] for name, stacked in params["layers"].items()}
        h = _norm(x, w["attn_norm"])
        q, k, v = ((h @ w[f"{n}_proj"]).reshape(b, length, -1, cfg.head_dim) for n in "qkv")
        q, k = _rotate(cfg, _norm(q, w["q_norm"])), _rotate(cfg, _norm(k, w["k_norm"]))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, length, -1) @ w["o_proj"]
        h = _norm(x, w["mlp_norm"])
        x = x + (jax.nn.silu(h @ w["gate_proj"]) * (h @ w["up_proj"])) @ w["down_proj"]
    return _norm(x, params["final_norm"]) @ params["embed"].T


def _norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def _rotate(cfg, x):
    half = cfg.head_dim // 2
    angle = jnp.arange(x.shape[1])[:, None] / cfg.rope_theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
