"""Metrics of the host tier: the unit of each name, and their figures for known copies."""

import itertools
from contextlib import closing

import pytest

import jaxkv
from jaxkv.offload import FileTier
from tests.offload.test_engine import step_result
from tests.offload.test_engine_tiers import KEYS, SPEC, create, finish, random_like, step
from tests.util.tier_blocks import TIMEOUT_S

PARTS = 2  # K and V: blocks of the tier in a page
STEP_S = 0.5

# Names of vLLM, with its units.
OF_VLLM = {
    "kv_offload_load_bytes": "bytes",
    "kv_offload_load_time": "seconds",
    "kv_offload_store_bytes": "bytes",
    "kv_offload_store_time": "seconds",
    "kv_offload_stores_skipped": "blocks",
    "kv_offload_cpu_cache_usage_perc": "share, 0 to 1",
    "kv_offload_tiering_read_bytes": "bytes",
    "kv_offload_tiering_read_time": "seconds",
    "kv_offload_tiering_write_bytes": "bytes",
    "kv_offload_tiering_write_time": "seconds",
}
# Ends of the other names.
UNITS = {
    "_blocks": "blocks", "_block_queries": "blocks", "_block_hits": "blocks", "_copies": "copies",
    "_perc": "share, 0 to 1", "_reads": "reads", "_read_misses": "reads", "_writes": "writes",
    "_write_failures": "writes", "_errors": "errors",
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """Each step takes `STEP_S` from its issue to the poll that finds its end."""
    ticks = itertools.count(1000.0, STEP_S)
    monkeypatch.setattr("jaxkv._src.offload.step_result.monotonic", ticks.__next__)


@pytest.mark.usefixtures("clock")
def test_each_name_has_the_unit_of_vllm_or_says_its_own(tmp_path):
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=8)
    cache, keys = random_like(cache, 0), KEYS[:3]
    size = jaxkv.OffloadEngine.tier_block_bytes(pool)
    with closing(FileTier(tmp_path, size, capacity_bytes=1 << 30)) as tier:
        engine = jaxkv.OffloadEngine(
            pool, batch_sizes=(2,), tiers=[tier], tier_timeout_s=TIMEOUT_S, write="second_use"
        )
        engine.touch(keys)
        engine.store(keys, [0, 1, 2])  # not before the second use
        engine.touch(keys)
        engine.store(keys, [0, 1, 2])
        for _ in range(2):
            pool, cache = step(engine, pool, cache, jaxkv.store_pages)
        assert engine.drain(TIMEOUT_S)
        engine.manager.discard()
        prefetch = engine.prefetch([*keys, b"absent"])
        finish(engine, lambda: prefetch.done)
        assert engine.lookup([*keys, b"absent"]).num_blocks == 3
        engine.load(keys[:1], [3])
        assert engine.metrics()["kv_offload_cpu_cache_usage_perc"] == 1 / 8
        pool, cache = step(engine, pool, cache, jaxkv.load_pages)
        found = engine.metrics()

    expected = {
        "kv_offload_load_bytes": SPEC.page_bytes,
        "kv_offload_load_time": STEP_S,
        "kv_offload_store_bytes": 3 * SPEC.page_bytes,
        "kv_offload_store_time": 2 * STEP_S,
        "kv_offload_stores_skipped": 3,
        "kv_offload_cpu_cache_usage_perc": 0,
        "kv_offload_tiering_read_bytes": 3 * SPEC.page_bytes,
        "kv_offload_tiering_write_bytes": 3 * SPEC.page_bytes,
        "kv_offload_block_queries": 4,
        "kv_offload_block_hits": 3,
        "kv_offload_loaded_blocks": 1,
        "kv_offload_stored_blocks": 3,
        "kv_offload_promoted_blocks": 3,
        "kv_offload_cascaded_blocks": 3,
        "kv_offload_tier_block_queries": 4 * PARTS,
        "kv_offload_tier_block_hits": 3 * PARTS,
        "kv_offload_tier_read_blocks": 3 * PARTS,
        "kv_offload_tier_written_blocks": 3 * PARTS,
    }
    assert {name: found[name] for name in expected} == expected
    for name in ("read", "write"):
        assert 0 < found[f"kv_offload_tiering_{name}_time"] < TIMEOUT_S
    assert OF_VLLM.keys() <= found.keys()
    for name in found.keys() - OF_VLLM.keys():
        assert name.startswith("kv_offload_") and not name.startswith("kv_offload_tiering_")
        assert [unit for end, unit in UNITS.items() if name.endswith(end)], name


@pytest.mark.usefixtures("clock")
def test_copies_of_failed_steps_are_not_counted():
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=8)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(2,))
    engine.store(KEYS[:2], [0, 1])
    engine.issue(engine.next_batch(), step_result(failed=True))
    assert [copy.failed for copy in engine.poll()] == [True]
    engine.store(KEYS[:1], [0])
    step(engine, pool, cache, jaxkv.store_pages)
    found = engine.metrics()
    assert found["kv_offload_store_bytes"] == SPEC.page_bytes
    assert found["kv_offload_store_time"] == STEP_S and found["kv_offload_load_time"] == 0


@pytest.mark.host_only
def test_bytes_need_the_size_of_a_page():
    found = jaxkv.OffloadEngine(4).metrics()
    assert [name for name in found if name.endswith("_bytes")] == []
    assert found["kv_offload_load_time"] == found["kv_offload_store_time"] == 0


@pytest.mark.host_only
def test_tokens_of_requests_are_left_to_the_serving_engine():
    """vLLM's counters with this prefix count tokens of admitted requests, which it alone knows."""
    assert not [name for name in jaxkv.OffloadEngine(4).metrics() if "prefix_cache" in name]
