"""Metrics of the offload manager for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from jaxkv._src.offload.specs import COPY_COUNTERS, COUNTERS
from jaxkv._src.offload.tiers.tier import TIER_COUNTERS

_COUNTERS = {*COUNTERS, *COPY_COUNTERS, *TIER_COUNTERS, "kv_offload_uncascaded_blocks"}


class _HasMetrics(Protocol):
    def metrics(self) -> dict[str, float]: ...


_Labels = frozenset[tuple[str, str]]


class _Collector:
    """The managers of a registry: an exposition has each metric family once, with all samples."""

    def __init__(self) -> None:
        self._managers: dict[_Labels, _HasMetrics] = {}

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        """One sample of each metric and manager; called by the registry at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for labels, manager in tuple(self._managers.items()):
            for name, value in manager.metrics().items():
                # With several tiers, names end in _0, _1.
                counts = name.rstrip("0123456789").rstrip("_") in _COUNTERS
                if name not in families:
                    family = CounterMetricFamily if counts else GaugeMetricFamily
                    families[name] = family(f"jaxkv:{name}", name.replace("_", " "))
                sample = f"jaxkv:{name}_total" if counts else f"jaxkv:{name}"
                families[name].add_sample(sample, dict(labels), value)
        return families.values()

    def add(self, manager: _HasMetrics, labels: Mapping[str, str]) -> None:
        if frozenset(labels.items()) in self._managers:
            raise ValueError(
                f"register_prometheus: the registry has a manager with labels={dict(labels)}; pass "
                "labels that distinguish them"
            )
        self._managers[frozenset(labels.items())] = manager

    def remove(self, labels: Mapping[str, str] | None = None) -> None:
        """Removes the manager with these labels; KeyError if there is none."""
        del self._managers[frozenset((labels or {}).items())]


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()


def register_prometheus(
    manager: _HasMetrics, registry: Any = None, labels: Mapping[str, str] | None = None
) -> Any:
    """Exports `manager.metrics()` to a Prometheus registry, which reads them at every scrape.

    Metric NAME is exported as `jaxkv:NAME`, a counter as `jaxkv:NAME_total`, as vLLM's are with
    `vllm:`; docs/offload.md lists the units. Needs prometheus_client:
    `pip install 'jaxkv[prometheus]'`.

        jaxkv.offload.register_prometheus(manager, labels={"model_name": "Qwen3-8B"})

    Args:
      manager: an `OffloadManager`, `OffloadEngine` or `Tier`.
      registry: a `CollectorRegistry`; the global one by default.
      labels: constant labels; they distinguish the managers of one registry.

    Returns:
      The collector of the registry. `collector.remove(labels)` removes a manager,
      `registry.unregister(collector)` all of them.

    Raises:
      ImportError: prometheus_client is not installed.
      TypeError: a name or value of `labels` is not a str.
      ValueError: the registry has a manager with equal labels.
    """
    import prometheus_client

    labels = labels or {}
    for text in (*labels, *labels.values()):
        if not isinstance(text, str):
            raise TypeError(
                f"register_prometheus: labels={labels}: {text!r} is of type {type(text).__name__}; "
                "pass a str"
            )
    registry = prometheus_client.REGISTRY if registry is None else registry
    collector = _collectors.get(registry)
    if collector is not None:
        try:
            registry.unregister(collector)
        except KeyError:  # the caller has unregistered it, and its managers
            collector = None
    if collector is None:
        collector = _collectors[registry] = _Collector()
    try:
        collector.add(manager, labels)
    finally:
        registry.register(collector)
    return collector
