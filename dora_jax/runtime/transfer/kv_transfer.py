"""Running samples between processes: the tokens of a sample over the control plane, its KV pages over the wire.

    sender    offer(wire, key, in_flight, layout) -> KVOffer      travels over the control plane
    receiver  fetch(wire, offered, layout) -> InFlightSample  is what `Engine.import_` takes
    sender    release(key)                                 once the receiver has confirmed that it has them, or never
    will

Each process of an instance offers its heads to the process of the same number, which holds the same heads.
Consumes and produces `rollout.migrate.InFlightSample`. Laws: pages arrive bit-equal, or not at all: another version,
other heads or another dtype is refused before anything is taken; what layers with a window hold no more does not
travel; a sample without pages needs no wire.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from dora_jax.rollout.migrate import InFlightSample, with_pages, without_pages
from dora_jax.rollout.shapes import KVLayout
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.slices import shard_of
from dora_jax.runtime.transfer.transfer_manifest import Key, KVOffer, Manifest, Shard, WireError, words


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """The KV pages of one process of an engine."""

    layers: int
    heads: int  # KV heads that this process holds
    head_dim: int
    dtype: str
    latent: bool = False  # pages are K alone: the values are a part of the keys
    second: tuple[int, int, int] = (0, 0, 0)  # layers, heads and head_dim of rows of another shape; 0: there are none
    windows: tuple[int, ...] = ()  # of each layer, those of `second` last; 0: it attends in full
    # (name, shape, dtype) of each array of a recurrent state; (): the model has none
    states: tuple[tuple[str, tuple[int, ...], str], ...] = ()


CODEC = Codec(InFlightSample, Key, Shard, Manifest, KVOffer)


def layout_of(
    pages: Mapping[str, np.ndarray], kv: KVLayout | None = None, state: Mapping[str, np.ndarray] | None = None
) -> PageShape:
    """The layout of pages by their names, as InFlightSample.pages has them, and of a recurrent state. kv: of the
    engine; None: what is behind windows travels too."""
    layers, _, heads, dim, _ = pages["k"].shape
    windows = tuple(kv.windows[i] for row in range(len(kv.rows)) for i in kv.layers_of(row)) if kv else ()
    shape = PageShape(
        layers=layers, heads=heads, head_dim=dim, dtype=pages["k"].dtype.name, latent="v" not in pages, windows=windows,
        states=tuple((name, x.shape, x.dtype.name) for name, x in (state or {}).items()),
    )  # fmt: skip
    if "k2" not in pages:
        return shape
    layers, _, heads, dim, _ = pages["k2"].shape
    return dataclasses.replace(shape, second=(layers, heads, dim))


def offer(wire: Wire, key: Key, in_flight: InFlightSample, layout: PageShape | None = None) -> KVOffer:
    """Offers the sample's pages until `release`; layout: as the receiver's. WireError: the key is of another
    version."""
    if key.version != in_flight.version:
        raise WireError(f"{words(key)} is a sample of version {in_flight.version}")
    manifest, tokens = None, dataclasses.replace(without_pages(in_flight), hole=in_flight.hole)
    if in_flight.pages:
        layout = layout or layout_of(in_flight.pages, state=in_flight.state)
        pieces = {
            shard: pages[_box(shard)]
            for name, pages in in_flight.pages.items()
            for shard in _travelling(name, pages, layout, in_flight.hole, in_flight.page_size)
        }
        pieces |= {shard_of(name, x): x for name, x in (in_flight.state or {}).items()}
        manifest = wire.give(key, pieces)
    return KVOffer(in_flight=tokens, kv_len=in_flight.kv_len, page_size=in_flight.page_size, manifest=manifest)


def fetch(wire: Wire, offered: KVOffer, key: Key, layout: PageShape, timeout_s: float | None = None) -> InFlightSample:
    """The sample with its pages. `key`: the transfer that this process agreed to, of a version that its engine holds.
    WireError: nothing was taken."""
    if offered.in_flight.version != key.version:
        raise WireError(f"a sample of version {offered.in_flight.version} comes where {words(key)} is expected")
    if offered.manifest is None:
        return offered.in_flight
    tokens = len(offered.in_flight.prompt_ids) + len(offered.in_flight.out_ids)
    if not (offered.page_size > 0 and 0 < offered.kv_len <= tokens):
        raise WireError(
            f"{words(key)}: {offered.kv_len} positions in pages of {offered.page_size} are no KV of {tokens} tokens"
        )
    pages = -(-offered.kv_len // offered.page_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for more, (layers, heads, dim) in (("", (layout.layers, layout.heads, layout.head_dim)), ("2", layout.second)):
        if layers:
            shapes[f"k{more}"] = (layers, pages, heads, dim, offered.page_size)
        if layers and not layout.latent:
            shapes[f"v{more}"] = (layers, pages, heads, offered.page_size, dim)
    like = {name: jax.ShapeDtypeStruct(shape, layout.dtype) for name, shape in shapes.items()}
    hole, arrived = offered.in_flight.hole, {}
    wanted = {name: _travelling(name, x, layout, hole, offered.page_size) for name, x in like.items()}
    states = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in layout.states}
    wanted |= {name: [shard_of(name, x)] for name, x in states.items()}
    shapes, like = shapes | {name: x.shape for name, x in states.items()}, like | states
    got = wire.take(offered.manifest, list(itertools.chain(*wanted.values())), key, timeout_s)
    for name, shards in wanted.items():
        whole = len(shards) == 1 and math.prod(shapes[name]) == got[shards[0]].size
        arrived[name] = got[shards[0]] if whole else np.zeros(shapes[name], like[name].dtype)
        for shard in () if whole else shards:
            arrived[name][_box(shard)] = got[shard]
    in_flight = dataclasses.replace(offered.in_flight, kv_len=offered.kv_len, page_size=offered.page_size)
    state = {name: arrived.pop(name) for name in states}
    return dataclasses.replace(with_pages(in_flight, arrived), state=state or None)


def _travelling(
    name: str, pages: np.ndarray | jax.ShapeDtypeStruct, layout: PageShape, hole: tuple[int, ...], page_size: int
) -> list[Shard]:
    """The boxes of these pages [layers, pages, ...] that travel: all of them, but for those in the sample's hole of
    layers with a window."""
    layers, count, *rest = pages.shape
    windows = layout.windows[layout.layers :] if name.endswith("2") else layout.windows[: layout.layers]
    first = stop = 0
    if len(hole) == 2 and any(windows):
        first, stop = -(-hole[0] // page_size), min((hole[1] - max(layout.windows) + 1) // page_size, count)
    if first >= stop:
        return [shard_of(name, pages)]
    spans = [((0, layers), (0, first)), ((0, layers), (stop, count))]
    spans += [((i, i + 1), (first, stop)) for i, window in enumerate(windows) if not window]
    zeros, ends = (0,) * len(rest), tuple(rest)
    return [shard_of(name, pages, ((a, c, *zeros), (b, d, *ends))) for (a, b), (c, d) in spans if c < d]


def _box(shard: Shard) -> tuple[slice, ...]:
    return tuple(map(slice, shard.start, shard.stop))
