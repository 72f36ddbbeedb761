"""Stage 5, train: the optax chain and its schedule. Masters and both moments live on the params' shards.

Masters are f32. Moments are f32 or bfloat16, which halves them; every update computes in f32. Between updates the
moments may rest in host memory, on the same shards, which leaves their room to the activations.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from dora_jax.config import TrainerSection

HOST = "pinned_host"  # JAX's name for host memory that a device reads and writes itself


def schedule(kind: str, learning_rate: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Linear warm-up to `learning_rate`, then constant, cosine or linear to 0 at total_steps (in updates)."""
    rest = max(total_steps - warmup_steps, 1)
    tails = {
        "constant": optax.constant_schedule(learning_rate),
        "cosine": optax.cosine_decay_schedule(learning_rate, rest),
        "linear": optax.linear_schedule(learning_rate, 0.0, rest),
    }
    if kind not in tails:
        raise ValueError(f"unknown schedule {kind!r}: known are {', '.join(tails)}")
    if not warmup_steps:
        return tails[kind]
    # update 0 already moves: a step that changes nothing would publish a version equal to the last
    warmup = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, tails[kind]], [warmup_steps])


def optimizer(rate: optax.Schedule, section: TrainerSection) -> optax.GradientTransformation:
    """Clip by global norm (0: off), Adam, decoupled decay of matrices only; moments: the type that both rest in."""
    clip = optax.clip_by_global_norm(section.max_grad_norm) if section.max_grad_norm else optax.identity()
    betas = dict(b1=section.b1, b2=section.b2, eps=section.eps)
    adam = optax.adamw(rate, **betas, weight_decay=section.weight_decay, mask=decays, mu_dtype=section.moments)
    tx = optax.chain(clip, adam)
    # optax has no nu_dtype: it keeps the second moment in the type that it is initialised in
    return tx._replace(init=lambda params: tx.init(optax.tree.cast(params, section.moments)))


def decays(params: Any) -> Any:
    """True for matrices; gains, biases, sinks and scales are not decayed (of stacked layers the rank tells
    nothing)."""
    others = ("norm", "bias", "sinks", "scale", "gain")
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(others), params)


def state_shardings(
    tx: optax.GradientTransformation, params: Any, specs: Any, replicated: Any, memory: str = "device"
) -> Any:
    """Shardings of tx's state: what mirrors a parameter lies on its shards, in `memory` (device, host)."""
    if memory == "host":
        need_host_memory(replicated.mesh, "optimizer_memory")
        specs = jax.tree.map(lambda spec: spec.with_memory_kind(HOST), specs)
    state = jax.eval_shape(tx.init, params)
    return optax.tree_utils.tree_map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: replicated
    )


def fetched(state: Any, shardings: Any, after: jax.Array) -> Any:
    """The state on the device; what rests in host memory comes once `after` is known. Inside jit."""

    def one(x: jax.Array, where: jax.sharding.NamedSharding) -> jax.Array:
        if where.memory_kind != HOST:
            return x
        x, _ = jax.lax.optimization_barrier((x, after))
        return jax.device_put(x, where.with_memory_kind("device"))

    return jax.tree.map(one, state, shardings)


def moved(tree: Any, shardings: Any) -> Any:
    """The arrays in the memory that these shardings name, on the same devices; where that is another one, the arrays
    that they were are gone. Outside jit."""
    there = jax.block_until_ready(jax.device_put(tree, shardings))
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(there), strict=True):
        if old.sharding.memory_kind != new.sharding.memory_kind:
            old.delete()
    return there


def updates_done(opt_state: Any) -> jax.Array:
    """i32[]: the count that the schedule reads; skipped updates do not count."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def need_host_memory(mesh: jax.sharding.Mesh, field: str) -> None:
    """ValueError: the devices have none for what `trainer.<field>` asks."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f"trainer.{field}='host': {device.device_kind} devices have no {HOST} memory, only {', '.join(kinds)}"
        )
