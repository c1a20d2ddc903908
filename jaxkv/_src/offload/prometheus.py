"""Metrics of the offload manager for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from jaxkv._src.offload.manager import COUNTERS
from jaxkv._src.offload.tiers.tier import TIER_COUNTERS

_COUNTERS = {*COUNTERS, *TIER_COUNTERS, "kv_offload_uncascaded_blocks"}


class _HasMetrics(Protocol):
    def metrics(self) -> dict[str, float]: ...


class _Collector:
    def __init__(self, manager: _HasMetrics, labels: Mapping[str, str]) -> None:
        self._manager = manager
        self._labels = labels

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        """One sample of each metric; called by the registry at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._manager.metrics().items():
            counts = name.rstrip("0123456789").rstrip("_") in _COUNTERS  # of several tiers: _0, _1
            family = CounterMetricFamily if counts else GaugeMetricFamily
            text = name.replace("_", " ")
            metric = family(f"jaxkv:{name}", text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric


def register_prometheus(
    manager: _HasMetrics, registry: Any = None, labels: Mapping[str, str] | None = None
) -> Any:
    """Registers a Prometheus collector that reads `manager.metrics()` at every scrape.

    Needs prometheus_client: `pip install jaxkv[prometheus]`.

        jaxkv.offload.register_prometheus(manager, labels={"model_name": "Qwen3-8B"})

    Args:
      manager: an `OffloadManager`, `OffloadEngine` or `Tier`.
      registry: a `CollectorRegistry`; the global one by default.
      labels: constant labels; they distinguish the managers of one registry.

    Returns:
      The collector, for `registry.unregister`.

    Raises:
      ImportError: prometheus_client is not installed.
    """
    import prometheus_client

    collector = _Collector(manager, dict(labels or {}))
    (prometheus_client.REGISTRY if registry is None else registry).register(collector)
    return collector
