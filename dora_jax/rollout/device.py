"""Stage 2, device side: the arrays of one engine and their way to and from the host.

Consumes compiled calls (device_calls.py) and host arrays; owns the KV pool and the state of the slots.
Laws: every call donates the pool and the state, so calls run in the order they are made; only `np.asarray` of a result
waits for the device.

Stage 2, device side: the versions that one engine holds.

Consumes published versions in the layout of `Calls.param_shardings`; produces what a call takes as its weights.
Laws: a version's weights do not change from `load` to `drop`; where versions are adapters, base weights are there once,
and a version lies at the same place of every engine, unless another version still holds that place.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dora_jax.rollout.device_calls import Calls
from dora_jax.rollout.drafts import CallCosts
from dora_jax.rollout.pages import places
from dora_jax.rollout.shapes import (
    FRESH,
    GROUP,
    POSITION,
    PREFILL_STATE,
    REMAINING,
    SLOT,
    SOURCE,
    STATE,
    Option,
    Shapes,
)
from dora_jax.types import Version

TIMED, TIMED_RUNG = 8, 2  # calls of which the quickest counts; of a ladder, whose samples wait meanwhile
HEADS_AXIS = 2  # of a copy of pages: [layers, pages, K, ...]


class Device:
    """Pool and per-slot state. Methods launch; only `np.asarray` of a result waits."""

    def __init__(self, calls: Calls, shapes: Shapes):
        self.shapes = shapes
        self.compiled = calls.compiled
        self._calls, self._one = calls, calls.replicated.mesh.size == 1
        self.pool, self.state = calls.empty()
        self._nothing: dict[int, tuple[jax.Array, jax.Array]] = {}  # options and masks that say nothing, by rows
        self._rung: tuple[tuple[int, int], Future[jax.stages.Compiled]] | None = None  # that is being compiled

    def free(self) -> None:
        """Frees the memory of the pool, none of whose pages is in use; the next call makes another."""
        if self.pool is not None:
            jax.tree.map(lambda x: x.delete(), (self.pool, self.state))
            self.pool = self.state = None

    def prefill(self, params: Any, control: np.ndarray, blocks: int) -> jax.Array | None:
        """Routes [prefill_rows, chunk, M, k], where they are asked for."""
        if self.shapes.states:
            self._check_places(control[:, PREFILL_STATE])
        self.pool, routes = self._calls.prefill(params, self._whole_pool(), self._argument(control), blocks=blocks)
        return _on_its_way(routes)

    def generate(
        self,
        params: Any,
        control: np.ndarray,
        blocks: int,
        options: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """By the call that has the rows of the control array. options: Shapes.decode_options; None: every row
        samples as the run does. masks: Shapes.decode_masks; None: any token may be drawn.

        (i32[rows, shapes.result]: tokens, log-prob bits, how many of them count, keep sets; routes
        [rows, steps, M, k], where they are asked for; the most likely tokens i32[rows, steps, TOP_COLUMNS], where a
        row requests them)."""
        if self.shapes.states:
            self._check_places(control[:, [STATE, SOURCE]])
        rows = len(control)
        if (call := self._calls.rungs.get((rows, blocks))) is None:
            wide = rows == self.shapes.rows
            call = functools.partial(self._calls.decode if wide else self._calls.narrow, blocks=blocks)
            if wide and self._calls.chooses:
                call = self._calls.decode_chosen
        if (nothing := self._nothing.get(rows)) is None:
            shapes = self.shapes.decode_options(rows), self.shapes.decode_masks(self._calls.vocab, rows)
            zeros = [_put(np.zeros(shape, np.int32), self._calls.replicated) for shape in shapes]
            nothing = self._nothing[rows] = zeros[0], zeros[1]
        own = nothing[0] if options is None else self._argument(options)
        mask = nothing[1] if masks is None else self._argument(masks)
        given = params, self._whole_pool(), self.state, self._argument(control), own, mask
        self.pool, self.state, *fetched = call(*given)
        if options is None or not options[:, Option.TOP_LOGPROBS].any():
            fetched[-1] = None  # zeros, which stay where they are
        return _on_its_way(tuple(fetched))

    def verify(self, params: Any, control: np.ndarray, blocks: int) -> tuple[jax.Array, jax.Array | None, None]:
        """Like `generate`, for drafts."""
        if self.shapes.states:
            self._check_places(control[:, [STATE, SOURCE]])
        given = params, self._whole_pool(), self._argument(control)
        self.pool, result, routes = self._calls.verify(*given, blocks=blocks)
        return _on_its_way((result, routes, None))

    def launch_read(self, pages: list[int]) -> dict[str, jax.Array]:
        """These pages by the names of shapes.py, in the call that copies so many."""
        ids = np.pad(places(pages, self.shapes.groups), ((0, 0), (0, self.shapes.copy_call(len(pages)) - len(pages))))
        found = self._calls.read(self._whole_pool(), _put(ids, self._calls.replicated))
        return dict(zip(self._calls.kv.names, found, strict=True))

    def read_pages(self, pages: list[int]) -> dict[str, np.ndarray]:
        """Host copies, by the names of shapes.py."""
        copy = PagesCopy(self, pages)
        while copy.launch(len(pages)):
            copy.land()
        return copy.arrays

    def write_pages(self, pages: list[int], arrays: dict[str, np.ndarray]) -> None:
        start = 0
        while start < len(pages):
            size = self.shapes.copy_call(len(pages) - start)
            ids = places(pages[start : start + size], self.shapes.groups)
            pieces = [arrays[name][:, start : start + size] for name in self._calls.kv.names]
            if more := size - ids.shape[1]:  # pages of nobody, which the dummy page takes
                ids = np.pad(ids, ((0, 0), (0, more)))
                pieces = [np.pad(x, [(0, more if axis == 1 else 0) for axis in range(x.ndim)]) for x in pieces]
            on_device = [_put(np.ascontiguousarray(x), self._calls.pages_sharding) for x in pieces]
            self.pool = self._calls.write(self._whole_pool(), _put(ids, self._calls.replicated), *on_device)
            start += size

    def launch_state(self, place: int) -> dict[str, jax.Array]:
        """The recurrent state in this place, by the names of kv_states.py, on its way here."""
        self._check_places(place)
        return _on_its_way(
            self._calls.read_state(self._whole_pool(), _put(np.array(place, np.int32), self._calls.replicated))
        )

    def no_state(self) -> dict[str, np.ndarray]:
        """The recurrent state of a sample without a past; empty where the model has none."""
        return fetched(self.launch_state(0)) if self.shapes.states else {}

    def write_state(self, place: int, state: Mapping[str, np.ndarray] | None) -> None:
        """None: the sample has no recurrent state, or it has come already."""
        self._check_places(place)
        if not place or state is None:
            return
        where = self._calls.pool_sharding["states"]
        on_device = {name: _put(np.ascontiguousarray(x), where[name]) for name, x in state.items()}
        at = _put(np.array(place, np.int32), self._calls.replicated)
        self.pool = self._calls.write_state(self._whole_pool(), at, on_device)

    def _check_places(self, places: np.ndarray | int) -> None:
        """RuntimeError: a call would read or write a recurrent state that is not there; JAX would take another."""
        wrong = np.extract((np.asarray(places) < 0) | (np.asarray(places) > self.shapes.states), places)
        if len(wrong):
            raise RuntimeError(f"recurrent state {wrong[0]} is none of the {self.shapes.states} of this engine")

    def warmup(self, params: Any, costs: CallCosts) -> None:
        """Compiles every call by making it once with padding rows only, but for those that a ladder compiles later."""
        s = self.shapes
        for blocks in s.prefill_buckets:
            self.prefill(params, np.zeros(s.prefill_control(blocks), np.int32), blocks)
        for blocks in s.first_buckets:
            for rows in (*(() if s.ladder else s.rungs), s.rows):
                control = np.zeros(s.decode_control(blocks, rows), np.int32)
                control[:, SLOT] = s.slots
                began = time.perf_counter()
                self.generate(params, control, blocks)[0].block_until_ready()
                costs.compile_s[blocks] = time.perf_counter() - began
            if s.drafts:
                self.verify(params, np.zeros(s.verify_control(blocks), np.int32), blocks)[0].block_until_ready()
        for size in (s.copy_pages, s.alone_pages):
            self.write_pages([0] * size, self.read_pages([0] * size))
        if s.states:
            nobodys, at = self.launch_state(0), _put(np.array(0, np.int32), self._calls.replicated)
            self.pool = self._calls.write_state(self._whole_pool(), at, nobodys)

    def measure(self, params: Any, costs: CallCosts) -> None:
        """Fills in the costs that are in use and that the configuration does not give."""
        s = self.shapes
        narrow, verify = s.narrow_rows and not s.narrow_cost, s.drafts and not s.draft_cost
        for blocks in s.first_buckets if narrow or verify or s.ladder else ():
            rungs = s.rungs if narrow else ()
            times = TIMED if narrow or verify else 1  # a ladder learns from it only when to compile a narrower one
            decode_s, *others_s = self._quickest_s(params, blocks, (s.rows, *rungs), bool(verify), times)
            costs.decode_s[blocks] = decode_s
            if verify:
                costs.verify[blocks] = others_s.pop() / decode_s
            for rows, narrow_s in zip(rungs, others_s, strict=True):
                costs.narrow[rows, blocks] = narrow_s / decode_s

    def climb(self, params: Any, costs: CallCosts) -> bool:
        """Compile the call that a ladder lacks most, beside what runs; measure it when it is there, which takes a few
        calls. Returns whether it has been measured now."""
        if self._rung is None and (at := costs.next_rung()) is not None:
            self._rung = at, self._calls.begin_rung(*at)
        if self._rung is None or not self._rung[1].done():
            return False
        (rows, blocks), compiled = self._rung
        self._rung, self._calls.rungs[rows, blocks] = None, compiled.result()
        decode_s, narrow_s = self._quickest_s(params, blocks, (self.shapes.rows, rows), False, TIMED_RUNG)
        costs.climbed(rows, blocks, decode_s, narrow_s)
        return True

    def _quickest_s(self, params: Any, blocks: int, widths: Iterable[int], verify: bool, times: int) -> list[float]:
        """The quickest of so many decode calls of each width, last of the verifying call: their rows take all steps and
        write to the dummy page."""
        s = self.shapes
        calls: list[tuple[Any, tuple[int, int]]] = [(self.generate, s.decode_control(blocks, rows)) for rows in widths]
        calls += [(self.verify, s.verify_control(blocks))] if verify else []
        quickest_s = [math.inf] * len(calls)
        for _ in range(times):
            for i, (call, shape) in enumerate(calls):
                control = np.zeros(shape, np.int32)
                control[:, SLOT], control[:, FRESH], control[:, GROUP] = s.slots, 1, np.arange(len(control))
                control[:, REMAINING], control[:, POSITION] = s.reach, blocks * s.block - s.reach
                began = time.perf_counter()
                call(params, control, blocks)[0].block_until_ready()
                quickest_s[i] = min(quickest_s[i], time.perf_counter() - began)
        return quickest_s

    def _argument(self, x: np.ndarray) -> jax.Array | np.ndarray:
        """What a call takes. One device gets it by the call itself, in a third of the time of a `device_put`."""
        return x if self._one else _put(x, self._calls.replicated)

    def _whole_pool(self) -> Any:
        if self.pool is None:
            self.pool, self.state = self._calls.empty()
        return self.pool


class PagesCopy:
    """Pages on their way to the host, a piece at a time: between `launch` and `land` the device goes on with others.

    arrays: by the names of shapes.py, of which what has landed is there; of several processes each gets the heads
    that it holds.
    """

    def __init__(self, device: Device, pages: list[int]):
        self._device, self._pages = device, pages
        self._launched: dict[str, jax.Array] = {}
        self._start = self._stop = 0  # of the piece that was launched last
        self.more = bool(pages)  # whether pieces follow it
        self.arrays: dict[str, np.ndarray] = {}

    def launch(self, most: int) -> bool:
        """Starts the next piece, of so many pages at most; False where none is left."""
        piece = self._pages[self._stop :][:most]
        piece = piece[: self._device.shapes.copy_call(len(piece))]
        self._start, self._stop = self._stop, self._stop + len(piece)
        self.more = self._stop < len(self._pages)
        self._launched = self._device.launch_read(piece) if piece else {}
        return bool(piece)

    def land(self) -> None:
        for name, piece in fetched(self._launched).items():
            if name not in self.arrays:
                self.arrays[name] = np.empty((piece.shape[0], len(self._pages), *piece.shape[2:]), piece.dtype)
            self.arrays[name][:, self._start : self._stop] = piece[:, : self._stop - self._start]


def fetched(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Copies; of several processes each gets the heads that it holds."""
    copies = {}
    for name, x in arrays.items():
        if x.is_fully_addressable:
            copies[name] = np.asarray(x)
        else:  # what this process holds lies side by side on the axis of heads
            held = {shard.index[HEADS_AXIS].start or 0: shard.data for shard in x.addressable_shards}
            copies[name] = np.concatenate([np.asarray(held[start]) for start in sorted(held)], axis=HEADS_AXIS)
    return copies


def _on_its_way(arrays: Any) -> Any:
    """The arrays of it are being copied to the host."""
    for x in jax.tree.leaves(arrays):
        x.copy_to_host_async()
    return arrays


def _put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array on the devices: of several processes each gives what its own devices get: all of it, or its
    heads."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, x)


class Residents:
    """At most `room` versions: each with weights of its own, or, where versions are adapters, each in a place of a
    stack beside one base, and every call takes base and stack."""

    def __init__(self, calls: Calls, room: int, places: dict[Version, int]):
        """places: of adapters, filled here for the plan that writes a row's place into its call."""
        self._calls, self._room, self._places = calls, room, places
        self._weights: dict[Version, Any] = {}  # None: an adapter
        self._base: Any = None
        self._several: Any = None
        self._write: Any = None

    @property
    def compiled(self) -> int:
        """Programs that put a version where it belongs."""
        return self._write._cache_size() if self._write else 0

    def take_base(self, params: Any) -> None:
        """Base weights, in the layout of `Calls.base_shardings`; once, before the first version. RuntimeError: versions
        are full weights."""
        stack = self._calls.adapters
        if stack is None:
            raise RuntimeError("base weights belong to an engine of adapters (lora.rank)")
        formats = self._calls.param_formats[1]
        self._base = self._calls.stored(params)
        self._write, self._several = stack.opened(formats)

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._weights))

    def load(self, version: Version, params: Any) -> None:
        """RuntimeError: the version is here, there is no room, or the base of an adapter is not here."""
        if version in self._weights:
            raise RuntimeError(f"version {version} is already loaded")
        if len(self._weights) >= self._room:
            raise RuntimeError(
                f"cannot load version {version}: {self._room} residents are held ({', '.join(map(str, self.versions))})"
            )
        if self._calls.adapters is None:
            self._weights[version] = self._calls.stored(params)
            return
        if self._base is None:
            raise RuntimeError(f"cannot load version {version}: it is an adapter, and no base weights are here")
        # the place decides the last bit of a product: every instance takes the same, for samples that move
        wanted = (version % self._room, *range(self._room))
        place = next(i for i in wanted if i not in self._places.values())
        self._several = self._write(self._several, params, jnp.int32(place))
        self._weights[version], self._places[version] = None, place

    def drop(self, version: Version) -> None:
        del self._weights[version]
        self._places.pop(version, None)

    def of(self, version: Version | None) -> Any:
        """What a call of this version takes."""
        if self._calls.adapters:
            return self._base, self._several
        if version is None:
            raise ValueError("a call of several versions needs adapters")
        return self._weights[version]

    def any(self) -> Any:
        """What a call takes that compiles: a version's, or zeros."""
        if self._calls.adapters:
            return self._calls.zeros() if self._base is None else (self._base, self._several)
        return next(iter(self._weights.values())) if self._weights else self._calls.zeros()
