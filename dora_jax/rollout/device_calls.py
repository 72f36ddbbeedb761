"""Stage 2, device side: the compiled calls of one engine, and the functions that they trace.

Consumes one version's params (serving layout) and an i32 control array a call; produces one small i32 result array.
kv_xla.py and kv_pallas.py say how KV lies in pages and how a call reads and writes it: `rollout.attention` chooses
between them, and both have the same methods. device.py owns the arrays.
Laws: every call donates the pool and the state; a row reads and writes only the pages that it was given; a shape is
compiled once, by `warmup`.

Stage 2, device side: the adapters of several versions beside one another, as the calls of one engine take them.

Consumes published adapters (models/lora.py) in the layout of `one`; produces one tree whose leaves have a leading axis
of places. A place is rewritten in place, so a version is loaded without a new program and without a second copy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, expert_parallel, lora, moe, sharding
from dora_jax.models.logits import policy_logits
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.models.routes import RouteShape
from dora_jax.ops import attention
from dora_jax.rollout import forward, quantize, sample
from dora_jax.rollout.kv_pallas import Paged
from dora_jax.rollout.kv_states import WithStates, states_spec
from dora_jax.rollout.kv_xla import Gathered
from dora_jax.rollout.shapes import Shapes, kv_layout, shapes_of


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterStack:
    """Shapes and shardings of the stacked adapters, and the call that writes to them. The object holds no array."""

    one: Any  # shardings of a published adapter
    abstract: Any  # of `shapes.adapters` of them, with shardings

    @classmethod
    def of(cls, cfg: decoder.ModelConfig, section: Lora, shapes: Shapes, mesh: Mesh, dtype: Any) -> AdapterStack:
        where = functools.partial(lora.specs, cfg, section, mesh, shapes.layout, whole_experts=shapes.whole_experts)
        laid_out = functools.partial(decoder.serving_layout, layout=shapes.layout)
        several = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct((shapes.adapters, *x.shape), x.dtype, sharding=s),
            jax.eval_shape(laid_out, lora.abstract(cfg, section, dtype)),
            where(several=True),
        )
        return cls(where(), several)

    def opened(self, formats: Any) -> tuple[Any, Any]:
        """(jitted: (adapters, one, its place) -> the adapters with it, in the same memory; adapters that change
        nothing), in these formats."""

        def write(several: Any, one: Any, place: jax.Array) -> Any:
            return jax.tree.map(lambda many, x: many.at[place].set(x.astype(many.dtype)), several, one)

        put = jax.jit(write, donate_argnums=0, out_shardings=formats)
        nothing = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.abstract)
        return put, put(_zeros(self.abstract, formats), _zeros(nothing, self.one), jnp.int32(0))


_COMPILES = threading.Lock()
CHOOSERS = ("tpu",)  # platforms whose calls choose how the weights lie; else XLA may turn them round in every call


class Calls:
    """The compiled calls of one engine on one mesh, and how their arrays are laid out. Owns no array. An AOT check
    compiles the same for devices that are not here."""

    def __init__(
        self,
        cfg: decoder.ModelConfig,
        section: RolloutSection,
        mesh: Mesh,
        *,
        seed: int,
        eos_ids: tuple[int, ...],
        vocab_limit: int,
        dtype,
        routes: RouteShape | None = None,
        lora: Lora = OFF,
    ):
        """routes: what the routers' choices look like, where decode and prefill return them; None: they do not. lora:
        of the adapters, where versions are adapters: the calls take (base weights, all adapters)."""
        shapes = shapes_of(section, lora.on, cfg.local_window, cfg.linear_layers > 0)
        temperature = section.temperature
        self.kv, self.vocab = kv_layout(cfg), cfg.vocab_size
        attention.check_platform(
            shapes.attention, mesh.devices.flat[0].platform, latent=self.kv.rank > 0, sinks=cfg.sinks
        )
        self.shapes = shapes
        mesh = sharding.serving_mesh(cfg, mesh, mesh.shape["tensor"] if shapes.whole_experts else 1)
        kv: Any = Paged(self.kv, shapes, dtype, mesh) if shapes.paged else Gathered(self.kv, shapes, dtype)
        kv = WithStates(kv, cfg, shapes, dtype) if shapes.states else kv
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.pages_sharding = NamedSharding(mesh, kv.pages_spec)
        self.abstract_pool, self.abstract_state = jax.eval_shape(lambda: forward.empty(kv, shapes))
        where: Any = NamedSharding(mesh, kv.pool_spec)
        if self.kv.rank and shapes.kv and shapes.paged and mesh.devices.flat[0].platform == "tpu":
            # of latents in 8 bits, declared: else XLA turns all of it round before a step writes its rows, and back
            where = Format(Layout((0, 1, 2), ((8, 128), (4, 1))), where)
        self.pool_sharding = jax.tree.map(lambda _: where, self.abstract_pool)
        if shapes.states:
            heads = NamedSharding(mesh, states_spec(sharding.serving_table(mesh)["heads"]))
            self.pool_sharding |= {"states": dict.fromkeys(self.abstract_pool["states"], heads)}
        logits = functools.partial(policy_logits, cfg, vocab_limit=vocab_limit, temperature=temperature or 1.0)
        cuts = {name: getattr(section, name) for name in ("top_k", "top_p", "min_p", "keep_set")}
        draw = functools.partial(sample.draw, greedy=temperature == 0, **cuts)
        limits: dict[str, Any] = {"min_new_tokens": section.min_new_tokens, "max_repeats": section.max_repeats}
        compute = moe.scan  # of a dense model, which has no experts
        if cfg.experts:
            compute = expert_parallel.serving(shapes.expert_matmul, mesh, whole=shapes.whole_experts)
        computed = forward.Forward(
            cfg=cfg,
            shapes=shapes,
            kv=kv,
            compute=compute,
            logits=logits,
            draw=draw,
            own=functools.partial(sample.OwnSampling, temperature=temperature or 1.0, stop_ids=eos_ids),
            limits=functools.partial(sample.DrawLimits, stop_ids=eos_ids, **limits) if any(limits.values()) else None,
            key=functools.partial(sample.sample_key, seed),
            stop=functools.partial(forward.is_stop, eos_ids=eos_ids),
            dtype=dtype,
            routes=routes,
            gain=lora.gain if lora.on else 1.0,
            shards=mesh.size,
        )
        self.rungs = dict[tuple[int, int], jax.stages.Compiled]()  # of a ladder: decode calls by (rows, blocks)
        self._platform = mesh.devices.flat[0].platform
        self._lay_out_weights(cfg, mesh, section.weights, dtype, lora)
        self._jit(computed, kv, section.compiler_options)

    def _lay_out_weights(self, cfg: decoder.ModelConfig, mesh: Mesh, weights: str, dtype: Any, lora: Lora) -> None:
        """How a version's weights come, and how the calls take them."""
        shapes = self.shapes
        bits = quantize.WEIGHTS[weights]
        turns = weights in quantize.OF_CPU and not shapes.paged and self._platform == "cpu"
        self._converts = turns or bits is not None
        published = jax.eval_shape(
            functools.partial(decoder.serving_layout, layout=shapes.layout), decoder.abstract_params(cfg, dtype)
        )
        self.base_shardings = sharding.param_specs(cfg, mesh, shapes.layout, whole_experts=shapes.whole_experts)
        self._devices = mesh.size
        # a CPU keeps them apart: joined, one row of a 135M model is 9 % quicker, and 8 rows 13 % slower
        self._grouped = quantize.grouped if shapes.paged else lambda params, one=tuple: params
        narrowed = functools.partial(quantize.turned if turns else quantize.stored, dtype=bits)
        join = functools.partial(quantize.joined, devices=mesh.size)
        self._stored = lambda params: narrowed(self._grouped(params, one=join))
        placed = self._grouped(self.base_shardings, one=operator.itemgetter(0))
        if self._converts:
            placed = quantize.turned_specs(placed, bits) if turns else quantize.specs(placed)
        self.abstract_params: Any = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(self._stored, published),
            placed,
        )
        self.adapters = AdapterStack.of(cfg, lora, shapes, mesh, dtype) if shapes.adapters else None
        if self.adapters:
            self.abstract_params = self.abstract_params, self.adapters.abstract
        self.param_shardings = self.adapters.one if self.adapters else self.base_shardings  # as versions are published
        self.chooses = shapes.paged and self._platform in CHOOSERS

    def _jit(self, computed: forward.Forward, kv, compiler_options: dict[str, Any] | None) -> None:
        pool, rep = self.pool_sharding, self.replicated
        jit = functools.partial(decoder.jitted, dtype=computed.dtype, compiler_options=compiler_options or None)
        self.empty = jax.jit(lambda: forward.empty(kv, self.shapes), out_shardings=(pool, rep))
        how = dict(donate_argnums=(1, 2), out_shardings=(pool, rep, rep, rep, rep))
        if self.chooses:
            weights_in = jax.tree.map(lambda x: Format(Layout.AUTO, x.sharding), self.abstract_params)
            decode = functools.partial(computed.decode, blocks=self.shapes.decode_buckets[0])  # the only one
            self.decode = jit(decode, in_shardings=(weights_in, pool, rep, rep, rep, rep), **how)
        else:
            self.decode = jit(computed.decode, static_argnames="blocks", **how)
        self.narrow = jit(computed.decode, static_argnames="blocks", **how)  # takes the weights as they lie
        self.prefill = jit(computed.prefill, static_argnames="blocks", donate_argnums=1, out_shardings=(pool, rep))
        self.verify = jit(computed.verify, static_argnames="blocks", donate_argnums=1, out_shardings=(pool, rep, rep))
        self.read = jit(kv.read, out_shardings=self.pages_sharding)
        self.write = jit(kv.write, donate_argnums=0, out_shardings=pool)
        if self.shapes.states:
            self.read_state = jit(kv.read_state, out_shardings=pool["states"])
            self.write_state = jit(kv.write_state, donate_argnums=0, out_shardings=pool)

    @functools.cached_property
    def decode_chosen(self) -> Any:
        """The compiled decode call, which has chosen how its weights lie."""
        call, arguments, static = self._decode_program(self.shapes.decode_buckets[0], self.shapes.rows)
        return call.trace(*arguments, **static).lower(lowering_platforms=(self._platform,)).compile()

    @functools.cached_property
    def param_formats(self) -> Any:
        """How `stored` weights lie on the devices: as the decode call likes them best, where it may choose."""
        if not self.chooses:
            return jax.tree.map(lambda x: x.sharding, self.abstract_params)
        return self.decode_chosen.input_formats[0][0]

    def stored(self, params: Any) -> Any:
        """Weights in the layout of `base_shardings`, as the calls take them; what lies right already is not copied."""
        like, formats = self.abstract_params, self.param_formats
        if self.adapters:
            like, formats = like[0], formats[0]
        if self._converts:
            return jax.jit(self._stored, out_shardings=formats)(params)
        return jax.tree.map(self._laid_out, like, formats, self._grouped(params))

    def _laid_out(self, like: jax.ShapeDtypeStruct, format: Any, x: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
        """x: a weight, or those that are joined."""
        if isinstance(x, jax.Array) and (not self.chooses or (x.dtype == like.dtype and x.format == format)):
            return x
        return _converted(self._devices, like.dtype, format)(x)

    def zeros(self) -> Any:
        """`stored` weights that are nothing."""
        return _zeros(self.abstract_params, self.param_formats)

    def programs(self) -> dict[str, tuple[Any, tuple, dict[str, int]]]:
        """What `Device.warmup` compiles, by name: (jitted call, abstract arguments, static arguments).

        Where weights lie as the decode call likes them, that call is compiled here already: see `decode_chosen`.
        """
        s, rep = self.shapes, self.replicated
        params = self.abstract_params
        if self.chooses:
            params = jax.tree.map(_placed, params, self.param_formats)
        pool = jax.tree.map(_placed, self.abstract_pool, self.pool_sharding)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rep)
        found = {f"decode {blocks}": self._decode_program(blocks, s.rows) for blocks in s.first_buckets}
        for blocks in s.prefill_buckets:
            control = ints(*s.prefill_control(blocks))
            found[f"prefill {blocks}"] = self.prefill, (params, pool, control), {"blocks": blocks}
        for rows, blocks in itertools.product(() if s.ladder else s.rungs, s.decode_buckets):
            found[f"narrow {rows} {blocks}"] = self._decode_program(blocks, rows)
        for blocks in s.decode_buckets if s.drafts else ():
            control = ints(*s.verify_control(blocks))
            found[f"verify {blocks}"] = self.verify, (params, pool, control), {"blocks": blocks}
        for size in sorted({s.copy_pages, s.alone_pages}):
            ids = ints(s.groups, size)
            pages = [_placed(x, self.pages_sharding) for x in jax.eval_shape(self.read, pool, ids)]
            found[f"read {size}"] = self.read, (pool, ids), {}
            found[f"write {size}"] = self.write, (pool, ids, *pages), {}
        if s.states:
            state = jax.tree.map(_placed, jax.eval_shape(self.read_state, pool, ints()), self.pool_sharding["states"])
            found["read state"] = self.read_state, (pool, ints()), {}
            found["write state"] = self.write_state, (pool, ints(), state), {}
        return found

    def begin_rung(self, rows: int, blocks: int) -> Future[jax.stages.Compiled]:
        """The decode call of so many rows, which a thread compiles: one at a time in this process. It is no daemon: a
        compilation that loses its interpreter aborts the process."""
        call, arguments, static = self._decode_program(blocks, rows)
        program = Future[jax.stages.Compiled]()

        def compile() -> None:
            try:
                with _COMPILES:
                    if not threading.main_thread().is_alive():
                        return  # the process ends, and waits for this thread alone
                    traced = call.trace(*arguments, **static)
                    program.set_result(traced.lower(lowering_platforms=(self._platform,)).compile())
            except BaseException as error:  # raised where the result is taken
                program.set_exception(error)

        threading.Thread(target=compile, name="ladder", daemon=False).start()
        return program

    def _decode_program(self, blocks: int, rows: int) -> tuple[Any, tuple, dict[str, int]]:
        """The widest call may choose how its weights lie; a narrower one takes them as they lie."""
        s, rep, wide = self.shapes, self.replicated, rows == self.shapes.rows
        pool, state = jax.tree.map(_placed, self.abstract_pool, self.pool_sharding), _placed(self.abstract_state, rep)
        params = self.abstract_params
        if self.chooses and not wide:
            params = jax.tree.map(_placed, params, self.param_formats)
        ints = [
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rep)
            for shape in (s.decode_control(blocks, rows), s.decode_options(rows), s.decode_masks(self.vocab, rows))
        ]
        arguments = params, pool, state, *ints
        return self.decode if wide else self.narrow, arguments, {} if wide and self.chooses else {"blocks": blocks}

    def compiled(self) -> int:
        """How many shapes have been compiled so far."""
        calls: tuple[Any, ...] = self.decode, self.narrow, self.verify, self.prefill, self.read, self.write
        calls += (self.read_state, self.write_state) if self.shapes.states else ()
        return sum(call._cache_size() for call in calls) + ("decode_chosen" in self.__dict__)


def _zeros(abstract: Any, formats: Any) -> Any:
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract), out_shardings=formats)()


@functools.cache
def _converted(devices: int, dtype: np.dtype, format: Any) -> Callable[..., jax.Array]:
    """One function for all tensors and versions: a new one would be compiled again for each of them."""

    def one(x: jax.Array | tuple[jax.Array, ...]) -> jax.Array:
        return (quantize.joined(x, devices) if isinstance(x, tuple) else x).astype(dtype)

    return jax.jit(one, out_shardings=format)


def _placed(x: Any, sharding: NamedSharding | Format) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
