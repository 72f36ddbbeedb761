"""One decoder for every family of families/, described once in Flax NNX.

The modules' constructors are the description: `abstract_params` traces them, sharding.py reads the logical axes they
carry, `init_params` runs them under one jit. A layer is one of three blocks: attention and a feed-forward that is
"dense" or "moe", or LongCat's "shortcut" of two such sublayers beside a mixture; attention.py and moe.py hold the
parts.

Consumes tokens, positions and an `attend` function (attention.py says what it is given); produces hidden states and
logits. Two layouts of the same weights, kept [in, out]:
  stacked (canonical)  params["layers"] = {name: [n_layers, ...]}  -> lax.scan, for training
  serving              params["layers"] = [{name: [...]}, ...]     -> Python loop; on CPU a static index into
                       stacked weights copies them at every step
An engine on a TPU takes the stacked layout too ("scanned"): a loop compiles in the time of one layer. Layers of other
matrices than the first layer's are stacks of their own: params["first_layers"], the dense ones of a model with experts,
and "layers_1", "layers_2", ..., those of other widths (families.config.Kind); the serving layout has one list, stack
after stack in the order of their names.
Laws: the layouts give the same function; a parameter's first value depends on (seed, layer, name) alone, so a new
parameter shifts no other; norms, rotary angles, softmax and routers are computed in f32, with gains and routers that
every copy keeps in f32: a rate of 1e-6 moves a gain of 1 for 4,000 steps before bfloat16 shows it.
"""

from __future__ import annotations

import functools
import math
import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dora_jax.models import attention, linear_attention, moe
from dora_jax.models.attention import (
    ADAPTERS,
    KV,
    NO_KV,
    Attend,
    Products,
    Spec,
    last,
    narrow_product,
    rematerialized,
    rms_norm,
)
from dora_jax.models.families import new_config
from dora_jax.models.families.config import Kind, ModelConfig, RopeScaling, Scores, repeats
from dora_jax.models.moe import Compute, Routed

__all__ = [
    "Attend",
    "ModelConfig",
    "RopeScaling",
    "Routed",
    "Scores",
    "abstract_params",
    "forward",
    "forward_carrying",
    "forward_routed",
    "init_params",
    "jitted",
    "layout_of",
    "logical_axes",
    "logits",
    "new_config",
    "serving_layout",
    "stacks",
]

Params = dict[str, Any]
Constrain = Callable[..., jax.Array]  # (array, *logical axes) -> the same array, pinned to the table's mesh axes

# layers of a serving loop's body, at most: XLA fetches the next one's weights while it computes with one's
TOGETHER = 4
FIRST, LAYERS = "first_layers", "layers"  # stacks of a model's layers, or how their names begin
HEAD = "head"  # of an engine: beside the embedding, or in the place of "lm_head", see rollout/quantize.py


class Stack(NamedTuple):
    """Layers of one block that are stacked together."""

    block: str  # dense, moe or shortcut
    layers: tuple[int, ...]  # their numbers
    place: int = 0  # of the first one in the list of the serving layout, where stack follows stack


def stacks(cfg: ModelConfig) -> dict[str, Stack]:
    """The stacks of the canonical layout, by their key in the params: of a mixture, layers without experts are one of
    their own, and so are layers of each further shape."""
    numbers: dict[str, list[int]] = {}
    shapes = list(dict.fromkeys(kind.shape for kind in cfg.every_kind))
    for layer, kind in enumerate(cfg.every_kind):
        name = FIRST if cfg.experts and not cfg.has_experts(layer) else LAYERS
        numbers.setdefault(f"{name}_{n}" if (n := shapes.index(kind.shape)) else name, []).append(layer)
    blocks = dict.fromkeys(numbers, "dense")
    if cfg.experts:
        blocks |= {name: "shortcut" if cfg.shortcut else "moe" for name in numbers if not name.startswith(FIRST)}
    names = sorted(numbers)
    before = {name: sum(len(numbers[other]) for other in names[:i]) for i, name in enumerate(names)}
    return {name: Stack(blocks[name], tuple(numbers[name]), before[name]) for name in names}


def stack_names(tree: Iterable[str]) -> list[str]:
    """The keys of the stacks among those of a stacked tree, in their order."""
    return sorted(name for name in tree if name.startswith((FIRST, LAYERS)))


def order(cfg: ModelConfig) -> list[tuple[str, int]]:
    """The stack of each layer, and its index there."""
    places = {layer: (name, at) for name, stack in stacks(cfg).items() for at, layer in enumerate(stack.layers)}
    return [places[layer] for layer in range(cfg.n_layers)]


EVERY, ROUTERS = "every layer", "every router"  # beside the names of stacks, in a Run's starts and counts
AT = "repeat"  # beside them, of what a scan is given: its number


class Run(NamedTuple):
    """Layers whose order repeats."""

    first: int  # number of the first one
    repeats: int
    layers: tuple[tuple[str, int], ...]  # of one repeat: the stack of each, and its place among those of that stack
    kinds: tuple[Kind, ...]  # how each of them attends
    starts: dict[str, int]  # of these stacks, the index of the first one's layer; of all layers, and of all routers
    counts: dict[str, int]  # layers of one repeat

    def of(self, name: str, stacked):
        """The layers of a stacked tree as [repeats, ...], or [repeats, layers of a repeat, ...] where it has several;
        what is a whole stack is not copied."""
        start, count = self.starts[name], self.counts[name]

        def one(x):
            x = x if count * self.repeats == len(x) else x[start : start + count * self.repeats]
            return x.reshape(self.repeats, count, *x.shape[1:]) if count > 1 else x

        return jax.tree.map(one, stacked)


@functools.cache
def runs(cfg: ModelConfig) -> tuple[Run, ...]:
    """All layers in their order, as few runs: of those that begin at a layer, the one that covers most."""
    places, spans, first = order(cfg), [], 0
    kinds = [(name, cfg.kind(layer)) for layer, (name, _) in enumerate(places)]
    while first < cfg.n_layers:
        period, times = repeats(tuple(kinds[first:]))
        starts: dict[str, int] = {}
        for name, at in places[first : first + period]:
            starts.setdefault(name, at)
        layers = tuple((name, at - starts[name]) for name, at in places[first : first + period])
        counts = {name: sum(name == other for other, _ in layers) for name in starts}
        attends = tuple(kind for _, kind in kinds[first : first + period])
        routers = [cfg.has_experts(layer) for layer in range(first + period)]
        starts |= {EVERY: first, ROUTERS: sum(routers[:first])}
        counts |= {EVERY: period, ROUTERS: sum(routers[first:])}
        spans.append(Run(first, times, layers, attends, starts, counts))
        first += period * times
    return tuple(spans)


def _param(
    key: jax.Array, name: str, shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None, first: float = 1.0
) -> nnx.Param:
    """Gaussian of standard deviation `scale`, or `first` (a gain) where it is None; the key is folded with the name."""
    if scale is None:
        return nnx.Param(jnp.full(shape, first), axes=axes)
    named_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(scale * jax.random.normal(named_key, shape), axes=axes)


class Layer(nnx.Module):
    """The parameters of one layer, under flat names."""

    def __init__(self, cfg: ModelConfig, stack: Stack, key: jax.Array):
        block, kind = stack.block, cfg.kind(stack.layers[0])
        residual = 1 / math.sqrt(2 * cfg.n_layers)  # the residual stream keeps unit variance at any depth
        ends = {"pre": ("",), "post": ("_post",), "both": ("", "_post")}[cfg.norms]
        specs = {f"{x}{end}_norm": Spec((cfg.d_model,), ("norm",), None) for x in ("attn", "mlp") for end in ends}
        specs |= linear_attention.specs(cfg, residual) if kind.linear else attention.specs(cfg, kind, residual)
        if block != "moe" or cfg.moe.beside:
            specs |= moe.dense_specs(cfg.d_model, kind.d_ff or cfg.d_ff, residual, "{}_proj")
        if block == "shortcut":
            specs = {f"{name}_{j}": spec for j in (0, 1) for name, spec in specs.items()}
        if block != "dense":
            specs |= moe.specs(cfg, residual)
        if p := cfg.per_layer:
            specs["per_layer_in"] = Spec((cfg.d_model, p), ("embed", "latent"), cfg.d_model**-0.5)
            specs["per_layer_out"] = Spec((p, cfg.d_model), ("latent", "embed"), residual * p**-0.5)
            specs["per_layer_norm"] = Spec((cfg.d_model,), ("norm",), None)
        if cfg.layer_scale:
            specs["layer_scale"] = Spec((1,), ("norm",), None)
        for name, spec in specs.items():
            first = 1 - cfg.gain_offset if spec.first is None else spec.first
            setattr(self, name, _param(key, name, *spec[:3], first=first))


class Ends(nnx.Module):
    """What stands before and after the layers: embedding, last norm, head (absent when tied)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        scale = cfg.d_model**-0.5
        self.embed = _param(key, "embed", (cfg.vocab_size, cfg.d_model), ("vocab", "embed"), scale)
        self.final_norm = _param(key, "final_norm", (cfg.d_model,), ("norm",), None, 1 - cfg.gain_offset)
        if not cfg.tie_embeddings:
            self.lm_head = _param(key, "lm_head", (cfg.d_model, cfg.vocab_size), ("embed", "vocab"), scale)
        if p := cfg.per_layer:  # of every layer side by side
            width = cfg.n_layers * p
            self.per_layer_embed = _param(key, "per_layer_embed", (cfg.vocab_size, width), ("vocab", "embed"), p**-0.5)
            self.per_layer_proj = _param(key, "per_layer_proj", (cfg.d_model, width), ("embed", "latent"), scale)
            self.per_layer_norm = _param(key, "per_layer_norm", (p,), ("norm",), None, 1 - cfg.gain_offset)


def kept_type(name: str, dtype) -> np.dtype:
    """The type of this parameter in a model of `dtype`: f32 for gains of norms, sinks, routers and their biases, which
    f32 is computed with."""
    wide = name.startswith(("router", "sinks")) or name in linear_attention.WIDE
    wide |= name.removesuffix("_0").removesuffix("_1").endswith("_norm")
    return np.dtype(np.float32 if wide else dtype)


def jitted(fn: Callable, dtype, **options):
    """jax.jit of what computes in a model of `dtype`: in float32 all products, those of gradients and kernels included,
    have its precision. A TPU's default is one pass of bfloat16 over f32, a GPU's is TF32."""
    if np.dtype(dtype) != np.float32:
        return jax.jit(fn, **options)

    @functools.wraps(fn)
    def run(*args, **kwargs):
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return jax.jit(run, **options)


def copied(params: Params, dtype) -> Params:
    """A copy in the type of a model of `dtype`. In a jit, an output that is its input could share a donated buffer."""
    one = lambda path, x: jnp.array(x, kept_type(path[-1].key, dtype), copy=True)
    return jax.tree_util.tree_map_with_path(one, params)


def _init(cfg: ModelConfig, seed: int, dtype) -> Params:
    """Stacked weights; layer i draws from fold_in(key(seed), i), the ends from fold_in(key(seed), n_layers)."""
    key = jax.random.key(seed)

    def pure(module: Callable[[jax.Array], nnx.Module], layer):
        state = nnx.split(module(jax.random.fold_in(key, layer)))[1]
        return {name: x.astype(kept_type(name, dtype)) for name, x in nnx.to_pure_dict(state).items()}

    params = pure(functools.partial(Ends, cfg), cfg.n_layers)
    for name, stack in stacks(cfg).items():
        one = functools.partial(pure, functools.partial(Layer, cfg, stack))
        params[name] = jax.vmap(one)(jnp.array(stack.layers))
    return params


@functools.cache
def logical_axes(cfg: ModelConfig) -> Params:
    """Stacked tree of logical axis names, one per dimension: what sharding.py looks up in its table."""

    def axes(module: Callable[[jax.Array], nnx.Module], prefix: tuple[str, ...]) -> Params:
        leaves = nnx.to_flat_state(nnx.split(nnx.eval_shape(lambda: module(jax.random.key(0))))[1])
        return {path[0]: prefix + variable.get_metadata("axes") for path, variable in leaves}

    layers = {name: axes(functools.partial(Layer, cfg, stack), ("layers",)) for name, stack in stacks(cfg).items()}
    return {**axes(functools.partial(Ends, cfg), ()), **layers}


def abstract_params(cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """ShapeDtypeStructs of the stacked layout."""
    return jax.eval_shape(functools.partial(_init, cfg, 0, dtype))


def init_params(cfg: ModelConfig, seed: int, shardings=None, dtype=jnp.float32) -> Params:
    """Fresh stacked weights, made on their shards (`sharding.param_specs`); the same values on every mesh."""
    return jax.jit(functools.partial(_init, cfg, seed, dtype), out_shardings=shardings)()


def serving_layout(params: Params, layout: str = "serving") -> Params:
    """Stacked -> what an engine's calls take. Jittable: give the jit the serving shardings to reshard in the same call.

    layout: "serving", one dict a layer, which stays if it is, or "scanned", stacked as they are; rollout/shapes.py says
    which.
    """
    if layout == "scanned" or isinstance(params.get(LAYERS), list):
        return params
    layers, names = [], stack_names(params)
    for stacked in map(params.__getitem__, names):
        n_layers = jax.tree.leaves(stacked)[0].shape[0]
        layers += [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(n_layers)]
    return {**{name: x for name, x in params.items() if name not in names}, LAYERS: layers}


def stacked_layout(cfg: ModelConfig, params: Params) -> Params:
    """One dict a layer -> stacked; what is stacked stays."""
    layers = params[LAYERS]
    if not isinstance(layers, list):
        return params
    stack = functools.partial(jax.tree.map, lambda *of_layers: jnp.stack(of_layers))
    return params | {name: stack(*layers[x.place :][: len(x.layers)]) for name, x in stacks(cfg).items()}


def layout_of(params: Params) -> str:
    """ "serving" or "scanned", of an engine's weights or of a tree like them (shardings)."""
    return "serving" if isinstance(params["layers"], list) else "scanned"


def adapted(params: Params, adapters: Params | None, several: bool = False) -> Params:
    """The weights of either layout with adapters (lora.py) of the same layout beside each layer's; several: the
    adapters have a leading axis, which moves behind that of stacked layers."""
    if adapters is None:
        return params
    if isinstance(params[LAYERS], list):
        pairs = zip(params[LAYERS], adapters[LAYERS], strict=True)
        return params | {LAYERS: [{**weights, ADAPTERS: found} for weights, found in pairs]}
    if several:
        adapters = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), adapters)
    return params | {name: {**params[name], ADAPTERS: found} for name, found in adapters.items()}


class Given(NamedTuple):
    """What a layer is given beside weights and hidden states."""

    forced: jax.Array | None = None  # i32[B, L, k]: the experts that its router takes
    own: jax.Array | None = None  # [B, L, P]: what the second embedding has for it
    kv: KV = NO_KV  # see attention.run


NOTHING = Given()


class _Pass(NamedTuple):
    """What every layer of a forward pass is given."""

    cfg: ModelConfig
    rotary: dict[Kind, tuple[jax.Array, jax.Array]]
    products: Products
    compute: Compute
    counted_BxL: jax.Array | None = None

    def layer(self, block: str, kind: Kind, layer, weights: Params, x_BxLxD, attend: Attend, given: Given = NOTHING):
        """(x, what its router did or None, the keys and values that others read) behind one layer, all parts
        residual."""
        if block != "shortcut":
            x_BxLxD, h_BxLxD, kv = self._attention(kind, layer, weights, x_BxLxD, attend, given.kv)
            with jax.named_scope("mlp"):
                routed = None
                if block == "dense" or self.cfg.moe.beside:
                    y_BxLxD = moe.dense(weights, h_BxLxD, self.products, "{}_proj", self.cfg.activation)
                if block != "dense" and self.cfg.moe.beside:
                    h_BxLxD = self._normed(weights, "mixture_norm", x_BxLxD)
                    mixed_BxLxD, routed = self._mixture(weights, h_BxLxD, given.forced, x_BxLxD)
                    y_BxLxD = self._normed(weights, "mlp_inner_norm", y_BxLxD)
                    y_BxLxD = y_BxLxD + self._normed(weights, "mixture_post_norm", mixed_BxLxD)
                elif block != "dense":
                    y_BxLxD, routed = self._mixture(weights, h_BxLxD, given.forced, x_BxLxD)
                x_BxLxD = x_BxLxD + self._normed(weights, "mlp_post_norm", y_BxLxD)
                if self.cfg.per_layer:
                    inner_BxLxP = self.products(weights, x_BxLxD, "per_layer_in")
                    inner_BxLxP = moe.gated(self.cfg.activation, inner_BxLxP, given.own)
                    y_BxLxD = self.products(weights, inner_BxLxP, "per_layer_out")
                    x_BxLxD = x_BxLxD + self._normed(weights, "per_layer_norm", y_BxLxD)
                if self.cfg.layer_scale:
                    scale = jax.lax.stop_gradient(weights["layer_scale"]).astype(x_BxLxD.dtype)
                    x_BxLxD = x_BxLxD * last(scale, x_BxLxD)
                return x_BxLxD, routed, kv
        # LongCat: the mixture takes what the first dense feed-forward takes, and is added behind the second
        mixed = None
        for j in (0, 1):
            at = _sublayer(weights, j) | {ADAPTERS: _sublayer(weights.get(ADAPTERS, {}), j)}
            number = None if layer is None else 2 * layer + j
            x_BxLxD, h_BxLxD, kv = self._attention(kind, number, at, x_BxLxD, attend, given.kv)
            mixed = mixed or self._mixture(weights, h_BxLxD, given.forced, x_BxLxD)
            with jax.named_scope("mlp"):
                x_BxLxD = x_BxLxD + moe.dense(at, h_BxLxD, self.products, "{}_proj")
        assert mixed is not None
        return x_BxLxD + mixed[0], mixed[1], kv

    def _attention(self, kind, layer, weights, x_BxLxD, attend, kv: KV):
        """(x behind the attention, what the feed-forward takes of it, the keys and values that others read)."""
        with jax.named_scope("attention"):
            h_BxLxD = self._normed(weights, "attn_norm", x_BxLxD)
            if self.cfg.linear_layers and layer is not None:  # its number among those that keep the same
                places = self.cfg.places
                layer = places[layer] if isinstance(layer, int) else jnp.asarray(places)[layer]
            if kind.linear:
                y_BxLxD = linear_attention.run(self.cfg, layer, weights, h_BxLxD, attend, self.products)
            else:
                rotary = self.rotary[kind]
                y_BxLxD, kv = attention.run(self.cfg, kind, layer, weights, h_BxLxD, rotary, attend, self.products, kv)
            x_BxLxD = x_BxLxD + self._normed(weights, "attn_post_norm", y_BxLxD)
        with jax.named_scope("mlp"):
            return x_BxLxD, self._normed(weights, "mlp_norm", x_BxLxD), kv

    def own(self, params: Params, tokens_BxL, x_BxLxD, constrain: Constrain = lambda x, *axes: x):
        """What the second embedding has for each layer [N, B, L, P], of what the first one gives; None: there is
        none."""
        cfg, (n, p) = self.cfg, (self.cfg.n_layers, self.cfg.per_layer)
        if not p:
            return None
        with jax.named_scope("embed"):
            rows = params["per_layer_embed"][tokens_BxL].astype(x_BxLxD.dtype) * jnp.asarray(p**0.5, x_BxLxD.dtype)
            context = self.products(params, x_BxLxD, "per_layer_proj").astype(jnp.float32) * cfg.d_model**-0.5
            context, rows = (constrain(x, "batch", "sequence").reshape(*x.shape[:2], n, p) for x in (context, rows))
            context = rms_norm(context, params["per_layer_norm"], cfg.norm_eps, cfg.gain_offset)
            own_BxLxNxP = (context + rows.astype(jnp.float32)) * 2**-0.5
            return jnp.moveaxis(own_BxLxNxP.astype(x_BxLxD.dtype), 2, 0)

    def _normed(self, weights, name: str, x_BxLxD):
        """x behind the norm of this name, where the layer has it."""
        if name not in weights:
            return x_BxLxD
        return rms_norm(x_BxLxD, weights[name], self.cfg.norm_eps, self.cfg.gain_offset)

    def _mixture(self, weights, h_BxLxD, forced_BxLxk, x_BxLxD):
        return moe.run(self.cfg, weights, h_BxLxD, self.products, self.compute, forced_BxLxk, self.counted_BxL, x_BxLxD)


def _sublayer(weights: Params, j: int) -> Params:
    return {name[:-2]: w for name, w in weights.items() if name.endswith(f"_{j}")}


def forward(cfg: ModelConfig, params: Params, tokens_BxL, positions_BxL, attend: Attend, **options) -> jax.Array:
    """Hidden states after the last norm; `options` are those of `forward_routed`."""
    return forward_routed(cfg, params, tokens_BxL, positions_BxL, attend, **options)[0]


def forward_routed(
    cfg: ModelConfig,
    params: Params,
    tokens_BxL,
    positions_BxL,
    attend: Attend,
    *,
    dtype=jnp.float32,
    remat: str = "none",
    constrain: Constrain = lambda x, *axes: x,
    merge: bool = True,
    narrow: bool = False,
    absorbed: bool = False,
    shards: int = 1,
    compute: Compute = moe.scan,
    routes_BxLxMxk: jax.Array | None = None,
    counted_BxL: jax.Array | None = None,
    adapters: Params | None = None,
    adapter_index: jax.Array | None = None,
    adapter_gain: float = 1.0,
) -> tuple[jax.Array, Routed | None]:
    """(hidden states after the last norm, in `dtype`; what the M routers did, None without experts).

    constrain: sharding.constrain_rows, the trainer's. merge: whether matmuls see rows and positions as one axis; no,
    where both are sharded. narrow, shards: see attention.Products. absorbed: latent attention in the form that serves;
    attention.py says what `attend` is given. compute: of moe.compute. routes: expert ids to take, see moe.route.
    counted_BxL: the tokens that the routers' figures are of. adapters: of lora.py, in the layout of params, multiplied
    by adapter_gain; adapter_index i32[B]: they have a leading axis, of which each row takes its own.
    """
    params = adapted(params, adapters, adapter_index is not None)
    with jax.named_scope("embed"):
        # gathered over fsdp before the lookup: left to itself, XLA replicates the looked-up rows instead
        embed_VxD = constrain(params["embed"].astype(dtype), "vocab", None)
        x_BxLxD = constrain(_scaled(cfg, embed_VxD[tokens_BxL]), "batch", "sequence")
    products = Products(merge, narrow, absorbed=absorbed, shards=shards, gain=adapter_gain, rows=adapter_index)
    one_pass = _Pass(cfg, _rotary(cfg, positions_BxL), products, compute, counted_BxL)
    own_NxBxLxP = one_pass.own(params, tokens_BxL, x_BxLxD, constrain)

    routes = None if routes_BxLxMxk is None else jnp.moveaxis(routes_BxLxMxk, 2, 0)
    listed, frozen = isinstance(params[LAYERS], list), {}
    if adapters is not None and not listed:
        frozen = {name: {k: w for k, w in params[name].items() if k != ADAPTERS} for name in stack_names(params)}
    layers = _Layers(one_pass, params, attend, remat, constrain, routes, own_NxBxLxP, frozen, {})
    x_BxLxD, every = layers.unrolled(x_BxLxD) if listed else layers.scanned(x_BxLxD)
    hidden_BxLxD = rms_norm(x_BxLxD, params["final_norm"], cfg.norm_eps, cfg.gain_offset)
    return hidden_BxLxD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *every) if every else None


class _Layers(NamedTuple):
    """All layers of one training pass, or of one that serves unrolled layers."""

    one_pass: _Pass
    params: Params
    attend: Attend
    remat: str
    constrain: Constrain
    routes_MxBxLxk: jax.Array | None
    own_NxBxLxP: jax.Array | None
    # Weights beside adapters, by stack: they have no gradient, and a layer takes its own inside of what is computed
    # again, else the backward pass would keep a copy of each
    frozen: dict[str, Params]
    shared: dict[int, KV]  # keys and values that later layers read, by their window: filled on the way

    def unrolled(self, x_BxLxD) -> tuple[jax.Array, list[Routed]]:
        """(x behind all layers of the serving layout, what their routers did, each with an axis of layers)."""
        cfg, router = self.one_pass.cfg, 0
        every: list[Routed] = []
        for layer, (name, at) in enumerate(order(cfg)):
            stack, kind = stacks(cfg)[name], cfg.kind(layer)
            forced = own = None
            if self.routes_MxBxLxk is not None and stack.block != "dense":
                forced = self.routes_MxBxLxk[router]
            if self.own_NxBxLxP is not None:
                own = self.own_NxBxLxP[layer]
            weights = self.params[LAYERS][stack.place + at]
            x_BxLxD, routed, kv = self._layer(name, kind, layer)(x_BxLxD, weights, self._given(kind, forced, own), None)
            self.shared.update({kind.window: kv} if kind.kv == "shared" else {})
            if routed is not None:
                router, every = router + 1, [*every, jax.tree.map(lambda x: x[None], routed)]
        return x_BxLxD, every

    def scanned(self, x_BxLxD) -> tuple[jax.Array, list[Routed]]:
        """The same of stacked layers, run by run."""
        every: list[Routed] = []
        for span in runs(self.one_pass.cfg):
            of_stacks = {name: self.params[name] for name in stack_names(span.counts)}
            if self.frozen:
                of_stacks = {name: {ADAPTERS: x[ADAPTERS]} for name, x in of_stacks.items()}
            of_stacks |= {ROUTERS: self.routes_MxBxLxk if span.counts[ROUTERS] else None, EVERY: self.own_NxBxLxP}
            each = {name: span.of(name, x) for name, x in of_stacks.items()}
            each |= {AT: jnp.arange(span.repeats)} if self.frozen else {}
            x_BxLxD, (routed, shared) = jax.lax.scan(functools.partial(self._repeat, span), x_BxLxD, each)
            self.shared.update({window: jax.tree.map(lambda x: x[-1], kv) for window, kv in shared.items()})
            every += [] if routed is None else [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), routed)]
        return x_BxLxD, every

    def _repeat(self, span: Run, x_BxLxD, each):
        """(x, (what the routers did, what later layers read)) behind one repeat of a run."""

        def pick(tree, name: str, at: int):
            return tree if span.counts[name] < 2 else jax.tree.map(operator.itemgetter(at), tree)

        did: list[Routed] = []
        shared: dict[int, KV] = {}
        for j, ((name, at), kind) in enumerate(zip(span.layers, span.kinds, strict=True)):
            forced = (
                None if stacks(self.one_pass.cfg)[name].block == "dense" else pick(each[ROUTERS], ROUTERS, len(did))
            )
            given = self._given(kind, forced, pick(each[EVERY], EVERY, j))
            number = span.starts[name] + each[AT] * span.counts[name] + at if self.frozen else None
            layer = self._layer(name, kind, None)
            x_BxLxD, routed, kv = layer(x_BxLxD, pick(each[name], name, at), given, number)
            shared |= {kind.window: kv} if kind.kv == "shared" else {}
            did += [] if routed is None else [routed]
        return x_BxLxD, (jax.tree.map(lambda *each: jnp.stack(each), *did) if did else None, shared)

    def _given(self, kind: Kind, forced, own) -> Given:
        return Given(forced, own, self.shared.get(kind.window, NO_KV) if kind.kv == "read" else NO_KV)

    def _layer(self, name: str, kind: Kind, layer: int | None) -> Callable:
        def run(x_BxLxD, weights, given: Given, number):
            if self.frozen:
                take = functools.partial(jax.lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
                weights = jax.tree.map(take, self.frozen[name]) | weights
            block = stacks(self.one_pass.cfg)[name].block
            x_BxLxD, routed, kv = self.one_pass.layer(block, kind, layer, weights, x_BxLxD, self.attend, given)
            return self.constrain(x_BxLxD, "batch", "sequence"), routed, kv

        return rematerialized(run, self.remat, self.one_pass.cfg)


def forward_carrying(
    cfg: ModelConfig,
    params: Params,
    tokens_BxL,
    positions_BxL,
    attend_with: Callable[[Any], Attend],
    state: Any,
    *,
    dtype=jnp.float32,
    compute: Compute = moe.scan,
    turns: bool = False,
    shards: int = 1,
    adapters: Params | None = None,
    adapter_index: jax.Array | None = None,
    adapter_gain: float = 1.0,
) -> tuple[jax.Array, Any, jax.Array | None]:
    """(hidden states after the last norm, state, expert ids i32[M, B, L, k] or None) for serving. `attend_with(state)`
    gives an `attend` that puts the new arrays into the containers of the state that it was given; stacked layers hand
    them on through the loop, in place.

    Each layer's slice is taken by its own number: of a scan unrolled, XLA copies several layers' weights out first.
    turns: of stacked layers, `attend` turns heads (attention.HeadTurn). shards: see attention.Products.
    The adapters' arguments are those of `forward_routed`."""
    state = jax.tree.map(lambda x: x, state)  # its containers are ours
    if layout_of(params) == "serving":
        options = dict(dtype=dtype, absorbed=True, compute=compute, shards=shards)
        options |= dict(adapters=adapters, adapter_index=adapter_index, adapter_gain=adapter_gain)
        hidden_BxLxD, routed = forward_routed(cfg, params, tokens_BxL, positions_BxL, attend_with(state), **options)
        return hidden_BxLxD, state, None if routed is None else routed.ids
    params = adapted(params, adapters, adapter_index is not None)
    with jax.named_scope("embed"):
        x_BxLxD = _scaled(cfg, params["embed"][tokens_BxL].astype(dtype))
    products = Products(
        True, looped=True, absorbed=True, turns=turns, shards=shards, gain=adapter_gain, rows=adapter_index
    )
    one_pass = _Pass(cfg, _rotary(cfg, positions_BxL), products, compute)
    own_NxBxLxP, ids = one_pass.own(params, tokens_BxL, x_BxLxD), None
    if cfg.experts:
        ids = jnp.zeros((cfg.expert_layers, *tokens_BxL.shape, cfg.experts.per_token), jnp.int32)
    for span in runs(cfg):
        x_BxLxD, state, ids = _looped(one_pass, span, params, own_NxBxLxP, x_BxLxD, attend_with, state, ids)
    return rms_norm(x_BxLxD, params["final_norm"], cfg.norm_eps, cfg.gain_offset), state, ids


def _scaled(cfg: ModelConfig, x_BxLxD):
    return x_BxLxD if cfg.embed_scale == 1.0 else x_BxLxD * jnp.asarray(cfg.embed_scale, x_BxLxD.dtype)


def _rotary(cfg: ModelConfig, positions_BxL) -> dict[Kind, tuple[jax.Array, jax.Array]]:
    return {kind: attention.rotary(cfg, kind, positions_BxL) for kind in cfg.kinds}


def _looped(one_pass: _Pass, span: Run, params: Params, own_NxBxLxP, x_BxLxD, attend_with, state, ids):
    """The layers of one run, whose weights stay stacked; ids: the routers' choices so far, None without experts."""
    period, blocks = len(span.layers), stacks(one_pass.cfg)
    most = max(1, TOGETHER // period)  # repeats of the run
    together = next(n for n in range(most, 0, -1) if span.repeats % n == 0)

    def body(i, carry):
        x_BxLxD, state, ids = carry
        for repeat in [i * together + j for j in range(together)]:
            router = span.starts[ROUTERS] + repeat * span.counts[ROUTERS]
            for j, (name, place) in enumerate(span.layers):
                at = span.starts[name] + repeat * span.counts[name] + place
                take = functools.partial(jax.lax.dynamic_index_in_dim, index=at, axis=0, keepdims=False)
                weights, layer = jax.tree.map(take, params[name]), span.first + repeat * period + j
                given = Given(own=jax.tree.map(functools.partial(take, index=layer), own_NxBxLxP))
                state = jax.tree.map(lambda x: x, state)
                block, attend = blocks[name].block, attend_with(state)
                x_BxLxD, routed, _ = one_pass.layer(block, span.kinds[j], layer, weights, x_BxLxD, attend, given)
                ids = ids if routed is None else ids.at[router].set(routed.ids)
                router = router if routed is None else router + 1
        return x_BxLxD, state, ids

    return jax.lax.fori_loop(0, span.repeats // together, body, (x_BxLxD, state, ids))


def logits(cfg: ModelConfig, params: Params, hidden, narrow: bool = False) -> jax.Array:
    """f32[..., V] over all rows of the embedding, padding rows included; capped, where the model's are. narrow: the
    head multiplies bfloat16, as projections may, see attention.Products."""
    with jax.named_scope("head"):
        tied, head = cfg.tie_embeddings, params.get(HEAD)
        if head is not None:  # an engine's, of rows [N, D]
            z = hidden @ head
        elif narrow:
            weight, rows_NxD = params["embed" if tied else "lm_head"], hidden.reshape(-1, hidden.shape[-1])
            z = narrow_product(rows_NxD, weight, tied).reshape(*hidden.shape[:-1], -1)
        else:
            spec, weight = ("...d,vd->...v", params["embed"]) if tied else ("...d,dv->...v", params["lm_head"])
            z = jnp.einsum(spec, hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return cfg.logit_cap * jnp.tanh(z / cfg.logit_cap) if cfg.logit_cap else z
