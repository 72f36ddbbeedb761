"""Stage 5, train: what an update is made of before there is a state: model, optimizer, schedule, value model,
shardings.

With `lora` on, an adapter is what is trained: masters, gradients and moments are of the adapter alone, and the weights
beside it, the base, are an argument that no update changes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.config import TrainerSection
from dora_jax.models import decoder, sharding
from dora_jax.models import lora as lora_adapters
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.models.routes import RouteShape
from dora_jax.trainer import objective, optim
from dora_jax.trainer.critic import Critic
from dora_jax.trainer.model import Model


class TrainState(NamedTuple):
    params: Any  # f32 masters, stacked layout
    opt_state: Any  # {"policy": of the optax chain, "critic": CriticState where there is a value model}
    step: jax.Array  # i32[]: steps done = the version that these params are


class Recipe:
    """The static part of an update: objective, optimizer, schedule, critic."""

    def __init__(
        self, model: Model, section: TrainerSection, total_steps: int, exact: bool = False, tempered: bool = False
    ):
        """exact: log-probs come along with the batch. tempered: temperatures do."""
        self.model, self.section, self.lora, self.exact, self.tempered = model, section, model.lora, exact, tempered
        self.row_splits = max(section.row_splits, 1)
        self.rate = optim.schedule(
            section.schedule, section.learning_rate, section.warmup_steps, total_steps * section.updates
        )
        self.tx = optim.optimizer(self.rate, section)
        self.critic = Critic(model, section)
        self.routes = RouteShape.of(model.cfg) if section.routing_replay == "rollout" else None
        options = dict(section.compiler_options) or None
        self.jit = functools.partial(decoder.jitted, dtype=model.dtype, compiler_options=options)
        cfg, mesh = model.cfg, model.mesh
        self.base_specs = sharding.param_specs(cfg, mesh)
        # where the masters lie, and so their gradients
        self.specs = lora_adapters.specs(cfg, self.lora, mesh) if self.lora.on else self.base_specs
        # shapes of what is trained, float32, stacked
        self.masters = lora_adapters.abstract(cfg, self.lora) if self.lora.on else decoder.abstract_params(cfg)

    def init(self, params: Any, base: Any = None) -> dict[str, Any]:
        """The optimizer of what is trained, and the value model, which starts as the policy: with an adapter, as the
        base with the adapter added up into it."""
        state = {"policy": self.tx.init(params)}
        if not objective.needs_value(self.section):
            return state
        policy = params if base is None else lora_adapters.merge(base, params, self.lora.gain)
        return state | {"critic": self.critic.init(policy)}

    def frozen_copy(self, params: Any) -> Any:
        """The base on the masters' shards, in the compute type: what engines multiply with, to the bit."""
        copied = functools.partial(decoder.copied, dtype=self.model.dtype)
        return jax.jit(copied, out_shardings=self.base_specs)(jax.device_put(params, self.base_specs))

    def shardings(self) -> TrainState:
        """Where the state lies between updates."""
        mesh, memory = self.model.mesh, self.section.optimizer_memory
        specs, whole = self.specs, NamedSharding(mesh, PartitionSpec())
        opt = {"policy": optim.state_shardings(self.tx, self.masters, specs, whole, memory)}
        opt |= {"critic": self.critic.shardings(mesh)} if objective.needs_value(self.section) else {}
        return TrainState(specs, opt, whole)


def new_recipe(
    model_cfg: decoder.ModelConfig,
    section: TrainerSection,
    mesh: Mesh,
    *,
    total_steps: int,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
    dtype: str = "float32",
    lora: Lora = OFF,
    exact: bool = False,
    tempered: bool = False,
) -> Recipe:
    """What a trainer of this section compiles; the devices of the mesh may be descriptions."""
    wrong = list(objective.attention_problems(section, mesh.devices.flat[0].platform, dtype))
    if wrong := wrong + objective.model_problems(section, model_cfg):
        raise ValueError("; ".join(wrong))
    model = Model(
        model_cfg,
        mesh,
        jnp.dtype(dtype),
        section.remat,
        temperature,
        vocab_limit,
        section.attention,
        section.logits_bytes,
        section.expert_matmul,
        section.expert_dispatch,
        lora,
        section.matmul == "bfloat16",
    )
    return Recipe(model, section, total_steps, exact, tempered)


def abstract_inputs(recipe: Recipe, rows: int, tokens: int) -> tuple[Any, ...]:
    """Shapes and shardings that the jit is called with: (TrainState, arrays by name, and the base of an adapter)."""
    placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    params, frozen = recipe.masters, []
    if recipe.lora.on:  # what `frozen_copy` gives
        copied = functools.partial(decoder.copied, dtype=recipe.model.dtype)
        like = jax.eval_shape(copied, decoder.abstract_params(recipe.model.cfg))
        frozen = [jax.tree.map(placed, like, recipe.base_specs)]
    state = TrainState(params, jax.eval_shape(recipe.init, params, *frozen), jax.ShapeDtypeStruct((), jnp.int32))
    state = jax.tree.map(placed, state, recipe.shardings())
    where = sharding.batch_spec(recipe.model.mesh)
    arrays = {
        name: jax.ShapeDtypeStruct((rows, tokens), dtype, sharding=where)
        for name, dtype in objective.batch_dtypes(recipe.section, recipe.exact, recipe.tempered).items()
    }
    if recipe.routes is not None:
        shape = (rows, tokens, recipe.routes.layers, recipe.routes.per_token)
        arrays["routes"] = jax.ShapeDtypeStruct(shape, recipe.routes.dtype, sharding=where)
    return state, arrays, *frozen
