"""`jaxkv.DeviceCache`: placement of new pages, and rejected arguments."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.layout_reference import assert_same_bytes, spec_of
from tests.util.transfer_cases import assert_rejected


@pytest.mark.parametrize("kind, halves", [("mha", 2), ("mla", 1)])
def test_new_cache_is_zero_in_separate_arrays(kind, halves):
    spec = spec_of(kind)
    cache = jaxkv.DeviceCache.create(spec, num_pages=5)
    assert cache.num_pages == 5
    assert [len(arrays) for arrays in cache.layers] == [halves] * spec.num_layers
    for array in jax.tree.leaves(cache):
        assert_same_bytes(array, np.zeros((5, *spec.block_shape), spec.dtype), "new cache")


def test_new_cache_is_committed_to_its_device():
    """Like a pool: the output of a program causes no recompilation of the next one."""
    cache = jaxkv.DeviceCache.create(spec_of(), num_pages=2)
    assert all(array.committed for array in jax.tree.leaves(cache))


@pytest.mark.parametrize("num_pages", [0, -1])
def test_cache_without_pages_is_rejected(num_pages):
    make = partial(jaxkv.DeviceCache.create, spec_of(), num_pages=num_pages)
    assert_rejected(make, ValueError, "num_pages", str(num_pages))


@pytest.mark.parametrize("num_pages", [2**31, 2**47, 2**70])
def test_num_pages_beyond_int32_raises(num_pages):
    spec = jaxkv.KVCacheSpec(
        num_layers=1, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
    )
    for create in (jaxkv.DeviceCache.create, jaxkv.HostPool.create):
        with pytest.raises(ValueError, match=rf"num_pages .*2147483647\], got {num_pages}"):
            create(spec, num_pages=num_pages)


def test_array_beyond_the_address_space_raises():
    spec = jaxkv.KVCacheSpec(
        num_layers=1, page_size=2**20, num_kv_heads=2**10, head_dim=2**20, dtype=jnp.bfloat16
    )
    with pytest.raises(ValueError, match=r"shape \[2048, .*\], the limit is 2\^60 - 1"):
        jaxkv.DeviceCache.create(spec, num_pages=2048)
