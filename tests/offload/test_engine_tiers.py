"""`OffloadEngine` with tiers: the bytes of real pools, through files, in another process's pool."""

import threading
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.offload import BlockGroup, BlockHasher, FileTier, LookupStatus, lookup_groups
from tests.util.mooncake_master import start_master
from tests.util.tier_blocks import TIMEOUT_S
from tests.util.transfer_cases import assert_rejected

NUM_PAGES = 8
SPEC = jaxkv.KVCacheSpec(num_layers=2, page_size=4, num_kv_heads=4, head_dim=8, dtype=jnp.float32)
MLA = jaxkv.KVCacheSpec(
    num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype=jnp.bfloat16, kind="mla"
)
KEYS = BlockGroup().keys(BlockHasher(4, model="test").hashes(range(16)))


def mesh(size):
    return jax.sharding.Mesh(np.array(jax.devices()[:size]), ("tp",))


def create(spec, layout="page_first_direct", size=1):
    """A pool over `size` devices."""
    where: Any = {"mesh": mesh(size), "head_axis": "tp"} if size > 1 else {}
    return jaxkv.HostPool.create(spec, num_pages=NUM_PAGES, layout=layout, **where)


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(rng.integers(0, 99, x.shape).astype(x.dtype), x.sharding), tree
    )


def finish(tier, done):
    """Polls until the threads of the tiers are done; only a failure takes long."""
    waited = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.005)):
        tier.poll()
        if done():
            return
        waited.wait(0.005)
    raise AssertionError("a copy of a tier did not end")


def step(engine, pool, cache, copy):
    """One step with the next batch: `copy` is `load_pages` or `store_pages`."""
    batch, over = engine.next_batch(), pool.data.sharding
    if isinstance(over, jax.NamedSharding):
        shards = pool.partition_spec, jax.P(None, None, "tp")
        copy = jax.shard_map(
            copy,
            mesh=over.mesh,
            in_specs=(*shards, jax.P(), jax.P()),
            out_specs=shards[copy is jaxkv.load_pages],
            check_vma=False,
        )
    stores = batch.kind == "store"
    run = jax.jit(copy, donate_argnums=0 if stores else 1)
    result = run(pool, cache, batch.host_pages, batch.device_pages)
    pool, cache = (result, cache) if stores else (pool, result)
    jax.block_until_ready(result)
    engine.issue(batch, jax.tree.leaves(result)[0])
    engine.poll()
    return pool, cache


def through_tier(pools, caches, open_tier, keys=KEYS, pages=(1, 0, 5, 2)):
    """Stores blocks by one engine, and loads them by another, whose pool is empty."""
    with closing(open_tier()) as tier:
        first = jaxkv.OffloadEngine(pools[0], batch_sizes=(8,), tiers=[tier])
        stored = first.store(keys, pages)
        step(first, pools[0], caches[0], jaxkv.store_pages)
        assert stored.done and not stored.failed
        assert first.drain(TIMEOUT_S)
    with closing(open_tier()) as tier:
        second = jaxkv.OffloadEngine(
            pools[1], batch_sizes=(8,), tiers=[tier], tier_timeout_s=TIMEOUT_S
        )
        prefetch = second.prefetch(keys)
        finish(second, lambda: prefetch.done)
        assert second.lookup(keys).num_blocks == len(keys)
        second.load(keys, pages)
        _, loaded = step(second, pools[1], caches[1], jaxkv.load_pages)
    return loaded, (first, second)


def assert_pages_equal(cache, other, pages=(0, 1, 2, 5)):
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[list(pages)], np.asarray(b)[list(pages)])


@pytest.mark.parametrize(
    "spec, layout, parts",
    [
        (SPEC, "page_first_direct", 2),
        (SPEC, "layer_first", 4),
        (SPEC, "page_first", 2),
        (SPEC, "page_unified", 1),
        (MLA, "page_first_direct", 1),
    ],
)
def test_blocks_outlive_the_process(tmp_path, spec, layout, parts):
    caches = [jaxkv.DeviceCache.create(spec, num_pages=NUM_PAGES) for _ in range(2)]
    expected = random_like(caches[0], 0)
    pools = [create(spec, layout) for _ in range(2)]
    size = jaxkv.OffloadEngine.tier_block_bytes(pools[0])
    assert size == spec.page_bytes // parts
    open_tier = partial(FileTier, tmp_path, size, 1 << 30)
    loaded, engines = through_tier(pools, [expected, caches[1]], open_tier)
    assert_pages_equal(loaded, expected)
    metrics = engines[1].metrics()
    assert metrics["kv_offload_promoted_blocks"] == 4
    for name in ("read_blocks", "block_hits"):
        assert metrics[f"kv_offload_tier_{name}"] == 4 * parts
    assert engines[0].metrics()["kv_offload_tier_written_blocks"] == 4 * parts


@pytest.mark.cpu_only
def test_sharded_pools(tmp_path):
    """Four shards; a pool over two devices must not read them as its own."""
    caches = [
        jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES, mesh=mesh(size), head_axis="tp")
        for size in (4, 4)
    ]
    expected = random_like(caches[0], 1)
    pools = [create(SPEC, size=4) for _ in range(2)]
    open_tier = partial(FileTier, tmp_path, SPEC.page_bytes // 8, 1 << 30)
    loaded, _ = through_tier(pools, [expected, caches[1]], open_tier)
    assert_pages_equal(loaded, expected)
    two = create(jaxkv.KVCacheSpec(2, 4, 2, 8, jnp.float32), size=2)
    assert jaxkv.OffloadEngine.tier_block_bytes(two) == SPEC.page_bytes // 8
    tier = open_tier()
    other = jaxkv.OffloadEngine(two, tiers=[tier])
    prefetch = other.prefetch(KEYS)
    finish(other, lambda: prefetch.done)
    assert other.lookup(KEYS).status is LookupStatus.MISS
    tier.close()


def test_groups_have_an_engine_each(tmp_path):
    """Full attention and a sliding window, from one tier; both decide about the same prefix."""
    full, window = BlockGroup(0), BlockGroup(1, window=2)
    chain = BlockHasher(4, model="hybrid").hashes(range(16))
    size = SPEC.page_bytes // 2
    tier = FileTier(tmp_path, size, 1 << 30)
    cache = random_like(jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES), 2)
    for group in (full, window):
        pool = create(SPEC)
        engine = jaxkv.OffloadEngine(pool, batch_sizes=(8,), tiers=[tier])
        engine.store(group.keys(chain), range(4))
        step(engine, pool, cache, jaxkv.store_pages)
        assert engine.drain(TIMEOUT_S)
    tier.remove([key for key in tier._index._used if key.startswith(full.keys(chain)[3])])
    make_engine = partial(jaxkv.OffloadEngine, tiers=[tier], tier_timeout_s=TIMEOUT_S, events=True)
    pools = [create(SPEC) for _ in range(2)]
    engines = [make_engine(pool) for pool in pools]
    chains = [group.keys(chain) for group in (full, window)]
    fetched = [
        engine.prefetch(keys, group.window)
        for engine, keys, group in zip(engines, chains, (full, window), strict=True)
    ]
    for engine, prefetch in zip(engines, fetched, strict=True):
        finish(engine, lambda p=prefetch: p.done)
    managers = [engine.manager for engine in engines]
    found = lookup_groups([(managers[0], full), (managers[1], window)], chain)
    assert engines[0].lookup(chains[0]).num_blocks == 3
    assert engines[1].lookup(chains[1], 2).num_blocks == 4
    assert found.num_blocks == 0  # of the window, only the last two blocks were read
    again = engines[1].prefetch(chains[1][:3], 2)
    finish(engines[1], lambda: again.done)
    found = lookup_groups([(managers[0], full), (managers[1], window)], chain)
    assert found.num_blocks == 3
    engines[1].load([chains[1][i] for i in window.needed(3)], [0, 1])
    assert [event.keys for event in engines[0].take_events()] == [tuple(chains[0][:3])]
    tier.close()


def test_discarded_blocks_leave_the_tier(tmp_path):
    tier = FileTier(tmp_path, SPEC.page_bytes // 2, 1 << 30)
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, tiers=[tier], tier_timeout_s=TIMEOUT_S)
    engine.store(KEYS, range(4))
    pool, _ = step(engine, pool, cache, jaxkv.store_pages)
    assert engine.drain(TIMEOUT_S)
    engine.discard([bytes(200), *KEYS[1:2]])  # the first one is too long for a tier
    engine.manager.discard()
    prefetch = engine.prefetch(KEYS)
    finish(engine, lambda: prefetch.done)
    assert engine.lookup(KEYS).num_blocks == 1
    tier.close()


def test_prefetch_from_a_closed_tier_evicts_nothing(tmp_path):
    tier = FileTier(tmp_path, SPEC.page_bytes // 2, 1 << 30)
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(8,), tiers=[tier])
    engine.store(KEYS, range(4))
    pool, _ = step(engine, pool, cache, jaxkv.store_pages)
    assert engine.drain(TIMEOUT_S)
    engine.manager.discard()
    tier.close()
    others = [bytes([i]) * 36 for i in range(NUM_PAGES)]
    engine.store(others, range(8))
    pool, _ = step(engine, pool, cache, jaxkv.store_pages)
    prefetch = engine.prefetch(KEYS)
    finish(engine, lambda: prefetch.done)
    assert engine.lookup(others).num_blocks == NUM_PAGES


class HangingTier:
    """Nothing ends before `go`."""

    block_bytes = SPEC.page_bytes // 2

    def __init__(self):
        self.go, self.writes = threading.Event(), 0

    def contains(self, keys):
        self.go.wait(TIMEOUT_S)
        return [True] * len(keys)

    def write(self, key, block):
        self.writes += 1
        return Future()

    def metrics(self):
        return {"kv_offload_tier_errors": 0.0}


def test_nothing_waits_for_a_tier_that_hangs():
    tier: Any = HangingTier()
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(2,), tiers=[tier], tier_timeout_s=0.01)
    with jaxkv.forbid_host_sync():
        prefetch = engine.prefetch(KEYS)
        engine.poll()
    finish(engine, lambda: prefetch.done)
    assert engine.lookup(KEYS) == (0, 0)
    engine.store(KEYS[:2], [0, 1])
    pool, _ = step(engine, pool, cache, jaxkv.store_pages)
    assert tier.writes == 4 and engine.lookup(KEYS).num_blocks == 2
    store = engine.store(KEYS[2:3], [2])
    batch = engine.next_batch()
    run = jax.jit(jaxkv.store_pages, donate_argnums=0)
    pool = jax.block_until_ready(run(pool, cache, batch.host_pages, batch.device_pages))
    engine.issue(batch, pool.data)
    assert not engine.drain(0.01) and store.done and engine.poll() == [store]
    engine.load(KEYS[:2], [2, 3])
    step(engine, pool, cache, jaxkv.load_pages)
    tier.go.set()


@pytest.mark.parametrize("num_donated", [0, 1])
def test_a_store_to_a_copy_of_the_pool_is_an_error(num_donated):
    """The pool that a step returns is another one: tiers would save what the first one holds."""
    tier: Any = HangingTier()
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(2,), tiers=[tier])
    for _ in range(num_donated):
        engine.store(KEYS[:2], [0, 1])
        pool, _ = step(engine, pool, cache, jaxkv.store_pages)
    store = engine.store(KEYS[2:], [2, 3])
    batch = engine.next_batch()
    copied = jax.jit(jaxkv.store_pages)(pool, cache, batch.host_pages, batch.device_pages)
    engine.issue(batch, jax.block_until_ready(copied.data))
    pages = str(batch.host_pages.tolist())
    assert_rejected(engine.poll, RuntimeError, f"host pages {pages}", "donate the pool")
    assert engine.poll() == [store] and store.failed
    assert engine.lookup(KEYS[2:]) == (0, 0) and tier.writes == 4 * num_donated


def test_reads_into_a_pool_that_a_step_has_copied_are_an_error(tmp_path):
    """A load returns the pool without donating it: the next blocks would be read into the old one,
    and loads would copy from the new one."""
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    open_tier = partial(FileTier, tmp_path, 1024, capacity_bytes=1 << 20)
    with closing(open_tier()) as tier:
        engine = jaxkv.OffloadEngine(pool, batch_sizes=(8,), tiers=[tier])
        engine.store(KEYS, range(4))
        step(engine, pool, cache, jaxkv.store_pages)
        assert engine.drain(TIMEOUT_S)
    with closing(open_tier()) as tier:
        engine = jaxkv.OffloadEngine(
            pool := create(SPEC), batch_sizes=(8,), tiers=[tier], tier_timeout_s=TIMEOUT_S
        )
        for keys in (KEYS[:2], KEYS[2:]):
            prefetch = engine.prefetch(keys)
            if keys == KEYS[:2]:
                finish(engine, lambda prefetch=prefetch: prefetch.done)
                assert engine.lookup(keys).num_blocks == 2
                pool = jax.block_until_ready(jax.jit(lambda pool: pool)(pool))
        with pytest.raises(RuntimeError, match="donate the pool"):
            finish(engine, lambda: prefetch.done)
        assert prefetch.done and engine.lookup(KEYS[2:]) == (0, 0) and engine.poll() == []


def stored_by_dma(engine, pool, cache):
    """A store of two blocks, as a step with `by("dma")` issues it; `dma` itself needs a GPU."""
    store = engine.store(KEYS[:2], [0, 1])
    batch = engine.next_batch()
    run = jax.jit(jaxkv.store_pages, donate_argnums=0)
    pool = jax.block_until_ready(run(pool, cache, batch.host_pages, batch.device_pages))
    engine.issue(batch.by("dma"), pool.data)
    return store


def test_stores_by_dma_are_written():
    tier: Any = HangingTier()
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(4,), tiers=[tier])
    store = stored_by_dma(engine, pool, cache)
    assert engine.poll() == [store] and not store.failed and tier.writes == 4


def test_a_poll_that_cannot_read_the_pages_loses_no_copy(monkeypatch):
    tier: Any = HangingTier()
    pool, cache = create(SPEC), jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES)
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(4,), tiers=[tier])
    store = stored_by_dma(engine, pool, cache)
    with monkeypatch.context() as patch:
        patch.setattr(engine._check, "error", lambda batch: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.poll()
    assert engine.poll() == [store] and not store.failed


def test_blocks_of_failed_steps_are_not_written():
    tier: Any = HangingTier()
    pool = create(SPEC)
    engine = jaxkv.OffloadEngine(pool, tiers=[tier])

    class Failed:
        def is_ready(self):
            return True

        def block_until_ready(self):
            raise RuntimeError("injected")

    engine.store(KEYS, range(4))
    failed: Any = Failed()
    engine.issue(engine.next_batch(), failed)
    assert engine.poll()[0].failed and tier.writes == 0


def test_blocks_of_a_mooncake_store(tmp_path, monkeypatch):
    """Two engines of a fleet."""
    monkeypatch.setattr("jaxkv._src.offload.tiers.mooncake._CONTAINS_WITHIN_S", TIMEOUT_S)
    master, size = start_master(tmp_path), SPEC.page_bytes // 2
    caches = [jaxkv.DeviceCache.create(SPEC, num_pages=NUM_PAGES) for _ in range(2)]
    expected = random_like(caches[0], 3)
    open_tier = partial(master.tier, size, segment_bytes=0, num_threads=1)
    with master, closing(master.tier(size)):  # the second one lends memory
        loaded, _ = through_tier([create(SPEC), create(SPEC)], [expected, caches[1]], open_tier)
    assert_pages_equal(loaded, expected)


@pytest.mark.cpu_only
def test_pools_with_page_shards_are_refused():
    """Page ids are those in a shard: half of the pages of this pool have none."""
    where = jax.NamedSharding(mesh(2), jax.P("tp"))
    cache = [jax.device_put(jnp.zeros((NUM_PAGES, 4, 2, 8)), where)]
    pool = jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(cache), num_pages=NUM_PAGES)
    words = "num_page_shards=2", f"pool={NUM_PAGES // 2}"
    assert_rejected(lambda: jaxkv.OffloadEngine(pool), ValueError, *words)
    size_of = jaxkv.OffloadEngine.tier_block_bytes
    assert_rejected(lambda: size_of(pool), ValueError, "page shards")


def test_errors(tmp_path):
    with_size = partial(FileTier, tmp_path, capacity_bytes=1 << 20)
    tier = with_size(64)
    engine = jaxkv.OffloadEngine
    assert_rejected(lambda: engine(4, tiers=[tier]), ValueError, "pool=4")
    assert_rejected(
        lambda: engine(create(SPEC), tiers=[tier]), ValueError, "block_bytes=64", "1024"
    )
    for wrong in (tier, ["x"]):
        tiers: Any = wrong
        assert_rejected(
            lambda t=tiers: engine(create(SPEC), tiers=t), TypeError, "sequence of tiers"
        )
    assert engine(4).prefetch(KEYS).done
    tier.close()
