"""95 % intervals of shares, in closed form. Source: Wilson 1927; of several samples a prompt, with the number of trials
that the spread of the prompts' means amounts to (the design effect of cluster sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.96


def wilson(share: float, trials: float) -> tuple[float, float]:
    """The interval of a share of `trials` independent trials; of none: 0 to 1."""
    if trials <= 0:
        return 0.0, 1.0
    centre = (share + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(max(0.0, share * (1 - share)) / trials + Z * Z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def of_prompts(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """The interval of the mean of the prompts' shares, each of `samples` samples, which are alike within a prompt.

    The prompts are the independent trials: their number is the fewest that count, all samples the most.
    """
    n = len(shares)
    share = sum(shares) / n if n else 0.0
    spread = sum((x - share) ** 2 for x in shares) / max(1, n - 1) / max(1, n)
    trials = share * (1 - share) / spread if spread else n
    return wilson(share, min(max(trials, n), n * samples))
