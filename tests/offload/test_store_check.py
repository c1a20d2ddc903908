"""Which pools and stores `poll` checks: it never refuses a correct store."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.cache.host_layout import LAYOUTS
from jaxkv._src.offload.store_check import store_check
from jaxkv._src.runtime import native
from tests.util.transfer_cases import assert_rejected

SPEC = jaxkv.KVCacheSpec(num_layers=4, page_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
KEYS = [b"a", b"b"]
NUM_HOST = 4


@functools.partial(jax.jit, donate_argnames="pool", static_argnames=("layers", "tokens"))
def stored(pool, cache, batch, layers, tokens):
    tokens = tokens and range(*tokens)
    handle = batch.start(pool, cache, layers=layers, tokens=tokens)
    for layer in layers or range(SPEC.num_layers):
        handle.wait(layer)
    return handle.pool, jnp.zeros(1)


def queued(pool):
    engine = jaxkv.OffloadEngine(pool, batch_sizes=(4,))
    engine.store(KEYS, [1, 2])
    return engine, engine.next_batch()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("layers", "tokens"), [((1, 3), None), ((0, 2), None), (None, (2, 4)), (None, (0, 1))]
)
def test_some_layers_or_tokens_are_a_store(layout, layers, tokens):
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST, layout=layout)
    engine, batch = queued(pool)
    pool, result = stored(pool, jaxkv.DeviceCache.create(SPEC, num_pages=4), batch, layers, tokens)
    engine.issue(batch, jax.block_until_ready(result))
    assert engine.poll() == list(batch.copies) and engine.lookup(KEYS).num_blocks == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_that_ignore_their_batch(layout):
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST, layout=layout)
    before = pool.view().copy()
    engine, batch = queued(pool)
    changed = np.argwhere(pool.view() != before)
    page_axis = next(i for i, axis in enumerate(pool.host_layout.axes) if "page" in axis)
    per_page = pool.data.shape[page_axis] // NUM_HOST
    assert {*changed[:, page_axis] // per_page} == {*batch.host_pages[:2]}  # marks, and no others
    engine.issue(batch, jnp.zeros(1).block_until_ready())
    assert_rejected(engine.poll, RuntimeError, "host pages [0, 1]", "donate the pool")
    assert engine.lookup(KEYS).num_blocks == 0


def test_the_memory_is_not_kept():
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST)
    engine, check = jaxkv.OffloadEngine(pool), store_check(pool)
    assert check is not None and check._bytes() is not None
    pool.close()
    assert check._bytes() is None and native.extension().pinned_ref_view(check._memory) is None
    engine.store(KEYS, [1, 2])
    batch = engine.next_batch()  # writes no mark
    engine.issue(batch, jnp.zeros(1).block_until_ready())
    assert engine.poll() == list(batch.copies)


def closed():
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST)
    pool.close()
    return pool


def abstract():
    return jax.eval_shape(lambda pool: pool, jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST))


def copied():
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST)
    cache, ids = jaxkv.DeviceCache.create(SPEC, num_pages=4), jnp.array([0])
    return jax.jit(jaxkv.store_pages)(pool, cache, ids, ids)


def with_short_rows():
    spec = jaxkv.KVCacheSpec(num_layers=2, page_size=4, num_kv_heads=1, head_dim=2, dtype=np.int8)
    return jaxkv.HostPool.create(spec, num_pages=NUM_HOST, layout="page_first")


@pytest.mark.parametrize("make", [closed, abstract, copied, with_short_rows, lambda: NUM_HOST])
def test_pools_whose_stores_are_not_checked(make: Any):
    pool = make()
    assert store_check(pool) is None
    assert jaxkv.OffloadEngine(pool).manager.num_pages == NUM_HOST


def test_pages_that_a_step_leaves_out():
    pool = jaxkv.HostPool.create(SPEC, num_pages=NUM_HOST)
    engine, batch = queued(pool)
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    cache = jaxkv.DeviceCache.create(SPEC, num_pages=4)
    pool = store(pool, cache, batch.host_pages[:1], batch.device_pages[:1])
    jax.block_until_ready(pool)
    engine.issue(batch, jnp.zeros(1).block_until_ready())
    assert_rejected(engine.poll, RuntimeError, "host pages [1]", "check_errors")
