"""Stage 2, pure: which experts the tokens of one running sample went to, row by row as results come back. numpy only.

Consumes rows of its parcel, of the prefix nodes that hold its prompt, and of decode calls; produces the rows that travel
with it. A row that is there stays: a sample that is prefilled again keeps the experts that sampled its tokens. Of tokens
whose rows did not come along, it takes those of the call that computed their KV again.
Law: rows are contiguous from the first token on; a gap raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dora_jax.models.routes import RouteShape
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.pages import Node


class RouteLog:
    def __init__(self, shape: RouteShape, parcel: InFlightSample, most: int):
        """most: rows at the end. ValueError where what the parcel carries is no route of this model."""
        self._id = parcel.id
        self._rows = np.empty((most, shape.layers, shape.per_token), shape.dtype)
        self._n = 0
        if (known := parcel.table.routes) is not None:
            self.append(0, shape.check(known, len(known), str(parcel.id)))

    @property
    def rows(self) -> np.ndarray:
        """[n, M, k], a view."""
        return self._rows[: self._n]

    def take(self, prefix: Sequence[Node]) -> None:
        """What the nodes of its prefix know beyond its own rows."""
        for node in prefix:
            if node.routes is None:
                return
            if node.stop > self._n:
                self.append(self._n, node.routes[self._n - node.start :])

    def append(self, start: int, rows: np.ndarray) -> None:
        if start > self._n:
            raise RuntimeError(f"{self._id} has the experts of {self._n} tokens, and the next ones begin at {start}")
        new = rows[self._n - start :]
        self._rows[self._n : self._n + len(new)] = new
        self._n += len(new)
