"""Stage 5, train: state, batch -> state, metrics. The one jit, with its shardings and its donation.

    TrainBatch -> micro-batches -> forward -> log-probs -> policy loss x correction x loss_weights -> sum -> Adam

Consumes the packed step (buffer.pack), produces new f32 masters and host metrics.
Laws: the loss is a plain sum, because what it is divided by travels in the batch: so neither the number of
micro-batches, nor the mesh, nor the packing moves it; empty micro-batches are not computed; a non-finite loss or
gradient leaves the state as it was and is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.models import decoder, sharding
from dora_jax.models.logits import LOGITS_BYTES, target_logprobs
from dora_jax.trainer import correction, health, loss, objective, optim

Arrays = Mapping[str, Any]  # TrainBatch.arrays()
UNROLLED_LAYERS = 8  # up to here a Python loop: its backward saves a third over lax.scan on CPU and compiles as fast


class TrainState(NamedTuple):
    params: Any  # f32 masters, stacked layout
    opt_state: Any
    step: jax.Array  # i32[]: steps done = the version that these params are


class Model(NamedTuple):
    """What turns tokens into log-probs; static."""

    cfg: decoder.ModelConfig
    mesh: Mesh
    dtype: Any
    remat: str
    temperature: float
    vocab_limit: int | None

    def logprobs(self, params: Any, arrays: Arrays, entropy_grad: bool = False) -> tuple[jax.Array, jax.Array]:
        """(log-prob of each target, entropy) f32[B, L], after temperature, padding ids masked as in the engine."""
        attend = decoder.segment_attention(arrays["segment_ids"], arrays["positions"])
        hidden = decoder.forward(self.cfg, layers_of(self.cfg, params), arrays["tokens"], arrays["positions"], attend, dtype=self.dtype,
                                 remat=self.remat, constrain=sharding.constrain_rows(self.mesh))
        return target_logprobs(self.cfg, params, hidden, arrays["targets"], vocab_limit=self.vocab_limit,
                               temperature=self.temperature, entropy_grad=entropy_grad,
                               max_bytes=LOGITS_BYTES * self.mesh.size)


class Trainer:
    """Owns the training state on its mesh; used by one thread."""

    def __init__(self, model_cfg: decoder.ModelConfig, section: Any, mesh: Mesh, params: Any, *, total_steps: int,
                 temperature: float = 1.0, vocab_limit: int | None = None, dtype: str = "float32", step: int = 0,
                 dump_dir: str | None = None):
        """Copies `params` (stacked, any sharding); they stay the caller's."""
        self.section, self.mesh = section, mesh
        self._model = Model(model_cfg, mesh, jnp.dtype(dtype), section.remat, temperature, vocab_limit)
        rate = optim.schedule(section.schedule, section.learning_rate, section.warmup_steps,
                              total_steps * section.updates)
        self._tx = optim.optimizer(rate, b1=section.b1, b2=section.b2, eps=section.eps,
                                   weight_decay=section.weight_decay, max_grad_norm=section.max_grad_norm)
        self._rows = sharding.batch_spec(mesh)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        specs = sharding.param_specs(model_cfg, mesh)
        self.shardings = TrainState(
            specs, optim.state_shardings(self._tx, decoder.abstract_params(model_cfg), specs, self._replicated),
            self._replicated)
        self._copy = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree), out_shardings=specs)
        params = self._copy(jax.device_put(params, specs))  # the first step donates: never the caller's buffers
        opt_state = jax.jit(self._tx.init, out_shardings=self.shardings.opt_state)(params)
        self.state = TrainState(params, opt_state, jax.device_put(np.int32(step), self._replicated))
        self._update = jax.jit(functools.partial(update, self._model, section, self._tx, rate, specs), donate_argnums=0,
                               out_shardings=(self.shardings, self._replicated))
        self._compiled: dict[tuple[int, int], Any] = {}  # by shape of the batch, where `warmup` made it
        self._logprobs = jax.jit(lambda params, arrays: self._model.logprobs(params, arrays)[0])
        self._health = health.Health(section.max_mismatch, dump_dir)

    @property
    def params(self) -> Any:
        """Valid until the next step, which donates them."""
        return self.state.params

    @property
    def shards(self) -> int:
        """Data-parallel shards: a batch's rows are a multiple of this times micro_batches."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state, as a restore wants them."""
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.state, self.shardings)

    def load(self, params: Any, opt_state: Any, step: int) -> None:
        """Goes on from a restored state; takes ownership of the arrays."""
        self.state = TrainState(jax.device_put(params, self.shardings.params),
                                jax.device_put(opt_state, self.shardings.opt_state),
                                jax.device_put(np.int32(step), self._replicated))

    def logprobs(self, batch: Any) -> np.ndarray:
        """f32[B, L] of the batch's targets under the current weights; 0 outside the segments."""
        out = np.asarray(self._logprobs(self.state.params, self._put(batch.arrays())))
        return np.where(batch.segment_ids > 0, out, 0.0)

    def score(self, batch: Any) -> dict[str, np.ndarray]:
        """What a packed batch needs before its advantages: f32[B, L] by name; empty where the objective needs none."""
        if not objective.needs_scores(self.section):
            return {}
        return {"old_logprobs": self.logprobs(batch)}

    def warmup(self, rows: int, tokens: int) -> None:
        """Compiles the step for batches of this shape; changes nothing."""
        shapes = {name: jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=self._rows)
                  for name, dtype in objective.batch_dtypes(self.section).items()}
        final = jax.ShapeDtypeStruct((), np.bool_)
        self._compiled[rows, tokens] = self._update.lower(self.state, shapes, final).compile()

    def step(self, batch: Any) -> dict[str, float]:
        """One step = one published version: an update per TrainBatch (or one, for a single batch). Blocks."""
        batches = batch if isinstance(batch, (tuple, list)) else (batch,)
        every: list[dict[str, Any]] = []
        for i, part in enumerate(batches):
            final = np.bool_(i == len(batches) - 1)
            run = self._compiled.get(part.tokens.shape, self._update)
            self.state, sums = run(self.state, self._put(part.arrays()), final)
            every.append(jax.device_get(sums))
            self._health.check(every[-1], part, int(self.state.step))
        metrics = health.reduce(every)
        self._health.check_mismatch(metrics)
        return metrics

    def _put(self, arrays: Arrays) -> dict[str, jax.Array]:
        return {name: jax.device_put(x, self._rows) for name, x in arrays.items()}


def update(model: Model, section: Any, tx: optax.GradientTransformation, rate: optax.Schedule, specs: Any,
           state: TrainState, arrays: Arrays, final: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer update; donates the state. `final`: this update completes the step."""
    grads, sums = accumulate(functools.partial(micro_loss, model, section), state.params, specs,
                             {**arrays, "lag": lag(state.step, arrays)}, section.micro_batches)
    sums["grad_norm"] = optax.tree.norm(grads)
    sums["learning_rate"] = jnp.asarray(rate(optim.updates_done(state.opt_state)), jnp.float32)
    ok = optim.all_finite(sums["loss"], sums["grad_norm"])
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    if section.correction == "vcpo_lr":
        rho_base = section.correction_params.get("rho_base", 1.0)
        sums["ess"], sums["rho"], scale = correction.effective_samples(sums["trajectories"], sums["w"], sums["w_sq"], rho_base)
        updates = jax.tree.map(lambda u: u * scale, updates)
        sums["lr_scale"] = scale
    params = optax.apply_updates(state.params, updates)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(ok, new, old))
    sums["skipped"] = 1.0 - ok.astype(jnp.float32)
    done = state.step + final.astype(jnp.int32)  # a skipped update still publishes: the same weights, a new version
    return TrainState(keep(params, state.params), keep(opt_state, state.opt_state), done), sums


def accumulate(loss_fn: Any, params: Any, specs: Any, arrays: Arrays,
               micro_batches: int) -> tuple[Any, dict[str, jax.Array]]:
    """Gradients and metric sums over the micro-batches that hold tokens. loss_fn(params, arrays) -> (loss, sums)."""
    grad_fn = jax.grad(loss_fn, has_aux=True)
    if micro_batches == 1:
        return grad_fn(params, arrays)
    # row r is of micro-batch r % M: so each shard of the rows holds its part of every micro-batch
    split = {name: x.reshape(-1, micro_batches, x.shape[1]) for name, x in arrays.items()}
    used = jnp.max(jnp.where((split["segment_ids"] > 0).any((0, 2)), jnp.arange(1, micro_batches + 1), 1))

    def body(i, carry):
        part = {name: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for name, x in split.items()}
        grads, sums = grad_fn(params, part)
        grads = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, carry[0], grads), specs)
        return grads, health.add(carry[1], sums)

    shapes = jax.eval_shape(lambda p, a: grad_fn(p, a)[1], params, {k: v[:, 0] for k, v in split.items()})
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), specs)
    return jax.lax.fori_loop(0, used, body, (zeros, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)))


def micro_loss(model: Model, section: Any, params: Any, arrays: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(sum of weighted per-token losses, metric sums) of one micro-batch."""
    mask, segments, adv = arrays["mask"], arrays["segment_ids"], arrays["advantages"]
    l, entropy = model.logprobs(params, arrays, entropy_grad=section.entropy_coef > 0)
    behavior = arrays["behavior_logprobs"]
    old = arrays.get("old_logprobs", jax.lax.stop_gradient(l))  # a step's first update starts at its own old policy
    anchor = behavior if section.anchor == "behavior" else old
    w, keep, _ = correction.weights(section.correction, old, behavior, mask, logprobs=l, advantages=adv,
                                    segment_ids=segments, **section.correction_params)
    per_token = loss.policy_loss(section.policy_loss, l, anchor, adv, mask, behavior_logprobs=behavior,
                                 rewards=arrays["rewards"], segment_ids=segments, **section.loss_params)
    weight = jnp.where(mask, arrays["loss_weights"], 0.0)
    policy = jnp.sum(weight * jnp.where(keep, w * per_token, 0.0))
    sums = health.token_sums(l, anchor, old, behavior, entropy, mask, arrays["lag"],
                             loss.clipped(section.policy_loss, l, anchor, adv, section.loss_params))
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
    return total, sums | {"loss": total, "policy_loss": policy}


def layers_of(cfg: decoder.ModelConfig, params: Any) -> Any:
    """The same weights as the forward pass runs them: unrolled where there are few layers, else scanned."""
    return decoder.serving_layout(params) if cfg.n_layers <= UNROLLED_LAYERS else params


def lag(step: jax.Array, arrays: Arrays) -> jax.Array:
    """i32[B, L]: versions between the weights that this step starts from and the ones that sampled the token."""
    return step - arrays["version"]
