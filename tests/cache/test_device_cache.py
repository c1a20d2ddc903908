"""`jaxkv.DeviceCache`: placement of new pages, and rejected arguments."""

from functools import partial

import jax
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
