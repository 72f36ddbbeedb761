"""Stage 2, device side: recurrent states beside the pages of a model whose layers are linear attention but for a few.

The pool is {"pages": what kv_xla.py or kv_pallas.py have, "states": {name: [layers, 1 + places, heads, ...]}}:
  "state"   f32 [..., V, key_dim, value_dim], the matrix of each value head
  "conv_q"  in the compute type [..., K, taps - 1, key_dim], the last inputs of the queries' convolution; "conv_k" and
            "conv_v" of keys and values
A copy that leaves or comes has the same names and one place.
Laws: a row reads and writes the place that it was given, and place 0, which is all zeros, is never written; what a row
that has finished, or is padding, leaves is bit-equal to what was there; a place beyond the pool is an error
before any call: JAX would clip it, and take another sample's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dora_jax.models import linear_attention
from dora_jax.models.attention import Attend
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.linear_attention import Ahead, Recurrence, RecurrentState
from dora_jax.rollout.kv_pallas import Paged
from dora_jax.rollout.kv_xla import Gathered
from dora_jax.rollout.shapes import Shapes

CONVOLUTIONS = ("conv_q", "conv_k", "conv_v")
NAMES = ("state", *CONVOLUTIONS)
Pool = dict  # of the two


class WithStates:
    """What device_calls.py asks of a KV pool; see kv_xla.py, which has the same methods."""

    def __init__(self, pages: Gathered | Paged, cfg: ModelConfig, shapes: Shapes, dtype):
        """pages: Gathered or Paged."""
        self.pages, self._cfg, self._shapes, self._dtype = pages, cfg, shapes, dtype
        self.pages_spec, self.pool_spec, self.turns = pages.pages_spec, pages.pool_spec, pages.turns

    def empty(self) -> Pool:
        m = self._cfg.rule
        shapes = {"state": (m.value_heads, m.key_dim, m.value_dim)}
        heads = (m.key_heads, m.key_heads, m.value_heads), (m.key_dim, m.key_dim, m.value_dim)
        shapes |= {name: (n, m.taps - 1, dim) for name, n, dim in zip(CONVOLUTIONS, *heads, strict=True)}
        lead = self._cfg.linear_layers, 1 + self._shapes.states
        types = {"state": jnp.float32}
        states = {name: jnp.zeros((*lead, *own), types.get(name, self._dtype)) for name, own in shapes.items()}
        return {"pages": self.pages.empty(), "states": states}

    def begin(
        self, pool: Pool, pages_GxBxP, window_GxBxW, past_B, source_B, place_B, ahead: int = 0
    ) -> tuple[tuple, Pool]:
        """A row that decodes first begins with a copy of its prompt's state. ahead: positions of a verifying call,
        whose states stay as they are until its `end`."""
        fixed, pages = self.pages.begin(pool["pages"], pages_GxBxP, window_GxBxW, past_B)
        copies = (source_B != place_B).any()

        def copy(layer, states):
            return {name: x.at[layer, place_B].set(x[layer, source_B]) for name, x in states.items()}

        layers = jnp.where(copies, self._cfg.linear_layers, 0)  # in most calls no row needs it
        moving: Pool = {"pages": pages, "states": jax.lax.fori_loop(0, layers, copy, dict(pool["states"]))}
        if ahead:
            m, lead = self._cfg.rule, (self._cfg.linear_layers, len(place_B), ahead)
            sizes = (m.value_heads, m.key_dim), (m.value_heads, m.value_dim), *((m.value_heads, 1),) * 2
            mixed = tuple(jnp.zeros((*lead, width), self._dtype) for width in m.widths)
            moving["ahead"] = place_B, Ahead(mixed, tuple(jnp.zeros((*lead, *size)) for size in sizes))
        return (fixed, place_B), moving

    def attend_step(self, fixed, i, active_B) -> Callable[[Pool], Attend]:
        pages, place_B = fixed
        attend_with = self.pages.attend_step(pages, i, active_B)

        def run(moving: Pool, layer, q, k, v, scores, *sinks, **turn):
            states = moving["states"]
            if not isinstance(scores, Recurrence):
                return attend_with(moving["pages"])(layer, q, k, v, scores, *sinks, **turn)
            old = _read(states, layer, place_B)
            o, new = linear_attention.step(scores, q, k, old, active_B & (place_B > 0))
            _write(states, layer, place_B, new)
            return o

        return functools.partial(functools.partial, run)

    def attend_ahead(self, fixed, moving: Pool, active_B) -> Attend:
        pages, place_B = fixed
        attend, states = self.pages.attend_ahead(pages, moving["pages"], active_B), moving["states"]

        def run(layer, q, k, v, scores, *sinks):
            if not isinstance(scores, Recurrence):
                return attend(layer, q, k, v, scores, *sinks)
            o, positions = linear_attention.ahead(scores, q, k, _read(states, layer, place_B))
            both = zip(moving["ahead"][1], positions, strict=True)
            put = [tuple(x.at[layer].set(y) for x, y in zip(*each, strict=True)) for each in both]
            moving["ahead"] = place_B, Ahead(*put)
            return o

        return run

    def end(self, pool: Pool, moved: Pool, pages_GxBxP, window_GxBxW, past_B, count_B) -> Pool:
        """Take the positions of a verifying call that count into the states."""
        states = moved["states"]
        if "ahead" in moved:
            place_B, of_layers = moved["ahead"]
            real_B = jnp.where(place_B > 0, count_B, 0)

            def keep(layer, states):
                states, positions = dict(states), jax.tree.map(operator.itemgetter(layer), of_layers)
                new = linear_attention.kept(positions, _read(states, layer, place_B), real_B)
                _write(states, layer, place_B, new)
                return states

            states = jax.lax.fori_loop(0, self._cfg.linear_layers, keep, dict(states))
        pages = self.pages.end(pool["pages"], moved["pages"], pages_GxBxP, window_GxBxW, past_B, count_B)
        return {"pages": pages, "states": states}

    def attend_chunk(self, pool: Pool, past_GxRxP, write_GxRxW, start_R, length_R, skipped_R, place_R) -> Attend:
        attend = self.pages.attend_chunk(pool["pages"], past_GxRxP, write_GxRxW, start_R, length_R, skipped_R)
        states, real_R = pool["states"], jnp.where(place_R > 0, length_R, 0)

        def run(layer, q, k, v, scores, *sinks):
            if not isinstance(scores, Recurrence):
                return attend(layer, q, k, v, scores, *sinks)
            held = _read(states, layer, place_R)
            begins_R = start_R + skipped_R == 0  # what lies in its place is a former holder's
            old = jax.tree.map(lambda x: jnp.where(jnp.expand_dims(begins_R, range(1, x.ndim)), 0, x), held)
            o, new = linear_attention.chunk(scores, q, k, old, skipped_R, real_R)
            after = jax.tree.map(
                lambda x, y: jnp.where(jnp.expand_dims(real_R > skipped_R, range(1, x.ndim)), x, y), new, held
            )
            _write(states, layer, place_R, after)
            return o

        return run

    def read(self, pool: Pool, pages_GxM) -> tuple[jax.Array, ...]:
        return self.pages.read(pool["pages"], pages_GxM)

    def write(self, pool: Pool, pages_GxM, *arrays: jax.Array) -> Pool:
        return pool | {"pages": self.pages.write(pool["pages"], pages_GxM, *arrays)}

    def read_state(self, pool: Pool, place) -> dict[str, jax.Array]:
        return {name: jax.lax.dynamic_slice_in_dim(x, place, 1, axis=1) for name, x in pool["states"].items()}

    def write_state(self, pool: Pool, place, state: dict[str, jax.Array]) -> Pool:
        put = jax.lax.dynamic_update_slice_in_dim
        return pool | {"states": {name: put(x, state[name], place, axis=1) for name, x in pool["states"].items()}}


def states_spec(heads) -> PartitionSpec:
    """heads: the mesh axes of query heads."""
    return PartitionSpec(None, None, heads)


# ---------------------------------------------------------------- private


def _read(states: dict[str, jax.Array], layer, place_B: jax.Array) -> RecurrentState:
    before = tuple(jnp.swapaxes(states[name][layer, place_B], 1, 2) for name in CONVOLUTIONS)
    return RecurrentState(states["state"][layer, place_B], tuple(x.reshape(*x.shape[:2], -1) for x in before))


def _write(states: dict[str, jax.Array], layer, place_B: jax.Array, new: RecurrentState) -> None:
    arrays = {"state": new.matrix}
    for name, x in zip(CONVOLUTIONS, new.before, strict=True):
        heads, taps, dim = states[name].shape[2:]
        arrays[name] = jnp.swapaxes(x.reshape(len(x), taps, heads, dim), 1, 2)
    for name, x in arrays.items():
        states[name] = states[name].at[layer, place_B].set(x)
