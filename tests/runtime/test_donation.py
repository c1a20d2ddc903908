"""Donated arrays of one shape, one in HBM and one in pinned host memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv

SHAPE, IDS = (7, 2), ([0, 1], [2, 3])


def arrays() -> tuple[jax.Array, jax.Array]:
    return jnp.ones(SHAPE), jaxkv.pinned_zeros(SHAPE, jnp.float32)


def written() -> np.ndarray:
    expected = np.zeros(SHAPE, np.float32)
    expected[[2, 3]] = 1
    return expected


def kinds(*results: jax.Array) -> list[str]:
    """Memory kinds; device memory has several names on CPUs."""
    default = jax.devices()[0].default_memory().kind
    return ["device" if (kind := r.sharding.memory_kind) == default else str(kind) for r in results]


def waited(hbm: jax.Array, host: jax.Array) -> Any:
    swap = jaxkv.start_swap(hbm, host, *IDS)
    return swap.wait(), swap.src


def swapped(hbm: jax.Array, host: jax.Array) -> Any:
    return jaxkv.swap_blocks(hbm, host, *IDS), hbm


@pytest.mark.parametrize("step", [waited, swapped])
def test_either_order_of_the_results(step: Callable[..., Any]):
    for first in (0, 1):
        hbm, host = arrays()
        results = jax.jit(lambda *both, i=first: step(*both)[:: 1 - 2 * i], donate_argnums=(0, 1))(
            hbm, host
        )
        dst, src = results[:: 1 - 2 * first]
        assert kinds(dst, src) == ["pinned_host", "device"]
        np.testing.assert_array_equal(dst, written())
        np.testing.assert_array_equal(src, 1)
        assert host.is_deleted()  # reused for the result


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_wait_of_another_program():
    hbm, host = arrays()
    start = jax.jit(jaxkv.start_swap, donate_argnames=("src", "dst"))
    dst = jax.jit(lambda swap: swap.wait(), donate_argnums=0)(
        start(hbm, host, *map(jnp.array, IDS))
    )
    assert kinds(dst) == ["pinned_host"]
    np.testing.assert_array_equal(dst, written())


def store_and_load(cache: jax.Array, pool: jaxkv.HostPool) -> Any:
    pool = jaxkv.store_pages(pool, cache, *IDS)
    return pool, jaxkv.load_pages(pool, cache, *IDS)


def start_and_wait(cache: jax.Array, pool: jaxkv.HostPool) -> Any:
    storing = jaxkv.start_store(pool, cache, *IDS)
    return storing.pool, storing.cache


@pytest.mark.parametrize("step", [store_and_load, start_and_wait])
def test_pool_and_cache(step: Callable[..., Any]):
    cache = jnp.arange(3 * 8 * 64, dtype=jnp.uint8).reshape(3, 8, 64)
    expected = np.asarray(cache)
    spec = jaxkv.ArrayCacheSpec.from_arrays(cache, stacked=True)
    pool = jaxkv.HostPool.create(spec, num_pages=8, layout="layer_first")
    assert pool.data.shape == cache.shape
    pool, cache = jax.jit(step, donate_argnums=(0, 1))(cache, pool)
    assert kinds(pool.data, cache) == ["pinned_host", "device"]
    np.testing.assert_array_equal(np.asarray(pool.data)[:, [0, 1]], expected[:, [2, 3]])
    np.testing.assert_array_equal(cache, expected)
    pool.close()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("to_host", [True, False])
def test_one_result_for_two_donated_arrays(to_host: bool):
    """JAX would reuse the memory of the other one."""
    copy = jax.jit(lambda src, dst: jaxkv.swap_blocks(src, dst, *IDS), donate_argnums=(0, 1))
    both = arrays() if to_host else arrays()[::-1]
    with pytest.raises(ValueError, match=r"argument 0 of .* is donated, but no result"):
        copy(*both)
    assert not any(array.is_deleted() for array in both)


def test_sharded_arrays():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, P(None, "x"))
    hbm = jax.device_put(jnp.ones(SHAPE), sharding)
    host = jax.device_put(np.zeros(SHAPE, np.float32), sharding.with_memory_kind("pinned_host"))

    def step(hbm: jax.Array, host: jax.Array) -> Any:
        copy = jax.shard_map(
            lambda src, dst: jaxkv.swap_blocks(src, dst, *IDS),
            mesh=mesh,
            in_specs=P(None, "x"),
            out_specs=P(None, "x"),
            check_vma=False,
        )
        return copy(hbm, host), hbm

    dst, src = jax.jit(step, donate_argnums=(0, 1))(hbm, host)
    assert kinds(dst, src) == ["pinned_host", "device"]
    np.testing.assert_array_equal(dst, written())
    np.testing.assert_array_equal(src, 1)
