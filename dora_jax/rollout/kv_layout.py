"""Stage 2, pure: what one position leaves in the KV cache, by the kind of attention. No JAX.

  GQA  K and V of every KV head: heads x key_dim and heads x value_dim numbers
  MLA  one latent row that all heads share: key_dim = kv_rank + rope_dim numbers, of which the first `rank` are the value
kv_xla.py and kv_pallas.py hold such rows in pages; a copy of pages on its way to or from the host has one array a name:
  "k"  [layers, pages, heads, key_dim, page_size]
  "v"  [layers, pages, heads, page_size, value_dim], of GQA only
"""

from __future__ import annotations

import dataclasses

from dora_jax.models.families.config import ModelConfig

POSITIONS = {"k": -1, "v": -2}  # the axis of positions in an array of that name


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    layers: int  # attentions that keep KV, each for itself
    heads: int  # rows a position; query heads share them evenly
    key_dim: int
    value_dim: int  # numbers beside the key; 0: the value is a part of the key
    rank: int = 0  # how many of the key's first numbers are the value, where value_dim is 0
    scale: float  # what products of queries and keys are multiplied by

    @property
    def names(self) -> tuple[str, ...]:
        return ("k", "v") if self.value_dim else ("k",)

    @property
    def numbers(self) -> int:
        """Numbers a token, over all layers."""
        return self.layers * self.heads * (self.key_dim + self.value_dim)

    def shape(self, name: str, positions: int) -> tuple[int, int, int]:
        """Of the array `name` for so many positions of one attention."""
        return (self.heads, self.key_dim, positions) if name == "k" else (self.heads, positions, self.value_dim)


def kv_layout(cfg: ModelConfig) -> KVLayout:
    latent = cfg.latent
    if latent is not None:
        return KVLayout(
            layers=cfg.kv_layers,
            heads=1,
            key_dim=latent.cache_dim,
            value_dim=0,
            rank=latent.kv_rank,
            scale=cfg.attention_scale,
        )
    return KVLayout(
        layers=cfg.kv_layers,
        heads=cfg.n_kv_heads,
        key_dim=cfg.head_dim,
        value_dim=cfg.head_dim,
        scale=cfg.attention_scale,
    )
