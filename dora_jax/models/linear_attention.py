"""A layer of linear attention, by the gated delta rule (arXiv 2412.06464): its past is a state of fixed size.

Consumes a layer's weights by name and normed hidden states; produces what the residual stream gets. Queries, keys and
values of each token, and of the `taps - 1` tokens before it, go through a causal convolution and SiLU; queries and keys
have length one then. A value head has a state S [key_dim, value_dim], which a token changes and reads:
  S = exp(g) S;  S = S + k (beta (v - S'k))';  o = S'q      g <= 0: how much of it decays; beta in (0, 1)
Whoever runs the layer keeps the state: `attend(layer, (q, k, v), (g, beta), None, Recurrence) -> o`, with `layer`
counted over the layers that have one. Four of them:
  packed   training: all tokens of rows whose segments have a past of their own
  chunk    prefill: a state, then some more positions of its sample
  step     decode: a state, then one position
  ahead    a verifying call: a state, then some positions, of which `kept` takes in the first ones
Laws: state, decay and the solution of a chunk are f32, for a slow head forgets in bfloat16; a segment's values depend
on its own tokens alone; a position that is not real leaves the state as it was, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dora_jax.models.attention import Products, Spec, Weights, narrowed, rms_norm
from dora_jax.models.families.config import Delta, ModelConfig

CHUNK = 64  # positions that are computed at once: a chunk is solved as one triangular system
L2_EPS = 1e-6  # beside the squared length of queries and keys
ROLES = ("q", "k", "v")
WIDE = ("delta_rate", "delta_bias")  # parameters that every copy keeps in f32, beside the norm's gain
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Recurrence(NamedTuple):
    """What mixes the tokens of a layer, in the place of Scores."""

    sizes: Delta
    taps: tuple[jax.Array, ...]  # of the convolutions of queries, keys and values: [taps, width], the own position last


class RecurrentState(NamedTuple):
    """The past of some rows in one layer."""

    matrix: jax.Array  # f32[B, V, key_dim, value_dim]
    before: tuple[jax.Array, ...]  # of queries, keys and values, the convolution's last inputs [B, taps - 1, width]


class Ahead(NamedTuple):
    """What the next positions of some rows do to a state, until it is known how many of them count. A state for each
    would take as much memory as a pool."""

    mixed: tuple[jax.Array, ...]  # of queries, keys and values, the convolution's inputs [B, L, width]
    changes: tuple[jax.Array, ...]  # f32 of each value head: key, value [B, L, V, ...], decay and beta [B, L, V, 1]


def specs(cfg: ModelConfig, residual: float) -> dict[str, Spec]:
    """Parameters of one layer's linear attention."""
    m, d = cfg.rule, cfg.d_model
    matrices = {f"delta_{x}_proj": Spec((d, n), ("embed", "heads"), d**-0.5) for x, n in zip(ROLES, m.widths)}
    matrices |= {f"delta_{x}_taps": Spec((m.taps, n), ("norm", "heads"), m.taps**-0.5) for x, n in zip(ROLES, m.widths)}
    return matrices | {
        "delta_z_proj": Spec((d, m.widths[2]), ("embed", "heads"), d**-0.5),
        "delta_o_proj": Spec((m.widths[2], d), ("heads", "embed"), residual * m.widths[2] ** -0.5),
        "delta_beta": Spec((d, m.value_heads), ("embed", "heads"), d**-0.5),
        "delta_decay": Spec((d, m.value_heads), ("embed", "heads"), d**-0.5),
        # a fresh head forgets about a twentieth a token, some heads far more and some far less
        "delta_rate": Spec((m.value_heads,), ("heads",), 1.0),
        "delta_bias": Spec((m.value_heads,), ("heads",), None, -3.0),
        "delta_norm": Spec((m.value_dim,), ("norm",), None, 1.0),
    }


def run(
    cfg: ModelConfig, layer, weights: Weights, h_BxLxD: jax.Array, attend: Callable, products: Products
) -> jax.Array:
    """What normed hidden states add to the residual stream."""
    m, rows = cfg.rule, h_BxLxD.shape[:2]
    mixed = [products(weights, h_BxLxD, f"delta_{x}_proj") for x in ROLES]
    if products.looped:  # else XLA splits the heads inside the product, and copies the layer's weights for that
        mixed = list(jax.lax.optimization_barrier(mixed))
    beta_BxLxV, decay_BxLxV = (products(weights, h_BxLxD, x).astype(jnp.float32) for x in ("delta_beta", "delta_decay"))
    rate_V, bias_V = (weights[x].astype(jnp.float32)[None, None] for x in WIDE)
    gates = -jnp.exp(rate_V) * jax.nn.softplus(decay_BxLxV + bias_V), jax.nn.sigmoid(beta_BxLxV)
    how = Recurrence(m, tuple(narrowed(weights[f"delta_{x}_taps"], h_BxLxD.dtype) for x in ROLES))
    o_BxLxVxN = attend(layer, tuple(mixed), gates, None, how)
    z_BxLxVxN = products(weights, h_BxLxD, "delta_z_proj").reshape(o_BxLxVxN.shape).astype(jnp.float32)
    y_BxLxVxN = rms_norm(o_BxLxVxN, weights["delta_norm"], cfg.norm_eps) * jax.nn.silu(z_BxLxVxN)
    return products(weights, y_BxLxVxN.astype(h_BxLxD.dtype).reshape(*rows, -1), "delta_o_proj")


def packed(how: Recurrence, mixed: tuple, gates: tuple, segment_ids_BxL: jax.Array) -> jax.Array:
    """o f32[B, L, V, value_dim] of packed rows, where each segment's first token has no past."""

    @jax.checkpoint  # else the backward pass would hold the matrices of every chunk
    def mix(taps, mixed, gates):
        n = how.sizes.taps - 1
        ids = jnp.pad(segment_ids_BxL, ((0, 0), (n, 0)), constant_values=-1)
        length = segment_ids_BxL.shape[1]
        own = [(ids[:, j : j + length] == segment_ids_BxL)[..., None] for j in range(n + 1)]
        wide = [jnp.pad(x, ((0, 0), (n, 0), (0, 0))) for x in mixed]
        heads = _heads(how.sizes, [_convolved(w, x, own) for w, x in zip(taps, wide, strict=True)])
        b, m = len(segment_ids_BxL), how.sizes
        return _chunks(heads, gates, jnp.zeros((b, m.value_heads, m.key_dim, m.value_dim)), segment_ids_BxL)[0]

    return mix(how.taps, mixed, gates)


def chunk(
    how: Recurrence, mixed: tuple, gates: tuple, state: RecurrentState, skipped_B: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, RecurrentState]:
    """(o, the state behind position `length` - 1) of a state behind position `skipped` - 1: those between are real."""
    n, length = how.sizes.taps - 1, gates[0].shape[1]
    at_BxL, at_BxT = (jnp.arange(size)[None] - skipped_B[:, None] for size in (length, length + n))
    real_BxL = (at_BxL >= 0) & (jnp.arange(length)[None] < length_B[:, None])
    wide, after = [], []
    for before, x in zip(state.before, mixed, strict=True):
        held = jnp.take_along_axis(before.astype(x.dtype), jnp.clip(at_BxT, 0, n - 1)[..., None], axis=1)
        x = jnp.pad(x, ((0, 0), (n, 0), (0, 0)))
        wide.append(jnp.where(((at_BxT >= 0) & (at_BxT < n))[..., None], held, x))
        last_BxT = length_B[:, None] + jnp.arange(n)[None]
        after.append(jnp.take_along_axis(wide[-1], last_BxT[..., None], axis=1).astype(before.dtype))
    heads = _heads(how.sizes, [_convolved(w, x) for w, x in zip(how.taps, wide, strict=True)])
    o, matrix = _chunks(heads, [jnp.where(real_BxL[..., None], x, 0.0) for x in gates], state.matrix)
    return o, _where(real_BxL.any(1), RecurrentState(matrix, tuple(after)), state)


def step(
    how: Recurrence, mixed: tuple, gates: tuple, state: RecurrentState, active_B: jax.Array
) -> tuple[jax.Array, RecurrentState]:
    """(o [B, 1, V, value_dim], the state behind this position), which of a row that is not active stays."""
    wide = [jnp.concatenate([before.astype(x.dtype), x], axis=1) for before, x in zip(state.before, mixed, strict=True)]
    after = tuple(x[:, 1:].astype(before.dtype) for before, x in zip(state.before, wide, strict=True))
    heads = _heads(how.sizes, [_convolved(w, x) for w, x in zip(how.taps, wide, strict=True)])
    (q, k, v), (g, beta) = (x[:, 0] for x in heads), (x[:, 0, :, None] for x in gates)
    matrix = _changed(state.matrix, k, v, g, beta)
    return _dot("bvkn,bvk->bvn", matrix, q)[:, None], _where(active_B, RecurrentState(matrix, after), state)


def ahead(how: Recurrence, mixed: tuple, gates: tuple, state: RecurrentState) -> tuple[jax.Array, Ahead]:
    """(o [B, L, V, value_dim], what `kept` takes) of positions behind a state, each by a step's sums."""
    wide = [jnp.concatenate([before.astype(x.dtype), x], axis=1) for before, x in zip(state.before, mixed, strict=True)]
    q, k, v = _heads(how.sizes, [_convolved(w, x) for w, x in zip(how.taps, wide, strict=True)])
    changes = (k, v, *(x[..., None] for x in gates))

    def one(matrix, now):
        q, *change = now
        matrix = _changed(matrix, *change)
        return matrix, _dot("bvkn,bvk->bvn", matrix, q)

    _, o = jax.lax.scan(one, state.matrix, [jnp.moveaxis(x, 1, 0) for x in (q, *changes)])
    return jnp.moveaxis(o, 0, 1), Ahead(mixed, changes)


def kept(positions: Ahead, state: RecurrentState, count_B: jax.Array) -> RecurrentState:
    """The state behind the first `count` of these positions; that of a row without any stays."""

    def one(matrix, now):
        i, *change = now
        counts_Bx1x1x1 = jnp.expand_dims(i < count_B, (1, 2, 3))
        return jnp.where(counts_Bx1x1x1, _changed(matrix, *change), matrix), None

    each = [jnp.moveaxis(x, 1, 0) for x in positions.changes]
    matrix, _ = jax.lax.scan(one, state.matrix, [jnp.arange(len(each[0])), *each])
    after = []
    for before, x in zip(state.before, positions.mixed, strict=True):
        last_BxT = count_B[:, None] + jnp.arange(before.shape[1])[None]
        wide = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
        after.append(jnp.take_along_axis(wide, last_BxT[..., None], axis=1))
    return RecurrentState(matrix, tuple(after))


# ---------------------------------------------------------------- private


def _where(chosen_B: jax.Array, new: RecurrentState, old: RecurrentState) -> RecurrentState:
    return jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(chosen_B, range(1, x.ndim)), x, y), new, old)


def _changed(matrix: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
    """What one position makes of the matrices [B, V, key_dim, value_dim]."""
    matrix = jnp.exp(g)[..., None] * matrix
    return matrix + _dot("bvk,bvn->bvkn", k, beta * (v - _dot("bvkn,bvk->bvn", matrix, k)))


def _convolved(taps_TxW: jax.Array, x_BxLxW: jax.Array, own: list | None = None) -> jax.Array:
    """SiLU of the causal convolution f32[B, L - T + 1, W]; own: of each tap, whether it sees a token's own segment."""
    length = x_BxLxW.shape[1] - len(taps_TxW) + 1
    y = jnp.float32(0)
    for j, tap in enumerate(taps_TxW.astype(jnp.float32)):
        seen = x_BxLxW[:, j : j + length].astype(jnp.float32)
        y = y + tap[None, None] * (seen if own is None else jnp.where(own[j], seen, 0.0))
    return jax.nn.silu(y)


def _heads(m: Delta, mixed: list[jax.Array]) -> list[jax.Array]:
    """Queries and keys [B, L, V, key_dim] of length one, the former scaled, and values, of each value head."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x, heads in zip(mixed, (m.key_heads, m.key_heads, m.value_heads)))
    q, k = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + L2_EPS) for x in (q, k))
    q, k = (jnp.repeat(x, m.value_heads // m.key_heads, axis=2) for x in (q * m.key_dim**-0.5, k))
    return [q, k, v]


def _solved(below: jax.Array, sides: jax.Array) -> jax.Array:
    """Return x of (1 + below) x = sides, where `below` [..., C, C] has zeros on the diagonal and above it.

    By matrix products alone. jax.scipy.linalg.solve_triangular is a call of LAPACK on a CPU, which waits on a thread of
    XLA's pool for tasks that it gave to the same pool (jaxlib 0.10.0 to 0.10.2): where as many wait at once as the pool
    has threads, none of them returns.
    """
    product = functools.partial(_dot, "...ij,...jk->...ik")
    at, half = jnp.arange(below.shape[-1]), 1
    inverse = jnp.broadcast_to(jnp.eye(len(at)), below.shape)  # of blocks on the diagonal, which double in size
    while half < len(at):
        block = at // half
        between = (block[:, None] > block[None]) & (block[:, None] // 2 == block[None] // 2)
        corners = jnp.where(jnp.broadcast_to(between, below.shape), below, 0.0)
        inverse, half = inverse - product(inverse, product(corners, inverse)), 2 * half
    inverse = jax.lax.stop_gradient(inverse)  # the solution is differentiated, not how it is found
    return jax.lax.custom_linear_solve(
        lambda x: x + product(below, x), sides, lambda _, y: product(inverse, y), lambda _, y: product(inverse.mT, y)
    )


def _chunks(heads, gates, matrix, segment_ids_BxL=None) -> tuple[jax.Array, jax.Array]:
    """(o [B, L, V, N], the state) of a state and some more positions: the rule inside a chunk is a triangular system,
    between chunks a scan. segment_ids: only tokens of one see each other, the first one's see the state; None: all."""
    (q, k, v), (g, beta) = heads, gates
    b, length, n = g.shape
    size = min(CHUNK, length)
    more = -length % size

    def cut(x):
        """[B, L, V, ...] -> [chunks, B, V, C, ...]; what is added at the end changes no state."""
        x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g[..., None], beta[..., None]))
    decay = jnp.cumsum(g, axis=3)  # [chunks, B, V, C, 1]
    earlier = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    first = last = jnp.ones((1, 1, 1, 1, 1))
    if segment_ids_BxL is not None:
        ids = jnp.pad(segment_ids_BxL, ((0, 0), (0, more)), mode="edge").reshape(b, -1, size).swapaxes(0, 1)
        past = jnp.concatenate([ids[:1, :, 0], ids[:-1, :, -1]])  # the segment of the state that a chunk begins with
        earlier = earlier & (ids[..., :, None] == ids[..., None, :])[:, :, None]
        first, last = ((ids == x[..., None]).astype(jnp.float32)[:, :, None, :, None] for x in (past, ids[..., -1]))
    # masked before the exponential, which would overflow above the diagonal
    fades = jnp.exp(jnp.where(earlier, decay - decay.swapaxes(-1, -2), -jnp.inf))
    below = jnp.tril(_dot("...ik,...jk->...ij", beta * k, k) * fades, -1)
    sides = jnp.concatenate([beta * v, beta * k * jnp.exp(decay) * first], axis=-1)
    own, of_state = jnp.split(_solved(below, sides), [v.shape[-1]], axis=-1)
    seen = _dot("...ik,...jk->...ij", q, k) * fades
    whole = decay[..., -1:, :]
    ends = k * jnp.exp(whole - decay) * last, jnp.broadcast_to(jnp.exp(whole) * first[..., -1:, :], whole.shape)
    each = own, of_state, q * jnp.exp(decay) * first, seen, *ends

    def one(matrix, now):
        own, of_state, q, seen, k, stays = now
        new = own - _dot("bvck,bvkn->bvcn", of_state, matrix)
        o = _dot("bvck,bvkn->bvcn", q, matrix) + _dot("bvij,bvjn->bvin", seen, new)
        return stays * matrix + _dot("bvck,bvcn->bvkn", k, new), o

    matrix, o = jax.lax.scan(one, matrix, each)
    o = jnp.moveaxis(o, (0, 3), (1, 2)).reshape(b, -1, n, o.shape[-1])
    return o[:, :length], matrix
