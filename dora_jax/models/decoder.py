"""One dense decoder for Qwen3, Qwen2.5 and Llama 3.x, described once in Flax NNX.

The modules' constructors are the description: `abstract_params` traces them, sharding.py reads the logical axes they
carry, `init_params` runs them under one jit. Callers hold plain dicts, which are merged into modules at trace time
only, because NNX dispatch costs milliseconds a call.

Consumes tokens, positions and an `attend` function (the engine's reads pages, the trainer's is ops.segment_attention's);
produces hidden states and logits. Two layouts of the same weights, kept [in, out]:
  stacked (canonical)  params["layers"] = {name: [n_layers, ...]}  -> lax.scan, for training
  serving              params["layers"] = [{name: [...]}, ...]     -> Python loop; on CPU a static index into
                       stacked weights copies them at every step
An engine on a TPU takes the stacked layout too ("scanned"): a loop compiles in the time of one layer.
Laws: the layouts give the same function; a parameter's first value depends on (seed, layer, name) alone, so a new
parameter shifts no other; norms, rotary angles and softmax are computed in f32.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dora_jax.models.config import ModelConfig, RopeScaling, new_config

__all__ = [
    "ModelConfig",
    "RopeScaling",
    "abstract_params",
    "forward",
    "forward_carrying",
    "init_params",
    "layout_of",
    "logical_axes",
    "logits",
    "new_config",
    "serving_layout",
]

Params = dict[str, Any]
# (layer, traced or None under scan, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD) -> o_BxLxHxD; q and k rotated, q not scaled
Attend = Callable[[int | None, jax.Array, jax.Array, jax.Array], jax.Array]
Constrain = Callable[..., jax.Array]  # (array, *logical axes) -> the same array, pinned to the table's mesh axes

REMAT = ("none", "full", "dots")
TOGETHER = (
    4  # layers of a serving loop's body, at most: XLA fetches the next one's weights while it computes with one's
)
KEPT = "attention"  # what an attention kernel names of its results: they are as small as a layer's input, and kept


def _param(key: jax.Array, name: str, shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None) -> nnx.Param:
    """Gaussian of standard deviation `scale`, or ones (a gain) where it is None; the key is folded with the name."""
    if scale is None:
        return nnx.Param(jnp.ones(shape), axes=axes)
    named_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(scale * jax.random.normal(named_key, shape), axes=axes)


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU, both residual."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        param = functools.partial(_param, key)
        d, f, q, kv = cfg.d_model, cfg.d_ff, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        residual = 1 / math.sqrt(2 * cfg.n_layers)  # the residual stream keeps unit variance at any depth
        self.attn_norm = param("attn_norm", (d,), ("norm",), None)
        self.q_proj = param("q_proj", (d, q), ("embed", "heads"), d**-0.5)
        self.k_proj = param("k_proj", (d, kv), ("embed", "kv_heads"), d**-0.5)
        self.v_proj = param("v_proj", (d, kv), ("embed", "kv_heads"), d**-0.5)
        self.o_proj = param("o_proj", (q, d), ("heads", "embed"), residual * q**-0.5)
        self.mlp_norm = param("mlp_norm", (d,), ("norm",), None)
        self.gate_proj = param("gate_proj", (d, f), ("embed", "mlp"), d**-0.5)
        self.up_proj = param("up_proj", (d, f), ("embed", "mlp"), d**-0.5)
        self.down_proj = param("down_proj", (f, d), ("mlp", "embed"), residual * f**-0.5)
        if cfg.qkv_bias:
            self.q_bias = param("q_bias", (q,), ("heads",), 0.0)
            self.k_bias = param("k_bias", (kv,), ("kv_heads",), 0.0)
            self.v_bias = param("v_bias", (kv,), ("kv_heads",), 0.0)
        if cfg.qk_norm:
            self.q_norm = param("q_norm", (cfg.head_dim,), ("norm",), None)
            self.k_norm = param("k_norm", (cfg.head_dim,), ("norm",), None)

    def __call__(
        self, cfg: ModelConfig, layer: int | None, x_BxLxD, rotary, attend: Attend, merge: bool, looped: bool = False
    ):
        """looped: whether the weights are slices of stacked ones; see `_qkv`."""
        matmul = functools.partial(self._matmul, merge)
        with jax.named_scope("attention"):
            q, k, v = self._qkv(cfg, _rms_norm(x_BxLxD, self.attn_norm[...], cfg.norm_eps), rotary, matmul, looped)
            o_BxLxHxD = attend(layer, q, k, v)
            x_BxLxD = x_BxLxD + matmul(o_BxLxHxD.reshape(*x_BxLxD.shape[:2], -1), "o_proj")
        with jax.named_scope("mlp"):
            h_BxLxD = _rms_norm(x_BxLxD, self.mlp_norm[...], cfg.norm_eps)
            gate_BxLxF = jax.nn.silu(matmul(h_BxLxD, "gate_proj"))
            return x_BxLxD + matmul(gate_BxLxF * matmul(h_BxLxD, "up_proj"), "down_proj")

    def _matmul(self, merge: bool, x_BxLxD, name: str):
        """x @ weight; merge: tokens as one axis, since a CPU takes twice as long over a weight gradient summed over two."""
        if not merge:
            return x_BxLxD @ self._weight(name, x_BxLxD)
        y = x_BxLxD.reshape(-1, x_BxLxD.shape[-1]) @ self._weight(name, x_BxLxD)
        return y.reshape(*x_BxLxD.shape[:-1], -1)

    def _weight(self, name: str, like: jax.Array) -> jax.Array:
        """Masters may be wider than the activations: compute in the activations' type."""
        return getattr(self, name)[...].astype(like.dtype)

    def _qkv(self, cfg: ModelConfig, h_BxLxD, rotary, matmul: Callable, looped: bool):
        def heads(which: str, count: int):
            y = matmul(h_BxLxD, f"{which}_proj")
            if looped:  # else XLA splits the heads inside the product, and copies the layer's weights out for that
                y = jax.lax.optimization_barrier(y)
            if cfg.qkv_bias:
                y = y + _last(self._weight(f"{which}_bias", h_BxLxD), y)
            y = y.reshape(*y.shape[:2], count, cfg.head_dim)
            if cfg.qk_norm and which != "v":
                y = _rms_norm(y, getattr(self, f"{which}_norm")[...], cfg.norm_eps)
            return y if which == "v" else _rotate(y, *rotary)

        return heads("q", cfg.n_heads), heads("k", cfg.n_kv_heads), heads("v", cfg.n_kv_heads)


class Ends(nnx.Module):
    """What stands before and after the layers: embedding, last norm, head (absent when tied)."""

    def __init__(self, cfg: ModelConfig, key: jax.Array):
        scale = cfg.d_model**-0.5
        self.embed = _param(key, "embed", (cfg.vocab_size, cfg.d_model), ("vocab", "embed"), scale)
        self.final_norm = _param(key, "final_norm", (cfg.d_model,), ("norm",), None)
        if not cfg.tie_embeddings:
            self.lm_head = _param(key, "lm_head", (cfg.d_model, cfg.vocab_size), ("embed", "vocab"), scale)


def _init(cfg: ModelConfig, seed: int, dtype) -> Params:
    """Stacked weights; layer i draws from fold_in(key(seed), i), the ends from fold_in(key(seed), n_layers)."""
    key = jax.random.key(seed)

    def pure(module: type[nnx.Module], layer):
        state = nnx.split(module(cfg, jax.random.fold_in(key, layer)))[1]
        return jax.tree.map(lambda x: x.astype(dtype), nnx.to_pure_dict(state))

    layers = jax.vmap(functools.partial(pure, Layer))(jnp.arange(cfg.n_layers))
    return {**pure(Ends, cfg.n_layers), "layers": layers}


@functools.cache
def _described(module: type[nnx.Module], cfg: ModelConfig) -> tuple[nnx.GraphDef, Any]:
    """Graph definition (to merge a plain dict into) and abstract state (shapes and logical axes)."""
    return nnx.split(nnx.eval_shape(lambda: module(cfg, jax.random.key(0))))


def logical_axes(cfg: ModelConfig) -> Params:
    """Stacked tree of logical axis names, one per dimension: what sharding.py looks up in its table."""

    def axes(module: type[nnx.Module], prefix: tuple[str, ...]) -> Params:
        leaves = nnx.to_flat_state(_described(module, cfg)[1])
        return {path[0]: prefix + variable.get_metadata("axes") for path, variable in leaves}

    return {**axes(Ends, ()), "layers": axes(Layer, ("layers",))}


def abstract_params(cfg: ModelConfig, dtype=jnp.float32) -> Params:
    """ShapeDtypeStructs of the stacked layout."""
    return jax.eval_shape(functools.partial(_init, cfg, 0, dtype))


def init_params(cfg: ModelConfig, seed: int, shardings: Any = None, dtype=jnp.float32) -> Params:
    """Fresh stacked weights, made on their shards (`sharding.param_specs`); the same values on every mesh."""
    return jax.jit(functools.partial(_init, cfg, seed, dtype), out_shardings=shardings)()


def serving_layout(params: Params, layout: str = "serving") -> Params:
    """Stacked -> what an engine's calls take. Jittable: give the jit the serving shardings to reshard in the same call.

    layout: "serving", one dict a layer, or "scanned", stacked as they are; rollout/shapes.py says which.
    """
    stacked = params["layers"]
    if layout == "scanned":
        return params
    n_layers = next(iter(stacked.values())).shape[0]
    return {**params, "layers": [{name: w[i] for name, w in stacked.items()} for i in range(n_layers)]}


def stacked_layout(params: Params) -> Params:
    """One dict a layer -> stacked; what is stacked stays."""
    layers = params["layers"]
    if not isinstance(layers, list):
        return params
    return {**params, "layers": jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *layers)}


def layout_of(params: Params) -> str:
    """ "serving" or "scanned", of an engine's weights or of a tree like them (shardings)."""
    return "serving" if isinstance(params["layers"], list) else "scanned"


def forward(
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
):
    """Hidden states after the last norm, in `dtype`. `constrain` (sharding.constrain_rows) is the trainer's.

    merge: whether matmuls see rows and positions as one axis; no, where both are sharded.
    """
    layer_def = _described(Layer, cfg)[0]
    with jax.named_scope("embed"):
        # gathered over fsdp before the lookup: left to itself, XLA replicates the looked-up rows instead
        embed_VxD = constrain(params["embed"].astype(dtype), "vocab", None)
        x_BxLxD = constrain(embed_VxD[tokens_BxL], "batch", "sequence")
    rotary = _rotary(cfg, positions_BxL)

    def run(layer: int | None, weights: Params, x):
        return constrain(nnx.merge(layer_def, weights)(cfg, layer, x, rotary, attend, merge), "batch", "sequence")

    if isinstance(params["layers"], list):
        for i, weights in enumerate(params["layers"]):
            x_BxLxD = _remat(functools.partial(run, i), remat)(weights, x_BxLxD)
    else:
        body = _remat(functools.partial(run, None), remat)
        x_BxLxD, _ = jax.lax.scan(lambda x, weights: (body(weights, x), None), x_BxLxD, params["layers"])
    return _rms_norm(x_BxLxD, params["final_norm"], cfg.norm_eps)


def forward_carrying(
    cfg: ModelConfig,
    params: Params,
    tokens_BxL,
    positions_BxL,
    attend_with: Callable[[Any], Attend],
    state: Any,
    *,
    dtype=jnp.float32,
) -> tuple[jax.Array, Any]:
    """(hidden states after the last norm, state) for serving. `attend_with(state)` gives an `attend` that puts the new
    arrays into the containers of the state that it was given; stacked layers hand them on through the loop, in place.

    Each layer's slice is taken by its own number: of a scan unrolled, XLA copies several layers' weights out first."""
    state = jax.tree.map(lambda x: x, state)  # its containers are ours
    if layout_of(params) == "serving":
        return forward(cfg, params, tokens_BxL, positions_BxL, attend_with(state), dtype=dtype), state
    layer_def = _described(Layer, cfg)[0]
    with jax.named_scope("embed"):
        x_BxLxD = params["embed"][tokens_BxL].astype(dtype)
    rotary = _rotary(cfg, positions_BxL)

    together = next(n for n in range(TOGETHER, 0, -1) if cfg.n_layers % n == 0)

    def body(i, carry):
        x_BxLxD, state = carry
        for layer in [i * together + j for j in range(together)]:
            weights = jax.tree.map(
                lambda w: jax.lax.dynamic_index_in_dim(w, layer, 0, keepdims=False), params["layers"]
            )
            state = jax.tree.map(lambda x: x, state)
            x_BxLxD = nnx.merge(layer_def, weights)(cfg, layer, x_BxLxD, rotary, attend_with(state), True, looped=True)
        return x_BxLxD, state

    x_BxLxD, state = jax.lax.fori_loop(0, cfg.n_layers // together, body, (x_BxLxD, state))
    return _rms_norm(x_BxLxD, params["final_norm"], cfg.norm_eps), state


def logits(cfg: ModelConfig, params: Params, hidden) -> jax.Array:
    """f32[..., V] over all rows of the embedding, padding rows included."""
    with jax.named_scope("head"):
        if cfg.tie_embeddings:
            spec, weight = "...d,vd->...v", params["embed"]
        else:
            spec, weight = "...d,dv->...v", params["lm_head"]
        return jnp.einsum(spec, hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _remat(body: Callable, remat: str) -> Callable:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(KEPT)
    if remat == "full":
        return jax.checkpoint(body, policy=kept)
    if remat == "dots":
        dots = policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(body, policy=policies.save_from_both_policies(dots, kept))
    raise ValueError(f"remat {remat!r} is unknown; known: {', '.join(REMAT)}")


def _rms_norm(x, gain, eps: float):
    x32 = x.astype(jnp.float32)
    if x.shape[0] == 1:  # a CPU takes six times as long over a gain's gradient where one row leads the shape
        x32 = x32.reshape(x.shape[1:])
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * _last(gain.astype(jnp.float32), x32)).astype(x.dtype).reshape(x.shape)


def _last(vector, like):
    """The vector along the last dimension of `like`, ranks made equal (rank promotion is an error in tests)."""
    return jnp.expand_dims(vector, range(like.ndim - 1))


def _frequencies(cfg: ModelConfig) -> jax.Array:
    """f32[head_dim / 2] radians a position; scaled as Llama 3.1 does (low frequencies stretched, a smooth middle)."""
    freq = 1.0 / cfg.rope_theta ** (jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim)
    scaling = cfg.rope_scaling
    if scaling is None:
        return freq
    turns = scaling.original_max_position * freq / (2 * jnp.pi)  # full turns over the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def _rotary(cfg: ModelConfig, positions_BxL) -> tuple[jax.Array, jax.Array]:
    """cos and signed sin f32[B, L, 1, head_dim], computed once for all layers; see `_rotate`."""
    angle = positions_BxL.astype(jnp.float32)[:, :, None, None] * _frequencies(cfg)[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def _rotate(x_BxLxHxD, cos, sin):
    """Rotate the two halves of each head against each other (the Hugging Face convention).

    Written with the halves swapped by a roll: a join of two halves is not vectorised on CPUs, at four times the cost.
    """
    x = x_BxLxHxD.astype(jnp.float32)
    return (x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin).astype(x_BxLxHxD.dtype)
