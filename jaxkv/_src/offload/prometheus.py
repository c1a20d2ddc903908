"""Metrics of the offload manager for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxkv._src.offload.manager import COUNTERS

if TYPE_CHECKING:
    from jaxkv._src.offload.manager import OffloadManager


class _Collector:
    def __init__(self, manager: OffloadManager, labels: Mapping[str, str]) -> None:
        self._manager = manager
        self._labels = labels

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        """One sample of each metric; called by the registry at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._manager.metrics().items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            text = name.replace("_", " ")
            metric = family(f"jaxkv:{name}", text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric


def register_prometheus(
    manager: OffloadManager, registry: Any = None, labels: Mapping[str, str] | None = None
) -> Any:
    """Registers a Prometheus collector that reads `manager.metrics()` at every scrape.

    Needs prometheus_client: `pip install jaxkv[prometheus]`.

        jaxkv.offload.register_prometheus(manager, labels={"model_name": "Qwen3-8B"})

    Args:
      manager: the manager.
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
