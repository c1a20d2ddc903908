"""Batches of copies in the program of a step, and engines without a host tier."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.offload.copies import CopyBatch
from tests.util.transfer_cases import assert_rejected

SPEC = jaxkv.KVCacheSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
KEYS = [b"a", b"b", b"c"]


def random_cache(num_pages=8):
    cache = jaxkv.DeviceCache.create(SPEC, num_pages=num_pages)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jax.device_put(rng.standard_normal(x.shape).astype(x.dtype), x.sharding), cache
    )


def values(cache, pages):
    return [np.asarray(leaf)[list(pages)] for leaf in jax.tree.leaves(cache)]


def _step(pool, cache, batch):
    copies = batch.start(pool, cache)
    layers = tuple(copies.wait(layer) for layer in range(SPEC.num_layers))
    pool = copies.pool if batch.kind == "store" else pool
    return pool, jaxkv.DeviceCache(layers, SPEC), jnp.zeros(2)


step: Any = jax.jit(_step, donate_argnames=("pool", "cache"))


@pytest.mark.parametrize(
    "by",
    [
        None,
        "xla",
        pytest.param("dma", marks=pytest.mark.gpu),
        pytest.param("kernel", marks=pytest.mark.gpu),
    ],
)
def test_batches_start_their_copies_in_one_program_for_each_kind(by):
    pool, cache = jaxkv.HostPool.create(SPEC, num_pages=6), random_cache()
    tier, stored = jaxkv.OffloadEngine(pool, batch_sizes=(4,)), values(cache, (1, 7, 4))
    others = values(cache, (0, 1, 4, 5, 6))
    step.clear_cache()
    for action in (lambda: tier.store(KEYS, [1, 7, 4]), lambda: tier.load(KEYS, [3, 2, 7])):
        copy = action()
        batch = tier.next_batch()
        pool, cache, result = step(pool, cache, batch.by(by))
        tier.issue(batch.by(by), jax.block_until_ready(result))
        assert tier.poll() == [copy] and not copy.failed
    assert step._cache_size() == 2
    batch = tier.next_batch()
    assert batch.by(by) is batch and batch.kind == "none"
    pool, cache, _ = step(pool, cache, batch)
    np.testing.assert_equal(values(cache, (3, 2, 7)), stored)
    np.testing.assert_equal(values(cache, (0, 1, 4, 5, 6)), others)
    jaxkv.check_errors(cache, pool)


def test_batches_of_padding_compile_all_programs():
    pool, cache = jaxkv.HostPool.create(SPEC, num_pages=6), random_cache()
    tier, before = jaxkv.OffloadEngine(pool, batch_sizes=(2, 4)), values(cache, range(8))
    batches = tier.padding_batches()
    assert [(batch.kind, len(batch.host_pages)) for batch in batches] == [
        ("none", 2), ("load", 2), ("load", 4), ("store", 2), ("store", 4),
    ]  # fmt: skip
    step.clear_cache()
    for batch in batches:
        pool, cache, _ = step(pool, cache, batch)
    compiled = step._cache_size()
    np.testing.assert_equal(values(cache, range(8)), before)
    for keys in (KEYS, [b"d"]):
        tier.store(keys, [*range(len(keys))])
        batch = tier.next_batch()
        pool, cache, result = step(pool, cache, batch)
        tier.issue(batch, result)
    assert step._cache_size() == compiled == 5


@pytest.mark.parametrize("how", ["without its batch", "without donation"])
def test_a_step_that_does_not_write_the_pool_is_an_error(how):
    """Its blocks would be found, and their loads read the pages as they were."""
    pool, cache = jaxkv.HostPool.create(SPEC, num_pages=6), random_cache()
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(4,))
    store, batch = engine.store(KEYS, [1, 7, 4]), engine.next_batch()
    copied = batch if how == "without donation" else engine.padding_batches()[0]
    engine.issue(batch, jax.block_until_ready(jax.jit(_step)(pool, cache, copied)[2]))
    assert_rejected(engine.poll, RuntimeError, "host pages [0, 1, 2]", "donate the pool")
    assert engine.poll() == [store] and store.failed and engine.lookup(KEYS) == (0, 0)


def test_without_a_pool_nothing_is_stored_or_copied():
    tier, cache = jaxkv.OffloadEngine(0), random_cache()
    store = tier.store(KEYS, [1, 2, 3])
    assert store.done and not store.keys and tier.lookup(KEYS) == (0, 0)
    (padding,) = tier.padding_batches()
    before = values(cache, range(8))
    for batch in (padding, tier.next_batch()):
        _, cache, _ = step(None, cache, batch)
    np.testing.assert_equal(values(cache, range(8)), before)
    assert tier.metrics()["kv_offload_used_blocks"] == 0


@pytest.mark.cpu_only
def test_the_copy_engine_gets_ids_of_the_host_and_is_refused_on_a_cpu():
    tier = jaxkv.OffloadEngine(4)
    tier.store([b"a"], [2])
    batch = tier.next_batch()
    by_dma = batch.by("dma")
    assert isinstance(by_dma.host_pages, jaxkv.HostIds) and by_dma.copies is batch.copies
    assert by_dma.device_pages.ids.tolist() == batch.device_pages.tolist()
    assert by_dma.by("dma").host_pages is by_dma.host_pages
    assert by_dma.by("kernel").host_pages is by_dma.host_pages
    pool = jaxkv.HostPool.create(SPEC, num_pages=4)
    assert_rejected(
        lambda: step(pool, random_cache(), by_dma), NotImplementedError, "'dma'", "CUDA device"
    )
    tier.issue(by_dma, jnp.zeros(2).block_until_ready())
    assert len(tier.poll()) == 1


def test_errors():
    ids = np.array([0], np.int32)
    load = CopyBatch("load", ids, ids)
    assert_rejected(lambda: load.start(None, random_cache()), TypeError, "pool is None", "'load'")
    none = CopyBatch("none", ids, ids)
    assert_rejected(lambda: none.start(None, [jnp.zeros(3)]), TypeError, "pool is None", "list")
    wrong: Any = "fast"
    assert_rejected(lambda: load.by(wrong), ValueError, "implementation must be", "fast")
