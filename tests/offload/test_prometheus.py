"""Metrics for Prometheus: expositions of one manager and of several."""

from typing import Any

import pytest

from jaxkv.offload import OffloadManager, register_prometheus

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
exposition = pytest.importorskip("prometheus_client.openmetrics.exposition")
openmetrics_parser = pytest.importorskip("prometheus_client.openmetrics.parser")

pytestmark = pytest.mark.host_only


def test_prometheus_collector_has_every_metric():
    manager, registry = OffloadManager(4), prometheus.CollectorRegistry()
    store = manager.prepare_store([b"a", b"b", b"c"])
    manager.start(store)
    manager.complete(store)
    register_prometheus(manager, registry, labels={"model_name": "m"})
    register_prometheus(OffloadManager(4), registry, labels={"model_name": "n"})
    text = prometheus.generate_latest(registry).decode()
    assert 'jaxkv:kv_offload_stored_blocks_total{model_name="m"} 3.0' in text
    assert 'jaxkv:kv_offload_used_blocks{model_name="m"} 3.0' in text
    assert all(f"jaxkv:{name}" in text for name in manager.metrics())


class Engine:
    """The metrics of an engine with a pool and two tiers, without JAX."""

    def metrics(self):
        return dict.fromkeys(
            [
                "kv_offload_load_bytes",
                "kv_offload_store_time",
                "kv_offload_stores_skipped",
                "kv_offload_tiering_read_bytes_0",
                "kv_offload_tier_refused_copies_1",
                "kv_offload_uncascaded_blocks",
            ],
            7.0,
        ) | {"kv_offload_cpu_cache_usage_perc": 0.5, "kv_offload_tier_running_copies_1": 2.0}


def test_counters_of_an_engine_are_counters():
    registry = prometheus.CollectorRegistry()
    register_prometheus(Engine(), registry)
    text = prometheus.generate_latest(registry).decode()
    for name, value in Engine().metrics().items():
        sample, kind = (f"{name}_total", "counter") if value == 7 else (name, "gauge")
        assert f"# TYPE jaxkv:{sample} {kind}\njaxkv:{sample} {value}\n" in text


def test_expositions_of_several_managers_are_valid():
    managers, registry = (
        [OffloadManager(size) for size in (4, 5, 6)],
        prometheus.CollectorRegistry(),
    )
    several = [{"model_name": "m"}, {"model_name": "n"}, {}]
    for manager, labels in zip(managers, several, strict=True):
        collector = register_prometheus(manager, registry, labels=labels)
    with pytest.raises(ValueError, match=r"a manager with labels=\{'model_name': 'n'\}"):
        register_prometheus(OffloadManager(4), registry, labels={"model_name": "n"})

    def sizes():
        texts = (
            openmetrics_parser.text_string_to_metric_families(
                exposition.generate_latest(registry).decode()
            ),
            parser.text_string_to_metric_families(prometheus.generate_latest(registry).decode()),
        )
        found = []
        for families in map(list, texts):
            assert len({family.name for family in families}) == len(families)
            samples = [sample for family in families for sample in family.samples]
            named = [s for s in samples if s.name.endswith("kv_offload_num_blocks")]
            found.append({sample.labels.get("model_name"): sample.value for sample in named})
        assert found[0] == found[1]
        return found[0]

    assert sizes() == {"m": 4, "n": 5, None: 6}
    collector.remove({"model_name": "n"})
    assert sizes() == {"m": 4, None: 6}
    registry.unregister(collector)
    assert sizes() == {}
    register_prometheus(managers[1], registry)
    assert sizes() == {None: 5}


@pytest.mark.parametrize("labels, wrong", [({"rank": 0}, "0"), ({0: "rank"}, "0")])
def test_labels_are_text(labels: Any, wrong):
    """Others would break every later scrape of the registry."""
    registry = prometheus.CollectorRegistry()
    with pytest.raises(TypeError, match=f"labels={labels}: {wrong} is of type int; pass a str"):
        register_prometheus(OffloadManager(4), registry, labels=labels)
    assert prometheus.generate_latest(registry) == b""
