"""What /metrics says, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from dora_jax.base import prometheus

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)


class Counters:
    """`numbers`: what is read when somebody asks, by name; see Endpoint."""

    def __init__(self, numbers: Mapping[str, tuple[str, Callable[[], float]]], *others: Collector):
        self._registry = CollectorRegistry()
        for other in others:
            self._registry.register(other)
        self.requests = Counter(
            "dora_requests", "requests answered or refused", ["route", "status"], registry=self._registry
        )
        self.first_token_s = Histogram(
            "dora_first_token_seconds", "from a request to its first token", buckets=SECONDS, registry=self._registry
        )
        self.answer_s = Histogram(
            "dora_answer_seconds", "from a request to its last token", buckets=SECONDS, registry=self._registry
        )
        for name, (meaning, read) in numbers.items():
            Gauge(f"dora_{name}", meaning, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        return prometheus.page(self._registry)
