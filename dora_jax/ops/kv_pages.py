"""The pages of a KV pool as the kernels read them: how wide a head is there, and which shapes belong together."""

from __future__ import annotations

from jax.experimental import pallas as pl

LANES = 128  # the TPU's kernels take head sizes that are a multiple of it


def lanes(impl: str, head_dim: int) -> int:
    """The width of a head in pages that the kernel reads."""
    return pl.next_power_of_2(max(16, head_dim)) if impl == "gpu" else -(-head_dim // LANES) * LANES


def check_pages(q_SxLxHxD, kv_pages_NxPxCxD, kv_lens_S, tables_SxM) -> None:
    """Raises ValueError where queries, pages, lengths and tables do not belong together."""
    (s, _, heads, d), (_, _, kv, kv_d) = q_SxLxHxD.shape, kv_pages_NxPxCxD.shape
    if kv % 2 or d != kv_d or heads % (kv // 2):
        raise ValueError(f"queries of {heads} heads of {d} do not fit pages of {kv} K and V heads of {kv_d}")
    if kv_lens_S.shape != (s,) or tables_SxM.shape[0] != s:
        raise ValueError(f"{s} sequences have lengths {kv_lens_S.shape} and tables {tables_SxM.shape}")
