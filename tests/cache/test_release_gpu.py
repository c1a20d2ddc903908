"""Pools that are released while other threads capture CUDA graphs, or while loads are in flight."""

import threading
from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime import native
from tests.util.slow_streams import slow_input, slow_zero
from tests.util.transfer_cases import as_ids, distinct_ids, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Some donated buffers")]

PROGRAMS, RUNS = 12, 4  # XLA captures a program in one of its first runs
OPS = 8  # well above the number of kernels from which XLA captures a command buffer


def captured_step(number: int):
    """A new program, whose kernels XLA captures."""

    @partial(jax.jit, donate_argnums=(1,))
    def step(pool, cache, ids):
        for _ in range(OPS):
            cache = jaxkv.load_pages(pool, cache, *ids, implementation="kernel")
            cache = jax.tree.map(lambda buffer: buffer + np.int8(number), cache)
        return cache

    return step


@pytest.mark.parametrize("release", ["close", "drop"])
def test_pools_are_released_beside_a_capture(release):
    """Each release waits for the device; cudaDeviceSynchronize would invalidate the capture."""
    case = make_case("page_first_direct", dtype="int8")
    pool, ids = case.pool(), [as_ids(side, None) for side in distinct_ids(case, 4)]
    ended, released, errors = threading.Event(), 0, []

    def release_pools():
        nonlocal released
        try:
            while not ended.is_set():
                other = case.pool()
                if release == "close":
                    other.close()
                del other
                native.extension().wait_for_frees()
                released += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=release_pools)
    thread.start()
    try:
        for number in range(PROGRAMS):
            step = captured_step(number)
            for _ in range(RUNS):
                jax.block_until_ready(step(pool, case.cache(), ids))
    finally:
        ended.set()
        thread.join()
    assert not errors and released > 0
    jaxkv.check_errors()


def test_dropped_pool_is_freed_after_its_loads():
    case = make_case("page_first_direct", dtype="int8")
    numpy_ids = distinct_ids(case, 4)
    ids = [as_ids(side, None) for side in numpy_ids]

    @jax.jit
    def step(pool, cache, x, ids):
        zero = slow_zero(x).astype("int8")
        cache = jax.tree.map(lambda buffer: buffer + zero, cache)
        return jaxkv.load_pages(pool, cache, *ids, implementation="kernel")

    cache, x = case.cache(), slow_input()
    jax.block_until_ready(step(case.pool(), cache, x, ids))
    pool = case.pool()
    behind = step(pool, cache, x, ids)
    del pool
    assert not behind.layers[0][0].is_ready()
    native.extension().wait_for_frees()
    want = case.expected("load", *numpy_ids)["device"]
    for layer, arrays in zip(behind.layers, want, strict=True):
        for got, expected in zip(layer, arrays, strict=True):
            np.testing.assert_array_equal(got, expected)
    jaxkv.check_errors()
