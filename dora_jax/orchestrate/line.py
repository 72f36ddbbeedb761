"""The line through loads and step times: how long a decode step takes. Values in, values out.

step_s = weights . load,   by least squares of the relative error, the older reports forgotten
"""

from __future__ import annotations

from collections.abc import Sequence

LOADS = 3
KEPT = 1 - 1 / 4096  # of the sums, at each report
RENEWED_EVERY = 16  # reports after which the weights are solved for again
RIDGE = 1e-3  # where all loads are alike, the line is through what was seen


class Line:
    def __init__(self) -> None:
        self.reports = 0
        self.products = [0.0] * (LOADS * LOADS)  # load_i * load_j / step_s**2, summed
        self.sums = [0.0] * LOADS  # load_i / step_s, summed
        self.weights = [0.0] * LOADS

    def step_s(self, load: Sequence[float]) -> float:
        return sum(weight * each for weight, each in zip(self.weights, load, strict=True))

    def add(self, load: Sequence[float], step_s: float) -> None:
        scaled = [each / step_s for each in load]
        for i, a in enumerate(scaled):
            self.sums[i] = KEPT * self.sums[i] + a
            for j, b in enumerate(scaled):
                at = LOADS * i + j
                self.products[at] = KEPT * self.products[at] + a * b
        self.reports += 1
        if self.reports < RENEWED_EVERY or not self.reports % RENEWED_EVERY:
            self.weights = self._solved()

    def _solved(self) -> list[float]:
        """By elimination; the ridge keeps every pivot positive."""
        rows = [[*self.products[LOADS * i : LOADS * (i + 1)], self.sums[i]] for i in range(LOADS)]
        for i, row in enumerate(rows):
            row[i] = row[i] * (1 + RIDGE) or 1.0
        for i, pivot in enumerate(rows):
            for j, row in enumerate(rows):
                if j != i:
                    factor = row[i] / pivot[i]
                    rows[j] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
        return [row[-1] / row[i] for i, row in enumerate(rows)]
