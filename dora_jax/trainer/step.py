"""Stage 5, train: state, batch -> state, metrics. The one jit, with its shardings and its donation.

    TrainBatch -> micro-batches -> forward -> log-probs -> policy loss x correction x loss_weights -> sum -> Adam

Consumes the packed step (buffer.pack), produces new f32 masters and host metrics. Adam's moments may rest in memory of
the host between updates, all of the state while the devices are lent. Of several processes each packs and sends the
rows that its devices hold. Laws: the loss is a plain sum, for what it is divided by travels in the batch: no number of
micro-batches, mesh or packing moves it; empty ones are not computed; one that is not finite counts, and moves nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.base.lanes import doing
from dora_jax.config import TrainerSection
from dora_jax.models import decoder, sharding
from dora_jax.models import lora as lora_adapters
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.trainer import correction, flops, health, micro_batch, objective, optim
from dora_jax.trainer import score as scores
from dora_jax.trainer.micro_batch import accumulate, by_micro_batch, micro_loss
from dora_jax.trainer.model import UNROLLED_LAYERS, Adapted, Arrays, layers_of, unrouted
from dora_jax.trainer.recipe import Recipe, TrainState, abstract_inputs, new_recipe

BIAS = "router_bias"  # of a router, which selects and never weighs
UNROLLED_ON_CPU = 32  # on one CPU device: a sixth of an update saved at 30 layers, for seconds of compiling


class Probe(NamedTuple):
    """What the engine-trainer gap is measured on where a step has no token of lag 0."""

    batch: Any  # TrainBatch
    version: int
    weights: Any  # of that version, in the engines' dtype, stacked, on the trainer's mesh; None: the present ones

    def tokens(self) -> np.ndarray:
        """bool[B, L]: where the version sampled the token."""
        return self.batch.mask & (self.batch.version == self.version)


class Trainer:
    """Owns the training state on its mesh; used by one thread."""

    def __init__(
        self,
        model_cfg: decoder.ModelConfig,
        section: TrainerSection,
        mesh: Mesh,
        params: Any,
        *,
        total_steps: int,
        temperature: float = 1.0,
        vocab_limit: int | None = None,
        dtype: str = "float32",
        step: int = 0,
        dump_dir: str | None = None,
        lora: Lora = OFF,
        adapter: Any = None,
        seed: int = 0,
        replay: scores.Replay | None = None,
        tempered: bool = False,
    ):
        """Copies `params` (stacked, any sharding). lora: if it is on, an adapter is trained and `params` stay as they
        are, in `dtype`. adapter: the first one, stacked; None: a fresh one of this seed. replay: see score.py.
        tempered: batches have temperatures."""
        self.section, self.mesh, self._replay = section, mesh, replay
        self.recipe = new_recipe(
            model_cfg,
            section,
            mesh,
            total_steps=total_steps,
            temperature=temperature,
            vocab_limit=vocab_limit,
            dtype=dtype,
            lora=lora,
            exact=replay is not None,
            tempered=tempered,
        )
        if section.lent_memory == "host":
            optim.need_host_memory(mesh, "lent_memory")
        self._model, self.routes = self.recipe.model, self.recipe.routes
        self.shards = sharding.row_shards(mesh)  # data-parallel; a batch's rows: a multiple of it times micro_batches
        # Shards whose rows this process packs. A replay and the gradients of single trajectories read all of them
        alone = replay is not None or section.advantage == "vcpo"
        self.held = tuple(range(self.shards)) if alone else sharding.held_shards(mesh)
        self._rows, self._replicated = sharding.batch_spec(mesh), NamedSharding(mesh, PartitionSpec())
        self.shardings = self.recipe.shardings()
        jit = self.recipe.jit
        self._copy = jit(
            lambda tree: jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), tree),
            out_shardings=self.shardings.params,
        )
        self.base: Any = None  # what is trained stands beside it; None: all weights are trained
        if lora.on:
            self.base = self.recipe.frozen_copy(params)
            params = lora_adapters.init(model_cfg, lora, seed) if adapter is None else adapter
        params = self._copy(jax.device_put(params, self.shardings.params))  # steps donate: never the caller's buffers
        opt_state = jit(self.recipe.init, out_shardings=self.shardings.opt_state)(params, *self._frozen)
        self.state = TrainState(params, opt_state, jax.device_put(np.int32(step), self._replicated))
        self._reference = self._copy(params) if section.kl != "none" else None
        self._update = jitted_update(self.recipe)
        self._compiled: dict[tuple[int, int], Any] = {}  # by shape of the batch, where `warmup` made it
        scored = functools.partial(jit, out_shardings=self._replicated)  # every process reads all of it
        logprobs = lambda params, arrays: self._model.logprobs(params, arrays)[0]
        batched = lambda fn: functools.partial(by_micro_batch, fn, section.micro_batches, splits=self.recipe.row_splits)
        self._logprobs = scored(batched(logprobs))
        by_row = lambda params, arrays: by_micro_batch(logprobs, len(arrays["tokens"]) // self.shards, params, arrays)
        self._probed = scored(by_row)  # most rows of a probe are empty
        self._values = scored(batched(self.recipe.critic.values))
        widened = functools.partial(micro_batch.widened, section.micro_batches)
        self._widened = jit(widened, static_argnames="rows", out_shardings=self._rows)
        self._grad_sq = scored(functools.partial(scores.grad_norms_sq, self._model))
        self.health = health.HealthBounds(section.max_mismatch, dump_dir)
        self._meter = flops.FlopsMeter(model_cfg, mesh, section.peak_tflops, lora.on)
        self._begun: tuple[dict[str, float], list[dict[str, Any]]] = {}, []  # of this step: metrics, sums an update

    @property
    def params(self) -> Any:
        """The trained weights, valid until the next step, which donates them."""
        return self.state.params

    @property
    def _frozen(self) -> tuple[Any, ...]:
        """What the jits take of the base: nothing where there is none."""
        return () if self.base is None else (self.base,)

    def _whole(self, params: Any) -> Any:
        """What the model computes with, of what is trained."""
        return params if self.base is None else Adapted(self.base, params)

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state, as a restore wants them."""
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.state, self.shardings)

    def load(self, params: Any, opt_state: Any, step: int) -> None:
        """Goes on from a restored state; takes ownership of the arrays."""
        every = self.section.ref_refresh_steps
        if self._reference is not None and every and step:
            if step % every:
                raise ValueError(
                    f"cannot resume at step {step}: the reference of step {step - step % every} is not "
                    f"kept, so checkpoint.every must be a multiple of trainer.ref_refresh_steps={every}"
                )
            self._reference = self._copy(jax.device_put(params, self.shardings.params))
        self.state = TrainState(
            jax.device_put(params, self.shardings.params),
            jax.device_put(opt_state, self.shardings.opt_state),
            jax.device_put(np.int32(step), self._replicated),
        )
        self._begun = {}, []

    def to_host(self) -> None:
        """Moves the state to host memory, also in the middle of a step; compiled programs stay. Until `to_devices`
        nothing may be computed."""
        held = self.state, self.base, self._reference
        on_host = jax.tree.map(lambda x: x.sharding.with_memory_kind(optim.HOST), held)
        self.state, self.base, self._reference = optim.moved(held, on_host)

    def to_devices(self) -> None:
        """Moves the state to where it was before `to_host`."""
        beside = self.base, self._reference
        on_device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), beside)
        self.state, (self.base, self._reference) = optim.moved((self.state, beside), (self.shardings, on_device))

    def logprobs(self, batch: Any) -> np.ndarray:
        """f32[B, L] of the targets of a batch that stands here whole, under the current weights; 0 outside the
        segments."""
        computed = self._logprobs(self._whole(self.state.params), self._put_batch(batch))
        return np.where(batch.segment_ids > 0, self._sent(batch, computed), 0.0)

    def row_logprobs(self, batch: Any, row: int) -> np.ndarray:
        """f32[L]: `logprobs` of one row of a batch that stands here whole, computed alone."""
        arrays = {name: np.repeat(x[row : row + 1], self.shards, axis=0) for name, x in batch.arrays().items()}
        with doing("score"):
            return np.asarray(self._probed(self._whole(self.state.params), self._put(arrays)))[0]

    def score(self, batch: Any) -> dict[str, np.ndarray]:
        """What a packed batch needs before its advantages: f32[B, L] by name, in all rows that are sent; empty where
        the objective needs none."""
        if not objective.needs_scores(self.section):
            return {}
        arrays = self._put_batch(batch)
        if self._replay is None:
            out = {"old_logprobs": self._sent(batch, self._logprobs(self._whole(self.state.params), arrays))}
        else:
            out = {"old_logprobs": self.probed(Probe(batch, int(self.state.step), None))}
        if self._reference is not None:
            out["ref_logprobs"] = self._sent(batch, self._logprobs(self._whole(self._reference), unrouted(arrays)))
        if objective.needs_value(self.section):
            out["values"] = self._sent(batch, self._values(self.state.opt_state["critic"].params, arrays))
        if self.section.advantage == "vcpo":
            segments = scores.segments_of(batch)
            rows = self._put(scores.one_a_row(batch, segments), self._replicated)
            norms = np.asarray(self._grad_sq(self._whole(self.state.params), rows))
            out["grad_sq"] = np.zeros(batch.tokens.shape, np.float32)
            for value, (row, start, stop) in zip(norms, segments, strict=True):
                out["grad_sq"][row, start:stop] = value
        return out

    def warmup(self, rows: int, tokens: int) -> None:
        """Compiles the step for batches of this shape; changes nothing."""
        _, shapes, *_ = abstract_inputs(self.recipe, rows, tokens)
        self._compiled[rows, tokens] = self._update.lower(self.state, shapes, *self._frozen).compile()
        if self._replay is not None:
            self._replay.warmup()

    def probe(self, probe: Probe) -> dict[str, float]:
        """The engine-trainer gap on the tokens of `probe.version`, under its weights; stops above the bound."""
        fresh = probe.tokens()
        if not fresh.any():
            raise ValueError(f"the probe holds no token of version {probe.version}: only equal weights compare")
        metrics = health.gap(self.probed(probe)[fresh], probe.batch.behavior_logprobs[fresh])
        self.health.check_mismatch(metrics)
        return metrics

    def probed(self, probe: Probe) -> np.ndarray:
        """f32[B, L]: log-probs of the probe's targets under its weights."""
        weights = self.state.params if probe.weights is None else probe.weights
        with doing("score"):
            if self._replay is not None:
                return scores.replayed_logprobs(self._replay, weights, probe.batch, probe.version)
            return np.asarray(self._probed(self._whole(weights), self._put(probe.batch.arrays())))

    def step(self, batch: Any, probe: Probe | None = None) -> dict[str, float]:
        """One step = one published version: an update per TrainBatch (or one, for a single batch). Blocks. An iterator
        of batches is read one update at a time: the first runs before the second has to exist. `probe` is looked at
        where the first batch has no token of lag 0."""
        self._begun = {}, []
        self.learn((batch,) if hasattr(batch, "arrays") else batch, probe)
        return self.finish()

    def learn(self, batches: Iterable[Any], probe: Probe | None = None) -> None:
        """Updates of the step that `finish` ends; the version of the weights is that of the step before until then."""
        metrics, every = self._begun
        for batch in batches:
            if probe is not None and not every:
                fresh = (batch.mask & (batch.version == int(self.state.step))).any()
                if not self._rows.is_fully_addressable:  # all processes go the same way
                    fresh = multihost_utils.process_allgather(fresh).any()
                metrics.update({} if fresh else self.probe(probe))
            began, replayed = time.perf_counter(), dict[str, np.ndarray]()
            if self._replay is not None:
                replayed["exact_logprobs"] = self.probed(Probe(batch, int(self.state.step), None))
                metrics["time/replay_s"] = metrics.get("time/replay_s", 0.0) + time.perf_counter() - began
            run = self._compiled.get(batch.shape, self._update)
            with doing("put"):
                put = [self._put_batch(batch, replayed)]
            with doing("update"):
                self.state, sums = run(self.state, put.pop(), *self._frozen)
                every.append(jax.device_get(sums))
            self._meter.add(batch, time.perf_counter() - began)
            self.health.check(every[-1], batch, int(self.state.step) + 1)

    def finish(self) -> dict[str, float]:
        """The metrics of the step, whose updates are all done."""
        (metrics, every), self._begun = self._begun, ({}, [])
        done = int(self.state.step) + 1  # a skipped update still publishes: the same weights, a new version
        self.state = self.state._replace(step=jax.device_put(np.int32(done), self._replicated))
        every_steps = self.section.ref_refresh_steps
        if self._reference is not None and every_steps and done % every_steps == 0:
            self._reference = self._copy(self.state.params)
        metrics |= health.reduce(every) | self._meter.take()
        self.health.check_mismatch(metrics)
        return metrics

    def _put_batch(self, batch: Any, more: Arrays | None = None) -> dict[str, jax.Array]:
        """The batch on the devices, in its static shape: micro-batches that are left out are made there."""
        put = self._put({**batch.arrays(), **(more or {})}, rows=batch.sent.local_rows())
        return put if batch.sent.rows == batch.rows else self._widened(put, rows=batch.rows)

    def _put(
        self, arrays: Arrays, where: NamedSharding | None = None, rows: np.ndarray | None = None
    ) -> dict[str, jax.Array]:
        """rows: where each row of the whole stands in these arrays, -1: in another process'; None: they are whole."""
        where = where or self._rows
        if where.is_fully_addressable:
            return {name: jax.device_put(x, where) for name, x in arrays.items()}
        rows = np.arange(len(arrays["tokens"])) if rows is None else rows
        return {
            name: jax.make_array_from_callback(
                (len(rows), *x.shape[1:]), where, lambda index, x=x: x[rows[index[0]], *index[1:]]
            )
            for name, x in arrays.items()
        }

    def _sent(self, batch: Any, packed: jax.Array) -> np.ndarray:
        """What was computed of the static shape -> of the rows that are sent."""
        split = np.asarray(packed).reshape(-1, self.section.micro_batches, batch.shape[1])
        return split[:, : batch.sent.micro_batches].reshape(-1, batch.shape[1])


def jitted_update(recipe: Recipe) -> Any:
    """(state, arrays, and the base of an adapter) -> (state, sums): THE jit. Donates the state."""
    whole = NamedSharding(recipe.model.mesh, PartitionSpec())
    return recipe.jit(functools.partial(update, recipe), donate_argnums=0, out_shardings=(recipe.shardings(), whole))


def update(
    recipe: Recipe, state: TrainState, arrays: Arrays, base: Any = None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer update; donates the state. base: of an adapter."""
    section, mesh, specs = recipe.section, recipe.model.mesh, recipe.specs
    params = state.params if base is None else Adapted(base, state.params)
    if mesh.size == 1:  # gradients of single layers, stacked once: of slices they would be summed padded
        most = UNROLLED_ON_CPU if mesh.devices.flat[0].platform == "cpu" else UNROLLED_LAYERS
        params, specs = layers_of(recipe.model.cfg, params, most), NamedSharding(mesh, PartitionSpec())
    trained, weights = Adapted.learning(recipe.model.rounded(params))
    grads, sums = accumulate(
        lambda trained, arrays: micro_loss(recipe.model, section, weights(trained), arrays),
        trained,
        specs,
        {**arrays, "lag": state.step - arrays["version"]},  # i32[B, L]: from the weights that sampled the token
        section.micro_batches,
        recipe.row_splits,
    )
    grads = decoder.stacked_layout(recipe.model.cfg, grads)
    sums["grad_norm"] = optax.tree.norm(grads)
    old = optim.fetched(state.opt_state["policy"], recipe.shardings().opt_state["policy"], after=sums["grad_norm"])
    sums["learning_rate"] = jnp.asarray(recipe.rate(optim.updates_done(old)), jnp.float32)
    ok = jnp.isfinite(sums["loss"]) & jnp.isfinite(sums["grad_norm"])
    updates, new = recipe.tx.update(grads, old, state.params)
    if section.correction == "vcpo_lr":
        rho_base = section.correction_params.get("rho_base", 1.0)
        _, _, sums["lr_scale"] = correction.effective_samples(sums["trajectories"], sums["w"], sums["w_sq"], rho_base)
        updates = jax.tree.map(lambda u: u * sums["lr_scale"], updates)
    keep = functools.partial(jax.tree.map, lambda a, b: jnp.where(ok, a, b))
    sums["skipped"] = 1.0 - ok.astype(jnp.float32)
    opt_state = {**state.opt_state, "policy": keep(new, old)}
    if "critic" in opt_state:
        opt_state["critic"], more = recipe.critic.update(opt_state["critic"], arrays, accumulate)
        sums |= more | {"skipped": jnp.maximum(sums["skipped"], more["skipped"])}
    moved = optax.apply_updates(state.params, updates)
    if section.router_bias_rate:
        # Each router's bias (arXiv 2408.15664): up for experts below the mean load, down for those above
        layers, load_MxE = moved[decoder.LAYERS], sums["expert_load"]
        signs = jnp.sign(load_MxE.mean(-1, keepdims=True) - load_MxE).astype(layers[BIAS].dtype)
        moved = {**moved, decoder.LAYERS: {**layers, BIAS: layers[BIAS] + section.router_bias_rate * signs}}
    return TrainState(keep(moved, state.params), opt_state, state.step), sums
