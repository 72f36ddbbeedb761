"""Stage 2: the record that carries one running sample between engines, or to host memory and back.

Consumes nothing but host arrays; produces nothing but host arrays: the device side is in device.py.
Laws: a parcel belongs to one version; its pages arrive bit-equal; a parcel without pages (a sample of a lost
instance) is prefilled again from its tokens, which costs time and, across shapes, the last bits of its log-probs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dora_jax.types import SampleId, Span, Version

HEADS = 2  # the axis of K in pages


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightSample:
    """One unfinished sample on its way. The sequence is prompt + out; position i has KV where i < kv_len."""

    id: SampleId
    version: Version
    prompt_ids: np.ndarray  # i32[T]
    out_ids: np.ndarray  # i32[U] sampled so far
    logprobs: np.ndarray  # f32[U]
    max_new_tokens: int
    spans: tuple[Span, ...] = ()  # of out_ids by earlier versions; what follows them is of `version`
    kv_len: int = 0  # positions that the pages cover; 0: to be prefilled again
    page_size: int = 0
    k_pages: np.ndarray | None = None  # [layers, pages, K, D, page_size]
    v_pages: np.ndarray | None = None  # [layers, pages, K, page_size, D]
    kept: np.ndarray | None = None  # i32[U, top_k]: keep sets so far, where the engine sends them along

    @property
    def kv_bytes(self) -> int:
        return 0 if self.k_pages is None else self.k_pages.nbytes + self.v_pages.nbytes

    @property
    def n_pages(self) -> int:
        return 0 if self.k_pages is None else self.k_pages.shape[1]


def without_pages(parcel: InFlightSample) -> InFlightSample:
    """The tokens alone: what a journal keeps."""
    return dataclasses.replace(parcel, kv_len=0, page_size=0, k_pages=None, v_pages=None)


def joined(parts: Sequence[InFlightSample]) -> InFlightSample:
    """One sample whose processes each hold the pages of some of its heads, in the order of the processes; of those that
    hold the same ones, one part."""
    if parts[0].k_pages is None:
        return parts[0]
    k, v = (np.concatenate([getattr(part, name) for part in parts], axis=HEADS) for name in ("k_pages", "v_pages"))
    return dataclasses.replace(parts[0], k_pages=k, v_pages=v)


def parted(parcel: InFlightSample, parts: int) -> list[InFlightSample]:
    """A part for each of so many processes, of which neighbours hold the same head where there are fewer heads; the
    pages are views."""
    alike = holders_alike(parts, parcel.k_pages.shape[HEADS])
    k, v = (np.split(pages, parts // alike, axis=HEADS) for pages in (parcel.k_pages, parcel.v_pages))
    return [dataclasses.replace(parcel, k_pages=k[i // alike], v_pages=v[i // alike]) for i in range(parts)]


def holders_alike(processes: int, heads: int) -> int:
    """How many processes of an instance hold the same KV heads."""
    return max(processes // heads, 1)


def spans_of(parcel: InFlightSample) -> tuple[Span, ...]:
    """All of out_ids, by version; no span is empty."""
    start = parcel.spans[-1].stop if parcel.spans else 0
    last = (Span(version=parcel.version, start=start, stop=len(parcel.out_ids)),)
    return parcel.spans + (last if start < len(parcel.out_ids) else ())


def retagged(parcel: InFlightSample, version: Version) -> InFlightSample:
    """To go on under other weights (mode `partial`): the KV is of the old ones, so it goes; the tokens stay."""
    if version == parcel.version:
        return parcel
    return dataclasses.replace(without_pages(parcel), version=version, spans=spans_of(parcel))


def repaged(parcel: InFlightSample, page_size: int) -> InFlightSample:
    """The same KV cut into pages of another size."""
    if parcel.k_pages is None or parcel.page_size == page_size:
        return parcel
    k = np.moveaxis(parcel.k_pages, 1, 3)  # [layers, K, D, pages, page_size]
    k = k.reshape(*k.shape[:3], -1)[..., : parcel.kv_len]
    v = np.moveaxis(parcel.v_pages, 1, 2)  # [layers, K, pages, page_size, D]
    v = v.reshape(*v.shape[:2], -1, v.shape[-1])[:, :, : parcel.kv_len]
    pages = -(-parcel.kv_len // page_size)
    pad = pages * page_size - parcel.kv_len
    k = np.pad(k, ((0, 0), (0, 0), (0, 0), (0, pad))).reshape(*k.shape[:3], pages, page_size)
    v = np.pad(v, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(*v.shape[:2], pages, page_size, v.shape[-1])
    return dataclasses.replace(
        parcel,
        page_size=page_size,
        k_pages=np.ascontiguousarray(np.moveaxis(k, 3, 1)),
        v_pages=np.ascontiguousarray(np.moveaxis(v, 2, 1)),
    )
