"""The attention of a layer, but for the scores: projections, norms, rotary angles. Grouped-query (GQA) or latent (MLA).

Consumes a layer's weights by name and normed hidden states; produces what the residual stream gets. Scores are the
business of an `attend` function, which the caller of decoder.forward gives: the engine's reads pages, the trainer's is
ops.segment_attention's. What `attend(layer, q, k, v, scores) -> o` is given:
  layer     number of the attention, counted over ModelConfig.kv_layers; traced in a loop, None under scan
  GQA       q [B, L, H, D], k and v [B, L, K, D], q and k rotated; o [B, L, H, D]
  MLA, expanded (training)  q and k [B, L, H, D], D = nope_dim + rope_dim, rotated; v as wide, padded by zeros; o the
                            same
  MLA, absorbed (serving)   q [B, L, H, C] and k [B, L, 1, C], C = kv_rank + rope_dim: a head's query in the latents'
            own space, and the latent with the rotated key behind it, which is all that a cache keeps. v is None: the
            values are the first kv_rank numbers of k. o [B, L, H, kv_rank]
  a layer that has no keys and values of its own: layer is the one whose it reads, and k and v are None where a cache
            holds them; elsewhere they are that layer's
  scores    families.config.Scores: q is not scaled, for a narrow type would round scale and product alike; `attend`
            multiplies the products with keys, in f32
  turn      given where `attend` turns heads (`HeadTurn`), and a layer's can be turned so: q, k and v
            are then [B, L, heads * D] as projections leave them
  sinks     f32[H], given where the model has them: a score of each head that stands beside those of its keys, and whose
            weight goes to no value
Law: norms and rotary angles are computed in f32, the angles' frequencies as float64 constants.

What a layer's backward pass keeps, and what it computes again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from dora_jax.models.families.config import SMALL, Kind, Linear, ModelConfig, Proportional, RopeScaling, Yarn

REMAT = ("none", "full", "dots")
KEPT = "attention"  # what an attention kernel names of its results: they are kept where they are small


def rematerialized(body: Callable, remat: str, cfg: ModelConfig) -> Callable:
    """The body of a layer, whose backward pass computes again what `remat` says; ValueError: it is unknown."""
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(*([KEPT] if max(map(cfg.q_width, cfg.kinds)) <= SMALL * cfg.d_model else []))
    if remat == "full":
        return jax.checkpoint(body, policy=kept)
    if remat == "dots":
        dots = policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(body, policy=policies.save_from_both_policies(dots, kept))
    raise ValueError(f"remat {remat!r} is unknown; known: {', '.join(REMAT)}")


Attend = Callable[..., jax.Array]  # (layer, q, k, v, scores), and sinks
KV = tuple["jax.Array | None", "jax.Array | None"]  # keys and values of one layer
NO_KV: KV = (None, None)
Weights = dict[str, Any]  # of one layer, by name
ADAPTERS = "adapters"  # among a layer's weights: its adapters, by the name of what they adapt
LATENT_EPS = 1e-6  # of the norms of latents, whatever the model's own


class Spec(NamedTuple):
    """A parameter before it exists; scale: standard deviation of its first values, None: they are ones."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical, one a dimension: sharding.TABLE says where they lie
    scale: float | None
    first: float | None = None  # that value in the place of one, where there is no scale


@functools.partial(jax.tree_util.register_dataclass, data_fields=["angles", "gains"], meta_fields=["eps", "offset"])
@dataclasses.dataclass(frozen=True)
class HeadTurn:
    """How heads as projections leave them become those that are scored: each is normed, then rotated."""

    angles: tuple[jax.Array, ...]  # of `rotary`, for as much of a head as they are wide; none: nothing is rotated
    gains: tuple[jax.Array, ...]  # [D] of queries and of keys; none: nothing is normed
    eps: float
    offset: float

    def __call__(self, y_BxLxHD: jax.Array, dim: int, which: int) -> jax.Array:
        """[B, L, H, D] of queries (0), keys (1) or values (2), which stay as they are."""
        y = y_BxLxHD.reshape(*y_BxLxHD.shape[:2], -1, dim)
        if which == 2:
            return y
        y = rms_norm(y, self.gains[which], self.eps, self.offset) if self.gains else y
        if not self.angles or self.angles[0].shape[-1] == dim:
            return _rotate(y, *self.angles) if self.angles else y
        part = self.angles[0].shape[-1]
        return jnp.concatenate([_rotate(y[..., :part], *self.angles), y[..., part:]], axis=-1)


class Products(NamedTuple):
    """How a layer multiplies.

    merge: tokens as one axis, since a CPU takes twice as long over a weight gradient summed over two. narrow: with
    weights, not with adapters, by `narrow_product`, where tokens are one axis.
    shards: devices that the columns of a joined weight (rollout/quantize.py) are cut for.
    looped: the weights are slices of stacked ones. absorbed: latent attention in the form that serves. turns: `attend`
    turns the heads, where it gets a `HeadTurn`.
    gain: what low-rank adapters are multiplied by. rows: which of several adapters each row takes; None: there is one.
    """

    merge: bool
    narrow: bool = False
    looped: bool = False
    absorbed: bool = False
    turns: bool = False
    shards: int = 1
    gain: float = 1.0
    rows: jax.Array | None = None  # i32[B]

    def __call__(self, weights: Weights, x_BxLxD: jax.Array, name: str) -> jax.Array:
        """x @ weight, in the activations' type: masters may be wider; with the adapter of that weight, if it has
        one."""
        y = self._times(x_BxLxD, weights[name].astype(x_BxLxD.dtype), self.narrow)
        return self._adapted(weights, x_BxLxD, name, y)

    def each(self, weights: Weights, x_BxLxD: jax.Array, names: Sequence[str], joined: str) -> list[jax.Array]:
        """Products with several weights. joined: the name of the one weight that an engine may keep in the place of
        such that are as wide as one another."""
        if joined not in weights:
            return [self(weights, x_BxLxD, name) for name in names]
        y_BxLxF = self(weights, x_BxLxD, joined)
        # one product, whatever XLA would make of the cut behind it
        y_BxLxF = jax.lax.optimization_barrier(y_BxLxF) if self.looped else y_BxLxF
        y_BxLxSxW = y_BxLxF.reshape(*y_BxLxF.shape[:-1], self.shards, -1)
        ys = (y.reshape(*y_BxLxF.shape[:-1], -1) for y in jnp.split(y_BxLxSxW, len(names), axis=-1))
        return [self._adapted(weights, x_BxLxD, name, y) for name, y in zip(names, ys, strict=True)]

    def _adapted(self, weights: Weights, x_BxLxD: jax.Array, name: str, y: jax.Array) -> jax.Array:
        if (adapter := adapter_of(weights, name, x_BxLxD.dtype)) is None:
            return y
        (a, b), rows_B = adapter, self.rows
        if rows_B is None:
            return y + self._times(self.gain * self._times(x_BxLxD, a), b)

        # Of several adapters, products with all of them, of which each row keeps its own: an adapter is read once,
        # whatever the rows, and neither another's numbers nor its own place among them reach a row.
        def chosen(x_BxLxI: jax.Array, factor_AxIxO: jax.Array) -> jax.Array:
            """The adapters have an axis of their own: one that is merged with O would not lie on a mesh as O does."""
            x = x_BxLxI.reshape(-1, x_BxLxI.shape[-1]) if self.merge else x_BxLxI
            z = jnp.einsum("...i,aio->...ao", x, factor_AxIxO).reshape(*x_BxLxI.shape[:-1], *factor_AxIxO.shape[::2])
            own = z[..., 0, :]
            for i in range(1, len(factor_AxIxO)):
                own = jnp.where(rows_B[:, None, None] == i, z[..., i, :], own)
            return own

        return y + chosen(self.gain * chosen(x_BxLxD, a), b)

    def _times(self, x_BxLxD: jax.Array, weight: jax.Array, narrow: bool = False) -> jax.Array:
        if not self.merge:
            return x_BxLxD @ weight
        x_NxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
        y = narrow_product(x_NxD, weight).astype(x_NxD.dtype) if narrow else x_NxD @ weight
        return y.reshape(*x_BxLxD.shape[:-1], -1)


def narrow_product(x_NxD: jax.Array, weight: jax.Array, turned: bool = False) -> jax.Array:
    """f32[N, F], of factors that are rounded to bfloat16; gradients are such products, too.

    weight: [D, F], or turned [F, D]. A CPU has fast products of bfloat16 only where sums are float32 and run along the
    last axis of what stands first, and XLA fails on others that it makes by itself where a transpose comes behind.
    """
    return _product(x_NxD.astype(jnp.float32), weight.astype(jnp.float32), turned)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_NxD: jax.Array, weight: jax.Array, turned: bool) -> jax.Array:
    return _dot(x_NxD, weight, int(turned))


def _product_and_factors(x_NxD: jax.Array, weight: jax.Array, turned: bool) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _dot(x_NxD, weight, int(turned)), (x_NxD.astype(jnp.bfloat16), weight)


def _gradients(turned: bool, factors: tuple[jax.Array, ...], dy_NxF: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NxD, weight = factors
    left, right = (dy_NxF, x_NxD) if turned else (x_NxD, dy_NxF)
    return _dot(dy_NxF, weight, int(not turned)), _dot(_by_rows(left.astype(jnp.bfloat16).T), right, 0)


def _dot(a_NxD: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """f32[N, F]: sums over D, which is that axis of b."""
    a_NxD, b = a_NxD.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return _by_rows(jax.lax.dot_general(a_NxD, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32))


def _by_rows(matrix: jax.Array) -> jax.Array:
    return with_layout_constraint(matrix, Layout((0, 1)))


_product.defvjp(_product_and_factors, _gradients)


def adapter_of(weights: Weights, name: str, dtype: Any) -> tuple[jax.Array, jax.Array] | None:
    """The factors [..., in, rank] and [..., rank, out] of a weight's adapter; None where it has none."""
    found = weights.get(ADAPTERS, {}).get(name)
    return None if found is None else (found["a"].astype(dtype), found["b"].astype(dtype))


def narrowed(weight: jax.Array, dtype) -> jax.Array:
    """f32 of a weight as a copy in this type has it, for what multiplies in f32: an engine's copy and the trainer's
    master are one function then. XLA may leave out a cast there and back."""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(weight.astype(jnp.float32), kind.nexp, kind.nmant)


def specs(cfg: ModelConfig, kind: Kind, residual: float) -> dict[str, Spec]:
    """Parameters of one attention; residual: what keeps the residual stream at unit variance."""
    d, q, kv, m = cfg.d_model, cfg.q_width(kind), cfg.kv_width(kind), cfg.latent
    v = cfg.n_heads * m.v_dim if m else q
    found = {"o_proj": Spec((v, d), ("heads", "embed"), residual * v**-0.5)}
    if cfg.o_bias:
        found["o_bias"] = Spec((d,), ("norm",), 0.0)
    if cfg.sinks:
        found["sinks"] = Spec((cfg.n_heads,), ("heads",), 0.0)
    if m is None or not m.q_rank:
        found["q_proj"] = Spec((d, q), ("embed", "heads"), d**-0.5)
    if cfg.gated:
        found["attn_gate_proj"] = Spec((d, q), ("embed", "heads"), d**-0.5)
    if m is None:
        own = "" if kind.kv == "read" else "k" if kind.tied_values else "kv"
        found |= {f"{x}_proj": Spec((d, kv), ("embed", "kv_heads"), d**-0.5) for x in own}
        if cfg.qkv_bias:
            found["q_bias"] = Spec((q,), ("heads",), 0.0)
            found |= {f"{x}_bias": Spec((kv,), ("kv_heads",), 0.0) for x in own}
        if cfg.qk_norm:
            widths = (q, kv) if cfg.qk_norm_whole else (cfg.dim(kind),) * (1 + bool(own))
            found |= {f"{x}_norm": Spec((width,), ("norm",), None) for x, width in zip("qk", widths)}
        return found
    expanded = cfg.n_heads * (m.nope_dim + m.v_dim)
    found |= {
        "kv_a_proj": Spec((d, m.cache_dim), ("embed", "latent"), d**-0.5),
        "kv_a_norm": Spec((m.kv_rank,), ("norm",), None),
        "kv_b_proj": Spec((m.kv_rank, expanded), ("rank", "heads"), m.kv_rank**-0.5),
    }
    if m.q_rank:
        found |= {
            "q_a_proj": Spec((d, m.q_rank), ("embed", "latent"), d**-0.5),
            "q_a_norm": Spec((m.q_rank,), ("norm",), None),
            "q_b_proj": Spec((m.q_rank, q), ("rank", "heads"), m.q_rank**-0.5),
        }
    return found


def run(
    cfg: ModelConfig,
    kind: Kind,
    layer: Any,
    weights: Weights,
    h_BxLxD: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    attend: Attend,
    products: Products,
    kv: KV = NO_KV,
) -> tuple[jax.Array, KV]:
    """(what normed hidden states add to the residual stream, the keys and values of a layer that shares them). kv:
    those that a layer without its own reads; None where a cache holds them."""
    if cfg.latent is None:
        q, *own = _heads(cfg, kind, weights, h_BxLxD, rotary, products)
        kv = kv if kind.kv == "read" else (own[0], own[1])
        sinks = [weights["sinks"].astype(jnp.float32)] if cfg.sinks else []
        turn = {"turn": _turn(cfg, kind, weights, rotary)} if _is_turned(cfg, kind, products) else {}
        o_BxLxHxD = attend(cfg.source(kind) if kind.kv == "read" else layer, q, *kv, cfg.scores(kind), *sinks, **turn)
    else:
        inner = _mla_absorbed if products.absorbed else _mla
        o_BxLxHxD = inner(cfg, kind, layer, weights, h_BxLxD, rotary, attend, products)
    shared = kv if kind.kv == "shared" and not products.absorbed else NO_KV
    o_BxLxHD = o_BxLxHxD.reshape(*h_BxLxD.shape[:2], -1)
    if cfg.gated:
        o_BxLxHD = o_BxLxHD * jax.nn.sigmoid(products(weights, h_BxLxD, "attn_gate_proj"))
    y_BxLxD = products(weights, o_BxLxHD, "o_proj")
    return y_BxLxD + last(weights["o_bias"].astype(y_BxLxD.dtype), y_BxLxD) if cfg.o_bias else y_BxLxD, shared


def rotary(cfg: ModelConfig, kind: Kind, positions_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and signed sin f32[B, L, 1, rope_dim], computed once for all layers of a kind; see `_rotate`."""
    dim, theta = cfg.rope_dim(kind), kind.theta or cfg.rope_theta
    scaling = None if kind.theta else cfg.rope_scaling
    freq = theta ** (-np.arange(0, dim, 2) / dim)  # radians a position
    if isinstance(scaling, RopeScaling):  # low frequencies stretched, a smooth middle
        turns = scaling.original_max_position * freq / (2 * np.pi)  # full turns over the original context
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        freq = (1 - smooth) * freq / scaling.factor + smooth * freq
    elif isinstance(scaling, Linear):
        freq = freq / scaling.factor
    elif isinstance(scaling, Proportional):
        freq = np.where(np.arange(dim // 2) < int(scaling.share * dim // 2), freq / scaling.factor, 0.0)
    elif scaling is not None:
        # Stretched where a dimension turns less than beta_slow times over the original context, kept above beta_fast
        low, high = (
            dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2) - low) / ((high - low) or 0.001)
        stretched = np.clip(ramp, 0.0, 1.0)
        freq = freq / scaling.factor * stretched + freq * (1 - stretched)
    angle = positions_BxL.astype(jnp.float32)[:, :, None, None] * freq.astype(np.float32)[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, Yarn) and scaling.rotary_gain != 1.0:
        cos, sin = cos * scaling.rotary_gain, sin * scaling.rotary_gain
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    x32 = x.astype(jnp.float32)
    if x.shape[0] == 1:  # a CPU takes six times as long over a gain's gradient where one row leads the shape
        x32 = x32.reshape(x.shape[1:])
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * last(gain.astype(jnp.float32) + offset, x32)).astype(x.dtype).reshape(x.shape)


def last(vector: jax.Array, like: jax.Array) -> jax.Array:
    """The vector along the last dimension of `like`, ranks made equal (rank promotion is an error in tests)."""
    return jnp.expand_dims(vector, range(like.ndim - 1))


# ---------------------------------------------------------------- grouped-query


def _is_turned(cfg, kind, products) -> bool:
    """Whether `attend` turns the heads of such a layer."""
    whole = not kind.rotated or cfg.rope_dim(kind) == cfg.dim(kind)
    return products.turns and whole and kind.kv != "read" and not (cfg.qk_norm and cfg.qk_norm_whole) and not cfg.v_norm


def _turn(cfg, kind, weights, rotary) -> HeadTurn:
    names = [] if cfg.qk_norm and cfg.qk_norm_whole else ["q_norm", "k_norm"]  # of a layer that reads keys, the first
    gains = tuple(weights[name] for name in names if name in weights)
    return HeadTurn(rotary if kind.rotated else (), gains, cfg.norm_eps, cfg.gain_offset)


def _heads(cfg, kind, weights, h_BxLxD, rotary, products) -> list[jax.Array]:
    """Queries, keys and values, of a layer that reads others' keys the queries alone; as projections leave them, where
    `attend` turns them."""

    def product(which: str):
        y = products(weights, h_BxLxD, f"{which}_proj")
        if products.looped:  # else XLA splits the heads inside the product, and copies the layer's weights for that
            y = jax.lax.optimization_barrier(y)
        return y + last(weights[f"{which}_bias"].astype(h_BxLxD.dtype), y) if cfg.qkv_bias else y

    def heads(which: str, y):
        if _is_turned(cfg, kind, products):
            return y
        if which == "v":
            y = y.reshape(*y.shape[:2], -1, cfg.dim(kind))
            return rms_norm(y, jnp.ones(cfg.dim(kind)), cfg.norm_eps) if cfg.v_norm else y
        if cfg.qk_norm and cfg.qk_norm_whole:
            y = rms_norm(y, weights[f"{which}_norm"], cfg.norm_eps, cfg.gain_offset)
        return turn(y, cfg.dim(kind), "qk".index(which))

    turn, q = _turn(cfg, kind, weights, rotary), product("q")
    if kind.kv == "read":
        return [heads("q", q)]
    k = product("k")
    v = k if kind.tied_values else product("v")
    return [heads("q", q), heads("k", k), heads("v", v)]


# ----------------------------------------------------------------------- latent


def _mla(cfg, kind, layer, weights, h_BxLxD, rotary, attend, products):
    m, (b, l, _) = cfg.mla, h_BxLxD.shape
    q_nope, q_rope, latent_BxLxC, k_rope_BxLx1xR = latent_parts(cfg, weights, h_BxLxD, rotary, products)
    kv = products(weights, latent_BxLxC, "kv_b_proj").reshape(b, l, cfg.n_heads, -1)
    k_rope = jnp.broadcast_to(k_rope_BxLx1xR, (b, l, cfg.n_heads, m.rope_dim))
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    k = jnp.concatenate([kv[..., : m.nope_dim], k_rope], axis=-1)
    v = jnp.pad(kv[..., m.nope_dim :], ((0, 0), (0, 0), (0, 0), (0, cfg.head_dim - m.v_dim)))
    return attend(layer, q, k, v, cfg.scores(kind))[..., : m.v_dim]


def _mla_absorbed(cfg, kind, layer, weights, h_BxLxD, rotary, attend, products):
    """kv_b_proj moves over to the query and to the output: scores of a latent are the query's with its key."""
    m = cfg.latent
    q_nope, q_rope, latent_BxLxC, k_rope_BxLx1xR = latent_parts(cfg, weights, h_BxLxD, rotary, products)
    up_CxHxN = weights["kv_b_proj"].astype(h_BxLxD.dtype).reshape(m.kv_rank, cfg.n_heads, -1)
    q_latent = jnp.einsum("blhn,chn->blhc", q_nope, up_CxHxN[..., : m.nope_dim])
    adapter = adapter_of(weights, "kv_b_proj", h_BxLxD.dtype)
    if adapter is not None:  # its two factors move over as the weight does, one behind the other
        # [B, ...] of several adapters, each row's own; of one adapter [1, ...]
        a_BxCxr, b_Bxrxo = (x[None] if products.rows is None else x[products.rows] for x in adapter)
        b_BxrxHxN = products.gain * b_Bxrxo.reshape(*b_Bxrxo.shape[:2], cfg.n_heads, -1)
        low = _by_row("blhn,brhn->blhr", q_nope, b_BxrxHxN[..., : m.nope_dim])
        q_latent = q_latent + _by_row("blhr,bcr->blhc", low, a_BxCxr)
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    k = jnp.concatenate([latent_BxLxC[:, :, None], k_rope_BxLx1xR], axis=-1)
    o_BxLxHxC = attend(layer, q, k, None, cfg.scores(kind))
    o_BxLxHxV = jnp.einsum("blhc,chv->blhv", o_BxLxHxC, up_CxHxN[..., m.nope_dim :])
    if adapter is not None:
        low = _by_row("blhc,bcr->blhr", o_BxLxHxC, a_BxCxr)
        o_BxLxHxV = o_BxLxHxV + _by_row("blhr,brhv->blhv", low, b_BxrxHxN[..., m.nope_dim :])
    return o_BxLxHxV


def _by_row(spec: str, x: jax.Array, factor: jax.Array) -> jax.Array:
    """einsum with the factor of each row b, or with the one factor [1, ...] of all rows."""
    if len(factor) == 1:
        spec, factor = spec.replace(",b", ","), factor[0]
    return jnp.einsum(spec, x, factor)


def latent_parts(
    cfg: ModelConfig, weights: Weights, h_BxLxD: jax.Array, rotary: tuple[jax.Array, jax.Array], products: Products
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(queries [B, L, H, nope_dim], rotated [B, L, H, rope_dim], latents [B, L, kv_rank], key [B, L, 1, rope_dim])."""
    m, d = cfg.mla, cfg.d_model
    if m.q_rank:
        low = rms_norm(products(weights, h_BxLxD, "q_a_proj"), weights["q_a_norm"], LATENT_EPS)
        q = products(weights, low, "q_b_proj")
    else:
        q = products(weights, h_BxLxD, "q_proj")
    q = q.reshape(*q.shape[:2], cfg.n_heads, cfg.head_dim)
    latent, key = jnp.split(products(weights, h_BxLxD, "kv_a_proj"), [m.kv_rank], axis=-1)
    latent = rms_norm(latent, weights["kv_a_norm"], LATENT_EPS)
    if m.scaled:
        q, latent = q * math.sqrt(d / m.q_rank), latent * math.sqrt(d / m.kv_rank)
    # Pairs (x0, x1), (x2, x3), ... -> x0, x2, ..., x1, x3, ..., the order that `_rotate` takes
    q_rope, key = (
        _rotate(jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape), *rotary)
        for x in (q[..., m.nope_dim :], key[:, :, None])
    )
    return q[..., : m.nope_dim], q_rope, latent, key


# ----------------------------------------------------------------------- rotary


def _rotate(x_BxLxHxD, cos, sin):
    """Rotate the two halves of each head against each other (the Hugging Face convention).

    Written with the halves swapped by a roll: a join of two halves is not vectorised on CPUs, at four times the cost.
    """
    x = x_BxLxHxD.astype(jnp.float32)
    return (x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin).astype(x_BxLxHxD.dtype)
