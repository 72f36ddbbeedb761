"""Stage 2, pure: which call decodes the rows of a version: the decode call, the narrow one, or one that verifies drafts.

Consumes the rows that decode, and what the calls cost: times that `Device.measure` takes when calls are compiled, or the
configuration's; produces the decode calls of a tick. Few rows take the narrow call (rollout.narrow_rows) where it is
quicker; drafts (drafts.py) are verified where they draw more tokens a second than the call that the rows would else take.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dora_jax.rollout.drafts import Drafter
from dora_jax.rollout.rows import Rows
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import Shapes
from dora_jax.rollout.tick_plan import DecodeCall
from dora_jax.types import SampleId

PAYS = 0.95  # a narrow call that takes more of a decode call's time than this is not used


class CallCosts:
    """Times over that of a decode call whose rows all take all steps, by blocks of context. Before they are measured,
    no call is cheaper than another."""

    def __init__(self, shapes: Shapes):
        self.narrow = dict.fromkeys(shapes.decode_buckets, shapes.narrow_cost or 1.0)
        self.verify = dict.fromkeys(shapes.decode_buckets, shapes.draft_cost or 1.0)
        self._narrow_rows, self._step = shapes.narrow_rows, 1 / shapes.steps

    def is_narrow(self, rows: int, blocks: int) -> bool:
        """Whether a decode call of so many rows is the narrow one."""
        return rows <= self._narrow_rows and self.narrow[blocks] <= PAYS

    def of_draft(self, rows: int, blocks: int) -> float:
        """A verifying call's time over that of the decode call that so many rows would take. It is no less than a step of
        the narrow call, whatever was measured."""
        if not self.is_narrow(rows, blocks):
            return self.verify[blocks]
        return max(self._step, self.verify[blocks] / self.narrow[blocks])


class Decoding:
    """`calls` commits what it decides: the rows' steps are in flight."""

    def __init__(self, shapes: Shapes, rows: Rows):
        self.costs = CallCosts(shapes)
        self.drafter = Drafter(shapes) if shapes.drafts else None
        self._rows = rows

    def calls(self, here: Collection[Seq]) -> list[DecodeCall]:
        """One for each version and row batch. here: every sample of the engine."""
        found = []
        for version, slots in self._rows.batches():
            drafts, blocks = None, self._rows.blocks(slots)
            if self.drafter is not None:
                cost = self.costs.of_draft(len(slots), blocks)
                drafts = self.drafter.decide(self._rows.on(slots), cost, here)
            narrow = self.costs.is_narrow(len(slots), blocks)
            found.append(DecodeCall(version, blocks, *self._rows.call(slots, blocks, drafts, narrow), drafts))
        return found

    def know(self, id: SampleId, tokens: np.ndarray) -> None:
        """The response, so far, of a sample elsewhere."""
        if self.drafter is not None:
            self.drafter.know(id, tokens)

    @property
    def would_draft(self) -> bool:
        """Whether the next calls may verify drafts, for which the samples' last tokens must be known."""
        return self.drafter is not None and any(
            self.drafter.promising(self._rows.on(slots), self.costs.of_draft(len(slots), self._rows.blocks(slots)))
            for _, slots in self._rows.batches()
        )
