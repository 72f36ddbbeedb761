"""Numbers by name as Prometheus' text format, for the endpoint's /metrics and a run's.

Consumes path-named numbers (`lag/max`), read when somebody asks; produces gauges named `dora_run_lag_max`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dora_run_"


class Gauges(Collector):
    """`read` gives the numbers of this moment; of two names that become one, the first counts."""

    def __init__(self, read: Callable[[], Mapping[str, float]]):
        self._read = read

    def collect(self) -> Iterator[Metric]:
        seen: set[str] = set()
        for path, value in self._read().items():
            name = PREFIX + re.sub(r"\W", "_", path, flags=re.ASCII)
            if name not in seen:
                seen.add(name)
                yield GaugeMetricFamily(name, path, value=value)

    def describe(self) -> list[Metric]:
        """Nothing is known before it is read."""
        return []


def page(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def flat(tree: Mapping[Any, object], path: str = "") -> dict[str, float]:
    """The numbers of nested mappings by their path; truth values are 0 and 1, all else is left out."""
    found: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{path}{name}"] = float(value)
    return found
