"""Numbers by name as Prometheus' text format, for the endpoint's /metrics and a run's.

Consumes path-named numbers (`lag/max`), read when somebody asks; produces gauges named `dora_run_lag_max`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
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


def flat(tree: Mapping[Any, object], path: str = "") -> dict[str, float]:
    """The numbers of nested mappings by their path; truth values are 0 and 1, all else is left out."""
    found: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{path}{name}"] = float(value)
    return found


SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)


class Counters:
    """`numbers`: name -> (its meaning, its value now), which is read when somebody asks; see Endpoint."""

    def __init__(self, numbers: Callable[[], Mapping[str, tuple[str, float]]], *others: Collector):
        registry = self._registry = CollectorRegistry()
        for other in others:
            registry.register(other)
        seconds = functools.partial(Histogram, buckets=SECONDS, registry=registry)
        self.requests = Counter("dora_requests", "requests answered or refused", ["route", "status"], registry=registry)
        self.first_token_s = seconds("dora_first_token_seconds", "from a request to its first token")
        self.answer_s = seconds("dora_answer_seconds", "from a request to its last token")
        for name, (meaning, _) in numbers().items():
            gauge = Gauge(f"dora_{name}", meaning, registry=registry)
            gauge.set_function(functools.partial(lambda name: numbers()[name][1], name))

    def text(self) -> bytes:
        return generate_latest(self._registry)
