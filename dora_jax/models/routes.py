"""Which experts each token was sent to, as numbers that travel with a sample: TokenTable.routes. Standard library,
numpy.

One row a token that ran forward, [rows, M, k] for M layers with a router: uint8 up to 256 experts, else uint16. The ids
of a token are distinct, so k equal largest numbers of the type are no choice: they mark what is missing.
Law: a missing row is an error where routes are needed, never expert 0.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dora_jax.models.families.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    layers: int  # M
    per_token: int  # k
    choices: int  # ids stay below it

    @classmethod
    def of(cls, cfg: ModelConfig) -> RouteShape | None:
        """None: the model has no router."""
        return cls(cfg.expert_layers, cfg.experts.per_token, cfg.experts.choices) if cfg.experts else None

    @property
    def dtype(self) -> np.dtype:
        narrow = self.choices <= (256 if self.per_token > 1 else 255)
        return np.dtype(np.uint8 if narrow else np.uint16)

    @property
    def token_bytes(self) -> int:
        return self.layers * self.per_token * self.dtype.itemsize

    def missing(self, *rows: int) -> np.ndarray:
        """Rows that nothing is known of, [*rows, M, k]."""
        return np.full((*rows, self.layers, self.per_token), np.iinfo(self.dtype).max, self.dtype)

    def check(self, routes: np.ndarray | None, rows: int, name: str) -> np.ndarray:
        """The routes of `rows` tokens of the sample called `name`; ValueError says what they lack."""
        if routes is None:
            raise ValueError(f"sample {name} carries no expert routes, which trainer.routing_replay needs")
        if routes.dtype != self.dtype or routes.shape[1:] != (self.layers, self.per_token):
            raise ValueError(
                f"sample {name} carries expert routes {routes.dtype}{list(routes.shape)}; the model has "
                f"{self.dtype}[tokens, {self.layers}, {self.per_token}]"
            )
        if len(routes) != rows:
            raise ValueError(
                f"sample {name} carries expert routes of {len(routes)} tokens, of the {rows} that ran forward"
            )
        # where a layer's choice is not known, all its ids are the largest of their type
        if lost := int((routes == np.iinfo(routes.dtype).max).all(-1).any(-1).sum()):
            raise ValueError(f"sample {name} lacks the expert routes of {lost} of its {rows} tokens")
        if routes.size and int(routes.max()) >= self.choices:
            raise ValueError(f"sample {name} has a route to expert {int(routes.max())}; the model has {self.choices}")
        return routes
